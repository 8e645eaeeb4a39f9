// Everything that looks at one row at a time: moves, elementwise functions,
// norms, rotary embedding, argmax.

// x[i] (op) y[i], in place. `n` values.
KERNEL add(float *x, const float *y, u64 n) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += y[i];
}
KERNEL scale(float *x, float factor, u64 n) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor;
}
KERNEL softcap(float *x, float cap, u64 n) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = cap * tanh_(x[i] / cap);
}
// Columns that a block of 256 threads takes of a row that many blocks share, and
// the largest value it found: [n, gridDim.x].
#define SHARE 1024
__device__ __forceinline__ void put_maximum(float *maxima, float max, float *shared) {
    max = block_max(max, shared);
    if (maxima && threadIdx.x == 0) maxima[(u64) blockIdx.y * gridDim.x + blockIdx.x] = max;
}
// y = activation(gate) * x, rows of either so many columns apart: block (share, row).
KERNEL __launch_bounds__(256) glu(const float *gate, const float *x, u64 gate_stride, u64 x_stride, float *y, float *maxima, int cols, int f) {
    __shared__ float shared[32];
    in_order();
    const u64 row = blockIdx.y;
    float max = 0.0f;
#pragma unroll
    for (int i = 0; i < SHARE / 256; i++) {
        const int c = blockIdx.x * SHARE + i * 256 + threadIdx.x;
        if (c < cols) {
            const float v = activate(f, gate[row * gate_stride + c]) * x[row * x_stride + c];
            y[row * cols + c] = v;
            max = larger(fabsf(v), max);
        }
    }
    put_maximum(maxima, max, shared);
}
// y = activation(gate[row]) * x
KERNEL gate_rows(const float *x, const float *gate, float *y, int cols, int f, u64 n) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * activate(f, gate[i / cols]);
}
// A tensor as products read it, in two steps: block (share, row).
KERNEL __launch_bounds__(256) maxima(const float *x, float *maxima, int cols) {
    __shared__ float shared[32];
    in_order();
    float max = 0.0f;
#pragma unroll
    for (int i = 0; i < SHARE / 256; i++) {
        const int c = blockIdx.x * SHARE + i * 256 + threadIdx.x;
        if (c < cols) max = larger(fabsf(x[(u64) blockIdx.y * cols + c]), max);
    }
    put_maximum(maxima, max, shared);
}
KERNEL __launch_bounds__(256) to_half(const float *x, const float *maxima, int cols, int parts, Half h) {
    __shared__ float shared[32];
    in_order();
    const u64 row = blockIdx.y;
    float max = 0.0f;
    for (int i = threadIdx.x; i < parts; i += 256) max = larger(maxima[row * parts + i], max);
    const float scale = row_scale(block_max(max, shared));
    if (blockIdx.x == 0 && threadIdx.x == 0) h.factor[row] = 1.0f / scale;
#pragma unroll
    for (int i = 0; i < SHARE / 256; i++) {
        const int c = blockIdx.x * SHARE + i * 256 + threadIdx.x;
        if (c < h.kp) put_half(h, row, c, c < cols ? x[row * cols + c] : 0.0f, scale);
    }
}

// x / sqrt(mean(x²) + eps) * weight over runs of `width`; a block a run. The sum
// of squares: a partial sum a thread over columns `threadIdx.x + i * blockDim.x`,
// then trees. `blockDim.x` depends on the width alone.
KERNEL __launch_bounds__(512) rms_norm(const float *x, const float *weight, float *y, int width, float eps, Half h) {
    __shared__ float shared[32];
    in_order();
    const u64 run = blockIdx.x;
    Kept k = keep(x + run * width, width);
    const float inverse = 1.0f / sqrtf(sum_squares(k, shared) / (float) width + eps);
    each_kept(width, [&](int i, int c) {
        k.v[i] *= inverse;
        if (weight) k.v[i] *= weight[c];
        y[run * width + c] = k.v[i];
    });
    if (h.kp) kept_half(h, run, k, shared);
}

// The same for wider runs, whose threads read their columns again.
KERNEL __launch_bounds__(512) rms_norm_wide(const float *x, const float *weight, float *y, int width, float eps) {
    __shared__ float shared[32];
    in_order();
    const u64 run = blockIdx.x;
    x += run * width;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) sum = fmaf(x[c], x[c], sum);
    const float inverse = 1.0f / sqrtf(block_sum(sum, shared) / (float) width + eps);
    for (int c = threadIdx.x; c < width; c += blockDim.x) y[run * width + c] = weight ? x[c] * inverse * weight[c] : x[c] * inverse;
}

// x = (x + rms(y) post) factor, and n = rms(x) next: a block a row. The bits of the
// kernels one after the other, whose threads keep the same columns.
KERNEL __launch_bounds__(512) add_norm(float *x, const float *y, const float *post, const float *next, float *n, int cols, float factor, float eps, Half h) {
    __shared__ float shared[32];
    in_order();
    const u64 row = blockIdx.x;
    Kept k = keep(y + row * cols, cols), r = keep(x + row * cols, cols);
    float inverse = 1.0f;
    if (post) inverse = 1.0f / sqrtf(sum_squares(k, shared) / (float) cols + eps);
    each_kept(cols, [&](int i, int c) {
        const float v = post ? k.v[i] * inverse * post[c] : k.v[i];
        r.v[i] = (r.v[i] + v) * factor;
        x[row * cols + c] = r.v[i];
    });
    inverse = 1.0f / sqrtf(sum_squares(r, shared) / (float) cols + eps);
    each_kept(cols, [&](int i, int c) {
        r.v[i] = r.v[i] * inverse * next[c];
        n[row * cols + c] = r.v[i];
    });
    kept_half(h, row, r, shared);
}

