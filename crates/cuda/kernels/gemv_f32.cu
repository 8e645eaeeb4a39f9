// Products and lookups of f32 weights, which are not packed: a warp an output, on the CUDA cores. Row-major weights,
// read once from global memory. The sum: 32 partial sums, lane l over the columns l, l + 32, …, then a tree.

DEVICE float dot(const float *w, const float *x, int cols) {
    float sum = 0.0f;
    for (int c = threadIdx.x & 31; c < cols; c += 32) sum = fmaf(w[c], x[c], sum);
    return warp_sum(sum);
}
// Block (i, r): outputs 8 i .. 8 i + 7 of activation row r. `ids`: rows of the weights for each activation row; null:
// all of them.
KERNEL __launch_bounds__(256) gemv_f32(const float *w, const float *x, const u32 *ids, float *y, int rows, int cols) {
    pdl_sync();
    u64 r = blockIdx.y;
    int i = blockIdx.x * 8 + (threadIdx.x >> 5);
    if (i >= rows) return;
    u64 row = ids ? ids[r * rows + i] : i;
    float v = dot(w + row * cols, x + r * cols, cols);
    if ((threadIdx.x & 31) == 0) y[r * rows + i] = v;
}
// Experts' matrices `table`, whose pairs moe.cuh describes: block (i, expert in use). A pair reads activation row
// `by_pair ? pair : pair / top_k` and writes row `pair`.
KERNEL __launch_bounds__(256) moe_gemv_f32(const u64 *table, const float *x, const u32 *lists, const u32 *pairs,
                                           float *y, int top_k, int by_pair, int rows, int cols) {
    pdl_sync();
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
// Rows of a table. `tokens` null: the step's own.
KERNEL embed_f32(const float *w, const u32 *tokens, Batch batch, float *y, int cols, float scale, u64 n) {
    pdl_sync();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 row = (u32) (i / cols);
    y[i] = w[(u64) known_token(tokens ? tokens[row] : batch.token(row)) * cols + i % cols] * scale;
}
