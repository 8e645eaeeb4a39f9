// Attention over the paged KV cache, for every architecture: decoding and prompts, in f32 and on tensor cores
// (mma.sync), and the merge of split-KV partial results. attention.cuh, which says how sums go, and kv_fragment.cuh go
// before this. Queries are rotated as the keys are when they are loaded. Outputs of rotated values are turned back
// where partial results are merged; those of attention_all and attention_pipelined_all by kv_rotate.cu.
//
//   global               shared                          registers
//   q -- f16 ----------> [query tiles] ----------------> A +
//   keys, page by page -> (pipelined: stages of tiles) -> B + mma -> scores - mask - softmax of a page -+ shared
//   values ------------> (pipelined: stages of tiles) -> B +                       probabilities, f16 <-+
//                                     probabilities ---> A + mma -> unit's output -> PartialOutput: global, then
//                                                                                    attention_merge (split-KV)
//                                                                                  +> RunningOutput: shared, then y
//
//   f32, or heads of odd columns    attention_decode, attention_all            a block a row and head
//   tensor cores, short windows     attention_decode_pages                     4 warps, 16 queries, a page at a time
//   tensor cores                    attention_decode, attention_all            4 warps, 16 queries, a split at a time
//   tensor cores, heads of 256 k    attention_pipelined_1, _2, _all            8 warps, 16 or 32 queries, multistage

// Whether the blocks of a sequence take units that are pages one by one: where there are too few splits for all SMs.
DEVICE bool blocks_take_pages(const AttentionArgs &a, u32 seq) {
    const u32 *of = a.batch.seq(seq);
    return units_are_pages(a, a.batch.sees_end(of[SEQ_START] + of[SEQ_ROWS] - 1) - 1);
}

