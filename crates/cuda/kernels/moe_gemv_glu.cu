// GEMV of experts, the second product of a mixture (down), fused with the gate before it: few pairs of row and expert.
// moe.cuh says what the lists are, weight_tile.cuh how sums go; math.cuh and gemv_pipelined.cuh go before this.
//
//   global                             shared, made by each block                 registers
//   gate, up of a pair - GLU, f32 -->  [pair][tile] f16, in slices' scales --> B +
//   expert's weights -----------------------------------------------> Tile -> A + mma --> accumulators, totals --> y
//
// A warp has a row tile and all of K, slice after slice. Beside the experts goes the same product of an expert that all
// rows share, if there is one (`SharedExpert`): its gate has been computed before. The kernel before is the first
// product, which lets this one start when the lists can be read, so weights are asked for meanwhile.

#define WARPS MOE_GLU_WARPS
struct SharedExpert {
    const u8 *w; // null: there is none
    float *y;
    Activations x;
    int n_rows;
};

// Results of one row tile and 8 pairs over all slices of K, in a warp.
struct SliceTotals {
    float accumulators[4] = {0, 0, 0, 0}, totals[4] = {0, 0, 0, 0}; // of this slice, and of those before
    int tiles_per_slice, left;
    DEVICE SliceTotals(int tiles_per_slice) : tiles_per_slice(tiles_per_slice), left(tiles_per_slice) {}
    // Tile `k` has been multiplied; `scale(j)` is that of its slice, for the lane's results 0 and 1.
    template <class F>
    DEVICE void advance(int k, int k_tiles, F scale) {
        if (--left > 0 && k + 1 < k_tiles) return;
        const bool first_slice = k < tiles_per_slice;
        left = tiles_per_slice;
        const float scales[2] = {scale(0), scale(1)};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float v = accumulators[j] * scales[j & 1];
            totals[j] = first_slice ? v : totals[j] + v;
            accumulators[j] = 0.0f;
        }
    }
};
// Brings tile `k` of a row, which lies at `values`, to the scale of its slice, by a warp; returns that.
template <class F>
DEVICE float rescale_tile(u32 *values, int k, int tiles_per_slice, int k_tiles, F scale) {
    const float common = slice_scale_around(k, tiles_per_slice, k_tiles, scale);
    u32 &own = values[threadIdx.x & 31];
    own = hmul2(own, rescale_f16x2(scale(k), inverse_pow2(common)));
    return common;
}

// Every architecture: block (WARPS row tiles, expert in use), the shared one last; 8 pairs at a time, whose tiles are
// in shared memory, with their scales and the scales of their slices.
constexpr int TILES_AHEAD = Tile::IS_PLAIN                               ? 2
                            : Tile::CODE_WORDS <= 4 && Tile::GROUPS == 1 ? 8
                            : Tile::CODE_WORDS <= 8 && Tile::GROUPS == 1 ? 4
                                                                         : 3;
