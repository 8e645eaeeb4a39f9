// GEMM by warpgroups (wgmma), for compute capability 9.0 alone: the pipeline and the mainloop, which products of
// prompts and of experts share (gemm_wgmma.cu). Sums are those of gemm.cu. weight_tile.cuh and wgmma.cuh go before
// this.
//
//                 global                    shared: STAGES stages               registers
//   producer warp  packed weights x8  -TMA-> [8 packed tiles]           -load--> Tile -dequantize-> A +
//                  swizzled           -TMA-> [ROWS rows, 64 columns,   --------------------------> B + wgmma
//                  activations               slice scales]                                              |
//                                     full/empty mbarriers a stage               end of a slice: totals +-> y
//
// A persistent block takes BLOCK_TILES row tiles by ROWS activation rows at a time. Two consumer warpgroups multiply,
// four row tiles each: a warp dequantizes one tile into the A fragments that the tensor cores take from registers;
// while one warpgroup multiplies, the other dequantizes. A producer warp of a third warpgroup keeps the stages full. B
// comes from shared memory, 16 columns an instruction in the order in which lanes hold weights, so `swizzle_row`
// permutes columns beforehand, and brings them to their slice's scale.

#define BLOCK_TILES GEMM_TILES
#define GROUP_BLOCKS 8                       // blocks of weight rows that go through the activations together
constexpr int ACTIVATION_BYTES = ROWS * 132; // of a stage: values, and a scale a row
constexpr int STAGE_BYTES = (ACTIVATION_BYTES + BLOCK_TILES * TILE_BYTES + 1023) / 1024 * 1024;

// Stores an activation row as wgmma takes it: for ROWS rows and a tile, lines of 128 bytes whose 16-byte pieces are
// permuted against bank conflicts (the hardware's 128-byte swizzle); then the scales of the rows' slices, in the order
// in which lanes hold four columns of results. Block (tile, ROWS rows), two threads a row; `row` is the thread's,
// negative where there is none.
DEVICE void swizzle_row(const Activations &x, u8 *to, int row, int tiles_per_slice) {
    const int k_tiles = gridDim.x, k = blockIdx.x, at = threadIdx.x >> 1, h = threadIdx.x & 1;
    to += ((u64) blockIdx.y * k_tiles + k) * ACTIVATION_BYTES;
    u32 v[4][4] = {};
    float scale = 0.0f;
    if (row >= 0) {
        const float *scales = x.scales + (u64) row * k_tiles;
        scale = slice_scale_around(k, tiles_per_slice, k_tiles, [&](int i) { return scales[i]; });
        const u32 rescale = rescale_f16x2(scales[k], inverse_pow2(scale));
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const uint4 from = *(const uint4 *) (x.values + (u64) row * x.stride + k * 64 + h * 32 + t * 8);
            v[0][t] = hmul2(from.x, rescale);
            v[1][t] = hmul2(from.y, rescale);
            v[2][t] = hmul2(from.z, rescale);
            v[3][t] = hmul2(from.w, rescale);
        }
    }
    uint4 *line = (uint4 *) (to + at * 128);
#pragma unroll
    for (int i = 0; i < 4; i++) line[h * 4 + i ^ at & 7] = make_uint4(v[i][0], v[i][1], v[i][2], v[i][3]);
    if (h == 0)
        ((float *) (to + ROWS * 128))[(at >> 4) * 16 + (at >> 1 & 3) * 4 + (at >> 3 & 1) * 2 + (at & 1)] = scale;
}

