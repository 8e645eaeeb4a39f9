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
// A gate: block (share, row).
KERNEL __launch_bounds__(256) glu(Glu a) {
    in_order();
    glu_share(a, blockIdx.x, blockIdx.y);
}
// y = activation(gate[row]) * x
KERNEL gate_rows(const float *x, const float *gate, float *y, int cols, int f, u64 n) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * activate(f, gate[i / cols]);
}
// A tensor as products read it: block (share, row).
KERNEL __launch_bounds__(256) to_half(const float *x, int cols, Half h) {
    in_order();
    const u64 row = blockIdx.y;
    in_share(blockIdx.x, cols, [&](int c) {
        put_half(h, row, c / 64, c < cols ? x[row * cols + c] : 0.0f, c + 1 < cols ? x[row * cols + c + 1] : 0.0f);
    });
}

// x / sqrt(mean(x²) + eps) * weight over runs of `width`; a block a run.
KERNEL __launch_bounds__(1024, 1) rms_norm(const float *x, const float *weight, float *y, int width, float eps, Half h) {
    __shared__ float shared[32];
    start_next();
    const u64 run = blockIdx.x;
    const Kept w = PARAMETER(weight, width);
    wait_for_previous();
    Kept k = keep(x + run * width, width);
    normalise(k, width, eps, w, weight, shared);
    put(y + run * width, width, k);
    if (h.kp) kept_half(h, run, k);
}

// n = rms_norm(x) and gate = activation(gate) n, with runs of whole tiles: a block a run.
KERNEL __launch_bounds__(1024, 1) norm_glu(const float *x, const float *weight, float *n, float *gate, int width, float eps, int f, Half h) {
    __shared__ float shared[32];
    start_next();
    const u64 run = blockIdx.x;
    const int runs = h.kp / width;
    const Kept w = PARAMETER(weight, width);
    wait_for_previous();
    Kept k = keep(x + run * width, width), g = keep(gate + run * width, width);
    normalise(k, width, eps, w, weight, shared);
    put(n + run * width, width, k);
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        k.v[i].x = activate(f, g.v[i].x) * k.v[i].x;
        k.v[i].y = activate(f, g.v[i].y) * k.v[i].y;
    }
    put(gate + run * width, width, k);
    each_kept([&](int i, int c) {
        if (c < width) put_half(h, run / runs, (run % runs * width + c) / 64, k.v[i].x, k.v[i].y);
    });
}

// rms_norm of wider runs, whose threads read their columns again.
KERNEL __launch_bounds__(512) rms_norm_wide(const float *x, const float *weight, float *y, int width, float eps) {
    __shared__ float shared[32];
    in_order();
    const u64 run = blockIdx.x;
    x += run * width;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) sum = fmaf(x[c], x[c], sum);
    const float inverse = inverse_rms(row_sum(sum, shared), width, eps);
    for (int c = threadIdx.x; c < width; c += blockDim.x) y[run * width + c] = weight ? x[c] * inverse * weight[c] : x[c] * inverse;
}

// x = (from + rms(y) post) factor, and what is made of it: a block a row, or a cluster. The
// bits of the kernels one after the other, whose threads keep the same columns.
KERNEL __launch_bounds__(1024, 1) add_norm(const float *from, float *x, const float *y, const float *post, int cols, float factor, float eps, Next next) {
    __shared__ float shared[2][32];
    start_next();
    const u64 row = blockIdx.x / blocks_of_row();
    if (blocks_of_row() > 1) meet_in_row(); // so all have started
    const Kept p = PARAMETER(post, cols), w = PARAMETER(next.weight[0], cols);
    ask_next(next, 1, cols);
    wait_for_previous();
    Kept k = keep(y + row * cols, cols), r = keep(from + row * cols, cols);
    if (post) normalise(k, cols, eps, p, true, shared[0]);
    add_kept(r, k, factor);
    put(x + row * cols, cols, r);
    put_next(next, row, cols, r, w, eps, shared[1]);
}

// rms_norm of one head, then rope: a block a head.
KERNEL __launch_bounds__(256) norm_rope(const float *x, const float *weight, float *y, const float *frequencies, Batch batch, int heads, int head_dim, int offset, int pairs, float eps) {
    extern __shared__ float head[];
    __shared__ float shared[32];
    start_next();
    const u64 at = (u64) blockIdx.x * head_dim;
    const Kept w = keep(weight, head_dim);
    Angles turn;
    turn.find((float) batch.position(blockIdx.x / heads), frequencies, head_dim, offset, pairs);
    wait_for_previous();
    Kept k = keep(x + at, head_dim);
    normalise(k, head_dim, eps, w, true, shared);
    put(head, head_dim, k);
    __syncthreads();
    turn.each(head, head_dim, offset, pairs, [&](int c, float v) { y[at + c] = v; });
}

// Rows `rows[i]` of x.
KERNEL gather(const float *x, const u32 *rows, float *y, int cols, u64 n) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[(u64) rows[i / cols] * cols + i % cols];
}
// `cols` columns from x on, whose rows have `from`.
KERNEL columns(const float *x, float *y, int from, int cols, u64 n) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i / cols * from + i % cols];
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
KERNEL __launch_bounds__(256) argmax(const float *x, const float *values, const u32 *places, const u32 *names, u32 *best, int cols, int parts) {
    __shared__ float vs[8];
    __shared__ u32 ats[8];
    in_order();
    u64 row = blockIdx.x;
    float v = -INFINITE;
    u32 at = 0xffffffffu;
    for (int c = threadIdx.x; c < parts; c += 256) better(v, at, values[row * parts + c], places[row * parts + c]);
    block_best(v, at, vs, ats);
    float first = x[row * cols];
    if (threadIdx.x) return;
    at = first == first && at < (u32) cols ? at : 0;
    best[row] = names ? names[at] : at;
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
