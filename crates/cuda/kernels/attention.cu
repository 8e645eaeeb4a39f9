// Keys and values in pages, and attention over them. KV: 0 f32, 1 f16, 2 bf16, 3 q8_0.
//
// Keys and values: [page, K, PAGE_ROWS, e] or, where TILES (formats of at most 16 bits, HEAD
// columns a head, a multiple of 32), [page, K, e / 32, 2] tiles of 32 keys by 32 columns,
// so that tensor cores can take them as they lie: a key's columns side by side, but of
// values a column's keys. In q8_0 a tile's codes come before the scales of its 32 keys, and
// tensor cores get what they stand for in f16. A row's sums walk splits of SPLIT keys
// aligned to cache row 0, of which each page is summed alone; the splits are merged from
// the left. So the row's own context decides the order, and neither the batch nor how the
// work is spread does.

#define SPLIT 256
#define TILE_BYTES (KV == 3 ? 1088 : 2048)
#define PAGE_BYTES (HEAD / 16 * TILE_BYTES) // of a head
#if KV == 0
typedef float Stored;
__device__ __forceinline__ float read(Stored v) { return v; }
__device__ __forceinline__ Stored stored(float v) { return v; }
#elif KV == 2
typedef u16 Stored;
__device__ __forceinline__ float read(Stored v) { return bf16_to_f32(v); }
__device__ __forceinline__ Stored stored(float v) { return f32_to_bf16(v); }
#else
typedef u16 Stored;
__device__ __forceinline__ float read(Stored v) { return f16_to_f32(v); }
__device__ __forceinline__ Stored stored(float v) { return f32_to_f16(v); }
#endif

// Column `c` of key `index`, or its value, goes to its page of a head. Where tiles lie, a warp
// has 32 columns that are a tile's.
template <bool VALUE>
__device__ __forceinline__ void remember(u8 *pages, u64 page_of_head, u32 index, int c, int head_dim, float v) {
#if TILES
    const int key = index % 32, column = c % 32, at = VALUE ? column * 32 + key : key * 32 + column;
    u8 *tile = pages + page_of_head * PAGE_BYTES + (c / 32 * 2 + index % PAGE_ROWS / 32) * TILE_BYTES;
#if KV == 3
    // As quant::gguf writes a block.
    const float d = warp_max(fabsf(v)) / 127.0f, inverse = d == 0.0f ? 0.0f : 1.0f / d;
    tile[at] = (u8) (int) roundf(v * inverse);
    if (column == 0) ((u16 *) (tile + 1024))[key] = f32_to_f16(smaller(d, 65504.0f));
#else
    ((Stored *) tile)[at] = stored(v);
#endif
#else
    ((Stored *) pages)[(page_of_head * PAGE_ROWS + index % PAGE_ROWS) * head_dim + c] = stored(v);
#endif
}

// k, v: [n, K e] become the cache rows of the batch; a thread a value.
KERNEL append(u8 *keys, u8 *values, const float *k, const float *v, Batch batch, int group, int heads, int head_dim, u64 n) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 row = (u32) (i / (heads * head_dim)), index = batch.index(row);
    int head = (int) (i / head_dim % heads), c = (int) (i % head_dim);
    u32 page = batch.table(batch.seq_of(row), group)[index / PAGE_ROWS];
    if (page == NO_PAGE) return;
    remember<false>(keys, (u64) page * heads + head, index, c, head_dim, k[i]);
    remember<true>(values, (u64) page * heads + head, index, c, head_dim, v[i]);
}

// Norms of heads that take no notice of each other, and what is remembered of them:
// norm_rope and rms_norm of rows.cu and `append` in one. Block (row, head), jobs one
// after the other.
struct Heads {
    const float *x[3], *weight[3];
    float *y[3]; // null: nobody asks
    int first[4]; // head that starts a job; the last one ends them
    int kind[3];  // 1: norm, 2: turn as well, 4: becomes keys, 8: becomes values
    const float *frequencies;
    Batch batch;
    u8 *keys, *values;
    int head_dim, offset, pairs, group;
    float eps;
};
KERNEL __launch_bounds__(256) heads(Heads a) {
    extern __shared__ float head[];
    __shared__ float shared[32];
    start_next();
    const int row = blockIdx.x / a.first[3], all = blockIdx.x % a.first[3], e = a.head_dim;
    const float *x = a.x[0], *weight = a.weight[0];
    float *y = a.y[0];
    int kind = a.kind[0], first = 0, heads = a.first[1];
#pragma unroll
    for (int i = 1; i < 3; i++)
        if (all >= a.first[i]) { x = a.x[i]; weight = a.weight[i]; y = a.y[i]; kind = a.kind[i]; first = a.first[i]; heads = a.first[i + 1] - first; }
    const u64 at = ((u64) row * heads + all - first) * e;
    const Kept w = PARAMETER(weight, e);
    Angles turn;
    turn.find((float) a.batch.position(row), a.frequencies, e, a.offset, kind & 2 ? a.pairs : 0);
    const u32 index = a.batch.index(row), page = kind & 12 ? a.batch.table(a.batch.seq_of(row), a.group)[index / PAGE_ROWS] : NO_PAGE;
    wait_for_previous();
    Kept k = keep(x + at, e);
    if (kind & 1) normalise(k, e, a.eps, w, weight, shared);
    put(head, e, k);
    __syncthreads();
    const u64 to = (u64) page * heads + all - first;
    turn.each(head, e, a.offset, kind & 2 ? a.pairs : 0, [&](int c, float v) {
        if (y) y[at + c] = v;
        if (page == NO_PAGE) return;
        if (kind & 4) remember<false>(a.keys, to, index, c, e, v);
        if (kind & 8) remember<true>(a.values, to, index, c, e, v);
    });
}

struct Attend {
    const float *q;
    const u8 *keys, *values;
    Batch batch;
    float *y;
    float *partials; // [n H, splits, 2 + e] from the row's first split on: maximum, sum, weighted values
    float scale;
    int group, heads, kv_heads, head_dim, splits;
    u32 window; // 0: none
};

// The visible keys of a row.
__device__ __forceinline__ void visible(const Attend &a, u32 row, u32 &begin, u32 &end) {
    u32 seen = a.batch.position(row) + 1;
    begin = a.window && seen > a.window ? seen - a.window : 0;
    end = a.batch.index(row) + 1;
}

// Whether the partial results of a sequence's rows are those of pages, not of splits:
// where there are too few splits for all multiprocessors.
#define FINE 2048 // keys, as in src/attention.rs
__device__ __forceinline__ bool by_pages(const Attend &a, u32 seq) {
#if TILES
    const u32 *of = a.batch.seq(seq);
    return a.window ? a.window <= FINE : a.batch.index(of[SEQ_START] + of[SEQ_ROWS] - 1) < FINE;
#else
    return false;
#endif
}

