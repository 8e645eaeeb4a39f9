// Which experts a row takes, and what they add up to. Experts::choose in
// backend/src/moe.rs defines the choice, bit for bit.

// A warp's row: softmax summed in ascending order, the top_k largest, divided by
// their sum in order of rank, times the expert's own factor. `powers` holds a float
// for each expert, and a lane has a rank: there are at most 32. Where MINE registers a lane
// hold them all, the largest are found there, while the ascending sum goes on.
#define MINE 8
template <bool REGISTERS>
__device__ __forceinline__ void choose(const float *scores, const float *scale, u32 *chosen, float *weights, float *powers, int experts, int top_k) {
    const int lane = threadIdx.x & 31;
    float mine[MINE], max = -INFINITE, total = 0.0f;
    if (REGISTERS) {
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            mine[i] = lane + 32 * i < experts ? scores[lane + 32 * i] : -INFINITE;
            max = larger(mine[i], max);
        }
    } else {
        for (int e = lane; e < experts; e += 32) max = larger(scores[e], max);
    }
    max = warp_max(max);
    if (REGISTERS) {
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const bool there = lane + 32 * i < experts;
            mine[i] = there ? exp_(mine[i] - max) : -1.0f;
            if (there) powers[lane + 32 * i] = mine[i];
        }
    } else {
        for (int e = lane; e < experts; e += 32) powers[e] = exp_(scores[e] - max);
    }
    __syncwarp();
    const int each = REGISTERS ? (experts + top_k - 1) / top_k : experts;
    int summed = 0, value = 0;
    u32 which = 0;