// Merges the partial results of a row's units, MERGE_UNITS of them at a time, rescaled to the largest maximum so far.
// Block (row, head, MERGE_COLUMNS columns): a thread a column. Sums of rotated values, whose groups of columns a block
// has whole, are turned back. The block also stores its columns as Activations, where there are whole tiles; then `y`
// may be null.
#define MERGE_UNITS 512
#define MERGE_AHEAD 32 // units that a thread loads before it adds them
KERNEL __launch_bounds__(MERGE_COLUMNS) attention_merge(AttentionArgs a, Activations h) {
    __shared__ float2 of_unit[MERGE_UNITS]; // factor and sum
    __shared__ float merged[MERGE_COLUMNS];
    pdl_launch();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5,
              blocks = (a.head_dim + MERGE_COLUMNS - 1) / MERGE_COLUMNS;
    const u32 head = blockIdx.x / blocks, row = head / a.heads;
    const int first = blockIdx.x % blocks * MERGE_COLUMNS, column = first + threadIdx.x;
    u32 begin, end;
    visible_keys(a, row, begin, end);
    const int count = (int) unit_count(a, begin, end);
    const u32 stride = 2 + PARTIAL_COLUMNS;
    const float *p = a.partials + (u64) head * a.units * stride;
    const float *of_column = p + 2 + min(column, a.head_dim - 1);
    pdl_wait();
    float most = -INF, sum = 0.0f, o = 0.0f;
    for (int base = 0; base < count; base += MERGE_UNITS) {
        const int n = min(count - base, MERGE_UNITS);
        float ahead[MERGE_AHEAD];
        auto load = [&](int from) {
            const float *of = of_column + (u64) (base + from) * stride;
            if (from + MERGE_AHEAD <= n) {
#pragma unroll
                for (int i = 0; i < MERGE_AHEAD; i++) ahead[i] = of[i * stride];
            } else {
#pragma unroll
                for (int i = 0; i < MERGE_AHEAD; i++) ahead[i] = from + i < n ? of[i * stride] : 0.0f;
            }
        };
        load(0);
        // All warps find the largest maximum.
        float now = most;
        for (int i = lane; i < n; i += 32) now = larger(p[(u64) (base + i) * stride], now);
        now = warp_max(now);
        __syncthreads(); // nobody reads the factors before
        for (int i = threadIdx.x; i < (n + MERGE_AHEAD - 1) / MERGE_AHEAD * MERGE_AHEAD; i += blockDim.x) {
            const float *of = p + (u64) (base + i) * stride;
            of_unit[i] = i < n ? make_float2(softmax_rescale(of[0], now), of[1]) : make_float2(0.0f, 0.0f);
        }
        __syncthreads();
        const float before = softmax_rescale(most, now);
        o *= before;
        sum *= before;
        most = now;
        for (int from = 0; from < n; from += MERGE_AHEAD) {
            float v[MERGE_AHEAD];
#pragma unroll
            for (int i = 0; i < MERGE_AHEAD; i++) v[i] = ahead[i];
            load(from + MERGE_AHEAD);
#pragma unroll
            for (int i = 0; i < MERGE_AHEAD; i++) {
                const float2 f = of_unit[from + i];
                o = fmaf(v[i], f.x, o);
                sum = fmaf(f.y, f.x, sum);
            }
        }
    }
    merged[threadIdx.x] = o / sum;
    __syncthreads();
    if constexpr (VALUE_ROTATION > 0) {
        const int group = warp * VALUE_ROTATION;
        if (group < MERGE_COLUMNS && first + group < a.head_dim)
            rotate_columns<VALUE_ROTATION>(merged + group, group_columns(first + group, a.head_dim, VALUE_ROTATION),
                                           true);
        __syncthreads();
    }
    if (a.y && column < a.head_dim) a.y[(u64) head * a.head_dim + column] = merged[threadIdx.x];
    if (h.stride && warp < MERGE_COLUMNS / 64 && first + 64 * warp < a.head_dim) {
        const float2 v = ((const float2 *) merged)[threadIdx.x];
        store_activation_tile(h, row, (head % a.heads * a.head_dim + first) / 64 + warp, v.x, v.y);
    }
}
#if !TENSOR_CORES
#define LN2 0.69314718055994530942f
// Column `c` of key `key` of a page of `e` columns, as f32.
template <bool VALUES>
DEVICE float load_kv(const u8 *page, int e, u32 key, int c) {
    typedef KvFormat<VALUES> F;
    if (!F::IS_PACKED) return KvElement<VALUES>::load(page + (key * e + c) * KvElement<VALUES>::BYTES);
    const u32 code = F::load_code(page, e, key, c);
    const u16 *scales = (const u16 *) (page + F::scales_of(e, c / 32, key / 32));
    float level;
    if constexpr (F::IS_LEVELS) level = level_of<F::BITS>(code);
    else level = F::BITS == 8 ? (float) (signed char) code : (float) ((int) code - (1 << (F::BITS - 1)));
    return level * f16_to_f32(scales[F::scale_index(key % 32)]);
}
// One split of one row and head by 128 threads. Scores: a warp a key, 32 partial sums and a tree. Then a thread a
// column, keys ascending.
DEVICE void split_attention(const AttentionArgs &a, u32 row, int head, u32 split, u32 begin, u32 end, const float *q,
                            float *scores, float *shared, float &max, float &sum, float (&o)[4]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, e = a.head_dim;
    const u32 first = split * SPLIT_KEYS > begin ? split * SPLIT_KEYS : begin,
              last = (split + 1) * SPLIT_KEYS < end ? (split + 1) * SPLIT_KEYS : end;
    const u32 *table = a.batch.table(a.batch.seq_of(row), a.group);
    const int kv_head = head / (a.heads / a.kv_heads);
    auto page_of_head = [&](u32 key) { return (u64) table[key / PAGE_ROWS] * a.kv_heads + kv_head; };
    for (int i = threadIdx.x; i < SPLIT_KEYS; i += 128) scores[i] = -INF;
    __syncthreads();
    for (u32 key = first + warp; key < last; key += 4) {
        const u8 *page = a.keys + page_of_head(key) * kv_page_bytes<false>(e);
        float s = 0.0f;
        for (int c = lane; c < e; c += 32) s = fmaf(q[c], load_kv<false>(page, e, key % PAGE_ROWS, c), s);
        s = warp_sum(s) * (a.scale * LOG2E);
        if (lane == 0) scores[key % SPLIT_KEYS] = s;
    }
    __syncthreads();
    float s0 = scores[threadIdx.x], s1 = scores[threadIdx.x + 128];
    max = larger(s0, s1);
    max = warp_max(max);
    if (lane == 0) shared[warp] = max;
    __syncthreads();
    max = ceilf(larger(larger(shared[0], shared[1]), larger(shared[2], shared[3])));
    s0 = exp_((s0 - max) * LN2);
    s1 = exp_((s1 - max) * LN2);
    scores[threadIdx.x] = s0;
    scores[threadIdx.x + 128] = s1;
    sum = warp_sum(s0 + s1);
    if (lane == 0) shared[4 + warp] = sum;
    __syncthreads();
    sum = (shared[4] + shared[5]) + (shared[6] + shared[7]);
#pragma unroll
    for (int i = 0; i < 4; i++) o[i] = 0.0f;
    for (u32 key = first; key < last; key++) {
        const u8 *page = a.values + page_of_head(key) * kv_page_bytes<true>(e);
        const float p = scores[key % SPLIT_KEYS];
#pragma unroll
        for (int i = 0; i < 4; i++)
            if ((int) threadIdx.x + i * 128 < e)
                o[i] = fmaf(p, load_kv<true>(page, e, key % PAGE_ROWS, threadIdx.x + i * 128), o[i]);
    }
    __syncthreads();
}
DEVICE void load_query(const AttentionArgs &a, u32 row, int head, float *q) {
    for (int c = threadIdx.x; c < a.head_dim; c += 128) q[c] = a.q[((u64) row * a.heads + head) * a.head_dim + c];
    __syncthreads();
    if constexpr (KEY_ROTATION > 0) {
        for (int first = threadIdx.x / 32 * KEY_ROTATION; first < a.head_dim; first += 4 * KEY_ROTATION)
            rotate_columns<KEY_ROTATION>(q + first, group_columns(first, a.head_dim, KEY_ROTATION), false);
        __syncthreads();
    }
}
// Few rows: block (row head, i) takes the splits i, i + gridDim.y, ….
KERNEL __launch_bounds__(128, 2) attention_decode(AttentionArgs a) {
    __shared__ float q[512], scores[SPLIT_KEYS], shared[8];
    pdl_sync();
    const u32 row = blockIdx.x / a.heads;
    const int head = blockIdx.x % a.heads;
    u32 begin, end;
    visible_keys(a, row, begin, end);
    load_query(a, row, head, q);
    for (u32 split = begin / SPLIT_KEYS + blockIdx.y; split < (end + SPLIT_KEYS - 1) / SPLIT_KEYS; split += gridDim.y) {
        float max, sum, o[4];
        split_attention(a, row, head, split, begin, end, q, scores, shared, max, sum, o);
        float *out = a.partials + ((u64) blockIdx.x * a.units + split - begin / SPLIT_KEYS) * (2 + a.head_dim);
        if (threadIdx.x == 0) {
            out[0] = max;
            out[1] = sum;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if ((int) threadIdx.x + i * 128 < a.head_dim) out[2 + threadIdx.x + i * 128] = o[i];
    }
}
// Many rows: a block takes all splits of one row and head, one after the other.
KERNEL __launch_bounds__(128) attention_all(AttentionArgs a) {
    __shared__ float q[512], scores[SPLIT_KEYS], shared[8];
    pdl_sync();
    const u32 row = blockIdx.x / a.heads;
    const int head = blockIdx.x % a.heads;
    u32 begin, end;
    visible_keys(a, row, begin, end);
    load_query(a, row, head, q);
    float max = -INF, sum = 0.0f, o[4] = {0, 0, 0, 0};
    for (u32 split = begin / SPLIT_KEYS; split < (end + SPLIT_KEYS - 1) / SPLIT_KEYS; split++) {
        float max2, sum2, o2[4];
        split_attention(a, row, head, split, begin, end, q, scores, shared, max2, sum2, o2);
        const float now = larger(max, max2), before = softmax_rescale(max, now), f = softmax_rescale(max2, now);
        max = now;
        sum = fmaf(sum2, f, sum * before);
#pragma unroll
        for (int i = 0; i < 4; i++) o[i] = fmaf(o2[i], f, o[i] * before);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if ((int) threadIdx.x + i * 128 < a.head_dim)
            a.y[(u64) blockIdx.x * a.head_dim + threadIdx.x + i * 128] = o[i] / sum;
}
#else
// ---- tensor cores: a block takes tiles of 16 queries of one sequence and key head. Queries and
// probabilities are rounded to f16. Products take 16 head columns, or keys, at a time.

extern __shared__ __align__(16) u8 smem[];
// A tile of queries in shared memory: [HEAD_DIM / 32, 2, 32, 8], the A fragment of a lane for 16 columns each.
#define QUERY_TILE_ELEMENTS (TILE_QUERIES * HEAD_DIM)
#define QUERY_BLOCK_ELEMENTS (TILE_QUERIES * 32)

// Loads tiles of queries to shared memory: four loads at once, or of rotated keys a group of columns a warp, which is
// rotated as they are.
DEVICE void load_queries(const AttentionArgs &a, const QueryTile &own, u16 *to, int tiles = 1) {
    // Column `c` of query `q`.
    auto place = [&](int q, int c) {
        const int i = interleave_index(c % 32), word = i % 8 / 2, lane = q % 8 * 4 + i / 8;
        return to + q / TILE_QUERIES * QUERY_TILE_ELEMENTS + c / 32 * QUERY_BLOCK_ELEMENTS + word / 2 * 256 + lane * 8 +
               word % 2 * 4 + q % TILE_QUERIES / 8 * 2 + i % 2;
    };
    if constexpr (KEY_ROTATION > 0) {
        constexpr int GROUP = KEY_ROTATION ? KEY_ROTATION : 64, GROUPS = (HEAD_DIM + GROUP - 1) / GROUP;
        constexpr bool ALL_LARGE = HEAD_DIM % GROUP == 0;
        const int lane = threadIdx.x & 31, warps = blockDim.x >> 5, all = tiles * TILE_QUERIES * GROUPS;
        float v[GROUP / 32], ahead[GROUP / 32];
        auto load = [&](int i) {
#pragma unroll
            for (int k = 0; k < GROUP / 32; k++) {
                const int c = i % GROUPS * GROUP + 32 * k + lane;
                ahead[k] = ALL_LARGE || c < HEAD_DIM ? own.load_one(a, i / GROUPS, c) : 0.0f;
            }
        };
        load(threadIdx.x >> 5);
        for (int i = threadIdx.x >> 5; i < all; i += warps) {
            const int q = i / GROUPS, first = i % GROUPS * GROUP;
#pragma unroll
            for (int k = 0; k < GROUP / 32; k++) v[k] = ahead[k];
            if (i + warps < all) load(i + warps);
            auto rotate = [&](auto &x) {
                if (q < own.count) rotate_group(x, false);
#pragma unroll
                for (int k = 0; k < sizeof(x) / sizeof(float); k++)
                    *place(q, first + 32 * k + lane) = f32_to_f16(clamp_f16(x[k]));
            };
            if (ALL_LARGE || group_columns(first, HEAD_DIM, GROUP) == GROUP) {
                rotate(v);
            } else {
                float small[2] = {v[0], v[1]};
                rotate(small);
            }
        }
        return;
    }
    for (int from = threadIdx.x; from < tiles * QUERY_TILE_ELEMENTS / 4; from += 4 * blockDim.x) {
        float4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int i = from + j * blockDim.x;
            v[j] = own.load(a, i / (HEAD_DIM / 4), i % (HEAD_DIM / 4) * 4);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int i = from + j * blockDim.x, q = i / (HEAD_DIM / 4), c = i % (HEAD_DIM / 4) * 4;
            if (q >= tiles * TILE_QUERIES) break;
            u16 *part = place(q, c);
            const uint2 two = QueryTile::to_f16(v[j]);
            *(u32 *) part = two.x;
            *(u32 *) (part + 8) = two.y;
        }
    }
}
// Adds the products of block number `block` of 32 columns to the scores of a tile of queries and 8 N keys.
template <int N>
DEVICE void mma_scores(float (&s)[N][4], const u16 *queries, int block, const uint4 (&k)[N]) {
    const uint4 *of = (const uint4 *) (queries + block * QUERY_BLOCK_ELEMENTS) + (threadIdx.x & 31);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const uint4 q = of[j * 32];
#pragma unroll
        for (int n = 0; n < N; n++) mma_m16n8k16(s[n], {q.x, q.y, q.z, q.w}, word(k[n], 2 * j), word(k[n], 2 * j + 1));
    }
}
// o += probabilities of 16 keys times values; `v` are the fragments of 32 keys, of which these are half `j`.
template <int N>
DEVICE void mma_values(float (&o)[N][4], const uint4 &p, const uint4 (&v)[N], int j) {
#pragma unroll
    for (int n = 0; n < N; n++) mma_m16n8k16(o[n], {p.x, p.y, p.z, p.w}, word(v[n], 2 * j), word(v[n], 2 * j + 1));
}
template <int N>
DEVICE void clear(float (&v)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) v[n][i] = 0.0f;
}
// Prefetches a page's keys and values into L2; what another kernel appends meanwhile is read from the same cache.
DEVICE void prefetch_page(const AttentionArgs &a, u32 page, int kv_head) {
#if __CUDA_ARCH__ >= 900
    const int lane = threadIdx.x & 31;
    const u32 bytes = lane == 0 ? kv_page_bytes<false>(HEAD_DIM) : kv_page_bytes<true>(HEAD_DIM);
    if (lane < 2 && page != NO_PAGE)
        bulk_prefetch_l2((lane == 0 ? a.keys : a.values) + ((u64) page * a.kv_heads + kv_head) * bytes, bytes);
#endif
}

