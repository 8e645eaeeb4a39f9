// Keys and values in pages, and attention over them. KV: 0 f32, 1 f16, 2 bf16.
//
// Keys: [page, K, PAGE_ROWS, e]; values the same or, where TILES (formats of 16
// bits, HEAD columns a head, a multiple of 32), [page, K, e, PAGE_ROWS], so that
// tensor cores can take both as they lie. A row's sums walk splits of SPLIT keys
// aligned to cache row 0; the splits are merged from the left. So the row's own
// context decides the order, and neither the batch nor how the work is spread does.

#define SPLIT 256
#if KV == 0
typedef float Stored;
__device__ __forceinline__ float read(Stored v) { return v; }
__device__ __forceinline__ Stored stored(float v) { return v; }
#elif KV == 1
typedef u16 Stored;
__device__ __forceinline__ float read(Stored v) { return f16_to_f32(v); }
__device__ __forceinline__ Stored stored(float v) { return f32_to_f16(v); }
#else
typedef u16 Stored;
__device__ __forceinline__ float read(Stored v) { return bf16_to_f32(v); }
__device__ __forceinline__ Stored stored(float v) { return f32_to_bf16(v); }
#endif

// k, v: [n, K e] become the cache rows of the batch; a thread a value.
KERNEL append(Stored *keys, Stored *values, const float *k, const float *v, Batch batch, int group, int heads, int head_dim, u64 n) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 row = (u32) (i / (heads * head_dim)), index = batch.index(row);
    int head = (int) (i / head_dim % heads), c = (int) (i % head_dim);
    u32 page = batch.table(batch.seq_of(row), group)[index / PAGE_ROWS];
    if (page == NO_PAGE) return;
    u64 at = (((u64) page * heads + head) * PAGE_ROWS + index % PAGE_ROWS) * head_dim + c;
    keys[at] = stored(k[i]);
#if TILES
    at = (((u64) page * heads + head) * head_dim + c) * PAGE_ROWS + index % PAGE_ROWS;
#endif
    values[at] = stored(v[i]);
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
    Stored *keys, *values;
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
    const float position = (float) a.batch.position(row);
    const u32 index = a.batch.index(row), page = kind & 12 ? a.batch.table(a.batch.seq_of(row), a.group)[index / PAGE_ROWS] : NO_PAGE;
    wait_for_previous();
    Kept k = keep(x + at, e);
    if (kind & 1) normalise(k, e, a.eps, w, weight, shared);
    put(head, e, k);
    __syncthreads();
    const u64 to = ((u64) page * heads + all - first) * PAGE_ROWS * e;
    for (int c = threadIdx.x; c < e; c += blockDim.x) {
        const float v = kind & 2 ? turned(head, c, position, a.frequencies, a.offset, a.pairs) : head[c];
        if (y) y[at + c] = v;
        if (page == NO_PAGE) continue;
        if (kind & 4) a.keys[to + index % PAGE_ROWS * e + c] = stored(v);
        if (kind & 8) a.values[TILES ? to + c * PAGE_ROWS + index % PAGE_ROWS : to + index % PAGE_ROWS * e + c] = stored(v);
    }
}

struct Attend {
    const float *q;
    const Stored *keys, *values;
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

// What merges a row's pages: for each, the factor of its split, as `attend_tile` scales its
// four warps, and for each split the factors of what came before and of itself. Warp 0.
#define MOST_PAGES (FINE / PAGE_ROWS + SPLIT / PAGE_ROWS + 1)
struct Weights {
    float page[MOST_PAGES], before[MOST_PAGES], split[MOST_PAGES], sum;
};
// `p`: the row's first page's result, of `width` columns; page `skip` of its split.
__device__ __forceinline__ void weigh(Weights &w, const float *p, int pages, int skip, int width) {
    const int lane = threadIdx.x;
    float total = -INFINITE, sum = 0.0f;
    // Eight splits at once, a lane a page.
    for (int first = 0; first < skip + pages; first += 32) {
        const int page = first + lane - skip;
        const bool there = page >= 0 && page < pages;
        const float *from = p + (u64) (there ? page : 0) * (2 + width);
        const float own = there ? from[0] : -INFINITE, part = there ? from[1] : 0.0f;
        float max = larger(own, __shfl_xor_sync(~0u, own, 1));
        max = larger(max, __shfl_xor_sync(~0u, max, 2));
        const float f = own == -INFINITE ? 0.0f : exp_(own - max);
        if (there) w.page[page] = f;
        float l = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) l += __shfl_sync(~0u, part * f, (lane & ~3) + i);
        for (int i = 0; i < 8 && first + 4 * i < skip + pages; i++) {
            float f1, f2;
            merge(total, __shfl_sync(~0u, max, 4 * i), f1, f2);
            sum = sum * f1 + __shfl_sync(~0u, l, 4 * i) * f2;
            if (lane == 0) {
                w.before[first / 4 + i] = f1;
                w.split[first / 4 + i] = f2;
            }
        }
    }
    if (lane == 0) w.sum = sum;
}

