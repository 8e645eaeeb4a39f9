// Kernels that look at one row, or one value, at a time: moves, elementwise functions, norms of rows of any width,
// rotary embedding, argmax. common.cuh, math.cuh, mbarrier.cuh and rows.cuh go before this.
//
//   global --> registers (a thread a value, or a block a row) --> y in f32
//                                                             +-> Activations (f16), if the next op is a matrix product

// x[i] (op) y[i], in place. `n` values.
KERNEL add(float *x, const float *y, u64 n) {
    pdl_sync();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += y[i];
}
KERNEL scale(float *x, float factor, u64 n) {
    pdl_sync();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor;
}
KERNEL softcap(float *x, float cap, u64 n) {
    pdl_sync();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    // Of what is not finite x * 0 is NaN, which tanh is not.
    if (i < n) x[i] = cap * tanh_(x[i] / cap) + x[i] * 0.0f;
}
KERNEL activate_all(float *x, int f, u64 n) {
    pdl_sync();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = activate(f, x[i]);
}
// NaN stays.
KERNEL clamp(float *x, float low, float high, u64 n) {
    pdl_sync();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = x[i] < low ? low : x[i] > high ? high : x[i];
}
// x = x factor + shift, by column; without a factor if that is null.
KERNEL affine(float *x, const float *factor, const float *shift, int cols, u64 n) {
    pdl_sync();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int c = (int) (i % cols);
    x[i] = factor ? fmaf(x[i], factor[c], shift[c]) : x[i] + shift[c];
}
// Gated linear unit: block (row, chunk), for there can be more rows, pairs of a row and an expert, than a grid is high.
KERNEL __launch_bounds__(256) glu(GluArgs a) {
    pdl_sync();
    glu_chunk(a, blockIdx.y, blockIdx.x);
}
// Gated linear unit of many rows, with the bits of `glu`: a warp takes GLU_TILES tiles, one after the other in the
// order of rows and columns, and loads its pairs of all of them before it computes any, so that more loads are on their
// way.
KERNEL __launch_bounds__(256, 4) glu_rows(GluArgs a, u32 rows) {
    pdl_sync();
    const u32 tiles = (a.cols + 63) / 64, warp = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    const u32 first = warp * GLU_TILES, count = min(rows * tiles - min(first, rows * tiles), GLU_TILES);
    // Calls f(i, row, tile) for the warp's tiles.
    auto for_each_tile = [&](auto f) {
        u32 row = first / tiles, tile = first % tiles;
#pragma unroll
        for (int i = 0; i < GLU_TILES; i++) {
            if (i < count) f(i, (u64) row, (int) tile);
            if (++tile == tiles) tile = 0, row++;
        }
    };
    if (!are_glu_pairs(a)) {
#pragma unroll 1
        for (u32 i = 0; i < count; i++) glu_tile(a, (first + i) / tiles, (first + i) % tiles);
        return;
    }
    float2 gates[GLU_TILES], own[GLU_TILES];
    for_each_tile([&](int i, u64 row, int tile) {
        gates[i] = own[i] = make_float2(0.0f, 0.0f);
        const int c = tile * 64 + 2 * (threadIdx.x & 31);
        if (c >= a.cols) return;
        gates[i] = *(const float2 *) (a.gate + row * a.gate_stride + c);
        own[i] = *(const float2 *) (a.x + row * a.x_stride + c);
    });
    for_each_tile([&](int i, u64 row, int tile) {
        const int c = tile * 64 + 2 * (threadIdx.x & 31);
        const float2 v =
            make_float2(activate(a.activation, gates[i].x) * own[i].x, activate(a.activation, gates[i].y) * own[i].y);
        if (c < a.cols) {
            if (a.y) *(float2 *) (a.y + row * a.cols + c) = v;
            if (a.copy) *(float2 *) (a.copy + row * a.cols + c) = own[i];
        }
        store_activation_tile(a.f16, row, tile, v.x, v.y);
    });
}
// y = activation(gate[row]) * x
KERNEL gate_rows(const float *x, const float *gate, float *y, int cols, int f, u64 n) {
    pdl_sync();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * activate(f, gate[i / cols]);
}
// Converts a tensor to f16 for matrix products: block (row, chunk).
KERNEL __launch_bounds__(256) to_activations(const float *x, int cols, Activations h) {
    pdl_sync();
    const u64 row = blockIdx.x;
    for_pair_of_chunk(blockIdx.y, cols, [&](int c) {
        store_activation_tile(h, row, c / 64, c < cols ? x[row * cols + c] : 0.0f,
                              c + 1 < cols ? x[row * cols + c + 1] : 0.0f);
    });
}
// x as Activations of products with weights whose columns were rotated: each 32 columns are rotated, too. Block (row,
// chunk).
KERNEL __launch_bounds__(256) rotate_to_activations(const float *x, int cols, Activations h) {
    pdl_sync();
    const u64 row = blockIdx.x;
    for_pair_of_chunk(blockIdx.y, cols, [&](int c) {
        float v0 = c < cols ? x[row * cols + c] : 0.0f, v1 = c + 1 < cols ? x[row * cols + c + 1] : 0.0f;
        rotate_tile(v0, v1);
        store_activation_tile(h, row, c / 64, v0, v1);
    });
}

