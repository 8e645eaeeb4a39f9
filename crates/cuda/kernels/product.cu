// Products of packed weights with a few rows: tensor cores, 16 weight rows by 8
// activation rows at a time. src/pack.rs defines the tiles.
//
// FORMAT: 16 plain f16, 9 f8 e4m3, 2 3 4 5 6 8 codes of so many bits with a
// scale and a bias for every GROUP (32 or 64) columns, stored in SCALE bits (16
// or 32; 16 is bf16 if SCALE_BF16, else f16).
//
// The order of a sum. A row's tiles of 64 columns are cut into `slices` runs of
// `per` tiles. In a slice, one accumulator over ascending tiles; a tile is four
// tensor-core products of 16 columns; with codes, the products of a group are
// summed from 0 and then take their scale. The slices are added from the left.
// Nothing in it knows how many rows there are: an activation row is a column of
// the tensor core's product, and columns do not mix.

#if FORMAT == 16
#define CODE_WORDS 16
#elif FORMAT == 9
#define CODE_WORDS 8
#else
#define CODE_WORDS FORMAT
#define CODES
#endif
#ifdef CODES
#define GROUPS (64 / GROUP)
#define SCALE_BITS SCALE
#define SCALE_BYTES (GROUPS * 16 * SCALE / 4)
#else
#define GROUPS 1
#define SCALE_BITS 0
#define SCALE_BYTES 0
#endif
#define TILE_BYTES (CODE_WORDS * 128 + SCALE_BYTES)

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint4 stream16(const void *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 stream8(const void *p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
__device__ __forceinline__ u32 stream4(const void *p) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
// 1024 twice, in f16: opaque, or the compiler splits each LOP3 in two.
__device__ __forceinline__ u32 offset() {
    u32 v;
    asm("mov.u32 %0, 0x64006400;" : "=r"(v));
    return v;
}
__device__ __forceinline__ u32 masked(u32 w, u32 mask, u32 plus) {
    u32 v;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(w), "r"(mask), "r"(plus));
    return v;
}
__device__ __forceinline__ u32 bytes(u32 a, u32 b, u32 select) {
    u32 v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(select));
    return v;
}

