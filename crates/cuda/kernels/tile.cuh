// Tiles of packed weights and their products with tensor cores, 16 weight rows by 8
// activation rows at a time. src/pack.rs defines the tiles.
//
// FORMAT: 16 plain f16, 2 3 4 5 6 8 codes of so many bits with a scale and a bias for
// every GROUP (32 or 64) columns, stored in SCALE bits (16 or 32; 16 is bf16 if
// SCALE_BF16, else f16), 9 f8 e4m3 with a scale in f32, times 256.
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
#define CODES
#else
#define CODE_WORDS FORMAT
#define CODES
#endif
#ifdef CODES
#define GROUPS (64 / GROUP)
#define SCALE_BITS SCALE
#define SCALE_BYTES (GROUPS * 16 * SCALE / (FORMAT == 9 ? 8 : 4))
#else
#define GROUPS 1
#define SCALE_BITS 0
#define SCALE_BYTES 0
#endif
// Whether codes of 4 bits are expanded with two offsets, which saves shifts.
#define TWO_OFFSETS (FORMAT == 4 && GROUPS == 1)
#define TILE_BYTES (CODE_WORDS * 128 + SCALE_BYTES)

// Rows of tiles that lie beside each other, as in src/pack.rs; bytes from a tile to the one
// of its rows' next columns; where a row of tiles starts, and from an even one the next.
#define BAND (FORMAT == 9 ? 2 : 1)
#define ALONG (BAND * TILE_BYTES)
#define BESIDE (BAND > 1 ? (u64) TILE_BYTES : (u64) tiles * TILE_BYTES)
__device__ __forceinline__ u64 row_of_tiles(int tile, int tiles) { return ((u64) (tile / BAND) * tiles * BAND + tile % BAND) * TILE_BYTES; }

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
// Four columns of one row of the lane's two (half), as two pairs of f16; codes
// come 1024 too large, or the latter two 64.
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
    w >>= 8 * (j & 1);
    p0 = masked(w, 0x000f000fu, magic);
    p1 = TWO_OFFSETS ? masked(w, 0x00f000f0u, magic ^ 0x30003000u) : masked(w >> 4, 0x000f000fu, magic);
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
// Of 16 bits each, in a word.
__device__ __forceinline__ Scales scales_of(u32 v) {
#if SCALE_BF16
    return {__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)};
#else
    return {f16_to_f32((u16) v), f16_to_f32((u16) (v >> 16))};
#endif
}
// Of a group of the rows g and g + 8, which lie beside each other.
template <bool SHARED = false>
__device__ __forceinline__ void scales(const u8 *tile, int group, int g, Scales (&s)[2]) {
    const u8 *at = tile + CODE_WORDS * 128 + (group * 16 + 2 * g) * (SCALE_BYTES / (16 * GROUPS));
#if FORMAT == 9
    const float2 v = *(const float2 *) at;
    s[0] = {v.x, 0.0f};
    s[1] = {v.y, 0.0f};
#elif SCALE == 32
    const float4 v = *(const float4 *) at;
    s[0] = {v.x, v.y};
    s[1] = {v.z, v.w};
#else
    const uint2 v = read8<SHARED>(at);
    s[0] = scales_of(v.x);
    s[1] = scales_of(v.y);
#endif
}
#endif

// What a lane needs of the activations for 8 of their rows and one tile.
struct Inputs {
    u32 w[8];
    float4 tiles[2]; // of the lane's two results (Half)
    // The lane's values of either half of the columns.
    __device__ __forceinline__ void set(const uint4 &a, const uint4 &b) {
        w[0] = a.x; w[1] = a.y; w[2] = a.z; w[3] = a.w;
        w[4] = b.x; w[5] = b.y; w[6] = b.z; w[7] = b.w;
    }
    // Looked at only when used, or whoever loads them ahead waits for them.
    __device__ __forceinline__ float sum(int group, int i) const {
        return GROUPS == 1 ? tiles[i].x + tiles[i].y : group == 0 ? tiles[i].x : tiles[i].y;
    }
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
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float v = TWO_OFFSETS ? fmaf(c[i], x.tiles[i & 1].z, -x.tiles[i & 1].w) : c[i] * x.tiles[i & 1].z;
            const Scales &s = i < 2 ? g : h;
            o[i] = fmaf(s.scale, v, FORMAT == 9 ? o[i] : fmaf(s.bias, x.sum(group, i & 1), o[i]));
        }
    }
#else
    float c[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 a[4];
        expand(tile.codes, 0, j, magic, a[0], a[2]);
        expand(tile.codes, 1, j, magic, a[1], a[3]);
        mma(c, a, x.w[2 * j], x.w[2 * j + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) o[i] = fmaf(c[i], x.tiles[i & 1].z, o[i]);
#endif
}
template <bool SHARED = false>
__device__ __forceinline__ Tile fetch(const u8 *tile, int lane) {
    Tile v;
    v.codes = load<SHARED>(tile, lane);
#ifdef CODES
    const int g = lane >> 2;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        scales<SHARED>(tile, group, g, v.s[group]);
        if (TWO_OFFSETS || FORMAT == 9) continue;
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
    v.set(a, b);
    v.tiles[0] = v.tiles[1] = make_float4(0, 0, 0, 0);
    if (row0 >= 0) v.tiles[0] = x.tiles[(u64) row0 * (x.kp / 64) + k];
    if (row1 >= 0) v.tiles[1] = x.tiles[(u64) row1 * (x.kp / 64) + k];
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