// total = total + right, both scaled to the larger maximum.
__device__ __forceinline__ void merge(float &max, float max2, float &factor, float &factor2) {
    float m = max2 > max ? max2 : max;
    factor = exp_(max - m);
    factor2 = max2 == -INFINITE ? 0.0f : exp_(max2 - m);
    max = m;
}

// Merges what blocks have found of a row's pages or splits, `UNITS` of them at a time and 64
// columns: of a split's pages, each scaled to the largest maximum, the sum from the left,
// then the splits from the left. Block (row, head, 64 columns); it also writes the columns as
// products read them, where there are whole tiles.
#define UNITS 64
KERNEL __launch_bounds__(128) attend_merge(Attend a, Half h) {
    __shared__ float2 found[UNITS][32]; // pairs of columns
    __shared__ float of_page[UNITS];
    __shared__ float4 of_split[UNITS]; // factors of what came before and of the split, its sum
    start_next();
    const int lane = threadIdx.x & 31, tiles = (a.head_dim + 63) / 64;
    const u32 head = blockIdx.x / tiles, row = head / a.heads;
    const int column = blockIdx.x % tiles * 64 + 2 * lane;
    u32 begin, end;
    visible(a, row, begin, end);
    const bool pages = by_pages(a, a.batch.seq_of(row));
    const int keys = pages ? PAGE_ROWS : SPLIT, first = begin / keys, count = (int) ((end + keys - 1) / keys) - first;
    const int group = pages ? SPLIT / PAGE_ROWS : 1, skip = first % group;
    const float *p = a.partials + (u64) head * a.splits * (2 + a.head_dim);
    wait_for_previous();
    float most = -INFINITE, sum = 0.0f;
    float2 o = make_float2(0.0f, 0.0f);
    for (int base = -skip; base < count; base += UNITS) {
        __syncthreads(); // what was found before is used
        // Warps but the first, which finds factors meanwhile, bring whole groups.
#pragma unroll 4
        for (int i = (int) (threadIdx.x >> 5) - 1; i >= 0 && i < UNITS && base + i / group * group < count; i += 3) {
            const bool there = base + i >= 0 && base + i < count;
            const float *from = p + (u64) (there ? base + i : 0) * (2 + a.head_dim) + 2 + column;
#if TILES
            const bool real = there && column < a.head_dim;
            asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" :: "r"((u32) __cvta_generic_to_shared(&found[i][lane])), "l"(real ? from : p), "r"(real ? 8 : 0) : "memory");
#else
            found[i][lane].x = there && column < a.head_dim ? from[0] : 0.0f;
            found[i][lane].y = there && column + 1 < a.head_dim ? from[1] : 0.0f;
#endif
        }
        if (threadIdx.x < 32)
            for (int i = lane; i < UNITS; i += 32) {
                const bool there = base + i >= 0 && base + i < count;
                const float *from = p + (u64) (there ? base + i : 0) * (2 + a.head_dim);
                const float own = there ? from[0] : -INFINITE, part = there ? from[1] : 0.0f;
                float max = own, l = part;
                if (pages) {
                    max = larger(max, __shfl_xor_sync(~0u, max, 1));
                    max = larger(max, __shfl_xor_sync(~0u, max, 2));
                    const float f = own == -INFINITE ? 0.0f : exp_(own - max);
                    of_page[i] = f;
                    l = 0.0f;
#pragma unroll
                    for (int j = 0; j < 4; j++) l += __shfl_sync(~0u, part * f, (lane & ~3) + j);
                }
                // The largest up to each lane, and before its split.
                float upto = max;
#pragma unroll
                for (int d = 1; d < 32; d *= 2) {
                    const float left = __shfl_up_sync(~0u, upto, d);
                    if (lane >= d) upto = larger(upto, left);
                }
                const int start = lane & ~(group - 1);
                const float left = __shfl_sync(~0u, upto, start > 0 ? start - 1 : 0);
                float before = start > 0 ? larger(most, left) : most, f1, f2;
                merge(before, max, f1, f2);
                if (lane == start) of_split[i / group] = make_float4(f1, f2, l, 0.0f);
                most = larger(most, __shfl_sync(~0u, upto, 31));
            }
#if TILES
        asm volatile("cp.async.wait_all;" ::: "memory");
#endif
        __syncthreads();
        if (threadIdx.x < 32)
#pragma unroll 4
            for (int i = 0; i < UNITS / group && base + i * group < count; i++) {
                const float4 f = of_split[i];
                float2 s = found[i * group][lane];
                if (pages) {
                    s.x *= of_page[4 * i];
                    s.y *= of_page[4 * i];
#pragma unroll
                    for (int j = 1; j < 4; j++) {
                        const float2 v = found[4 * i + j][lane];
                        s.x += v.x * of_page[4 * i + j];
                        s.y += v.y * of_page[4 * i + j];
                    }
                }
                o.x = o.x * f.x + s.x * f.y;
                o.y = o.y * f.x + s.y * f.y;
                sum = sum * f.x + f.z * f.y;
            }
    }
    if (threadIdx.x >= 32) return;
    o.x /= sum;
    o.y /= sum;
    float *y = a.y + (u64) head * a.head_dim + column;
    if (column < a.head_dim) y[0] = o.x;
    if (column + 1 < a.head_dim) y[1] = o.y;
    if (h.kp) put_half(h, row, (head % a.heads * a.head_dim + column) / 64, o.x, o.y);
}
#if !TILES
// One split of one row and head by a block of 128 threads. Scores: a warp a key,
// 32 partial sums and a tree. Then a thread a column, keys ascending.
__device__ __forceinline__ void partial(const Attend &a, u32 row, int head, u32 split, u32 begin, u32 end, const float *q, float *scores, float *shared, float &max, float &sum, float (&o)[4]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, e = a.head_dim;
    const u32 first = split * SPLIT > begin ? split * SPLIT : begin, last = (split + 1) * SPLIT < end ? (split + 1) * SPLIT : end;
    const u32 *table = a.batch.table(a.batch.seq_of(row), a.group);
    const int kv_head = head / (a.heads / a.kv_heads);
    auto at = [&](u32 key) { return (((u64) table[key / PAGE_ROWS] * a.kv_heads + kv_head) * PAGE_ROWS + key % PAGE_ROWS) * e; };
    for (int i = threadIdx.x; i < SPLIT; i += 128) scores[i] = -INFINITE;
    __syncthreads();
    for (u32 key = first + warp; key < last; key += 4) {
        const Stored *k = (const Stored *) a.keys + at(key);
        float s = 0.0f;
        for (int c = lane; c < e; c += 32) s = fmaf(q[c], read(k[c]), s);
        s = warp_sum(s) * a.scale;
        if (lane == 0) scores[key % SPLIT] = s;
    }
    __syncthreads();
    float s0 = scores[threadIdx.x], s1 = scores[threadIdx.x + 128];
    max = larger(s0, s1);
    max = warp_max(max);
    if (lane == 0) shared[warp] = max;
    __syncthreads();
    max = larger(larger(shared[0], shared[1]), larger(shared[2], shared[3]));
    s0 = exp_(s0 - max);
    s1 = exp_(s1 - max);
    scores[threadIdx.x] = s0;
    scores[threadIdx.x + 128] = s1;
    sum = warp_sum(s0 + s1);
    if (lane == 0) shared[4 + warp] = sum;
    __syncthreads();
    sum = (shared[4] + shared[5]) + (shared[6] + shared[7]);
#pragma unroll
    for (int i = 0; i < 4; i++) o[i] = 0.0f;
    for (u32 key = first; key < last; key++) {
        const Stored *v = (const Stored *) a.values + at(key);
        const float p = scores[key % SPLIT];
#pragma unroll
        for (int i = 0; i < 4; i++)
            if ((int) threadIdx.x + i * 128 < e) o[i] = fmaf(p, read(v[threadIdx.x + i * 128]), o[i]);
    }
    __syncthreads();
}
__device__ __forceinline__ void load_query(const Attend &a, u32 row, int head, float *q) {
    for (int c = threadIdx.x; c < a.head_dim; c += 128) q[c] = a.q[((u64) row * a.heads + head) * a.head_dim + c];
    __syncthreads();
}
// Few rows: block (row head, i) takes the splits i, i + gridDim.y, ….
KERNEL __launch_bounds__(128, 2) attend_splits(Attend a) {
    __shared__ float q[512], scores[SPLIT], shared[8];
    in_order();
    const u32 row = blockIdx.x / a.heads;
    const int head = blockIdx.x % a.heads;
    u32 begin, end;
    visible(a, row, begin, end);
    load_query(a, row, head, q);
    for (u32 split = begin / SPLIT + blockIdx.y; split < (end + SPLIT - 1) / SPLIT; split += gridDim.y) {
        float max, sum, o[4];
        partial(a, row, head, split, begin, end, q, scores, shared, max, sum, o);
        float *out = a.partials + ((u64) blockIdx.x * a.splits + split - begin / SPLIT) * (2 + a.head_dim);
        if (threadIdx.x == 0) { out[0] = max; out[1] = sum; }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if ((int) threadIdx.x + i * 128 < a.head_dim) out[2 + threadIdx.x + i * 128] = o[i];
    }
}
// Many rows: a block walks all splits of one row and head.
KERNEL __launch_bounds__(128) attend_all(Attend a) {
    __shared__ float q[512], scores[SPLIT], shared[8];
    in_order();
    const u32 row = blockIdx.x / a.heads;
    const int head = blockIdx.x % a.heads;
    u32 begin, end;
    visible(a, row, begin, end);
    load_query(a, row, head, q);
    float max = -INFINITE, sum = 0.0f, o[4] = {0, 0, 0, 0};
    for (u32 split = begin / SPLIT; split < (end + SPLIT - 1) / SPLIT; split++) {
        float max2, sum2, o2[4], f, f2;
        partial(a, row, head, split, begin, end, q, scores, shared, max2, sum2, o2);
        merge(max, max2, f, f2);
        sum = sum * f + sum2 * f2;
#pragma unroll
        for (int i = 0; i < 4; i++) o[i] = o[i] * f + o2[i] * f2;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if ((int) threadIdx.x + i * 128 < a.head_dim) a.y[(u64) blockIdx.x * a.head_dim + threadIdx.x + i * 128] = o[i] / sum;
}
#else
// ---- tensor cores: a block takes 16 queries of one sequence and key head (its
// rows, and the query heads that share the head), a warp 64 keys of a split.
//
// Queries and probabilities are two numbers of the cache's format each, high and
// low part, so that only the sums round. A warp's part has its own maximum; the
// four of a split are added from the left, scaled to the largest. Products take 16
// head columns, or keys, at a time in the order they lie in a lane: lane t of four
// has 8 neighbours out of 32.

#define QUERIES 16
#define CHUNK (HEAD % 64 == 0 ? 64 : 32)
#define PART (QUERIES * HEAD) // of the queries in shared memory: [HEAD / 32, QUERIES, 32], no two lanes in a bank

#if KV != 2
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#define CVT "cvt.rn.f16x2.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#define CVT "cvt.rn.bf16x2.f32"
#endif
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm(MMA " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 pair(float low, float high) {
    u32 v;
    asm(CVT " %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}
__device__ __forceinline__ float power(float x) { // e^x, as the hardware has it
    float v;
    asm("ex2.approx.f32 %0, %1;" : "=f"(v) : "f"(x * 1.44269504088896340736f));
    return v;
}
__device__ __forceinline__ u32 word(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// Eight neighbours of a tile from number `at` on, in memory or SHARED: a key's columns, or a
// column's keys.
template <bool VALUES, bool SHARED>
__device__ __forceinline__ uint4 neighbours(const u8 *tile, int at) {
#if KV == 3
    auto two = [](u32 codes, u32 scales) { // codes are 1152 less than the number that 0x64 makes of their bytes
        u32 v;
        asm("{.reg .b32 v; sub.f16x2 v, %1, %2; mul.f16x2 %0, v, %3;}" : "=r"(v) : "r"(codes), "r"(0x64806480), "r"(scales));
        return v;
    };
    const uint2 *from = (const uint2 *) (tile + at);
    const uint2 codes = SHARED ? *from : __ldg(from);
    uint4 scales;
    if (VALUES) {
        const uint4 *of = (const uint4 *) (tile + 1024 + at % 32 * 2);
        scales = SHARED ? *of : __ldg(of);
    } else {
        const u16 *of = (const u16 *) (tile + 1024) + at / 32;
        const u32 scale = SHARED ? *of : __ldg(of);
        scales.x = scales.y = scales.z = scales.w = scale | scale << 16;
    }
    const u32 low = codes.x ^ 0x80808080, high = codes.y ^ 0x80808080;
    return make_uint4(two(__byte_perm(low, 0x64646464, 0x4140), scales.x), two(__byte_perm(low, 0x64646464, 0x4342), scales.y), two(__byte_perm(high, 0x64646464, 0x4140), scales.z), two(__byte_perm(high, 0x64646464, 0x4342), scales.w));
#else
    const uint4 *from = (const uint4 *) (tile + 2 * at);
    return SHARED ? *from : __ldg(from);
#endif
}

// The block's sequence, and its first query there, for `queries` a block; false if there is none.
__device__ __forceinline__ bool find(const Attend &a, u32 queries, u32 &seq, u32 &first) {
    const int shared_by = a.heads / a.kv_heads;
    first = blockIdx.x;
    for (seq = 0; seq < a.batch.seqs(); seq++) {
        const u32 tiles = (a.batch.seq(seq)[SEQ_ROWS] * shared_by + queries - 1) / queries;
        if (first < tiles) {
            first *= queries;
            return true;
        }
        first -= tiles;
    }
    return false;
}
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
    // Both parts of each tile of queries to shared memory, four loads at once.
    __device__ __forceinline__ void load(const Attend &a, u16 *to, int tiles = 1) const {
        for (int from = threadIdx.x; from < tiles * PART / 4; from += 4 * blockDim.x) {
            float4 v[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int i = from + j * blockDim.x, q = i / (HEAD / 4);
                v[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (q < count) v[j] = *(const float4 *) (a.q + ((u64) row(q) * a.heads + head(q)) * HEAD + i % (HEAD / 4) * 4);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int i = from + j * blockDim.x, q = i / (HEAD / 4), c = i % (HEAD / 4) * 4;
                if (q >= tiles * QUERIES) break;
                u16 *part = to + q / QUERIES * 2 * PART + c / 32 * QUERIES * 32 + q % QUERIES * 32 + c % 32;
                const uint2 high = make_uint2(pair(v[j].x, v[j].y), pair(v[j].z, v[j].w));
                *(uint2 *) part = high;
                *(uint2 *) (part + PART) = make_uint2(pair(v[j].x - read((u16) high.x), v[j].y - read((u16) (high.x >> 16))), pair(v[j].z - read((u16) high.y), v[j].w - read((u16) (high.y >> 16))));
            }
        }
    }
};
// Scores of 32 columns more of a tile of queries and 8 N keys, as the lane finds its own.
template <int N>
__device__ __forceinline__ void add_scores(float (&s)[N][4], const u16 *queries, const uint4 (&k)[N]) {
#pragma unroll
    for (int low = 0; low < 2; low++) {
        const uint4 q0 = *(const uint4 *) (queries + low * PART), q1 = *(const uint4 *) (queries + low * PART + 8 * 32);
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int n = 0; n < N; n++)
                mma(s[n], word(q0, 2 * j), word(q1, 2 * j), word(q0, 2 * j + 1), word(q1, 2 * j + 1), word(k[n], 2 * j), word(k[n], 2 * j + 1));
    }
}
// Where a tile has the lane's keys among the 8 of number `n` of a page.
__device__ __forceinline__ int keys_of(int n) {
    const int lane = threadIdx.x & 31;
    return (2 * (n & 3) + 8 * (lane >> 3) + (lane >> 2 & 1)) * 32 + 8 * (lane & 3);
}
// The same of values of 8 columns, a multiple of 8 on.
__device__ __forceinline__ int values_of(int column) {
    const int lane = threadIdx.x & 31;
    return (column % 32 + (lane >> 2)) * 32 + 8 * (lane & 3);
}
// What the lane has of a page's 8 keys of number `n` and 32 columns of number `b`, and of 8
// columns' values of half the keys.
__device__ __forceinline__ uint4 load_key(const u8 *page, int b, int n) { return neighbours<false, false>(page + (b * 2 + n / 4) * TILE_BYTES, keys_of(n)); }
__device__ __forceinline__ uint4 load_value(const u8 *page, int column, int half) { return neighbours<true, false>(page + (column / 32 * 2 + half) * TILE_BYTES, values_of(column)); }
// Scores of a tile of queries and 8 N keys of a page from number `first` on, in memory.
template <int N, int UNROLL>
__device__ __forceinline__ void scores_of(float (&s)[N][4], const u16 *queries, const u8 *keys, int first) {
#pragma unroll UNROLL
    for (int b = 0; b < HEAD / 32; b++) {
        uint4 k[N];
#pragma unroll
        for (int n = 0; n < N; n++) k[n] = load_key(keys, b, first + n);
        add_scores(s, queries + b * QUERIES * 32, k);
    }
}
// Probabilities of a page's keys, relative to their largest score, in two parts.
struct Powers {
    float max[2], sum[2];
    u32 high[8][2], low[8][2];
    __device__ __forceinline__ Powers(const float (&s)[8][4]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            max[i] = -INFINITE;
            sum[i] = 0.0f;
#pragma unroll
            for (int n = 0; n < 8; n++) max[i] = larger(s[n][2 * i + 1], larger(s[n][2 * i], max[i]));
            max[i] = larger(max[i], __shfl_xor_sync(~0u, max[i], 1));
            max[i] = larger(max[i], __shfl_xor_sync(~0u, max[i], 2));
#pragma unroll
            for (int n = 0; n < 8; n++) {
                float p0 = s[n][2 * i] == -INFINITE ? 0.0f : power(s[n][2 * i] - max[i]);
                float p1 = s[n][2 * i + 1] == -INFINITE ? 0.0f : power(s[n][2 * i + 1] - max[i]);
                sum[i] += p0;
                sum[i] += p1;
                high[n][i] = pair(p0, p1);
                low[n][i] = pair(p0 - read((u16) high[n][i]), p1 - read((u16) (high[n][i] >> 16)));
            }
            sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
            sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
        }
    }
    // o += probabilities of half `b` of the page times values.
    template <int N>
    __device__ __forceinline__ void weigh(float (&o)[N][4], const uint4 (&v)[N], int b) const {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int k = b * 4 + 2 * j;
#pragma unroll
            for (int n = 0; n < N; n++) {
                mma(o[n], high[k][0], high[k][1], high[k + 1][0], high[k + 1][1], word(v[n], 2 * j), word(v[n], 2 * j + 1));
                mma(o[n], low[k][0], low[k][1], low[k + 1][0], low[k + 1][1], word(v[n], 2 * j), word(v[n], 2 * j + 1));
            }
        }
    }
};
// Asks for a page's keys and values: what another kernel writes of them meanwhile is
// read from the same cache.
__device__ __forceinline__ void ask_page(const Attend &a, u32 page, int kv_head) {
#if __CUDA_ARCH__ >= 900
    const int lane = threadIdx.x & 31;
    const u8 *from = lane == 0 ? a.keys : a.values;
    if (lane < 2 && page != NO_PAGE)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from + ((u64) page * a.kv_heads + kv_head) * PAGE_BYTES), "n"(PAGE_BYTES) : "memory");