// One lane's part of a tile: for the rows g and g + 8, 16 columns each.
struct Codes {
    u32 w[CODE_WORDS];
};
__device__ __forceinline__ Codes load(const u8 *tile, int lane) {
    Codes c;
#if FORMAT >= 4
    constexpr int whole = CODE_WORDS / 4; // 16-byte parts
#pragma unroll
    for (int i = 0; i < whole; i++) {
        uint4 v = stream16(tile + (i * 32 + lane) * 16);
        c.w[4 * i] = v.x; c.w[4 * i + 1] = v.y; c.w[4 * i + 2] = v.z; c.w[4 * i + 3] = v.w;
    }
#if FORMAT == 5
    c.w[4] = stream4(tile + 512 + lane * 4);
#elif FORMAT == 6
    uint2 v = stream8(tile + 512 + lane * 8);
    c.w[4] = v.x; c.w[5] = v.y;
#endif
#else
    uint2 v = stream8(tile + lane * 8);
    c.w[0] = v.x; c.w[1] = v.y;
#if FORMAT == 3
    c.w[2] = stream4(tile + 256 + lane * 4);
#endif
#endif
    return c;
}
// Four columns of one row of the lane's two (half), as two pairs of f16; codes
// come 1024 too large.
__device__ __forceinline__ void expand(const Codes &c, int half, int j, u32 magic, u32 &p0, u32 &p1) {
    [[maybe_unused]] const int h = j >> 1, q = h * 4 + 2 * (j & 1);
#if FORMAT == 16
    // Part i of 16 bytes: (half, h).
    p0 = c.w[(half * 2 + h) * 4 + 2 * (j & 1)];
    p1 = c.w[(half * 2 + h) * 4 + 2 * (j & 1) + 1];
#elif FORMAT == 9
    u32 w = c.w[half * 4 + h * 2 + (j & 1)];
    u32 a = bytes(w, 0, 0x1404), b = bytes(w, 0, 0x3424);
    p0 = (a & 0x80008000u) | ((a & 0x7f007f00u) >> 1);
    p1 = (b & 0x80008000u) | ((b & 0x7f007f00u) >> 1);
#elif FORMAT == 8
    u32 w = c.w[half * 4 + h * 2 + (j & 1)];
    p0 = bytes(w, magic, 0x5150);
    p1 = bytes(w, magic, 0x5352);
#elif FORMAT >= 4
    u32 w = c.w[half * 2 + h];
    p0 = masked(w >> (8 * (j & 1)), 0x000f000fu, magic);
    p1 = masked(w >> (8 * (j & 1) + 4), 0x000f000fu, magic);
#if FORMAT == 5
    p0 |= ((c.w[4] >> (half * 8 + q)) & 0x00010001u) << 4;
    p1 |= ((c.w[4] >> (half * 8 + q + 1)) & 0x00010001u) << 4;
#elif FORMAT == 6
    p0 |= ((c.w[4 + half] >> (2 * q)) & 0x00030003u) << 4;
    p1 |= ((c.w[4 + half] >> (2 * q + 2)) & 0x00030003u) << 4;
#endif
#else
    p0 = masked(c.w[half] >> (2 * q), 0x00030003u, magic);
    p1 = masked(c.w[half] >> (2 * q + 2), 0x00030003u, magic);
#if FORMAT == 3
    p0 |= ((c.w[2] >> (half * 8 + q)) & 0x00010001u) << 2;
    p1 |= ((c.w[2] >> (half * 8 + q + 1)) & 0x00010001u) << 2;
#endif
#endif
}
#ifdef CODES
struct Scales {
    float scale, bias; // the bias takes back what codes are too large
};
__device__ __forceinline__ Scales scales(const u8 *tile, int group, int row) {
    Scales s;
#if SCALE == 32
    float2 v = *(const float2 *) (tile + CODE_WORDS * 128 + (group * 16 + row) * 8);
    s.scale = v.x;
    s.bias = v.y;
#else
    u32 v = stream4(tile + CODE_WORDS * 128 + (group * 16 + row) * 4);
#if SCALE_BF16
    s.scale = __uint_as_float(v << 16);
    s.bias = __uint_as_float(v & 0xffff0000u);
#else
    s.scale = f16_to_f32((u16) v);
    s.bias = f16_to_f32((u16) (v >> 16));
#endif
#endif
    return s;
}
#endif

// What a lane needs of the activations for 8 of their rows and one tile.
struct Inputs {
    u32 w[8];
    float sums[GROUPS][2];
};

struct Tile {
    Codes codes;
#ifdef CODES
    Scales s[GROUPS][2];
#endif
};
__device__ __forceinline__ void multiply(const Tile &tile, const Inputs &x, float (&o)[4], u32 magic) {
#ifdef CODES
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        float c[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 4 / GROUPS; i++) {
            const int j = group * (4 / GROUPS) + i;
            u32 a[4];
            expand(tile.codes, 0, j, magic, a[0], a[2]);
            expand(tile.codes, 1, j, magic, a[1], a[3]);
            mma(c, a, x.w[2 * j], x.w[2 * j + 1]);
        }
        const Scales g = tile.s[group][0], h = tile.s[group][1];
        o[0] = fmaf(g.scale, c[0], fmaf(g.bias, x.sums[group][0], o[0]));
        o[1] = fmaf(g.scale, c[1], fmaf(g.bias, x.sums[group][1], o[1]));
        o[2] = fmaf(h.scale, c[2], fmaf(h.bias, x.sums[group][0], o[2]));
        o[3] = fmaf(h.scale, c[3], fmaf(h.bias, x.sums[group][1], o[3]));
    }
#else
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 a[4];
        expand(tile.codes, 0, j, magic, a[0], a[2]);
        expand(tile.codes, 1, j, magic, a[1], a[3]);
        mma(o, a, x.w[2 * j], x.w[2 * j + 1]);
    }
