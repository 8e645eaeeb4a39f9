// GEMM by warpgroups (wgmma), for compute capability 9.0 alone: the pipeline and the mainloop, which products of
// prompts and of experts share (gemm_wgmma.cu). Sums are those of gemm.cu. weight_tile.cuh and wgmma.cuh go before
// this.
//
//                 global                    shared: STAGES stages               registers
//   producers      packed weights x8  -TMA-> [8 packed tiles]           -load--> Tile -dequantize-> A +
//                  swizzled           -TMA-> [ROWS rows, 64 columns,   --------------------------> B + wgmma
//                  activations               slice scales]                                              |
//                                     full/empty mbarriers a stage               end of a slice: totals +-> y
//
// A persistent block takes BLOCK_TILES row tiles by ROWS activation rows at a time. Two consumer warpgroups multiply,
// four row tiles each: a warp dequantizes one tile, or half of one, into the A fragments that the tensor cores take
// from registers, while the products of what came before run. Four producer warps, a third warpgroup, keep the stages
// full. B comes from shared memory, 16 columns an instruction in the order in which lanes hold weights, so
// `swizzle_rows` permutes columns beforehand, and brings them to their slice's scale.
//
// With 128 rows, what bounds prompts in 4 bits is not the tensor cores but the instructions of a consumer warp between
// two products: on an H200 a stage of two tiles takes 1,200 cycles, its products alone 1,024. With 192 rows a tile that
// is dequantized has half as many products again. Registers then hold the fragments of one tile, half of which are
// dequantized while the products of the other half run.
//
// Weights are asked for before the kernel waits for its input (PDL). Consumers write only after activations have come,
// and so after the kernels before have ended.
//
// Products of few rows often have fewer blocks of row tiles than there are multiprocessors, so a work item may be one
// slice of K (split-K, SPLIT): the last warp that has the sums of a row tile in a slice adds those of all slices, in
// their order. With at most 32 rows, two blocks share a multiprocessor.

#define BLOCK_TILES GEMM_TILES
#define BLOCKS_PER_SM (ROWS == 32 ? 2 : 1)
#define CONSUMER_REGISTERS (BLOCKS_PER_SM == 2 ? 96 : 232)
// STAGE_TILES: tiles of a row tile in a stage. Few large copies are faster than many small ones.
constexpr int VALUE_BYTES = ROWS * 128, SCALE_BYTES = ROWS * 4; // of activations and a tile
constexpr int WEIGHT_BYTES = BLOCK_TILES * STAGE_TILES * TILE_BYTES;
constexpr int WEIGHTS_AT = STAGE_TILES * VALUE_BYTES, SCALES_AT = WEIGHTS_AT + WEIGHT_BYTES;
constexpr int STAGE_BYTES = (SCALES_AT + STAGE_TILES * SCALE_BYTES + 1023) / 1024 * 1024;

