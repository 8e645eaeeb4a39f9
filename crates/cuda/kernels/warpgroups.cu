// Products with many rows by warpgroups (wgmma), for compute capability 9.0 alone. tile.cuh
// goes before this; sums are those of many.cu.
//
// A block takes 8 tiles of 16 weight rows by ROWS activation rows, or pairs of row and expert
// that have the expert in common: two warpgroups multiply,
// each by half of the activations, and a warp of a third one has the copy engine fill STAGES
// stages of one tile's columns. A warp's lanes hold two tiles of weights, as the tensor cores
// take them from registers. Activations they take from shared memory, each instruction 16
// columns in the order in which lanes hold weights, so `arrange` turns columns first.
//
// KNOWN: what is known of an activation row and a tile, numbers, a plane for each: the
// factor; the sum of (the first group of) the columns; that of the second, or for
// TWO_OFFSETS what codes are too large by.

#define MANY_TILES 8
#define MANY_GROUP 8 // blocks of weight rows that go through the activations together
#define INPUT_BYTES (ROWS * (128 + 4 * KNOWN))
#define STAGE_BYTES ((INPUT_BYTES + MANY_TILES * TILE_BYTES + 1023) / 1024 * 1024)

// Activations as the tensor cores take them: for ROWS rows and a tile, lines of 128 bytes,
// whose pieces of 16 bytes lie in an order that avoids conflicts (the hardware's own, of 128
// bytes), then the planes, in the order in which lanes take four columns of results.
// `row` is the thread's, negative for nobody.
__device__ __forceinline__ void arrange_row(const Half &x, u8 *to, int row) {
    const int tiles = gridDim.x, k = blockIdx.x, at = threadIdx.x >> 1, h = threadIdx.x & 1;
    to += ((u64) blockIdx.y * tiles + k) * INPUT_BYTES;
    uint4 v[4] = {};
    if (row >= 0)
#pragma unroll
        for (int t = 0; t < 4; t++) v[t] = *(const uint4 *) (x.values + (u64) row * x.kp + k * 64 + h * 32 + t * 8);
    uint4 *line = (uint4 *) (to + at * 128);
    const int turn = at & 7;
    line[h * 4 + 0 ^ turn] = make_uint4(v[0].x, v[1].x, v[2].x, v[3].x);
    line[h * 4 + 1 ^ turn] = make_uint4(v[0].y, v[1].y, v[2].y, v[3].y);
    line[h * 4 + 2 ^ turn] = make_uint4(v[0].z, v[1].z, v[2].z, v[3].z);
    line[h * 4 + 3 ^ turn] = make_uint4(v[0].w, v[1].w, v[2].w, v[3].w);
    if (h) return;
    const float4 s = row >= 0 ? x.tiles[(u64) row * (x.kp / 64) + k] : make_float4(0, 0, 0, 0);
    float *plane = (float *) (to + ROWS * 128) + (at >> 4) * 16 + (at >> 1 & 3) * 4 + (at >> 3 & 1) * 2 + (at & 1);
    plane[0] = s.z;
#if KNOWN > 1
    plane[ROWS] = GROUPS == 1 ? s.x + s.y : s.x;
#endif
#if KNOWN > 2
    plane[2 * ROWS] = GROUPS == 1 ? s.w : s.y;
#endif
}
KERNEL __launch_bounds__(2 * ROWS) arrange(Half x, u8 *to, int n_rows) {
    in_order();
    const int row = blockIdx.y * ROWS + (threadIdx.x >> 1);
    arrange_row(x, to, row < n_rows ? row : -1);
}
// Pairs of row and expert: what `group` of moe.cu lists, a block of ROWS of an expert's at a
// time. A pair reads activation row `by_pair ? pair : pair / top_k`.
KERNEL __launch_bounds__(2 * ROWS) arrange_pairs(Half x, u8 *to, const Some *blocks, const u32 *pairs, int top_k, int by_pair) {
    in_order();
    if (blockIdx.y >= blocks->count) return;
    const Some own = blocks[1 + blockIdx.y];
    const u32 at = threadIdx.x >> 1;
    const u32 pair = at < own.count ? pairs[own.first + at] : 0;
    arrange_row(x, to, at < own.count ? (int) (by_pair ? pair : pair / top_k) : -1);
}

