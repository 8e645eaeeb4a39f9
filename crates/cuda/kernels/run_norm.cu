// RMS norms of many narrow runs, such as heads, fused with a gate: a warp a run. common.cuh, math.cuh, mbarrier.cuh and
// rows.cuh go before this.
//
//   global --> registers: two neighboring columns a lane of each of a run's RUN_TILES tiles --> y in f32, Activations

// `rms_norm_glu` of row_norm.cu with its bits.
KERNEL __launch_bounds__(256) rms_norm_glu_runs(const float *x, const float *weight, float *n, const float *gate,
                                                float *y, float eps, int f, Activations h, u64 runs) {
    constexpr int TILES = RUN_TILES;
    pdl_launch();
    const int lane = threadIdx.x & 31;
    const u64 run = (u64) blockIdx.x * 8 + (threadIdx.x >> 5), at = run * (TILES * 64) + 2 * lane;
    if (run >= runs) return;
    float2 v[TILES], w[TILES], g[TILES];
#pragma unroll
    for (int i = 0; i < TILES; i++)
        w[i] = weight ? *(const float2 *) (weight + i * 64 + 2 * lane) : make_float2(1.0f, 1.0f);
    pdl_wait();
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        v[i] = *(const float2 *) (x + at + i * 64);
        g[i] = *(const float2 *) (gate + at + i * 64);
    }
    const int runs_of_row = h.stride / (TILES * 64);
    const u64 row = run / runs_of_row;
    store_gated_norm(v, w, g, eps, f, n ? n + at : nullptr, y ? y + at : nullptr, h, row,
                     (int) (run - row * runs_of_row) * TILES);
}
