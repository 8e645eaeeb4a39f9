// The paged KV cache as attention reads it, and what its kernels share: visible keys, online softmax, tiles of queries.
// common.cuh, kv_format.cuh, which names formats, and mbarrier.cuh go before this.
//
// TENSOR_CORES: keys and values of at most 16 bits, HEAD_DIM columns a head, a multiple of 32. The first HEAD_COLUMNS
// of these are the head's own, the others zeros that no tensor has.
//
// Layout. Pages of keys or values, [page, kv head], in packed formats as kv_format.cuh has them. In others rows of
// elements, [PAGE_ROWS, e], or, with TENSOR_CORES, tiles of 32 keys by 32 columns that tensor cores take as they lie.
// Keys: [e / 32, 2] tiles whose rows are keys. Values: [2, e / 32] tiles whose rows are columns. A tile is [4, 4, 8,
// 8]: 8 x 8 matrices, each contiguous (ldmatrix), in f16. bf16 values are rounded to bf16 and kept in f16 as far as
// that goes (65504, and multiples of 2^-24). No stored value is infinite or NaN: keys that a row does not see have
// probability 0, and tensor cores multiply by that too.
//
// Order of sums (split-KV). A row's keys are cut into units aligned to row 0 of the cache: pages up to key
// PAGE_UNIT_KEYS, and everywhere if the window is no longer than that; then splits of SPLIT_KEYS. A unit has one
// accumulator; units are added from the left. So the row's own context decides the order, not the batch nor how work is
// spread. Scores are logarithms to base 2, and the maximum of a page and of a unit is rounded up to a whole number:
// rescaling to another maximum is exact down to 2^-126 of the largest, whenever it is done. Only the probabilities of a
// split's pages are rounded once more, in f16, where their page's maximum is far below the split's.

DEVICE float clamp_f16(float v) { return fminf(fmaxf(v, -65504.0f), 65504.0f); }
// A page's elements, in formats that are not packed.
template <bool VALUES>
struct KvElement {
    static constexpr int FORMAT = KvFormat<VALUES>::FORMAT;
    static constexpr u32 BYTES = FORMAT == 0 ? 4 : 2;
    // Whether elements lie in tiles of 16 bits as they are, not rotated.
    static constexpr bool IS_TILE = TENSOR_CORES && (FORMAT == 1 || FORMAT == 2) && KvFormat<VALUES>::ROTATION == 0;
    // An element as it is stored, in formats of 16 bits.
    DEVICE static u16 bits(float v) {
        if (FORMAT == 2 && !TENSOR_CORES) return f32_to_bf16(v);
        return f32_to_f16(clamp_f16(FORMAT == 2 ? bf16_to_f32(f32_to_bf16(v)) : v));
    }
    // Two elements as they are stored, the first in the lower half.
    DEVICE static u32 bits(float low, float high) {
        if constexpr (FORMAT == 2 && TENSOR_CORES) {
            u32 both;
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
            // `clamp_f16` makes -65504 of every NaN, so that its bits do not matter.
            return pack_f16x2(clamp_f16(__uint_as_float(both << 16)), clamp_f16(__uint_as_float(both & 0xffff0000)));
        }
        return bits(low) | (u32) bits(high) << 16;
    }
    DEVICE static void store(u8 *to, float v) {
        if (FORMAT == 0) *(float *) to = v;
        else *(u16 *) to = bits(v);
    }
    DEVICE static float load(const u8 *from) {
        if (FORMAT == 0) return *(const float *) from;
        const u16 v = *(const u16 *) from;
        return FORMAT == 2 && !TENSOR_CORES ? bf16_to_f32(v) : f16_to_f32(v);
    }
};
// Bytes of a page of a head of `e` columns.
template <bool VALUES>
DEVICE constexpr u32 kv_page_bytes(int e) {
    return TENSOR_CORES || KvFormat<VALUES>::IS_PACKED ? KvFormat<VALUES>::page_bytes(e)
                                                       : PAGE_ROWS * e * KvElement<VALUES>::BYTES;
}

struct AttentionArgs {
    const float *q;
    const u8 *keys, *values;
    Batch batch;
    float *y;
    float *partials; // [n H, units, 2 + PARTIAL_COLUMNS] of the units that a row sees: maximum, sum, weighted values
    float scale;
    int group, heads, kv_heads, head_dim, units;
    u32 window; // 0: none
};

