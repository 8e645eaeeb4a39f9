// GEMM: products with many activation rows (prompts) by mma.sync, for every architecture. weight_tile.cuh goes before
// this; gemm_wgmma.cu does the same where there are warpgroup products.
//
//   global            shared, STAGES deep (cp.async)         registers                       shared           global
//   weights x8   -->  [8 packed tiles]              -load--> Tile -dequantize-> A +
//   activations  -->  [BLOCK_ROWS rows, 64 columns] -------> B ------------------+ mma -> accumulators
//                                                                                    + end of a slice -> totals -> y
//
// A block takes BLOCK_TILES row tiles by BLOCK_ROWS activation rows; each of its 8 warps WARP_TILES row tiles by
// 8 WARP_COLUMNS activation rows, all of K. Packed weights go through shared memory where a block can have so much,
// else straight to registers (WEIGHTS_IN_REGISTERS), as plain ones always do, for they are too many. Blocks that run at
// the same time share the packed weights, which are read once, and the activations stay in L2. Sums are those of the
// GEMV, slice by slice; totals of whole slices wait in shared memory, each thread's for itself.

#define BLOCK_ROWS GEMM_ROWS
#define BLOCK_TILES GEMM_TILES
#define STAGES 2
#define WARP_TILES 2
#define WARP_COLUMNS (16 / WARP_TILES)
constexpr int ACTIVATION_BYTES = BLOCK_ROWS * 128;
constexpr int STAGE_BYTES = ACTIVATION_BYTES + (WEIGHTS_IN_REGISTERS ? 0 : BLOCK_TILES * TILE_BYTES);

// Brings activations to their slices' scales, before `gemm` reads them: a warp a tile. `to` has a scale for each
// slice, not each tile.
KERNEL __launch_bounds__(256) rescale_to_slices(Activations x, Activations to, int k_tiles, int tiles_per_slice) {
    pdl_sync();
    const u64 at = (u64) blockIdx.x * 8 + (threadIdx.x >> 5), row = blockIdx.y;
    if (at >= (u64) k_tiles) return;
    const int lane = threadIdx.x & 31, k = (int) at;
    const float *scales = x.scales + row * k_tiles;
    const float scale = slice_scale_around(k, tiles_per_slice, k_tiles, [&](int i) { return scales[i]; });
    const u64 pair = row * (x.stride / 2) + k * 32 + lane;
    ((u32 *) to.values)[pair] = hmul2(((const u32 *) x.values)[pair], rescale_f16x2(scales[k], inverse_pow2(scale)));
    if (lane == 0 && k % tiles_per_slice == 0)
        to.scales[row * ((k_tiles + tiles_per_slice - 1) / tiles_per_slice) + k / tiles_per_slice] = scale;
}

