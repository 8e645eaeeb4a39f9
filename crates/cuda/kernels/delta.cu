// Gated DeltaNet: the causal convolution and the gated delta rule between a layer's projections. math.cuh,
// mbarrier.cuh, rows.cuh and delta_chunk.cuh, which says what the rule computes, go before this.
//
//   global: qkv, b, a --> convolution, SiLU, L2 norms, gates --> shared: keys, queries, values, gates of a chunk
//   global: state     -----------------------------------------> registers: a part of it a warp
//
//   many rows: delta_conv; delta_prepare (what does not depend on the state, for all chunks at once); delta_rule
//   few rows:  delta_fused or delta_fused_cluster, which also do the norm and the gate that follow

// A channel's convolution with SiLU, of rows from..to of a sequence. Its input is loaded ROWS_AHEAD rows at a time, the
// first by the constructor.
#define HISTORY (TAPS - 1)
struct Convolution {
    const float *next; // row to load
    u32 left, stride;
    float taps[TAPS], window[HISTORY], now[ROWS_AHEAD];
    DEVICE Convolution(const Delta &d, const float *qkv, const float *conv, const u32 *seq, int c, u32 from, u32 to)
        : next(qkv + (u64) (seq[SEQ_START] + from) * d.channels + c), left(to - from), stride(d.channels) {
        const float *history = d.history + (u64) seq[SEQ_SLOT] * (HISTORY + TENTATIVE) * d.channels + c;
        const u32 kept = seq[SEQ_KEPT];
        const bool is_new = seq[SEQ_NEW];
#pragma unroll
        for (int j = 0; j < TAPS; j++) taps[j] = conv[(u64) c * TAPS + j];
#pragma unroll
        for (int j = 0; j < HISTORY; j++) {
            const int row = (int) from - HISTORY + j;
            window[j] = row >= 0 ? next[(long long) (j - HISTORY) * stride]
                        : is_new ? 0.0f
                                 : history[(u64) (kept + HISTORY + row) * d.channels];
        }
        prefetch();
    }
    DEVICE void prefetch() {
#pragma unroll
        for (u32 j = 0; j < ROWS_AHEAD; j++, next += stride) now[j] = j < left ? *next : 0.0f;
    }
    // Writes the column of row i to to[i * N]. What comes after the last row, up to a multiple of ROWS_AHEAD, is
    // overwritten with numbers that nobody reads.
    template <int N>
    DEVICE void run(float *to) {
#pragma unroll 1
        while (true) {
#pragma unroll
            for (int i = 0; i < ROWS_AHEAD; i++) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < HISTORY; j++) sum = fmaf(taps[j], window[j], sum);
                to[i * N] = silu_(fmaf(taps[HISTORY], now[i], sum));
#pragma unroll
                for (int j = 0; j + 1 < HISTORY; j++) window[j] = window[j + 1];
                window[HISTORY - 1] = now[i];
            }
            if (left <= ROWS_AHEAD) return;
            left -= ROWS_AHEAD;
            to += ROWS_AHEAD * N;
            prefetch();
        }
    }
};
static_assert(CONVOLUTION_ROWS % ROWS_AHEAD == 0);
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
// L2 norm of a row's query or key `x` by a warp, which makes it its two parts in place. The low ones start at column
// `columns`, and columns from DK to there are zeros.
DEVICE void l2_normalise(float *x, bool query, int columns) {
    constexpr int each = (DK + 31) / 32;
    const int lane = threadIdx.x & 31;
    float v[each], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < each; i++) {
        v[i] = lane + 32 * i < DK ? x[lane + 32 * i] : 0.0f;
        sum = fmaf(v[i], v[i], sum);
    }
    sum = warp_sum(sum);
    __syncwarp(); // all have read theirs
    const float inverse = 1.0f / sqrtf(sum + 1e-6f), factor = query ? 1.0f / sqrtf((float) DK) : 1.0f;
    u16 *parts = (u16 *) x;