#endif
}
__device__ __forceinline__ Tile fetch(const u8 *tile, int lane) {
    Tile v;
    v.codes = load(tile, lane);
#ifdef CODES
    const int g = lane >> 2;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        v.s[group][0] = scales(tile, group, g);
        v.s[group][1] = scales(tile, group, g + 8);
        v.s[group][0].bias = fmaf(-1024.0f, v.s[group][0].scale, v.s[group][0].bias);
        v.s[group][1].bias = fmaf(-1024.0f, v.s[group][1].scale, v.s[group][1].bias);
    }
#endif
    return v;
}
// `row` is the activation row of the lane's column g, `row0` and `row1` those of
// its results; negative ones are nobody's.
__device__ __forceinline__ Inputs inputs(const Half &x, int k, int lane, int row, int row0, int row1) {
    Inputs v;
    uint4 a = {0, 0, 0, 0}, b = {0, 0, 0, 0};
    if (row >= 0) {
        const u16 *p = x.values + (u64) row * x.kp + k * 64 + (lane & 3) * 8;
        a = *(const uint4 *) p;
        b = *(const uint4 *) (p + 32);
    }
    v.w[0] = a.x; v.w[1] = a.y; v.w[2] = a.z; v.w[3] = a.w;
    v.w[4] = b.x; v.w[5] = b.y; v.w[6] = b.z; v.w[7] = b.w;
#ifdef CODES
    float2 s0 = {0, 0}, s1 = {0, 0};
    if (row0 >= 0) s0 = *(const float2 *) (x.sums + (u64) row0 * (x.kp / 32) + 2 * k);
    if (row1 >= 0) s1 = *(const float2 *) (x.sums + (u64) row1 * (x.kp / 32) + 2 * k);
#if GROUPS == 2
    v.sums[0][0] = s0.x; v.sums[1][0] = s0.y; v.sums[0][1] = s1.x; v.sums[1][1] = s1.y;
#else
    v.sums[0][0] = s0.x + s0.y; v.sums[0][1] = s1.x + s1.y;
#endif
#endif
    return v;
}

// Up to four matrices of one input: a block's first number, tiles and result.
struct Matrices {
    const u8 *w[4];
    const float *factor[4]; // by row, for plain formats; null is 1
    float *y[4];
    int rows[4];
    int first[4]; // block that starts it; later ones are out of range where absent
};

// Adds the slices of R * N accumulators and writes the results. `out` gives the
// row of y for an activation row, negative for nobody.
template <int R, int N, class Out>
__device__ __forceinline__ void write(float (&o)[R][N][4], float *shared, int slices, const float *factor, const float *input_factor, float *y, int rows, int tile, Out out) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) shared[(((warp * R + r) * N + n) * 4 + i) * 32 + lane] = o[r][n][i];
    __syncthreads();
    for (int at = threadIdx.x; at < R * N * 128; at += blockDim.x) {
        float v = shared[at];
        for (int s = 1; s < slices; s++) v += shared[s * R * N * 128 + at];
        const int l = at & 31, i = at >> 5 & 3, n = at >> 7 & (N - 1), r = at / (N * 128);
        const int row = (tile + r) * 16 + (l >> 2) + (i >> 1) * 8;
        int from, to;
        if (row < rows && out(n * 8 + (l & 3) * 2 + (i & 1), from, to)) {
            v *= input_factor[from];
            if (factor) v *= factor[row];
            y[(u64) to * rows + row] = v;
        }
    }
}

// One block: R tiles of 16 rows by N * 8 activation rows; a warp a slice.
template <int R, int N>
__device__ __forceinline__ void product(const Matrices &m, const Half &x, int n_rows, int tiles, int per, float *shared) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    int which = 0;
#pragma unroll
    for (int i = 1; i < 4; i++) which += (int) blockIdx.x >= m.first[i];
    const u8 *w = m.w[0];
    const float *factor = m.factor[0];
    float *y = m.y[0];
    int rows = m.rows[0], first = m.first[0];
#pragma unroll
    for (int i = 1; i < 4; i++)
        if (which == i) { w = m.w[i]; factor = m.factor[i]; y = m.y[i]; rows = m.rows[i]; first = m.first[i]; }
    const int tile = ((int) blockIdx.x - first) * R, base = blockIdx.y * N * 8;
    const int begin = warp * per, end = min(begin + per, tiles);
    const u8 *run = w + ((u64) tile * tiles + begin) * TILE_BYTES;
    const u64 next = (u64) tiles * TILE_BYTES;
    const int last = (rows + 15) / 16 - tile; // tiles from here on that exist
