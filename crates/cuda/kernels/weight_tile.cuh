// Packed weight tiles of 16 rows by 64 columns, their dequantization and their products on tensor cores with 8
// activation rows at a time (mma.sync m16n8k16: A weights, B activations). src/pack.rs defines the tiles; common.cuh
// goes before this.
//
//   packed tile -- load --> codes, scales -- dequantize(j) --> A fragment, 16 columns +
//   (global or shared)      (registers)                        (registers)            +- mma --> accumulators, f32
//   activations -- load --> ActivationFragment, 64 columns --> B fragment, 16 columns +
//
// FORMAT: 16 plain f16; 2 3 4 5 6 8 codes of so many bits, with a scale and a bias for every GROUP (32 or 64)
// columns; 9 f8 e4m3 with a scale; 13 14 codes of 3 and 4 bits for levels, with a scale for every 16 columns, which
// were rotated before (quant/src/rotated.rs), as the activations of such weights are. Tensor cores take weights as f16:
// what a code, its scale and its bias come to is rounded once.
//
// Order of a sum. K is cut into `slices` of `tiles_per_slice` tiles (sliced-K: split-K among the warps of a block).
// In a slice, one accumulator sums ascending products of 16 columns, of activations that have been brought to a scale
// which the slice's tiles have in common. Slices are added from the left, and the sum takes the scale of its row tile.
// Nothing in this depends on the number of activation rows: each is a column of the tensor core's product, and columns
// do not mix.