// Stores the results of the lane's two queries of a unit for attention_merge (split-KV), if they see any of it.
struct PartialOutput {
    const AttentionArgs &a;
    const QueryTile &own;
    u32 at[2]; // an address would take two registers
    DEVICE void unit(u32 key, const float (&max)[2], const float (&sum)[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int q = (threadIdx.x & 31) / 4 + 8 * i;
            at[i] = ~0u;
            if (q >= own.count) continue;
            const u32 local = unit_index(a, key) - unit_index(a, own.begin[i]);
            if (local >= unit_count(a, own.begin[i], own.end[i])) continue;
            at[i] = ((own.row(q) * a.heads + own.head(q)) * a.units + local) * (2 + HEAD_DIM);
            if (threadIdx.x % 4 == 0 && threadIdx.x < 32)
                *(float2 *) (a.partials + at[i]) = make_float2(max[i], sum[i]);
        }
    }
    // Output of 8 N columns from number `first` on; the second argument counts groups of 8 columns of the warp.
    template <int N>
    DEVICE void columns(int first, int, const float (&o)[N][4]) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (at[i] != ~0u)
#pragma unroll
                for (int n = 0; n < N; n++)
                    *(float2 *) (a.partials + at[i] + 2 + first + n * 8 + 2 * (threadIdx.x & 3)) =
                        make_float2(o[n][2 * i], o[n][2 * i + 1]);
    }
};
// Adds the results of units in shared memory (online softmax).
struct RunningOutput {
    float4 *of; // of the thread, every 128th
    float max[2], sum[2], before[2], factor[2];
    DEVICE void unit(u32, const float (&of_max)[2], const float (&of_sum)[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float now = larger(of_max[i], max[i]);
            before[i] = softmax_rescale(max[i], now);
            factor[i] = softmax_rescale(of_max[i], now);
            max[i] = now;
            sum[i] = fmaf(of_sum[i], factor[i], sum[i] * before[i]);
        }
    }
    template <int N>
    DEVICE void columns(int, int number, const float (&o)[N][4]) const {
#pragma unroll
        for (int n = 0; n < N; n++) {
            float4 &v = of[(number + n) * 128];
            v = make_float4(fmaf(o[n][0], factor[0], v.x * before[0]), fmaf(o[n][1], factor[0], v.y * before[0]),
                            fmaf(o[n][2], factor[1], v.z * before[1]), fmaf(o[n][3], factor[1], v.w * before[1]));
        }
    }
};