#endif
}

// Where a context is short: a block of W warps takes page `at`, each first some of its keys
// and then some of the head's columns. The bits are those of `attend_tile`, where a warp has
// the page. `load` brings the queries while keys and values are on their way; `scores` are
// [8, QUERIES, 8].
template <int W, class Load>
__device__ __forceinline__ void attend_page(const Attend &a, const Queries &own, u32 page, u32 at, const u16 *queries, float *scores, Load load) {
    constexpr int COLUMNS = HEAD / W, N = 8 / W, AHEAD = HEAD / 32 < 16 / N ? HEAD / 32 : 16 / N;
    constexpr int WIDE = COLUMNS / 8 % 8 == 0 ? 8 : COLUMNS / 8 % 4 == 0 ? 4 : COLUMNS / 8 % 2 == 0 ? 2 : 1; // 8 columns, of a warp at a time
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const u64 base = ((u64) page * a.kv_heads + own.kv_head) * PAGE_BYTES;
    uint4 k[AHEAD][N], v[2][WIDE];
    auto load_keys = [&](int b) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
#pragma unroll
            for (int n = 0; n < N; n++) k[i][n] = load_key(a.keys + base, b + i, N * warp + n);
    };
    // The first or the second half of the columns that a warp takes at a time.
    auto load_values = [&](int c, int from, int to) {
#pragma unroll
        for (int b = 0; b < 2; b++)
#pragma unroll
            for (int n = from; n < to; n++) v[b][n] = load_value(a.values + base, warp * COLUMNS + c + n * 8, b);
    };
    load_keys(0);
    load_values(0, 0, WIDE / 2);
    load();
    __syncthreads(); // the queries are there, and the scores before are used
    float mine[N][4];
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) mine[n][i] = 0.0f;
#pragma unroll 1
    for (int b = 0; b < HEAD / 32; b += AHEAD) {
        if (b > 0) load_keys(b);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) add_scores(mine, queries + (b + i) * QUERIES * 32 + g * 32 + 8 * t, k[i]);
    }
    load_values(0, WIDE / 2, WIDE);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int number = N * warp + n;
            const u32 of = at * PAGE_ROWS + (number >> 2) * 32 + 2 * (number & 3) + 8 * t + (i & 1);
            mine[n][i] = of >= own.begin[i >> 1] && of < own.end[i >> 1] ? mine[n][i] * a.scale : -INFINITE;
            if (i & 1) *(float2 *) (scores + (number * QUERIES + g + 8 * (i >> 1)) * 8 + 2 * t) = make_float2(mine[n][i - 1], mine[n][i]);
        }
    __syncthreads();
    float s[8][4];
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const float2 v = *(const float2 *) (scores + (n * QUERIES + g + 4 * i) * 8 + 2 * t);
            s[n][i] = v.x;
            s[n][i + 1] = v.y;
        }
    const Powers p(s);
    u32 out[2]; // where the lane's queries' results go: an address would take two registers
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int q = g + 8 * i;
        const u32 local = at - own.begin[i] / PAGE_ROWS;
        const bool sees = q < own.count && local < (own.end[i] + PAGE_ROWS - 1) / PAGE_ROWS - own.begin[i] / PAGE_ROWS;
        out[i] = sees ? ((own.row(q) * a.heads + own.head(q)) * a.splits + local) * (2 + HEAD) : ~0u;
        if (sees && warp == 0 && t == 0) *(float2 *) (a.partials + out[i]) = make_float2(p.max[i], p.sum[i]);
    }