// Columns of a head in partial results.
#define PARTIAL_COLUMNS (TENSOR_CORES ? HEAD_DIM : a.head_dim)

// The keys that a row sees: begin .. end.
DEVICE void visible_keys(const AttentionArgs &a, u32 row, u32 &begin, u32 &end) {
    end = a.batch.sees_end(row);
    // Windows count back from the row's own key: a row that writes none (NO_ROW) stands behind all that it sees.
    const u32 last = min(a.batch.at(row), end) + 1;
    begin = max(a.batch.sees_begin(row), a.window && last > a.window ? last - a.window : 0);
}
// Whether units are pages where `key` is.
DEVICE bool units_are_pages(const AttentionArgs &a, u32 key) {
#if TENSOR_CORES
    return key < PAGE_UNIT_KEYS || (a.window && a.window <= PAGE_UNIT_KEYS);
#else
    return false;
#endif
}
// Number of the unit that has `key`.
DEVICE u32 unit_index(const AttentionArgs &a, u32 key) {
    return units_are_pages(a, key)
               ? key / PAGE_ROWS
               : key / SPLIT_KEYS + (TENSOR_CORES ? PAGE_UNIT_KEYS / PAGE_ROWS - PAGE_UNIT_KEYS / SPLIT_KEYS : 0);
}
// How many units a row sees.
DEVICE u32 unit_count(const AttentionArgs &a, u32 begin, u32 end) {
    return unit_index(a, end - 1) + 1 - unit_index(a, begin);
}

#define LOG2E 1.44269504088896340736f
// Online softmax: the factor 2^(from - to) from one maximum to another that is not smaller; 0 if nothing has been seen.
DEVICE float softmax_rescale(float from, float to) {
    // Adding 1.5 * 2^23 leaves a whole number in the lowest bits of a float; with 127, the bias, it is the exponent of
    // the result.
    return __uint_as_float(__float_as_uint(fmaxf(from - to, -127.0f) + 12583039.0f) << 23);
}

#if TENSOR_CORES
#define TILE_QUERIES 16 // rows of an mma

DEVICE float exp2_approx(float x) { // 2^x, the hardware's approximation
    float v;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
    return v;
}

