// GEMV of experts, the first product of a mixture (gate and up): few pairs of row and expert. moe.cuh says what the
// lists are, weight_tile.cuh how sums go; math.cuh, rows.cuh, moe_choose.cuh, gemv_epilogue.cuh and gemv_pipelined.cuh
// go before this.
//
//   moe_gemv_8, _16       any architecture:  expert's weights --> registers, as in gemv.cu; block (2 row tiles, expert)
//   moe_gemv_routed       at most 8 rows, which each block routes itself: the same
//   moe_gemv_pipelined_*  at most 8 rows, which each block routes itself:
//                                            expert's weights --> pipeline in shared memory, as in gemv_pipelined.cuh
//                                            all rows' activations --> shared memory, once a block
//
// A pair reads activation row `by_pair ? pair : pair / top_k` and writes row `pair` of y. Kernels that route rows
// compute a GLU beside, which does not depend on the experts, a chunk of a row a block.
//
// SCORES_PER_LANE, a definition: scores that each lane of the warp that routes a row has in registers.

// Tiles of two row tiles on their way at once.
constexpr int TILES_AHEAD = Tile::IS_PLAIN ? 1 : Tile::CODE_WORDS <= 4 && Tile::GROUPS == 1 ? 4 : 2;
// The pairs `first` to `stop` of an expert, 8 N at a time, for as many of which weights are read once. `meanwhile` is
// called while the first weights are on their way.
template <int N, class F>
DEVICE void moe_gemv(const u8 *w, float *y, const Activations &x, const int *pairs, u32 first, u32 stop, int top_k,
                     int by_pair, int rows, int k_tiles, int tiles_per_slice, float *smem, F meanwhile) {
    constexpr int AHEAD = N == 1 ? TILES_AHEAD : 1;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
    const int row_tile = blockIdx.x * 2, begin = warp * tiles_per_slice, end = min(begin + tiles_per_slice, k_tiles);
    const u8 *from = w + row_tile_offset(row_tile, k_tiles);
    const u64 stride = row_tile + 1 < (rows + 15) / 16 ? row_tile_stride(k_tiles) : 0;
    Tile ahead[AHEAD][2];
    auto load = [&](int k) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (k + i < end)
#pragma unroll
                for (int m = 0; m < 2; m++)
                    ahead[i][m] = Tile::load(from + m * stride + (u64) (k + i) * K_STRIDE, lane);
    };
    load(begin);
    prefetch_l2(row_tile_scales(w, rows, k_tiles) + row_tile);
    meanwhile();
#pragma unroll 1
    for (u32 base = first; base < stop; base += N * 8) {
        auto row = [&](u32 i) { return base + i < stop ? by_pair ? pairs[base + i] : pairs[base + i] / top_k : -1; };
        ActivationRow x_rows[N];
#pragma unroll
        for (int n = 0; n < N; n++) x_rows[n] = ActivationRow(x, row(n * 8 + g), begin, end);
        float accumulators[2][N][4] = {};
#pragma unroll 1
        for (int k = begin; k < end; k += AHEAD) {
            if (k > begin || base > first) load(k);
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (k + i >= end) break;
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const ActivationFragment b = x_rows[n].load(k + i);
#pragma unroll
                    for (int m = 0; m < 2; m++) mma_tile(accumulators[m][n], ahead[i][m], b);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < N; n++) apply_slice_scale(accumulators, n, x_rows[n].scale);
        add_slices<2, N>(accumulators, smem, blockDim.x >> 5, row_tile_scales(w, rows, k_tiles), y, rows, row_tile,
                         [&](int i, int &to) {
                             if (base + i >= stop) return false;
                             to = pairs[base + i];
                             return true;
                         });
        __syncthreads();
    }
}
// `moe_gemv` for the expert that `lists` has for the block (blockIdx.y), if there is one.
template <int N>
DEVICE void moe_gemv_listed(const u64 *table, float *y, const Activations &x, const u32 *lists, const int *pairs,
                            int top_k, int by_pair, int rows, int k_tiles, int tiles_per_slice, float *smem) {
    const u32 *list = lists + 1 + 3 * blockIdx.y, used = lists[0], expert = list[0], first = list[1], stop = list[2];
    if (blockIdx.y < used)
        moe_gemv<N>((const u8 *) table[expert], y, x, pairs, first, stop, top_k, by_pair, rows, k_tiles,
                    tiles_per_slice, smem, []() {});
}
#define MOE_GEMV_BOUNDS __launch_bounds__(SLICES * 32, SLICES > 8 ? 1 : 2)
KERNEL MOE_GEMV_BOUNDS moe_gemv_8(const u64 *table, float *y, Activations x, const u32 *lists, const int *pairs,
                                  int top_k, int by_pair, int rows, int k_tiles, int tiles_per_slice) {
    __shared__ float smem[SLICES * 2 * 128];
    pdl_wait();
    pdl_launch(); // not before: moe_gemv_glu reads the lists at once
    moe_gemv_listed<1>(table, y, x, lists, pairs, top_k, by_pair, rows, k_tiles, tiles_per_slice, smem);
}
KERNEL MOE_GEMV_BOUNDS moe_gemv_16(const u64 *table, float *y, Activations x, const u32 *lists, const int *pairs,
                                   int top_k, int by_pair, int rows, int k_tiles, int tiles_per_slice) {
    __shared__ float smem[SLICES * 2 * 2 * 128];
    pdl_sync();
    moe_gemv_listed<2>(table, y, x, lists, pairs, top_k, by_pair, rows, k_tiles, tiles_per_slice, smem);
}

