// The formats of keys and values, which the crate `quant` defines (src/kv): how a page of packed codes lies in memory,
// and how codes are stored and read. common.cuh goes before this.
//
// KEY_FORMAT, VALUE_FORMAT: 0 f32, 1 f16, 2 bf16, 3 codes with a scale for 32 columns, 4 indices of levels with a scale
// for 128 columns. KEY_BITS, VALUE_BITS: of a code or an index. KEY_ROTATION, VALUE_ROTATION: columns of the groups in
// which rows are rotated, 0 if they are not.
//
// Layout of packed formats. A page of a head of e columns: tiles of 32 keys by 32 columns, of keys [2, e / 32] and of
// values [e / 32, 2]; then the scales in f16, of keys [2, groups, 32] and of values [groups, 2, 32]. So what a stage of
// attention_pipelined copies lies together.
// In 8 bits a tile of keys has a key a row, one of values a column a row; rows, and the scales of values, are in the
// order of `interleave_index`. In fewer bits the unit is a quad: the codes of one key in columns r, 8 + r, 16 + r and
// 24 + r. It belongs to a key, so that rows of one step never write the same byte. Quads lie as [key, r] in tiles of
// keys and as [r, interleave_index(key)] in those of values; of an odd number of bits, the highest are quads behind
// all others, two in a byte, of neighboring r. Lane (g, t) of tensor cores multiplies two quads, r = 2 t and 2 t + 1 of
// one key or r = g of two keys, so that one way to unpack two quads is enough for keys and values.

// Where number `i` of 32 lies, so that lane t of four finds side by side what it multiplies: 2 t and 2 t + 1 of each 8.
DEVICE int interleave_index(int i) { return i % 8 / 2 * 8 + i / 8 * 2 + i % 2; }

template <bool VALUES>
struct KvFormat {
    static constexpr int FORMAT = VALUES ? VALUE_FORMAT : KEY_FORMAT, BITS = VALUES ? VALUE_BITS : KEY_BITS,
                         ROTATION = VALUES ? VALUE_ROTATION : KEY_ROTATION;
    static constexpr bool IS_PACKED = FORMAT >= 3, IS_LEVELS = FORMAT == 4;
    static constexpr int SCALE_COLUMNS = IS_LEVELS ? 128 : 32;
    // Bytes of a tile on tensor cores.
    static constexpr int TILE_BYTES = IS_PACKED ? 128 * BITS : 2048;
    // Of a head of `e` columns: groups that share a scale, where a page's scales start, and its bytes.
    static constexpr int scale_groups(int e) { return (e + SCALE_COLUMNS - 1) / SCALE_COLUMNS; }
    static constexpr int scales_at(int e) { return e / 16 * TILE_BYTES; }
    static constexpr int page_bytes(int e) { return scales_at(e) + (IS_PACKED ? scale_groups(e) * 128 : 0); }
    // Where tile `block`, of 32 columns, of half a page's keys lies in a page, and where the scales of that lie.
    DEVICE static int tile_at(int e, int block, int half) {
        return (VALUES != IS_PACKED ? half * (e / 32) + block : block * 2 + half) * TILE_BYTES;
    }
    DEVICE static int scales_of(int e, int block, int half) {
        const int group = block / (SCALE_COLUMNS / 32);
        return scales_at(e) + (VALUES ? group * 2 + half : half * scale_groups(e) + group) * 64;
    }
    // Where the scale of key `key` of 32 is among these.
    DEVICE static int scale_index(int key) { return VALUES ? interleave_index(key) : key; }
    // The bit of a quad at which its code number `p` starts, in the plane of 4 or of 2 bits.
    DEVICE static int code_shift(int p) { return BITS >= 4 ? 4 * p : p % 2 * 4 + p / 2 * 2; }
    DEVICE static int quad_index(int key, int r) { return VALUES ? r * 32 + interleave_index(key) : key * 8 + r; }
    // Where the byte of the highest bits of quads r and r ^ 1 lies in a tile.
    DEVICE static int high_at(int key, int r) {
        return (BITS - 1) * 128 + (VALUES ? r / 2 * 32 + interleave_index(key) : key * 4 + r / 2);
    }
    // Stores the code of column 32 `block` + lane of key `key` of a page; a warp calls this together.
    DEVICE static void store_code(u8 *page, int e, int key, int block, u32 code) {
        const int lane = threadIdx.x & 31, p = lane / 8, r = lane % 8;
        u8 *tile = page + tile_at(e, block, key / 32);
        key %= 32;
        if (BITS == 8) {
            tile[VALUES ? lane * 32 + interleave_index(key) : key * 32 + interleave_index(lane)] = (u8) code;
            return;
        }
        u32 quad = (code & (BITS >= 4 ? 15 : 3)) << code_shift(p);
        quad |= __shfl_xor_sync(~0u, quad, 8);
        quad |= __shfl_xor_sync(~0u, quad, 16);
        if (lane < 8) {
            if (BITS >= 4) ((u16 *) tile)[quad_index(key, r)] = (u16) quad;
            else tile[quad_index(key, r)] = (u8) quad;
        }
        if (BITS % 2 == 0) return;
        u32 high = (code >> (BITS - 1)) << (p + r % 2 * 4);
        high |= __shfl_xor_sync(~0u, high, 8);
        high |= __shfl_xor_sync(~0u, high, 16);
        high |= __shfl_xor_sync(~0u, high, 1);
        if (lane < 8 && r % 2 == 0) tile[high_at(key, r)] = (u8) high;
    }
    DEVICE static void store_scale(u8 *page, int e, int key, int block, float scale) {
        ((u16 *) (page + scales_of(e, block, key / 32)))[scale_index(key % 32)] = f32_to_f16(scale);
    }
    // Column `c` of key `key` of a page, as `store_code` was given it.
    DEVICE static u32 load_code(const u8 *page, int e, int key, int c) {
        const u8 *tile = page + tile_at(e, c / 32, key / 32);
        key %= 32;
        c %= 32;
        if (BITS == 8) return tile[VALUES ? c * 32 + interleave_index(key) : key * 32 + interleave_index(c)];
        const int p = c / 8, r = c % 8, quad = quad_index(key, r);
        u32 code = BITS >= 4 ? ((const u16 *) tile)[quad] >> code_shift(p) & 15 : tile[quad] >> code_shift(p) & 3;
        if (BITS % 2) code |= (tile[high_at(key, r)] >> (p + r % 2 * 4) & 1) << (BITS - 1);
        return code;
    }
};