// rms_norm of runs too wide for a RowFragment: threads read their columns again.
KERNEL __launch_bounds__(512) rms_norm_wide(const float *x, const float *weight, float *y, int width, float eps) {
    __shared__ RowPartials<1> partials;
    pdl_sync();
    const u64 run = blockIdx.x;
    x += run * width;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) sum = fmaf(x[c], x[c], sum);
    const float inverse = inverse_rms(row_sum(sum, partials), width, eps);
    for (int c = threadIdx.x; c < width; c += blockDim.x)
        y[run * width + c] = weight ? x[c] * inverse * weight[c] : x[c] * inverse;
}

// (x - mean) / sqrt(variance + eps) * weight + bias; a block a row, whose threads read their columns three times. Each
// sum is one partial sum a thread over its columns, ascending, then trees.
KERNEL __launch_bounds__(256)
    layer_norm(const float *x, const float *weight, const float *bias, float *y, int cols, float eps) {
    __shared__ RowPartials<1> partials[2];
    pdl_sync();
    const u64 row = blockIdx.x;
    x += row * cols;
    float sum = 0.0f, squares = 0.0f;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) sum += x[c];
    const float mean = row_sum(sum, partials[0]) / (float) cols;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) {
        const float d = x[c] - mean;
        squares = fmaf(d, d, squares);
    }
    const float inverse = inverse_rms(row_sum(squares, partials[1]), cols, eps);
    for (int c = threadIdx.x; c < cols; c += blockDim.x)
        y[row * cols + c] = fmaf((x[c] - mean) * inverse, weight[c], bias[c]);
}

// Attention of a row to itself and the `window - 1` rows right before it: a warp (head, row), 32 rows at most. A lane
// has every 32nd column of the products q (k + r), ascending, and then the score of one key.
KERNEL __launch_bounds__(32) attend_near(const float *q, const float *k, const float *v, const float *relative,
                                         float *y, int heads, int head_dim, int window, float cap) {
    pdl_sync();
    const int lane = threadIdx.x, head = blockIdx.x, row = blockIdx.y;
    const u64 cols = (u64) heads * head_dim;
    const int first = row + 1 > window ? row + 1 - window : 0, seen = row + 1 - first;
    q += row * cols + head * head_dim;
    k += head * head_dim;
    v += head * head_dim;
    relative += head * head_dim;
    float score = -INF;
#pragma unroll 1
    for (int j = 0; j < seen; j++) {
        const float *key = k + (first + j) * cols, *distance = relative + (row - first - j) * cols;
        float sum = 0.0f;
#pragma unroll 2
        for (int c = lane; c < head_dim; c += 32) sum = fmaf(q[c], key[c] + distance[c], sum);
        sum = warp_sum(sum);
        if (lane == j) score = cap * tanh_(sum / cap);
    }
    const float max = warp_max(score);
    const float p = lane < seen ? exp_(score - max) : 0.0f;
    const float sum = warp_sum(p);
#pragma unroll 1
    for (int c = lane; c - lane < head_dim; c += 32) {
        float o = 0.0f;
#pragma unroll 2
        for (int j = 0; j < seen; j++) {
            const float weight = __shfl_sync(~0u, p, j);
            if (c < head_dim) o = fmaf(weight, v[(first + j) * cols + c], o);
        }
        if (c < head_dim) y[row * cols + head * head_dim + c] = o / sum;
    }
}

// rms_norm of one head, then RoPE: a block a head.
KERNEL __launch_bounds__(256) norm_rope(const float *x, const float *weight, float *y, const float *frequencies,
                                        Batch batch, int heads, int head_dim, int offset, int pairs, float eps) {
    extern __shared__ float head[];
    __shared__ RowPartials<1> partials;
    pdl_launch();
    const u64 at = (u64) blockIdx.x * head_dim;
    const RowFragment w = load_row(weight, head_dim);
    RopeAngles angles;
    angles.compute(batch.position(blockIdx.x / heads), frequencies, head_dim, offset, pairs);
    pdl_wait();
    RowFragment k = load_row(x + at, head_dim);
    rms_norm_row(k, head_dim, eps, w, true, partials);
    store_row(head, head_dim, k);
    __syncthreads();
    angles.apply(head, head_dim, offset, pairs, [&](int c, float v) { y[at + c] = v; });
}

