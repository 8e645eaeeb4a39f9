// Writes keys and values to the paged KV cache, alone or fused with the norms and the rotary embedding of heads.
// rows.cuh and attention.cuh, which says how pages lie, go before this.
//
//   q, k, v of a row and head --> RowFragment: RMS norm --> shared: head --> RoPE --> y, or a row of a page

// Stores column `c` of the key or value of cache row `index` in its page of a head. With tiles, a warp has the 32
// columns of one.
template <bool VALUE>
DEVICE void store_kv(u8 *pages, u64 page_of_head, u32 index, int c, int head_dim, float v) {
#if TENSOR_CORES
    const int key = index % 32, column = c % 32, half = index % PAGE_ROWS / 32, row = VALUE ? column : key,
              i = VALUE ? key : column;
    u8 *tile = pages + page_of_head * KV_PAGE_BYTES +
               (VALUE ? half * (HEAD_DIM / 32) + c / 32 : c / 32 * 2 + half) * KV_TILE_BYTES;
#if KV_FORMAT == 3
    // As quant::gguf writes a block; the largest scale whose codes all stay finite is 515.5.
    v = fminf(fmaxf(v, -127.0f * 515.5f), 127.0f * 515.5f);
    const float d = warp_max(fabsf(v)) / 127.0f, inverse = d == 0.0f ? 0.0f : 1.0f / d;
    tile[row * 32 + interleave_index(i)] = (u8) (int) roundf(v * inverse);
    if (column == 0) ((u16 *) (tile + 1024))[VALUE ? interleave_index(key) : key] = f32_to_f16(d);
#else
    ((KvElement *) tile)[row / 8 * 256 + i / 8 * 64 + row % 8 * 8 + i % 8] = to_kv(v);
#endif
#else
    ((KvElement *) pages)[(page_of_head * PAGE_ROWS + index % PAGE_ROWS) * head_dim + c] = to_kv(v);
#endif
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
    store_kv<false>(keys, (u64) page * heads + head, index, c, head_dim, k[i]);
    store_kv<true>(values, (u64) page * heads + head, index, c, head_dim, v[i]);
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
    angles.apply(head, e, a.offset, kind & 2 ? a.pairs : 0, [&](int c, float v) {
        if (y) y[at + c] = v;
        if (page == NO_PAGE) return;
        if (kind & 4) store_kv<false>(a.keys, to, index, c, e, v);
        if (kind & 8) store_kv<true>(a.values, to, index, c, e, v);
    });
}