// rms_norm of one head, then rope: a block a head.
KERNEL __launch_bounds__(512) norm_rope(const float *x, const float *weight, float *y, const float *frequencies, Batch batch, int heads, int head_dim, int offset, int pairs, float eps) {
    extern __shared__ float head[];
    __shared__ float shared[32];
    in_order();
    const u64 at = (u64) blockIdx.x * head_dim;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < head_dim; c += blockDim.x) sum = fmaf(x[at + c], x[at + c], sum);
    const float inverse = 1.0f / sqrtf(block_sum(sum, shared) / (float) head_dim + eps);
    for (int c = threadIdx.x; c < head_dim; c += blockDim.x) head[c] = x[at + c] * inverse * weight[c];
    __syncthreads();
    const float position = (float) batch.position(blockIdx.x / heads);
    for (int c = threadIdx.x; c < head_dim; c += blockDim.x) {
        float v = head[c];
        const bool second = c >= offset && c < offset + pairs;
        if (c < pairs || second) {
            const int j = second ? c - offset : c;
            float sin, cos;
            sin_cos(position * frequencies[j], sin, cos);
            const float a = head[j], b = head[j + offset];
            v = second ? fmaf(a, sin, b * cos) : fmaf(-b, sin, a * cos);
        }
        y[at + c] = v;
    }
}

// Rows `rows[i]` of x.
KERNEL gather(const float *x, const u32 *rows, float *y, int cols, u64 n) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[(u64) rows[i / cols] * cols + i % cols];
}
// Columns first .. first + cols.
KERNEL columns(const float *x, float *y, int from, int first, int cols, u64 n) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i / cols * from + first + i % cols];
}
KERNEL concat(const float *a, const float *b, float *y, int ca, int cb, u64 n) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u64 row = i / (ca + cb);
    int c = (int) (i % (ca + cb));
    y[i] = c < ca ? a[row * ca + c] : b[row * cb + c - ca];
}

// Turns the first `pairs` pairs of every head, in place: a thread a pair.
KERNEL rope(float *x, const float *frequencies, Batch batch, int cols, int head_dim, int offset, int pairs, u64 n) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int heads = cols / head_dim, j = (int) (i % pairs);
    u64 row = i / pairs / heads;
    float *head = x + row * cols + (i / pairs % heads) * head_dim;
    float sin, cos;
    sin_cos((float) batch.position((u32) row) * frequencies[j], sin, cos);
    float a = head[j], b = head[j + offset];
    head[j] = fmaf(-b, sin, a * cos);
    head[j + offset] = fmaf(a, sin, b * cos);
}

// The column of each row's largest value, the lowest of equal ones; column 0 if
// that holds no number. Two stages: `parts` blocks a row, then one.
__device__ __forceinline__ void better(float &v, u32 &at, float w, u32 wat) {
    if (w > v || (w == v && wat < at)) { v = w; at = wat; }
}
__device__ __forceinline__ void block_best(float &v, u32 &at, float *vs, u32 *ats) {
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        float w = __shfl_xor_sync(~0u, v, o);
        u32 wat = __shfl_xor_sync(~0u, at, o);
        better(v, at, w, wat);
    }
    if ((threadIdx.x & 31) == 0) { vs[threadIdx.x >> 5] = v; ats[threadIdx.x >> 5] = at; }
    __syncthreads();
    if (threadIdx.x == 0)
        for (int i = 1; i < (int) (blockDim.x >> 5); i++) better(v, at, vs[i], ats[i]);
}
KERNEL __launch_bounds__(256) argmax_parts(const float *x, float *values, u32 *places, int cols) {
    __shared__ float vs[8];
    __shared__ u32 ats[8];
    in_order();
    u64 row = blockIdx.y;
    float v = -INFINITE;
    u32 at = 0xffffffffu;
    for (int c = blockIdx.x * 256 + threadIdx.x; c < cols; c += gridDim.x * 256) {
        float w = x[row * cols + c];
        if (w == w) better(v, at, w, c);
    }
    block_best(v, at, vs, ats);
    if (threadIdx.x == 0) { values[row * gridDim.x + blockIdx.x] = v; places[row * gridDim.x + blockIdx.x] = at; }
}
KERNEL __launch_bounds__(256) argmax(const float *x, const float *values, const u32 *places, u32 *best, int cols, int parts) {
    __shared__ float vs[8];
    __shared__ u32 ats[8];
    in_order();
    u64 row = blockIdx.x;
    float v = -INFINITE;
    u32 at = 0xffffffffu;
    for (int c = threadIdx.x; c < parts; c += 256) better(v, at, values[row * parts + c], places[row * parts + c]);
    block_best(v, at, vs, ats);
    float first = x[row * cols];
    if (threadIdx.x == 0) best[row] = first == first && at < (u32) cols ? at : 0;
}

// Reads `n` times 16 bytes as fast as it can, for measurements.
KERNEL __launch_bounds__(512) read_all(const uint4 *p, u64 n, u32 *out) {
    in_order();
    u32 s = 0;
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x, step = (u64) gridDim.x * blockDim.x;
    for (; i + 7 * step < n; i += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w) : "l"(p + i + j * step));
#pragma unroll
        for (int j = 0; j < 8; j++) s ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < n; i += step) s ^= p[i].x;
    if (s == 0x12345678) *out = s;
}