// ---- levels: the columns of a rotated row, rounded to a few numbers (quant/src/kv/turbo.rs). An index of 4 bits is
// kept as its sign, the highest bit, and its size; others as they are, ascending.

// Level `i` above zero of `n` of them, of a group of 128 columns with norm 1; those below mirror them.
constexpr float positive_level(int n, int i) {
    constexpr float LEVELS[3][8] = {
        {0.039994f, 0.133462f},
        {0.021460f, 0.065717f, 0.117832f, 0.190685f},
        {0.011353f, 0.034311f, 0.058069f, 0.083317f, 0.111065f, 0.143047f, 0.182907f, 0.241556f}};
    return LEVELS[n / 4][i];
}
// The bits of `positive_level` in f16; all levels are between 2^-7 and 2^-2.
constexpr u32 positive_level_f16(int n, int i) {
    double v = positive_level(n, i);
    u32 exponent = 15;
    for (; v < 1.0; v *= 2.0) exponent--;
    return exponent << 10 | (u32) ((v - 1.0) * 1024.0 + 0.5);
}
// Byte `byte` of levels `from` to `from` + 3 in f16, as the index of a format of `bits` counts them.
constexpr u32 level_bytes(int bits, int from, int byte) {
    u32 all = 0;
    for (int i = from; i < from + 4; i++) {
        const int n = 1 << (bits - 1);
        u32 v = 0;
        if (bits == 4) v = positive_level_f16(n, i);
        else if (i < 2 * n) v = i < n ? positive_level_f16(n, n - 1 - i) | 0x8000 : positive_level_f16(n, i - n);
        all |= (v >> (8 * byte) & 0xff) << (8 * (i - from));
    }
    return all;
}
// Bytes of levels in f16, the lower ones and the higher ones, as `unpack_quads` looks them up; none in other formats.
template <class F, bool = F::IS_LEVELS>
struct LevelBytes {
    DEVICE void keep() {}
};
template <class F>
struct LevelBytes<F, true> {
    u32 low0 = level_bytes(F::BITS, 0, 0), low1 = F::BITS > 2 ? level_bytes(F::BITS, 4, 0) : 0,
        high0 = level_bytes(F::BITS, 0, 1), high1 = F::BITS > 2 ? level_bytes(F::BITS, 4, 1) : 0;
    // Has the compiler keep the bytes in registers: constants it would load again for each use.
    DEVICE void keep() {
        low0 = __shfl_sync(~0u, low0, 0);
        high0 = __shfl_sync(~0u, high0, 0);
        if (F::BITS == 2) return;
        low1 = __shfl_sync(~0u, low1, 0);
        high1 = __shfl_sync(~0u, high1, 0);
    }
};
// Rounds `y` to a level; the index is as it is kept.
template <int BITS>
DEVICE float round_to_level(float y, u32 &index) {
    constexpr int N = 1 << (BITS - 1);
    const float size = fabsf(y);
    float level = positive_level(N, 0);
    u32 k = 0;
#pragma unroll
    for (int i = 1; i < N; i++)
        if (size >= 0.5f * (positive_level(N, i - 1) + positive_level(N, i))) {
            level = positive_level(N, i);
            k = i;
        }
    if (BITS == 4) index = y < 0.0f ? 8 | k : k;
    else index = y < 0.0f ? N - 1 - k : N + k;
    return level; // of |y|
}
// The level of an index.
template <int BITS>
DEVICE float level_of(u32 index) {
    constexpr int N = 1 << (BITS - 1);
    const bool below = BITS == 4 ? index >= 8 : index < N;
    const u32 k = BITS == 4 ? index & 7 : below ? N - 1 - index : index - N;
    float level = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++)
        if (k == i) level = positive_level(N, i);
    return below ? -level : level;
}