#pragma unroll 1
    for (int c = 0; c < COLUMNS; c += WIDE * 8) {
        if (c > 0) load_values(c, 0, WIDE);
        float o[WIDE][4];
#pragma unroll
        for (int n = 0; n < WIDE; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[n][i] = 0.0f;
        p.weigh(o, v[0], 0);
        p.weigh(o, v[1], 1);
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (out[i] != ~0u)
#pragma unroll
                for (int n = 0; n < WIDE; n++)
                    *(float2 *) (a.partials + out[i] + 2 + warp * COLUMNS + c + n * 8 + 2 * t) = make_float2(o[n][2 * i], o[n][2 * i + 1]);
    }
}
// Pages of 16 queries, by 4 warps.
__device__ __forceinline__ void attend_short(const Attend &a, u32 seq, u32 first) {
    extern __shared__ __align__(16) u8 memory[];
    u16 *queries = (u16 *) memory;
    const Queries own(a, seq, first);
    const u32 *table = a.batch.table(seq, a.group);
    u32 at = own.least / PAGE_ROWS + blockIdx.y / a.kv_heads;
    if (at * PAGE_ROWS >= own.most) return;
    u32 page = table[at];
    if (threadIdx.x < 32) ask_page(a, page, own.kv_head);
    wait_for_previous();
    for (bool first = true;; first = false) {
        attend_page<4>(a, own, page, at, queries, (float *) (queries + 2 * PART), [&]() { if (first) own.load(a, queries); });
        at += gridDim.y / a.kv_heads;
        if (at * PAGE_ROWS >= own.most) break;
        page = table[at];
    }
}