#if __CUDA_ARCH__ >= 900
    if (lane < R && lane < last && begin < end)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(run + lane * next), "r"((end - begin) * TILE_BYTES) : "memory");
#endif
    in_order();
    float o[R][N][4];
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[r][n][i] = 0.0f;
    const u32 magic = offset();
    auto row = [&](int i) { return base + i < n_rows ? base + i : -1; };
#pragma unroll UNROLL
    for (int k = begin; k < end; k++) {
        Tile tile[R];
#pragma unroll
        for (int r = 0; r < R; r++) tile[r] = fetch(run + (r < last ? r : 0) * next + (u64) (k - begin) * TILE_BYTES, lane);
#pragma unroll
        for (int n = 0; n < N; n++) {
            Inputs in = inputs(x, k, lane, row(n * 8 + g), row(n * 8 + 2 * t), row(n * 8 + 2 * t + 1));
#pragma unroll
            for (int r = 0; r < R; r++) multiply(tile[r], in, o[r][n], magic);
        }
    }
    write<R, N>(o, shared, blockDim.x >> 5, factor, x.factor, y, rows, tile, [&](int i, int &from, int &to) {
        from = to = base + i;
        return base + i < n_rows;
    });
}
#define PRODUCT(R, N) KERNEL __launch_bounds__(SLICES * 32) product_##R##_##N(Matrices m, Half x, int n_rows, int tiles, int per) { \
    __shared__ float shared[SLICES * R * N * 128]; product<R, N>(m, x, n_rows, tiles, per, shared); }
PRODUCT(1, 1)
PRODUCT(2, 1)
PRODUCT(1, 2)