#if __CUDA_ARCH__ >= 900 && !BULK_COPY
// ---- blocks route all rows for themselves; one of them also stores the weights and hands the list on to the second
// product

// The block's share of a GLU that `blocks` compute. The last block begins, for it has no products.
DEVICE void glu_beside(const GluArgs &gate, int rows, int block, int blocks) {
    const int chunks = glu_chunks(gate.cols);
#pragma unroll 1
    for (int i = blocks - 1 - block; i < chunks * rows; i += blocks) glu_chunk(gate, i % chunks, i / chunks);
}
// Blocks are as many as for `moe_gemv_8`, and one more for each expert: the first of these hands on, the others compute
// the GLU.
KERNEL MOE_GEMV_BOUNDS moe_gemv_routed(Routing r, float *y, Activations x, GluArgs gate, int rows, int k_tiles,
                                       int tiles_per_slice) {
    extern __shared__ __align__(16) u8 smem[];
    __shared__ float slices[SLICES * 2 * 128];
    const int max_pairs = r.rows * r.top_k, working = gridDim.x - 1;
    ActiveExpert *list = (ActiveExpert *) smem;
    int *pair = (int *) (list + max_pairs);
    const bool is_beside = blockIdx.x == working, hands_on = is_beside && blockIdx.y == 0;
    if (hands_on) prefetch_tables(r);
    pdl_wait();
    if (!hands_on) pdl_launch();
    if (is_beside && !hands_on) return glu_beside(gate, r.rows, blockIdx.y - 1, gridDim.y - 1);
    const int used = route_in_block<SCORES_PER_LANE>(r, hands_on, list, pair, (u32 *) (pair + max_pairs), []() {});
    if (hands_on) return hand_on_experts(r, used, list, pair);
    if (blockIdx.y >= used) return;
    const ActiveExpert &e = list[blockIdx.y];
    moe_gemv<1>(e.w, y, x, pair, e.first, e.first + e.count, r.top_k, false, rows, k_tiles, tiles_per_slice, slices,
                [&]() { prefetch_second_product(r, used, list, blockIdx.y * working + blockIdx.x, used * working); });
}