KERNEL __launch_bounds__(WARPS * 32, 2)
    moe_gemv_glu(const u64 *table, float *y, const float *gate_up, const u32 *lists, const u32 *pairs, int activation,
                 int rows, int cols, int k_tiles, int tiles_per_slice, SharedExpert shared) {
    extern __shared__ __align__(128) u8 smem[];
    pdl_launch();
    const bool is_shared = shared.w && blockIdx.y + 1 == gridDim.y;
    u32 expert = 0, first = 0, stop = shared.n_rows;
    if (!is_shared) {
        const u32 *list = lists + 1 + 3 * blockIdx.y, used = __ldcg(lists);
        expert = __ldcg(list);
        first = __ldcg(list + 1);
        stop = __ldcg(list + 2);
        if (blockIdx.y >= used) return;
    }
    const u8 *w = is_shared ? shared.w : (const u8 *) table[expert];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int last = (rows + 15) / 16 - 1, row_tile = blockIdx.x * WARPS + warp;
    const u8 *from = w + row_tile_offset(min(row_tile, last), k_tiles);
    Tile ahead[TILES_AHEAD];
    auto load = [&](int k) {
#pragma unroll
        for (int i = 0; i < TILES_AHEAD; i++)
            if (k + i < k_tiles) ahead[i] = Tile::load(from + (u64) (k + i) * K_STRIDE, lane);
    };
    load(0);
    pdl_wait();
    const Activations x = {(u16 *) smem, (float *) (smem + 8 * 128 * k_tiles), k_tiles * 64};
    float *slice_scales = x.scales + 8 * k_tiles;
    const float scale = row_tile_scales(w, rows, k_tiles)[min(row_tile, last)];
#pragma unroll 1
    for (u32 base = first; base < stop; base += 8) {
        const int here = min(stop - base, 8);
        if (base > first)
            __syncthreads(); // nobody reads the pairs before
                             // The gate: a warp a tile.
#pragma unroll 1
        for (int at = warp; at < here * k_tiles; at += WARPS) {
            const int i = at / k_tiles, k = at % k_tiles, c = k * 64 + 2 * lane;
            if (is_shared) {
                ((u32 *) x.values)[at * 32 + lane] =
                    ((const u32 *) (shared.x.values + (u64) (base + i) * shared.x.stride + k * 64))[lane];
                if (lane == 0) x.scales[at] = shared.x.scales[(base + i) * (shared.x.stride / 64) + k];
                continue;
            }
            const float *gate = gate_up + (u64) pairs[base + i] * 2 * cols, *up = gate + cols;
            float v[2];
#pragma unroll
            for (int j = 0; j < 2; j++) v[j] = c + j < cols ? activate(activation, gate[c + j]) * up[c + j] : 0.0f;
            store_activation_tile(x, i, k, v[0], v[1]);
        }
        __syncthreads();
#pragma unroll 1
        for (int at = warp; at < here * k_tiles; at += WARPS) {
            const int i = at / k_tiles;
            slice_scales[at] = rescale_tile((u32 *) x.values + at * 32, at - i * k_tiles, tiles_per_slice, k_tiles,
                                            [&](int k) { return x.scales[i * k_tiles + k]; });
        }
        __syncthreads();
        // Pairs that do not exist are read as the last one.
        const u16 *own = x.values + min(g, here - 1) * x.stride + t * 8;
        SliceTotals sums(tiles_per_slice);
#pragma unroll 1
        for (int k = 0; k < k_tiles; k += TILES_AHEAD) {
            if (k > 0 || base > first) load(k);
#pragma unroll
            for (int i = 0; i < TILES_AHEAD; i++) {
                if (k + i >= k_tiles) break;
                ActivationFragment b;
                b.set(*(const uint4 *) (own + (k + i) * 64), *(const uint4 *) (own + (k + i) * 64 + 32));
                mma_tile(sums.accumulators, ahead[i], b);
                sums.advance(k + i, k_tiles,
                             [&](int j) { return slice_scales[min(2 * t + j, here - 1) * k_tiles + k + i]; });
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = row_tile * 16 + g + (i >> 1) * 8, pair = 2 * t + (i & 1);
            if (row >= rows || pair >= here) continue;
            const float v = sums.totals[i] * scale;
            if (is_shared) shared.y[(u64) (base + pair) * rows + row] = v;
            else y[(u64) pairs[base + pair] * rows + row] = v;
        }
    }
}

#if __CUDA_ARCH__ >= 900 && !BULK_COPY
// Copies a list of experts, at most `max_pairs`, that begins with their number, and their pairs to shared memory;
// returns how many experts there are. Asks for no more than that: all blocks read the same lines, and L2 answers one
// at a time.
DEVICE int load_active_experts(ActiveExpert *list, int *pair, const ActiveExpert *from, const int *pairs,
                               int max_pairs) {
    __shared__ int used;
    if (threadIdx.x == 0) used = __ldcg((const uint4 *) from).w & 0xffff;
#pragma unroll 1
    for (int i = threadIdx.x; i < max_pairs; i += blockDim.x) {
        const uint4 own = __ldcg((const uint4 *) (from + 1 + i));
        pair[i] = __ldcg(pairs + i);
        *(uint4 *) (list + i) = own;
    }
    __syncthreads();
    return used;
}
// The same for up to 8 rows, pipelined; a shared expert is one more of the list. A persistent block has a run of the
// row tiles of one expert or, where too many blocks would be left over, of all of them; a warp takes every WARPS-th of
// these, STAGE_TILES tiles a stage, through a pipeline that runs ahead of the experts.
constexpr int STAGE_TILES = TILE_BYTES <= 640 ? 4 : 2;
#define STAGES MOE_GLU_STAGES
#define RECORD_BYTES MOE_GLU_RECORD_BYTES // of a pair's tile: values, its scale at 128, its slice's at 132
static_assert(RECORD_BYTES == 192, "rows in different banks");
KERNEL __launch_bounds__(WARPS * 32, 2)
    moe_gemv_glu_pipelined(const ActiveExpert *active, float *y, const float *gate_up, const int *pairs, int activation,
                           int max_pairs, int rows, int cols, int k_tiles, int tiles_per_slice, SharedExpert shared) {
    extern __shared__ __align__(128) u8 smem[]; // stages, then records [tile, pair], then the lists
    constexpr int STAGE_BYTES = STAGE_TILES * TILE_BYTES;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    u8 *records = smem + WARPS * STAGES * STAGE_BYTES, *stages = smem + warp * STAGES * STAGE_BYTES;
    ActiveExpert *list = (ActiveExpert *) (records + 8 * k_tiles * RECORD_BYTES);
    int *pair = (int *) (list + max_pairs + 1);
    pdl_launch();
    const int used = load_active_experts(list, pair, active, pairs, max_pairs);
    if (shared.w && threadIdx.x == 0) list[used] = {shared.w, 0, (u16) shared.n_rows, 0};
    __syncthreads();
    const int row_tiles = (rows + 15) / 16, experts = used + (shared.w != nullptr);
    int start, stop;
    if (const int each = gridDim.x / experts; each * experts * 16 >= gridDim.x * 15) {
        const int e = blockIdx.x / each, part = blockIdx.x % each;
        if (e >= experts) return;
        start = e * row_tiles + row_tiles * part / each;
        stop = e * row_tiles + row_tiles * (part + 1) / each;
    } else {
        start = (int) ((u64) experts * row_tiles * blockIdx.x / gridDim.x);
        stop = (int) ((u64) experts * row_tiles * (blockIdx.x + 1) / gridDim.x);
    }
    if (start == stop) return;
    // Producer: tiles from `next_k` on of row tile `next_at`.
    const u32 to = smem_address(stages);
    int next_at = start + warp, next_k = 0, next_slot = 0;
    const u8 *from = nullptr;
    auto produce = [&]() {
        if (next_at < stop) {
            if (next_k == 0) {
                const int e = next_at / row_tiles;
                from = list[e].w + row_tile_offset(next_at - e * row_tiles, k_tiles) + lane * 16;
            }
            const int here = min(STAGE_TILES, k_tiles - next_k), bytes = here * TILE_BYTES - lane * 16;
#pragma unroll
            for (int i = 0; i < STAGE_BYTES; i += 512)
                cp_async_16_if(i < bytes, to + next_slot + lane * 16 + i, from + i);
            from += STAGE_BYTES;
            next_k += here;
            if (next_k == k_tiles) {
                next_k = 0;
                next_at += WARPS;
            }
        }
        cp_async_commit();
        next_slot = next_slot + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : next_slot + STAGE_BYTES;
    };
    if (next_at < stop && lane == 0)
        prefetch_l2(row_tile_scales(list[next_at / row_tiles].w, rows, k_tiles) + next_at % row_tiles);
    // Prologue.
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) produce();
    pdl_wait();
    int at = start + warp, slot = 0;
#pragma unroll 1
    for (int e = start / row_tiles; e * row_tiles < stop; e++) {
        const ActiveExpert expert = list[e];
        const bool is_shared = e == used;
        __syncthreads(); // nobody reads the records before
                         // The gate: a warp a tile.
#pragma unroll 1
        for (int unit = warp; unit < expert.count * k_tiles; unit += WARPS) {
            const int i = unit / k_tiles, k = unit - i * k_tiles;
            u8 *record = records + (k * 8 + i) * RECORD_BYTES;
            if (is_shared) {
                if (lane < 8)
                    ((uint4 *) record)[lane] =
                        ((const uint4 *) (shared.x.values + (u64) i * shared.x.stride + k * 64))[lane];
                else if (lane == 8) ((float *) record)[32] = shared.x.scales[i * (shared.x.stride / 64) + k];
                continue;
            }
            const float *gate = gate_up + (u64) pair[expert.first + i] * 2 * cols, *up = gate + cols;
            const int c = k * 64 + 2 * lane;
            float v[2];
#pragma unroll
            for (int j = 0; j < 2; j++) v[j] = c + j < cols ? activate(activation, gate[c + j]) * up[c + j] : 0.0f;
            store_activation_tile({(u16 *) record, (float *) (record + 128), 64}, 0, 0, v[0], v[1]);
        }
        __syncthreads();
#pragma unroll 1
        for (int unit = warp; unit < expert.count * k_tiles; unit += WARPS) {
            const int i = unit / k_tiles, k = unit - i * k_tiles;
            u8 *record = records + (k * 8 + i) * RECORD_BYTES;
            *(float *) (record + 132) = rescale_tile((u32 *) record, k, tiles_per_slice, k_tiles, [&](int k) {
                return *(const float *) (records + (k * 8 + i) * RECORD_BYTES + 128);
            });
        }
        __syncthreads();
        // Pairs that do not exist are read as the last one.
        const u32 own = min(g, expert.count - 1) * RECORD_BYTES + t * 16;
        const u32 slice_scales[2] = {min(2 * t, expert.count - 1) * RECORD_BYTES + 132u,
                                     min(2 * t + 1, expert.count - 1) * RECORD_BYTES + 132u};
#pragma unroll 1
        for (const int end = min(stop, (e + 1) * row_tiles); at < end; at += WARPS) {
            SliceTotals sums(tiles_per_slice);
            const float scale = row_tile_scales(expert.w, rows, k_tiles)[at - e * row_tiles];
#pragma unroll 1
            for (int k = 0; k < k_tiles; k += STAGE_TILES) {
                cp_async_wait<STAGES - 2>();
                __syncwarp(); // all lanes' copies are there, and nobody reads the stage before
                produce();
#pragma unroll
                for (int i = 0; i < STAGE_TILES; i++) {
                    if (k + i >= k_tiles) break;
                    const u8 *of = records + (k + i) * 8 * RECORD_BYTES;
                    const uint4 low = *(const uint4 *) (of + own), high = *(const uint4 *) (of + own + 64);
                    ActivationFragment b;
                    b.set(low, high);
                    mma_tile(sums.accumulators, Tile::load<true>(stages + slot + i * TILE_BYTES, lane), b);
                    sums.advance(k + i, k_tiles, [&](int j) { return *(const float *) (of + slice_scales[j]); });
                }
                slot = slot + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : slot + STAGE_BYTES;
            }
            float *out = is_shared ? shared.y : y;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = (at - e * row_tiles) * 16 + g + (i >> 1) * 8, of = 2 * t + (i & 1);
                if (row < rows && of < expert.count)
                    out[(u64) (is_shared ? of : pair[expert.first + of]) * rows + row] = sums.totals[i] * scale;
            }
        }
    }
}
#endif