// Activations of a block of ROWS rows as wgmma takes them: first the values of each tile, lines of 128 bytes whose
// 16-byte pieces are permuted against bank conflicts (the hardware's 128-byte swizzle); then, tile by tile, the scales
// of the rows' slices, in the order in which lanes hold four columns of results.
template <class T>
DEVICE T *swizzled_values(T *x, int block, int k, int k_tiles) {
    return x + (u64) block * k_tiles * (VALUE_BYTES + SCALE_BYTES) + (u64) k * VALUE_BYTES;
}
template <class T>
DEVICE T *swizzled_scales(T *x, int block, int k, int k_tiles) {
    return swizzled_values(x, block, k_tiles, k_tiles) + (u64) k * SCALE_BYTES;
}
// Brings words to lanes of a quad: word i of lane t becomes word t of lane i.
DEVICE uint4 transpose_quad(uint4 v) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    const u32 a = __shfl_xor_sync(~0u, odd ? v.x : v.y, 1), b = __shfl_xor_sync(~0u, odd ? v.z : v.w, 1);
    v = odd ? make_uint4(a, v.y, b, v.w) : make_uint4(v.x, a, v.z, b);
    const u32 c = __shfl_xor_sync(~0u, high ? v.x : v.z, 2), d = __shfl_xor_sync(~0u, high ? v.y : v.w, 2);
    return high ? make_uint4(c, d, v.z, v.w) : make_uint4(v.x, v.y, c, d);
}
// Stores activation rows as `swizzled_values` and `swizzled_scales` say. Block (tile, ROWS rows), eight threads a row,
// each for ROWS_OF_THREAD rows; `row_at(i)` is the block's row number i, negative where there is none.
// STREAMS: what is stored does not fit L2, where the rows are to stay, which other blocks read again.
constexpr int ROWS_OF_THREAD = 4;
template <bool STREAMS, class F>
DEVICE void swizzle_rows(const Activations &x, u8 *to, int tiles_per_slice, F row_at) {
    const int k_tiles = gridDim.x, k = blockIdx.x, piece = threadIdx.x & 7;
    const int first = k / tiles_per_slice * tiles_per_slice, end = min(first + tiles_per_slice, k_tiles);
    uint4 v[ROWS_OF_THREAD];
    float own[ROWS_OF_THREAD], most[ROWS_OF_THREAD];
#pragma unroll
    for (int i = 0; i < ROWS_OF_THREAD; i++) {
        const int row = row_at((threadIdx.x >> 3) + i * (ROWS / ROWS_OF_THREAD));
        v[i] = make_uint4(0, 0, 0, 0);
        own[i] = most[i] = 0.0f;
        if (row < 0) continue;
        v[i] = *(const uint4 *) (x.values + (u64) row * x.stride + k * 64 + piece * 8);
        const float *scales = x.scales + (u64) row * k_tiles;
        own[i] = scales[k];
#pragma unroll 1
        for (int j = first + piece; j < end; j += 8) most[i] = larger(most[i], scales[j]);
    }
#pragma unroll
    for (int i = 0; i < ROWS_OF_THREAD; i++) {
        const int at = (threadIdx.x >> 3) + i * (ROWS / ROWS_OF_THREAD);
#pragma unroll
        for (int o = 1; o < 8; o *= 2) most[i] = larger(most[i], __shfl_xor_sync(~0u, most[i], o));
        const u32 rescale = rescale_f16x2(own[i], inverse_pow2(most[i]));
        v[i] =
            make_uint4(hmul2(v[i].x, rescale), hmul2(v[i].y, rescale), hmul2(v[i].z, rescale), hmul2(v[i].w, rescale));
        uint4 *own_piece = (uint4 *) (swizzled_values(to, blockIdx.y, k, k_tiles) + at * 128) + (piece ^ at & 7);
        const uint4 words = transpose_quad(v[i]);
        if (STREAMS) __stcs(own_piece, words);
        else *own_piece = words;
        if (piece == 0)
            ((float *) swizzled_scales(to, blockIdx.y, k,
                                       k_tiles))[(at >> 4) * 16 + (at >> 1 & 3) * 4 + (at >> 3 & 1) * 2 + (at & 1)] =
                most[i];
    }
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
    // The work item that the stage belongs to, where each has all of K: computed, for want of registers.
    DEVICE int item(int k_tiles) const {
        const int stages = (k_tiles + STAGE_TILES - 1) / STAGE_TILES;
        return (int) (blockIdx.x + (phase * STAGES + stage) / stages * gridDim.x);
    }
};
// What a block works on: row tiles from `tile` on, and block `block` of ROWS activation rows, `count` of which exist.
struct WorkItem {
    const u8 *w;
    float *y; // of the block's first row
    int rows, tile, block, count;
    const u32 *pairs; // rows of y, if they do not follow each other
    // Of an item that is one slice of K: which, or -1; and the number of its block of row tiles among those that are
    // split.
    int slice, part;
};
// Sums of single slices, until all of a row tile are there.
struct SliceSums {
    float *sums;   // [row tiles that are split, slices, 16 ROWS]
    u32 *counters; // of each row tile that is split: how many slices have been stored
    int slices;
};
// The shared memory descriptor of activations at `at`, a multiple of 1024 bytes: 128-byte swizzle, 1024 bytes from
// eight rows to the next eight. With `pieces` of 16 bytes added, that of what lies so far behind.
struct ActivationDescriptor {
    u32 low;
    DEVICE explicit ActivationDescriptor(u32 at) : low(at >> 4 | 1u << 16) {}
    DEVICE u64 operator+(u32 pieces) const { return (u64) (64u | 1u << 30) << 32 | low + pieces; }
};