DEVICE u32 hfma2(u32 a, u32 b, u32 c) {
    u32 v;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
    return v;
}
DEVICE u32 byte_permute(u32 a, u32 b, u32 selector) {
    u32 v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(selector));
    return v;
}
// Loads of what is read once (global) or of what has been brought to shared memory.
DEVICE uint4 load_streaming_16(const void *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
DEVICE uint2 load_streaming_8(const void *p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
DEVICE u32 load_streaming_4(const void *p) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
template <bool SHARED>
DEVICE uint4 load_16(const void *p) {
    return SHARED ? *(const uint4 *) p : load_streaming_16(p);
}
template <bool SHARED>
DEVICE uint2 load_8(const void *p) {
    return SHARED ? *(const uint2 *) p : load_streaming_8(p);
}
template <bool SHARED>
DEVICE u32 load_4(const void *p) {
    return SHARED ? *(const u32 *) p : load_streaming_4(p);
}

// Levels in f16, of FORMAT 13 and 14: the low bytes of eight, then the high ones. Of 16 levels those above 0; the first
// half has the same sizes, the largest first.
#ifndef LEVELS_LOW_0
#define LEVELS_LOW_0 0
#define LEVELS_LOW_4 0
#define LEVELS_HIGH_0 0
#define LEVELS_HIGH_4 0
#endif

// A lane's words of codes.
template <int WORDS>
struct CodeRegisters {
    u32 codes[WORDS];
};
// Scale words by group: of row g, and of row g + 8 in the next word (code formats: f16 scale and bias) or in the upper
// half (e4m3 and levels). Plain weights have none.
template <int GROUPS, int WORDS>
struct ScaleRegisters {
    u32 scales[GROUPS][WORDS];
};
template <int GROUPS>
struct ScaleRegisters<GROUPS, 0> {};

// A packed tile, as one lane (g = lane / 4, t = lane % 4) holds it: of the rows g and g + 8, 16 columns each.
template <int BITS, int GROUP_COLUMNS>
struct TileLayout {
    static constexpr bool IS_PLAIN = BITS == 16, IS_E4M3 = BITS == 9, IS_ROTATED = BITS == 13 || BITS == 14;
    static constexpr int CODE_BITS = IS_ROTATED ? BITS - 10 : BITS;
    static constexpr int CODE_WORDS = IS_E4M3 ? 8 : CODE_BITS; // of a lane
    // Of a lane: of rotated columns one of the two in either half of the tile.
    static constexpr int GROUPS = IS_PLAIN ? 1 : IS_ROTATED ? 2 : 64 / GROUP_COLUMNS;
    static constexpr int SCALE_WORDS = IS_PLAIN ? 0 : IS_E4M3 || IS_ROTATED ? 1 : 2;
    static constexpr int CODE_BYTES = CODE_WORDS * 128, SCALE_BYTES = (IS_ROTATED ? 4 : GROUPS) * 8 * SCALE_WORDS * 4;
    static constexpr int BYTES = CODE_BYTES + SCALE_BYTES;
};
template <int BITS, int GROUP_COLUMNS, class L = TileLayout<BITS, GROUP_COLUMNS>>
struct PackedTile : L, CodeRegisters<L::CODE_WORDS>, ScaleRegisters<L::GROUPS, L::SCALE_WORDS> {
    using L::BYTES;
    using L::CODE_BITS;
    using L::CODE_BYTES;
    using L::CODE_WORDS;
    using L::GROUPS;
    using L::IS_E4M3;
    using L::IS_PLAIN;
    using L::IS_ROTATED;
    using L::SCALE_BYTES;
    using CodeRegisters<L::CODE_WORDS>::codes;

    template <bool SHARED = false>
    DEVICE static PackedTile load(const u8 *tile, int lane) {
        PackedTile v;
        if constexpr (CODE_BITS >= 4) {
            constexpr int vectors = CODE_WORDS / 4; // of 16 bytes
#pragma unroll
            for (int i = 0; i < vectors; i++) {
                const uint4 c = load_16<SHARED>(tile + (i * 32 + lane) * 16);
                v.codes[4 * i] = c.x, v.codes[4 * i + 1] = c.y, v.codes[4 * i + 2] = c.z, v.codes[4 * i + 3] = c.w;
            }
            if constexpr (BITS == 5) {
                v.codes[4] = load_4<SHARED>(tile + 512 + lane * 4);
            } else if constexpr (BITS == 6) {
                const uint2 c = load_8<SHARED>(tile + 512 + lane * 8);
                v.codes[4] = c.x, v.codes[5] = c.y;
            }
        } else {
            const uint2 c = load_8<SHARED>(tile + lane * 8);
            v.codes[0] = c.x, v.codes[1] = c.y;
            if constexpr (CODE_BITS == 3) v.codes[2] = load_4<SHARED>(tile + 256 + lane * 4);
        }
        if constexpr (!IS_PLAIN) {
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                const int number = IS_ROTATED ? 2 * group + (lane >> 1 & 1) : group;
                const u8 *from = tile + CODE_BYTES + (number * 8 + (lane >> 2)) * (4 * L::SCALE_WORDS);
                if constexpr (IS_E4M3 || IS_ROTATED) {
                    v.scales[group][0] = load_4<SHARED>(from);
                } else {
                    const uint2 both = load_8<SHARED>(from);
                    v.scales[group][0] = both.x;
                    v.scales[group][1] = both.y;
                }
            }
        }
        return v;
    }

    // Codes of four columns (step j of four) of row g (half 0) or g + 8 (half 1), as two pairs of f16 that are
    // subnormal: a code times 2^-24, which scales make up for. With codes of 4 bits the second pair is 16 times as
    // large; that saves shifts.
    DEVICE void unpack(int half, int j, u32 &p0, u32 &p1) const {
        [[maybe_unused]] const int h = j >> 1, q = h * 4 + 2 * (j & 1);
        if constexpr (IS_PLAIN) {
            p0 = codes[(half * 2 + h) * 4 + 2 * (j & 1)];
            p1 = codes[(half * 2 + h) * 4 + 2 * (j & 1) + 1];
        } else if constexpr (IS_E4M3) {
            // The exponent's bias of f16 is 8 more: 256 times too small.
            const u32 w = codes[half * 4 + h * 2 + (j & 1)];
            const u32 a = byte_permute(w, 0, 0x1404), b = byte_permute(w, 0, 0x3424);
            p0 = (a & 0x80008000u) | ((a & 0x7f007f00u) >> 1);
            p1 = (b & 0x80008000u) | ((b & 0x7f007f00u) >> 1);
        } else if constexpr (BITS == 8) {
            const u32 w = codes[half * 4 + h * 2 + (j & 1)];
            p0 = byte_permute(w, 0, 0x4140);
            p1 = byte_permute(w, 0, 0x4342);
        } else if constexpr (BITS >= 4) {
            const u32 w = codes[half * 2 + h] >> (8 * (j & 1));
            p0 = w & 0x000f000fu;
            p1 = BITS == 4 ? w & 0x00f000f0u : w >> 4 & 0x000f000fu;
            if constexpr (BITS == 5) {
                p0 |= ((codes[4] >> (half * 8 + q)) & 0x00010001u) << 4;
                p1 |= ((codes[4] >> (half * 8 + q + 1)) & 0x00010001u) << 4;
            } else if constexpr (BITS == 6) {
                p0 |= ((codes[4 + half] >> (2 * q)) & 0x00030003u) << 4;
                p1 |= ((codes[4 + half] >> (2 * q + 2)) & 0x00030003u) << 4;
            }
        } else {
            p0 = codes[half] >> (2 * q) & 0x00030003u;
            p1 = codes[half] >> (2 * q + 2) & 0x00030003u;
            if constexpr (BITS == 3) {
                p0 |= ((codes[2] >> (half * 8 + q)) & 0x00010001u) << 2;
                p1 |= ((codes[2] >> (half * 8 + q + 1)) & 0x00010001u) << 2;
            }
        }
    }
    // The level of a code of rotated columns.
    DEVICE static float level(u32 code) {
        const bool negative = CODE_BITS == 4 && code < 8;
        const u32 at = negative ? 7 - code : code & 7, low = byte_permute(LEVELS_LOW_0, LEVELS_LOW_4, at) & 255,
                  v = low | (byte_permute(LEVELS_HIGH_0, LEVELS_HIGH_4, at) & 255) << 8;
        return f16_to_f32((u16) (negative ? v | 0x8000 : v));
    }
    // Levels of four columns, as `unpack` has codes, in f16: bytes are looked up by four codes at once.
    DEVICE void look_up(int half, int j, u32 &p0, u32 &p1) const {
        const int h = j >> 1, q = h * 4 + 2 * (j & 1);
        // Codes 0 and 2 in the lowest byte, 1 and 3 above 16 bits.
        u32 four, negative = 0;
        if constexpr (CODE_BITS == 4) {
            const u32 w = codes[half * 2 + h] >> (8 * (j & 1));
            negative = ~w & 0x00880088u;
            four = (w ^ (negative >> 1 | negative >> 2 | negative >> 3)) & 0x00770077u;
        } else {
            const u32 low = codes[half] >> (2 * q), high = codes[2] >> (half * 8 + q);
            four =
                (low & 0x00030003u) | (low & 0x000c000cu) << 2 | (high & 0x00010001u) << 2 | (high & 0x00020002u) << 5;
        }
        const u32 at = four | four >> 8, low = byte_permute(LEVELS_LOW_0, LEVELS_LOW_4, at),
                  high = byte_permute(LEVELS_HIGH_0, LEVELS_HIGH_4, at);
        p0 = byte_permute(low, high, 0x6240) | (negative & 0x00080008u) << 12;
        p1 = byte_permute(low, high, 0x7351) | (negative & 0x00800080u) << 8;
    }
    // The A fragment of step j of four: 16 columns of all rows, four of either row in a lane.
    DEVICE void dequantize(int j, u32 (&a)[4]) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 &p0 = a[half], &p1 = a[half + 2];
            if constexpr (IS_ROTATED) look_up(half, j, p0, p1);
            else unpack(half, j, p0, p1);
            if constexpr (IS_E4M3 || IS_ROTATED) {
                const u32 scale = byte_permute(this->scales[j * GROUPS / 4][0], 0, half ? 0x3232 : 0x1010);
                p0 = hmul2(p0, scale);
                p1 = hmul2(p1, scale);
            } else if constexpr (!IS_PLAIN) {
                const u32 both = this->scales[j * GROUPS / 4][half];
                const u32 scale = byte_permute(both, 0, 0x1010), bias = byte_permute(both, 0, 0x3232);
                p0 = hfma2(p0, scale, bias);
                p1 = hfma2(p1, BITS == 4 ? hmul2(scale, 0x2c002c00u) : scale, bias); // 1 / 16
            }
        }
    }

    // Makes the lane's row g (half 0) or g + 8 (half 1) a row of another tile, of which `from` has row g (or, if
    // `upper`, g + 8) in the same lane.
    DEVICE void set_row(int half, const PackedTile &from, bool upper) {
#pragma unroll
        for (int j = 0; j < CODE_WORDS; j++) {
            if constexpr (BITS == 5 || CODE_BITS == 3) {
                // The plane of single bits holds both rows in one word.
                if (j == CODE_WORDS - 1) {
                    const u32 bits = (upper ? from.codes[j] >> 8 : from.codes[j]) & 0x00ff00ffu;
                    codes[j] = half ? codes[j] | bits << 8 : bits;
                    continue;
                }
            }
            // Words of a row that follow each other, and which such run this is.
            int run = 1, number = j;
            if constexpr (IS_PLAIN) run = 8, number = j / 8;
            else if constexpr (IS_E4M3 || BITS == 8) run = 4, number = j / 4;
            else if constexpr (CODE_BITS >= 4) run = j < 4 ? 2 : 1, number = j < 4 ? j / 2 : j - 4;
            if (number == half) codes[j] = upper ? from.codes[j + (1 - number) * run] : from.codes[j - number * run];
        }
        if constexpr (!IS_PLAIN) {
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                if constexpr (IS_E4M3 || IS_ROTATED) {
                    const u32 scale = upper ? from.scales[group][0] >> 16 : from.scales[group][0] & 0xffffu;
                    this->scales[group][0] = half ? this->scales[group][0] | scale << 16 : scale;
                } else {
                    this->scales[group][half] = upper ? from.scales[group][1] : from.scales[group][0];
                }
            }
        }
    }

    // One weight of a tile in memory, of row `row` & 15 and column `column` & 63, in f32 but for the scale of its row
    // tile; where columns are rotated, one of the rotated row.
    DEVICE static float value(const u8 *tile, u32 row, int column) {
        const int half = row >> 3 & 1, c = column & 63, h = c >> 5, t = c >> 3 & 3, lane = (row & 7) * 4 + t,
                  at = c & 7;
        [[maybe_unused]] const int i = at >> 1, odd = at & 1; // pair and its end
        [[maybe_unused]] auto scale_number = [&]() {
            return (c / (IS_ROTATED ? 16 : GROUP_COLUMNS) * 8 + (row & 7)) * 2 + half;
        };
        if constexpr (IS_PLAIN) {
            return f16_to_f32(*(const u16 *) (tile + ((half * 2 + h) * 32 + lane) * 16 + at * 2));
        } else if constexpr (IS_E4M3) {
            const u32 b = tile[(half * 32 + lane) * 16 + h * 8 + at];
            const u16 scale = *(const u16 *) (tile + CODE_BYTES + scale_number() * 2);
            return f16_to_f32(scale) * f16_to_f32((u16) ((b & 0x80) << 8 | (b & 0x7f) << 7));
        } else {
            const u32 *words = (const u32 *) tile;
            u32 code;
            if constexpr (BITS == 8) code = tile[(half * 32 + lane) * 16 + h * 8 + at];
            else if constexpr (CODE_BITS >= 4) code = words[lane * 4 + half * 2 + h] >> (4 * i + 16 * odd) & 15;
            else code = words[lane * 2 + half] >> (2 * (h * 4 + i) + 16 * odd) & 3;
            if constexpr (BITS == 5) code |= (words[128 + lane] >> (half * 8 + h * 4 + i + 16 * odd) & 1) << 4;
            if constexpr (BITS == 6) code |= (words[128 + lane * 2 + half] >> (2 * (h * 4 + i) + 16 * odd) & 3) << 4;
            if constexpr (CODE_BITS == 3) code |= (words[64 + lane] >> (half * 8 + h * 4 + i + 16 * odd) & 1) << 2;
            if constexpr (IS_ROTATED)
                return f16_to_f32(*(const u16 *) (tile + CODE_BYTES + scale_number() * 2)) * level(code);
            const u32 both = *(const u32 *) (tile + CODE_BYTES + scale_number() * 4);
            return fmaf(f16_to_f32((u16) both), (float) code * 0x1p-24f, f16_to_f32((u16) (both >> 16)));
        }
    }
};
typedef PackedTile<FORMAT, GROUP> Tile;
constexpr int TILE_BYTES = Tile::BYTES;