#pragma unroll 1
    for (int rank = 0; rank < top_k; rank++) {
        const int until = min(summed + each, experts);
#pragma unroll 8
        for (; summed < until; summed++) total += powers[summed];
        float v = -1.0f;
        u32 at = 0;
        if (REGISTERS) {
#pragma unroll
            for (int i = 0; i < MINE; i++)
                if (mine[i] > v) { v = mine[i]; at = lane + 32 * i; }
        } else {
            __syncwarp();
            for (int e = lane; e < experts; e += 32) {
                const float w = powers[e];
                if (w > v) { v = w; at = e; }
            }
        }
        // Floats that are not negative are in the order of their bits, and -1 before them.
        const int best = __reduce_max_sync(~0u, __float_as_int(v));
        at = __reduce_min_sync(~0u, __float_as_int(v) == best ? at : ~0u);
        if (lane == rank) {
            value = best;
            which = at;
        }
        if (REGISTERS) {
#pragma unroll
            for (int i = 0; i < MINE; i++)
                if (at == lane + 32 * i) mine[i] = -1.0f;
        } else if (lane == (at & 31)) {
            powers[at] = -1.0f;
        }
    }
    const float weight = __int_as_float(value) / total;
    float sum = 0.0f;
    for (int rank = 0; rank < top_k; rank++) sum += __shfl_sync(~0u, weight, rank);
    if (lane >= top_k) return;
    chosen[lane] = which;
    weights[lane] = weight / sum * (scale ? scale[which] : 1.0f);
}
__device__ __forceinline__ void choose_row(const float *scores, const float *scale, u32 *chosen, float *weights, float *powers, int experts, int top_k) {
    if (experts <= 32 * MINE) choose<true>(scores, scale, chosen, weights, powers, experts, top_k);
    else choose<false>(scores, scale, chosen, weights, powers, experts, top_k);
}
// Many rows: a warp a row, and then one block for the lists.
KERNEL __launch_bounds__(128) route(const float *scores, const float *scale, u32 *chosen, float *weights, int experts, int top_k, int rows) {
    extern __shared__ float powers[];
    in_order();
    const int warp = threadIdx.x >> 5;
    const u64 row = blockIdx.x * 4 + warp;
    if (row < (u64) rows) choose_row(scores + row * experts, scale, chosen + row * top_k, weights + row * top_k, powers + warp * experts, experts, top_k);
}
// Pairs (row, rank) by expert, in order within one, by a block, whose warps have a run of
// them each. `lists`: experts in use, then for each its number, first pair and end. `blocks`:
// the same, `most` pairs of an expert at a time, unless it is null.
KERNEL __launch_bounds__(1024, 1) group(const u32 *chosen, u32 *lists, u32 *pairs, Some *blocks, int experts, int n, int most) {
    extern __shared__ u32 counts[]; // [warps, experts]: pairs of a warp's, then where they go
    in_order();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int run = (n + blockDim.x - 1) / blockDim.x * 32, from = warp * run, to = min(from + run, n);
    u32 *own = counts + warp * experts, *all = counts + warps * experts; // of all warps
    for (int e = lane; e < experts; e += 32) own[e] = 0;
    // Calls f(pair, expert, the lanes of it) for all lanes that have a pair, then counts them.
    auto each = [&](auto f) {
        __syncwarp();
#pragma unroll 4
        for (int i = from; i < to; i += 32) {
            const bool there = i + lane < to;
            const u32 e = there ? chosen[i + lane] : ~0u, same = __match_any_sync(~0u, e), before = same & ((1u << lane) - 1);
            if (there) f(i + lane, e, before);
            __syncwarp();
            if (there && before == 0) own[e] += __popc(same);
            __syncwarp();
        }
    };
    each([](int, u32, u32) {});
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        u32 sum = 0;
#pragma unroll 8
        for (int w = 0; w < warps; w++) {
            const u32 count = counts[w * experts + e];
            counts[w * experts + e] = sum;
            sum += count;
        }
        all[e] = sum;
    }
    __syncthreads();
    // A warp walks the experts, 32 at a time: sums of those before.
    if (warp == 0) {
        u32 used = 0, at = 0, cut = 0;
        for (u32 first = 0; first < (u32) experts; first += 32) {
            const u32 e = first + lane, count = e < (u32) experts ? all[e] : 0;
            const u32 some = __ballot_sync(~0u, count > 0);
            u32 sum = count;
#pragma unroll
            for (int o = 1; o < 32; o *= 2) {
                const u32 below = __shfl_up_sync(~0u, sum, o);
                if (lane >= o) sum += below;
            }
            const u32 start = at + sum - count;
            if (count > 0) {
                u32 *list = lists + 1 + 3 * (used + __popc(some & ((1u << lane) - 1)));
                list[0] = e;
                list[1] = start;
                list[2] = start + count;
            }
            if (blocks) {
                const u32 own = (count + most - 1) / most;
                u32 upto = own;
#pragma unroll
                for (int o = 1; o < 32; o *= 2) {
                    const u32 below = __shfl_up_sync(~0u, upto, o);
                    if (lane >= o) upto += below;
                }
                for (u32 i = 0; i < own; i++) blocks[1 + cut + upto - own + i] = {e, start + i * most, min((u32) most, count - i * most)};
                cut += __shfl_sync(~0u, upto, 31);
            }
            if (e < (u32) experts) all[e] = start;
            used += __popc(some);
            at += __shfl_sync(~0u, sum, 31);
        }
        if (lane == 0) lists[0] = used;
        if (lane == 0 && blocks) blocks->count = cut;
    }
    __syncthreads();
    each([&](int pair, u32 e, u32 before) { pairs[all[e] + own[e] + __popc(before)] = pair; });
}
// The same of few pairs, that `chosen` holds in shared memory, with room for as many flags:
// a thread a pair looks at all of them. Lists of both matrices of experts as well, if asked for.
__device__ __forceinline__ void group_few(const u32 *chosen, u32 *lists, u32 *pairs, u32 *firsts, int n, const u64 *first_table, const u64 *second_table, Chosen *experts) {
    // On their way before they are wanted, by those who will want them.
    u64 first_matrix = 0, second_matrix = 0;
    if (experts && threadIdx.x < n) {
        first_matrix = first_table[chosen[threadIdx.x]];
        second_matrix = second_table[chosen[threadIdx.x]];
    }
    auto each = [&](auto f) {
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            u32 start = 0, count = 0, at = 0;
            for (int j = 0; j < n; j++) {
                start += chosen[j] < chosen[i];
                count += chosen[j] == chosen[i];
                at += chosen[j] == chosen[i] && j < i;
            }
            f(i, start, count, at);
        }
    };
    each([&](int i, u32 start, u32, u32 at) {
        pairs[start + at] = i;
        firsts[i] = at == 0;
    });
    __syncthreads();
    each([&](int i, u32 start, u32 count, u32 at) {
        u32 before = 0, used = 0;
        for (int j = 0; j < n; j++) {
            before += firsts[j] && chosen[j] < chosen[i];
            used += firsts[j];
        }
        if (i == 0) {
            lists[0] = used;
            if (experts) experts->count = used;
        }
        if (at > 0) return;
        if (experts) {
            experts[1 + before] = {(const u8 *) first_matrix, (int) start, (int) count};
            experts[1 + n + before] = {(const u8 *) second_matrix, (int) start, (int) count};
        }
        u32 *list = lists + 1 + 3 * before;
        list[0] = chosen[i];
        list[1] = start;
        list[2] = start + count;
    });
}
// Few rows: the first block does both, a warp a row. Others make a gate that does not wait
// for it, a share of a row each.
KERNEL __launch_bounds__(512) route_group(const float *scores, const float *scale, float *weights, u32 *lists, u32 *pairs, int experts, int top_k, int rows, Glu gate, const u64 *first_table, const u64 *second_table, Chosen *list) {
    extern __shared__ float powers[];
    start_next();
    // Where experts lie is about to be asked for.
    if (blockIdx.x == 0 && threadIdx.x < experts) asm volatile("prefetch.global.L2 [%0];" :: "l"((threadIdx.x & 1 ? second_table : first_table) + (threadIdx.x & ~1)));
    wait_for_previous();
    if (blockIdx.x > 0) {
        const int shares = (gate.cols + 2 * blockDim.x - 1) / (2 * blockDim.x), at = blockIdx.x - 1;
        glu_share(gate, at % shares, at / shares);
        return;
    }
    const int warp = threadIdx.x >> 5;
    u32 *chosen = (u32 *) (powers + rows * experts);
    if (warp < rows) choose_row(scores + warp * experts, scale, chosen + warp * top_k, weights + warp * top_k, powers + warp * experts, experts, top_k);
    __syncthreads();
    group_few(chosen, lists, pairs, chosen + rows * top_k, rows * top_k, first_table, second_table, list);
}