// Stores a warp's sums of its row tile in one slice. The last warp that does so for the row tile adds the sums of all
// slices from the left to `totals`, and gets true.
template <int N>
DEVICE bool add_slices(const SliceSums &split, const WorkItem &v, float (&totals)[N][4]) {
    const int lane = threadIdx.x & 31, number = v.part * BLOCK_TILES + (threadIdx.x >> 5);
    float4 *sums = (float4 *) split.sums + (u64) number * split.slices * (N * 32) + lane;
#pragma unroll
    for (int n = 0; n < N; n++)
        __stcg(sums + v.slice * (N * 32) + n * 32, make_float4(totals[n][0], totals[n][1], totals[n][2], totals[n][3]));
    __threadfence();
    __syncwarp();
    u32 before = 0;
    if (lane == 0) before = atomicAdd(split.counters + number, 1u);
    if (__shfl_sync(~0u, before, 0) + 1 < (u32) split.slices) return false;
    __threadfence();
    if (lane == 0) split.counters[number] = 0;
    // Some slices at a time: each takes a round trip to L2.
    constexpr int AHEAD = 4;
#pragma unroll 1
    for (int s = 0; s < split.slices; s += AHEAD) {
        float4 v[AHEAD][N];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
#pragma unroll
            for (int n = 0; n < N; n++) v[i][n] = __ldcg(sums + min(s + i, split.slices - 1) * (N * 32) + n * 32);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (s + i >= split.slices) break;
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float sum[4] = {v[i][n].x, v[i][n].y, v[i][n].z, v[i][n].w};
#pragma unroll
                for (int c = 0; c < 4; c++) totals[n][c] = s + i == 0 ? sum[c] : totals[n][c] + sum[c];
            }
        }
    }
    return true;
}

