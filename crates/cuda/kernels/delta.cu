// Gated DeltaNet: the causal convolution and the gated delta rule between a layer's projections. math.cuh,
// mbarrier.cuh and rows.cuh go before this.
//
//   global: qkv, b, a --> convolution, SiLU, L2 norms, gates --> shared: rows [query | key | values | decay, beta]
//   global: state     --------------------------------------> registers: some rows of a column a thread
//                                                              S = S decay + k (beta (v - k S))     y = q S
//   many rows: delta_conv, then delta_rule; few rows: delta_fused, which also does the norm and the gate that follow
//
// Memory of a slot, in floats:
//   state   [nv, dk, dv]            after the certain rows of the last step
//   history [taps - 1 + TENTATIVE, C]
//                                   rows before the convolution: those that end where `state` does, then the
//                                   tentative ones
//   updates [TENTATIVE, nv, COLUMN_SPLITS, 1 + dk + dv / COLUMN_SPLITS]
//                                   what each tentative row (of a draft) did: decay, k, d
// The next step replays the updates of the rows that were kept: S = S decay + k d.

struct Delta {
    float *state, *history, *updates;
    Batch batch;
    int nk, nv, dk, dv, channels;
};

// A channel's convolution with SiLU: calls f(row, value) for a sequence's rows from..to. Its input is loaded ROWS_AHEAD
// rows at a time, the first by the constructor.
#define HISTORY (TAPS - 1)
struct Convolution {
    const float *x;
    int channels;
    float taps[TAPS], window[HISTORY], now[ROWS_AHEAD];
    DEVICE Convolution(const Delta &d, const float *qkv, const float *conv, const u32 *seq, int c, u32 from, u32 to)
        : x(qkv + (u64) seq[SEQ_START] * d.channels + c), channels(d.channels) {
        const float *history = d.history + (u64) seq[SEQ_SLOT] * (HISTORY + TENTATIVE) * channels + c;
        const u32 kept = seq[SEQ_KEPT];
        const bool is_new = seq[SEQ_NEW];
#pragma unroll
        for (int j = 0; j < TAPS; j++) taps[j] = conv[(u64) c * TAPS + j];
#pragma unroll
        for (int j = 0; j < HISTORY; j++) {
            const int row = (int) from - HISTORY + j;
            window[j] = row >= 0 ? x[(u64) row * channels]
                        : is_new ? 0.0f
                                 : history[(u64) (kept + HISTORY + row) * channels];
        }
        prefetch(from, to);
    }
    DEVICE void prefetch(u32 from, u32 to) {
#pragma unroll
        for (int j = 0; j < ROWS_AHEAD; j++) now[j] = from + j < to ? x[(u64) (from + j) * channels] : 0.0f;
    }
    template <class F>
    DEVICE void run(u32 from, u32 to, F f) {
#pragma unroll 1
        while (true) {
#pragma unroll
            for (int i = 0; i < ROWS_AHEAD; i++) {
                if (from + i >= to) return;
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < HISTORY; j++) sum = fmaf(taps[j], window[j], sum);
                f(from + i, silu_(fmaf(taps[HISTORY], now[i], sum)));
#pragma unroll
                for (int j = 0; j + 1 < HISTORY; j++) window[j] = window[j + 1];
                window[HISTORY - 1] = now[i];
            }
            prefetch(from += ROWS_AHEAD, to);
        }
    }
};
// Moves a channel's history on to what the next step starts from: the rows before the first tentative one, then those.
// Nobody reads the old one any more.
DEVICE void shift_history(const Delta &d, const float *qkv, const u32 *seq, int c) {
    const float *x = qkv + (u64) seq[SEQ_START] * d.channels + c;
    float *history = d.history + (u64) seq[SEQ_SLOT] * (HISTORY + TENTATIVE) * d.channels + c;
    const u32 kept = seq[SEQ_KEPT], rows = seq[SEQ_ROWS], certain = seq[SEQ_CERTAIN];
    float before[HISTORY];
#pragma unroll
    for (int j = 0; j < HISTORY; j++) {
        const int row = (int) certain - HISTORY + j;
        before[j] = row >= 0       ? x[(u64) row * d.channels]
                    : seq[SEQ_NEW] ? 0.0f
                                   : history[(u64) (kept + HISTORY + row) * d.channels];
    }
#pragma unroll
    for (int j = 0; j < HISTORY; j++) history[(u64) j * d.channels] = before[j];
#pragma unroll 4
    for (u32 r = certain; r < rows; r++) history[(u64) (HISTORY + r - certain) * d.channels] = x[(u64) r * d.channels];
}
// L2 norm of a row's query or key by a warp, column i of which is x(i).
template <class X>
DEVICE void l2_normalise(X x, bool query) {
    const int lane = threadIdx.x & 31;
    float sum = 0.0f;
#pragma unroll
    for (int i = lane; i < DK; i += 32) sum = fmaf(x(i), x(i), sum);
    sum = warp_sum(sum);
    const float inverse = 1.0f / sqrtf(sum + 1e-6f), factor = query ? 1.0f / sqrtf((float) DK) : 1.0f;
#pragma unroll
    for (int i = lane; i < DK; i += 32) x(i) = x(i) * inverse * factor;
}
DEVICE float decay_of(float decay, float a, float bias) { return exp_(decay * softplus_(a + bias)); }

