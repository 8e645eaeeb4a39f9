// A row of activations in the registers of one block, or of a cluster of blocks, and what kernels do with it: RMS
// norms and their epilogue, gated products (GLU), rotary embedding. common.cuh, math.cuh and mbarrier.cuh go
// before this.

// Sums over all threads of a row, in whatever block of the cluster they are: in each block, of each sum, a float for
// each warp of the cluster, or FOLD floats. In a cluster a warp sends its own to all blocks (distributed shared
// memory), where a barrier counts their bytes. A barrier of the cluster with release would also wait for all other
// stores of the block.
template <int N>
struct RowPartials {
    float v[N][32];
    u64 received;
};
// Called once for each RowPartials of a kernel, by all blocks of a cluster, before `cluster_sync`: says how many bytes
// will arrive. Each RowPartials is good for one call of `row_sums`.
template <int N>
DEVICE void expect_partials(RowPartials<N> &partials) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x > 0) return;
    const u32 barrier = smem_address(&partials.received);
    mbarrier_init(barrier, 1);
    mbarrier_expect_tx(barrier, N * (blockDim.x >> 5) * cluster_blocks() * 4);
#endif
}
// The FOLD partial sums that a thread makes.
template <int FOLD>
struct ThreadSum {
    float v[FOLD];
};
template <int N, int FOLD>
DEVICE void row_sums(const ThreadSum<FOLD> (&own)[N], float (&sums)[N], RowPartials<N> &partials) {
    const u32 lane = threadIdx.x & 31, warps = blockDim.x >> 5, warp = threadIdx.x >> 5, blocks = cluster_blocks();
    float v[N][FOLD];
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < FOLD; j++) v[i][j] = warp_sum(own[i].v[j]);
    if (FOLD > 1 || blocks == 1) {
        if (lane == 0)
#pragma unroll
            for (int i = 0; i < N; i++)
#pragma unroll
                for (int j = 0; j < FOLD; j++) partials.v[i][j * warps + warp] = v[i][j];
        __syncthreads();
    } else {
#if __CUDA_ARCH__ >= 900
        if (lane < blocks)
#pragma unroll
            for (int i = 0; i < N; i++)
                send_to_block(lane, smem_address(&partials.v[i][cluster_rank() * warps + warp]),
                              smem_address(&partials.received), v[i][0]);
        mbarrier_wait_cluster(smem_address(&partials.received), 0);
#endif
    }
#pragma unroll
    for (int i = 0; i < N; i++) sums[i] = warp_sum(lane < FOLD * warps * blocks ? partials.v[i][lane] : 0.0f);
}
template <int FOLD>
DEVICE float row_sum(const ThreadSum<FOLD> &own, RowPartials<1> &partials) {
    const ThreadSum<FOLD> all[1] = {own};
    float sums[1];
    row_sums(all, sums, partials);
    return sums[0];
}
DEVICE float row_sum(float v, RowPartials<1> &partials) { return row_sum(ThreadSum<1>{{v}}, partials); }

// ---- a row in registers: of the `n` threads that share it, thread t has the pairs of columns t + i * n. Columns
// after the last are 0. Blocks are whole warps, so that a warp has whole tiles of `Activations`.
//
// How many partial sums a row has depends on its width alone, and so does the order of the whole sum: one for each
// thread of a block of few rows. Of many rows, a block is smaller, so that several rows are on their way at once, and
// each of its threads makes ROW_FOLD partial sums: numbers t + j blockDim.x.
#ifndef PAIRS_PER_THREAD
#define PAIRS_PER_THREAD 1 // at most, of a thread of a block
#define ROW_FOLD 1
#endif
// Blocks of many rows that share a multiprocessor, MOST of them with at most 4 pairs a thread: more pairs need more
// registers.
#define ROW_BOUNDS(MOST)                                                                                               \
    __launch_bounds__(1024 / ROW_FOLD, ROW_FOLD == 1 ? 1 : MOST - (PAIRS_PER_THREAD > 4) - (PAIRS_PER_THREAD > 6))
