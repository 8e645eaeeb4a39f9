// Writes keys and values to the paged KV cache, alone or fused with the norms and the rotary embedding of heads.
// mbarrier.cuh, rows.cuh, hadamard.cuh, kv_format.cuh and attention.cuh, which says how pages lie, go before this.
//
//   q, k, v of a row and head --> RowFragment: RMS norm --> shared: head --> RoPE --> y
//                        elements, and codes of 32 columns: from registers <-+   +-> shared --> a group of columns
//                                                       a row of a page <----+------ rotation, codes or levels <-+
//
// and, of many rows, where elements have 16 bits:
//
//   q, k of a row and head    --> registers: RMS norm, RoPE --> y, a row of a page
//   v of eight rows of a head --> registers: RMS norm       --> y, eight keys of each column of a page

// The sum of squares of a group's columns, lane l having columns l + 32 k, in the order of quant/src/kv/turbo.rs: 16
// sums, then a tree.
template <int N>
DEVICE float sum_of_squares_16(const float (&x)[N]) {
    const bool low = (threadIdx.x & 31) < 16;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < N; k++) {
        const float own = x[k] * x[k], other = __shfl_xor_sync(~0u, own, 16);
        sum += low ? own : other;
        sum += low ? other : own;
    }
#pragma unroll
    for (int o = 8; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    return sum;
}
// Stores a group of 32 N columns from column `first` on of key `key` of a page, lane l having columns l + 32 k: as
// `KvRowFormat::encode` does, if all are finite and no larger than f16 can be. A warp calls this together.
template <bool VALUE, int N>
DEVICE void store_group(u8 *page, int e, int key, int first, float (&x)[N]) {
    typedef KvFormat<VALUE> F;
    const int lane = threadIdx.x & 31, block = first / 32;
    // The largest scale of 8 bits whose codes all stay finite is 515.5.
    constexpr float LARGEST = F::BITS == 8 ? 127.0f * 515.5f : 65504.0f;
    auto clamp = [&]() {
#pragma unroll
        for (int k = 0; k < N; k++) x[k] = fminf(fmaxf(x[k], -LARGEST), LARGEST);
    };
    clamp();
    if constexpr (F::IS_LEVELS) {
        const float norm = sqrtf(sum_of_squares_16(x));
        // Levels are those of 128 columns of norm 1. Shorter vectors are zero, whatever their indices.
        const bool is_zero = norm <= 1e-10f;
        const float unit = sqrtf(N / 4.0f) / norm;
        rotate_group(x, false);
        u32 index[N];
#pragma unroll
        for (int k = 0; k < N; k++) {
            x[k] = round_to_level<F::BITS>(is_zero ? 0.0f : x[k] * unit, index[k]);
            F::store_code(page, e, key, block + k, index[k]);
        }
        const float scale = norm / sqrtf(sum_of_squares_16(x));
        if (lane == 0) F::store_scale(page, e, key, block, is_zero ? 0.0f : smaller(scale, 65504.0f));
    } else {
        if constexpr (F::ROTATION > 0) {
            rotate_group(x, false);
            clamp();
        }
#pragma unroll
        for (int k = 0; k < N; k++) {
            const float size = fabsf(x[k]), most = warp_max(size);
            float d;
            u32 code;
            if (F::BITS == 8) {
                d = most / 127.0f;
                code = (u32) (int) roundf(x[k] * (d == 0.0f ? 0.0f : 1.0f / d));
            } else { // the value farthest from zero, the first of several, becomes the lowest level
                const float far = __shfl_sync(~0u, x[k], __ffs(__ballot_sync(~0u, size == most)) - 1);
                constexpr float OFFSET = 1 << (F::BITS - 1);
                d = (most > 0.0f ? far : 0.0f) / -OFFSET;
                const float v = x[k] * (d == 0.0f ? 0.0f : 1.0f / d) + (OFFSET + 0.5f);
                code = (u32) fminf(fmaxf(v, 0.0f), 2.0f * OFFSET - 1.0f);
            }
            F::store_code(page, e, key, block + k, code);
            if (lane == 0) F::store_scale(page, e, key, block + k, d);
        }
    }
}
// Stores the groups of a row that start at the warp's 32 columns: warps whose columns start none do nothing. `column`
// is the lane's; `x` starts the row.
template <bool VALUE>
DEVICE void store_rotated(u8 *page, int e, int key, int column, const float *x) {
    constexpr int GROUP = KvFormat<VALUE>::ROTATION;
    const int lane = threadIdx.x & 31, first = column - lane;
    if (first % GROUP) return;
    auto store = [&](auto &v) {
        constexpr int N = sizeof(v) / sizeof(float);
#pragma unroll
        for (int k = 0; k < N; k++) v[k] = x[first + 32 * k + lane];
        store_group<VALUE>(page, e, key, first, v);
    };
    float large[GROUP / 32], small[2];
    constexpr bool ALL_LARGE = GROUP == 128 && TENSOR_CORES && HEAD_DIM % 128 == 0;
    if (ALL_LARGE || group_columns(first, e, GROUP) == 128) store(large);
    else store(small);
}
// Byte offset of column `c` of key `key` in a page of 16-bit tiles. Columns 8 i to 8 i + 7 of a key are contiguous; in
// values, keys 8 i to 8 i + 7 of a column.
template <bool VALUE>
DEVICE int element_at(int e, int key, int c) {
    const int row = VALUE ? c % 32 : key % 32, i = VALUE ? key % 32 : c % 32;
    return KvFormat<VALUE>::tile_at(e, c / 32, key / 32) + 2 * (row / 8 * 256 + i / 8 * 64 + row % 8 * 8 + i % 8);
}
// Stores column `c` of the key or value of cache row `index` in its page of a head, in formats without rotation. A warp
// has 32 columns: in packed formats, and with tiles, a block of them.
template <bool VALUE>
DEVICE void store_kv(u8 *pages, u64 page_of_head, u32 index, int c, int head_dim, float v) {
    typedef KvFormat<VALUE> F;
    const int key = index % PAGE_ROWS, e = TENSOR_CORES ? HEAD_DIM : head_dim;
    u8 *page = pages + page_of_head * kv_page_bytes<VALUE>(e);
    if constexpr (F::IS_PACKED) {
        float x[1] = {v};
        store_group<VALUE>(page, e, key, c / 32 * 32, x);
    } else if constexpr (TENSOR_CORES) {
        KvElement<VALUE>::store(page + element_at<VALUE>(e, key, c), v);
    } else {
        KvElement<VALUE>::store(page + (key * e + c) * KvElement<VALUE>::BYTES, v);
    }
}