// `find(item)` gives the WorkItem of a number; SCATTER: results go to the rows `pairs`; SPLIT: items may be one slice.
// PAIRED: blocks are clusters of two, whose items have the same activation rows; each asks for half of these, for both.
template <bool SCATTER, bool SPLIT, bool PAIRED, class Find>
DEVICE void gemm_mainloop(Find find, const u8 *x, int k_tiles, int tiles_per_slice, int items,
                          const SliceSums &split = {}) {
    constexpr int N = ROWS / 8;
    extern __shared__ u8 smem[];
    __shared__ u64 full[STAGES], empty[STAGES];
    u8 *stages = smem + (1024 - (smem_address(smem) & 1023) & 1023);
    const int lane = opaque(threadIdx.x & 31), warp = opaque(threadIdx.x >> 5);
    const u32 stages_at = opaque(smem_address(stages));
    const u32 full_at = opaque(smem_address(full)), empty_at = opaque(smem_address(empty));
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(full_at + 8 * s, 1);
            mbarrier_init(empty_at + 8 * s, (PAIRED ? 2 : 1) * BLOCK_TILES * WARP_ARRIVALS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (PAIRED) cluster_sync(); // the other block's barriers are there, too
    else __syncthreads();
    const u32 rank = PAIRED ? cluster_rank() : 0;
    PipelineState state;
    if (warp >= BLOCK_TILES) {
        // Producer.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        // Each of the four warps asks for a part of the weights, the first ones also for activations: one warp would
        // take longer to ask for all than the products do.
        constexpr int COPIES = BLOCK_TILES / INTERLEAVE / 4; // of weights, a lane each
        const int producer = warp - BLOCK_TILES;
        int ahead = 0; // stages whose weights were asked for before the activations are there
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
            const WorkItem v = find(item);
            const int copies = (v.rows + 16 * INTERLEAVE - 1) / (16 * INTERLEAVE); // in the whole matrix
            const int own = producer * COPIES + min(lane, COPIES - 1);
            const u8 *w = v.w + (u64) min(v.tile / INTERLEAVE + own, copies - 1) * k_tiles * K_STRIDE;
            int first = 0, stop = k_tiles;
            if (SPLIT && v.slice >= 0) first = v.slice * tiles_per_slice, stop = min(first + tiles_per_slice, k_tiles);
            auto produce_weights = [&](int stage, int k) {
                const u32 to = stages_at + stage * STAGE_BYTES, barrier = full_at + 8 * stage;
                const int count = STAGE_TILES == 1 ? 1 : min(STAGE_TILES, stop - k);
                if (producer == 0 && lane == 0)
                    mbarrier_expect_tx(barrier, count * (VALUE_BYTES + SCALE_BYTES + BLOCK_TILES * TILE_BYTES));
                if (lane < COPIES)
                    bulk_copy(to + WEIGHTS_AT + own * (STAGE_TILES * K_STRIDE), w + (u64) k * K_STRIDE,
                              count * K_STRIDE, barrier);
            };
            if (item == blockIdx.x) {
                for (int k = first; k < stop && ahead < STAGES; k += STAGE_TILES) produce_weights(ahead++, k);
                pdl_wait();
            }
#pragma unroll 1
            for (int k = first; k < stop; k += STAGE_TILES, state.advance()) {
                const u32 to = stages_at + state.stage * STAGE_BYTES, barrier = full_at + 8 * state.stage;
                const int count = STAGE_TILES == 1 ? 1 : min(STAGE_TILES, stop - k);
                if (ahead > 0) {
                    ahead--;
                } else {
                    mbarrier_wait(empty_at + 8 * state.stage, state.phase + 1);
                    produce_weights(state.stage, k);
                }
                auto copy = [&](u32 to, const u8 *from, int bytes) {
                    if (!PAIRED) return bulk_copy(to, from, bytes, barrier);
                    const u32 at = rank * (bytes / 2);
                    bulk_copy_multicast(to + at, from + at, bytes / 2, barrier, 3);
                };
                if (producer == 0 && lane == 0) copy(to, swizzled_values(x, v.block, k, k_tiles), count * VALUE_BYTES);
                if (producer == 1 && lane == 0)
                    copy(to + SCALES_AT, swizzled_scales(x, v.block, k, k_tiles), count * SCALE_BYTES);
            }
        }
    } else {
        // Consumers.
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        float accumulators[N][4], totals[N][4];
        for (int item = blockIdx.x; (SPLIT ? item : state.item(k_tiles)) < items; item += gridDim.x) {
            // Of experts: each lane loads its 32nd part of the pairs before the products, for they lie behind two
            // loads, one after the other.
            WorkItem expert;
            u32 pairs[(ROWS + 31) / 32];
            if (SCATTER) {
                expert = find(state.item(k_tiles));
#pragma unroll
                for (int i = 0; i < ROWS / 32; i++) pairs[i] = expert.pairs[min(lane + 32 * i, expert.count - 1)];
            }
            int first = 0, stop = k_tiles;
            if (SPLIT) {
                const int slice = find(item).slice;
                if (slice >= 0) first = slice * tiles_per_slice, stop = min(first + tiles_per_slice, k_tiles);
            }
            // Any v is -0 + v.
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int c = 0; c < 4; c++) totals[n][c] = -0.0f;
            // Adds a slice, which ends with tile `i` of a stage.
            auto add_slice = [&](const u8 *stage, int i) {
                const float4 *scales = (const float4 *) (stage + SCALES_AT + i * SCALE_BYTES) + (lane & 3);
#pragma unroll
                for (int q = 0; q < N / 2; q++) {
                    const float4 s = scales[q * 4];
                    const float scale[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
                    for (int c = 0; c < 8; c++) {
                        const int n = 2 * q + (c >> 2);
                        totals[n][c & 3] += accumulators[n][c & 3] * scale[(c >> 2) * 2 + (c & 1)];
                    }
                }
            };
            auto release = [&](u32 is_read) {
                mbarrier_arrive_warp(is_read, lane);
                if (PAIRED && (WARP_ARRIVALS == 32 || lane == 0)) mbarrier_arrive_at(is_read, rank ^ 1);
            };
            constexpr bool LOADS_HALVES = ROWS > 128 && Tile::IS_PLAIN;
            Tile packed;
            auto load = [&](const u8 *stage, int i) {
                const u8 *weights =
                    stage + WEIGHTS_AT + warp / INTERLEAVE * (STAGE_TILES * K_STRIDE) + warp % INTERLEAVE * TILE_BYTES;
                packed = Tile::load<true>(weights + i * K_STRIDE, lane);
            };
            auto begin_stage = [&] {
                mbarrier_wait(full_at + 8 * state.stage, state.phase);
                // Plain tiles have no room beside the fragments of two halves.
                if (!LOADS_HALVES) load(stages + state.stage * STAGE_BYTES, 0);
            };
            begin_stage();
#if ROWS > 128
            // Registers hold the fragments of one tile: half of them are dequantized, or loaded, while the products of
            // the other half run. A stage is released once products of the next tile have begun, a slice's last one
            // once the slice has been added.
            static_assert(STAGE_TILES == 1, "stages have one tile");
            u32 a[2][2][4];
#pragma unroll 1
            for (int k = first; k < stop;) {
                const int end = min(k + tiles_per_slice, stop);
                const u8 *stage = nullptr;
                u32 is_read = 0;
                auto multiply = [&](int half, bool adds) {
                    if (LOADS_HALVES) load(stages + state.stage * STAGE_BYTES, 0);
#pragma unroll
                    for (int j = 0; j < 2; j++) packed.dequantize(half * 2 + j, a[half][j]);
                    keep_in_registers(a[half]);
                    const ActivationDescriptor values(stages_at + state.stage * STAGE_BYTES);
                    wgmma_fence();
#pragma unroll
                    for (int j = 0; j < 2; j++)
                        wgmma(accumulators, a[half][j], values + (half * 2 + j) * 32 / 16, j > 0 || adds);
                    wgmma_commit();
                };
                auto multiply_tile = [&](bool adds) {
                    multiply(0, adds);
                    wgmma_wait<1>();
                    if (adds) {
                        keep_in_registers(a[1]);
                        release(is_read);
                    }
                    multiply(1, true);
                    stage = stages + state.stage * STAGE_BYTES;
                    is_read = empty_at + 8 * state.stage;
                    state.advance();
                    if (k + 1 < stop) begin_stage();
                    wgmma_wait<1>();
                    keep_in_registers(a[0]);
                };
                multiply_tile(false);
#pragma unroll 1
                for (k++; k < end; k++) multiply_tile(true);
                wgmma_wait(accumulators);
                keep_in_registers(a[1]);
                add_slice(stage, 0);
                release(is_read);
            }
#else
            // While the products of a tile run, the next tile is dequantized and the one after it is loaded, also from
            // the next stage where stages have several tiles.
            constexpr bool OVERLAPS = STAGE_TILES % 2 == 0;
            u32 a[OVERLAPS ? 2 : 1][4][4];
            auto dequantize = [&](int i) {
                u32(&to)[4][4] = a[OVERLAPS ? i & 1 : 0];
#pragma unroll
                for (int j = 0; j < 4; j++) packed.dequantize(j, to[j]);
                keep_in_registers(to);
            };
            dequantize(0);
            if (OVERLAPS && first + 1 < stop) load(stages + state.stage * STAGE_BYTES, 1);
            // Tiles that are left of the slice; whether it has sums already.
            int left = min(tiles_per_slice, stop - first);
            bool adds = false;
#pragma unroll 1
            for (int k = first; k < stop; k += STAGE_TILES) {
                const u8 *stage = stages + state.stage * STAGE_BYTES;
                const ActivationDescriptor values(stages_at + state.stage * STAGE_BYTES);
                const int count = STAGE_TILES == 1 ? 1 : min(STAGE_TILES, stop - k);
                const u32 is_read = empty_at + 8 * state.stage;
                state.advance();
#pragma unroll
                for (int i = 0; i < STAGE_TILES; i++) {
                    if (i >= count) break;
                    u32(&own)[4][4] = a[OVERLAPS ? i & 1 : 0];
                    wgmma_fence();
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        wgmma(accumulators, own[j], values + (i * VALUE_BYTES + j * 32) / 16, j > 0 || adds);
                    wgmma_commit();
                    if (OVERLAPS && k + i + 1 < stop) dequantize(i + 1);
                    if (OVERLAPS && k + i + 2 < stop) {
                        if (i + 2 < STAGE_TILES) load(stage, i + 2);
                        else if (i + 2 == STAGE_TILES) begin_stage();
                        else load(stages + state.stage * STAGE_BYTES, 1);
                    }
                    wgmma_wait(accumulators);
                    keep_in_registers(own);
                    adds = true;
                    if (--left > 0) continue;
                    left = min(tiles_per_slice, stop - (k + i + 1));
                    adds = false;
                    add_slice(stage, i);
                }
                release(is_read);
                if (!OVERLAPS && k + STAGE_TILES < stop) {
                    begin_stage();
                    dequantize(0);
                }
            }
#endif
            // Epilogue.
            const WorkItem v = SCATTER ? expert : find(SPLIT ? item : state.item(k_tiles) - (int) gridDim.x);
            if (SPLIT && v.slice >= 0 && !add_slices(split, v, totals)) continue;
            const int column = 2 * (lane & 3), count = v.count - column;
            const int tile = v.tile + warp, row = tile * 16 + (lane >> 2);
            const float scale = tile * 16 < v.rows ? row_tile_scales(v.w, v.rows, k_tiles)[tile] : 0.0f;
            const bool has_row[2] = {row < v.rows, row + 8 < v.rows};
            float *y = v.y + row;
            if (!SCATTER) y += (u64) column * v.rows;
            // Results of prompts do not fit L2, where weights and activations are to stay.
            auto store = [&](auto exists) {
#pragma unroll
                for (int n = 0; n < 2 * N; n++) {
                    const int next = n / 2 * 8 + n % 2;
                    const u32 at = SCATTER ? __shfl_sync(~0u, pairs[next / 32], column + next % 32) : next;
                    float *to = (float *) ((u8 *) y + (u64) at * (4u * v.rows));
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        if (has_row[i] && exists(next)) __stcs(to + i * 8, totals[n / 2][i * 2 + n % 2] * scale);
                }
            };
            if (!SCATTER && v.count >= ROWS) store([](int) { return true; });
            else store([&](int next) { return next < count; });
        }
    }
    // Nobody ends while the other block may still copy to it or arrive at its barriers.
    if (PAIRED) {
        __syncwarp();
        cluster_sync();
    }
}
