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

// A channel's convolution with SiLU: f(row, value) for a sequence's rows from..to. What it
// reads is asked for AT_ONCE rows at a time, and the first when it is made.
#define AT_ONCE 8
#define PAST (TAPS - 1)
struct Convolution {
    const float *x;
    int channels;
    float taps[TAPS], window[PAST], now[AT_ONCE];
    __device__ __forceinline__ Convolution(const Delta &d, const float *qkv, const float *conv, const u32 *seq, int c, u32 from, u32 to) : x(qkv + (u64) seq[SEQ_START] * d.channels + c), channels(d.channels) {
        const float *history = d.history + (u64) seq[SEQ_SLOT] * (PAST + TENTATIVE) * channels + c;
        const u32 kept = seq[SEQ_KEPT];
        const bool is_new = seq[SEQ_NEW];
#pragma unroll
        for (int j = 0; j < TAPS; j++) taps[j] = conv[(u64) c * TAPS + j];
#pragma unroll
        for (int j = 0; j < PAST; j++) {
            const int row = (int) from - PAST + j;
            window[j] = row >= 0 ? x[(u64) row * channels] : is_new ? 0.0f : history[(u64) (kept + PAST + row) * channels];
        }
        ask(from, to);
    }
    __device__ __forceinline__ void ask(u32 from, u32 to) {
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) now[j] = from + j < to ? x[(u64) (from + j) * channels] : 0.0f;
    }
    template <class F> __device__ __forceinline__ void run(u32 from, u32 to, F f) {
#pragma unroll 1
        while (true) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (from + i >= to) return;
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < PAST; j++) sum = fmaf(taps[j], window[j], sum);
                f(from + i, silu_(fmaf(taps[PAST], now[i], sum)));
#pragma unroll
                for (int j = 0; j + 1 < PAST; j++) window[j] = window[j + 1];
                window[PAST - 1] = now[i];
            }
            ask(from += AT_ONCE, to);
        }
    }
};
// A channel's history moves on to what the next step starts from: the rows before the first
// tentative one, then those. Nobody reads the old one any more.
__device__ __forceinline__ void move_history(const Delta &d, const float *qkv, const u32 *seq, int c) {
    const float *x = qkv + (u64) seq[SEQ_START] * d.channels + c;
    float *history = d.history + (u64) seq[SEQ_SLOT] * (PAST + TENTATIVE) * d.channels + c;
    const u32 kept = seq[SEQ_KEPT], rows = seq[SEQ_ROWS], certain = seq[SEQ_CERTAIN];
    float before[PAST];
#pragma unroll
    for (int j = 0; j < PAST; j++) {
        const int row = (int) certain - PAST + j;
        before[j] = row >= 0 ? x[(u64) row * d.channels] : seq[SEQ_NEW] ? 0.0f : history[(u64) (kept + PAST + row) * d.channels];
    }
#pragma unroll
    for (int j = 0; j < PAST; j++) history[(u64) j * d.channels] = before[j];
#pragma unroll 4
    for (u32 r = certain; r < rows; r++) history[(u64) (PAST + r - certain) * d.channels] = x[(u64) r * d.channels];
}
// A warp normalises a row's query or key, column i of which is x(i).
template <class X>
__device__ __forceinline__ void normalise_key(X x, bool query) {
    const int lane = threadIdx.x & 31;
    float sum = 0.0f;
#pragma unroll
    for (int i = lane; i < DK; i += 32) sum = fmaf(x(i), x(i), sum);
    sum = warp_sum(sum);
    const float inverse = 1.0f / sqrtf(sum + 1e-6f), factor = query ? 1.0f / sqrtf((float) DK) : 1.0f;
#pragma unroll
    for (int i = lane; i < DK; i += 32) x(i) = x(i) * inverse * factor;
}
__device__ __forceinline__ float decay_of(float decay, float a, float bias) { return exp_(decay * softplus_(a + bias)); }

