// Tiles of packed weights and their products with tensor cores, 16 weight rows by 8
// activation rows at a time. src/pack.rs defines the tiles.
//
// FORMAT: 16 plain f16, 2 3 4 5 6 8 codes of so many bits with a scale and a bias for
// every GROUP (32 or 64) columns, 9 f8 e4m3 with a scale. Tensor cores take weights as
// f16: what a code, its scale and its bias make is rounded once.
//
// The order of a sum. A row's tiles of 64 columns are cut into `slices` runs of
// `per` tiles. In a slice, one accumulator over ascending products of 16 columns, of
// activations in a unit that the slice's tiles have in common. The slices are added from
// the left, and the sum takes the factor of its row of tiles.
// Nothing in it knows how many rows there are: an activation row is a column of
// the tensor core's product, and columns do not mix.

#if FORMAT == 16
#define CODE_WORDS 16
#elif FORMAT == 9
#define CODE_WORDS 8
#else
#define CODE_WORDS FORMAT
#endif
#if FORMAT == 16
#define GROUPS 1
#define SCALE_BYTES 0
#else
#define GROUPS (64 / GROUP)
#define SCALE_BYTES (GROUPS * 16 * (FORMAT == 9 ? 2 : 4))
#endif
#define TILE_BYTES (CODE_WORDS * 128 + SCALE_BYTES)

// Rows of tiles that lie beside each other, as in src/pack.rs; bytes from a tile to the one
// of its rows' next columns; where a row of tiles starts, and from an even one the next.
#define BAND (FORMAT == 9 ? 2 : 1)
#define ALONG (BAND * TILE_BYTES)
#define BESIDE (BAND > 1 ? (u64) TILE_BYTES : (u64) tiles * TILE_BYTES)
__device__ __forceinline__ u64 row_of_tiles(int tile, int tiles) { return ((u64) (tile / BAND) * tiles * BAND + tile % BAND) * TILE_BYTES; }
// What sums of a matrix are to be multiplied by, powers of two: one for each row of tiles,
// after all of them.
__device__ __forceinline__ const float *factors_of(const u8 *w, int rows, int tiles) { return (const float *) (w + row_of_tiles((rows + 16 * BAND - 1) / (16 * BAND) * BAND, tiles)); }

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
__device__ __forceinline__ u32 bytes(u32 a, u32 b, u32 select) {
    u32 v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(select));
    return v;
}