// ALL: one block walks all splits; else it takes every gridDim.y / K-th, and
// attend_merge does the rest.
template <bool ALL>
__device__ __forceinline__ void attend_tile(const Attend &a, u32 seq, u32 first) {
    extern __shared__ __align__(16) u8 memory[];
    u16 *queries = (u16 *) memory;                                   // [2, PART]
    float *parts = (float *) (queries + 2 * PART);                   // [4, QUERIES, CHUNK]
    float *warps = parts + 4 * QUERIES * CHUNK;                      // [4, QUERIES, 2] maximum, sum
    float *factors = warps + 8 * QUERIES;                            // [QUERIES, 6] of each warp, of the total, of the split
    float *running = factors + 6 * QUERIES;                          // [QUERIES, 2] maximum, sum
    u32 *own = (u32 *) (running + 2 * QUERIES);                      // [QUERIES, 2] first split, number of them
    float *total = running + 4 * QUERIES;                            // [QUERIES, HEAD], if ALL
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const Queries own_queries(a, seq, first);
    const int kv_head = own_queries.kv_head, count = own_queries.count;
    auto row_of = [&](int i) { return own_queries.row(i); };
    auto head_of = [&](int i) { return own_queries.head(i); };
    const u32 (&begin)[2] = own_queries.begin, (&end)[2] = own_queries.end, least = own_queries.least, most = own_queries.most;
    const u32 *table = a.batch.table(seq, a.group);
    const u32 step = ALL ? 1 : gridDim.y / a.kv_heads, split0 = least / SPLIT + (ALL ? 0 : blockIdx.y / a.kv_heads);
    // The warp's page of a split, if any of the block's queries sees it.
    auto page_of = [&](u32 split) {
        const u32 key = split * SPLIT + warp * 64;
        return key < most && key + 64 > least ? table[key / PAGE_ROWS] : NO_PAGE;
    };
    auto ask = [&](u32 split) { ask_page(a, page_of(split), kv_head); };
    ask(split0);
    wait_for_previous();
    own_queries.load(a, queries);
    if (t == 0 && warp == 0)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            own[2 * (g + 8 * i)] = begin[i] / SPLIT;
            own[2 * (g + 8 * i) + 1] = g + 8 * i < count ? (end[i] + SPLIT - 1) / SPLIT - begin[i] / SPLIT : 0;
        }
    // Where a query's partial result of a split lies, if it sees any of it.
    auto partial = [&](int q, u32 split) -> float * {
        const u32 local = split - own[2 * q];
        if (local >= own[2 * q + 1]) return nullptr;
        return a.partials + (((u64) row_of(q) * a.heads + head_of(q)) * a.splits + local) * (2 + HEAD);
    };
    if (ALL) {
        for (int i = threadIdx.x; i < QUERIES * HEAD; i += 128) total[i] = 0.0f;
        if (threadIdx.x < QUERIES) {
            running[2 * threadIdx.x] = -INFINITE;
            running[2 * threadIdx.x + 1] = 0.0f;
        }
    }
    __syncthreads();
    for (u32 split = split0; split * SPLIT < most; split += step) {
        const u32 key = split * SPLIT + warp * 64, page = page_of(split);
        ask(split + step);
        const u64 base = ((u64) page * a.kv_heads + kv_head) * PAGE_BYTES;
        float s[8][4];
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[n][i] = 0.0f;
        if (page != NO_PAGE) {
            scores_of<8, 2>(s, queries + g * 32 + 8 * t, a.keys + base, 0);
        }
        // Values of a chunk of columns: asked for long before they are used, unless
        // there are blocks enough to wait side by side.
        uint4 v[2][CHUNK / 8];
        auto load_values = [&](int c, int b) {
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++) v[b][n] = load_value(a.values + base, c + n * 8, b);
        };
        if (!ALL && page != NO_PAGE) {
            load_values(0, 0);
            load_values(0, 1);
        }
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 at = key + (n >> 2) * 32 + 8 * t + 2 * (n & 3) + (i & 1);
                s[n][i] = page != NO_PAGE && at >= begin[i >> 1] && at < end[i >> 1] ? s[n][i] * a.scale : -INFINITE;
            }
        const Powers p(s);
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (t == 0) {
                warps[(warp * QUERIES + g + 8 * i) * 2] = p.max[i];
                warps[(warp * QUERIES + g + 8 * i) * 2 + 1] = p.sum[i];
            }
        __syncthreads();
        if (threadIdx.x < QUERIES) {
            const int q = threadIdx.x;
            float *f = factors + 6 * q, m = -INFINITE, l = 0.0f;
            for (int w = 0; w < 4; w++) m = larger(warps[(w * QUERIES + q) * 2], m);
            for (int w = 0; w < 4; w++) {
                const float mw = warps[(w * QUERIES + q) * 2];
                f[w] = mw == -INFINITE ? 0.0f : exp_(mw - m);
                l += warps[(w * QUERIES + q) * 2 + 1] * f[w];
            }
            if (ALL) {
                merge(running[2 * q], m, f[4], f[5]);
                running[2 * q + 1] = running[2 * q + 1] * f[4] + l * f[5];
            } else if (float *out = partial(q, split)) {
                out[0] = m;
                out[1] = l;
            }
        }
