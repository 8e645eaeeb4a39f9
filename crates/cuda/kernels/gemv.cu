// GEMV: products with few activation rows (decoding), straight from global memory to registers, for every
// architecture. gemv_pipelined.cu does the same faster where there is room in shared memory. weight_tile.cuh goes
// before this, gemv_epilogue.cuh too.
//
//   global                     registers                                                       shared       global
//   packed weights -load--> Tile -dequantize-> A +
//   activations    -load--> ActivationFragment B + mma --> accumulators -- one slice a warp --> add slices --> y
//
// A block takes M row tiles by 8 N activation rows; K is cut among its warps, a slice each (sliced-K).

DEVICE void prefetch_slice(const u8 *w, int row_tile, int count, int k_tiles, int begin, int end) {
#if __CUDA_ARCH__ >= 900
    const int lane = threadIdx.x & 31;
    if (lane < count && (row_tile + lane) % INTERLEAVE == 0 && begin < end)
        bulk_prefetch_l2(w + row_tile_offset(row_tile + lane, k_tiles) + begin * K_STRIDE, (end - begin) * K_STRIDE);
#endif
}
template <int M, int N>
DEVICE void gemv(const MatrixGroup &group, const Activations &x, int n_rows, int k_tiles, int tiles_per_slice,
                 float *smem) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
    int which = 0;
#pragma unroll
    for (int i = 1; i < 4; i++) which += (int) blockIdx.x >= group.first_block[i];
    const u8 *w = group.w[0];
    float *y = group.y[0];
    int rows = group.rows[0], first = group.first_block[0];
#pragma unroll
    for (int i = 1; i < 4; i++)
        if (which == i) w = group.w[i], y = group.y[i], rows = group.rows[i], first = group.first_block[i];
    const int row_tile = ((int) blockIdx.x - first) * M, base = blockIdx.y * N * 8;
    prefetch_l2(row_tile_scales(w, rows, k_tiles) + row_tile);
    const int begin = warp * tiles_per_slice, end = min(begin + tiles_per_slice, k_tiles);
    const u8 *slice = w + row_tile_offset(row_tile, k_tiles) + begin * K_STRIDE;
    const int present = (rows + 15) / 16 - row_tile; // row tiles from here on
    prefetch_slice(w, row_tile, min(M, present), k_tiles, begin, end);
    pdl_sync();
    float accumulators[M][N][4];
    clear(accumulators);
    ActivationRow x_rows[N];
#pragma unroll
    for (int n = 0; n < N; n++)
        x_rows[n] = ActivationRow(x, base + n * 8 + g < n_rows ? base + n * 8 + g : -1, begin, end);
#pragma unroll UNROLL
    for (int k = begin; k < end; k++) {
        Tile tiles[M];
#pragma unroll
        for (int m = 0; m < M; m++)
            tiles[m] = Tile::load(
                slice + (m < present ? m : 0) * row_tile_stride(k_tiles) + (u64) (k - begin) * K_STRIDE, lane);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const ActivationFragment b = x_rows[n].load(k);
#pragma unroll
            for (int m = 0; m < M; m++) mma_tile(accumulators[m][n], tiles[m], b);
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) apply_slice_scale(accumulators, n, x_rows[n].scale);
    add_slices<M, N>(accumulators, smem, blockDim.x >> 5, row_tile_scales(w, rows, k_tiles), y, rows, row_tile,
                     [&](int i, int &to) {
                         to = base + i;
                         return to < n_rows;
                     });
}
// gemv_MxR: M row tiles by R activation rows a block.
#define GEMV(M, R)                                                                                                     \
    KERNEL __launch_bounds__(SLICES * 32)                                                                              \
        gemv_##M##x##R(MatrixGroup group, Activations x, int n_rows, int k_tiles, int tiles_per_slice) {               \
        __shared__ float smem[SLICES * M * R / 8 * 128];                                                               \
        gemv<M, R / 8>(group, x, n_rows, k_tiles, tiles_per_slice, smem);                                              \
    }
GEMV(1, 8)
GEMV(2, 8)
GEMV(1, 16)

// Products with some rows of one matrix, each activation row with its own: block (i, r) takes the rows `ids` 16 i .. of
// activation row r.
KERNEL __launch_bounds__(SLICES * 32, 1) gemv_gather(const u8 *w, float *y, Activations x, const u32 *ids, int n_ids,
                                                     int rows, int k_tiles, int tiles_per_slice) {
    __shared__ float smem[SLICES * 128];
    pdl_sync();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
    const int first = blockIdx.x * 16, row = blockIdx.y;
    ids += (u64) row * n_ids;
    const u32 id[2] = {ids[min(first + g, n_ids - 1)], ids[min(first + g + 8, n_ids - 1)]};
    float accumulators[1][1][4] = {{{0, 0, 0, 0}}};
    const int begin = warp * tiles_per_slice, end = min(begin + tiles_per_slice, k_tiles);
    const ActivationRow own(x, g == 0 ? row : -1, begin, end);
    for (int k = begin; k < end; k++) {
        Tile gathered;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // The lane that holds the row in its own tile.
            const u8 *from = w + row_tile_offset(id[half] >> 4, k_tiles) + (u64) k * K_STRIDE;
            const int in = id[half] & 15;
            Tile one = Tile::load(from, (in & 7) * 4 + (lane & 3));
            gathered.set_row(half, one, in >> 3);
        }
        mma_tile(accumulators[0][0], gathered, own.load(k));
    }
    apply_slice_scale(accumulators, 0, own.scale);
    const float *scales = row_tile_scales(w, rows, k_tiles);
    add_slices<1, 1>(accumulators, smem, blockDim.x >> 5, nullptr, y, n_ids, 0, [&](int, int &) { return false; });
    // One column of results, each with the scale of its own row tile.
    for (int at = threadIdx.x; at < 16; at += blockDim.x) {
        const int i = (at >> 3) * 2, l = (at & 7) * 4;
        float v = smem[i * 32 + l];
        for (int s = 1; s < (int) (blockDim.x >> 5); s++) v += smem[s * 128 + i * 32 + l];
        if (first + at < n_ids) {
            y[(u64) row * n_ids + first + at] = v * scales[ids[first + at] >> 4];
        }
    }
}