// How W warps split a unit: each first has some of its keys, then some of the head's columns, GROUP times 8 at a time.
// PAGE_SCORES floats are [8, TILE_QUERIES, 8] of a page.
#define PAGE_SCORES 1024
template <int W>
struct WarpSplit {
    static constexpr int COLUMNS = HEAD_DIM / W, N = 8 / W, COLUMN_GROUPS = COLUMNS / 8;
    static constexpr int GROUP = COLUMN_GROUPS % 8 == 0   ? 8
                                 : COLUMN_GROUPS % 4 == 0 ? 4
                                 : COLUMN_GROUPS % 2 == 0 ? 2
                                                          : 1;
    // Masks and stores the warp's scores of page `at` for all warps; `get` has the softmax of all of them.
    DEVICE static void put(const AttentionArgs &a, const QueryTile &own, float (&mine)[N][4], u32 at, float *scores) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
        for (int n = 0; n < N; n++) {
            own.mask(mine[n], at, N * warp + n, a.scale * LOG2E);
#pragma unroll
            for (int i = 0; i < 4; i += 2)
                *(float2 *) (scores + ((N * warp + n) * TILE_QUERIES + lane / 4 + 4 * i) * 8 + 2 * (lane & 3)) =
                    make_float2(mine[n][i], mine[n][i + 1]);
        }
    }
    DEVICE static PageSoftmax get(const float *scores) {
        const int lane = threadIdx.x & 31;
        float s[8][4];
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const float2 v =
                    *(const float2 *) (scores + (n * TILE_QUERIES + lane / 4 + 4 * i) * 8 + 2 * (lane & 3));
                s[n][i] = v.x;
                s[n][i + 1] = v.y;
            }
        return PageSoftmax(s);
    }
};
// The largest divisor of `n` that is at most `most`.
constexpr int divisor(int n, int most) { return n % most ? divisor(n, most - 1) : most; }
// A unit that is page `at`, which lies at `page`. `load` loads the queries while keys and values are on their way.
template <int W, class Load, class Out>
DEVICE void attend_page(const AttentionArgs &a, const QueryTile &own, u32 page, u32 at, const u16 *queries,
                        float *scores, Load load, Out &out) {
    typedef WarpSplit<W> Of;
    constexpr int N = Of::N, GROUP = Of::GROUP, AHEAD = divisor(HEAD_DIM / 32, 16 / N);
    const int warp = threadIdx.x >> 5;
    const u64 of_head = (u64) page * a.kv_heads + own.kv_head;
    const u8 *keys = a.keys + of_head * kv_page_bytes<false>(HEAD_DIM),
             *values = a.values + of_head * kv_page_bytes<true>(HEAD_DIM);
    uint4 k[AHEAD][N], v[2][GROUP];
    auto load_keys = [&](int b) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
#pragma unroll
            for (int n = 0; n < N; n++) k[i][n] = load_key(keys, b + i, N * warp + n);
    };
    // Columns `from` to `to` of the groups that a warp takes at a time.
    auto load_values_of = [&](int c, int from, int to) {
#pragma unroll
        for (int b = 0; b < 2; b++) load_values<Of::COLUMNS>(values, warp * Of::COLUMNS + c * 8, b, from, to, v[b]);
    };
    load_keys(0);
    // What has to be unpacked would wait in more registers than it comes in.
    constexpr int EARLY = VALUES_ARE_QUADS ? 0 : GROUP / 2;
    load_values_of(0, 0, EARLY);
    load();
    __syncthreads(); // the queries are there, and nobody reads the scores before
    float mine[N][4];
    clear(mine);
#pragma unroll 1
    for (int b = 0; b < HEAD_DIM / 32; b += AHEAD) {
        if (b > 0) load_keys(b);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) mma_scores(mine, queries, b + i, k[i]);
    }
    load_values_of(0, EARLY, GROUP);
    Of::put(a, own, mine, at, scores);
    __syncthreads();
    const PageSoftmax p = Of::get(scores);
    out.unit(at * PAGE_ROWS, p.max, p.sum);
