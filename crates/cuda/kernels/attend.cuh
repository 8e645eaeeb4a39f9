// Attention's keys and values in pages, and what its kernels share. KV: 0 f32, 1 f16, 2 bf16,
// 3 q8_0.
//
// Keys and values: [page, K, PAGE_ROWS, e] or, where TILES (formats of at most 16 bits, HEAD
// columns a head, a multiple of 32), tiles of 32 keys by 32 columns, so that tensor cores can
// take them as they lie. Keys: [page, K, e / 32, 2] tiles whose rows are keys. Values: [page, K,
// 2, e / 32] tiles whose rows are columns. In 16 bits a tile is [4, 4, 8, 8]: 8 rows by 8 numbers
// of each lie side by side; what bf16 would round is rounded, and kept in f16 as far as that
// goes (65504, and multiples of 2^-24). In q8_0 a tile's rows are codes in `lane_order`, then
// come the scales of its 32 keys. No value becomes infinite or stays no number: keys that a
// row does not see have probability 0, and tensor cores multiply by that too.
//
// A row's sums walk units of keys aligned to cache row 0: pages up to key FINE and where a
// window is no longer than that, then splits. Each unit is one accumulator; units are added
// from the left. So the row's own context decides the order, and neither the batch nor how the
// work is spread does. Scores are logarithms to base 2, and a page's and a unit's maximum is
// rounded up to a whole number: whatever is scaled to another maximum is scaled exactly, when
// it is done does not matter, down to 2^-126 of the largest. Only the probabilities of a split's pages round once more, in
// f16, where their page's maximum is far below the split's.

#define SPLIT 256
#define FINE 2048 // keys, as in src/attention.rs
#define TILE_BYTES (KV == 3 ? 1088 : 2048)
#define PAGE_BYTES (HEAD / 16 * TILE_BYTES) // of a head
#if KV == 0
typedef float Stored;
__device__ __forceinline__ float read(Stored v) { return v; }
__device__ __forceinline__ Stored stored(float v) { return v; }
#elif KV == 2 && !TILES
typedef u16 Stored;
__device__ __forceinline__ float read(Stored v) { return bf16_to_f32(v); }
__device__ __forceinline__ Stored stored(float v) { return f32_to_bf16(v); }
#else
typedef u16 Stored;
__device__ __forceinline__ float read(Stored v) { return f16_to_f32(v); }
__device__ __forceinline__ float within_f16(float v) { return fminf(fmaxf(v, -65504.0f), 65504.0f); }
__device__ __forceinline__ Stored stored(float v) { return f32_to_f16(within_f16(KV == 2 ? bf16_to_f32(f32_to_bf16(v)) : v)); }
#endif

struct Attend {
    const float *q;
    const u8 *keys, *values;
    Batch batch;
    float *y;
    float *partials; // [n H, units, 2 + e] from the row's first unit on: maximum, sum, weighted values
    float scale;
    int group, heads, kv_heads, head_dim, units;
    u32 window; // 0: none
};

// The visible keys of a row.
__device__ __forceinline__ void visible(const Attend &a, u32 row, u32 &begin, u32 &end) {
    u32 seen = a.batch.position(row) + 1;
    begin = a.window && seen > a.window ? seen - a.window : 0;
    end = a.batch.index(row) + 1;
}
// Whether units are pages where `key` is.
__device__ __forceinline__ bool fine(const Attend &a, u32 key) {
#if TILES
    return key < FINE || (a.window && a.window <= FINE);
#else
    return false;
#endif
}
// The unit that has `key`.
__device__ __forceinline__ u32 unit_of(const Attend &a, u32 key) {
    return fine(a, key) ? key / PAGE_ROWS : key / SPLIT + (TILES ? FINE / PAGE_ROWS - FINE / SPLIT : 0);
}
// How many units a row sees.
__device__ __forceinline__ u32 units_of(const Attend &a, u32 begin, u32 end) { return unit_of(a, end - 1) + 1 - unit_of(a, begin); }

#define LOG2E 1.44269504088896340736f
// What scales from a maximum to one not smaller, 2^(from - to); 0 if nothing has been seen.
__device__ __forceinline__ float rescale(float from, float to) { return __uint_as_float((u32) ((int) fmaxf(from - to, -127.0f) + 127) << 23); }

#if TILES
#define QUERIES 16 // of a tile
// Where number `i` of 32 lies, so that lane t of four finds those side by side that it
// multiplies: 2 t and 2 t + 1 of each 8.
__device__ __forceinline__ int lane_order(int i) { return i % 8 / 2 * 8 + i / 8 * 2 + i % 2; }
__device__ __forceinline__ u32 pair(float low, float high) {
    u32 v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}
__device__ __forceinline__ float power(float x) { // 2^x, as the hardware has it
    float v;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
    return v;
}