using RowSum = ThreadSum<ROW_FOLD>;
struct RowFragment {
    float2 v[PAIRS_PER_THREAD];
};
// Calls f(i, first column) for each of the thread's pairs.
template <class F>
DEVICE void for_each_pair(F f) {
#pragma unroll
    for (int i = 0; i < PAIRS_PER_THREAD; i++)
        f(i, 2 * (int) (cluster_rank() * blockDim.x + threadIdx.x + i * cluster_blocks() * blockDim.x));
}
DEVICE RowFragment load_row(const float *x, int cols) {
    RowFragment r;
    for_each_pair([&](int i, int c) {
        r.v[i] = make_float2(0.0f, 0.0f);
        if (cols % 2 == 0) {
            if (c < cols) r.v[i] = *(const float2 *) (x + c);
        } else {
            if (c < cols) r.v[i].x = x[c];
            if (c + 1 < cols) r.v[i].y = x[c + 1];
        }
    });
    return r;
}
// Zeros where `x` is null.
DEVICE RowFragment load_optional_row(const float *x, int cols) { return load_row(x, x ? cols : 0); }
DEVICE void store_row(float *y, int cols, const RowFragment &r) {
    for_each_pair([&](int i, int c) {
        if (cols % 2 == 0) {
            if (c < cols) *(float2 *) (y + c) = r.v[i];
        } else {
            if (c < cols) y[c] = r.v[i].x;
            if (c + 1 < cols) y[c + 1] = r.v[i].y;
        }
    });
}
DEVICE void store_row_f16(const Activations &out, u64 row, const RowFragment &r) {
    for_each_pair([&](int i, int c) {
        if (c / 64 < out.stride / 64) store_activation_tile(out, row, c / 64, r.v[i].x, r.v[i].y);
    });
}
DEVICE void prefetch_row(const float *x, int cols) {
    for_each_pair([&](int i, int c) {
        if (x && c < cols) prefetch_l2(x + c);
    });
}
// x = (x + y) factor
DEVICE void add_and_scale(RowFragment &x, const RowFragment &y, float factor) {
#pragma unroll
    for (int i = 0; i < PAIRS_PER_THREAD; i++) {
        x.v[i].x = (x.v[i].x + y.v[i].x) * factor;
        x.v[i].y = (x.v[i].y + y.v[i].y) * factor;
    }
}

// ---- RMS norm. The sum of squares is one partial sum a thread over its pairs of columns, then trees.
DEVICE RowSum sum_of_squares(const RowFragment &r) {
    RowSum sum = {};
#pragma unroll
    for (int i = 0; i < PAIRS_PER_THREAD; i++) {
        float &own = sum.v[i % ROW_FOLD];
        own = fmaf(r.v[i].y, r.v[i].y, fmaf(r.v[i].x, r.v[i].x, own));
    }
    return sum;
}
DEVICE float inverse_rms(float sum_of_squares, int width, float eps) {
    return 1.0f / sqrtf(sum_of_squares / (float) width + eps);
}
// r = r inverse_rms weight
DEVICE void apply_norm(RowFragment &r, float inverse_rms, const RowFragment &weight, bool has_weight) {
#pragma unroll
    for (int i = 0; i < PAIRS_PER_THREAD; i++) {
        r.v[i].x *= inverse_rms;
        r.v[i].y *= inverse_rms;
        if (has_weight) {
            r.v[i].x *= weight.v[i].x;
            r.v[i].y *= weight.v[i].y;
        }
    }
}
DEVICE void rms_norm_row(RowFragment &r, int width, float eps, const RowFragment &weight, bool has_weight,
                         RowPartials<1> &partials) {
    apply_norm(r, inverse_rms(row_sum(sum_of_squares(r), partials), width, eps), weight, has_weight);
}

// 1 / RMS of a run of 64 TILES columns, by a warp, of which a lane has two neighboring columns of each 64: with the
// bits of `rms_norm_row`.
template <int TILES>
DEVICE float inverse_rms_of_run(const float2 (&v)[TILES], float eps) {
    float sums = 0.0f;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const float sum = warp_sum(fmaf(v[i].y, v[i].y, fmaf(v[i].x, v[i].x, 0.0f)));
        if ((threadIdx.x & 31) == i) sums = sum;
    }
    return inverse_rms(warp_sum(sums), 64 * TILES, eps);
}

