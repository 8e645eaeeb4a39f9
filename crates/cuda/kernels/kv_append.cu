// Writes keys and values to the paged KV cache, alone or fused with the norms and the rotary embedding of heads.
// rows.cuh, hadamard.cuh, kv_format.cuh and attention.cuh, which says how pages lie, go before this.
//
//   q, k, v of a row and head --> RowFragment: RMS norm --> shared: head --> RoPE --> y
//                        elements, and codes of 32 columns: from registers <-+   +-> shared --> a group of columns
//                                                       a row of a page <----+------ rotation, codes or levels <-+

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
        const int row = VALUE ? c % 32 : key % 32, i = VALUE ? key % 32 : c % 32;
        u8 *tile = page + F::tile_at(e, c / 32, key / 32);
        KvElement<VALUE>::store(tile + 2 * (row / 8 * 256 + i / 8 * 64 + row % 8 * 8 + i % 8), v);
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

// `norm_rope` and `rms_norm` of elementwise.cu and `kv_append` fused, for heads that do not depend on each other. Block
// (row, head), jobs one after the other.
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
KERNEL __launch_bounds__(256) norm_rope_append(HeadJobs a) {
    extern __shared__ float head[];
    __shared__ float partials[32];
    pdl_launch();
    const int row = blockIdx.x / a.first[3], all = blockIdx.x % a.first[3], e = a.head_dim;
    const float *x = a.x[0], *weight = a.weight[0];
    float *y = a.y[0];
    int kind = a.kind[0], first = 0, heads = a.first[1];
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
    const u64 at = ((u64) row * heads + all - first) * e;
    const RowFragment w = load_optional_row(weight, e);
    RopeAngles angles;
    angles.compute(a.batch.position(row), a.frequencies, e, a.offset, kind & 2 ? a.pairs : 0);
    const u32 index = a.batch.at(row);
    const bool is_stored = kind & 12 && index != NO_ROW;
    const u32 page = is_stored ? a.batch.table(a.batch.seq_of(row), a.group)[index / PAGE_ROWS] : NO_PAGE;
    pdl_wait();
    RowFragment k = load_row(x + at, e);
    if (kind & 1) rms_norm_row(k, e, a.eps, w, weight, partials);
    store_row(head, e, k);
    __syncthreads();
    const u64 to = (u64) page * heads + all - first;
    // Groups of columns are of several warps, and go by way of shared memory.
    constexpr int ROTATED = (KEY_ROTATION ? 4 : 0) | (VALUE_ROTATION ? 8 : 0);
    float *turned = head + e;
    angles.apply(head, e, a.offset, kind & 2 ? a.pairs : 0, [&](int c, float v) {
        if (y) y[at + c] = v;
        if (page == NO_PAGE) return;
        if (kind & ROTATED) turned[c] = v;
        if constexpr (!KEY_ROTATION)
            if (kind & 4) store_kv<false>(a.keys, to, index, c, e, v);
        if constexpr (!VALUE_ROTATION)
            if (kind & 8) store_kv<true>(a.values, to, index, c, e, v);
    });
    if (!(kind & ROTATED) || page == NO_PAGE) return;
    __syncthreads();
    for (int c = threadIdx.x; c < e; c += blockDim.x) {
        if constexpr (KEY_ROTATION > 0)
            if (kind & 4) store_rotated<false>(a.keys + to * kv_page_bytes<false>(e), e, index % PAGE_ROWS, c, turned);
        if constexpr (VALUE_ROTATION > 0)
            if (kind & 8) store_rotated<true>(a.values + to * kv_page_bytes<true>(e), e, index % PAGE_ROWS, c, turned);
    }
}