// One lane's part of a tile: for the rows g and g + 8, 16 columns each.
struct Codes {
    u32 w[CODE_WORDS];
};
// Reads from global memory what is read once, or from shared memory.
template <bool SHARED> __device__ __forceinline__ uint4 read16(const void *p) { return SHARED ? *(const uint4 *) p : stream16(p); }
template <bool SHARED> __device__ __forceinline__ uint2 read8(const void *p) { return SHARED ? *(const uint2 *) p : stream8(p); }
template <bool SHARED> __device__ __forceinline__ u32 read4(const void *p) { return SHARED ? *(const u32 *) p : stream4(p); }
template <bool SHARED>
__device__ __forceinline__ Codes load(const u8 *tile, int lane) {
    Codes c;
#if FORMAT >= 4
    constexpr int whole = CODE_WORDS / 4; // 16-byte parts
#pragma unroll
    for (int i = 0; i < whole; i++) {
        uint4 v = read16<SHARED>(tile + (i * 32 + lane) * 16);
        c.w[4 * i] = v.x; c.w[4 * i + 1] = v.y; c.w[4 * i + 2] = v.z; c.w[4 * i + 3] = v.w;
    }
#if FORMAT == 5
    c.w[4] = read4<SHARED>(tile + 512 + lane * 4);
#elif FORMAT == 6
    uint2 v = read8<SHARED>(tile + 512 + lane * 8);
    c.w[4] = v.x; c.w[5] = v.y;
#endif
#else
    uint2 v = read8<SHARED>(tile + lane * 8);
    c.w[0] = v.x; c.w[1] = v.y;
#if FORMAT == 3
    c.w[2] = read4<SHARED>(tile + 256 + lane * 4);
#endif
#endif
    return c;
}
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 v;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
    return v;
}
// Codes of four columns of one row of the lane's two (half), as two pairs of f16 that are
// not normal: a code times 2^-24, which scales make up for. With codes of 4 bits the latter
// pair is 16 times as large; that saves shifts.
__device__ __forceinline__ void expand(const Codes &c, int half, int j, u32 &p0, u32 &p1) {
    [[maybe_unused]] const int h = j >> 1, q = h * 4 + 2 * (j & 1);
#if FORMAT == 16
    // Part i of 16 bytes: (half, h).
    p0 = c.w[(half * 2 + h) * 4 + 2 * (j & 1)];
    p1 = c.w[(half * 2 + h) * 4 + 2 * (j & 1) + 1];
#elif FORMAT == 9
    // 256 times too small.
    u32 w = c.w[half * 4 + h * 2 + (j & 1)];
    u32 a = bytes(w, 0, 0x1404), b = bytes(w, 0, 0x3424);
    p0 = (a & 0x80008000u) | ((a & 0x7f007f00u) >> 1);
    p1 = (b & 0x80008000u) | ((b & 0x7f007f00u) >> 1);
#elif FORMAT == 8
    u32 w = c.w[half * 4 + h * 2 + (j & 1)];
    p0 = bytes(w, 0, 0x4140);
    p1 = bytes(w, 0, 0x4342);
#elif FORMAT >= 4
    u32 w = c.w[half * 2 + h];
    w >>= 8 * (j & 1);
    p0 = w & 0x000f000fu;
    p1 = FORMAT == 4 ? w & 0x00f000f0u : w >> 4 & 0x000f000fu;
#if FORMAT == 5
    p0 |= ((c.w[4] >> (half * 8 + q)) & 0x00010001u) << 4;
    p1 |= ((c.w[4] >> (half * 8 + q + 1)) & 0x00010001u) << 4;
#elif FORMAT == 6
    p0 |= ((c.w[4 + half] >> (2 * q)) & 0x00030003u) << 4;
    p1 |= ((c.w[4 + half] >> (2 * q + 2)) & 0x00030003u) << 4;
#endif
#else
    p0 = c.w[half] >> (2 * q) & 0x00030003u;
    p1 = c.w[half] >> (2 * q + 2) & 0x00030003u;
#if FORMAT == 3
    p0 |= ((c.w[2] >> (half * 8 + q)) & 0x00010001u) << 2;
    p1 |= ((c.w[2] >> (half * 8 + q + 1)) & 0x00010001u) << 2;
#endif
#endif
}

// What a lane needs of the activations for 8 of their rows and one tile, in the slice's unit.
struct Inputs {
    u32 w[8];
    // The lane's values of either half of the columns, and what they are to be multiplied by.
    __device__ __forceinline__ void set(const uint4 &a, const uint4 &b, u32 ratio) {
        w[0] = a.x; w[1] = a.y; w[2] = a.z; w[3] = a.w;
        w[4] = b.x; w[5] = b.y; w[6] = b.z; w[7] = b.w;
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = mul2(w[i], ratio);
    }
    __device__ __forceinline__ void set(const uint4 &a, const uint4 &b) {
        w[0] = a.x; w[1] = a.y; w[2] = a.z; w[3] = a.w;
        w[4] = b.x; w[5] = b.y; w[6] = b.z; w[7] = b.w;
    }
};

// Scales by group: of the row g and of g + 8, each with a bias, or both in a word.
#define SCALE_WORDS (FORMAT == 9 ? 1 : 2)
struct Tile {
    Codes codes;
#if FORMAT != 16
    u32 scales[GROUPS][SCALE_WORDS];
#endif
};
// The weights of four columns of either row, as the tensor cores take them.
__device__ __forceinline__ void weights(const Tile &tile, int j, u32 (&a)[4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 &p0 = a[half], &p1 = a[half + 2];
        expand(tile.codes, half, j, p0, p1);
#if FORMAT == 9
        const u32 scale = bytes(tile.scales[j * GROUPS / 4][0], 0, half ? 0x3232 : 0x1010);
        p0 = mul2(p0, scale);
        p1 = mul2(p1, scale);
#elif FORMAT != 16
        const u32 both = tile.scales[j * GROUPS / 4][half], scale = bytes(both, 0, 0x1010), bias = bytes(both, 0, 0x3232);
        p0 = fma2(p0, scale, bias);
        p1 = fma2(p1, FORMAT == 4 ? mul2(scale, 0x2c002c00u) : scale, bias); // 1 / 16
#endif
    }
}
__device__ __forceinline__ void multiply(const Tile &tile, const Inputs &x, float (&o)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 a[4];
        weights(tile, j, a);
        mma(o, a, x.w[2 * j], x.w[2 * j + 1]);
    }
}
template <bool SHARED = false>
__device__ __forceinline__ Tile fetch(const u8 *tile, int lane) {
    Tile v;
    v.codes = load<SHARED>(tile, lane);
#if FORMAT != 16
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const u8 *at = tile + CODE_WORDS * 128 + (group * 8 + (lane >> 2)) * (SCALE_BYTES / (8 * GROUPS));
#if FORMAT == 9
        v.scales[group][0] = read4<SHARED>(at);
#else
        const uint2 both = read8<SHARED>(at);
        v.scales[group][0] = both.x;
        v.scales[group][1] = both.y;
#endif
    }
