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

// The convolution of a channel of a sequence, with SiLU, which f(row, value) gets; where
// MOVES, the history moves on. Of all who read a channel's, one moves it afterwards.
template <bool MOVES, class F>
__device__ __forceinline__ void convolve(const Delta &d, const float *qkv, const float *conv, const u32 *seq, int c, F f) {
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
    if (MOVES && certain == 0)
        for (int j = 0; j < past; j++) history[(u64) next++ * C] = window[j];
    const float *x = qkv + (u64) seq[SEQ_START] * C + c;
    for (u32 r = 0; r < rows; r++) {
        float now = x[(u64) r * C], sum = 0.0f;
#pragma unroll
        for (int j = 0; j < past; j++) sum = fmaf(taps[j], window[j], sum);
        sum = fmaf(taps[past], now, sum);
        f(r, silu_(sum));
#pragma unroll
        for (int j = 0; j + 1 < past; j++) window[j] = window[j + 1];
        window[past - 1] = now;
        if (!MOVES) continue;
        if (r + 1 == certain)
            for (int j = 0; j < past; j++) history[(u64) next++ * C] = window[j];
        else if (r >= certain)
            history[(u64) next++ * C] = now;
    }
}
// A warp normalises a row's query or key.
__device__ __forceinline__ void normalise_key(float *x, bool query) {
    const int lane = threadIdx.x & 31;
    float sum = 0.0f;
    for (int i = lane; i < DK; i += 32) sum = fmaf(x[i], x[i], sum);
    sum = warp_sum(sum);
    const float inverse = 1.0f / sqrtf(sum + 1e-6f), factor = query ? 1.0f / sqrtf((float) DK) : 1.0f;
    for (int i = lane; i < DK; i += 32) x[i] = x[i] * inverse * factor;
}
__device__ __forceinline__ float decay_of(float decay, float a, float bias) { return exp_(decay * softplus_(a + bias)); }

