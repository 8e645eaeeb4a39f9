// A product with a narrow gate's matrix, the gate, and the product of what it lets through (Gemma 4's per-layer
// inputs):
//   z = (activation(x gateᵀ) v) projectionᵀ
// for few rows, in one kernel, with the bits of three. math.cuh, mbarrier.cuh, rows.cuh and weight_tile.cuh go before
// this.
//
//   global                          shared, of each block of a cluster
//   gate, projection - TMA before the input is there -> packed tiles, all that the block needs
//   x - cp.async -> B fragments, with gate tiles: mma -> partials of slices -> gate, times v: 16 or 32 columns a block
//                                   -- st.async to all blocks --> 8 rows of gated columns -> f16 with scales
//                                   with projection tiles: mma -> z
//
// A cluster of GATED_BLOCKS blocks takes GATED_ROWS rows, for a single multiprocessor would take long to issue the
// instructions that dequantize both matrices. Two warps have a slice of K of the block's row tiles of the gate, of
// SLICES slices: each copies one half of every tile's activations and multiplies one row tile, if there are two. Then
// each warp has some row tiles of the projection, whose K is a single slice.
#if __CUDA_ARCH__ >= 900
constexpr int ROWS = GATED_ROWS;                           // of activations
constexpr int GATE_TILES = GATED_ROW_TILES / GATED_BLOCKS; // row tiles of the gate, at most, of a block
constexpr int COLUMNS = GATE_TILES * 16;                   // of the gate, at most, of a block
constexpr int MOST_COLUMNS = GATED_ROW_TILES * 16, MOST_TILES = MOST_COLUMNS / 64;
constexpr int SLICE_TILES = GATED_SLICE_TILES;           // tiles of a slice of the gate's K, at most
constexpr int PROJECTION_TILES = GATED_PROJECTION_TILES; // row tiles of the projection, at most, of a block
constexpr int AT_ONCE = 2;                               // row tiles of the projection that a warp takes side by side
constexpr int WARPS_OF_SLICE = GATED_WARPS_OF_SLICE, WARPS = SLICES * WARPS_OF_SLICE, THREADS = WARPS * 32;
constexpr int RESULTS = GATE_TILES * 128, RESULTS_OF_THREAD = (RESULTS + THREADS - 1) / THREADS;
static_assert(GATE_TILES <= WARPS_OF_SLICE, "a warp a row tile");
static_assert(WARPS_OF_SLICE == 2 && ROWS == 8, "a warp a half of each tile, and one tensor-core product");
static_assert(SLICE_TILES == 8 && SLICES < 16, "two scales a lane, and a named barrier a slice");
// Partial results of the gate; later the gated columns, as `Activations`.
constexpr int PARTIALS_BYTES = SLICES * RESULTS * 4, VALUES_BYTES = ROWS * MOST_COLUMNS * 2,
              ACTIVATION_BYTES = VALUES_BYTES + ROWS * MOST_TILES * 4;
constexpr int SCRATCH_BYTES = PARTIALS_BYTES > ACTIVATION_BYTES ? PARTIALS_BYTES : ACTIVATION_BYTES;

struct GatedProjection {
    const u8 *gate, *projection;
    const float *v; // the first of the columns that are gated
    u64 v_stride;
    float *z;
    int activation, columns, rows; // columns of the gate, rows of the projection
};

// How many row tiles `row_tiles` of them are with those that lie beside the last ones in memory.
DEVICE int with_neighbors(int row_tiles) { return (row_tiles + INTERLEAVE - 1) / INTERLEAVE * INTERLEAVE; }