// Block (row, head); also writes the head as products read it, where it is whole tiles.
KERNEL __launch_bounds__(128) attend_merge(Attend a, Half h) {
    start_next();
    const u32 row = blockIdx.x / a.heads;
    u32 begin, end;
    visible(a, row, begin, end);
    const int splits = (int) ((end + SPLIT - 1) / SPLIT - begin / SPLIT);
    const float *p = a.partials + (u64) blockIdx.x * a.splits * (2 + a.head_dim);
    const bool pages = by_pages(a, a.batch.seq_of(row));
    wait_for_previous();
    float max = -INFINITE, sum = 0.0f, o[4] = {0, 0, 0, 0};
    // Thread t has the pairs of columns t and t + 128.
    auto column = [&](int i) { return 2 * (int) (threadIdx.x + i / 2 * 128) + i % 2; };
    __shared__ Weights w;
    if (pages) {
        const int first = (int) (begin / PAGE_ROWS), count = (int) ((end + PAGE_ROWS - 1) / PAGE_ROWS) - first, skip = first % 4;
        if (threadIdx.x < 32) weigh(w, p, count, skip, a.head_dim);
        // What a thread needs of four pages; those that are not there weigh nothing.
        auto load = [&](int split, float2 (&v)[4][2]) {
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int page = 4 * split + i - skip;
                    const bool there = page >= 0 && page < count && column(2 * j) < a.head_dim;
                    v[i][j] = there ? *(const float2 *) (p + (u64) page * (2 + a.head_dim) + 2 + column(2 * j)) : make_float2(0.0f, 0.0f);
                }
        };
        float2 next[4][2];
        load(0, next);
        __syncthreads();
#pragma unroll 1
        for (int split = 0; split < splits; split++) {
            float2 now[4][2];
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) now[i][j] = next[i][j];
            if (split + 1 < splits) load(split + 1, next);
            float s[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int page = 4 * split + i - skip;
                const float f = page >= 0 && page < count ? w.page[page] : 0.0f;
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    s[2 * j] = i == 0 ? now[i][j].x * f : s[2 * j] + now[i][j].x * f;
                    s[2 * j + 1] = i == 0 ? now[i][j].y * f : s[2 * j + 1] + now[i][j].y * f;
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) o[i] = o[i] * w.before[split] + s[i] * w.split[split];
        }
        sum = w.sum;
    } else {
#pragma unroll 4
        for (int split = 0; split < splits; split++, p += 2 + a.head_dim) {
            float f, f2;
            merge(max, p[0], f, f2);
            sum = sum * f + p[1] * f2;
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (column(i) < a.head_dim) o[i] = o[i] * f + p[2 + column(i)] * f2;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        o[i] /= sum;
        if (column(i) < a.head_dim) a.y[(u64) blockIdx.x * a.head_dim + column(i)] = o[i];
    }
    if (h.kp)
#pragma unroll
        for (int i = 0; i < 4; i += 2)
            if (column(i) < a.head_dim) put_half(h, row, (blockIdx.x % a.heads * a.head_dim + column(i)) / 64, o[i], o[i + 1]);
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
        const Stored *k = a.keys + at(key);
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
        const Stored *v = a.values + at(key);
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
#define STRIDE (HEAD + 32) // of a query in shared memory: no two lanes in a bank

#if KV == 1
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
__device__ __forceinline__ uint4 load16(const void *p) { return __ldg((const uint4 *) p); }

// The block's sequence, and its first query there; false if there is none.
__device__ __forceinline__ bool find(const Attend &a, u32 &seq, u32 &first) {
    const int shared_by = a.heads / a.kv_heads;
    first = blockIdx.x;
    for (seq = 0; seq < a.batch.seqs(); seq++) {
        const u32 tiles = (a.batch.seq(seq)[SEQ_ROWS] * shared_by + QUERIES - 1) / QUERIES;
        if (first < tiles) {
            first *= QUERIES;
            return true;
        }
        first -= tiles;
    }
    return false;
}
struct Queries {
    u32 start, first; // row of the step that starts the sequence, and first query
    int shared_by, kv_head, count;
    // What the lane's two queries see, and what any of the block's does.
    u32 begin[2], end[2], least, most;
    __device__ __forceinline__ Queries(const Attend &a, u32 seq, u32 first) : first(first) {
        shared_by = a.heads / a.kv_heads;
        kv_head = blockIdx.y % a.kv_heads;
        start = a.batch.seq(seq)[SEQ_START];
        count = min((int) (a.batch.seq(seq)[SEQ_ROWS] * shared_by - first), QUERIES);
        const int g = (threadIdx.x & 31) >> 2;
        u32 unused;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            begin[i] = end[i] = 0;
            if (g + 8 * i < count) visible(a, row(g + 8 * i), begin[i], end[i]);
        }
        visible(a, row(0), least, unused);
        visible(a, row(count - 1), unused, most);
    }
    __device__ __forceinline__ u32 row(int i) const { return start + (first + i) / shared_by; }
    __device__ __forceinline__ int head(int i) const { return kv_head * shared_by + (int) ((first + i) % shared_by); }
    // Both parts of the queries to shared memory: [2, QUERIES, STRIDE].
    __device__ __forceinline__ void load(const Attend &a, u16 *to) const {
        for (int i = threadIdx.x; i < QUERIES * HEAD / 2; i += 128) {
            const int q = i / (HEAD / 2), c = i % (HEAD / 2) * 2;
            float2 v = {0, 0};
            if (q < count) v = *(const float2 *) (a.q + ((u64) row(q) * a.heads + head(q)) * HEAD + c);
            const u32 high = pair(v.x, v.y);
            *(u32 *) (to + q * STRIDE + c) = high;
            *(u32 *) (to + (QUERIES + q) * STRIDE + c) = pair(v.x - read((u16) high), v.y - read((u16) (high >> 16)));
        }
    }
};
// Scores of the block's queries and N times 8 keys: `queries` and `keys` as the lane
// finds its own, n's keys at(n) columns on.
template <int N, int UNROLL, class At>
__device__ __forceinline__ void scores_of(float (&s)[N][4], const u16 *queries, const u16 *keys, At at) {
#pragma unroll UNROLL
    for (int b = 0; b < HEAD; b += 32) {
        uint4 k[N];
#pragma unroll
        for (int n = 0; n < N; n++) k[n] = load16(keys + at(n) + b);
#pragma unroll
        for (int low = 0; low < 2; low++) {
            const uint4 q0 = *(const uint4 *) (queries + b + low * QUERIES * STRIDE), q1 = *(const uint4 *) (queries + b + (low * QUERIES + 8) * STRIDE);
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int n = 0; n < N; n++)
                    mma(s[n], word(q0, 2 * j), word(q1, 2 * j), word(q0, 2 * j + 1), word(q1, 2 * j + 1), word(k[n], 2 * j), word(k[n], 2 * j + 1));
        }
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
    const u16 *from = lane == 0 ? a.keys : a.values;
    if (lane < 2 && page != NO_PAGE)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from + ((u64) page * a.kv_heads + kv_head) * PAGE_ROWS * HEAD), "n"(2 * PAGE_ROWS * HEAD) : "memory");