#pragma unroll
    for (int i = 0; i < each; i++) {
        const int c = lane + 32 * i;
        const float scaled = v[i] * inverse * factor * KEY_SCALE;
        const u16 high = f32_to_f16(scaled);
        if (c >= columns) continue;
        parts[c] = high;
        parts[columns + c] = f32_to_f16(scaled - f16_to_f32(high));
    }
    for (int c = lane + 32 * each; c < columns; c += 32) parts[c] = parts[columns + c] = 0;
}
DEVICE float decay_of(float decay, float a, float bias) { return exp_(decay * softplus_(a + bias)); }

// Block (i, run of CONVOLUTION_ROWS rows and sequence): the convolution of DK channels. Those of a query or a key
// (queries first) are then normalized, a warp a row, and become their two parts of f16; sums of squares: 32 partial
// sums and a tree. The last block computes the gates: [n, nv, 2] decay and beta. The first blocks of a sequence's keys
// copy what the slot remembers of them to `known_keys`, [seqs, nk, PENDING, dk]: `delta_rule` overwrites what the slot
// has.
KERNEL __launch_bounds__(256, 6)
    delta_conv(Delta d, const float *qkv, const float *conv, float *mixed, const float *b, const float *a,
               const float *decay, const float *bias, float *gates, float *known_keys) {
    __shared__ __align__(16) float rows[CONVOLUTION_ROWS][DK];
    pdl_sync();
    const int head = blockIdx.x, columns = min(DK, d.channels - head * DK), lane = threadIdx.x & 31;
    const u32 number = blockIdx.y % d.batch.seqs();
    const u32 *seq = d.batch.seq(number);
    const u32 start = seq[SEQ_START], from = blockIdx.y / d.batch.seqs() * CONVOLUTION_ROWS,
              to = min(from + CONVOLUTION_ROWS, seq[SEQ_ROWS]);
    if (from == 0 && head >= d.nk && head < 2 * d.nk) {
        const int key_head = head - d.nk;
        const u32 known = Span(seq, values_of(d, seq, 0)).known;
        const float *keys = keys_of(d, seq, key_head);
        float *copy = known_keys + ((u64) number * d.nk + key_head) * (PENDING * DK);
        for (u32 i = threadIdx.x; i < known * DK; i += blockDim.x) copy[i] = keys[i];
    }
    if (from >= to) return;
    if (threadIdx.x < columns)
        Convolution(d, qkv, conv, seq, head * DK + threadIdx.x, from, to).run<DK>(&rows[0][threadIdx.x]);
    if (head + 1 == gridDim.x)
        for (u32 i = from * d.nv + threadIdx.x; i < to * d.nv; i += blockDim.x) {
            const u64 at = (u64) start * d.nv + i;
            gates[2 * at] = decay_of(decay[i % d.nv], a[at], bias[i % d.nv]);
            gates[2 * at + 1] = sigmoid_(b[at]);
        }
    __syncthreads();
    for (u32 r = from + (threadIdx.x >> 5); r < to; r += blockDim.x >> 5) {
        float *row = rows[r - from], *out = mixed + (u64) (start + r) * d.channels + head * DK;
        if (head < 2 * d.nk) {
            l2_normalise(row, head < d.nk, DK);
            __syncwarp();
        }
        if constexpr (DK % 4 == 0 && DV % 4 == 0)
            for (int i = 4 * lane; i < columns; i += 128) *(float4 *) (out + i) = *(const float4 *) (row + i);
        else
            for (int i = lane; i < columns; i += 32) out[i] = row[i];
    }
}