// Block (i, sequence): the convolution of DK channels. Those of a query or a key,
// queries first, are then normalised in place, a warp a row; sums of squares: 32
// partial sums and a tree. The last block makes the gates: [n, nv, 2] decay and beta.
KERNEL __launch_bounds__(256) delta_conv(Delta d, const float *qkv, const float *conv, float *mixed, const float *b, const float *a, const float *decay, const float *bias, float *gates) {
    in_order();
    const int head = blockIdx.x, c = head * DK + threadIdx.x;
    const u32 *seq = d.batch.seq(blockIdx.y);
    const u32 start = seq[SEQ_START], rows = seq[SEQ_ROWS];
    if (threadIdx.x < DK && c < d.channels) convolve<true>(d, qkv, conv, seq, c, [&](u32 r, float v) { mixed[(u64) (start + r) * d.channels + c] = v; });
    if (head + 1 == gridDim.x)
        for (u32 i = threadIdx.x; i < rows * d.nv; i += blockDim.x) {
            const u64 at = (u64) start * d.nv + i;
            gates[2 * at] = decay_of(decay[i % d.nv], a[at], bias[i % d.nv]);
            gates[2 * at + 1] = sigmoid_(b[at]);
        }
    if (head >= 2 * d.nk) return;
    __syncthreads();
    for (u32 r = threadIdx.x >> 5; r < rows; r += blockDim.x >> 5) normalise_key(mixed + (u64) (start + r) * d.channels + head * DK, head < d.nk);
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
struct Row {
    const float *q, *k; // zeros after DK columns
    float v, decay, beta;
};
// What the thread has of its block's state.
__device__ __forceinline__ void load_state(const Delta &d, const u32 *seq, float (&s)[ROWS]) {
    const int first = threadIdx.x % PARTS * ROWS, own = threadIdx.x / PARTS, column = blockIdx.x % SHARES * WIDTH + own;
    const float *state = d.state + ((u64) seq[SEQ_SLOT] * d.nv + blockIdx.x / SHARES) * DK * DV;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        s[i] = own < WIDTH && EXISTS(i) && !seq[SEQ_NEW] ? state[(u64) (first + i) * DV + column] : 0.0f;
}
// The block's part of all rows; `row(r)` brings one of them, for the thread's column.
template <class F>
__device__ __forceinline__ void recur(const Delta &d, const u32 *seq, float *y, float (&s)[ROWS], F row) {
    const int part = threadIdx.x % PARTS, own = threadIdx.x / PARTS, head = blockIdx.x / SHARES, column = blockIdx.x % SHARES * WIDTH + own;
    const bool mine = own < WIDTH;
    const int each = 1 + DK + WIDTH, next = d.nv * SHARES * each;
    const u64 slot = seq[SEQ_SLOT];
    float *state = d.state + (slot * d.nv + head) * DK * DV;
    float *updates = d.updates + slot * TENTATIVE * next + blockIdx.x * each; // + row next
    const int first = part * ROWS;
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
        const Row x = row(r);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            s[i] *= x.decay;
            sum = fmaf(s[i], x.k[first + i], sum);
        }
        const float dj = (x.v - over_parts(sum)) * x.beta;
        float o = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            s[i] = fmaf(x.k[first + i], dj, s[i]);
            o = fmaf(s[i], x.q[first + i], o);
        }
        o = over_parts(o);
        if (mine && part == 0) y[((u64) (seq[SEQ_START] + r) * d.nv + head) * DV + column] = o;
        if (r + 1 == certain) save();
        if (r >= certain) {
            float *u = updates + (u64) (r - certain) * next;
            if (threadIdx.x == 0) u[0] = x.decay;
            for (int i = threadIdx.x; i < DK; i += THREADS) u[1 + i] = x.k[i];
            if (mine && part == 0) u[1 + DK + own] = dj;
        }
    }
}
__device__ __forceinline__ void ask_state(const Delta &d, const u32 *seq) {
#if __CUDA_ARCH__ >= 900
    const float *state = d.state + ((u64) seq[SEQ_SLOT] * d.nv + blockIdx.x / SHARES) * DK * DV;
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(state + blockIdx.x % SHARES * DK * WIDTH), "n"(DK * WIDTH / 4 * 16) : "memory");
#endif
}
KERNEL __launch_bounds__(THREADS, 1024 / THREADS) delta_rule(Delta d, const float *mixed, const float *gates, float *y) {
    __shared__ float k[ROWS * PARTS], q[ROWS * PARTS];
    start_next();
    const int own = threadIdx.x / PARTS, head = blockIdx.x / SHARES, key_head = head / (d.nv / d.nk);
    const u32 *seq = d.batch.seq(blockIdx.y);
    ask_state(d, seq);
    wait_for_previous();
    float s[ROWS];
    load_state(d, seq, s);
    recur(d, seq, y, s, [&](u32 r) {
        const u64 row = seq[SEQ_START] + r;
        const float *x = mixed + row * d.channels, *gate = gates + 2 * (row * d.nv + head);
        __syncthreads();
        for (int i = threadIdx.x; i < ROWS * PARTS; i += THREADS) {
            q[i] = i < DK ? x[key_head * DK + i] : 0.0f;
            k[i] = i < DK ? x[(d.nk + key_head) * DK + i] : 0.0f;
        }
        const Row made = {q, k, own < WIDTH ? x[2 * d.nk * DK + head * DV + blockIdx.x % SHARES * WIDTH + own] : 0.0f, gate[0], gate[1]};
        __syncthreads();
        return made;
    });
}