__device__ __forceinline__ u32 shared_at(const void *p) { return (u32) __cvta_generic_to_shared(p); }
__device__ __forceinline__ void await(u32 barrier, u32 phase) {
    asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra AGAIN;\n}" :: "r"(barrier), "r"(phase & 1) : "memory");
}
__device__ __forceinline__ void copy_bulk(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
#define C4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
template <bool ADD>
__device__ __forceinline__ void wgmma(float (&c)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, %37, 1, 1, 0;"
        : C4(0), C4(1), C4(2), C4(3), C4(4), C4(5), C4(6), C4(7) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD));
}
template <bool ADD>
__device__ __forceinline__ void wgmma(float (&c)[4][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, %21, 1, 1, 0;"
        : C4(0), C4(1), C4(2), C4(3) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD));
}
template <int E>
__device__ __forceinline__ void await_products(float (&c)[E][4]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int n = 0; n < E; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[n][i]) :: "memory");
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
    const float *factor;
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
    v.w = m.w[0]; v.factor = m.factor[0]; v.y = m.y[0]; v.rows = m.rows[0];
#pragma unroll
    for (int i = 1; i < 4; i++)
        if (which == i) { v.w = m.w[i]; v.factor = m.factor[i]; v.y = m.y[i]; v.rows = m.rows[i]; first = m.first[i]; }
    v.tile = (block - first) * MANY_TILES;
    v.y += (u64) v.block * ROWS * v.rows;
    v.count = n_rows - v.block * ROWS;
    v.pairs = nullptr;
    return v;
}
// Experts' matrices of one shape, and what rows chose of them.
struct Grouped {
    const u64 *table, *factors;
    const Some *blocks;
    const u32 *pairs;
    float *y;
    int rows;
    __device__ __forceinline__ int wide() const { return (rows + 16 * MANY_TILES - 1) / (16 * MANY_TILES); }
    __device__ __forceinline__ Work work(int item) const {
        const int block = item / wide();
        const Some own = blocks[1 + block];
        return {(const u8 *) table[own.expert], factors ? (const float *) factors[own.expert] : nullptr, y, rows, (item - block * wide()) * MANY_TILES, block, (int) own.count, pairs + own.first};
    }
};

