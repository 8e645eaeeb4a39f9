// Products of f32 weights: a warp an output, on the cores. The sum: 32 partial
// sums, lane l over columns l, l + 32, …, then a tree.
__device__ __forceinline__ float dot(const float *w, const float *x, int cols) {
    float sum = 0.0f;
    for (int c = threadIdx.x & 31; c < cols; c += 32) sum = fmaf(w[c], x[c], sum);
    return warp_sum(sum);
}
// Block (i, r): outputs 8 i .. 8 i + 7 of activation row r; `ids` null: all rows.
KERNEL __launch_bounds__(256) product(const float *w, const float *x, const u32 *ids, float *y, int rows, int cols) {
    in_order();
    u64 r = blockIdx.y;
    int i = blockIdx.x * 8 + (threadIdx.x >> 5);
    if (i >= rows) return;
    u64 row = ids ? ids[r * rows + i] : i;
    float v = dot(w + row * cols, x + r * cols, cols);
    if ((threadIdx.x & 31) == 0) y[r * rows + i] = v;
}
KERNEL __launch_bounds__(256) product_experts(const u64 *table, const float *x, const u32 *lists, const u32 *pairs, float *y, int top_k, int by_pair, int rows, int cols) {
    in_order();
    if (blockIdx.y >= lists[0]) return;
    const u32 *list = lists + 1 + 3 * blockIdx.y;
    const float *w = (const float *) table[list[0]];
    int i = blockIdx.x * 8 + (threadIdx.x >> 5);
    if (i >= rows) return;
    for (u32 p = list[1]; p < list[2]; p++) {
        u32 pair = pairs[p];
        float v = dot(w + (u64) i * cols, x + (u64) (by_pair ? pair : pair / top_k) * cols, cols);
        if ((threadIdx.x & 31) == 0) y[(u64) pair * rows + i] = v;
    }
}
KERNEL embed(const float *w, const u32 *tokens, Batch batch, float *y, int cols, float scale, u64 n) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 row = (u32) (i / cols);
    y[i] = w[(u64) (tokens ? tokens[row] : batch.token(row)) * cols + i % cols] * scale;
}