// Few rows: `delta_conv`, `delta_rule` and, where `gate` is not null, the norm of heads and
// gate = activation(gate) n in one, with their bits. A block makes what it reads of the
// convolution; those of a key head count themselves in `arrived`, and the last one moves its
// history on and does norms and gates.
struct Heads {
    const float *weight;
    float *n, *gate;
    Half h;
    float eps;
    int f;
};
#define OF_ROW (2 * ROWS * PARTS + WIDTH + 2) // query, key, values, decay and beta; as in src/delta.rs
KERNEL __launch_bounds__(THREADS, 1) delta_few(Delta d, const float *qkv, const float *conv, const float *b, const float *a, const float *decay, const float *bias, float *y, u32 *arrived, Heads end) {
    extern __shared__ float made[]; // [rows, OF_ROW]
    __shared__ float sums[THREADS / 32];
    start_next();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.x / SHARES, heads = d.nv / d.nk, key_head = head / heads, values = 2 * d.nk * DK;
    const u32 *seq = d.batch.seq(blockIdx.y);
    const u32 start = seq[SEQ_START], rows = seq[SEQ_ROWS];
    ask_state(d, seq);
    wait_for_previous();
    float s[ROWS];
    load_state(d, seq, s);
    for (int i = threadIdx.x; i < 2 * DK + WIDTH; i += THREADS) {
        const bool query = i < DK, value = i >= 2 * DK;
        const int c = value ? values + blockIdx.x * WIDTH + i - 2 * DK : query ? key_head * DK + i : (d.nk + key_head) * DK + i - DK;
        float *to = made + (value ? 2 * ROWS * PARTS + i - 2 * DK : query ? i : ROWS * PARTS + i - DK);
        auto put = [&](u32 r, float v) { to[r * OF_ROW] = v; };
        if (value) convolve<true>(d, qkv, conv, seq, c, put);
        else convolve<false>(d, qkv, conv, seq, c, put);
    }
    for (u32 r = threadIdx.x; r < rows; r += THREADS) {
        float *row = made + r * OF_ROW;
        const u64 at = (u64) (start + r) * d.nv + head;
        row[OF_ROW - 2] = decay_of(decay[head], a[at], bias[head]);
        row[OF_ROW - 1] = sigmoid_(b[at]);
        for (int i = DK; i < ROWS * PARTS; i++) row[i] = row[ROWS * PARTS + i] = 0.0f;
    }
    __syncthreads();
    for (u32 i = warp; i < 2 * rows; i += THREADS / 32) normalise_key(made + i / 2 * OF_ROW + i % 2 * ROWS * PARTS, i % 2 == 0);
    // recur waits for the block before it looks at any row.
    recur(d, seq, y, s, [&](u32 r) {
        const float *row = made + r * OF_ROW;
        const int own = threadIdx.x / PARTS;
        return Row{row, row + ROWS * PARTS, own < WIDTH ? row[2 * ROWS * PARTS + own] : 0.0f, row[OF_ROW - 2], row[OF_ROW - 1]};
    });
    if (!comes_last(arrived + blockIdx.y * d.nk + key_head, heads * SHARES)) return;
    for (int i = threadIdx.x; i < 2 * DK; i += THREADS) convolve<true>(d, qkv, conv, seq, i < DK ? key_head * DK + i : (d.nk + key_head) * DK + i - DK, [](u32, float) {});
#if DV % 64 == 0
    // A run of a row's head by half as many threads as it has columns, as in `norm_glu`.
    constexpr int SIDE = THREADS / (DV / 2);
    static_assert(SIDE * (DV / 2) == THREADS, "whole runs");
    const int side = threadIdx.x / (DV / 2), c = threadIdx.x % (DV / 2) * 2;
    if (!end.gate) return;
    for (u32 i = 0; i < rows * heads; i += SIDE) {
        const u32 run = i + side;
        const bool there = run < rows * heads;
        const u64 row = start + (there ? run : 0) / heads, own = (there ? run : 0) % heads + key_head * heads, at = (row * d.nv + own) * DV + c;
        float2 v = __ldcg((const float2 *) (y + at));
        const float2 w = *(const float2 *) (end.weight + c), g = *(const float2 *) (end.gate + at);
        const float sum = warp_sum(fmaf(v.y, v.y, fmaf(v.x, v.x, 0.0f)));
        __syncthreads(); // the sums before are used
        if (lane == 0) sums[warp] = sum;
        __syncthreads();
        const float all = warp_sum(lane < DV / 64 ? sums[side * (DV / 64) + lane] : 0.0f);
        if (!there) continue;
        const float inverse = 1.0f / sqrtf(all / (float) DV + end.eps);
        v.x = v.x * inverse * w.x;
        v.y = v.y * inverse * w.y;
        *(float2 *) (end.n + at) = v;
        v.x = activate(end.f, g.x) * v.x;
        v.y = activate(end.f, g.y) * v.y;
        *(float2 *) (end.gate + at) = v;
        put_half(end.h, row, (own * DV + c) / 64, v.x, v.y);
    }
#endif
}