// The stage whose turn it is.
struct PipelineState {
    int stage = 0;
    u32 phase = 0;
    DEVICE void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase++;
        }
    }
    // The work item that the stage belongs to: computed, for want of registers.
    DEVICE int item(int k_tiles) const { return (int) (blockIdx.x + (phase * STAGES + stage) / k_tiles * gridDim.x); }
};
// What a block works on: row tiles from `tile` on, and block `block` of ROWS activation rows, `count` of which exist.
struct WorkItem {
    const u8 *w;
    float *y; // of the block's first row
    int rows, tile, block, count;
    const u32 *pairs; // rows of y, if they do not follow each other
};
// The shared memory descriptor of a stage's activations, 16 columns from number 16 j on: 128-byte swizzle, 1024 bytes
// from eight rows to the next eight.
DEVICE u64 activation_descriptor(const u8 *stage, int j) {
    return (u64) ((smem_address(stage) + j * 32 & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// `find(item)` gives the WorkItem of a number; SCATTER: results go to the rows `pairs`.
template <bool SCATTER, class Find>
DEVICE void gemm_mainloop(Find find, const u8 *x, int k_tiles, int tiles_per_slice, int items) {
    constexpr int N = ROWS / 8;
    extern __shared__ u8 smem[];
    __shared__ u64 full[STAGES], empty[STAGES];
    u8 *stages = smem + (1024 - (smem_address(smem) & 1023) & 1023);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(smem_address(full + s), 1);
            mbarrier_init(smem_address(empty + s), BLOCK_TILES);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    PipelineState state;
    if (warp >= BLOCK_TILES) {
        // Producer.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        constexpr int COPIES = BLOCK_TILES / INTERLEAVE; // of weights, a lane each
        for (int item = warp == BLOCK_TILES ? blockIdx.x : items; item < items; item += gridDim.x) {
            const WorkItem v = find(item);
            const int copies = (v.rows + 16 * INTERLEAVE - 1) / (16 * INTERLEAVE); // in the whole matrix
            const u8 *w = v.w + (u64) min(v.tile / INTERLEAVE + min(lane, COPIES - 1), copies - 1) * k_tiles * K_STRIDE;
            const u8 *from = x + (u64) v.block * k_tiles * ACTIVATION_BYTES;
#pragma unroll 1
            for (int k = 0; k < k_tiles; k++, state.advance()) {
                const u32 to = smem_address(stages) + state.stage * STAGE_BYTES;
                const u32 barrier = smem_address(full + state.stage);
                mbarrier_wait(smem_address(empty + state.stage), state.phase + 1);
                if (lane == 0) mbarrier_expect_tx(barrier, ACTIVATION_BYTES + BLOCK_TILES * TILE_BYTES);
                __syncwarp();
                if (lane < COPIES)
                    bulk_copy(to + ACTIVATION_BYTES + lane * K_STRIDE, w + (u64) k * K_STRIDE, K_STRIDE, barrier);
                if (lane == COPIES) bulk_copy(to, from + (u64) k * ACTIVATION_BYTES, ACTIVATION_BYTES, barrier);
            }
        }
    } else {
        // Consumers.
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        float accumulators[N][4], totals[N][4];
        while (state.item(k_tiles) < items) {
            int left = tiles_per_slice;
#pragma unroll 1
            for (int k = 0; k < k_tiles; k++, state.advance()) {
                const u8 *stage = stages + state.stage * STAGE_BYTES;
                mbarrier_wait(smem_address(full + state.stage), state.phase);
                const Tile tile = Tile::load<true>(stage + ACTIVATION_BYTES + warp * TILE_BYTES, lane);
                u32 a[4][4];
#pragma unroll
                for (int j = 0; j < 4; j++) tile.dequantize(j, a[j]);
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; j++)
                    wgmma(accumulators, a[j], activation_descriptor(stage, j), j > 0 || left < tiles_per_slice);
                wgmma_wait(accumulators);
                // The end of a slice.
                if (--left == 0 || k + 1 == k_tiles) {
                    left = tiles_per_slice;
                    const float4 *scales = (const float4 *) (stage + ROWS * 128) + t;
#pragma unroll
                    for (int q = 0; q < N / 2; q++) {
                        const float4 s = scales[q * 4];
                        const float scale[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
                        for (int i = 0; i < 8; i++) {
                            const int n = 2 * q + (i >> 2);
                            const float v = accumulators[n][i & 3] * scale[(i >> 2) * 2 + (i & 1)];
                            totals[n][i & 3] = k < tiles_per_slice ? v : totals[n][i & 3] + v;
                        }
                    }
                }
                __syncwarp();
                if (lane == 0) mbarrier_arrive(smem_address(empty + state.stage));
            }
            // Epilogue.
            const WorkItem v = find(state.item(k_tiles) - gridDim.x);
            const int column = 2 * t, count = v.count - column, tile = v.tile + warp;
            const float scale = tile * 16 < v.rows ? row_tile_scales(v.w, v.rows, k_tiles)[tile] : 0.0f;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = tile * 16 + (lane >> 2) + i * 8;
                if (row >= v.rows) continue;
                float *y = v.y + row;
                if (!SCATTER) y += (u64) column * v.rows;
#pragma unroll
                for (int n = 0; n < 2 * N; n++) {
                    const int next = n / 2 * 8 + n % 2;
                    if (next < count)
                        y[(u64) (SCATTER ? v.pairs[column + next] : next) * v.rows] =
                            totals[n / 2][i * 2 + n % 2] * scale;
                }
            }
        }
    }
}