// A row's parts of its experts, and what they add up to.
struct Parts {
    const float *parts, *weights;
    float *y;
    int top_k;
};
#define RANKS 4 // whose parts are on their way at once
__device__ __forceinline__ Kept combined(const Parts &p, u64 row, int cols) {
    Kept y;
    const float *weight = p.weights + row * p.top_k;
    each_kept([&](int i, int c) {
        y.v[i] = make_float2(0.0f, 0.0f);
        if (c >= cols) return;
        const float *part = p.parts + row * p.top_k * cols + c;
        const bool pair = c + 1 < cols;
#pragma unroll 1
        for (int rank = 0; rank < p.top_k; rank += RANKS) {
            float2 v[RANKS];
#pragma unroll
            for (int j = 0; j < RANKS; j++) {
                const float *from = part + (u64) min(rank + j, p.top_k - 1) * cols;
                if (cols % 2 == 0) v[j] = *(const float2 *) from;
                else v[j] = make_float2(from[0], pair ? from[1] : 0.0f);
            }
#pragma unroll
            for (int j = 0; j < RANKS; j++)
                if (rank + j < p.top_k) {
                    y.v[i].x = fmaf(weight[rank + j], v[j].x, y.v[i].x);
                    y.v[i].y = fmaf(weight[rank + j], v[j].y, y.v[i].y);
                }
        }
    });
    return y;
}
// An expert that all rows share, and its gate.
struct Gated {
    const float *shared, *gate;
    float *gated;
    int f;
};
// `combine`, `gate_rows`, `add` and `add_norm` in one, with their bits: y = experts +
// shared, x = (from + y) factor, and what is made of it. A block a row, or a cluster.
KERNEL __launch_bounds__(1024, 1) mixed_norm(Parts m, Gated g, const float *from, float *x, int cols, float factor, float eps, Next next) {
    __shared__ float shared[32];
    start_next();
    const u64 row = blockIdx.x / blocks_of_row();
    if (blocks_of_row() > 1) meet_in_row();
    ask_next(next, 0, cols);
    wait_for_previous();
    Kept y = combined(m, row, cols), k = keep(g.shared + row * cols, cols);
    const float gate = activate(g.f, g.gate[row]);
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        k.v[i].x *= gate;
        k.v[i].y *= gate;
    }
    Kept r = keep(from + row * cols, cols);
    put(g.gated + row * cols, cols, k);
    add_kept(y, k, 1.0f);
    put(m.y + row * cols, cols, y);
    const Kept w = PARAMETER(next.weight[0], cols);
    add_kept(r, y, factor);
    put(x + row * cols, cols, r);
    put_next(next, row, cols, r, w, eps, shared);
}
// A dense block beside the experts, and the norms of both.
struct Beside {
    const float *dense, *dense_weight, *own_weight;
    float *sum, *own;
};
// `combine`, the norms of the dense block and of the experts, their sum and `add_norm` in
// one: x = (from + rms(rms(dense) + rms(experts)) post) factor. A block a row, or a cluster.
KERNEL __launch_bounds__(1024, 1) mixture_norm(Parts m, Beside b, const float *from, float *x, const float *post, int cols, float factor, float eps, Next next) {
    __shared__ float shared[4][32];
    start_next();
    const u64 row = blockIdx.x / blocks_of_row();
    if (blocks_of_row() > 1) meet_in_row();
    ask_kept(b.dense_weight, cols);
    ask_kept(b.own_weight, cols);
    ask_kept(post, cols);
    ask_next(next, 0, cols);
    wait_for_previous();
    Kept k = keep(b.dense + row * cols, cols), y = combined(m, row, cols);
    put(m.y + row * cols, cols, y);
    {
        const Kept of_dense = keep(b.dense_weight, cols), of_own = keep(b.own_weight, cols);
        float sums[2] = {squares(k), squares(y)};
        row_sums(sums, shared);
        stretch(k, inverse_rms(sums[0], cols, eps), of_dense, true);
        stretch(y, inverse_rms(sums[1], cols, eps), of_own, true);
    }
    put(b.own + row * cols, cols, y);
    add_kept(k, y, 1.0f);
    put(b.sum + row * cols, cols, k);
    Kept r;
    {
        const Kept of_sum = PARAMETER(post, cols);
        r = keep(from + row * cols, cols);
        normalise(k, cols, eps, of_sum, post, shared[2]);
    }
    const Kept w = PARAMETER(next.weight[0], cols);
    add_kept(r, k, factor);
    put(x + row * cols, cols, r);
    put_next(next, row, cols, r, w, eps, shared[3]);
}
// y[row] = sum over ranks of weight * part, by fused multiply-add from 0.
KERNEL combine(const float *parts, const float *weights, float *y, int cols, int top_k, u64 n) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u64 row = i / cols;
    float sum = 0.0f;
    for (int rank = 0; rank < top_k; rank++) {
        u64 pair = row * top_k + rank;
        sum = fmaf(weights[pair], parts[pair * cols + i % cols], sum);
    }
    y[i] = sum;
}