#pragma unroll 1
    for (int c = 0; c < Of::COLUMN_GROUPS; c += GROUP) {
        if (c > 0) load_values_of(c, 0, GROUP);
        float o[GROUP][4];
        clear(o);
#pragma unroll
        for (int j = 0; j < 4; j++) mma_values(o, p.keys(j), v[j / 2], j % 2);
        out.columns(warp * Of::COLUMNS + c * 8, c, o);
    }
}
// A unit that is a split, or its pages as units; the lane's `pages` is page number `lane`.
template <int W, class Out>
DEVICE void attend_split(const AttentionArgs &a, const QueryTile &own, u32 pages, u32 split, const u16 *queries,
                         float *scores, Out &out) {
    typedef WarpSplit<W> Of;
    const int warp = threadIdx.x >> 5;
    constexpr u32 KEY_BYTES = kv_page_bytes<false>(HEAD_DIM), VALUE_BYTES = kv_page_bytes<true>(HEAD_DIM);
    const u8 *keys = a.keys + (u64) own.kv_head * KEY_BYTES, *values = a.values + (u64) own.kv_head * VALUE_BYTES;
    __syncthreads(); // nobody reads the scores before
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        const u32 page = __shfl_sync(~0u, pages, i);
        float mine[Of::N][4];
        clear(mine);
#pragma unroll 2
        for (int b = 0; page != NO_PAGE && b < HEAD_DIM / 32; b++) {
            uint4 k[Of::N];
#pragma unroll
            for (int n = 0; n < Of::N; n++)
                k[n] = load_key(keys + (u64) page * a.kv_heads * KEY_BYTES, b, Of::N * warp + n);
            mma_scores(mine, queries, b, k);
        }
        Of::put(a, own, mine, split * 4 + i, scores + i * PAGE_SCORES);
    }
    __syncthreads();
    uint4 p[4][4];
    float2 found[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const PageSoftmax of = Of::get(scores + i * PAGE_SCORES);
#pragma unroll
        for (int j = 0; j < 4; j++) p[i][j] = of.keys(j);
        found[0][i] = make_float2(of.max[0], of.sum[0]);
        found[1][i] = make_float2(of.max[1], of.sum[1]);
    }
    const SplitSoftmax first([&](int i) { return found[0][i]; }), second([&](int i) { return found[1][i]; });
    out.unit(split * SPLIT_KEYS, {first.max, second.max}, {first.sum, second.sum});
#pragma unroll 1
    for (int c = 0; c < Of::COLUMN_GROUPS; c += Of::GROUP) {
        float o[Of::GROUP][4];
        clear(o);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 page = __shfl_sync(~0u, pages, i);
            if (page == NO_PAGE) continue;
#pragma unroll
            for (int b = 0; b < 2; b++) {
                uint4 v[Of::GROUP];
                load_values<Of::COLUMNS>(values + (u64) page * a.kv_heads * VALUE_BYTES, warp * Of::COLUMNS + c * 8, b,
                                         0, Of::GROUP, v);
#pragma unroll
                for (int j = 0; j < 2; j++)
                    mma_values(o, rescale_fragment(p[i][2 * b + j], first.rescales[i], second.rescales[i]), v, j);
            }
        }
        out.columns(warp * Of::COLUMNS + c * 8, c, o);
    }
}
// A block of 4 warps and 16 queries takes every gridDim.y / K-th page.
DEVICE void attend_pages_of_block(const AttentionArgs &a, u32 seq, u32 first) {
    u16 *queries = (u16 *) smem;
    const QueryTile own(a, seq, first);
    const u32 *table = a.batch.table(seq, a.group);
    u32 at = own.least / PAGE_ROWS + blockIdx.y / a.kv_heads;
    if (at * PAGE_ROWS >= own.most) return;
    u32 page = table[at];
    if (threadIdx.x < 32) prefetch_page(a, page, own.kv_head);
    pdl_wait();
    PartialOutput out{a, own, {}};
    for (bool first = true;; first = false) {
        attend_page<4>(
            a, own, page, at, queries, (float *) (queries + QUERY_TILE_ELEMENTS),
            [&]() {
                if (first) load_queries(a, own, queries);
            },
            out);
        at += gridDim.y / a.kv_heads;
        if (at * PAGE_ROWS >= own.most) break;
        page = table[at];
    }
}
// Every `step`-th split from number `split` on.
template <class Out>
DEVICE void attend_splits_of_block(const AttentionArgs &a, u32 seq, const QueryTile &own, u32 split, u32 step,
                                   u16 *queries, Out &out) {
    float *scores = (float *) (queries + QUERY_TILE_ELEMENTS);
    const u32 *table = a.batch.table(seq, a.group);
    u32 pages = own.load_page_of_split(table, split);
    if (threadIdx.x < 128) prefetch_page(a, __shfl_sync(~0u, pages, threadIdx.x >> 5), own.kv_head);
    pdl_wait();
    load_queries(a, own, queries);
    for (; split * SPLIT_KEYS < own.most; split += step) {
        const u32 after = own.load_page_of_split(table, split + step);
        prefetch_page(a, __shfl_sync(~0u, after, threadIdx.x >> 5), own.kv_head);
        if (units_are_pages(a, split * SPLIT_KEYS)) {
#pragma unroll 1
            for (int i = 0; i < 4; i++) {
                const u32 page = __shfl_sync(~0u, pages, i);
                if (page != NO_PAGE) attend_page<4>(a, own, page, split * 4 + i, queries, scores, []() {}, out);
            }
        } else {
            attend_split<4>(a, own, pages, split, queries, scores, out);
        }
        pages = after;
    }
}
// Windows that are no longer than PAGE_UNIT_KEYS: units are pages.
KERNEL __launch_bounds__(128, 3) attention_decode_pages(AttentionArgs a) {
    pdl_launch();
    u32 seq, first;
    if (find_queries(a, blockIdx.x, TILE_QUERIES, seq, first)) attend_pages_of_block(a, seq, first);
}
// Many rows: a block takes all splits, one after the other.
KERNEL __launch_bounds__(128) attention_all(AttentionArgs a) {
    u16 *queries = (u16 *) smem;
    pdl_launch();
    u32 seq, first;
    if (!find_queries(a, blockIdx.x, TILE_QUERIES, seq, first)) return;
    typedef WarpSplit<4> Of;
    const QueryTile own(a, seq, first);
    RunningOutput total{
        (float4 *) (queries + QUERY_TILE_ELEMENTS) + PAGE_SCORES + threadIdx.x, {-INF, -INF}, {}, {}, {}};
    for (int n = 0; n < Of::COLUMN_GROUPS; n++) total.of[n * 128] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    attend_splits_of_block(a, seq, own, own.least / SPLIT_KEYS, 1, queries, total);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int n = 0; n < Of::COLUMN_GROUPS; n++) {
        const float4 v = total.of[n * 128];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int q = lane / 4 + 8 * i;
            const int column = warp * Of::COLUMNS + n * 8 + 2 * (lane & 3);
            float *y = a.y + ((u64) own.row(q) * a.heads + own.head(q)) * HEAD_COLUMNS + column;
            if (q < own.count && column < HEAD_COLUMNS)
                *(float2 *) y = make_float2((i == 0 ? v.x : v.z) / total.sum[i], (i == 0 ? v.y : v.w) / total.sum[i]);
        }
    }
}
#if !STAGES
KERNEL __launch_bounds__(128, 2) attention_decode(AttentionArgs a) {
    pdl_launch();
    u32 seq, first;
    if (!find_queries(a, blockIdx.x, TILE_QUERIES, seq, first)) return;
    if (blocks_take_pages(a, seq)) return attend_pages_of_block(a, seq, first);
    const QueryTile own(a, seq, first);
    PartialOutput out{a, own, {}};
    attend_splits_of_block(a, seq, own, own.least / SPLIT_KEYS + blockIdx.y / a.kv_heads, gridDim.y / a.kv_heads,
                           (u16 *) smem, out);
}
#else
// ---- long contexts, multistage: a block of 8 warps takes splits of M tiles of queries. Keys and values are copied to
// shared memory once for all of them, through a pipeline of STAGES stages for each warp, which runs ahead of what the
// block does together: a warp multiplies 32 keys of the split, 64 columns a stage; then it has the softmax of a page of
// one tile; then it multiplies its eighth of the columns, a page of 32 columns a stage. The bits are those of
// `attend_page` and `attend_split`.