// `find` gives the work of an item.
template <bool GROUPED, class Find>
__device__ __forceinline__ void multiply_many(Find find, const u8 *x, int tiles, int per, int items) {
    constexpr int E = ROWS / 16, STEPS = 4 / GROUPS;
    extern __shared__ u8 memory[];
    __shared__ u64 full[STAGES], empty[STAGES];
    u8 *staged = memory + (1024 - (shared_at(memory) & 1023) & 1023);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_at(full + s)) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 8;" :: "r"(shared_at(empty + s)) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    Turn turn;
    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        constexpr int BANDS = MANY_TILES / BAND;
        for (int item = warp == 8 ? blockIdx.x : items; item < items; item += gridDim.x) {
            const Work v = find(item);
            const int bands = (v.rows + 16 * BAND - 1) / (16 * BAND);
            const u8 *w = v.w + (u64) min(v.tile / BAND + min(lane, BANDS - 1), bands - 1) * tiles * ALONG;
            const u8 *from = x + (u64) v.block * tiles * INPUT_BYTES;
#pragma unroll 1
            for (int k = 0; k < tiles; k++, turn.next()) {
                const u32 to = shared_at(staged) + turn.stage * STAGE_BYTES, ready = shared_at(full + turn.stage);
                await(shared_at(empty + turn.stage), turn.round + 1);
                if (lane == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(ready), "r"(INPUT_BYTES + MANY_TILES * TILE_BYTES) : "memory");
                __syncwarp();
                if (lane < BANDS) copy_bulk(to + INPUT_BYTES + lane * ALONG, w + (u64) k * ALONG, ALONG, ready);
                if (lane == BANDS) copy_bulk(to, from + (u64) k * INPUT_BYTES, INPUT_BYTES, ready);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        float4 *total = (float4 *) (staged + STAGES * STAGE_BYTES) + threadIdx.x;
        const u32 magic = offset();
        const int part = warp >> 2, own = warp & 3; // of the activations; of the tiles
        float o[2][E][4], c[2][E][4];
        u32 a[2][4][4];
        Tile now[2];
        while (turn.item(tiles) < items) {
#pragma unroll
            for (int n = 0; n < 2 * E; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[n / E][n % E][i] = 0.0f;
            int left = per;
#pragma unroll 1
            for (int k = 0; k < tiles; k++, turn.next()) {
                const u8 *stage = staged + turn.stage * STAGE_BYTES;
                await(shared_at(full + turn.stage), turn.round);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    now[h] = fetch<true>(stage + INPUT_BYTES + (own + 4 * h) * TILE_BYTES, lane);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        expand(now[h].codes, 0, j, magic, a[h][j][0], a[h][j][2]);
                        expand(now[h].codes, 1, j, magic, a[h][j][1], a[h][j][3]);
                    }
                }
                const u32 at = shared_at(stage) + part * (ROWS * 64);
                const float4 *known = (const float4 *) (stage + ROWS * 128) + part * (ROWS / 8) + t;
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                    for (int h = 0; h < 2; h++)
#pragma unroll
                        for (int i = 0; i < STEPS; i++) {
                            const int j = group * STEPS + i;
                            const u64 b = (u64) ((at + j * 32 & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
                            if (i == 0) wgmma<false>(c[h], a[h][j], b);
                            else wgmma<true>(c[h], a[h][j], b);
                        }
                    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                    float4 factors[E / 2];
                    constexpr bool early = FORMAT != 3 && FORMAT != 5 && FORMAT != 6; // if registers last
#pragma unroll
                    for (int q = 0; early && q < E / 2; q++) factors[q] = known[q * 4];
                    await_products(c[0]);
                    await_products(c[1]);
#pragma unroll
                    for (int q = 0; q < E / 2; q++) {
                        if (!early) factors[q] = known[q * 4];
                        const float z[4] = {factors[q].x, factors[q].y, factors[q].z, factors[q].w};
#if KNOWN > 1
                        const float4 s4 = known[q * 4 + (GROUPS == 2 ? 1 + group : 1) * (ROWS / 4)];
                        const float sum[4] = {s4.x, s4.y, s4.z, s4.w};
#endif
#if TWO_OFFSETS
                        const float4 w4 = known[q * 4 + 2 * (ROWS / 4)];
                        const float excess[4] = {w4.x, w4.y, w4.z, w4.w};
#endif
#pragma unroll
                        for (int b = 0; b < 16; b++) {
                            const int h = b >> 3, n = 2 * q + (b >> 2 & 1), i = b & 3, e = (b >> 2 & 1) * 2 + (i & 1);
                            const float from = c[h][n][i];
                            float &to = o[h][n][i];
#ifdef CODES
                            const Scales &g = now[h].s[group][i >> 1];
#if TWO_OFFSETS
                            const float v = fmaf(from, z[e], -excess[e]);
#else
                            const float v = from * z[e];
#endif
#if FORMAT == 9
                            to = fmaf(g.scale, v, to);
#else
                            to = fmaf(g.scale, v, fmaf(g.bias, sum[e], to));
#endif
#else
                            to = fmaf(from, z[e], to);
#endif
                        }
                    }
                }
                __syncwarp();
                if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_at(empty + turn.stage)) : "memory");
                if (--left == 0 && k + 1 < tiles) {
                    left = per;
                    const bool first = k < per;
#pragma unroll
                    for (int n = 0; n < 2 * E; n++) {
                        float(&from)[4] = o[n / E][n % E];
                        float4 v = make_float4(from[0], from[1], from[2], from[3]);
                        if (!first) {
                            const float4 old = total[n * 256];
                            v = make_float4(old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w);
                        }
                        total[n * 256] = v;
#pragma unroll
                        for (int i = 0; i < 4; i++) from[i] = 0.0f;
                    }
                }
            }
            const Work v = find(turn.item(tiles) - gridDim.x);
            if (tiles > per) // more slices than one
#pragma unroll
                for (int n = 0; n < 2 * E; n++) {
                    const float4 old = total[n * 256];
                    const float sums[4] = {old.x, old.y, old.z, old.w};
#pragma unroll
                    for (int i = 0; i < 4; i++) o[n / E][n % E][i] = sums[i] + o[n / E][n % E][i];
                }
            const int column = part * (ROWS / 2) + 2 * t, count = v.count - column;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int h = i >> 1, row = (v.tile + own + 4 * h) * 16 + (lane >> 2) + (i & 1) * 8;
                if (row >= v.rows) continue;
                const float factor = v.factor ? v.factor[row] : 1.0f;
                float *y = v.y + row;
                if (!GROUPED) y += (u64) column * v.rows;
#pragma unroll
                for (int n = 0; n < 2 * E; n++) {
                    const int next = n / 2 * 8 + n % 2;
                    if (next < count) y[(u64) (GROUPED ? v.pairs[column + next] : next) * v.rows] = o[h][n / 2][(i & 1) * 2 + n % 2] * factor;
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