// ---- a matrix: row tiles of `k_tiles` tiles each, then a scale for each row tile, a power of two that its sums are
// multiplied by in the end. INTERLEAVE row tiles lie tile beside tile, as in src/pack.rs.
constexpr int INTERLEAVE = Tile::IS_E4M3 ? 2 : 1;
// Bytes from a tile to the next of its row tile.
constexpr int K_STRIDE = INTERLEAVE * TILE_BYTES;
// Bytes from an even row tile to the next one.
DEVICE u64 row_tile_stride(int k_tiles) { return INTERLEAVE > 1 ? (u64) TILE_BYTES : (u64) k_tiles * TILE_BYTES; }
DEVICE u64 row_tile_offset(int row_tile, int k_tiles) {
    return ((u64) (row_tile / INTERLEAVE) * k_tiles * INTERLEAVE + row_tile % INTERLEAVE) * TILE_BYTES;
}
DEVICE const float *row_tile_scales(const u8 *w, int rows, int k_tiles) {
    const int row_tiles = (rows + 16 * INTERLEAVE - 1) / (16 * INTERLEAVE) * INTERLEAVE;
    return (const float *) (w + row_tile_offset(row_tiles, k_tiles));
}
// Up to four matrices that multiply one input.
struct MatrixGroup {
    const u8 *w[4];
    float *y[4];
    int rows[4];
    int first_block[4]; // block that starts the matrix; where there is none, a number out of range
};