#define WARPS 8
// Bytes of a stage: two tiles of keys or of values, and the scales of these.
template <bool VALUES>
DEVICE constexpr int stage_bytes() {
    return 2 * KvFormat<VALUES>::TILE_BYTES + (KvFormat<VALUES>::IS_PACKED ? 128 : 0);
}
#define STAGE_BYTES (stage_bytes<false>() > stage_bytes<true>() ? stage_bytes<false>() : stage_bytes<true>())
// Where a stage comes from. Tiles of packed formats lie together.
struct StageSource {
    const u8 *tiles, *scales;
    u32 tile_bytes, second, scale_bytes; // of a tile; where the second tile lies; of the scales
};
// A warp's pipeline of D stages: bulk copies from compute capability 9.0 on, cp.async before. All lanes call
// everything.
template <int D>
struct WarpPipeline {
    const u8 *stages_smem;
    u32 to, barriers, slot, round;
    DEVICE WarpPipeline(const u8 *stages_smem, u64 *barriers_of_warp)
        : stages_smem(stages_smem), to(smem_address(stages_smem)), barriers(smem_address(barriers_of_warp)), slot(0),
          round(0) {
#if __CUDA_ARCH__ >= 900
        if ((threadIdx.x & 31) == 0) {
            for (int i = 0; i < D; i++) mbarrier_init(barriers + 8 * i, 1);
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncwarp();
#endif
    }
    // Copies a stage, or nothing where the page does not exist.
    DEVICE void produce(u32 slot, bool there, const StageSource &from) const {
        const int lane = threadIdx.x & 31;
        const u32 at = to + slot * STAGE_BYTES;
#if __CUDA_ARCH__ >= 900
        if (lane == 0) {
            mbarrier_expect_tx(barriers + 8 * slot, there ? 2 * from.tile_bytes + from.scale_bytes : 0);
            if (there) {
                const bool together = from.second == from.tile_bytes;
                bulk_copy(at, from.tiles, together ? 2 * from.tile_bytes : from.tile_bytes, barriers + 8 * slot);
                if (!together)
                    bulk_copy(at + from.tile_bytes, from.tiles + from.second, from.tile_bytes, barriers + 8 * slot);
                if (from.scale_bytes)
                    bulk_copy(at + 2 * from.tile_bytes, from.scales, from.scale_bytes, barriers + 8 * slot);
            }
        }
#else
        auto copy = [&](u32 to, const u8 *from) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
        };
        for (int i = 16 * lane; there && i < from.tile_bytes; i += 512) {
            copy(at + i, from.tiles + i);
            copy(at + from.tile_bytes + i, from.tiles + from.second + i);
        }
        if (there && 16 * lane < from.scale_bytes) copy(at + 2 * from.tile_bytes + 16 * lane, from.scales + 16 * lane);
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }
    // Waits for the oldest stage.
    DEVICE const u8 *acquire() const {
#if __CUDA_ARCH__ >= 900
        mbarrier_wait(barriers + 8 * slot, round);
#else
        asm volatile("cp.async.wait_group %0;" ::"n"(D - 1) : "memory");
        __syncwarp();
#endif
        return stages_smem + slot * STAGE_BYTES;
    }
    DEVICE void next() {
        if (++slot == D) slot = 0, round++;
    }
};
template <int M, bool WHOLE_CONTEXT>
DEVICE void attention_pipelined(const AttentionArgs &a) {
    constexpr int D = WHOLE_CONTEXT ? STAGES / 2 : STAGES;
    u16 *queries = (u16 *) smem; // [M, QUERY_TILE_ELEMENTS]
    float4 *scores =
        (float4 *) (queries + M * QUERY_TILE_ELEMENTS);     // [M, 4, 8, 32] a lane's scores; then its probabilities
    float2 *sums = (float2 *) (scores + M * 4 * 8 * 32);    // [M, 4, TILE_QUERIES] maximum and sum of a page
    u8 *stages_smem = (u8 *) (sums + M * 4 * TILE_QUERIES); // [WARPS, D] stages
    u64 *barriers = (u64 *) (stages_smem + WARPS * D * STAGE_BYTES);
    float4 *total = (float4 *) (barriers + WARPS * D) + threadIdx.x; // [M, COLUMN_BLOCKS, 4, 256], if WHOLE_CONTEXT
    constexpr int KEY_STAGES = HEAD_DIM / 64, COLUMN_BLOCKS = HEAD_DIM / 256,
                  SPLIT_STAGES = KEY_STAGES + 4 * COLUMN_BLOCKS;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    pdl_launch();
    u32 seq, first;
    if (!find_queries(a, blockIdx.x, M * TILE_QUERIES, seq, first)) return;
    const QueryTile own(a, seq, first, M * TILE_QUERIES, M == 1 ? 0 : warp >> 2);
    const u32 *table = a.batch.table(seq, a.group), step = WHOLE_CONTEXT ? 1 : gridDim.y / a.kv_heads;
    if (!WHOLE_CONTEXT && blocks_take_pages(a, seq)) {
        const u32 start = own.least / PAGE_ROWS + blockIdx.y / a.kv_heads / M;
        if (warp == 0 && start * PAGE_ROWS < own.most) prefetch_page(a, table[start], own.kv_head);
        pdl_wait();
        bool loaded = false;
        for (u32 unit = own.least / PAGE_ROWS * M + blockIdx.y / a.kv_heads; unit / M * PAGE_ROWS < own.most;
             unit += step) {
            const u32 at = unit / M, tile = unit % M * TILE_QUERIES;
            auto page = [&](const QueryTile &part, bool load) {
                PartialOutput out{a, part, {}};
                attend_page<WARPS>(
                    a, part, table[at], at, queries, (float *) scores,
                    [&]() {
                        if (load) load_queries(a, part, queries);
                    },
                    out);
            };
            if constexpr (M == 1) {
                page(own, !loaded);
                loaded = true;
            } else {
                if (tile >= own.count) continue;
                const QueryTile part(a, seq, first + tile);
                if (at * PAGE_ROWS >= part.most || (at + 1) * PAGE_ROWS <= part.least) continue;
                __syncthreads(); // nobody reads the queries before
                page(part, true);
            }
        }
        return;
    }
    u32 split = own.least / SPLIT_KEYS + (WHOLE_CONTEXT ? 0 : blockIdx.y / a.kv_heads);
    if (split * SPLIT_KEYS >= own.most) return;
    u32 pages = own.load_page_of_split(table, split), after = own.load_page_of_split(table, split + step);
    WarpPipeline<D> stages(stages_smem + warp * D * STAGE_BYTES, barriers + warp * D);
    // Copies stage `i` of the split, or of the next one.
    auto produce = [&](u32 slot, int i) {
        const bool next = i >= SPLIT_STAGES;
        if (next) i -= SPLIT_STAGES;
        const bool keys = i < KEY_STAGES;
        const int value = i - KEY_STAGES;
        const u32 page = __shfl_sync(~0u, next ? after : pages, keys ? warp >> 1 : value / COLUMN_BLOCKS);
        const u64 of_head = (u64) page * a.kv_heads + own.kv_head;
        // A page's keys of one half in two blocks of columns, or its values in one.
        const int block = keys ? 2 * i : warp * COLUMN_BLOCKS + value % COLUMN_BLOCKS, half = warp & 1;
        typedef KvFormat<false> K;
        typedef KvFormat<true> V;
        const u8 *of = keys ? a.keys + of_head * kv_page_bytes<false>(HEAD_DIM)
                            : a.values + of_head * kv_page_bytes<true>(HEAD_DIM);
        constexpr u32 SECOND_KEYS = K::IS_PACKED ? K::TILE_BYTES : 2 * K::TILE_BYTES,
                      SECOND_VALUES = V::IS_PACKED ? V::TILE_BYTES : HEAD_DIM / 32 * V::TILE_BYTES;
        // Keys of two blocks have the scales of both, or one in common.
        constexpr u32 KEY_SCALES = !K::IS_PACKED            ? 0
                                   : K::SCALE_COLUMNS == 32 ? 128
                                                            : 64,
                      VALUE_SCALES = V::IS_PACKED ? 128 : 0;
        stages.produce(slot, page != NO_PAGE,
                       {of + (keys ? K::tile_at(HEAD_DIM, block, half) : V::tile_at(HEAD_DIM, block, 0)),
                        of + (keys ? K::scales_of(HEAD_DIM, block, half) : V::scales_of(HEAD_DIM, block, 0)),
                        (u32) (keys ? K::TILE_BYTES : V::TILE_BYTES), keys ? SECOND_KEYS : SECOND_VALUES,
                        keys ? KEY_SCALES : VALUE_SCALES});
    };
    // All lanes have read stage `i`: its place is free.
    auto release = [&](int i) {
        __syncwarp();
        produce(stages.slot, i + D);
        stages.next();
    };
    if (warp < 4) prefetch_page(a, __shfl_sync(~0u, pages, warp), own.kv_head);
    pdl_wait();
    for (int i = 0; i < D; i++) produce(i, i);
    load_queries(a, own, queries, M);
    KeyLevels key_levels;
    ValueLevels value_levels;
    key_levels.keep();
    value_levels.keep();
    // Where the results of the lane's queries of each tile go, unit after unit.
    u32 out[M][2], first_unit[M][2], units[M][2];
    float running[M][2], sum[M][2]; // maximum and sum, if WHOLE_CONTEXT
    if (WHOLE_CONTEXT)
#pragma unroll
        for (int i = 0; i < M * COLUMN_BLOCKS * 4; i++) total[i * 256] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            running[m][i] = -INF;
            sum[m][i] = 0.0f;
            const int q = m * TILE_QUERIES + g + 8 * i;
            u32 begin = 0, end = 1;
            if (q < own.count) visible_keys(a, own.row(q), begin, end);
            first_unit[m][i] = unit_index(a, begin);
            units[m][i] = q < own.count ? unit_count(a, begin, end) : 0;
            out[m][i] = (own.row(q) * a.heads + own.head(q)) * a.units;
        }
    __syncthreads();
    for (; split * SPLIT_KEYS < own.most; split += step) {
        float s[M][4][4];
#pragma unroll
        for (int m = 0; m < M; m++) clear(s[m]);
        const bool there = __shfl_sync(~0u, pages, warp >> 1) != NO_PAGE;
#pragma unroll 1
        for (int b = 0; b < KEY_STAGES; b++) {
            const u8 *keys = stages.acquire(); // two tiles of columns
            if (there)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    uint4 k[4];
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        typedef KvFormat<false> F;
                        const u8 *scales = keys + 2 * F::TILE_BYTES + (F::SCALE_COLUMNS == 32 ? c * 64 : 0);
                        k[n] = load_fragment<false, true>(keys + c * F::TILE_BYTES, scales, n, key_levels);
                    }
#pragma unroll
                    for (int m = 0; m < M; m++) mma_scores(s[m], queries + m * QUERY_TILE_ELEMENTS, 2 * b + c, k);
                }
            release(b);
        }
        __syncthreads(); // nobody reads the probabilities before
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < 4; n++)
                scores[((m * WARPS + warp) * 4 + n) * 32 + lane] =
                    make_float4(s[m][n][0], s[m][n][1], s[m][n][2], s[m][n][3]);
        __syncthreads();
        if (warp < 4 * M) {
            // The warp's page of its tile: numbers 0 to 3 are those of one warp, 4 to 7 of the next.
            float of[8][4];
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float4 v = scores[(warp * 8 + n) * 32 + lane];
                of[n][0] = v.x, of[n][1] = v.y, of[n][2] = v.z, of[n][3] = v.w;
                own.mask(of[n], split * 4 + (warp & 3), n, a.scale * LOG2E);
            }
            const PageSoftmax p(of);
            __syncwarp(); // all lanes have their scores
            uint4 *to = (uint4 *) scores + warp * 8 * 32 + lane;