// ---- pipelined, where lanes copy weights: of up to 8 rows, at most 8 pairs an expert, for no row chooses one twice.
// Blocks' runs go through all row tiles of all experts in use.
struct ActiveExperts {
    const ActiveExpert *list;
    int row_tiles; // of each
};
DEVICE TileGroup tile_group_at(const ActiveExperts &m, int max, int at, int stop, int k_tiles) {
    const int which = at / m.row_tiles, tile = at - which * m.row_tiles;
    return {m.list[which].w + row_tile_offset(tile, k_tiles), which, tile,
            min(max, min(m.row_tiles - tile, stop - at))};
}
// Row tiles of a stage, as src/moe.rs lays out shared memory.
#define PIPELINE_ROW_TILES (TILE_BYTES <= 640 ? 4 : TILE_BYTES <= 1152 ? 2 : 1)
// A pair's activations in shared memory, of a tile: values, their rescale at 128, and at 132 of a slice's first tile
// the scale of the slice.
#define RECORD_BYTES MOE_RECORD_BYTES
static_assert(RECORD_BYTES == 144, "16-byte copies, and rows in different banks");
// A warp's slice of all rows of x is in shared memory, [tile, row] records, and STAGES stages of weights behind it.
template <int STAGES>
DEVICE void moe_gemv_pipelined(const Routing &r, float *y, const Activations &x, const GluArgs &gate, int rows,
                               int k_tiles, int tiles_per_slice) {
    extern __shared__ __align__(128) u8 smem[];
    constexpr int M = PIPELINE_ROW_TILES;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int begin = warp * tiles_per_slice, length = min(tiles_per_slice, k_tiles - begin), n_rows = r.rows,
              max_pairs = n_rows * r.top_k;
    __shared__ u64 full[REDUCTION_STAGES], empty[REDUCTION_STAGES];
    const SliceReduction reduction = {(float *) (smem + SLICES * MOE_PIPELINE_BYTES), full, empty};
    ActiveExpert *list = (ActiveExpert *) (reduction.partials + SLICES * REDUCTION_STAGES * 128);
    int *pair = (int *) (list + max_pairs), *row_of = pair + max_pairs;
    init_barriers(reduction);
    const int working = gridDim.x - 1;
    const bool hands_on = blockIdx.x == working;
    if (hands_on) prefetch_tables(r);
    pdl_wait();
    if (!hands_on) pdl_launch();
    u8 *slice = smem + warp * MOE_PIPELINE_BYTES;
    const ActiveExperts experts = {list, (rows + 15) / 16};
    u32 *scratch = (u32 *) reduction.partials; // which products need later
    const int used = route_in_block<SCORES_PER_LANE>(r, hands_on, list, pair, scratch, [&]() {
        // All rows of what a lane has of each.
        auto copy = [&](u32 to, const u8 *from, u64 stride) {
#pragma unroll 4
            for (int row = 0; row < n_rows; row++, to += RECORD_BYTES, from += stride) cp_async_16(to, from);
        };
        const u32 to = smem_address(slice);
        for (int c = lane; c < length * 8; c += 32)
            copy(to + (c >> 3) * n_rows * RECORD_BYTES + (c & 7) * 16, (const u8 *) (x.values + begin * 64) + c * 16,
                 2 * (u64) x.stride);
        cp_async_commit();
        // A quad a row.
#pragma unroll 1
        for (int first = 0; first < n_rows; first += 8) {
            const int row = min(first + g, n_rows - 1);
            const float *scales = x.scales + (u64) row * (x.stride / 64) + begin;
            u8 *record = slice + row * RECORD_BYTES;
            *(float *) (record + 132) =
                store_rescales(scales, length, (u32 *) (record + 128), n_rows * (RECORD_BYTES / 4));
        }
    });
    if (hands_on) hand_on_experts(r, used, list, pair);
    const int total = used * experts.row_tiles;
    for (int i = threadIdx.x; i < max_pairs; i += blockDim.x) row_of[i] = pair[i] / r.top_k;
    __syncthreads();
    // Nothing is left for the block that hands on.
    const int at = (int) ((u64) total * blockIdx.x / working);
    const int stop = hands_on ? at : (int) ((u64) total * (blockIdx.x + 1) / working);
    u8 *weights = slice + (n_rows * tiles_per_slice * RECORD_BYTES + 127 & ~127);
    CpAsyncPipeline<M, ActiveExperts, 1, NoActivations, STAGES *((M * TILE_BYTES + 31) & ~31)> pipeline(
        {experts, M, at, stop, k_tiles, begin, length}, {}, {}, weights, lane);
    pipeline.prologue();
    if (warp == 1)
        for (int i = at + lane * 8; i < stop; i += 256)
            prefetch_l2(row_tile_scales(list[i / experts.row_tiles].w, rows, k_tiles) + i % experts.row_tiles);
    if (!hands_on) prefetch_second_product(r, used, list, blockIdx.x, working);
    glu_beside(gate, n_rows, blockIdx.x, gridDim.x);
    u32 record;
    gemv_mainloop<1>(experts, pipeline, reduction, at, stop, k_tiles, length,
                     GemvProblem{[&](const TileGroup &group, const float *&scales) {
                                     const ActiveExpert &e = list[group.matrix];
                                     record = (u32) row_of[e.first + min(g, e.count - 1)] * RECORD_BYTES;
                                     scales = row_tile_scales(e.w, rows, k_tiles) + group.row_tile;
                                     return e.count;
                                 },
                                 [&](int, int k) {
                                     const u8 *at = slice + k * n_rows * RECORD_BYTES + record;
                                     ActivationFragment v;
                                     v.set(*(const uint4 *) (at + t * 16), *(const uint4 *) (at + t * 16 + 64),
                                           *(const u32 *) (at + 128));
                                     return v;
                                 },
                                 [&](int) { return *(const float *) (slice + record + 132); },
                                 [&](const TileGroup &group) {
                                     const ActiveExpert &e = list[group.matrix];
                                     return [=](int row, int column, float v) {
                                         if (row < rows && column < e.count)
                                             y[(u64) pair[e.first + column] * rows + row] = v;
                                     };
                                 }},
                     []() {});
}
#define MOE_GEMV_PIPELINED(STAGES)                                                                                     \
    KERNEL MOE_GEMV_BOUNDS moe_gemv_pipelined_##STAGES(Routing r, float *y, Activations x, GluArgs gate, int rows,     \
                                                       int k_tiles, int tiles_per_slice) {                             \
        moe_gemv_pipelined<STAGES>(r, y, x, gate, rows, k_tiles, tiles_per_slice);                                     \
    }
MOE_GEMV_PIPELINED(2)
MOE_GEMV_PIPELINED(4)
MOE_GEMV_PIPELINED(5)
#endif