// Epilogue of kernels that make a row: norms of it, each with a weight, in f32 (unless that is null) and as
// `Activations`; or, where the first has no weight, the row itself as `Activations`.
#define MAX_NORMS 3
struct NormEpilogue {
    const float *weight[MAX_NORMS];
    float *y[MAX_NORMS];
    Activations f16[MAX_NORMS];
    int count;
};
// Weights from number `from` on, before `pdl_wait`.
DEVICE void prefetch_norm_weights(const NormEpilogue &norms, int from, int cols) {
#pragma unroll
    for (int i = 0; i < MAX_NORMS; i++)
        if (i >= from) prefetch_row(norms.weight[i], cols);
}
// `first_weight` has been loaded.
DEVICE void store_norms(const NormEpilogue &norms, u64 row, int cols, const RowFragment &x,
                        const RowFragment &first_weight, float eps, RowPartials<1> &partials) {
    if (norms.count == 0) return;
    if (!norms.weight[0]) {
        store_row_f16(norms.f16[0], row, x);
        return;
    }
    const float inverse = inverse_rms(row_sum(sum_of_squares(x), partials), cols, eps);
    RowFragment weight = first_weight;
    float *y = norms.y[0];
    Activations f16 = norms.f16[0];
#pragma unroll 1
    for (int i = 1;; i++) {
        RowFragment n = x;
        apply_norm(n, inverse, weight, true);
        if (y) store_row(y + row * cols, cols, n);
        store_row_f16(f16, row, n);
        if (i == norms.count) break;
        const bool last = i == MAX_NORMS - 1;
        weight = load_row(last ? norms.weight[2] : norms.weight[1], cols);
        y = last ? norms.y[2] : norms.y[1];
        f16 = last ? norms.f16[2] : norms.f16[1];
    }
}

// ---- gated linear unit: y = activation(gate) x, also as `Activations`. Rows of `gate` and `x` are so many columns
// apart. `y` and `copy`, where x goes besides, may be null. A row is cut into chunks of two columns a thread.
struct GluArgs {
    const float *gate, *x;
    u64 gate_stride, x_stride;
    float *y, *copy;
    int cols, activation;
    Activations f16;
};
// Calls f(column) for the thread's pair of columns; a warp has a whole tile.
template <class F>
DEVICE void for_pair_of_chunk(int chunk, int cols, F f) {
    const int c = 2 * (chunk * blockDim.x + threadIdx.x);
    if (c / 64 * 64 < cols) f(c);
}
// How many chunks a gate of `cols` columns has in a row.
DEVICE int glu_chunks(int cols) { return (cols + 2 * blockDim.x - 1) / (2 * blockDim.x); }
// Whether every pair of columns of a gate lies in all its tensors where one instruction loads or stores both.
DEVICE bool are_glu_pairs(const GluArgs &a) {
    return ((a.cols | a.gate_stride | a.x_stride) & 1) == 0 &&
           (((u64) a.gate | (u64) a.x | (u64) a.y | (u64) a.copy) & 7) == 0;
}
// The lane's pair of columns of a tile, by a whole warp.
DEVICE void glu_tile(const GluArgs &a, u64 row, int tile) {
    const int c = tile * 64 + 2 * (threadIdx.x & 31);
    const float *gate = a.gate + row * a.gate_stride + c, *x = a.x + row * a.x_stride + c;
    float *y = a.y ? a.y + row * a.cols + c : nullptr, *copy = a.copy ? a.copy + row * a.cols + c : nullptr;
    float2 v = make_float2(0.0f, 0.0f);
    if (c + 1 < a.cols && (((u64) gate | (u64) x | (u64) y | (u64) copy) & 7) == 0) {
        const float2 g = *(const float2 *) gate, own = *(const float2 *) x;
        v = make_float2(activate(a.activation, g.x) * own.x, activate(a.activation, g.y) * own.y);
        if (y) *(float2 *) y = v;
        if (copy) *(float2 *) copy = own;
    } else {
        float *const to[2] = {&v.x, &v.y};
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (c + j < a.cols) {
                const float own = x[j];
                *to[j] = activate(a.activation, gate[j]) * own;
                if (y) y[j] = *to[j];
                if (copy) copy[j] = own;
            }
    }
    store_activation_tile(a.f16, row, tile, v.x, v.y);
}
DEVICE void glu_chunk(const GluArgs &a, int chunk, u64 row) {
    for_pair_of_chunk(chunk, a.cols, [&](int c) { glu_tile(a, row, c / 64); });
}