#pragma unroll
            for (int j = 0; j < 4; j++) to[j * 32] = p.keys(j);
            if (t == 0)
#pragma unroll
                for (int i = 0; i < 2; i++) sums[warp * TILE_QUERIES + g + 8 * i] = make_float2(p.max[i], p.sum[i]);
        }
        __syncthreads();
        // Units are the split's pages, or the split.
        const bool units_are_pages_here = units_are_pages(a, split * SPLIT_KEYS);
        auto page_softmax = [&](int m, int i, int page) { return sums[(m * 4 + page) * TILE_QUERIES + g + 8 * i]; };
        float max[M][2], before[M][2], o[M][COLUMN_BLOCKS][4][4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const SplitSoftmax unit([&](int page) { return page_softmax(m, i, page); });
                max[m][i] = unit.max;
                if (WHOLE_CONTEXT) {
                    const float now = larger(running[m][i], unit.max);
                    before[m][i] = softmax_rescale(running[m][i], now);
                    running[m][i] = now;
                    sum[m][i] *= before[m][i];
                    for (int page = 0; page < 4 && units_are_pages_here; page++) {
                        const float2 v = page_softmax(m, i, page);
                        sum[m][i] = fmaf(v.y, softmax_rescale(v.x, now), sum[m][i]);
                    }
                    if (!units_are_pages_here) sum[m][i] = fmaf(unit.sum, softmax_rescale(unit.max, now), sum[m][i]);
                } else if (!units_are_pages_here && warp == 0 && t == 0) {
                    const u32 local = unit_index(a, split * SPLIT_KEYS) - first_unit[m][i];
                    if (local < units[m][i])
                        *(float2 *) (a.partials + (u64) (out[m][i] + local) * (2 + HEAD_DIM)) =
                            make_float2(unit.max, unit.sum);
                }
            }
