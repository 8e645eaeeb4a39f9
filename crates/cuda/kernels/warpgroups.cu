// Products with many rows by warpgroups (wgmma), for compute capability 9.0 alone. tile.cuh
// goes before this; sums are those of many.cu.
//
// A block takes 8 tiles of 16 weight rows by ROWS activation rows, or pairs of row and expert
// that have the expert in common: two warpgroups multiply, four tiles each, and a warp of a
// third one has the copy engine fill STAGES stages of one tile's columns. A warp's lanes hold a
// tile of weights, as the tensor cores take them from registers; while one warpgroup multiplies,
// the other turns codes into weights. Activations the tensor cores take from shared memory, each
// instruction 16 columns in the order in which lanes hold weights, so `arrange` turns columns
// first, and brings them to the unit of their slice.

#define MANY_TILES 8
#define MANY_GROUP 8 // blocks of weight rows that go through the activations together
#define INPUT_BYTES (ROWS * 132)
#define STAGE_BYTES ((INPUT_BYTES + MANY_TILES * TILE_BYTES + 1023) / 1024 * 1024)

// Activations as the tensor cores take them: for ROWS rows and a tile, lines of 128 bytes,
// whose pieces of 16 bytes lie in an order that avoids conflicts (the hardware's own, of 128
// bytes), then the units of the rows' slices, in the order in which lanes take four columns of
// results. `row` is the thread's, negative for nobody.
__device__ __forceinline__ void arrange_row(const Half &x, u8 *to, int row, int per) {
    const int tiles = gridDim.x, k = blockIdx.x, at = threadIdx.x >> 1, h = threadIdx.x & 1;
    to += ((u64) blockIdx.y * tiles + k) * INPUT_BYTES;
    u32 v[4][4] = {};
    float unit = 0.0f;
    if (row >= 0) {
        const float *factors = x.factors + (u64) row * tiles;
        unit = unit_around(k, per, tiles, [&](int i) { return factors[i]; });
        const u32 by = ratio(factors[k], inverse(unit));
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const uint4 from = *(const uint4 *) (x.values + (u64) row * x.kp + k * 64 + h * 32 + t * 8);
            v[0][t] = mul2(from.x, by);
            v[1][t] = mul2(from.y, by);
            v[2][t] = mul2(from.z, by);
            v[3][t] = mul2(from.w, by);
        }
    }
    uint4 *line = (uint4 *) (to + at * 128);
#pragma unroll
    for (int i = 0; i < 4; i++) line[h * 4 + i ^ at & 7] = make_uint4(v[i][0], v[i][1], v[i][2], v[i][3]);
    if (h == 0) ((float *) (to + ROWS * 128))[(at >> 4) * 16 + (at >> 1 & 3) * 4 + (at >> 3 & 1) * 2 + (at & 1)] = unit;
}
KERNEL __launch_bounds__(2 * ROWS) arrange(Half x, u8 *to, int n_rows, int per) {
    in_order();
    const int row = blockIdx.y * ROWS + (threadIdx.x >> 1);
    arrange_row(x, to, row < n_rows ? row : -1, per);
}
// Pairs of row and expert: what `group` of moe.cu lists, a block of ROWS of an expert's at a
// time. A pair reads activation row `by_pair ? pair : pair / top_k`.
KERNEL __launch_bounds__(2 * ROWS) arrange_pairs(Half x, u8 *to, const Some *blocks, const u32 *pairs, int top_k, int by_pair, int per) {
    in_order();
    if (blockIdx.y >= blocks->count) return;
    const Some own = blocks[1 + blockIdx.y];
    const u32 at = threadIdx.x >> 1;
    const u32 pair = at < own.count ? pairs[own.first + at] : 0;
    arrange_row(x, to, at < own.count ? (int) (by_pair ? pair : pair / top_k) : -1, per);
}

// The stage whose turn it is.
struct Turn {
    int stage = 0;
    u32 round = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            round++;
        }
    }
    // What the block works on, of the `tiles` of each: not a variable, for want of registers.
    __device__ __forceinline__ int item(int tiles) const { return (int) (blockIdx.x + (round * STAGES + stage) / tiles * gridDim.x); }
};

// What a block works on: tiles from `tile` on and block `block` of ROWS activation rows, of
// which there are `count`.
struct Work {
    const u8 *w;
    float *y; // of the block's first row
    int rows, tile, block, count;
    const u32 *pairs; // where results go, if not one after the other
};
__device__ __forceinline__ Work work(const Matrices &m, int n_rows, int item, int items, int blocks) {
    Work v;
    const int wide = items / blocks;
    const int part = item / (MANY_GROUP * wide), in = item - part * MANY_GROUP * wide, size = min(MANY_GROUP, blocks - part * MANY_GROUP);
    const int block = part * MANY_GROUP + in % size;
    v.block = in / size;
    int which = 0;
#pragma unroll
    for (int i = 1; i < 4; i++) which += block >= m.first[i];
    int first = m.first[0];
    v.w = m.w[0]; v.y = m.y[0]; v.rows = m.rows[0];
#pragma unroll
    for (int i = 1; i < 4; i++)
        if (which == i) { v.w = m.w[i]; v.y = m.y[i]; v.rows = m.rows[i]; first = m.first[i]; }
    v.tile = (block - first) * MANY_TILES;
    v.y += (u64) v.block * ROWS * v.rows;
    v.count = n_rows - v.block * ROWS;
    v.pairs = nullptr;
    return v;
}
// Experts' matrices of one shape, and what rows chose of them.
struct Grouped {
    const u64 *table;
    const Some *blocks;
    const u32 *pairs;
    float *y;
    int rows;
    __device__ __forceinline__ int wide() const { return (rows + 16 * MANY_TILES - 1) / (16 * MANY_TILES); }
    __device__ __forceinline__ Work work(int item) const {
        const int block = item / wide();
        const Some own = blocks[1 + block];
        return {(const u8 *) table[own.expert], y, rows, (item - block * wide()) * MANY_TILES, block, (int) own.count, pairs + own.first};
    }
};