// Stores the RMS norm of a run `v` of 64 TILES columns to `n`, and the gated norm, activation(gate) norm, to `y` and as
// tiles of `h` from number `tile` of row `row` on. By a warp, of which a lane has two neighboring columns of each 64,
// and `n` and `y` at the first two; either may be null.
template <int TILES>
DEVICE void store_gated_norm(float2 (&v)[TILES], const float2 (&weight)[TILES], const float2 (&gate)[TILES], float eps,
                             int activation, float *n, float *y, const Activations &h, u64 row, int tile) {
    const float inverse = inverse_rms_of_run(v, eps);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        v[i].x = v[i].x * inverse * weight[i].x;
        v[i].y = v[i].y * inverse * weight[i].y;
        if (n) *(float2 *) (n + i * 64) = v[i];
        v[i].x = activate(activation, gate[i].x) * v[i].x;
        v[i].y = activate(activation, gate[i].y) * v[i].y;
        if (y) *(float2 *) (y + i * 64) = v[i];
        store_activation_tile(h, row, tile + i, v[i].x, v[i].y);
    }
}

// Sine and cosine of RoPE's pair `j`, by its frequency and, behind all frequencies, the axis of the position it reads.
DEVICE void rope_sin_cos(const u32 *position, const float *frequencies, int pairs, int j, float &sin, float &cos) {
    const u32 first = position[0], second = position[1], third = position[2],
              axis = ((const u32 *) frequencies)[pairs + j];
    sin_cos((float) (axis == 0 ? first : axis == 1 ? second : third) * frequencies[j], sin, cos);
}

// ---- rotary embedding (RoPE) of one head by a block: column c < pairs makes a pair with column c + offset. The
// angles do not depend on the head, so they are computed before it is there, for the columns c + i blockDim.x.
#define ROPE_COLUMNS 2 // of a thread, at most: a block has a thread for each two columns
struct RopeAngles {
    float sin[ROPE_COLUMNS], cos[ROPE_COLUMNS];
    DEVICE static bool is_second(int c, int offset, int pairs) { return c >= offset && c < offset + pairs; }
    DEVICE void compute(const u32 *position, const float *frequencies, int head_dim, int offset, int pairs) {
#pragma unroll
        for (int i = 0; i < ROPE_COLUMNS; i++) {
            const int c = threadIdx.x + i * blockDim.x;
            const bool second = is_second(c, offset, pairs);
            sin[i] = 0.0f;
            cos[i] = 1.0f;
            if (c < head_dim && (c < pairs || second))
                rope_sin_cos(position, frequencies, pairs, second ? c - offset : c, sin[i], cos[i]);
        }
    }
    // Calls f(column, rotated value) for the thread's columns of `head`, which is in shared memory.
    template <class F>
    DEVICE void apply(const float *head, int head_dim, int offset, int pairs, F f) const {
#pragma unroll
        for (int i = 0; i < ROPE_COLUMNS; i++) {
            const int c = threadIdx.x + i * blockDim.x;
            if (c >= head_dim) return;
            const float own = head[c];
            if (is_second(c, offset, pairs)) f(c, fmaf(head[c - offset], sin[i], own * cos[i]));
            else f(c, c < pairs ? fmaf(-head[c + offset], sin[i], own * cos[i]) : own);
        }
    }
};
