// Epilogue of products whose slices of K are the warps of a block: slices meet in shared memory.

// Adds the slices of M * N accumulators, from the left, and stores the results of row tiles from `row_tile` on.
// `row_of(i, row)` gives the row of y for activation row i, false if there is none.
template <int M, int N, class RowOf>
DEVICE void add_slices(float (&accumulators)[M][N][4], float *smem, int slices, const float *scales, float *y, int rows,
                       int row_tile, RowOf row_of) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) smem[(((warp * M + m) * N + n) * 4 + i) * 32 + lane] = accumulators[m][n][i];
    __syncthreads();
    for (int at = threadIdx.x; at < M * N * 128; at += blockDim.x) {
        float v = smem[at];
        for (int s = 1; s < slices; s++) v += smem[s * M * N * 128 + at];
        const int l = at & 31, i = at >> 5 & 3, n = at >> 7 & (N - 1), m = at / (N * 128);
        const int row = (row_tile + m) * 16 + (l >> 2) + (i >> 1) * 8;
        int to;
        if (row < rows && row_of(n * 8 + (l & 3) * 2 + (i & 1), to)) {
            y[(u64) to * rows + row] = v * scales[row >> 4];
        }
    }
}