// Where the block's channels lie in a row of all channels: query, key and its values, of which there are `values`.
struct BlockChannels {
    int query, key, value, values;
    DEVICE BlockChannels(const Delta &d) {
        const int head = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS;
        query = head / (d.nv / d.nk) * DK;
        key = query + d.nk * DK;
        value = 2 * d.nk * DK + head * DV + split * COLUMNS;
        values = min(COLUMNS, DV - split * COLUMNS);
    }
};
// Zeros the columns after dk of `count` keys or queries.
DEVICE void clear_padding(float *keys, u32 count) {
    for (u32 i = threadIdx.x >> 5; i < count; i += WARPS) {
        u16 *parts = (u16 *) (keys + i * KEY_STRIDE);
        for (int c = DK + (threadIdx.x & 31); c < KEY_COLUMNS; c += 32) parts[c] = parts[KEY_COLUMNS + c] = 0;
    }
}
// Lane `lane` of LANES copies its share of a key or query, both parts, to shared memory.
template <int LANES>
DEVICE void copy_key(u32 to, const float *from, int lane) {
    constexpr int piece = DK % 8 == 0 && DV % 4 == 0 ? 4 : 1, pieces = DK / 2 / piece; // of a part, of so many words
    from += lane * piece;
    to += 4 * lane * piece;
#pragma unroll
    for (int i = 0; i < 2 * pieces; i += LANES) {
        const bool is_low = (pieces % LANES == 0 ? i : i + lane) >= pieces;
        if (2 * pieces % LANES && i + lane >= 2 * pieces) return;
        const u32 at = to + 4 * (i * piece + (is_low ? (KEY_COLUMNS - DK) / 2 : 0));
        if constexpr (piece == 4) cp_async_16(at, from + i * piece);
        else cp_async_4(at, from + i);
    }
}
// Lane `lane` of LANES copies its share of `count` values to shared memory.
template <int LANES>
DEVICE void copy_values(u32 to, const float *from, int count, int lane) {
    constexpr int piece = DV % 4 == 0 ? 4 : 1;
    from += lane * piece;
    to += 4 * lane * piece;
#pragma unroll
    for (int i = 0; i < COLUMNS; i += LANES * piece)
        if (i + lane * piece < count) {
            if constexpr (piece == 4) cp_async_16(to + 4 * i, from + i);
            else cp_async_4(to + 4 * i, from + i);
        }
}
// A warp remembers a key that is in shared memory.
DEVICE void store_key(float *to, const float *from) {
    for (int i = threadIdx.x & 31; i < DK; i += 32) to[i] = from[i < DK / 2 ? i : KEY_COLUMNS / 2 + i - DK / 2];
}
// In device memory, a chunk's matrices of all value heads are next to each other. Chunks of a sequence start at this
// number: r rows of a step and up to PENDING known ones make at most r / CHUNK + EXTRA_CHUNKS chunks.
static_assert((PENDING + 2 * CHUNK - 2) / CHUNK == EXTRA_CHUNKS);
DEVICE u32 first_chunk(const u32 *seq, u32 number) { return seq[SEQ_START] / CHUNK + EXTRA_CHUNKS * number; }
#define HEADS_AT_ONCE 4 // a warp each
static_assert(HEADS_AT_ONCE <= WARPS);
// Block (chunk and sequence, key head): the matrices of the chunk of all value heads that read the key head.
KERNEL __launch_bounds__(THREADS)
    delta_prepare(Delta d, const float *mixed, const float *gates, const float *known_keys, ChunkMatrices *matrices) {
    extern __shared__ __align__(16) float smem[]; // keys and queries, [CHUNK, KEY_STRIDE] each
    __shared__ __align__(16) Dots dots;
    __shared__ __align__(16) Weights weights[HEADS_AT_ONCE];
    __shared__ float own_gates[HEADS_AT_ONCE][CHUNK * 2];
    pdl_sync();
    const u32 number = blockIdx.x % d.batch.seqs(), first = blockIdx.x / d.batch.seqs() * CHUNK;
    const u32 *seq = d.batch.seq(number);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, key_head = blockIdx.y, heads = d.nv / d.nk;
    const Span span(seq, values_of(d, seq, 0));
    if (first >= span.total) return;
    const int count = min(span.total - first, (u32) CHUNK), known = span.known > first ? span.known - first : 0;
    float *keys = smem, *queries = smem + CHUNK * KEY_STRIDE;
    clear_padding(keys, 2 * CHUNK);
    for (int j = warp; j < count; j += WARPS) {
        if (j < known) {
            copy_key<32>(smem_address(keys + j * KEY_STRIDE),
                         known_keys + (((u64) number * d.nk + key_head) * PENDING + first + j) * DK, lane);
            continue;
        }
        const float *x = mixed + (u64) (seq[SEQ_START] + first + j - span.known) * d.channels + key_head * DK;
        copy_key<32>(smem_address(keys + j * KEY_STRIDE), x + d.nk * DK, lane);
        copy_key<32>(smem_address(queries + j * KEY_STRIDE), x, lane);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    compute_dots(dots, {keys, queries, nullptr, nullptr, nullptr, nullptr, count, known});
    matrices += (u64) (first_chunk(seq, number) + first / CHUNK) * d.nv + key_head * heads;
#pragma unroll 1
    for (int h = 0; h < heads; h += HEADS_AT_ONCE) {
        const int own = h + warp, head = key_head * heads + own;
        const bool has_head = warp < HEADS_AT_ONCE && own < heads;
        if (has_head) {
            const u32 r = first + lane / 2;
            own_gates[warp][lane] =
                lane / 2 >= count ? 0.0f
                : r < span.known  ? values_of(d, seq, head * SPLITS)[VALUE_HEADER + r * VALUE_FLOATS + (lane & 1)]
                                  : gates[2 * ((u64) (seq[SEQ_START] + r - span.known) * d.nv + head) + (lane & 1)];
            __syncwarp();
            compute_decays(matrices[own], weights[warp], own_gates[warp], count);
        }
        __syncthreads();
        for (int i = 0; i < HEADS_AT_ONCE && h + i < heads; i++) compute_weights(matrices[h + i], weights[i], dots);
        __syncthreads();
        if (has_head) compute_solution(matrices[own], weights[warp], own_gates[warp], count);
        __syncwarp(); // all lanes have read the gates
    }
}

// In shared memory, what there is of a chunk: keys, queries, values, matrices.
#define CHUNK_FLOATS (CHUNK * (2 * KEY_STRIDE + COLUMNS) + (int) sizeof(ChunkMatrices) / 4)
// Chunks of which there is room for that.
#define STAGES (KEY_COLUMNS > 128 ? 1 : 2)
// `qkv`: the input of the convolution, whose history is shifted at the end.
KERNEL __launch_bounds__(THREADS, BLOCKS_PER_SM) delta_rule(Delta d, const float *mixed, const ChunkMatrices *matrices,
                                                            const float *known_keys, float *y, const float *qkv) {
    extern __shared__ __align__(16) float smem[]; // [STAGES, CHUNK_FLOATS]
    __shared__ __align__(16) ChunkMemory memory;
    pdl_launch();
    const u32 *seq = d.batch.seq(blockIdx.y);
    const int head = blockIdx.x / SPLITS, key_head = head / (d.nv / d.nk);
    if (threadIdx.x == 0) bulk_prefetch_l2(state_of(d, seq), 4 * KEY_COLUMNS * COLUMNS);
    for (int i = 0; i < STAGES; i++) clear_padding(smem + i * CHUNK_FLOATS, 2 * CHUNK);
    const BlockChannels channels(d);
    float *values = values_of(d, seq, blockIdx.x);
    known_keys += ((u64) blockIdx.y * d.nk + key_head) * (PENDING * DK);
    pdl_wait();
    const Span span(seq, values);
    // A row has some neighboring threads, each of which has pointers to what it copies of the next chunk.
    constexpr int lanes = THREADS / CHUNK, matrix_floats = (int) sizeof(ChunkMatrices) / 4;
    static_assert(matrix_floats / 4 <= THREADS);
    const int row = threadIdx.x / lanes, lane = threadIdx.x % lanes;
    const float *next_row = mixed + ((long long) (seq[SEQ_START] + row) - (long long) span.known) * d.channels;
    const float *next_matrices =
        (const float *) (matrices + (u64) first_chunk(seq, blockIdx.y) * d.nv + head) + 4 * threadIdx.x;
    const u64 row_step = (u64) CHUNK * d.channels, matrix_step = (u64) d.nv * matrix_floats;
    const u32 stages = opaque(smem_address(smem)), own_key = 4 * row * KEY_STRIDE,
              own_value = 4 * (2 * CHUNK * KEY_STRIDE + row * COLUMNS);
    auto copy = [&](u32 first) {
        if (first >= span.total) return;
        const u32 to = stages + first / CHUNK % STAGES * (4 * CHUNK_FLOATS), r = first + row;
        if (r < span.known) {
            const float *value = values + VALUE_HEADER + r * VALUE_FLOATS + 4;
            copy_key<lanes>(to + own_key, known_keys + r * DK, lane);
            copy_values<lanes>(to + own_value, value, channels.values, lane);
        } else if (r < span.total) {
            copy_key<lanes>(to + own_key, next_row + channels.key, lane);
            copy_key<lanes>(to + own_key + 4 * CHUNK * KEY_STRIDE, next_row + channels.query, lane);
            copy_values<lanes>(to + own_value, next_row + channels.value, channels.values, lane);
        }
        if (threadIdx.x < matrix_floats / 4)
            cp_async_16(to + 4 * CHUNK * (2 * KEY_STRIDE + COLUMNS) + 16 * threadIdx.x, next_matrices);
        next_row += row_step;
        next_matrices += matrix_step;
    };
    copy(0);
    State s;
    s.load(state_of(d, seq), span.is_new);
    // One block of a key head remembers its keys.
    const bool stores_keys = blockIdx.x % (d.nv / d.nk * SPLITS) == 0;
    float *stored = keys_of(d, seq, key_head);
    const Results results(d, seq, y);
    auto load = [&](u32 first) {
        if (STAGES == 1 && first > 0) {
            __syncthreads(); // nobody reads the chunk before
            copy(first);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads(); // all have copied their part of the chunk, and nobody reads the one before
        if (STAGES > 1) copy(first + CHUNK);
        float *keys = smem + first / CHUNK % STAGES * CHUNK_FLOATS, *queries = keys + CHUNK * KEY_STRIDE,
              *own_values = queries + CHUNK * KEY_STRIDE;
        if (stores_keys && first + CHUNK > span.base)
            for (int i = threadIdx.x >> 5; i < CHUNK; i += WARPS)
                if (span.is_stored(first + i)) store_key(stored + (first + i - span.base) * DK, keys + i * KEY_STRIDE);
        const ChunkMatrices *own = (const ChunkMatrices *) (own_values + CHUNK * COLUMNS);
        return ChunkRows{keys,
                         queries,
                         own_values,
                         own->gates[0],
                         values + VALUE_HEADER + 4 + COLUMNS + first * VALUE_FLOATS,
                         own,
                         min((int) (span.total - first), CHUNK),
                         span.known > first ? (int) (span.known - first) : 0};
    };
    compute_chunks<true>(d, seq, span, s, memory, values, nullptr, load, [&](u32 r, float v) { results.store(r, v); });
    for (int c = blockIdx.x * THREADS + threadIdx.x; c < d.channels; c += gridDim.x * THREADS)
        shift_history(d, qkv, seq, c);
}

// Few rows: `delta_conv`, `delta_rule` and, where `gate` is not null, the norm of heads and y = activation(gate) n,
// fused, with their bits. A block computes what it reads of the convolution. Blocks count themselves in `counters`, by
// key head: the last one shifts its history and remembers its keys. Norms and gates need all columns of a value head.
//   delta_fused          its blocks count themselves, and the last one does all rows
//   delta_fused_cluster  its blocks are a cluster and send one another results; each does a part of the rows
struct GatedNormEpilogue {
    const float *weight, *gate; // no gate: nothing follows
    float *n, *y;               // may be null, and `y` may be `gate`
    Activations f16;
    float eps;
    int activation;
};
// What the blocks of a value head, a cluster, send to one of them: results of the rows whose norm it does, which are i,
// i + SPLITS and so on for block i.
#define HEAD_ROWS ((FEW_ROWS + SPLITS - 1) / SPLITS)
struct HeadResults {
    float rows[HEAD_ROWS][DV];
    u64 are_there; // barrier
    // Called by one thread, before the cluster meets.
    DEVICE void init() {
        mbarrier_init(smem_address(&are_there), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // Called by that thread, after the cluster has met: the sequence has `n` rows. Results may be there before.
    DEVICE void expect(u32 n) {
        const u32 rank = cluster_rank();
        mbarrier_expect_tx(smem_address(&are_there), rank < n ? (n - rank + SPLITS - 1) / SPLITS * DV * 4 : 0);
    }
    // Sends the lane's column of row `r` to the block that does its norm.
    DEVICE void send(u32 r, float v) {
        send_to_block(r % SPLITS, smem_address(&rows[r / SPLITS][cluster_rank() * COLUMNS + (threadIdx.x & 31)]),
                      smem_address(&are_there), v);
    }
};
#define ROW_CHANNELS (2 * DK + COLUMNS) // of a row that the block reads: query, key, its values
// IN_CLUSTER: blocks of a value head are a cluster. Then there is a gate, and DV is a multiple of 64.
template <bool IN_CLUSTER>
DEVICE void compute_few(const Delta &d, const float *qkv, const float *conv, const float *b, const float *a,
                        const float *decay, const float *bias, float *y, u32 *counters, const GatedNormEpilogue &end) {
    // keys [known + rows, KEY_STRIDE], queries [rows, KEY_STRIDE], values [known + rows, COLUMNS], gates [known + rows,
    // 2], before the convolution [HISTORY + rows, ROW_CHANNELS]
    extern __shared__ __align__(16) float smem[];
    __shared__ __align__(16) ChunkMemory memory;
    __shared__ __align__(16) PrepareMemory own;
    __shared__ __align__(16) HeadResults head_results; // in a cluster
    __shared__ bool is_last_of_key_head;
    pdl_launch();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.x / SPLITS, heads = d.nv / d.nk,
              key_head = head / heads;
    const u32 *seq = d.batch.seq(blockIdx.y);
    const u32 start = seq[SEQ_START], rows = seq[SEQ_ROWS], certain = seq[SEQ_CERTAIN];
    if constexpr (IN_CLUSTER) {
        if (threadIdx.x == 0) head_results.init();
        cluster_arrive();
    }
    counters += blockIdx.y * (d.nk + d.nv);
    float *history = d.history + (u64) seq[SEQ_SLOT] * (HISTORY + TENTATIVE) * d.channels;
    float *remembered = values_of(d, seq, blockIdx.x), *stored_keys = keys_of(d, seq, key_head);
    // A thread has the same channels all along: number i of the block's.
    constexpr int each = (ROW_CHANNELS + THREADS - 1) / THREADS;
    const BlockChannels channels(d);
    auto for_each_channel = [&](auto f) {
#pragma unroll
        for (int j = 0; j < each; j++)
            if (threadIdx.x + j * THREADS < 2 * DK + channels.values) f(j, threadIdx.x + j * THREADS);
    };
    int channel[each];
    float taps[each][TAPS];
    for_each_channel([&](int j, int i) {
        channel[j] = i < DK ? channels.query + i : i < 2 * DK ? channels.key + i - DK : channels.value + i - 2 * DK;
#pragma unroll
        for (int t = 0; t < TAPS; t++) taps[j][t] = conv[channel[j] * TAPS + t];
    });
    const float own_decay = decay[head], own_bias = bias[head];
    if (!d.is_settled) pdl_wait();
    const Span span(seq, remembered);
    float *keys = smem, *queries = keys + span.total * KEY_STRIDE, *values = queries + rows * KEY_STRIDE,
          *gates = values + span.total * COLUMNS, *raw = gates + 2 * span.total;
    auto shift = [&](int j, int i) {
        for (u32 r = 0; r < HISTORY + rows - certain; r++)
            history[(u64) r * d.channels + channel[j]] = raw[(certain + r) * ROW_CHANNELS + i];
    };
#pragma unroll
    for (u32 r = 0; r < HISTORY; r++)
        for_each_channel([&](int j, int i) {
            float *to = raw + r * ROW_CHANNELS + i;
            if (span.is_new) *to = 0.0f;
            else cp_async_4(smem_address(to), history + (u64) (seq[SEQ_KEPT] + r) * d.channels + channel[j]);
        });
    for (u32 r = warp; r < span.known; r += WARPS) {
        copy_key<32>(smem_address(keys + r * KEY_STRIDE), stored_keys + r * DK, lane);
        copy_values<32>(smem_address(values + r * COLUMNS), remembered + VALUE_HEADER + r * VALUE_FLOATS + 4,
                        channels.values, lane);
    }
    if (threadIdx.x < 2 * span.known) {
        const u32 r = threadIdx.x / 2, what = threadIdx.x % 2;
        gates[threadIdx.x] = remembered[VALUE_HEADER + r * VALUE_FLOATS + what];
    }
    State s;
    s.load(state_of(d, seq), span.is_new);
    clear_padding(keys, span.known);
    pdl_wait();
#pragma unroll 1
    for (u32 r = 0; r < rows; r++)
        for_each_channel([&](int j, int i) {
            cp_async_4(smem_address(raw + (HISTORY + r) * ROW_CHANNELS + i),
                       qkv + (u64) (start + r) * d.channels + channel[j]);
        });
    // No warp has fewer channels than the last one, which computes the gates.
    const bool has_gates = warp == WARPS - 1 && lane < rows;
    const u64 own_gates = (u64) (start + lane) * d.nv + head;
    const float own_a = has_gates ? a[own_gates] : 0.0f, own_b = has_gates ? b[own_gates] : 0.0f;
    if constexpr (IN_CLUSTER) {
        cluster_wait(); // all blocks have their barriers
        if (threadIdx.x == 0) head_results.expect(rows);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll 1
    for (u32 r = 0; r < rows; r++)
        for_each_channel([&](int j, int i) {
            float sum = 0.0f;
#pragma unroll
            for (int t = 0; t < TAPS; t++) sum = fmaf(taps[j][t], raw[(r + t) * ROW_CHANNELS + i], sum);
            float *to = i < DK       ? queries + r * KEY_STRIDE + i
                        : i < 2 * DK ? keys + (span.known + r) * KEY_STRIDE + i - DK
                                     : values + (span.known + r) * COLUMNS + i - 2 * DK;
            *to = silu_(sum);
        });
    __syncthreads();
    // The block has read the history and the keys; nobody waits for the count now.
    u32 *count = counters + d.nv + key_head, before = 0;
    if (threadIdx.x == 0) before = atomicAdd(count, 1);
    for (u32 i = warp; i < 2 * rows; i += WARPS) {
        float *x = i % 2 == 0 ? queries + i / 2 * KEY_STRIDE : keys + (span.known + i / 2) * KEY_STRIDE;
        l2_normalise(x, i % 2 == 0, KEY_COLUMNS);
    }
    for_each_channel([&](int j, int i) {
        if (i >= 2 * DK) shift(j, i);
    });
    if (has_gates) {
        float *gate = gates + 2 * (span.known + lane);
        gate[0] = decay_of(own_decay, own_a, own_bias);
        gate[1] = sigmoid_(own_b);
    }
    auto load = [&](u32 first) {
        if (first > 0) __syncthreads(); // nobody reads what is of the last chunk
        const int count = min((int) (span.total - first), CHUNK);
        if (warp == WARPS - 1) {
            __syncwarp(); // it has all gates
            compute_decays(own.matrices, own.weights, gates + 2 * first, count);
        }
        __syncthreads(); // the rows are there
        return ChunkRows{keys + first * KEY_STRIDE,
                         queries + ((int) first - (int) span.known) * KEY_STRIDE,
                         values + first * COLUMNS,
                         gates + 2 * first,
                         remembered + VALUE_HEADER + 4 + COLUMNS + first * VALUE_FLOATS,
                         &own.matrices,
                         count,
                         span.known > first ? (int) (span.known - first) : 0};
    };
    const Results results(d, seq, y);
    compute_chunks<false>(d, seq, span, s, memory, remembered, &own, load, [&](u32 r, float v) {
        results.store(r, v);
        if constexpr (IN_CLUSTER) head_results.send(r, v);
    });
    if (threadIdx.x == 0) {
        is_last_of_key_head = before + 1 == heads * SPLITS;
        if (is_last_of_key_head) *count = 0;
    }
    bool is_last = false; // of the value head
    if constexpr (IN_CLUSTER) __syncthreads();
    else is_last = is_last_block(counters + head, SPLITS);
    if (is_last_of_key_head) {
        for_each_channel([&](int j, int i) {
            if (i < 2 * DK) shift(j, i);
        });
        for (u32 r = span.base + warp; r < span.total; r += WARPS)
            if (span.is_stored(r)) store_key(stored_keys + (r - span.base) * DK, keys + r * KEY_STRIDE);
    }
#if DV % 64 == 0
    if (!IN_CLUSTER && (!is_last || !end.gate)) return;
    // A warp a row, by tiles of 64 columns, with the sums of `rms_norm_glu`.
    constexpr int tiles = DV / 64, blocks = IN_CLUSTER ? SPLITS : 1;
#pragma unroll 1
    for (u32 r = IN_CLUSTER ? blockIdx.x % SPLITS + blocks * warp : warp; r < rows; r += blocks * WARPS) {
        const u64 at = ((u64) (start + r) * d.nv + head) * DV + 2 * lane;
        float2 v[tiles], w[tiles], g[tiles];
#pragma unroll
        for (int i = 0; i < tiles; i++) {
            w[i] = *(const float2 *) (end.weight + i * 64 + 2 * lane);
            g[i] = *(const float2 *) (end.gate + at + i * 64);
        }
        if constexpr (IN_CLUSTER) mbarrier_wait_cluster(smem_address(&head_results.are_there), 0);
#pragma unroll
        for (int i = 0; i < tiles; i++)
            if constexpr (IN_CLUSTER) v[i] = *(const float2 *) &head_results.rows[r / SPLITS][i * 64 + 2 * lane];
            else v[i] = __ldcg((const float2 *) (y + at + i * 64));
        store_gated_norm(v, w, g, end.eps, end.activation, end.n ? end.n + at : nullptr, end.y ? end.y + at : nullptr,
                         end.f16, start + r, head * tiles);
    }
#endif
}
// Three blocks a multiprocessor where its shared memory takes those of a row each.
#define FUSED_BLOCKS_PER_SM (KEY_COLUMNS <= 128 && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200 ? 3 : BLOCKS_PER_SM)
KERNEL __launch_bounds__(THREADS, FUSED_BLOCKS_PER_SM)
    delta_fused(Delta d, const float *qkv, const float *conv, const float *b, const float *a, const float *decay,
                const float *bias, float *y, u32 *counters, GatedNormEpilogue end) {
    compute_few<false>(d, qkv, conv, b, a, decay, bias, y, counters, end);
}
#if __CUDA_ARCH__ >= 900 && DV % 64 == 0
// For steps with so few blocks that a multiprocessor takes one or two: threads have more registers than those of
// `delta_fused`.
KERNEL __launch_bounds__(THREADS, BLOCKS_PER_SM)
    delta_fused_cluster(Delta d, const float *qkv, const float *conv, const float *b, const float *a,
                        const float *decay, const float *bias, float *y, u32 *counters, GatedNormEpilogue end) {
    compute_few<true>(d, qkv, conv, b, a, decay, bias, y, counters, end);
}
#endif