// `find` gives the work of an item.
template <bool GROUPED, class Find>
__device__ __forceinline__ void multiply_many(Find find, const u8 *x, int tiles, int per, int items) {
    constexpr int E = ROWS / 8;
    extern __shared__ u8 memory[];
    __shared__ u64 full[STAGES], empty[STAGES];
    u8 *staged = memory + (1024 - (shared_at(memory) & 1023) & 1023);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            arrivals(shared_at(full + s), 1);
            arrivals(shared_at(empty + s), MANY_TILES);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    Turn turn;
    if (warp >= MANY_TILES) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        constexpr int BANDS = MANY_TILES / BAND;
        for (int item = warp == MANY_TILES ? blockIdx.x : items; item < items; item += gridDim.x) {
            const Work v = find(item);
            const int bands = (v.rows + 16 * BAND - 1) / (16 * BAND);
            const u8 *w = v.w + (u64) min(v.tile / BAND + min(lane, BANDS - 1), bands - 1) * tiles * ALONG;
            const u8 *from = x + (u64) v.block * tiles * INPUT_BYTES;
#pragma unroll 1
            for (int k = 0; k < tiles; k++, turn.next()) {
                const u32 to = shared_at(staged) + turn.stage * STAGE_BYTES, ready = shared_at(full + turn.stage);
                await(shared_at(empty + turn.stage), turn.round + 1);
                if (lane == 0) expect(ready, INPUT_BYTES + MANY_TILES * TILE_BYTES);
                __syncwarp();
                if (lane < BANDS) bring(to + INPUT_BYTES + lane * ALONG, w + (u64) k * ALONG, ALONG, ready);
                if (lane == BANDS) bring(to, from + (u64) k * INPUT_BYTES, INPUT_BYTES, ready);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        float c[E][4], total[E][4];
        while (turn.item(tiles) < items) {
            int left = per;
#pragma unroll 1
            for (int k = 0; k < tiles; k++, turn.next()) {
                const u8 *stage = staged + turn.stage * STAGE_BYTES;
                await(shared_at(full + turn.stage), turn.round);
                const Tile tile = fetch<true>(stage + INPUT_BYTES + warp * TILE_BYTES, lane);
                u32 a[4][4];
#pragma unroll
                for (int j = 0; j < 4; j++) weights(tile, j, a[j]);
                before_products();
#pragma unroll
                for (int j = 0; j < 4; j++) wgmma(c, a[j], (u64) ((shared_at(stage) + j * 32 & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62, j > 0 || left < per);
                await_products(c);
                if (--left == 0 || k + 1 == tiles) {
                    left = per;
                    const float4 *units = (const float4 *) (stage + ROWS * 128) + t;
#pragma unroll
                    for (int q = 0; q < E / 2; q++) {
                        const float4 u = units[q * 4];
                        const float unit[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
                        for (int i = 0; i < 8; i++) {
                            const int n = 2 * q + (i >> 2);
                            const float v = c[n][i & 3] * unit[(i >> 2) * 2 + (i & 1)];
                            total[n][i & 3] = k < per ? v : total[n][i & 3] + v;
                        }
                    }
                }
                __syncwarp();
                if (lane == 0) arrive(shared_at(empty + turn.stage));
            }
            const Work v = find(turn.item(tiles) - gridDim.x);
            const int column = 2 * t, count = v.count - column, tile = v.tile + warp;
            const float factor = tile * 16 < v.rows ? factors_of(v.w, v.rows, tiles)[tile] : 0.0f;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = tile * 16 + (lane >> 2) + i * 8;
                if (row >= v.rows) continue;
                float *y = v.y + row;
                if (!GROUPED) y += (u64) column * v.rows;
#pragma unroll
                for (int n = 0; n < 2 * E; n++) {
                    const int next = n / 2 * 8 + n % 2;
                    if (next < count) y[(u64) (GROUPED ? v.pairs[column + next] : next) * v.rows] = total[n / 2][i * 2 + n % 2] * factor;
                }
            }
        }
    }
}
KERNEL __launch_bounds__(384, 1) product_many(Matrices m, const u8 *x, int n_rows, int tiles, int per, int blocks, int items) {
    in_order();
    multiply_many<false>([&](int item) { return work(m, n_rows, item, items, blocks); }, x, tiles, per, items);
}
#if ROWS == 64 // PAIRS of src/many.rs
// Experts of many pairs.
KERNEL __launch_bounds__(384, 1) product_grouped(Grouped m, const u8 *x, int tiles, int per) {
    in_order();
    multiply_many<true>([&](int item) { return m.work(item); }, x, tiles, per, (int) m.blocks->count * m.wide());
}
#endif