// ---- two quads to f16: word p has code p of the one and of the other, not yet multiplied by scales.
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
    u32 v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(selector));
    return v;
}
// `a` - `b`, in f16 pairs.
DEVICE u32 hsub2(u32 a, u32 b) {
    u32 v;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}
// Two quads of 2 bits, in bytes 0 and 2, to nibbles.
DEVICE u32 spread_pairs(u32 x) { return (x | x << 6) & 0x33333333; }
// Bits 0 to 3 and 16 to 19 to nibbles.
DEVICE u32 spread_bits(u32 x) {
    x = (x | x << 6) & 0x03030303;
    return (x | x << 3) & 0x11111111;
}
// `x`: nibbles, of the first quad in the lower half. `high`: the highest bits, 0 to 3 and 16 to 19, of an odd number.
template <class F>
DEVICE uint4 unpack_quads(u32 x, u32 high, const LevelBytes<F> &levels) {
    constexpr int BITS = F::BITS;
    u32 v[4];
    if constexpr (F::IS_LEVELS) {
        if (BITS == 3) x |= spread_bits(high) << 2;
        const u32 index = BITS == 4 ? x & 0x77777777 : x;
        u32 pairs[2][2]; // levels 0 and 1, and 2 and 3, of each quad
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 of = index >> (16 * i), low = permute_bytes(levels.low0, levels.low1, of),
                      high_bytes = permute_bytes(levels.high0, levels.high1, of);
            pairs[i][0] = permute_bytes(low, high_bytes, 0x5140);
            pairs[i][1] = permute_bytes(low, high_bytes, 0x7362);
        }
#pragma unroll
        for (int p = 0; p < 4; p++) {
            v[p] = permute_bytes(pairs[0][p / 2], pairs[1][p / 2], p % 2 ? 0x7632 : 0x5410);
            if (BITS == 4) v[p] ^= x << (12 - 4 * p) & 0x80008000;
        }
    } else {
        const u32 fifth = high << 4;
#pragma unroll
        for (int p = 0; p < 4; p++) { // 0x64 makes 1024 more of a code
            u32 codes = (x >> (4 * p) & 0x000f000f) | 0x64006400;
            if (BITS == 5) codes |= fifth >> p & 0x00100010;
            v[p] = hsub2(codes, BITS == 5 ? 0x64106410 : 0x64086408);
        }
    }
    return make_uint4(v[0], v[1], v[2], v[3]);
}