// Block (i, run of rows and sequence): the convolution of DK channels. Those of a query or a
// key, queries first, are then normalised in place, a warp a row; sums of squares: 32
// partial sums and a tree. The last block makes the gates: [n, nv, 2] decay and beta.
#define RUN 32 // rows, as in src/delta.rs
KERNEL __launch_bounds__(256) delta_conv(Delta d, const float *qkv, const float *conv, float *mixed, const float *b, const float *a, const float *decay, const float *bias, float *gates) {
    in_order();
    const int head = blockIdx.x, c = head * DK + threadIdx.x;
    const u32 *seq = d.batch.seq(blockIdx.y % d.batch.seqs());
    const u32 start = seq[SEQ_START], from = blockIdx.y / d.batch.seqs() * RUN, to = min(from + RUN, seq[SEQ_ROWS]);
    if (from >= to) return;
    if (threadIdx.x < DK && c < d.channels) Convolution(d, qkv, conv, seq, c, from, to).run(from, to, [&](u32 r, float v) { mixed[(u64) (start + r) * d.channels + c] = v; });
    if (head + 1 == gridDim.x)
        for (u32 i = from * d.nv + threadIdx.x; i < to * d.nv; i += blockDim.x) {
            const u64 at = (u64) start * d.nv + i;
            gates[2 * at] = decay_of(decay[i % d.nv], a[at], bias[i % d.nv]);
            gates[2 * at + 1] = sigmoid_(b[at]);
        }
    if (head >= 2 * d.nk) return;
    __syncthreads();
    for (u32 r = from + (threadIdx.x >> 5); r < to; r += blockDim.x >> 5) {
        float *x = mixed + (u64) (start + r) * d.channels + head * DK;
        normalise_key([&](int i) -> float & { return x[i]; }, head < d.nk);
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
// In shared memory a key or query lies by parts, so that threads of different parts meet in
// no bank; where its column i is; what a row has of the block's: query, key, values, decay
// and beta; and what is kept of an earlier one: key, d, decay.
#define SIDE ((ROWS + 3) / 4 * 4 + 4)
#define PLACE(i) ((i) / ROWS * SIDE + (i) % ROWS)
#define KEY (SIDE * PARTS)
#define OF_ROW (2 * KEY + (WIDTH + 5) / 4 * 4) // as in src/delta.rs
#define OF_UPDATE (KEY + (WIDTH + 4) / 4 * 4)
#define ITEMS (2 * DK + WIDTH) // of a row, that are not the same for all columns
__device__ __forceinline__ float over_parts(float v) {
#pragma unroll
    for (int o = 1; o < PARTS; o *= 2) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
// The thread's part of a key or query.
__device__ __forceinline__ void own_part(const float *x, float (&v)[ROWS]) {
    x += threadIdx.x % PARTS * SIDE;
#pragma unroll
    for (int i = 0; i < ROWS; i += 4) {
        const float4 four = *(const float4 *) (x + i);
        v[i] = four.x;
        if (i + 1 < ROWS) v[i + 1] = four.y;
        if (i + 2 < ROWS) v[i + 2] = four.z;
        if (i + 3 < ROWS) v[i + 3] = four.w;
    }
}
// Where item `i` of a row's goes.
__device__ __forceinline__ int item_place(int i) { return i < DK ? PLACE(i) : i < 2 * DK ? KEY + PLACE(i - DK) : 2 * KEY + i - 2 * DK; }
// The channels of the block's items.
struct Channels {
    int query, key, value;
    __device__ __forceinline__ Channels(const Delta &d) {
        query = blockIdx.x / SHARES / (d.nv / d.nk) * DK;
        key = query + (d.nk - 1) * DK;
        value = 2 * (d.nk - 1) * DK + blockIdx.x * WIDTH;
    }
    __device__ __forceinline__ int of(int i) const { return i + (i < DK ? query : i < 2 * DK ? key : value); }
};
// Rows of keys and queries that are there for none of DK columns.
__device__ __forceinline__ void clear_rest(float *row) {
    for (int i = DK; i < ROWS * PARTS; i++) row[PLACE(i)] = row[KEY + PLACE(i)] = 0.0f;
}
// Where the block's updates lie, from one row's to the next.
__device__ __forceinline__ int update_stride(const Delta &d) { return d.nv * SHARES * (1 + DK + WIDTH); }
__device__ __forceinline__ float *updates_of(const Delta &d, const u32 *seq) { return d.updates + (u64) seq[SEQ_SLOT] * TENTATIVE * update_stride(d) + blockIdx.x * (1 + DK + WIDTH); }
// Brings those that stayed to `kept`, [TENTATIVE, OF_UPDATE].
__device__ __forceinline__ void bring_kept(const Delta &d, const u32 *seq, float *kept) {
    constexpr int each = 1 + DK + WIDTH;
    const float *updates = updates_of(d, seq);
#pragma unroll 4
    for (u32 at = threadIdx.x; at < seq[SEQ_KEPT] * each; at += THREADS) {
        const int r = at / each, i = at % each;
        kept[r * OF_UPDATE + (i == 0 ? KEY + WIDTH : i <= DK ? PLACE(i - 1) : KEY + i - 1 - DK)] = updates[(u64) r * update_stride(d) + i];
    }
}
// What the thread has of its block's state.
__device__ __forceinline__ void load_state(const Delta &d, const u32 *seq, float (&s)[ROWS]) {
    const int first = threadIdx.x % PARTS * ROWS, own = threadIdx.x / PARTS, column = blockIdx.x % SHARES * WIDTH + own;
    const float *state = d.state + ((u64) seq[SEQ_SLOT] * d.nv + blockIdx.x / SHARES) * DK * DV;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        s[i] = own < WIDTH && EXISTS(i) && !seq[SEQ_NEW] ? state[(u64) (first + i) * DV + column] : 0.0f;
}
// The block's part of all rows; `row(r)` brings one of them to shared memory. `kept` is there.
template <class F>
__device__ __forceinline__ void recur(const Delta &d, const u32 *seq, float *y, float (&s)[ROWS], const float *kept, F row) {
    const int part = threadIdx.x % PARTS, own = threadIdx.x / PARTS, head = blockIdx.x / SHARES, column = blockIdx.x % SHARES * WIDTH + own;
    const bool mine = own < WIDTH;
    float *state = d.state + ((u64) seq[SEQ_SLOT] * d.nv + head) * DK * DV, *updates = updates_of(d, seq);
    const int first = part * ROWS;
    float k[ROWS], q[ROWS];
#pragma unroll 1
    for (u32 r = 0; r < seq[SEQ_KEPT]; r++) {
        const float *u = kept + r * OF_UPDATE;
        const float decay = u[KEY + WIDTH], dj = mine ? u[KEY + own] : 0.0f;
        own_part(u, k);
#pragma unroll
        for (int i = 0; i < ROWS; i++) s[i] = fmaf(EXISTS(i) ? k[i] : 0.0f, dj, s[i] * decay);
    }
    auto save = [&]() {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (mine && EXISTS(i)) state[(u64) (first + i) * DV + column] = s[i];
    };
    const u32 rows = seq[SEQ_ROWS], certain = seq[SEQ_CERTAIN];
    if (certain == 0) save();
#pragma unroll 1
    for (u32 r = 0; r < rows; r++) {
        const float *x = row(r), *gates = x + OF_ROW - 2;
        const float v = mine ? x[2 * KEY + own] : 0.0f, decay = gates[0];
        own_part(x + KEY, k);
        own_part(x, q);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            s[i] *= decay;
            sum = fmaf(s[i], k[i], sum);
        }
        const float dj = (v - over_parts(sum)) * gates[1];
        float o = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            s[i] = fmaf(k[i], dj, s[i]);
            o = fmaf(s[i], q[i], o);
        }
        o = over_parts(o);
        if (mine && part == 0) y[((u64) (seq[SEQ_START] + r) * d.nv + head) * DV + column] = o;
        if (r + 1 == certain) save();
        if (r >= certain) {
            float *u = updates + (u64) (r - certain) * update_stride(d);
            if (threadIdx.x == 0) u[0] = decay;
            for (int i = threadIdx.x; i < DK; i += THREADS) u[1 + i] = x[KEY + PLACE(i)];
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
// `qkv`: what the convolution was made of, whose history moves on.
KERNEL __launch_bounds__(THREADS, 1) delta_rule(Delta d, const float *mixed, const float *gates, float *y, const float *qkv) {
    __shared__ __align__(16) float made[AT_ONCE * OF_ROW], kept[TENTATIVE * OF_UPDATE];
    start_next();
    const u32 *seq = d.batch.seq(blockIdx.y);
    ask_state(d, seq);
    wait_for_previous();
    float s[ROWS];
    load_state(d, seq, s);
    bring_kept(d, seq, kept);
    const u32 start = seq[SEQ_START], rows = seq[SEQ_ROWS];
    // The next rows, a warp's each, are on their way while the block is at AT_ONCE of them.
    constexpr int warps = THREADS / 32, turns = (AT_ONCE + warps - 1) / warps, each = (ITEMS + 31) / 32;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Channels channels(d);
    float ahead[turns][each], gate[turns];
    auto staged = [&](u32 from, auto f) {
#pragma unroll
        for (int t = 0; t < turns; t++)
            if (t * warps + warp < AT_ONCE && from + t * warps + warp < rows) f(t, t * warps + warp);
    };
    auto ask = [&](u32 from) {
        staged(from, [&](int t, int r) {
            const u64 row = start + from + r;
            const float *x = mixed + row * d.channels;
#pragma unroll
            for (int j = 0; j < each; j++)
                if (lane + 32 * j < ITEMS) ahead[t][j] = x[channels.of(lane + 32 * j)];
            if (lane < 2) gate[t] = gates[2 * (row * d.nv + blockIdx.x / SHARES) + lane];
        });
    };
    ask(0);
    __syncthreads(); // what is kept is there
    recur(d, seq, y, s, kept, [&](u32 r) {
        if (r % AT_ONCE == 0) {
            __syncthreads(); // the rows before are used
            staged(r, [&](int t, int i) {
                float *row = made + i * OF_ROW;
#pragma unroll
                for (int j = 0; j < each; j++)
                    if (lane + 32 * j < ITEMS) row[item_place(lane + 32 * j)] = ahead[t][j];
                if (lane < 2) row[OF_ROW - 2 + lane] = gate[t];
                if (lane == 0) clear_rest(row);
            });
            ask(r + AT_ONCE);
            __syncthreads();
        }
        return made + r % AT_ONCE * OF_ROW;
    });
    for (int c = blockIdx.x * THREADS + threadIdx.x; c < d.channels; c += gridDim.x * THREADS) move_history(d, qkv, seq, c);
}

// Few rows: `delta_conv`, `delta_rule` and, where `gate` is not null, the norm of heads and
// gate = activation(gate) n in one, with their bits. A block makes what it reads of the
// convolution. Blocks count themselves in `arrived`, by value head and by key head: the last
// of a value head does norms and gates, and the last of a key head moves its history on.
struct Heads {
    const float *weight;
    float *n, *gate;
    Half h;
    float eps;
    int f;
};
__device__ __forceinline__ void copy4(float *to, const float *from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"((u32) __cvta_generic_to_shared(to)), "l"(from) : "memory"); }
KERNEL __launch_bounds__(THREADS, 1) delta_few(Delta d, const float *qkv, const float *conv, const float *b, const float *a, const float *decay, const float *bias, float *y, u32 *arrived, Heads end) {
    extern __shared__ __align__(16) float made[]; // [rows, OF_ROW]
    __shared__ __align__(16) float kept[TENTATIVE * OF_UPDATE];
    __shared__ bool moves;
    start_next();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.x / SHARES, heads = d.nv / d.nk, key_head = head / heads;
    const u32 *seq = d.batch.seq(blockIdx.y);
    const u32 start = seq[SEQ_START], rows = seq[SEQ_ROWS], certain = seq[SEQ_CERTAIN];
    ask_state(d, seq);
    arrived += blockIdx.y * (d.nk + d.nv);
    float *raw = made + rows * OF_ROW; // [PAST + rows, ITEMS], before the convolution
    float *history = d.history + (u64) seq[SEQ_SLOT] * (PAST + TENTATIVE) * d.channels;
    // A thread has the same items all along.
    constexpr int each = (ITEMS + THREADS - 1) / THREADS;
    auto items = [&](auto f) {
#pragma unroll
        for (int j = 0; j < each; j++)
            if (threadIdx.x + j * THREADS < ITEMS) f(j, threadIdx.x + j * THREADS);
    };
    const Channels channels(d);
    int channel[each];
    float taps[each][TAPS];
    items([&](int j, int i) {
        channel[j] = channels.of(i);
#pragma unroll
        for (int t = 0; t < TAPS; t++) taps[j][t] = conv[channel[j] * TAPS + t];
    });
    auto move = [&](int j, int i) {
        for (u32 r = 0; r < PAST + rows - certain; r++) history[(u64) r * d.channels + channel[j]] = raw[(certain + r) * ITEMS + i];
    };
    wait_for_previous();
#pragma unroll 1
    for (u32 r = 0; r < PAST + rows; r++) {
        const float *from = r < PAST ? history + (u64) (seq[SEQ_KEPT] + r) * d.channels : qkv + (u64) (start + r - PAST) * d.channels;
        items([&](int j, int i) {
            if (r < PAST && seq[SEQ_NEW]) raw[r * ITEMS + i] = 0.0f;
            else copy4(raw + r * ITEMS + i, from + channel[j]);
        });
    }
    float s[ROWS];
    load_state(d, seq, s);
    bring_kept(d, seq, kept);
    for (u32 r = threadIdx.x; r < rows; r += THREADS) {
        float *row = made + r * OF_ROW;
        const u64 at = (u64) (start + r) * d.nv + head;
        row[OF_ROW - 2] = decay_of(decay[head], a[at], bias[head]);
        row[OF_ROW - 1] = sigmoid_(b[at]);
        clear_rest(row);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll 1
    for (u32 r = 0; r < rows; r++)
        items([&](int j, int i) {
            float sum = 0.0f;
#pragma unroll
            for (int t = 0; t < TAPS; t++) sum = fmaf(taps[j][t], raw[(r + t) * ITEMS + i], sum);
            made[r * OF_ROW + item_place(i)] = silu_(sum);
        });
    __syncthreads();
    // The block has read the history. Nobody waits for the answer now.
    u32 *count = arrived + d.nv + key_head, before = 0;
    if (threadIdx.x == 0) before = atomicAdd(count, 1);
    for (u32 i = warp; i < 2 * rows; i += THREADS / 32) {
        float *x = made + i / 2 * OF_ROW + i % 2 * KEY;
        normalise_key([&](int j) -> float & { return x[PLACE(j)]; }, i % 2 == 0);
    }
    items([&](int j, int i) {
        if (i >= 2 * DK) move(j, i);
    });
    __syncthreads();
    recur(d, seq, y, s, kept, [&](u32 r) { return made + r * OF_ROW; });
    if (threadIdx.x == 0) {
        moves = before + 1 == heads * SHARES;
        if (moves) *count = 0;
    }
    const bool last = comes_last(arrived + head, SHARES);
    if (moves)
        items([&](int j, int i) {
            if (i < 2 * DK) move(j, i);
        });
#if DV % 64 == 0
    if (!last || !end.gate) return;
    // A warp a row, by tiles of 64 columns, with the sums of `norm_glu`.
    constexpr int tiles = DV / 64;
#pragma unroll 1
    for (u32 r = warp; r < rows; r += THREADS / 32) {
        const u64 at = ((u64) (start + r) * d.nv + head) * DV + 2 * lane;
        float2 v[tiles], w[tiles], g[tiles];
        float sums = 0.0f;
#pragma unroll
        for (int i = 0; i < tiles; i++) {
            v[i] = __ldcg((const float2 *) (y + at + i * 64));
            w[i] = *(const float2 *) (end.weight + i * 64 + 2 * lane);
            g[i] = *(const float2 *) (end.gate + at + i * 64);
        }
#pragma unroll
        for (int i = 0; i < tiles; i++) {
            const float sum = warp_sum(fmaf(v[i].y, v[i].y, fmaf(v[i].x, v[i].x, 0.0f)));
            if (lane == i) sums = sum;
        }
        const float inverse = 1.0f / sqrtf(warp_sum(sums) / (float) DV + end.eps);
#pragma unroll
        for (int i = 0; i < tiles; i++) {
            v[i].x = v[i].x * inverse * w[i].x;
            v[i].y = v[i].y * inverse * w[i].y;
            *(float2 *) (end.n + at + i * 64) = v[i];
            v[i].x = activate(end.f, g[i].x) * v[i].x;
            v[i].y = activate(end.f, g[i].y) * v[i].y;
            *(float2 *) (end.gate + at + i * 64) = v[i];
            put_half(end.h, start + r, head * tiles + i, v[i].x, v[i].y);
        }
    }
#endif
}