// ---- activations
// The lane's B fragments of 8 activation rows and the 64 columns of a tile, in the slice's scale.
struct ActivationFragment {
    u32 w[8];
    // `a` and `b`: the lane's values of either half of the columns.
    DEVICE void set(const uint4 &a, const uint4 &b) {
        w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
        w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
    }
    // The same of values that are still to be multiplied by `rescale`.
    DEVICE void set(const uint4 &a, const uint4 &b, u32 rescale) {
        set(a, b);
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = hmul2(w[i], rescale);
    }
};
// Products of a tile with 8 N activation rows: it is dequantized once.
template <int N>
DEVICE void mma_tile(float (&accumulators)[N][4], const Tile &tile, const ActivationFragment (&x)[N]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 a[4];
        tile.dequantize(j, a);
#pragma unroll
        for (int n = 0; n < N; n++) mma_m16n8k16(accumulators[n], a, x[n].w[2 * j], x[n].w[2 * j + 1]);
    }
}
DEVICE void mma_tile(float (&accumulators)[4], const Tile &tile, const ActivationFragment &x) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 a[4];
        tile.dequantize(j, a);
        mma_m16n8k16(accumulators, a, x.w[2 * j], x.w[2 * j + 1]);
    }
}

// ---- the scale of a slice: the largest scale of its tiles
// Over the four lanes that have the same row.
DEVICE float quad_max(float v) {
    v = larger(v, __shfl_xor_sync(~0u, v, 1));
    return larger(v, __shfl_xor_sync(~0u, v, 2));
}
// By a quad of lanes; `scale(k)` is that of tile k.
template <class F>
DEVICE float slice_scale(int begin, int end, F scale) {
    float max = 0.0f;
#pragma unroll 4
    for (int k = begin + (threadIdx.x & 3); k < end; k += 4) max = larger(max, scale(k));
    return quad_max(max);
}
// By one thread, or by each of several: of the slice that tile k is in.
template <class F>
DEVICE float slice_scale_around(int k, int tiles_per_slice, int k_tiles, F scale) {
    const int first = k / tiles_per_slice * tiles_per_slice, end = min(first + tiles_per_slice, k_tiles);
    float max = 0.0f;
#pragma unroll 4
    for (int i = first; i < end; i++) max = larger(max, scale(i));
    return max;
}
// By a quad of lanes, of a slice of at most MAX_SLICE_TILES; also stores what brings each tile to that scale, `stride`
// words apart.
#define MAX_SLICE_TILES 32
DEVICE float store_rescales(const float *scales, int length, u32 *rescales, int stride) {
    const int left = length - (int) (threadIdx.x & 3);
    scales += threadIdx.x & 3;
    rescales += (threadIdx.x & 3) * stride;
    // Powers of two are in the order of their bits.
    u32 v[MAX_SLICE_TILES / 4], most = 0;
#pragma unroll
    for (int i = 0; i < MAX_SLICE_TILES / 4; i++) v[i] = 4 * i < left ? __float_as_uint(scales[4 * i]) : 0;
#pragma unroll
    for (int i = 0; i < MAX_SLICE_TILES / 4; i++) most = v[i] > most ? v[i] : most;
    const float scale = quad_max(__uint_as_float(most)), inverse = inverse_pow2(scale);
#pragma unroll
    for (int i = 0; i < MAX_SLICE_TILES / 4; i++)
        if (4 * i < left) rescales[4 * i * stride] = rescale_f16x2(__uint_as_float(v[i]), inverse);
    return scale;
}
// An activation row in a slice, read from global memory by the quad of lanes that multiply it; zeros where `row` is
// negative.
struct ActivationRow {
    const u16 *values;
    const float *scales;
    float scale, inverse_scale; // of the slice
    DEVICE ActivationRow() {}
    DEVICE ActivationRow(const Activations &x, int row, int begin, int end) {
        values = row >= 0 ? x.values + (u64) row * x.stride + (threadIdx.x & 3) * 8 : nullptr;
        scales = x.scales + (u64) max(row, 0) * (x.stride / 64);
        scale = slice_scale(begin, end, [&](int k) { return scales[k]; });
        inverse_scale = inverse_pow2(scale);
    }
    DEVICE ActivationFragment load(int k) const {
        uint4 a = {0, 0, 0, 0}, b = {0, 0, 0, 0};
        if (values) {
            a = *(const uint4 *) (values + k * 64);
            b = *(const uint4 *) (values + k * 64 + 32);
        }
        ActivationFragment v;
        v.set(a, b, rescale_f16x2(scales[k], inverse_scale));
        return v;
    }
};
// Multiplies accumulators, of the activation rows 2 t and 2 t + 1, by the scales of their slices; lanes have `scale` of
// row g.
template <int M, int N>
DEVICE void apply_slice_scale(float (&accumulators)[M][N][4], int n, float scale) {
    const int at = (threadIdx.x & 3) * 8;
    const float scales[2] = {__shfl_sync(~0u, scale, at), __shfl_sync(~0u, scale, at + 4)};
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) accumulators[m][n][i] *= scales[i & 1];
}
template <int M, int N>
DEVICE void clear(float (&accumulators)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) accumulators[m][n][i] = 0.0f;
}