#endif
    return v;
}
// The largest of a quad's, whose lanes have the same row.
__device__ __forceinline__ float of_quad(float most) {
    most = larger(most, __shfl_xor_sync(~0u, most, 1));
    return larger(most, __shfl_xor_sync(~0u, most, 2));
}
// The unit of a slice: the largest factor of its tiles, which `factor` gives.
template <class F> __device__ __forceinline__ float unit_of(int begin, int end, F factor) {
    float most = 0.0f;
#pragma unroll 4
    for (int k = begin + (threadIdx.x & 3); k < end; k += 4) most = larger(most, factor(k));
    return of_quad(most);
}
// The same by one thread, or by lanes that all do it: of the slice that tile `k` is in.
template <class F> __device__ __forceinline__ float unit_around(int k, int per, int tiles, F factor) {
    const int first = k / per * per, end = min(first + per, tiles);
    float unit = 0.0f;
#pragma unroll 4
    for (int i = first; i < end; i++) unit = larger(unit, factor(i));
    return unit;
}
// And of a slice of SLICE_TILES, at most, whose ratios it writes: `to` for the first tile,
// `step` words from one to the next.
#define SLICE_TILES 32
__device__ __forceinline__ float put_ratios(const float *factors, int length, u32 *to, int step) {
    float v[SLICE_TILES / 4], most = 0.0f;
#pragma unroll
    for (int i = 0; i < SLICE_TILES / 4; i++) v[i] = factors[min(4 * i + (int) (threadIdx.x & 3), length - 1)];
#pragma unroll
    for (int i = 0; i < SLICE_TILES / 4; i++) most = larger(most, v[i]);
    const float unit = of_quad(most);
#pragma unroll
    for (int i = 0; i < SLICE_TILES / 4; i++) {
        const int k = 4 * i + (int) (threadIdx.x & 3);
        if (k < length) to[k * step] = ratio(v[i], inverse(unit));
    }
    return unit;
}
// An activation row in a slice, as lanes of a quad have it; a negative one is nobody's.
struct Row {
    const u16 *values;
    const float *factors;
    float unit, unit_inverse;
    __device__ __forceinline__ Row() {}
    __device__ __forceinline__ Row(const Half &x, int row, int begin, int end) {
        values = row >= 0 ? x.values + (u64) row * x.kp + (threadIdx.x & 3) * 8 : nullptr;
        factors = x.factors + (u64) max(row, 0) * (x.kp / 64);
        unit = unit_of(begin, end, [&](int k) { return factors[k]; });
        unit_inverse = inverse(unit);
    }
    __device__ __forceinline__ Inputs inputs(int k) const {
        uint4 a = {0, 0, 0, 0}, b = {0, 0, 0, 0};
        if (values) {
            a = *(const uint4 *) (values + k * 64);
            b = *(const uint4 *) (values + k * 64 + 32);
        }
        Inputs v;
        v.set(a, b, ratio(factors[k], unit_inverse));
        return v;
    }
};
// Takes results, of the activation rows 2 t and 2 t + 1, from their units; lanes have `unit` of
// row g.
template <int R, int N>
__device__ __forceinline__ void settle(float (&o)[R][N][4], int n, float unit) {
    const int at = (threadIdx.x & 3) * 8;
    const float units[2] = {__shfl_sync(~0u, unit, at), __shfl_sync(~0u, unit, at + 4)};
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[r][n][i] *= units[i & 1];
}

// Up to four matrices of one input: a block's first number, tiles and result.
struct Matrices {
    const u8 *w[4];
    float *y[4];
    int rows[4];
    int first[4]; // block that starts it; later ones are out of range where absent
};