#pragma unroll 1
        for (int c = 0; c < HEAD; c += CHUNK) {
            float o[CHUNK / 8][4];
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[n][i] = 0.0f;
            if (page != NO_PAGE) {
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    if (ALL) load_values(c, b);
                    p.weigh(o, v[b], b);
                }
                if (!ALL && c + CHUNK < HEAD) {
                    load_values(c + CHUNK, 0);
                    load_values(c + CHUNK, 1);
                }
            }
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    *(float2 *) (parts + (warp * QUERIES + g + 8 * i) * CHUNK + n * 8 + 2 * t) = make_float2(o[n][2 * i], o[n][2 * i + 1]);
            __syncthreads();
            for (int i = threadIdx.x; i < QUERIES * CHUNK; i += 128) {
                const int q = i / CHUNK, col = c + i % CHUNK;
                const float *f = factors + 6 * q;
                float v = parts[i] * f[0];
                for (int w = 1; w < 4; w++) v += parts[w * QUERIES * CHUNK + i] * f[w];
                if (ALL)
                    total[q * HEAD + col] = total[q * HEAD + col] * f[4] + v * f[5];
                else if (float *out = partial(q, split))
                    out[2 + col] = v;
            }
            __syncthreads();
        }
    }
    if (ALL)
        for (int i = threadIdx.x; i < count * HEAD; i += 128) {
            const int q = i / HEAD;
            a.y[((u64) row_of(q) * a.heads + head_of(q)) * HEAD + i % HEAD] = total[i] / running[2 * q + 1];
        }
}
// Where all contexts are short.
KERNEL __launch_bounds__(128, 3) attend_pages(Attend a) {
    start_next();
    u32 seq, first;
    if (find(a, QUERIES, seq, first)) attend_short(a, seq, first);
}
KERNEL __launch_bounds__(128) attend_all(Attend a) {
    start_next();
    u32 seq, first;
    if (find(a, QUERIES, seq, first)) attend_tile<true>(a, seq, first);
}
#if !DEPTH
KERNEL __launch_bounds__(128, 2) attend_splits(Attend a) {
    start_next();
    u32 seq, first;
    if (!find(a, QUERIES, seq, first)) return;
    if (by_pages(a, seq)) attend_short(a, seq, first);
    else attend_tile<false>(a, seq, first);
}
#else
// ---- long contexts: a block of 8 warps takes splits of M tiles of queries. Keys
// and values are brought to shared memory once for all of them, in a ring of DEPTH stages
// for each warp, which runs ahead of what a block does together. First a warp multiplies 32
// keys of the split, 64 columns a stage; then a warp has a page's probabilities of a tile;
// then a warp multiplies its eighth of the columns, a page of 32 columns a stage. The bits
// are those of `attend_tile`.

