// The gated delta rule between its projections. Memory of a slot, in floats:
//   state   [nv, dk, dv]            after the certain rows of the last step
//   history [taps - 1 + 16, C]      rows before the convolution: those that end
//                                   where `state` does, then the tentative ones
//   updates [16, nv, SHARES, 1 + dk + dv / SHARES]
//                                   what each tentative row did: decay, k, d
// The next step replays those that stayed: S = S decay + k d.

#define TENTATIVE 16

struct Delta {
    float *state, *history, *updates;
    Batch batch;
    int nk, nv, dk, dv, channels;
};

// Convolution with SiLU of every row, then the history moves on. A thread owns a
// channel of a sequence, so nobody reads what it overwrites.
__device__ __forceinline__ void convolve(const Delta &d, const float *qkv, const float *conv, float *mixed, const u32 *seq, int c) {
    const int C = d.channels;
    constexpr int past = TAPS - 1;
    float *history = d.history + (u64) seq[SEQ_SLOT] * (past + TENTATIVE) * C + c;
    const u32 kept = seq[SEQ_KEPT], rows = seq[SEQ_ROWS], certain = seq[SEQ_CERTAIN];
    const bool is_new = seq[SEQ_NEW];
    float taps[TAPS], window[past];
    for (int j = 0; j < TAPS; j++) taps[j] = conv[(u64) c * TAPS + j];
    for (int j = 0; j < past; j++) window[j] = is_new ? 0.0f : history[(u64) (kept + j) * C];
    // What the next step starts from: the rows before `certain` and those after.
    u32 next = 0;
    if (certain == 0)
        for (int j = 0; j < past; j++) history[(u64) next++ * C] = window[j];
    const float *x = qkv + (u64) seq[SEQ_START] * C + c;
    float *y = mixed + (u64) seq[SEQ_START] * C + c;
    for (u32 r = 0; r < rows; r++) {
        float now = x[(u64) r * C], sum = 0.0f;
#pragma unroll
        for (int j = 0; j < past; j++) sum = fmaf(taps[j], window[j], sum);
        sum = fmaf(taps[past], now, sum);
        y[(u64) r * C] = silu_(sum);
#pragma unroll
        for (int j = 0; j + 1 < past; j++) window[j] = window[j + 1];
        window[past - 1] = now;
        if (r + 1 == certain)
            for (int j = 0; j < past; j++) history[(u64) next++ * C] = window[j];
        else if (r >= certain)
            history[(u64) next++ * C] = now;
    }
}

// Block (i, sequence): the convolution of DK channels. Those of a query or a key,
// queries first, are then normalised in place, a warp a row; sums of squares: 32
// partial sums and a tree. The last block makes the gates: [n, nv, 2] decay and beta.
KERNEL __launch_bounds__(256) delta_conv(Delta d, const float *qkv, const float *conv, float *mixed, const float *b, const float *a, const float *decay, const float *bias, float *gates) {
    in_order();
    const int lane = threadIdx.x & 31, head = blockIdx.x, c = head * DK + threadIdx.x;
    const u32 *seq = d.batch.seq(blockIdx.y);
    const u32 start = seq[SEQ_START], rows = seq[SEQ_ROWS];
    if (threadIdx.x < DK && c < d.channels) convolve(d, qkv, conv, mixed, seq, c);
    if (head + 1 == gridDim.x)
        for (u32 i = threadIdx.x; i < rows * d.nv; i += blockDim.x) {
            const u64 at = (u64) start * d.nv + i;
            gates[2 * at] = exp_(decay[i % d.nv] * softplus_(a[at] + bias[i % d.nv]));
            gates[2 * at + 1] = sigmoid_(b[at]);
        }
    if (head >= 2 * d.nk) return;
    __syncthreads();
    for (u32 r = threadIdx.x >> 5; r < rows; r += blockDim.x >> 5) {
        float *x = mixed + (u64) (start + r) * d.channels + head * DK;
        float sum = 0.0f;
        for (int i = lane; i < DK; i += 32) sum = fmaf(x[i], x[i], sum);
        sum = warp_sum(sum);
        const float inverse = 1.0f / sqrtf(sum + 1e-6f), factor = head < d.nk ? 1.0f / sqrtf((float) DK) : 1.0f;
        for (int i = lane; i < DK; i += 32) x[i] = x[i] * inverse * factor;
    }
}