// Many rows: a block takes 8 tiles of 16 weight rows by 128 activation rows, a warp
// 2 by 64. Activations come through shared memory, weights straight to registers.
// The sums are those of `product`, slice by slice; whole slices wait in shared
// memory, each thread's for itself.
#define MANY 128
#define STAGES 2
#define STAGE_BYTES (MANY * 128 + MANY * 8)
__device__ __forceinline__ void copy_async(u32 to, const void *from, int bytes, bool real) {
    if (bytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" :: "r"(to), "l"(from), "r"(real ? 8 : 0) : "memory");
}
KERNEL __launch_bounds__(256, 1) product_many(Matrices m, Half x, int n_rows, int tiles, int per) {
    extern __shared__ __align__(128) u8 staged[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    int which = 0;
#pragma unroll
    for (int i = 1; i < 4; i++) which += (int) blockIdx.x >= m.first[i];
    const u8 *w = m.w[0];
    const float *factor = m.factor[0];
    float *y = m.y[0];
    int rows = m.rows[0], first = m.first[0];
#pragma unroll
    for (int i = 1; i < 4; i++)
        if (which == i) { w = m.w[i]; factor = m.factor[i]; y = m.y[i]; rows = m.rows[i]; first = m.first[i]; }
    const int tile = ((int) blockIdx.x - first) * 8 + (warp >> 1) * 2, base = blockIdx.y * MANY, mine = (warp & 1) * 64;
    const int last = (rows + 15) / 16;
    const u8 *run[2];
#pragma unroll
    for (int r = 0; r < 2; r++) run[r] = w + (u64) (tile + r < last ? tile + r : 0) * tiles * TILE_BYTES;
    in_order();
    const u32 to = (u32) __cvta_generic_to_shared(staged);
    auto stage = [&](int k) {
        if (k < tiles) {
            const u32 at = to + k % STAGES * STAGE_BYTES;
#pragma unroll
            for (int i = threadIdx.x; i < MANY * 8; i += 256) {
                const int row = i >> 3, c = i & 7;
                const bool real = base + row < n_rows;
                copy_async(at + row * 128 + (c * 16 ^ (row & 1) * 64), x.values + (u64) (real ? base + row : 0) * x.kp + k * 64 + c * 8, 16, real);
            }
#ifdef CODES
            if (threadIdx.x < MANY) {
                const bool real = base + threadIdx.x < n_rows;
                copy_async(at + MANY * 128 + threadIdx.x * 8, x.sums + (u64) (real ? base + threadIdx.x : 0) * (x.kp / 32) + 2 * k, 8, real);
            }
#endif
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    float *total = (float *) (staged + STAGES * STAGE_BYTES) + threadIdx.x;
    float o[2][8][4];
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[r][n][i] = 0.0f;
    const u32 magic = offset();
    for (int k = 0; k < STAGES - 1; k++) stage(k);
    // A tile ahead, where there are registers for it.
    constexpr bool ahead = FORMAT != 6 && SCALE_BITS != 32;
    Tile next[2];
    if (ahead)
#pragma unroll
        for (int r = 0; r < 2; r++) next[r] = fetch(run[r], lane);
    int left = per;
#pragma unroll 1
    for (int k = 0; k < tiles; k++) {
        Tile now[2];
#pragma unroll
        for (int r = 0; r < 2; r++) now[r] = ahead ? next[r] : fetch(run[r] + (u64) k * TILE_BYTES, lane);
        if (ahead && k + 1 < tiles)
#pragma unroll
            for (int r = 0; r < 2; r++) next[r] = fetch(run[r] + (u64) (k + 1) * TILE_BYTES, lane);
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
        __syncthreads();
        stage(k + STAGES - 1);
        const u8 *from = staged + k % STAGES * STAGE_BYTES;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int row = mine + n * 8 + g;
            Inputs in;
            const uint4 a = *(const uint4 *) (from + row * 128 + (t * 16 ^ (row & 1) * 64)), b = *(const uint4 *) (from + row * 128 + (t * 16 + 64 ^ (row & 1) * 64));
            in.w[0] = a.x; in.w[1] = a.y; in.w[2] = a.z; in.w[3] = a.w;
            in.w[4] = b.x; in.w[5] = b.y; in.w[6] = b.z; in.w[7] = b.w;
#ifdef CODES
            const float4 s = *(const float4 *) (from + MANY * 128 + (mine + n * 8 + 2 * t) * 8);
#if GROUPS == 2
            in.sums[0][0] = s.x; in.sums[1][0] = s.y; in.sums[0][1] = s.z; in.sums[1][1] = s.w;
#else
            in.sums[0][0] = s.x + s.y; in.sums[0][1] = s.z + s.w;
#endif
#endif
#pragma unroll
            for (int r = 0; r < 2; r++) multiply(now[r], in, o[r][n], magic);
        }
        if (--left == 0 || k + 1 == tiles) {
            const bool whole = k < per; // the first slice
            left = per;
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float *sum = total + ((r * 8 + n) * 4 + i) * 256;
                        *sum = whole ? o[r][n][i] : *sum + o[r][n][i];
                        o[r][n][i] = 0.0f;
                    }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = (tile + r) * 16 + g + (i >> 1) * 8, from = base + mine + n * 8 + 2 * t + (i & 1);
                if (row >= rows || from >= n_rows) continue;
                float v = total[((r * 8 + n) * 4 + i) * 256] * x.factor[from];
                if (factor) v *= factor[row];
                y[(u64) from * rows + row] = v;
            }
}

// Chosen rows of one matrix: block (i, r) takes ids 16 i .. of activation row r.
KERNEL __launch_bounds__(SLICES * 32) product_rows(const u8 *w, const float *factor, float *y, Half x, const u32 *ids, int n_ids, int tiles, int per) {
    __shared__ float shared[SLICES * 128];
    in_order();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
    const int first = blockIdx.x * 16, row = blockIdx.y;
    ids += (u64) row * n_ids;
    const u32 id[2] = {ids[min(first + g, n_ids - 1)], ids[min(first + g + 8, n_ids - 1)]};
    float o[1][1][4] = {{{0, 0, 0, 0}}};
    const u32 magic = offset();
    for (int k = warp * per; k < min(warp * per + per, tiles); k++) {
        Tile both;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // The lane and the half that hold the chosen row in its own tile.
            const u8 *from = w + ((u64) (id[half] >> 4) * tiles + k) * TILE_BYTES;
            const int in = id[half] & 15;
            Tile one = fetch(from, (in & 7) * 4 + (lane & 3));
            const bool upper = in >> 3;
#pragma unroll
            for (int j = 0; j < CODE_WORDS; j++) {
#if FORMAT == 5 || FORMAT == 3
                // The plane of single bits holds both rows in one word.
                if (j == CODE_WORDS - 1) {
                    u32 bits = (upper ? one.codes.w[j] >> 8 : one.codes.w[j]) & 0x00ff00ffu;
                    both.codes.w[j] = half ? both.codes.w[j] | bits << 8 : bits;
                    continue;
                }
#endif
#if FORMAT == 16
                constexpr int each = 8;
                const int part = j / each;
#elif FORMAT == 9 || FORMAT == 8
                constexpr int each = 4;
                const int part = j / each;
#elif FORMAT >= 4
                const int each = j < 4 ? 2 : 1, part = j < 4 ? j / 2 : j - 4;
#else
                const int each = 1, part = j;
#endif
                if (part == half) both.codes.w[j] = upper ? one.codes.w[j + (1 - part) * each] : one.codes.w[j - part * each];
            }
#ifdef CODES
#pragma unroll
            for (int group = 0; group < GROUPS; group++) both.s[group][half] = one.s[group][upper];
#endif
        }
        const int self = g == 0 ? row : -1, first_result = (lane & 3) == 0 ? row : -1;
        multiply(both, inputs(x, k, lane, self, first_result, -1), o[0][0], magic);
    }
    write<1, 1>(o, shared, blockDim.x >> 5, nullptr, x.factor, y, n_ids, 0, [&](int, int &, int &) { return false; });
    // One column of results, rows by their ids.
    for (int at = threadIdx.x; at < 16; at += blockDim.x) {
        const int i = (at >> 3) * 2, l = (at & 7) * 4;
        float v = shared[i * 32 + l];
        for (int s = 1; s < (int) (blockDim.x >> 5); s++) v += shared[s * 128 + i * 32 + l];
        if (first + at < n_ids) {
            v *= x.factor[row];
            if (factor) v *= factor[ids[first + at]];
            y[(u64) row * n_ids + first + at] = v;
        }
    }
}

// Experts: block column `blockIdx.y` is the i-th expert that any row chose.
// `lists`: number of those, then for each its number, first pair and end; pairs
// follow in `pairs`, each row * top_k + rank. A pair reads activation row
// `by_pair ? pair : pair / top_k` and writes row `pair`.
KERNEL __launch_bounds__(SLICES * 32) product_experts(const u64 *table, const u64 *factors, float *y, Half x, const u32 *lists, const u32 *pairs, int top_k, int by_pair, int rows, int tiles, int per) {
    __shared__ float shared[SLICES * 2 * 128];
    in_order();
    if (blockIdx.y >= lists[0]) return;
    const u32 *list = lists + 1 + 3 * blockIdx.y;
    const u8 *w = (const u8 *) table[list[0]];
    const float *factor = factors ? (const float *) factors[list[0]] : nullptr;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int tile = blockIdx.x * 2, begin = warp * per, end = min(begin + per, tiles);
    const u8 *run = w + ((u64) tile * tiles + begin) * TILE_BYTES;
    const u64 next = (u64) tiles * TILE_BYTES;
    const int last = (rows + 15) / 16 - tile;
    const u32 magic = offset();
    for (u32 base = list[1]; base < list[2]; base += 8) {
        auto row = [&](int i) { return base + i < list[2] ? (int) (by_pair ? pairs[base + i] : pairs[base + i] / top_k) : -1; };
        const int own = row(g), r0 = row(2 * t), r1 = row(2 * t + 1);
        float o[2][1][4] = {{{0, 0, 0, 0}}, {{0, 0, 0, 0}}};
#pragma unroll 2
        for (int k = begin; k < end; k++) {
            Tile tile[2];
#pragma unroll
            for (int r = 0; r < 2; r++) tile[r] = fetch(run + (r < last ? r : 0) * next + (u64) (k - begin) * TILE_BYTES, lane);
            Inputs in = inputs(x, k, lane, own, r0, r1);
#pragma unroll
            for (int r = 0; r < 2; r++) multiply(tile[r], in, o[r][0], magic);
        }
        write<2, 1>(o, shared, blockDim.x >> 5, factor, x.factor, y, rows, tile, [&](int i, int &from, int &to) {
            if (base + i >= list[2]) return false;
            to = (int) pairs[base + i];
            from = by_pair ? to : to / top_k;
            return true;
        });
        __syncthreads();
    }
}

// Rows of a table: y = value(token, column) * factor. `tokens` null: the batch's.
__device__ __forceinline__ float value(const u8 *w, const float *factor, u32 row, int col, int tiles) {
    const u8 *tile = w + ((u64) (row >> 4) * tiles + col / 64) * TILE_BYTES;
    const int half = row >> 3 & 1, c = col & 63, h = c >> 5, t = c >> 3 & 3, lane = (row & 7) * 4 + t, at = c & 7;
    [[maybe_unused]] const int i = at >> 1, odd = at & 1; // pair and its end
#if FORMAT == 16
    float v = f16_to_f32(*(const u16 *) (tile + ((half * 2 + h) * 32 + lane) * 16 + at * 2));
    return factor ? v * factor[row] : v;
#elif FORMAT == 9
    u32 b = tile[(half * 32 + lane) * 16 + h * 8 + at];
    float v = f16_to_f32((u16) ((b & 0x80) << 8 | (b & 0x7f) << 7));
    return factor ? v * factor[row] : v;
#else
    u32 code;
#if FORMAT == 8
    code = tile[(half * 32 + lane) * 16 + h * 8 + at];
#else
    const u32 *words = (const u32 *) tile;
#if FORMAT >= 4
    code = words[lane * 4 + half * 2 + h] >> (4 * i + 16 * odd) & 15;
#if FORMAT == 5
    code |= (words[128 + lane] >> (half * 8 + h * 4 + i + 16 * odd) & 1) << 4;
#elif FORMAT == 6
    code |= (words[128 + lane * 2 + half] >> (2 * (h * 4 + i) + 16 * odd) & 3) << 4;
#endif
#else
    code = words[lane * 2 + half] >> (2 * (h * 4 + i) + 16 * odd) & 3;
#if FORMAT == 3
    code |= (words[64 + lane] >> (half * 8 + h * 4 + i + 16 * odd) & 1) << 2;
#endif
#endif
#endif
    Scales s = scales(tile, c / GROUP, row & 15);
    return fmaf(s.scale, (float) code, s.bias);
#endif
}
KERNEL embed(const u8 *w, const float *factor, const u32 *tokens, Batch batch, float *y, int cols, int tiles, float scale, u64 n) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 row = (u32) (i / cols);
    y[i] = value(w, factor, tokens ? tokens[row] : batch.token(row), (int) (i % cols), tiles) * scale;
}

// Random weights of about `gain` in size, for measurements: a thread a word.
KERNEL random_tiles(u32 *w, float gain, u64 words) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= words) return;
    u32 x = (u32) i * 0x9e3779b9u ^ (u32) (i >> 32);
    x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; x ^= x >> 16;
#if FORMAT == 16
    // Two f16 of either sign with an exponent like the gain's.
    u32 one = f32_to_f16(gain) & 0x7c00u;
    x = (x & 0x83ff83ffu) | one | one << 16;
#elif defined(CODES)
    int at = (int) (i % (TILE_BYTES / 4)) - CODE_WORDS * 32;
    if (at >= 0) {
        const float scale = gain / (float) (1 << (FORMAT - 1)), bias = scale * -0.5f * (float) ((1 << FORMAT) - 1);
#if SCALE == 32
        x = __float_as_uint(at & 1 ? bias : scale);
#elif SCALE_BF16
        x = f32_to_bf16(scale) | (u32) f32_to_bf16(bias) << 16;
#else
        x = f32_to_f16(scale) | (u32) f32_to_f16(bias) << 16;
#endif
    }
#endif
    w[i] = x;
}
