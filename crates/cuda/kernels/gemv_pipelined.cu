// GEMV: products of up to four matrices with few activation rows (decoding), through the pipeline of
// gemv_pipelined.cuh.
#if __CUDA_ARCH__ >= 900

template <bool CONDITION, class A, class B>
struct Conditional {
    typedef A Type;
};
template <class A, class B>
struct Conditional<false, A, B> {
    typedef B Type;
};
template <int M, int N, int MAX_ROWS>
struct DensePipeline {
    typedef typename Conditional<USE_BULK_COPY, GlobalActivations, SmemActivations<MAX_ROWS>>::Type Loader;
    typedef typename Conditional<USE_BULK_COPY, BulkCopyPipeline<M, MatrixGroup, N, Loader, PIPELINE_BYTES>,
                                 CpAsyncPipeline<M, MatrixGroup, N, Loader, PIPELINE_BYTES>>::Type Type;
};
// 8 N activation rows, of which MAX_ROWS exist at most.
template <int N, int MAX_ROWS>
DEVICE void gemv_pipelined(const MatrixGroup &m, const Activations &x, int n_rows, int k_tiles, int tiles_per_slice,
                           int row_tiles) {
    extern __shared__ __align__(128) u8 smem[];
    constexpr int M = STAGE_ROW_TILES; // of a group, as `stage_row_tiles` of src/matmul.rs chooses
    // A warp stores the results of a whole group before it adds any, so each needs a stage.
    static_assert(M * N <= REDUCTION_STAGES, "room for a group's results");
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int base = blockIdx.y * N * 8, begin = warp * tiles_per_slice, length = min(tiles_per_slice, k_tiles - begin);
    __shared__ u64 full[REDUCTION_STAGES], empty[REDUCTION_STAGES];
    const SliceReduction reduction = {(float *) (smem + SLICES * PIPELINE_BYTES), full, empty};
    init_barriers(reduction);
    const int at = (int) ((u64) row_tiles * blockIdx.x / gridDim.x);
    const int stop = (int) ((u64) row_tiles * (blockIdx.x + 1) / gridDim.x);
    typename DensePipeline<M, N, MAX_ROWS>::Type pipeline(
        {m, M, at, stop, k_tiles, begin, length}, {x, lane, base, n_rows, begin},
        {x, lane, base + 8 * (N - 1), n_rows, begin}, smem + warp * PIPELINE_BYTES, lane);
    pdl_launch();
    pipeline.prologue();
    auto scales_of = [&](const TileGroup &group) {
        const u8 *w = m.w[0];
        int rows = m.rows[0];
#pragma unroll
        for (int i = 1; i < 4; i++)
            if (group.matrix == i) w = m.w[i], rows = m.rows[i];
        return row_tile_scales(w, rows, k_tiles) + group.row_tile;
    };
    // Scales of row tiles: 8 lie in a sector of L2.
    if (warp == 1 && at + lane * 8 < stop) prefetch_l2(scales_of(tile_group_at(m, M, at + lane * 8, stop, k_tiles)));
    __syncthreads(); // the barriers are there
    gemv_mainloop<N>(m, pipeline, reduction, at, stop, k_tiles, length,
                     GemvProblem{[&](const TileGroup &group, const float *&scales) {
                                     scales = scales_of(group);
                                     return n_rows - base;
                                 },
                                 [&](int n, int k) { return pipeline.fragment(n, k); },
                                 [&](int n) { return pipeline.slice_scale(n); },
                                 [&](const TileGroup &group) {
                                     float *y = m.y[0];
                                     int rows = m.rows[0];
#pragma unroll
                                     for (int i = 1; i < 4; i++)
                                         if (group.matrix == i) y = m.y[i], rows = m.rows[i];
                                     return [=](int row, int column, float v) {
                                         const int to = base + column;
                                         if (row < rows && to < n_rows) y[(u64) to * rows + row] = v;
                                     };
                                 }},
                     [&]() { pipeline.prologue_activations([]() { pdl_wait(); }); });
}
// gemv_pipelined_R: at most R activation rows, or any number of blocks of 16.
#define GEMV_PIPELINED(N, MAX_ROWS, R)                                                                                 \
    KERNEL __launch_bounds__(SLICES * 32, SLICES > 8 ? 1 : 2) gemv_pipelined_##R(                                      \
        MatrixGroup m, Activations x, int n_rows, int k_tiles, int tiles_per_slice, int row_tiles) {                   \
        gemv_pipelined<N, MAX_ROWS>(m, x, n_rows, k_tiles, tiles_per_slice, row_tiles);                                \
    }
GEMV_PIPELINED(1, 3, 3)
GEMV_PIPELINED(1, 8, 8)
#if STAGE_ROW_TILES <= 2 // src/matmul.rs asks for no more with so many rows
GEMV_PIPELINED(2, 8, 16)
#endif
#endif