// The recurrence: block (value head and share of its columns, sequence), PARTS (4 or 8)
// threads a column, each with DK / PARTS of its rows in registers. Columns know nothing
// of each other; a share has updates of its own, or another block could write them before
// this one has read them. Sums over dk: a chain a thread, then a tree over neighbours.
// PARTS depends on the head's size alone.
#define WIDTH (DV / SHARES)
#define ROWS ((DK + PARTS - 1) / PARTS)
// Whether a thread's row `i` exists: all do where DK is a multiple of PARTS.
#define EXISTS(i) (ROWS * PARTS == DK || first + (i) < DK)
__device__ __forceinline__ float over_parts(float v) {
#pragma unroll
    for (int o = 1; o < PARTS; o *= 2) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
KERNEL __launch_bounds__(THREADS, 1024 / THREADS) delta_rule(Delta d, const float *mixed, const float *gates, float *y) {
    __shared__ float k[ROWS * PARTS], q[ROWS * PARTS];
    start_next();
    const int part = threadIdx.x % PARTS, own = threadIdx.x / PARTS, head = blockIdx.x / SHARES, share = blockIdx.x % SHARES, column = share * WIDTH + own;
    const bool mine = own < WIDTH;
    const int key_head = head / (d.nv / d.nk), each = 1 + DK + WIDTH, next = d.nv * SHARES * each;
    const u32 *seq = d.batch.seq(blockIdx.y);
    const u64 slot = seq[SEQ_SLOT];
    float *state = d.state + (slot * d.nv + head) * DK * DV;
    float *updates = d.updates + slot * TENTATIVE * next + blockIdx.x * each; // + row next
    float s[ROWS];
    const int first = part * ROWS;
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(state + share * DK * WIDTH), "n"(DK * WIDTH / 4 * 16) : "memory");
#endif
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        s[i] = mine && EXISTS(i) && !seq[SEQ_NEW] ? state[(u64) (first + i) * DV + column] : 0.0f;
#pragma unroll 1
    for (u32 r = 0; r < seq[SEQ_KEPT]; r++) {
        const float *u = updates + (u64) r * next;
        const float decay = u[0], dj = mine ? u[1 + DK + own] : 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; i++) s[i] = fmaf(EXISTS(i) ? u[1 + first + i] : 0.0f, dj, s[i] * decay);
    }
    __syncthreads(); // the updates are read before any is written
    auto save = [&]() {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (mine && EXISTS(i)) state[(u64) (first + i) * DV + column] = s[i];
    };
    const u32 rows = seq[SEQ_ROWS], certain = seq[SEQ_CERTAIN];
    if (certain == 0) save();
#pragma unroll 1
    for (u32 r = 0; r < rows; r++) {
        const u64 row = seq[SEQ_START] + r;
        const float *x = mixed + row * d.channels;
        __syncthreads();
        for (int i = threadIdx.x; i < ROWS * PARTS; i += THREADS) {
            q[i] = i < DK ? x[key_head * DK + i] : 0.0f;
            k[i] = i < DK ? x[(d.nk + key_head) * DK + i] : 0.0f;
        }
        const float decay = gates[2 * (row * d.nv + head)], beta = gates[2 * (row * d.nv + head) + 1];
        const float v = mine ? x[2 * d.nk * DK + head * DV + column] : 0.0f;
        __syncthreads();
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            s[i] *= decay;
            sum = fmaf(s[i], k[first + i], sum);
        }
        const float dj = (v - over_parts(sum)) * beta;
        float o = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            s[i] = fmaf(k[first + i], dj, s[i]);
            o = fmaf(s[i], q[first + i], o);
        }
        o = over_parts(o);
        if (mine && part == 0) y[(row * d.nv + head) * DV + column] = o;
        if (r + 1 == certain) save();
        if (r >= certain) {
            float *u = updates + (u64) (r - certain) * next;
            if (threadIdx.x == 0) u[0] = decay;
            for (int i = threadIdx.x; i < DK; i += THREADS) u[1 + i] = k[i];
            if (mine && part == 0) u[1 + DK + own] = dj;
        }
    }
}
