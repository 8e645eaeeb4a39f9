// GEMM by warpgroups, of prompts and of experts that many of a prompt's rows chose: gemm_wgmma.cuh says how.

KERNEL __launch_bounds__(2 * ROWS) swizzle_activations(Activations x, u8 *to, int n_rows, int tiles_per_slice) {
    pdl_sync();
    swizzle_rows<false>(x, to, tiles_per_slice, [&](int i) {
        const int row = blockIdx.y * ROWS + i;
        return row < n_rows ? row : -1;
    });
}

// Block `row_block` of ROWS activation rows by block `block` of weight rows.
DEVICE WorkItem work_item_at(const MatrixGroup &group, int n_rows, int block, int row_block) {
    WorkItem v;
    v.block = row_block;
    v.slice = -1, v.part = 0;
    int which = 0;
#pragma unroll
    for (int i = 1; i < 4; i++) which += block >= group.first_block[i];
    int first = group.first_block[0];
    v.w = group.w[0], v.y = group.y[0], v.rows = group.rows[0];
#pragma unroll
    for (int i = 1; i < 4; i++)
        if (which == i) v.w = group.w[i], v.y = group.y[i], v.rows = group.rows[i], first = group.first_block[i];
    v.tile = (block - first) * BLOCK_TILES;
    v.y += (u64) v.block * ROWS * v.rows;
    v.count = n_rows - v.block * ROWS;
    v.pairs = nullptr;
    return v;
}
#if ROWS <= 64
// Products of at most ROWS rows. The first `whole` items are all of K of a block of weight rows; the next ones are
// single slices of one.
KERNEL __launch_bounds__(384, BLOCKS_PER_SM)
    gemm_wgmma_split(MatrixGroup group, const u8 *x, int n_rows, int k_tiles, int tiles_per_slice, SliceSums split,
                     int whole, int items) {
    pdl_launch();
    auto find = [&](int item) {
        const bool is_slice = item >= whole;
        const int beyond = item - whole, part = beyond / split.slices;
        WorkItem v = work_item_at(group, n_rows, is_slice ? whole + part : item, 0);
        if (is_slice) v.slice = beyond - part * split.slices, v.part = part;
        return v;
    };
    gemm_mainloop<false, true, false>(find, x, k_tiles, tiles_per_slice, items, split);
}
#endif
#if ROWS >= 64
// Work item `item` of `items`, of `blocks` blocks of weight rows: `together` of those, an even number, go through all
// activations before the next ones, so that both stay in L2. Of an odd number of blocks the last has two items for each
// block of activation rows, so that items 2 i and 2 i + 1 always have the same.
DEVICE WorkItem work_item(const MatrixGroup &group, int n_rows, int item, int items, int blocks, int together) {
    const int even = blocks + (blocks & 1), wide = items / even;
    const int part = item / (together * wide), in = item - part * together * wide;
    const int size = min(together, even - part * together);
    return work_item_at(group, n_rows, min(part * together + in % size, blocks - 1), in / size);
}
KERNEL __launch_bounds__(384, 1) gemm_wgmma(MatrixGroup group, const u8 *x, int n_rows, int k_tiles,
                                            int tiles_per_slice, int blocks, int items, int together) {
    pdl_launch();
    gemm_mainloop<false, false, true>([&](int item) { return work_item(group, n_rows, item, items, blocks, together); },
                                      x, k_tiles, tiles_per_slice, items);
}
#endif

// Experts' matrices of one shape, and what rows chose of them.
struct ExpertGroup {
    const u64 *table; // where matrices lie, by expert
    const ExpertBlock *blocks;
    const u32 *pairs;
    float *y;
    int rows;
    // Blocks of weight rows.
    DEVICE int wide() const { return (rows + 16 * BLOCK_TILES - 1) / (16 * BLOCK_TILES); }
    DEVICE WorkItem work_item(int item) const {
        const int block = item / wide();
        const ExpertBlock own = blocks[1 + block];
        return {(const u8 *) table[own.expert],
                y,
                rows,
                (item - block * wide()) * BLOCK_TILES,
                block,
                (int) own.count,
                pairs + own.first,
                -1,
                0};
    }
};
#if ROWS == 64 || ROWS == 128
// ---- experts (grouped GEMM): a block of up to ROWS pairs of one expert at a time. moe.cuh says what the lists are.

// Pairs of an ExpertBlock. A pair reads activation row `by_pair ? pair : pair / top_k`.
KERNEL __launch_bounds__(2 * ROWS)
    swizzle_expert_activations(Activations x, u8 *to, const ExpertBlock *blocks, const u32 *pairs, int top_k,
                               int by_pair, int tiles_per_slice) {
    pdl_sync();
    if (blockIdx.y >= blocks->count) return;
    const ExpertBlock own = blocks[1 + blockIdx.y];
    swizzle_rows<true>(x, to, tiles_per_slice, [&](u32 i) {
        if (i >= own.count) return -1;
        const u32 pair = pairs[own.first + i];
        return (int) (by_pair ? pair : pair / top_k);
    });
}

KERNEL __launch_bounds__(384, 1) moe_gemm_wgmma(ExpertGroup group, const u8 *x, int k_tiles, int tiles_per_slice) {
    pdl_sync();
    gemm_mainloop<true, false, false>([&](int item) { return group.work_item(item); }, x, k_tiles, tiles_per_slice,
                                      (int) group.blocks->count * group.wide());
}
#endif