#endif
}

// Where a context is short: a block takes pages, 16 keys a warp and then a quarter of
// the head's columns. The bits are those of `attend_tile`, where a warp has the page.
__device__ __forceinline__ void attend_page(const Attend &a, u32 seq, u32 first) {
    extern __shared__ __align__(16) u8 memory[];
    u16 *queries = (u16 *) memory;                            // [2, QUERIES, STRIDE]
    float *scores = (float *) (memory + 4 * QUERIES * STRIDE); // [8, QUERIES, 8]
    constexpr int TILE = HEAD / 32 % 8 == 0 ? 8 : HEAD / 32 % 4 == 0 ? 4 : HEAD / 32 % 2 == 0 ? 2 : 1; // 8 columns, of a warp at a time
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const Queries own(a, seq, first);
    const u32 *table = a.batch.table(seq, a.group);
    const u32 step = gridDim.y / a.kv_heads;
    u32 at = own.least / PAGE_ROWS + blockIdx.y / a.kv_heads;
    if (warp == 0 && at * PAGE_ROWS < own.most) ask_page(a, table[at], own.kv_head);
    wait_for_previous();
    own.load(a, queries);
    for (; at * PAGE_ROWS < own.most; at += step) {
        const u64 base = ((u64) table[at] * a.kv_heads + own.kv_head) * PAGE_ROWS * HEAD;
        const u16 *values = a.values + base + (u64) (warp * (HEAD / 4) + g) * PAGE_ROWS + 8 * t;
        uint4 v[2][TILE];
        auto load_values = [&](int c) {
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int n = 0; n < TILE; n++) v[b][n] = load16(values + (c + n * 8) * PAGE_ROWS + b * 32);
        };
        load_values(0);
        __syncthreads(); // the queries are there, and the scores before are used
        float mine[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        auto key = [&](int n) { return (n >> 2) * 32 + 2 * (n & 3); };
        scores_of<2, 4>(mine, queries + g * STRIDE + 8 * t, a.keys + base + (8 * (g >> 1) + (g & 1)) * HEAD + 8 * t, [&](int n) { return key(2 * warp + n) * HEAD; });
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 of = at * PAGE_ROWS + key(2 * warp + n) + 8 * t + (i & 1);
                scores[((2 * warp + n) * QUERIES + g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = of >= own.begin[i >> 1] && of < own.end[i >> 1] ? mine[n][i] * a.scale : -INFINITE;
            }
        __syncthreads();
        float s[8][4];
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[n][i] = scores[(n * QUERIES + g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)];
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
        for (int c = 0; c < HEAD / 4; c += TILE * 8) {
            if (c > 0) load_values(c);
            float o[TILE][4];
#pragma unroll
            for (int n = 0; n < TILE; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[n][i] = 0.0f;
            p.weigh(o, v[0], 0);
            p.weigh(o, v[1], 1);
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (out[i] != ~0u)
#pragma unroll
                    for (int n = 0; n < TILE; n++)
                        *(float2 *) (a.partials + out[i] + 2 + warp * (HEAD / 4) + c + n * 8 + 2 * t) = make_float2(o[n][2 * i], o[n][2 * i + 1]);
        }
    }
}

// ALL: one block walks all splits; else it takes every gridDim.y / K-th, and
// attend_merge does the rest.
template <bool ALL>
__device__ __forceinline__ void attend_tile(const Attend &a, u32 seq, u32 first) {
    extern __shared__ __align__(16) u8 memory[];
    u16 *queries = (u16 *) memory;                                   // [2, QUERIES, STRIDE]
    float *parts = (float *) (memory + 4 * QUERIES * STRIDE);        // [4, QUERIES, CHUNK]
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
        const u64 base = ((u64) page * a.kv_heads + kv_head) * PAGE_ROWS * HEAD;
        float s[8][4];
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[n][i] = 0.0f;
        if (page != NO_PAGE) {
            scores_of<8, 2>(s, queries + g * STRIDE + 8 * t, a.keys + base + (8 * (g >> 1) + (g & 1)) * HEAD + 8 * t, [](int n) { return ((n >> 2) * 32 + 2 * (n & 3)) * HEAD; });
        }
        // Values of a chunk of columns: asked for long before they are used, unless
        // there are blocks enough to wait side by side.
        const u16 *values = a.values + base + g * PAGE_ROWS + 8 * t;
        uint4 v[2][CHUNK / 8];
        auto load_values = [&](int c, int b) {
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++) v[b][n] = load16(values + (c + n * 8) * PAGE_ROWS + b * 32);
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
KERNEL __launch_bounds__(128, 2) attend_splits(Attend a) {
    start_next();
    u32 seq, first;
    if (!find(a, seq, first)) return;
    if (by_pages(a, seq)) attend_page(a, seq, first);
    else attend_tile<false>(a, seq, first);
}
// The same where all are short.
KERNEL __launch_bounds__(128, 3) attend_pages(Attend a) {
    start_next();
    u32 seq, first;
    if (find(a, seq, first)) attend_page(a, seq, first);
}
KERNEL __launch_bounds__(128) attend_all(Attend a) {
    start_next();
    u32 seq, first;
    if (find(a, seq, first)) attend_tile<true>(a, seq, first);
}
#endif