// Rows `rows[i]` of x.
KERNEL gather(const float *x, const u32 *rows, float *y, int cols, u64 n) {
    pdl_sync();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[(u64) rows[i / cols] * cols + i % cols];
}
// Rows of x become rows of y: `pairs` has, for each, the row of x and that of y.
KERNEL replace_rows(float *x, const float *y, const u32 *pairs, int cols, u64 n) {
    pdl_sync();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const u32 *pair = pairs + 2 * (i / cols);
    x[(u64) pair[0] * cols + i % cols] = y[(u64) pair[1] * cols + i % cols];
}
// A tensor of the `cols` columns from x on; rows of x are `from` columns apart.
KERNEL columns(const float *x, float *y, int from, int cols, u64 n) {
    pdl_sync();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i / cols * from + i % cols];
}
KERNEL concat(const float *a, const float *b, float *y, int a_cols, int b_cols, u64 n) {
    pdl_sync();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u64 row = i / (a_cols + b_cols);
    int c = (int) (i % (a_cols + b_cols));
    y[i] = c < a_cols ? a[row * a_cols + c] : b[row * b_cols + c - a_cols];
}

// RoPE of the first `pairs` pairs of every head, in place: a thread a pair.
KERNEL rope(float *x, const float *frequencies, Batch batch, int cols, int head_dim, int offset, int pairs, u64 n) {
    pdl_sync();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int heads = cols / head_dim, j = (int) (i % pairs);
    u64 row = i / pairs / heads;
    float *head = x + row * cols + (i / pairs % heads) * head_dim;
    float sin, cos;
    rope_sin_cos(batch.position((u32) row), frequencies, pairs, j, sin, cos);
    float a = head[j], b = head[j + offset];
    head[j] = fmaf(-b, sin, a * cos);
    head[j + offset] = fmaf(a, sin, b * cos);
}

// The column of each row's largest value, the lowest of equal ones; all ones if a value is NaN or the largest is not
// finite. Two stages: `parts` blocks a row, then one.
DEVICE void better(float &v, u32 &at, float w, u32 wat) {
    if (w > v || (w == v && wat < at)) {
        v = w;
        at = wat;
    }
}
DEVICE void block_best(float &v, u32 &at, float *vs, u32 *ats) {
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        float w = __shfl_xor_sync(~0u, v, o);
        u32 wat = __shfl_xor_sync(~0u, at, o);
        better(v, at, w, wat);
    }
    if ((threadIdx.x & 31) == 0) {
        vs[threadIdx.x >> 5] = v;
        ats[threadIdx.x >> 5] = at;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        for (int i = 1; i < (int) (blockDim.x >> 5); i++) better(v, at, vs[i], ats[i]);
}
KERNEL __launch_bounds__(256) argmax_parts(const float *x, float *values, u32 *places, int cols) {
    __shared__ float vs[8];
    __shared__ u32 ats[8];
    pdl_sync();
    u64 row = blockIdx.y;
    float v = -INF;
    u32 at = 0xffffffffu;
    for (int c = blockIdx.x * 256 + threadIdx.x; c < cols; c += gridDim.x * 256) {
        float w = x[row * cols + c];
        // NaN passes for the largest, which is not finite either.
        better(v, at, w == w ? w : INF, c);
    }
    block_best(v, at, vs, ats);
    if (threadIdx.x == 0) {
        values[row * gridDim.x + blockIdx.x] = v;
        places[row * gridDim.x + blockIdx.x] = at;
    }
}
KERNEL __launch_bounds__(256) argmax(const float *values, const u32 *places, const u32 *names, u32 *best, int parts) {
    __shared__ float vs[8];
    __shared__ u32 ats[8];
    pdl_sync();
    u64 row = blockIdx.x;
    float v = -INF;
    u32 at = 0xffffffffu;
    for (int c = threadIdx.x; c < parts; c += 256) better(v, at, values[row * parts + c], places[row * parts + c]);
    block_best(v, at, vs, ats);
    if (threadIdx.x) return;
    best[row] = !(fabsf(v) < INF) ? ~0u : names ? names[at] : at;
}

// Reads `n` times 16 bytes as fast as it can, for measurements.
KERNEL __launch_bounds__(512) read_all(const uint4 *p, u64 n, u32 *out) {
    pdl_sync();
    u32 s = 0;
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x, step = (u64) gridDim.x * blockDim.x;
    for (; i + 7 * step < n; i += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                         : "l"(p + i + j * step));
#pragma unroll
        for (int j = 0; j < 8; j++) s ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < n; i += step) s ^= p[i].x;
    if (s == 0x12345678) *out = s;
}