// The sequence and its first query of block `block`, of `queries` queries each; false if there is none.
DEVICE bool find_queries(const AttentionArgs &a, u32 block, u32 queries, u32 &seq, u32 &first) {
    const int shared_by = a.heads / a.kv_heads;
    first = block;
    for (seq = 0; seq < a.batch.seqs(); seq++) {
        const u32 blocks = (a.batch.seq(seq)[SEQ_ROWS] * shared_by + queries - 1) / queries;
        if (first < blocks) {
            first *= queries;
            return true;
        }
        first -= blocks;
    }
    return false;
}
// Queries of one sequence and kv head: its rows times the query heads that share the kv head (grouped-query attention).
struct QueryTile {
    u32 start, first; // row of the step that starts the sequence, and first query
    u32 inverse;      // 2^32 / shared_by, rounded up; 0 for 1
    int shared_by, kv_head, count;
    // Keys that the lane's two queries see, and those that any of the block's does.
    u32 begin[2], end[2], least, most;
    // At most `most_queries`; the lane's two are in tile `mine`.
    DEVICE QueryTile(const AttentionArgs &a, u32 seq, u32 first, int most_queries = TILE_QUERIES, int mine = 0)
        : first(first) {
        shared_by = a.heads / a.kv_heads;
        inverse = 0xffffffffu / shared_by + 1;
        kv_head = blockIdx.y % a.kv_heads;
        start = a.batch.seq(seq)[SEQ_START];
        count = min((int) (a.batch.seq(seq)[SEQ_ROWS] * shared_by - first), most_queries);
        const int g = ((threadIdx.x & 31) >> 2) + mine * TILE_QUERIES;
        u32 unused;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            begin[i] = end[i] = 0;
            if (g + 8 * i < count) visible_keys(a, row(g + 8 * i), begin[i], end[i]);
        }
        visible_keys(a, row(0), least, unused);
        visible_keys(a, row(count - 1), unused, most);
    }
    // i / shared_by: exact up to 2^32 / shared_by.
    DEVICE u32 quotient(u32 i) const { return inverse ? __umulhi(i, inverse) : i; }
    DEVICE u32 row(int i) const { return start + quotient(first + i); }
    DEVICE int head(int i) const { return kv_head * shared_by + (int) (first + i - quotient(first + i) * shared_by); }
    // Four columns of query `q`, from number `c` on, or zeros.
    DEVICE float4 load(const AttentionArgs &a, int q, int c) const {
        return q < count && c < HEAD_COLUMNS
                   ? *(const float4 *) (a.q + ((u64) row(q) * a.heads + head(q)) * HEAD_COLUMNS + c)
                   : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    // Column `c` of query `q`, or zero.
    DEVICE float load_one(const AttentionArgs &a, int q, int c) const {
        return q < count ? a.q[((u64) row(q) * a.heads + head(q)) * HEAD_COLUMNS + c] : 0.0f;
    }
    DEVICE static uint2 to_f16(const float4 &v) {
        return make_uint2(pack_f16x2(clamp_f16(v.x), clamp_f16(v.y)), pack_f16x2(clamp_f16(v.z), clamp_f16(v.w)));
    }
    // Page number `lane` of a split, if any of the block's queries sees it.
    DEVICE u32 load_page_of_split(const u32 *table, u32 split) const {
        const u32 lane = threadIdx.x & 31, key = split * SPLIT_KEYS + lane * PAGE_ROWS;
        return lane < SPLIT_KEYS / PAGE_ROWS && key < most && key + PAGE_ROWS > least ? table[key / PAGE_ROWS]
                                                                                      : NO_PAGE;
    }
    // Scales the scores of keys 8 n to 8 n + 7 of a page, in the layout of mma accumulators; -infinity where not
    // visible.
    DEVICE void mask(float (&s)[4], u32 page, int n, float scale) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 key = page * PAGE_ROWS + n * 8 + 2 * (threadIdx.x & 3) + (i & 1);
            s[i] = key >= begin[i >> 1] && key < end[i >> 1] ? s[i] * scale : -INF;
        }
    }
};
// Softmax of a page: probabilities relative to the maximum of each of the lane's two queries, their sum, in f16 pairs.
struct PageSoftmax {
    float max[2], sum[2];
    u32 p[8][2];
    DEVICE PageSoftmax(const float (&s)[8][4]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float most = -INF;
            sum[i] = 0.0f;
#pragma unroll
            for (int n = 0; n < 8; n++) most = fmaxf(s[n][2 * i + 1], fmaxf(s[n][2 * i], most));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            max[i] = ceilf(most);
            const float from = most == -INF ? 0.0f : max[i];
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float p0 = exp2_approx(s[n][2 * i] - from), p1 = exp2_approx(s[n][2 * i + 1] - from);
                sum[i] += p0;
                sum[i] += p1;
                p[n][i] = pack_f16x2(p0, p1);
            }
            sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
            sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
        }
    }
    // The A fragment of keys 16 j to 16 j + 15.
    DEVICE uint4 keys(int j) const { return make_uint4(p[2 * j][0], p[2 * j][1], p[2 * j + 1][0], p[2 * j + 1][1]); }
};
// Softmax of a unit that is a split: its maximum and sum, and the factors of its pages' probabilities.
struct SplitSoftmax {
    float max, sum;
    u32 rescales[4]; // twice in f16
    // `of(i)`: maximum and sum of page `i`.
    template <class Of>
    DEVICE SplitSoftmax(Of of) {
        float2 v[4];
        max = -INF;
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = of(i);
            max = larger(v[i].x, max);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float f = softmax_rescale(v[i].x, max);
            sum = fmaf(v[i].y, f, sum);
            rescales[i] = pack_f16x2(f, f);
        }
    }
};
// A page's A fragment, relative to the maximum of its split.
DEVICE uint4 rescale_fragment(const uint4 &p, u32 by0, u32 by1) {
    return make_uint4(hmul2(p.x, by0), hmul2(p.y, by1), hmul2(p.z, by0), hmul2(p.w, by1));
}
#endif