#define WARPS 8
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void await_stage(u32 barrier, u32 round) {
    asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again;}" :: "r"(barrier), "r"(round & 1) : "memory");
}
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bring_bytes(u32 to, const u8 *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
#endif
// A warp's D stages. All of its lanes call everything.
template <int D> struct Stages {
    const u8 *ring;
    u32 to, barriers, slot, round;
    __device__ __forceinline__ Stages(const u8 *ring, u64 *barriers_of_warp) : ring(ring), to((u32) __cvta_generic_to_shared(ring)), barriers((u32) __cvta_generic_to_shared(barriers_of_warp)), slot(0), round(0) {
#if __CUDA_ARCH__ >= 900
        if ((threadIdx.x & 31) == 0) {
            for (int i = 0; i < D; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barriers + 8 * i) : "memory");
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncwarp();
#endif
    }
    // Asks for the two tiles of a stage, or none where the page is not there.
    __device__ __forceinline__ void ask(u32 slot, bool there, const u8 *first, const u8 *second) const {
        const int lane = threadIdx.x & 31;
        const u32 at = to + slot * 2 * TILE_BYTES;
#if __CUDA_ARCH__ >= 900
        if (lane == 0) {
            expect_bytes(barriers + 8 * slot, there ? 2 * TILE_BYTES : 0);
            if (there) {
                bring_bytes(at, first, TILE_BYTES, barriers + 8 * slot);
                bring_bytes(at + TILE_BYTES, second, TILE_BYTES, barriers + 8 * slot);
            }
        }
#else
        for (int i = 16 * lane; there && i < TILE_BYTES; i += 512) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at + i), "l"(first + i) : "memory");
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at + TILE_BYTES + i), "l"(second + i) : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }
    // The oldest stage, once it is there.
    __device__ __forceinline__ const u8 *take() const {
#if __CUDA_ARCH__ >= 900
        await_stage(barriers + 8 * slot, round);
#else
        asm volatile("cp.async.wait_group %0;" :: "n"(D - 1) : "memory");
        __syncwarp();
#endif
        return ring + slot * 2 * TILE_BYTES;
    }
    __device__ __forceinline__ void next() {
        if (++slot == D) slot = 0, round++;
    }
};
template <int M, bool ALL>
__device__ __forceinline__ void attend_long(const Attend &a) {
    constexpr int D = ALL ? DEPTH / 2 : DEPTH;
    extern __shared__ __align__(16) u8 memory[];
    u16 *queries = (u16 *) memory;                        // [M, 2, PART]
    float4 *scores = (float4 *) (queries + M * 2 * PART); // [M, 4, 8, 32] a lane's scores; then its probabilities
    float2 *sums = (float2 *) (scores + M * 4 * 8 * 32);  // [M, 4, QUERIES] maximum and sum of a page
    u8 *ring = (u8 *) (sums + M * 4 * QUERIES);           // [WARPS, D, 2] tiles
    u64 *barriers = (u64 *) (ring + WARPS * D * 2 * TILE_BYTES);
    float4 *total = (float4 *) (barriers + WARPS * D) + threadIdx.x; // [M, BLOCKS, 4, 256], if ALL
    constexpr int KEY_STAGES = HEAD / 64, BLOCKS = HEAD / 256, ALL_STAGES = KEY_STAGES + 4 * BLOCKS;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    start_next();
    u32 seq, first;
    if (!find(a, M * QUERIES, seq, first)) return;
    const Queries own(a, seq, first, M * QUERIES, M == 1 ? 0 : warp >> 2);
    const u32 *table = a.batch.table(seq, a.group), step = ALL ? 1 : gridDim.y / a.kv_heads;
    if (!ALL && by_pages(a, seq)) {
        const u32 start = own.least / PAGE_ROWS + blockIdx.y / a.kv_heads / M;
        if (warp == 0 && start * PAGE_ROWS < own.most) ask_page(a, table[start], own.kv_head);
        wait_for_previous();
        bool loaded = false;
        for (u32 unit = own.least / PAGE_ROWS * M + blockIdx.y / a.kv_heads; unit / M * PAGE_ROWS < own.most; unit += step) {
            const u32 at = unit / M, tile = unit % M * QUERIES;
            auto page = [&](const Queries &part, bool load) { attend_page<WARPS>(a, part, table[at], at, queries, (float *) scores, [&]() { if (load) part.load(a, queries); }); };
            if constexpr (M == 1) {
                page(own, !loaded);
                loaded = true;
            } else {
                if (tile >= own.count) continue;
                const Queries part(a, seq, first + tile);
                if (at * PAGE_ROWS >= part.most || (at + 1) * PAGE_ROWS <= part.least) continue;
                __syncthreads(); // the queries before are used
                page(part, true);
            }
        }
        return;
    }
    u32 split = own.least / SPLIT + (ALL ? 0 : blockIdx.y / a.kv_heads);
    if (split * SPLIT >= own.most) return;
    // Page `lane` of a split, if any of the block's queries sees it.
    auto pages_of = [&](u32 split) {
        const u32 key = split * SPLIT + lane * PAGE_ROWS;
        return lane < 4 && key < own.most && key + PAGE_ROWS > own.least ? table[key / PAGE_ROWS] : NO_PAGE;
    };
    u32 pages = pages_of(split), after = pages_of(split + step);
    Stages<D> stages(ring + warp * D * 2 * TILE_BYTES, barriers + warp * D);
    // Asks for stage `i` of the split, or of the next one.
    auto ask = [&](u32 slot, int i) {
        const bool next = i >= ALL_STAGES;
        if (next) i -= ALL_STAGES;
        const bool keys = i < KEY_STAGES;
        const int value = i - KEY_STAGES;
        const u32 page = __shfl_sync(~0u, next ? after : pages, keys ? warp >> 1 : value / BLOCKS);
        const u8 *from = (keys ? a.keys : a.values) + ((u64) page * a.kv_heads + own.kv_head) * PAGE_BYTES;
        from += (keys ? 4 * i + (warp & 1) : 2 * (warp * BLOCKS + value % BLOCKS)) * TILE_BYTES;
        stages.ask(slot, page != NO_PAGE, from, from + (keys ? 2 : 1) * TILE_BYTES);
    };
    // Stage `i` is read by all lanes: its place is free.
    auto used = [&](int i) {
        __syncwarp();
        ask(stages.slot, i + D);
        stages.next();
    };
    if (warp < 4) ask_page(a, __shfl_sync(~0u, pages, warp), own.kv_head);
    wait_for_previous();
    for (int i = 0; i < D; i++) ask(i, i);
    own.load(a, queries, M);
    // Where the results of the lane's queries of each tile go, split after split.
    u32 out[M][2], first_split[M][2], splits[M][2];
    float running[M][2], sum[M][2]; // maximum and sum, if ALL
    if (ALL)
#pragma unroll
        for (int i = 0; i < M * BLOCKS * 4; i++) total[i * 256] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            running[m][i] = -INFINITE;
            sum[m][i] = 0.0f;
            const int q = m * QUERIES + g + 8 * i;
            u32 begin = 0, end = 0;
            if (q < own.count) visible(a, own.row(q), begin, end);
            first_split[m][i] = begin / SPLIT;
            splits[m][i] = q < own.count ? (end + SPLIT - 1) / SPLIT - begin / SPLIT : 0;
            out[m][i] = (own.row(q) * a.heads + own.head(q)) * a.splits;
        }
    __syncthreads();
    for (; split * SPLIT < own.most; split += step) {
        float s[M][4][4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
        const bool there = __shfl_sync(~0u, pages, warp >> 1) != NO_PAGE;
#pragma unroll 1
        for (int b = 0; b < KEY_STAGES; b++) {
            const u8 *keys = stages.take(); // two tiles of columns
            if (there)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    uint4 k[4];
#pragma unroll
                    for (int n = 0; n < 4; n++) k[n] = neighbours<false, true>(keys + c * TILE_BYTES, keys_of(n));
#pragma unroll
                    for (int m = 0; m < M; m++) add_scores(s[m], queries + m * 2 * PART + (2 * b + c) * QUERIES * 32 + g * 32 + 8 * t, k);
                }
            used(b);
        }
        __syncthreads(); // the probabilities before are used
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < 4; n++) scores[((m * WARPS + warp) * 4 + n) * 32 + lane] = make_float4(s[m][n][0], s[m][n][1], s[m][n][2], s[m][n][3]);
        __syncthreads();
        if (warp < 4 * M) {
            // The warp's page of its tile: numbers 0 to 3 are those of one warp, 4 to 7 of the next.
            float of[8][4];
            const u32 page = __shfl_sync(~0u, pages, warp & 3);
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float4 v = scores[(warp * 8 + n) * 32 + lane];
                of[n][0] = v.x, of[n][1] = v.y, of[n][2] = v.z, of[n][3] = v.w;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 at = split * SPLIT + (warp & 3) * PAGE_ROWS + (n >> 2) * 32 + 8 * t + 2 * (n & 3) + (i & 1);
                    of[n][i] = page != NO_PAGE && at >= own.begin[i >> 1] && at < own.end[i >> 1] ? of[n][i] * a.scale : -INFINITE;
                }
            }
            const Powers p(of);
            uint4 *to = (uint4 *) scores + warp * 8 * 32 + lane;