KERNEL __launch_bounds__(THREADS, 1)
    gated_projection(GatedProjection p, Activations x, int n_rows, int k_tiles, int tiles_per_slice) {
    extern __shared__ __align__(128) u8 smem[];
    __shared__ __align__(16) u8 scratch[SCRATCH_BYTES];
    __shared__ __align__(16) float gated[ROWS * MOST_COLUMNS], outgoing[ROWS * COLUMNS];
    __shared__ float row_scales[PROJECTION_TILES];
    __shared__ u64 weights_are_there, gate_is_there;
    float *partials = (float *) scratch;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int base = blockIdx.y * ROWS, here = min(ROWS, n_rows - base), rank = (int) cluster_rank();
    // The block's row tiles of either matrix.
    const int gate_tile = rank * GATE_TILES, gate_count = max(0, min(GATE_TILES, p.columns / 16 - gate_tile));
    const int row_tiles = (p.rows + 15) / 16, of_block = with_neighbors((row_tiles + GATED_BLOCKS - 1) / GATED_BLOCKS);
    const int first_tile = rank * of_block, count = max(0, min(of_block, row_tiles - first_tile));
    const int inner_tiles = (p.columns + 63) / 64;
    // The warp's slice of one of them.
    const int slice = warp % SLICES, m = warp / SLICES, begin = slice * tiles_per_slice,
              length = max(0, min(tiles_per_slice, k_tiles - begin));
    const u8 *gate = smem + row_tile_offset(gate_tile % INTERLEAVE + m, k_tiles) + begin * K_STRIDE;
    u8 *projection = smem + with_neighbors(GATE_TILES) * k_tiles * TILE_BYTES;
    // Of each tile of the slice 16 bytes a lane, and 16 half a tile on.
    u8 *inputs = projection + of_block * inner_tiles * TILE_BYTES + slice * tiles_per_slice * 1024 + lane * 16;
    if (threadIdx.x == 0) {
        const u32 weights = smem_address(&weights_are_there), exchange = smem_address(&gate_is_there);
        mbarrier_init(weights, 1);
        mbarrier_init(exchange, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        mbarrier_expect_tx(exchange, p.columns * here * 4);
        const u32 gate_bytes = with_neighbors(gate_count) * k_tiles * TILE_BYTES,
                  projection_bytes = with_neighbors(count) * inner_tiles * TILE_BYTES;
        mbarrier_expect_tx(weights, gate_bytes + projection_bytes);
        if (gate_bytes > 0)
            bulk_copy(smem_address(smem), p.gate + row_tile_offset(gate_tile / INTERLEAVE * INTERLEAVE, k_tiles),
                      gate_bytes, weights);
        if (projection_bytes > 0)
            bulk_copy(smem_address(projection), p.projection + row_tile_offset(first_tile, inner_tiles),
                      projection_bytes, weights);
    }
    for (int i = threadIdx.x; i < count; i += THREADS)
        row_scales[i] = row_tile_scales(p.projection, p.rows, inner_tiles)[first_tile + i];
    // The thread's results of the gate: number `at` is register i of lane l, of the block's row tile number `tile`.
    struct Result {
        int row, column; // of activations; of the block's columns
        bool exists;
        float scale;
    } results[RESULTS_OF_THREAD];
#pragma unroll
    for (int j = 0; j < RESULTS_OF_THREAD; j++) {
        const int at = threadIdx.x + j * THREADS, l = at & 31, i = at >> 5 & 3, tile = at >> 7;
        Result &own = results[j];
        own.row = (l & 3) * 2 + (i & 1);
        own.column = tile * 16 + (l >> 2) + (i >> 1) * 8;
        own.exists = at < RESULTS && tile < gate_count && own.row < here;
        own.scale = own.exists ? row_tile_scales(p.gate, p.columns, k_tiles)[gate_tile + tile] : 0.0f;
    }
    cluster_sync(); // the barriers are there
    pdl_launch();
    pdl_wait();
    float values_of[RESULTS_OF_THREAD];
#pragma unroll
    for (int j = 0; j < RESULTS_OF_THREAD; j++) {
        const Result &result = results[j];
        values_of[j] = result.exists ? p.v[(base + result.row) * p.v_stride + gate_tile * 16 + result.column] : 0.0f;
    }
    {
        const u64 row = base + min(g, here - 1);
        const u16 *values = x.values + row * x.stride + begin * 64 + t * 8;
#pragma unroll
        for (int i = 0; i < SLICE_TILES; i++)
            if (i < length) cp_async_16(smem_address(inputs + i * 1024 + m * 512), values + i * 64 + m * 32);
        cp_async_commit();
        // Every fourth tile's scale.
        float of_tiles[SLICE_TILES / 4], scale = 0.0f;
#pragma unroll
        for (int i = 0; i < SLICE_TILES / 4; i++) {
            of_tiles[i] = t + 4 * i < length ? x.scales[row * (x.stride / 64) + begin + t + 4 * i] : 0.0f;
            scale = larger(scale, of_tiles[i]);
        }
        scale = quad_max(scale);
        const float inverse = inverse_pow2(scale);
        float accumulators[1][1][4];
        clear(accumulators);
        mbarrier_wait(smem_address(&weights_are_there), 0);
        cp_async_wait<0>();
        asm volatile("bar.sync %0, %1;" ::"r"(1 + slice), "n"(32 * WARPS_OF_SLICE) : "memory");
#pragma unroll 1
        for (int i = 0; m < GATE_TILES && i < length; i++) {
            ActivationFragment b;
            const float of_tile = __shfl_sync(~0u, i < 4 ? of_tiles[0] : of_tiles[1], (lane & 28) + (i & 3));
            b.set(*(const uint4 *) (inputs + i * 1024), *(const uint4 *) (inputs + i * 1024 + 512),
                  rescale_f16x2(of_tile, inverse));
            mma_tile(accumulators[0][0], Tile::load<true>(gate + i * K_STRIDE, lane), b);
        }
        apply_slice_scale(accumulators, 0, scale);
#pragma unroll
        for (int i = 0; m < GATE_TILES && i < 4; i++)
            partials[slice * RESULTS + (m * 4 + i) * 32 + lane] = accumulators[0][0][i];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < RESULTS_OF_THREAD; j++) {
        const Result &result = results[j];
        if (!result.exists) continue;
        const int at = threadIdx.x + j * THREADS;
        float sum = partials[at];
#pragma unroll
        for (int s = 1; s < SLICES; s++) sum += partials[s * RESULTS + at];
        outgoing[result.row * COLUMNS + result.column] = activate(p.activation, sum * result.scale) * values_of[j];
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < here * (COLUMNS / 4) * GATED_BLOCKS; i += THREADS) {
        const int four = i / GATED_BLOCKS % (COLUMNS / 4) * 4, row = i / (GATED_BLOCKS * (COLUMNS / 4));
        if (four < gate_count * 16)
            send_to_block(i % GATED_BLOCKS, smem_address(&gated[row * MOST_COLUMNS + gate_tile * 16 + four]),
                          smem_address(&gate_is_there), *(const float4 *) &outgoing[row * COLUMNS + four]);
    }
    mbarrier_wait_cluster(smem_address(&gate_is_there), 0);
    const Activations inner = {(u16 *) scratch, (float *) (scratch + VALUES_BYTES), MOST_COLUMNS};
#pragma unroll 1
    for (int i = warp; i < here * inner_tiles; i += WARPS) {
        const int row = i / inner_tiles, k = i - row * inner_tiles, c = k * 64 + 2 * lane;
        float2 v = make_float2(0.0f, 0.0f);
        if (c < p.columns) v = *(const float2 *) &gated[row * MOST_COLUMNS + c];
        store_activation_tile(inner, row, k, v.x, v.y);
    }
    __syncthreads();
    const ActivationRow row(inner, min(g, here - 1), 0, inner_tiles);
#pragma unroll 1
    for (int first = warp; first < count; first += WARPS * AT_ONCE) {
        float accumulators[AT_ONCE][1][4];
        clear(accumulators);
        const u8 *tiles[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) tiles[j] = projection + row_tile_offset(first + j * WARPS, inner_tiles);
#pragma unroll 1
        for (int k = 0; k < inner_tiles; k++) {
            const ActivationFragment b = row.load(k);
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                if (j == 0 || first + j * WARPS < count)
                    mma_tile(accumulators[j][0], Tile::load<true>(tiles[j] + k * K_STRIDE, lane), b);
        }
        apply_slice_scale(accumulators, 0, row.scale);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int tile = first + j * WARPS;
            if (tile >= count) break;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int to = (first_tile + tile) * 16 + g + (i >> 1) * 8, at = t * 2 + (i & 1);
                if (to < p.rows && at < here)
                    p.z[(u64) (base + at) * p.rows + to] = accumulators[j][0][i] * row_scales[tile];
            }
        }
    }
}
#endif