#if THREAD_PARTS == 1
// Block (i, chunk of rows and sequence): the convolution of DK channels. Those of a query or a key (queries first) are
// then normalized in place, a warp a row; sums of squares: 32 partial sums and a tree. The last block computes the
// gates: [n, nv, 2] decay and beta.
KERNEL __launch_bounds__(256) delta_conv(Delta d, const float *qkv, const float *conv, float *mixed, const float *b,
                                         const float *a, const float *decay, const float *bias, float *gates) {
    pdl_sync();
    const int head = blockIdx.x, c = head * DK + threadIdx.x;
    const u32 *seq = d.batch.seq(blockIdx.y % d.batch.seqs());
    const u32 start = seq[SEQ_START], from = blockIdx.y / d.batch.seqs() * CHUNK_ROWS,
              to = min(from + CHUNK_ROWS, seq[SEQ_ROWS]);
    if (from >= to) return;
    if (threadIdx.x < DK && c < d.channels)
        Convolution(d, qkv, conv, seq, c, from, to).run(from, to, [&](u32 r, float v) {
            mixed[(u64) (start + r) * d.channels + c] = v;
        });
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
        l2_normalise([&](int i) -> float & { return x[i]; }, head < d.nk);
    }
}
#endif

// The recurrence: block (value head and its columns' split, sequence). A column has PARTS (4 or 8) parts of DK / PARTS
// rows, in registers: THREAD_PARTS of them, one after the other, in each of its threads. Columns do not depend on each
// other; a split has updates of its own, or another block could write them before this one has read them. Sums over dk:
// a chain a part, then a tree over the parts. PARTS depends on the head's size alone.
//
// Lanes have neighboring columns of one part, if there are so many, so they read the same numbers of a key or query
// from shared memory, which a warp gets at once; sums go from part to part through shared memory. With a column's parts
// in neighboring lanes a row takes two fifths more accesses to shared memory. With two parts a thread, half as many
// threads exchange half as many sums; what bounds a row then is how fast each scheduler issues its only warp's
// instructions: benchmarks/2026-11-30-h200-delta.
#define COLUMNS (DV / COLUMN_SPLITS)
#define COLUMN_THREADS (PARTS / THREAD_PARTS)
#define WIDTH (THREADS / COLUMN_THREADS) // columns, and threads without one
#define KEY_ROWS ((DK + PARTS - 1) / PARTS)
#define BLOCKS_PER_SM (THREADS <= 256 && KEY_ROWS <= 16 ? 2 : 1) // at least
// Whether row `i` of a column exists: all do where DK is a multiple of PARTS.
#define KEY_ROW_EXISTS(i) (KEY_ROWS * PARTS == DK || (i) < DK)
// In shared memory: a key or query lies by parts, so that threads of different parts meet in no bank (KEY_OFFSET of
// column i); a row (ROW_FLOATS) is query, key, values, decay and beta; a kept update (UPDATE_FLOATS) is key, d, decay.
#define PART_STRIDE ((KEY_ROWS + 3) / 4 * 4 + 4)
#define KEY_OFFSET(i) ((i) / KEY_ROWS * PART_STRIDE + (i) % KEY_ROWS)
#define KEY_FLOATS (PART_STRIDE * PARTS)
#define ROW_FLOATS (2 * KEY_FLOATS + (COLUMNS + 5) / 4 * 4)
#define UPDATE_FLOATS (KEY_FLOATS + (COLUMNS + 4) / 4 * 4)
#define ROW_CHANNELS (2 * DK + COLUMNS) // of a row that the block reads: query, key, its values
// Sums of N parts that follow each other, by a tree.
template <int N>
DEVICE float sum_of_parts(float (&v)[N]) {
#pragma unroll
    for (int o = 1; o < N; o *= 2)
#pragma unroll
        for (int i = 0; i < N; i += 2 * o) v[i] += v[i + o];
    return v[0];
}
// Adds what the threads of a column have, WIDTH numbers apart.
DEVICE float sum_over_threads(const float *sums) {
    float v[COLUMN_THREADS];
#pragma unroll
    for (int i = 0; i < COLUMN_THREADS; i++) v[i] = sums[i * WIDTH];
    return sum_of_parts(v);
}
// What a thread has of a column of the state, or of a key or query.
struct ThreadParts {
    float v[THREAD_PARTS][KEY_ROWS];
    // Loads those of a key or query, which start at `x`.
    DEVICE void load(const float *x) {
#pragma unroll
        for (int p = 0; p < THREAD_PARTS; p++)
#pragma unroll
            for (int i = 0; i < KEY_ROWS; i += 4) {
                const float4 four = *(const float4 *) (x + p * PART_STRIDE + i);
                v[p][i] = four.x;
                if (i + 1 < KEY_ROWS) v[p][i + 1] = four.y;
                if (i + 2 < KEY_ROWS) v[p][i + 2] = four.z;
                if (i + 3 < KEY_ROWS) v[p][i + 3] = four.w;
            }
    }
    // The thread's part of the product with `x`: a chain for each of its parts.
    DEVICE float dot(const ThreadParts &x) const {
        float sums[THREAD_PARTS];
#pragma unroll
        for (int p = 0; p < THREAD_PARTS; p++) sums[p] = 0.0f;
#pragma unroll
        for (int i = 0; i < KEY_ROWS; i++)
#pragma unroll
            for (int p = 0; p < THREAD_PARTS; p++) sums[p] = fmaf(v[p][i], x.v[p][i], sums[p]);
        return sum_of_parts(sums);
    }
    // Calls f(number, row of the column) for each of its numbers.
    template <class F>
    DEVICE void for_each(F f) {
        const int first = threadIdx.x / WIDTH * (THREAD_PARTS * KEY_ROWS);
#pragma unroll
        for (int i = 0; i < KEY_ROWS; i++)
#pragma unroll
            for (int p = 0; p < THREAD_PARTS; p++) f(v[p][i], first + p * KEY_ROWS + i);
    }
    // Makes it k d + `decayed`.
    DEVICE void update(const ThreadParts &k, float d, const ThreadParts &decayed) {
#pragma unroll
        for (int i = 0; i < KEY_ROWS; i++)
#pragma unroll
            for (int p = 0; p < THREAD_PARTS; p++) v[p][i] = fmaf(k.v[p][i], d, decayed.v[p][i]);
    }
    DEVICE ThreadParts operator*(float decay) const {
        ThreadParts of;
#pragma unroll
        for (int i = 0; i < KEY_ROWS; i++)
#pragma unroll
            for (int p = 0; p < THREAD_PARTS; p++) of.v[p][i] = v[p][i] * decay;
        return of;
    }
};
// Where channel `i` of the block lies in a row.
DEVICE int channel_offset(int i) {
    return i < DK ? KEY_OFFSET(i) : i < 2 * DK ? KEY_FLOATS + KEY_OFFSET(i - DK) : 2 * KEY_FLOATS + i - 2 * DK;
}
// Where the block's channels lie in a row of all channels.
struct BlockChannels {
    int query, key, value;
    DEVICE BlockChannels(const Delta &d) {
        query = blockIdx.x / COLUMN_SPLITS / (d.nv / d.nk) * DK;
        key = query + (d.nk - 1) * DK;
        value = 2 * (d.nk - 1) * DK + blockIdx.x * COLUMNS;
    }
    DEVICE int of(int i) const { return i + (i < DK ? query : i < 2 * DK ? key : value); }
};
// Zeros the padding of a key and a query.
DEVICE void clear_padding(float *row) {
    for (int i = DK; i < KEY_ROWS * PARTS; i++) row[KEY_OFFSET(i)] = row[KEY_FLOATS + KEY_OFFSET(i)] = 0.0f;
}
// Floats from the updates of one tentative row to those of the next.
DEVICE int update_stride(const Delta &d) { return d.nv * COLUMN_SPLITS * (1 + DK + COLUMNS); }
DEVICE float *updates_of(const Delta &d, const u32 *seq) {
    return d.updates + (u64) seq[SEQ_SLOT] * TENTATIVE * update_stride(d) + blockIdx.x * (1 + DK + COLUMNS);
}
// Loads the updates of kept rows into `kept`, [TENTATIVE, UPDATE_FLOATS].
DEVICE void load_kept_updates(const Delta &d, const u32 *seq, float *kept) {
    constexpr int each = 1 + DK + COLUMNS;
    const float *updates = updates_of(d, seq);
#pragma unroll 4
    for (u32 at = threadIdx.x; at < seq[SEQ_KEPT] * each; at += THREADS) {
        const int r = at / each, i = at % each;
        kept[r * UPDATE_FLOATS + (i == 0    ? KEY_FLOATS + COLUMNS
                                  : i <= DK ? KEY_OFFSET(i - 1)
                                            : KEY_FLOATS + i - 1 - DK)] = updates[(u64) r * update_stride(d) + i];
    }
}
// Loads the thread's part of the block's state.
DEVICE void load_state(const Delta &d, const u32 *seq, ThreadParts &s) {
    const int own = threadIdx.x % WIDTH, column = blockIdx.x % COLUMN_SPLITS * COLUMNS + own;
    const float *state = d.state + ((u64) seq[SEQ_SLOT] * d.nv + blockIdx.x / COLUMN_SPLITS) * DK * DV;
    s.for_each([&](float &v, int row) {
        v = own < COLUMNS && KEY_ROW_EXISTS(row) && !seq[SEQ_NEW] ? state[(u64) row * DV + column] : 0.0f;
    });
}
// Rows in shared memory, `count` of them.
struct RowGroup {
    const float *rows;
    u32 count;
};
// Shared memory of `recurrence`.
union RecurrenceMemory {
    float kept[TENTATIVE * UPDATE_FLOATS];
    struct {
        // Of each thread: what it has of the product with the key, of this row and the one before; and of that with
        // the query, of two groups of OUTPUT_ROWS rows.
        float sums[2][THREADS], outputs[2][OUTPUT_ROWS][THREADS];
    };
};
// The block's part of all rows; `group(r)` brings row `r` and some that follow it to shared memory. All threads have
// met since `memory.kept` was loaded. Nearly all of a row's time are two sums over dk that wait for one another: what
// the state gives for the key, and, once it has changed, for the query. So the query of a row is multiplied beside the
// key of the next one, and its parts are added up with those of other rows. MANY: there are mostly groups of
// OUTPUT_ROWS rows, so that the next row's key can be loaded once a row's sums are on their way.
template <bool MANY, class F>
DEVICE void recurrence(const Delta &d, const u32 *seq, float *y, ThreadParts &s, RecurrenceMemory &memory, F group) {
    const int thread = threadIdx.x / WIDTH, own = threadIdx.x % WIDTH, head = blockIdx.x / COLUMN_SPLITS,
              column = blockIdx.x % COLUMN_SPLITS * COLUMNS + own;
    const bool mine = own < COLUMNS;
    // Where the thread's parts of keys and queries start in a row, and its column's value.
    const int part_at = opaque(thread * (THREAD_PARTS * PART_STRIDE)),
              value_at = opaque(2 * KEY_FLOATS + (mine ? own : 0));
    float *state = d.state + ((u64) seq[SEQ_SLOT] * d.nv + head) * DK * DV, *updates = updates_of(d, seq);
    ThreadParts k, q;
#pragma unroll 1
    for (u32 r = 0; r < seq[SEQ_KEPT]; r++) {
        const float *u = memory.kept + r * UPDATE_FLOATS;
        const float decay = u[KEY_FLOATS + COLUMNS], dj = mine ? u[KEY_FLOATS + own] : 0.0f;
        k.load(u + part_at);
        k.for_each([&](float &v, int row) { v = KEY_ROW_EXISTS(row) ? v : 0.0f; });
        s.update(k, dj, s * decay);
    }
    __syncthreads(); // nobody reads the kept updates any more
    auto save = [&]() {
        s.for_each([&](float &v, int row) {
            if (mine && KEY_ROW_EXISTS(row)) state[(u64) row * DV + column] = v;
        });
    };
    const u32 rows = seq[SEQ_ROWS], certain = seq[SEQ_CERTAIN];
    if (certain == 0) save();
    const int stride = opaque(d.nv * DV);
    float *out = y + ((u64) seq[SEQ_START] * d.nv + head) * DV + column;
    // Stores the results of at most OUTPUT_ROWS rows, all parts of which are in `from`.
    auto store_outputs = [&](const float *from, u32 first, u32 count) {
#pragma unroll
        for (int i = 0; i < OUTPUT_ROWS; i += COLUMN_THREADS)
            if (i + thread < count) {
                const float v = sum_over_threads(from + (i + thread) * THREADS + own);
                if (mine) out[(u64) (first + i + thread) * stride] = v;
            }
    };
    // Where registers are left for it; with one part a thread it was slower.
    constexpr bool loads_ahead = THREAD_PARTS > 1 && THREADS <= 256 && KEY_ROWS * THREAD_PARTS <= 32;
    ThreadParts next_key;
    float next_decay = 0.0f;
    // A row, which lies at `x` from the thread's parts on: `sums` and `outputs` are for this row's key and the query of
    // the row before. Its key and decay may be loaded already, and those of the row that follows it can be loaded
    // ahead. Returns d: k d is added to the state.
    auto advance = [&](const float *x, bool is_loaded, bool loads_next, float *sums, float *outputs) {
        const float *all = x - part_at;
        if (!is_loaded) {
            k.load(x + KEY_FLOATS);
            next_decay = all[ROW_FLOATS - 2];
        }
        const float decay = next_decay, beta = all[ROW_FLOATS - 1], v = all[value_at];
        const ThreadParts decayed = s * decay;
        sums[threadIdx.x] = decayed.dot(k);
        outputs[threadIdx.x] = s.dot(q);
        __syncthreads();
        const float known = sum_over_threads(sums + own);
        if (loads_next) {
            next_key.load(x + ROW_FLOATS + KEY_FLOATS);
            next_decay = all[2 * ROW_FLOATS - 2];
        }
        q.load(x);
        const float dj = (v - known) * beta;
        s.update(k, dj, decayed);
        if (loads_next) k = next_key;
        return dj;
    };
    q = {};
    u32 r = 0;
#pragma unroll 1
    while (r < rows) {
        const RowGroup of = group(r);
        const float *x = of.rows + part_at;
        const u32 end = r + of.count;
        if (MANY && of.count == OUTPUT_ROWS && end <= certain) {
            // Addresses are known but for which half of the outputs is whose.
            float *half = memory.outputs[r / OUTPUT_ROWS & 1][0], *other = memory.outputs[~(r / OUTPUT_ROWS) & 1][0];
#pragma unroll
            for (int i = 0; i < OUTPUT_ROWS; i++) {
                advance(x + i * ROW_FLOATS, loads_ahead && i > 0, loads_ahead && i + 1 < OUTPUT_ROWS,
                        memory.sums[i & 1], i == 0 ? other + (OUTPUT_ROWS - 1) * THREADS : half + (i - 1) * THREADS);
                if (i == 1 && r > 0) store_outputs(other, r - OUTPUT_ROWS, OUTPUT_ROWS);
            }
            r = end;
            if (r == certain) save();
            continue;
        }
#pragma unroll 1
        for (; r < end; r++, x += ROW_FLOATS) {
            const u32 before = r - 1;
            const float dj = advance(x, false, false, memory.sums[r & 1],
                                     memory.outputs[before / OUTPUT_ROWS & 1][before % OUTPUT_ROWS]);
            // All parts are there of rows before the last one.
            if (r % OUTPUT_ROWS == 1 && r > 1)
                store_outputs(memory.outputs[before / OUTPUT_ROWS + 1 & 1][0], before - OUTPUT_ROWS, OUTPUT_ROWS);
            if (r + 1 == certain) save();
            if (r >= certain) {
                const float *all = x - part_at;
                float *u = updates + (u64) (r - certain) * update_stride(d);
                if (threadIdx.x == 0) u[0] = all[ROW_FLOATS - 2];
                for (int i = threadIdx.x; i < DK; i += THREADS) u[1 + i] = all[KEY_FLOATS + KEY_OFFSET(i)];
                if (mine && thread == 0) u[1 + DK + own] = dj;
            }
        }
    }
    if (rows == 0) return;
    memory.outputs[(rows - 1) / OUTPUT_ROWS & 1][(rows - 1) % OUTPUT_ROWS][threadIdx.x] = s.dot(q);
    __syncthreads();
    // Of the last OUTPUT_ROWS + 1 rows at most.
    u32 from = rows > 1 ? (rows - 2) / OUTPUT_ROWS * OUTPUT_ROWS : 0;
#pragma unroll 1
    for (; from < rows; from += OUTPUT_ROWS)
        store_outputs(memory.outputs[from / OUTPUT_ROWS & 1][0], from, min(rows - from, (u32) OUTPUT_ROWS));
}
DEVICE void prefetch_state(const Delta &d, const u32 *seq) {
#if __CUDA_ARCH__ >= 900
    const float *state = d.state + ((u64) seq[SEQ_SLOT] * d.nv + blockIdx.x / COLUMN_SPLITS) * DK * DV;
    if (threadIdx.x == 0)
        asm volatile(
            "cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(state + blockIdx.x % COLUMN_SPLITS * DK * COLUMNS),
            "n"(DK * COLUMNS / 4 * 16)
            : "memory");
#endif
}
// Floats that are copied at once: 16 bytes where parts and columns consist of those.
constexpr int PIECE = DK % 4 == 0 && KEY_ROWS % 4 == 0 && COLUMNS % 4 == 0 ? 4 : 1, ROW_PIECES = ROW_CHANNELS / PIECE;
// `qkv`: the input of the convolution, whose history is shifted at the end.
KERNEL __launch_bounds__(THREADS, BLOCKS_PER_SM)
    delta_rule(Delta d, const float *mixed, const float *gates, float *y, const float *qkv) {
    extern __shared__ __align__(16) float rows_smem[]; // [2, ROWS_AHEAD, ROW_FLOATS]
    __shared__ __align__(16) RecurrenceMemory memory;
    pdl_launch();
    const u32 *seq = d.batch.seq(blockIdx.y);
    prefetch_state(d, seq);
    const u32 start = seq[SEQ_START], rows = seq[SEQ_ROWS];
    for (u32 i = threadIdx.x; i < 2 * ROWS_AHEAD; i += THREADS) clear_padding(rows_smem + i * ROW_FLOATS);
    // The next rows, a warp's each, are copied while the block works on ROWS_AHEAD of them.
    constexpr int warps = THREADS / 32, each = (ROW_PIECES + 31) / 32;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const BlockChannels channels(d);
    auto copy_rows = [&](u32 from) {
        float *to = rows_smem + (from / ROWS_AHEAD & 1) * (ROWS_AHEAD * ROW_FLOATS);
#pragma unroll
        for (int i = warp; i < ROWS_AHEAD; i += warps) {
            if (from + i >= rows) break;
            const u64 row = start + from + i;
            const float *x = mixed + row * d.channels;
#pragma unroll
            for (int j = 0; j < each; j++) {
                const int at = (lane + 32 * j) * PIECE;
                if (at >= ROW_CHANNELS) continue;
                float *piece = to + i * ROW_FLOATS + channel_offset(at);
                if constexpr (PIECE == 4) cp_async_16(smem_address(piece), x + channels.of(at));
                else cp_async_4(smem_address(piece), x + channels.of(at));
            }
            if (lane < 2)
                cp_async_4(smem_address(to + i * ROW_FLOATS + ROW_FLOATS - 2 + lane),
                           gates + 2 * (row * d.nv + blockIdx.x / COLUMN_SPLITS) + lane);
        }
        cp_async_commit();
    };
    pdl_wait();
    copy_rows(0);
    ThreadParts s;
    load_state(d, seq, s);
    load_kept_updates(d, seq, memory.kept);
    __syncthreads(); // the kept updates are there
    recurrence<OUTPUT_ROWS == ROWS_AHEAD>(d, seq, y, s, memory, [&](u32 r) {
        cp_async_wait<0>();
        __syncthreads(); // all have copied their part of the rows, and nobody reads those before
        copy_rows(r + ROWS_AHEAD);
        return RowGroup{rows_smem + (r / ROWS_AHEAD & 1) * (ROWS_AHEAD * ROW_FLOATS), min((u32) ROWS_AHEAD, rows - r)};
    });
    for (int c = blockIdx.x * THREADS + threadIdx.x; c < d.channels; c += gridDim.x * THREADS)
        shift_history(d, qkv, seq, c);
}