#pragma unroll 1
        for (int page = 0; page < 4; page++) {
            const bool there = __shfl_sync(~0u, pages, page) != NO_PAGE;
            const int ends = units_are_pages_here ? there : page == 3; // a unit
            u32 rescales[M][2];
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float f =
                        units_are_pages_here ? 1.0f : softmax_rescale(page_softmax(m, i, page).x, max[m][i]);
                    rescales[m][i] = pack_f16x2(f, f);
                }
#pragma unroll
            for (int c = 0; c < COLUMN_BLOCKS; c++) {
                const u8 *values = stages.acquire(); // two tiles of keys
                if (units_are_pages_here || page == 0)
#pragma unroll
                    for (int m = 0; m < M; m++) clear(o[m][c]);
                if (there) {
                    uint4 v[2][4];
#pragma unroll
                    for (int b = 0; b < 2; b++) {
                        constexpr int BYTES = KvFormat<true>::TILE_BYTES;
                        load_value_tile<true>(values + b * BYTES, values + 2 * BYTES + b * 64, v[b], value_levels);
                    }
#pragma unroll
                    for (int m = 0; m < M; m++)
#pragma unroll
                        for (int j = 0; j < 4; j++)
                            mma_values(o[m][c],
                                       rescale_fragment(((const uint4 *) scores)[((m * 4 + page) * 8 + j) * 32 + lane],
                                                        rescales[m][0], rescales[m][1]),
                                       v[j / 2], j % 2);
                }
                release(KEY_STAGES + page * COLUMN_BLOCKS + c);
            }
            if (!ends) continue;
#pragma unroll
            for (int m = 0; m < M; m++) {
                if (WHOLE_CONTEXT) {
                    float f[2];
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        f[i] = softmax_rescale(units_are_pages_here ? page_softmax(m, i, page).x : max[m][i],
                                               running[m][i]);
#pragma unroll
                    for (int c = 0; c < COLUMN_BLOCKS; c++)
#pragma unroll
                        for (int n = 0; n < 4; n++) {
                            float4 &v = total[((m * COLUMN_BLOCKS + c) * 4 + n) * 256];
                            const float (&x)[4] = o[m][c][n];
                            v = make_float4(fmaf(x[0], f[0], v.x * before[m][0]), fmaf(x[1], f[0], v.y * before[m][0]),
                                            fmaf(x[2], f[1], v.z * before[m][1]), fmaf(x[3], f[1], v.w * before[m][1]));
                        }
                    before[m][0] = before[m][1] = 1.0f;
                } else {
                    const u32 unit = unit_index(a, split * SPLIT_KEYS + page * PAGE_ROWS);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const u32 local = unit - first_unit[m][i];
                        if (local >= units[m][i]) continue;
                        float *to = a.partials + (u64) (out[m][i] + local) * (2 + HEAD_DIM);
                        if (units_are_pages_here && warp == 0 && t == 0) *(float2 *) to = page_softmax(m, i, page);
#pragma unroll
                        for (int c = 0; c < COLUMN_BLOCKS; c++)
#pragma unroll
                            for (int n = 0; n < 4; n++)
                                *(float2 *) (to + 2 + (warp * COLUMN_BLOCKS + c) * 32 + n * 8 + 2 * t) =
                                    make_float2(o[m][c][n][2 * i], o[m][c][n][2 * i + 1]);
                    }
                }
            }
        }
        pages = after;
        after = own.load_page_of_split(table, split + 2 * step);
    }
    if (WHOLE_CONTEXT)
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int c = 0; c < COLUMN_BLOCKS; c++)
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const float4 v = total[((m * COLUMN_BLOCKS + c) * 4 + n) * 256];
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int q = m * TILE_QUERIES + g + 8 * i;
                        float *y = a.y + ((u64) own.row(q) * a.heads + own.head(q)) * HEAD_DIM +
                                   (warp * COLUMN_BLOCKS + c) * 32 + n * 8 + 2 * t;
                        if (q < own.count)
                            *(float2 *) y =
                                make_float2((i == 0 ? v.x : v.z) / sum[m][i], (i == 0 ? v.y : v.w) / sum[m][i]);
                    }
                }
}
KERNEL __launch_bounds__(256, BLOCKS_1) attention_pipelined_1(AttentionArgs a) { attention_pipelined<1, false>(a); }
KERNEL __launch_bounds__(256, BLOCKS_2) attention_pipelined_2(AttentionArgs a) { attention_pipelined<2, false>(a); }
// Many rows: a block takes all splits, one after the other.
KERNEL __launch_bounds__(256, 1) attention_pipelined_all(AttentionArgs a) { attention_pipelined<2, true>(a); }
#endif
#endif
