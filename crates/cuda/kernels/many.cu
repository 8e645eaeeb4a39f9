// Products with many rows. tile.cuh goes before this.
//
// A block takes 8 tiles of 16 weight rows by 128 activation rows, a warp
// RW by 8 RN. Activations come through shared memory, and so do codes; whole weights are
// too many for it. Blocks that are neighbours in time share codes, which are read once,
// and activations stay in L2. The sums are those of `product`, slice by slice; whole slices
// wait in shared memory, each thread's for itself.

#define MANY 128
#define MANY_TILES 8
#define STAGES 2
#define DIRECT (FORMAT == 16) // whether weights go straight to registers
#define STAGE_BYTES (MANY * 128 + (DIRECT ? 0 : MANY_TILES * TILE_BYTES))
// Activations in units of slices: what `product_many` reads, a warp a tile. Its Half has a
// factor for each slice, not each tile.
KERNEL __launch_bounds__(256) to_slices(Half x, Half to, int tiles, int per) {
    in_order();
    const u64 at = (u64) blockIdx.x * 8 + (threadIdx.x >> 5), row = blockIdx.y;
    if (at >= (u64) tiles) return;
    const int lane = threadIdx.x & 31, k = (int) at;
    const float *factors = x.factors + row * tiles;
    const float unit = unit_around(k, per, tiles, [&](int i) { return factors[i]; });
    const u64 pair = row * (x.kp / 2) + k * 32 + lane;
    ((u32 *) to.values)[pair] = mul2(((const u32 *) x.values)[pair], ratio(factors[k], inverse(unit)));
    if (lane == 0 && k % per == 0) to.factors[row * ((tiles + per - 1) / per) + k / per] = unit;
}
__device__ __forceinline__ void copy_async(u32 to, const void *from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
#define RW 2 // rows of tiles of a warp, and eights of activation rows
#define RN (16 / RW)
KERNEL __launch_bounds__(256, 1) product_many(Matrices m, Half x, int n_rows, int tiles, int per) {
    extern __shared__ __align__(128) u8 staged[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const u32 number = blockIdx.y * gridDim.x + blockIdx.x, block = DIRECT ? blockIdx.x : number / gridDim.y;
    int which = 0;
#pragma unroll
    for (int i = 1; i < 4; i++) which += (int) block >= m.first[i];
    const u8 *w = m.w[0];
    float *y = m.y[0];
    int rows = m.rows[0], first = m.first[0];
#pragma unroll
    for (int i = 1; i < 4; i++)
        if (which == i) { w = m.w[i]; y = m.y[i]; rows = m.rows[i]; first = m.first[i]; }
    const int tile = ((int) block - first) * MANY_TILES, base = (int) (DIRECT ? blockIdx.y : number % gridDim.y) * MANY, mine = warp % (16 / RN) * 8 * RN, own = warp / (16 / RN) * RW;
    const int last = (rows + 15) / 16;
    // What the thread copies of a stage's weights, 16 bytes of some rows of tiles each, or
    // where its warp's rows start.
    constexpr int parts = TILE_BYTES / 16, copies = DIRECT ? RW : (MANY_TILES * parts + 255) / 256;
    const u8 *run[copies];
#pragma unroll
    for (int i = 0; i < copies; i++) {
        const int part = threadIdx.x + i * 256, r = tile + (DIRECT ? own + i : part / parts);
        run[i] = w + row_of_tiles(r < last ? r : 0, tiles) + (DIRECT ? 0 : part % parts * 16);
    }
    const u32 to = (u32) __cvta_generic_to_shared(staged);
    auto stage = [&](int k) {
        if (k < tiles) {
            const u32 at = to + k % STAGES * STAGE_BYTES;
#pragma unroll
            for (int i = threadIdx.x; i < MANY * 8; i += 256) {
                const int row = i >> 3, c = i & 7;
                const bool real = base + row < n_rows;
                copy_async(at + row * 128 + (c * 16 ^ (row & 1) * 64), x.values + (u64) (real ? base + row : 0) * x.kp + k * 64 + c * 8, real);
            }
#pragma unroll
            for (int i = 0; i < copies; i++)
                if (!DIRECT && threadIdx.x + i * 256 < MANY_TILES * parts) copy_async(at + MANY * 128 + (threadIdx.x + i * 256) * 16, run[i] + (u64) k * ALONG, true);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    float *total = (float *) (staged + STAGES * STAGE_BYTES) + threadIdx.x;
    float o[RW][RN][4];
#pragma unroll
    for (int r = 0; r < RW; r++)
#pragma unroll
        for (int n = 0; n < RN; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[r][n][i] = 0.0f;
    in_order();
    for (int k = 0; k < STAGES - 1; k++) stage(k);
    Tile next[RW];
    if (DIRECT)
#pragma unroll
        for (int r = 0; r < RW; r++) next[r] = fetch(run[r], lane);
    int left = per;
#pragma unroll 1
    for (int k = 0; k < tiles; k++) {
        Tile now[RW];
#pragma unroll
        for (int r = 0; r < RW; r++) now[r] = next[r];
        if (DIRECT && k + 1 < tiles)
#pragma unroll
            for (int r = 0; r < RW; r++) next[r] = fetch(run[r] + (u64) (k + 1) * ALONG, lane);
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
        __syncthreads();
        stage(k + STAGES - 1);
        const u8 *from = staged + k % STAGES * STAGE_BYTES;
        if (!DIRECT)
#pragma unroll
            for (int r = 0; r < RW; r++) now[r] = fetch<true>(from + MANY * 128 + (own + r) * TILE_BYTES, lane);
#pragma unroll
        for (int n = 0; n < RN; n++) {
            const int row = mine + n * 8 + g;
            Inputs in;
            const uint4 a = *(const uint4 *) (from + row * 128 + (t * 16 ^ (row & 1) * 64)), b = *(const uint4 *) (from + row * 128 + (t * 16 + 64 ^ (row & 1) * 64));
            in.set(a, b);
#pragma unroll
            for (int r = 0; r < RW; r++) multiply(now[r], in, o[r][n]);
        }
        if (--left == 0 || k + 1 == tiles) {
            const bool whole = k < per; // the first slice
            left = per;
            const int slices = (tiles + per - 1) / per;
            float units[RN][2];
#pragma unroll
            for (int n = 0; n < RN; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) units[n][i] = x.factors[(u64) min(base + mine + n * 8 + 2 * t + i, n_rows - 1) * slices + k / per];
#pragma unroll
            for (int r = 0; r < RW; r++)
#pragma unroll
                for (int n = 0; n < RN; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float *sum = total + ((r * RN + n) * 4 + i) * 256;
                        const float v = o[r][n][i] * units[n][i & 1];
                        *sum = whole ? v : *sum + v;
                        o[r][n][i] = 0.0f;
                    }
        }
    }
#pragma unroll
    for (int r = 0; r < RW; r++)
#pragma unroll
        for (int n = 0; n < RN; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = (tile + own + r) * 16 + g + (i >> 1) * 8, from = base + mine + n * 8 + 2 * t + (i & 1);
                if (row >= rows || from >= n_rows) continue;
                y[(u64) from * rows + row] = total[((r * RN + n) * 4 + i) * 256] * factors_of(w, rows, tiles)[row >> 4];
            }
}