#if THREAD_PARTS == 1
// Few rows: `delta_conv`, `delta_rule` and, where `gate` is not null, the norm of heads and y = activation(gate) n,
// fused, with their bits. A block computes what it reads of the convolution. Blocks count themselves in `counters`, by
// value head and by key head: the last of a value head does norms and gates, the last of a key head shifts its history.
struct GatedNormEpilogue {
    const float *weight, *gate; // no gate: nothing follows
    float *n, *y;               // may be null, and `y` may be `gate`
    Activations f16;
    float eps;
    int activation;
};
KERNEL __launch_bounds__(THREADS, BLOCKS_PER_SM)
    delta_fused(Delta d, const float *qkv, const float *conv, const float *b, const float *a, const float *decay,
                const float *bias, float *y, u32 *counters, GatedNormEpilogue end) {
    extern __shared__ __align__(16) float rows_smem[]; // [rows, ROW_FLOATS]
    __shared__ __align__(16) RecurrenceMemory memory;
    __shared__ bool shifts_history;
    pdl_launch();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.x / COLUMN_SPLITS, heads = d.nv / d.nk,
              key_head = head / heads;
    const u32 *seq = d.batch.seq(blockIdx.y);
    const u32 start = seq[SEQ_START], rows = seq[SEQ_ROWS], certain = seq[SEQ_CERTAIN];
    prefetch_state(d, seq);
    counters += blockIdx.y * (d.nk + d.nv);
    float *raw = rows_smem + rows * ROW_FLOATS; // [HISTORY + rows, ROW_CHANNELS], before the convolution
    float *history = d.history + (u64) seq[SEQ_SLOT] * (HISTORY + TENTATIVE) * d.channels;
    // A thread has the same channels all along.
    constexpr int each = (ROW_CHANNELS + THREADS - 1) / THREADS;
    auto for_each_channel = [&](auto f) {
#pragma unroll
        for (int j = 0; j < each; j++)
            if (threadIdx.x + j * THREADS < ROW_CHANNELS) f(j, threadIdx.x + j * THREADS);
    };
    const BlockChannels channels(d);
    int channel[each];
    float taps[each][TAPS];
    for_each_channel([&](int j, int i) {
        channel[j] = channels.of(i);
#pragma unroll
        for (int t = 0; t < TAPS; t++) taps[j][t] = conv[channel[j] * TAPS + t];
    });
    auto shift = [&](int j, int i) {
        for (u32 r = 0; r < HISTORY + rows - certain; r++)
            history[(u64) r * d.channels + channel[j]] = raw[(certain + r) * ROW_CHANNELS + i];
    };
    pdl_wait();
#pragma unroll 1
    for (u32 r = 0; r < HISTORY + rows; r++) {
        const float *from = r < HISTORY ? history + (u64) (seq[SEQ_KEPT] + r) * d.channels
                                        : qkv + (u64) (start + r - HISTORY) * d.channels;
        for_each_channel([&](int j, int i) {
            if (r < HISTORY && seq[SEQ_NEW]) raw[r * ROW_CHANNELS + i] = 0.0f;
            else cp_async_4(smem_address(raw + r * ROW_CHANNELS + i), from + channel[j]);
        });
    }
    ThreadParts s;
    load_state(d, seq, s);
    load_kept_updates(d, seq, memory.kept);
    for (u32 r = threadIdx.x; r < rows; r += THREADS) {
        float *row = rows_smem + r * ROW_FLOATS;
        const u64 at = (u64) (start + r) * d.nv + head;
        row[ROW_FLOATS - 2] = decay_of(decay[head], a[at], bias[head]);
        row[ROW_FLOATS - 1] = sigmoid_(b[at]);
        clear_padding(row);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll 1
    for (u32 r = 0; r < rows; r++)
        for_each_channel([&](int j, int i) {
            float sum = 0.0f;
#pragma unroll
            for (int t = 0; t < TAPS; t++) sum = fmaf(taps[j][t], raw[(r + t) * ROW_CHANNELS + i], sum);
            rows_smem[r * ROW_FLOATS + channel_offset(i)] = silu_(sum);
        });
    __syncthreads();
    // The block has read the history; nobody waits for the count now.
    u32 *count = counters + d.nv + key_head, before = 0;
    if (threadIdx.x == 0) before = atomicAdd(count, 1);
    for (u32 i = warp; i < 2 * rows; i += THREADS / 32) {
        float *x = rows_smem + i / 2 * ROW_FLOATS + i % 2 * KEY_FLOATS;
        l2_normalise([&](int j) -> float & { return x[KEY_OFFSET(j)]; }, i % 2 == 0);
    }
    for_each_channel([&](int j, int i) {
        if (i >= 2 * DK) shift(j, i);
    });
    __syncthreads();
    recurrence<false>(d, seq, y, s, memory, [&](u32) { return RowGroup{rows_smem, rows}; });
    if (threadIdx.x == 0) {
        shifts_history = before + 1 == heads * COLUMN_SPLITS;
        if (shifts_history) *count = 0;
    }
    const bool last = is_last_block(counters + head, COLUMN_SPLITS);
    if (shifts_history)
        for_each_channel([&](int j, int i) {
            if (i < 2 * DK) shift(j, i);
        });
#if DV % 64 == 0
    if (!last || !end.gate) return;
    // A warp a row, by tiles of 64 columns, with the sums of `rms_norm_glu`.
    constexpr int tiles = DV / 64;
#pragma unroll 1
    for (u32 r = warp; r < rows; r += THREADS / 32) {
        const u64 at = ((u64) (start + r) * d.nv + head) * DV + 2 * lane;
        float2 v[tiles], w[tiles], g[tiles];
#pragma unroll
        for (int i = 0; i < tiles; i++) {
            v[i] = __ldcg((const float2 *) (y + at + i * 64));
            w[i] = *(const float2 *) (end.weight + i * 64 + 2 * lane);
            g[i] = *(const float2 *) (end.gate + at + i * 64);
        }
        store_gated_norm(v, w, g, end.eps, end.activation, end.n ? end.n + at : nullptr, end.y ? end.y + at : nullptr,
                         end.f16, start + r, head * tiles);
    }
#endif
}
#endif