// k, v: [n, K e] become the rows of the KV cache that the step's rows write; a thread a value.
KERNEL kv_append(u8 *keys, u8 *values, const float *k, const float *v, Batch batch, int group, int heads, int head_dim,
                 u64 n) {
    pdl_sync();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 row = (u32) (i / (heads * head_dim)), index = batch.at(row);
    if (index == NO_ROW) return;
    int head = (int) (i / head_dim % heads), c = (int) (i % head_dim);
    u32 page = batch.table(batch.seq_of(row), group)[index / PAGE_ROWS];
    if (page == NO_PAGE) return;
    const u64 to = (u64) page * heads + head;
    if constexpr (KEY_ROTATION > 0)
        store_rotated<false>(keys + to * kv_page_bytes<false>(head_dim), head_dim, index % PAGE_ROWS, c, k + i - c);
    else store_kv<false>(keys, to, index, c, head_dim, k[i]);
    if constexpr (VALUE_ROTATION > 0)
        store_rotated<true>(values + to * kv_page_bytes<true>(head_dim), head_dim, index % PAGE_ROWS, c, v + i - c);
    else store_kv<true>(values, to, index, c, head_dim, v[i]);
}

// Up to three tensors of heads, of queries, keys and values: what is done with each (norm, RoPE, append to the KV
// cache), and where its heads start among all heads of a row.
struct HeadJobs {
    const float *x[3], *weight[3];
    float *y[3];  // null: not stored
    int first[4]; // head that starts a job; the last one ends them
    int kind[3];  // bits: 1 norm, 2 RoPE, 4 becomes keys, 8 becomes values
    const float *frequencies;
    Batch batch;
    u8 *keys, *values;
    int head_dim, offset, pairs, group;
    float eps;
};
#define ROTATED_KINDS ((KEY_ROTATION ? 4 : 0) | (VALUE_ROTATION ? 8 : 0)) // whose groups of columns are rotated
// One head of a row.
struct HeadJob {
    const float *x, *weight; // the head, and the weight of its norm
    float *y;
    int kind, pairs; // pairs of columns that are rotated by position
    u64 page_of_head;
    u32 index, page; // row of the KV cache, and its page or NO_PAGE
    // Head number `all` of all jobs' heads.
    DEVICE HeadJob(const HeadJobs &a, int row, int all) {
        x = a.x[0];
        weight = a.weight[0];
        y = a.y[0];
        kind = a.kind[0];
        int first = 0, heads = a.first[1];
#pragma unroll
        for (int i = 1; i < 3; i++)
            if (all >= a.first[i]) {
                x = a.x[i];
                weight = a.weight[i];
                y = a.y[i];
                kind = a.kind[i];
                first = a.first[i];
                heads = a.first[i + 1] - first;
            }
        const u64 at = ((u64) row * heads + all - first) * a.head_dim;
        x += at;
        if (y) y += at;
        pairs = kind & 2 ? a.pairs : 0;
        index = a.batch.at(row);
        const bool is_stored = kind & 12 && index != NO_ROW;
        page = is_stored ? a.batch.table(a.batch.seq_of(row), a.group)[index / PAGE_ROWS] : NO_PAGE;
        page_of_head = (u64) page * heads + all - first;
    }
    // Loads the head into the registers of a warp, two neighboring columns of each 64 a lane, and applies the RMS norm
    // if the job has one.
    template <int TILES>
    DEVICE void load_normed(float2 (&v)[TILES], float eps) const {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < TILES; i++) v[i] = *(const float2 *) (x + i * 64 + 2 * lane);
        if (!(kind & 1)) return;
        const float inverse = inverse_rms_of_run(v, eps);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            v[i].x *= inverse;
            v[i].y *= inverse;
            if (!weight) continue;
            const float2 w = *(const float2 *) (weight + i * 64 + 2 * lane);
            v[i].x *= w.x;
            v[i].y *= w.y;
        }
    }
    // Stores column `c`; in groups that are rotated, to `turned` in shared memory, for `store_groups`.
    DEVICE void store(const HeadJobs &a, float *turned, int c, float v) const {
        if (y) y[c] = v;
        if (page == NO_PAGE) return;
        if (kind & ROTATED_KINDS) turned[c] = v;
        if constexpr (!KEY_ROTATION)
            if (kind & 4) store_kv<false>(a.keys, page_of_head, index, c, a.head_dim, v);
        if constexpr (!VALUE_ROTATION)
            if (kind & 8) store_kv<true>(a.values, page_of_head, index, c, a.head_dim, v);
    }
    // Whether `turn_and_store` takes the head: a query, or a key that is stored in tiles of 16 bits.
    DEVICE bool fits_registers() const { return !(kind & 8) && (!(kind & 4) || KvElement<false>::IS_TILE); }
    // Applies RoPE in registers and stores the head, with the bits of `RopeAngles::apply` and `store`. The columns of a
    // pair are E / 2 apart (`a.offset`), so that one lane has both.
    template <int TILES>
    DEVICE void turn_and_store(const HeadJobs &a, float2 (&v)[TILES], const float2 *angles) const {
        constexpr int E = 64 * TILES;
        const int lane = threadIdx.x & 31;
        auto turn = [&](int j, float &low, float &high) {
            if (j >= pairs) return;
            const float2 of = angles[j];
            const float before = low;
            low = fmaf(-high, of.x, low * of.y);
            high = fmaf(before, of.x, high * of.y);
        };
#pragma unroll
        for (int i = 0; i < TILES / 2; i++) {
            const int c = i * 64 + 2 * lane;
            turn(c, v[i].x, v[i + TILES / 2].x);
            turn(c + 1, v[i].y, v[i + TILES / 2].y);
        }
        if (y)
#pragma unroll
            for (int i = 0; i < TILES; i++) *(float2 *) (y + i * 64 + 2 * lane) = v[i];
        if (page == NO_PAGE) return;
        u8 *to = a.keys + page_of_head * kv_page_bytes<false>(E);
#pragma unroll
        for (int i = 0; i < TILES; i++)
            *(u32 *) (to + element_at<false>(E, index % PAGE_ROWS, i * 64 + 2 * lane)) =
                KvElement<false>::bits(v[i].x, v[i].y);
    }
    DEVICE bool has_groups() const { return kind & ROTATED_KINDS && page != NO_PAGE; }
    // Stores the groups that start at the warp's columns; `c` is the lane's.
    DEVICE void store_groups(const HeadJobs &a, const float *turned, int c) const {
        const int e = a.head_dim;
        if constexpr (KEY_ROTATION > 0)
            if (kind & 4)
                store_rotated<false>(a.keys + page_of_head * kv_page_bytes<false>(e), e, index % PAGE_ROWS, c, turned);
        if constexpr (VALUE_ROTATION > 0)
            if (kind & 8)
                store_rotated<true>(a.values + page_of_head * kv_page_bytes<true>(e), e, index % PAGE_ROWS, c, turned);
    }
};
// Norms, rotates and stores heads: `norm_rope`, `rms_norm` (row_norm.cu) and `kv_append` fused, with their bits.
// Block (row, head).
KERNEL __launch_bounds__(256) norm_rope_append(HeadJobs a) {
    extern __shared__ float head[];
    __shared__ RowPartials<1> partials;
    pdl_launch();
    const int row = blockIdx.x / a.first[3], e = a.head_dim;
    const HeadJob job(a, row, blockIdx.x % a.first[3]);
    const RowFragment w = load_optional_row(job.weight, e);
    RopeAngles angles;
    angles.compute(a.batch.position(row), a.frequencies, e, a.offset, job.pairs);
    pdl_wait();
    RowFragment k = load_row(job.x, e);
    if (job.kind & 1) rms_norm_row(k, e, a.eps, w, job.weight, partials);
    store_row(head, e, k);
    __syncthreads();
    // Groups of columns are of several warps, and go by way of shared memory.
    float *turned = head + e;
    angles.apply(head, e, a.offset, job.pairs, [&](int c, float v) { job.store(a, turned, c, v); });
    if (!job.has_groups()) return;
    __syncthreads();
    for (int c = threadIdx.x; c < e; c += blockDim.x) job.store_groups(a, turned, c);
}
#if HEAD_COLUMNS > 0 && HEAD_COLUMNS % 64 == 0
// Norms, rotates and stores the heads of many rows, with the bits of `norm_rope_append`. Block (row): it computes the
// row's sines and cosines once, and its warps take a head at a time, a lane two neighboring columns of each 64. Sums of
// squares are added in the order of `rms_norm_row`.
KERNEL __launch_bounds__(32 * HEAD_WARPS) norm_rope_append_rows(HeadJobs a) {
    constexpr int E = HEAD_COLUMNS, TILES = E / 64;
    extern __shared__ float smem[];
    pdl_launch();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = blockIdx.x;
    float2 *angles = (float2 *) smem; // sine and cosine of each pair
    float *head = smem + 2 * a.pairs + warp * (ROTATED_KINDS ? 2 * E : E), *turned = head + E;
    for (int j = threadIdx.x; j < a.pairs; j += blockDim.x)
        rope_sin_cos(a.batch.position(row), a.frequencies, a.pairs, j, angles[j].x, angles[j].y);
    __syncthreads();
    pdl_wait();
#pragma unroll 1
    for (int all = warp; all < a.first[3]; all += HEAD_WARPS) {
        const HeadJob job(a, row, all);
        float2 v[TILES];
        job.load_normed(v, a.eps);
        if constexpr (TILES % 2 == 0)
            if (job.fits_registers() && a.offset == E / 2) {
                job.turn_and_store(a, v, angles);
                continue;
            }
        __syncwarp(); // nobody reads the head before
#pragma unroll
        for (int i = 0; i < TILES; i++) *(float2 *) (head + i * 64 + 2 * lane) = v[i];
        __syncwarp();
#pragma unroll 2
        for (int c = lane; c < E; c += 32) {
            const bool second = RopeAngles::is_second(c, a.offset, job.pairs);
            float v = head[c];
            if (second || c < job.pairs) {
                const float2 of = angles[second ? c - a.offset : c];
                const float other = second ? head[c - a.offset] : -head[c + a.offset];
                v = fmaf(other, of.x, v * of.y);
            }
            job.store(a, turned, c, v); // by all lanes together
        }
        if (!job.has_groups()) continue;
        __syncwarp();
#pragma unroll 1
        for (int c = lane; c < E; c += 32) job.store_groups(a, turned, c);
    }
}
#if TENSOR_CORES && VALUE_FORMAT != 0 && VALUE_FORMAT < 3 && VALUE_ROTATION == 0
// Norms and stores values of 16 bits of many rows, with the bits of `norm_rope_append`; they are the only job. A warp
// takes one head of eight rows. If these are consecutive keys of one page from a multiple of eight on, a lane stores
// all eight keys of a column at once; otherwise they are stored row by row.
KERNEL __launch_bounds__(32 * HEAD_WARPS, HEAD_COLUMNS > 256 ? 1 : 2) norm_append_values(HeadJobs a) {
    constexpr int E = HEAD_COLUMNS, TILES = E / 64, ROWS = VALUE_ROWS;
    static_assert(ROWS == 8, "the keys of a 16-byte store");
    const int lane = threadIdx.x & 31, unit = blockIdx.x * HEAD_WARPS + (threadIdx.x >> 5), heads = a.first[1];
    const int rows = a.batch.rows(), base = unit / heads * ROWS, head = unit % heads;
    pdl_sync();
    if (base >= rows) return;
    auto load = [&](const HeadJob &job, float2(&v)[TILES]) {
        job.load_normed(v, a.eps);
        if (!job.y) return;
#pragma unroll
        for (int i = 0; i < TILES; i++) *(float2 *) (job.y + i * 64 + 2 * lane) = v[i];
    };
    // Where the lane's column `k` of key `key` lies in a page.
    auto at = [&](u32 key, int k) { return element_at<true>(E, key % PAGE_ROWS, k / 2 * 64 + 2 * lane + k % 2); };
    auto page_of = [&](const HeadJob &job) { return a.values + job.page_of_head * kv_page_bytes<true>(E); };
    const HeadJob first(a, base, head);
    const int own = base + min(lane, ROWS - 1);
    const bool follows =
        own < rows && a.batch.at(own) == first.index + (own - base) && a.batch.seq_of(own) == a.batch.seq_of(base);
    float2 v[TILES];
    if (first.page == NO_PAGE || first.index % ROWS || !__all_sync(~0u, follows)) {
#pragma unroll 1
        for (int row = base; row < min(base + ROWS, rows); row++) {
            const HeadJob job(a, row, head);
            load(job, v);
            if (job.page == NO_PAGE) continue;
#pragma unroll
            for (int k = 0; k < 2 * TILES; k++)
                KvElement<true>::store(page_of(job) + at(job.index, k), k % 2 ? v[k / 2].y : v[k / 2].x);
        }
        return;
    }
    u32 columns[2 * TILES][ROWS / 2]; // of two keys each
#pragma unroll
    for (int r = 0; r < ROWS; r += 2) {
        float2 next[TILES];
        load(HeadJob(a, base + r, head), v);
        load(HeadJob(a, base + r + 1, head), next);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            columns[2 * i][r / 2] = KvElement<true>::bits(v[i].x, next[i].x);
            columns[2 * i + 1][r / 2] = KvElement<true>::bits(v[i].y, next[i].y);
        }
    }
#pragma unroll
    for (int k = 0; k < 2 * TILES; k++)
        *(uint4 *) (page_of(first) + at(first.index, k)) =
            make_uint4(columns[k][0], columns[k][1], columns[k][2], columns[k][3]);
}
#endif
#endif