#pragma unroll
            for (int n = 0; n < 8; n++) to[n * 32] = make_uint4(p.high[n][0], p.high[n][1], p.low[n][0], p.low[n][1]);
            if (t == 0)
#pragma unroll
                for (int i = 0; i < 2; i++) sums[warp * QUERIES + g + 8 * i] = make_float2(p.max[i], p.sum[i]);
        }
        __syncthreads();
        float max[M][2], before[M][2], now[M][2], o[M][BLOCKS][4][4];
        float *to[M][2];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float l = 0.0f;
                max[m][i] = -INFINITE;
                for (int page = 0; page < 4; page++) max[m][i] = larger(sums[(m * 4 + page) * QUERIES + g + 8 * i].x, max[m][i]);
                const u32 local = split - first_split[m][i];
                to[m][i] = !ALL && local < splits[m][i] ? a.partials + (u64) (out[m][i] + local) * (2 + HEAD) : nullptr;
                if (ALL || (warp == 0 && t == 0 && to[m][i])) {
                    for (int page = 0; page < 4; page++) {
                        const float2 v = sums[(m * 4 + page) * QUERIES + g + 8 * i];
                        l += v.y * (v.x == -INFINITE ? 0.0f : exp_(v.x - max[m][i]));
                    }
                    if (!ALL) *(float2 *) to[m][i] = make_float2(max[m][i], l);
                }
                if (ALL) {
                    merge(running[m][i], max[m][i], before[m][i], now[m][i]);
                    sum[m][i] = sum[m][i] * before[m][i] + l * now[m][i];
                }
            }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int c = 0; c < BLOCKS; c++)
#pragma unroll
                for (int n = 0; n < 4; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) o[m][c][n][i] = -0.0f; // with what is added to it stays what it is
#pragma unroll 1
        for (int page = 0; page < 4; page++) {
            const bool there = __shfl_sync(~0u, pages, page) != NO_PAGE;
            float f[M][2];
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float of = sums[(m * 4 + page) * QUERIES + g + 8 * i].x;
                    f[m][i] = of == -INFINITE ? 0.0f : exp_(of - max[m][i]);
                }
#pragma unroll
            for (int c = 0; c < BLOCKS; c++) {
                const u8 *values = stages.take(); // two tiles of keys
                if (there) {
                    uint4 v[2][4];
#pragma unroll
                    for (int b = 0; b < 2; b++)
#pragma unroll
                        for (int n = 0; n < 4; n++) v[b][n] = neighbours<true, true>(values + b * TILE_BYTES, values_of(n * 8));
#pragma unroll
                    for (int m = 0; m < M; m++) {
                        float x[4][4];
#pragma unroll
                        for (int n = 0; n < 4; n++)
#pragma unroll
                            for (int i = 0; i < 4; i++) x[n][i] = 0.0f;
#pragma unroll
                        for (int k = 0; k < 8; k += 2) {
                            const uint4 *p = (const uint4 *) scores + ((m * 4 + page) * 8 + k) * 32 + lane, p0 = p[0], p1 = p[32];
#pragma unroll
                            for (int n = 0; n < 4; n++) {
                                const u32 v0 = word(v[k >> 2][n], k & 2), v1 = word(v[k >> 2][n], (k & 2) + 1);
                                mma(x[n], p0.x, p0.y, p1.x, p1.y, v0, v1);
                                mma(x[n], p0.z, p0.w, p1.z, p1.w, v0, v1);
                            }
                        }
#pragma unroll
                        for (int n = 0; n < 4; n++)
#pragma unroll
                            for (int i = 0; i < 4; i++) o[m][c][n][i] += x[n][i] * f[m][i >> 1];
                    }
                }
                used(KEY_STAGES + page * BLOCKS + c);
            }
        }
        if (ALL)
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int c = 0; c < BLOCKS; c++)
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        float4 &v = total[((m * BLOCKS + c) * 4 + n) * 256];
                        const float (&x)[4] = o[m][c][n];
                        v = make_float4(v.x * before[m][0] + x[0] * now[m][0], v.y * before[m][0] + x[1] * now[m][0], v.z * before[m][1] + x[2] * now[m][1], v.w * before[m][1] + x[3] * now[m][1]);
                    }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (to[m][i])
#pragma unroll
                    for (int c = 0; c < BLOCKS; c++)
#pragma unroll
                        for (int n = 0; n < 4; n++)
                            *(float2 *) (to[m][i] + 2 + (warp * BLOCKS + c) * 32 + n * 8 + 2 * t) = make_float2(o[m][c][n][2 * i], o[m][c][n][2 * i + 1]);
        pages = after;
        after = pages_of(split + 2 * step);
    }
    if (ALL)
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int c = 0; c < BLOCKS; c++)
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const float4 v = total[((m * BLOCKS + c) * 4 + n) * 256];
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int q = m * QUERIES + g + 8 * i;
                        float *y = a.y + ((u64) own.row(q) * a.heads + own.head(q)) * HEAD + (warp * BLOCKS + c) * 32 + n * 8 + 2 * t;
                        if (q < own.count) *(float2 *) y = make_float2((i == 0 ? v.x : v.z) / sum[m][i], (i == 0 ? v.y : v.w) / sum[m][i]);
                    }
                }
}
KERNEL __launch_bounds__(256, 1) attend_long_1(Attend a) { attend_long<1, false>(a); }
KERNEL __launch_bounds__(256, 1) attend_long_2(Attend a) { attend_long<2, false>(a); }
// Many rows: a block walks all splits.
KERNEL __launch_bounds__(256, 1) attend_long_all(Attend a) { attend_long<2, true>(a); }
#endif
#endif