// Block `block`'s sequence, and its first query there, for `queries` a block; false if there is none.
__device__ __forceinline__ bool find(const Attend &a, u32 block, u32 queries, u32 &seq, u32 &first) {
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
// Queries of one sequence and key head: its rows, and the query heads that share the head.
struct Queries {
    u32 start, first; // row of the step that starts the sequence, and first query
    u32 inverse;      // of `shared_by`, times 2^32 and a little more; 0 of 1
    int shared_by, kv_head, count;
    // What the lane's two queries see, and what any of the block's does.
    u32 begin[2], end[2], least, most;
    // `most_queries` of them, of which the lane's are in tile `mine`.
    __device__ __forceinline__ Queries(const Attend &a, u32 seq, u32 first, int most_queries = QUERIES, int mine = 0) : first(first) {
        shared_by = a.heads / a.kv_heads;
        inverse = 0xffffffffu / shared_by + 1;
        kv_head = blockIdx.y % a.kv_heads;
        start = a.batch.seq(seq)[SEQ_START];
        count = min((int) (a.batch.seq(seq)[SEQ_ROWS] * shared_by - first), most_queries);
        const int g = ((threadIdx.x & 31) >> 2) + mine * QUERIES;
        u32 unused;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            begin[i] = end[i] = 0;
            if (g + 8 * i < count) visible(a, row(g + 8 * i), begin[i], end[i]);
        }
        visible(a, row(0), least, unused);
        visible(a, row(count - 1), unused, most);
    }
    // Of query `i` of the sequence, divided by `shared_by`: exact up to 2^32 / shared_by.
    __device__ __forceinline__ u32 quotient(u32 i) const { return inverse ? __umulhi(i, inverse) : i; }
    __device__ __forceinline__ u32 row(int i) const { return start + quotient(first + i); }
    __device__ __forceinline__ int head(int i) const { return kv_head * shared_by + (int) (first + i - quotient(first + i) * shared_by); }
    // Four columns of query `q`, from number `c` on, or zeros; and what tensor cores take of them.
    __device__ __forceinline__ float4 load(const Attend &a, int q, int c) const {
        return q < count ? *(const float4 *) (a.q + ((u64) row(q) * a.heads + head(q)) * HEAD + c) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    __device__ __forceinline__ static uint2 rounded(const float4 &v) {
        return make_uint2(pair(within_f16(v.x), within_f16(v.y)), pair(within_f16(v.z), within_f16(v.w)));
    }
    // Page `lane` of a split, if any of the block's queries sees it.
    __device__ __forceinline__ u32 page_of(const u32 *table, u32 split) const {
        const u32 lane = threadIdx.x & 31, key = split * SPLIT + lane * PAGE_ROWS;
        return lane < SPLIT / PAGE_ROWS && key < most && key + PAGE_ROWS > least ? table[key / PAGE_ROWS] : NO_PAGE;
    }
    // Scores of a page's 8 keys of number `n`, as the lane has them of its queries: scaled, and
    // -infinity where they are not seen.
    __device__ __forceinline__ void mask(float (&s)[4], u32 page, int n, float scale) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 key = page * PAGE_ROWS + n * 8 + 2 * (threadIdx.x & 3) + (i & 1);
            s[i] = key >= begin[i >> 1] && key < end[i >> 1] ? s[i] * scale : -INFINITE;
        }
    }
};
// Probabilities of a page's keys, relative to the lane's two queries' maximum.
struct Powers {
    float max[2], sum[2];
    u32 p[8][2];
    __device__ __forceinline__ Powers(const float (&s)[8][4]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float most = -INFINITE;
            sum[i] = 0.0f;
#pragma unroll
            for (int n = 0; n < 8; n++) most = larger(s[n][2 * i + 1], larger(s[n][2 * i], most));
            most = larger(most, __shfl_xor_sync(~0u, most, 1));
            most = larger(most, __shfl_xor_sync(~0u, most, 2));
            max[i] = ceilf(most);
            const float from = most == -INFINITE ? 0.0f : max[i];
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float p0 = power(s[n][2 * i] - from), p1 = power(s[n][2 * i + 1] - from);
                sum[i] += p0;
                sum[i] += p1;
                p[n][i] = pair(p0, p1);
            }
            sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
            sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
        }
    }
    // What tensor cores take for 16 keys of number `j`.
    __device__ __forceinline__ uint4 keys(int j) const { return make_uint4(p[2 * j][0], p[2 * j][1], p[2 * j + 1][0], p[2 * j + 1][1]); }
};
// Of a unit that is a split: its maximum, and what its pages' probabilities are multiplied by.
struct Together {
    float max, sum;
    u32 by[4]; // twice in f16
    // `of(i)`: maximum and sum of page `i`.
    template <class Of> __device__ __forceinline__ Together(Of of) {
        float2 v[4];
        max = -INFINITE;
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = of(i);
            max = larger(v[i].x, max);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float f = rescale(v[i].x, max);
            sum = fmaf(v[i].y, f, sum);
            by[i] = pair(f, f);
        }
    }
};
// A page's probabilities relative to their split's maximum.
__device__ __forceinline__ uint4 scaled(const uint4 &p, u32 by0, u32 by1) { return make_uint4(mul2(p.x, by0), mul2(p.y, by1), mul2(p.z, by0), mul2(p.w, by1)); }
#endif