KERNEL __launch_bounds__(256, 1) gemm(MatrixGroup group, Activations x, int n_rows, int k_tiles, int tiles_per_slice) {
    extern __shared__ __align__(128) u8 smem[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    // Blocks of the same weights follow each other, or those of the same activations.
    const u32 number = blockIdx.y * gridDim.x + blockIdx.x;
    const u32 block = WEIGHTS_IN_REGISTERS ? blockIdx.x : number / gridDim.y;
    int which = 0;
#pragma unroll
    for (int i = 1; i < 4; i++) which += (int) block >= group.first_block[i];
    const u8 *w = group.w[0];
    float *y = group.y[0];
    int rows = group.rows[0], first = group.first_block[0];
#pragma unroll
    for (int i = 1; i < 4; i++)
        if (which == i) w = group.w[i], y = group.y[i], rows = group.rows[i], first = group.first_block[i];
    const int block_tile = ((int) block - first) * BLOCK_TILES;
    const int block_row = (int) (WEIGHTS_IN_REGISTERS ? blockIdx.y : number % gridDim.y) * BLOCK_ROWS;
    const int warp_row = warp % (16 / WARP_COLUMNS) * 8 * WARP_COLUMNS;
    const int warp_tile = warp / (16 / WARP_COLUMNS) * WARP_TILES;
    const int row_tiles = (rows + 15) / 16;
    // Where the thread reads weights: 16 bytes of some row tiles of a stage, or its warp's row tiles. Row tiles that do
    // not exist are read as the first.
    constexpr int parts = TILE_BYTES / 16;
    constexpr int copies = WEIGHTS_IN_REGISTERS ? WARP_TILES : (BLOCK_TILES * parts + 255) / 256;
    const u8 *weights[copies];
#pragma unroll
    for (int i = 0; i < copies; i++) {
        const int part = threadIdx.x + i * 256,
                  tile = block_tile + (WEIGHTS_IN_REGISTERS ? warp_tile + i : part / parts);
        weights[i] =
            w + row_tile_offset(tile < row_tiles ? tile : 0, k_tiles) + (WEIGHTS_IN_REGISTERS ? 0 : part % parts * 16);
    }
    const u32 smem_at = (u32) __cvta_generic_to_shared(smem);
    // Odd rows of activations have their halves swapped (swizzle): lanes meet in no bank.
    auto prefetch_stage = [&](int k) {
        if (k < k_tiles) {
            const u32 stage = smem_at + k % STAGES * STAGE_BYTES;
#pragma unroll
            for (int i = threadIdx.x; i < BLOCK_ROWS * 8; i += 256) {
                const int row = i >> 3, c = i & 7;
                const bool real = block_row + row < n_rows;
                const u32 to = stage + row * 128 + (c * 16 ^ (row & 1) * 64);
                cp_async_16_or_zeros(to, x.values + (u64) (real ? block_row + row : 0) * x.stride + k * 64 + c * 8,
                                     real);
            }
#pragma unroll
            for (int i = 0; i < copies; i++)
                if (!WEIGHTS_IN_REGISTERS && threadIdx.x + i * 256 < BLOCK_TILES * parts)
                    cp_async_16_or_zeros(stage + ACTIVATION_BYTES + (threadIdx.x + i * 256) * 16,
                                         weights[i] + (u64) k * K_STRIDE, true);
        }
        cp_async_commit();
    };
    float *totals = (float *) (smem + STAGES * STAGE_BYTES) + threadIdx.x;
    float accumulators[WARP_TILES][WARP_COLUMNS][4];
    clear(accumulators);
    pdl_sync();
    // Prologue.
    for (int k = 0; k < STAGES - 1; k++) prefetch_stage(k);
    Tile next[WARP_TILES];
    if (WEIGHTS_IN_REGISTERS)
#pragma unroll
        for (int m = 0; m < WARP_TILES; m++) next[m] = Tile::load(weights[m], lane);
    // Mainloop.
    int left = tiles_per_slice;
#pragma unroll 1
    for (int k = 0; k < k_tiles; k++) {
        Tile tiles[WARP_TILES];
#pragma unroll
        for (int m = 0; m < WARP_TILES; m++) tiles[m] = next[m];
        if (WEIGHTS_IN_REGISTERS && k + 1 < k_tiles)
#pragma unroll
            for (int m = 0; m < WARP_TILES; m++) next[m] = Tile::load(weights[m] + (u64) (k + 1) * K_STRIDE, lane);
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        prefetch_stage(k + STAGES - 1);
        const u8 *stage = smem + k % STAGES * STAGE_BYTES;
        if (!WEIGHTS_IN_REGISTERS)
#pragma unroll
            for (int m = 0; m < WARP_TILES; m++)
                tiles[m] = Tile::load<true>(stage + ACTIVATION_BYTES + (warp_tile + m) * TILE_BYTES, lane);
#pragma unroll
        for (int n = 0; n < WARP_COLUMNS; n++) {
            const int row = warp_row + n * 8 + g;
            const uint4 low = *(const uint4 *) (stage + row * 128 + (t * 16 ^ (row & 1) * 64));
            const uint4 high = *(const uint4 *) (stage + row * 128 + (t * 16 + 64 ^ (row & 1) * 64));
            ActivationFragment b;
            b.set(low, high);
#pragma unroll
            for (int m = 0; m < WARP_TILES; m++) mma_tile(accumulators[m][n], tiles[m], b);
        }
        // The end of a slice.
        if (--left == 0 || k + 1 == k_tiles) {
            const bool first_slice = k < tiles_per_slice;
            left = tiles_per_slice;
            const int slices = (k_tiles + tiles_per_slice - 1) / tiles_per_slice;
            float scales[WARP_COLUMNS][2];
#pragma unroll
            for (int n = 0; n < WARP_COLUMNS; n++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    scales[n][i] = x.scales[(u64) min(block_row + warp_row + n * 8 + 2 * t + i, n_rows - 1) * slices +
                                            k / tiles_per_slice];
#pragma unroll
            for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
                for (int n = 0; n < WARP_COLUMNS; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float *total = totals + ((m * WARP_COLUMNS + n) * 4 + i) * 256;
                        const float v = accumulators[m][n][i] * scales[n][i & 1];
                        *total = first_slice ? v : *total + v;
                        accumulators[m][n][i] = 0.0f;
                    }
        }
    }
    // Epilogue.
#pragma unroll
    for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
        for (int n = 0; n < WARP_COLUMNS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = (block_tile + warp_tile + m) * 16 + g + (i >> 1) * 8;
                const int activation_row = block_row + warp_row + n * 8 + 2 * t + (i & 1);
                if (row >= rows || activation_row >= n_rows) continue;
                y[(u64) activation_row * rows + row] =
                    totals[((m * WARP_COLUMNS + n) * 4 + i) * 256] * row_tile_scales(w, rows, k_tiles)[row >> 4];
            }
}
