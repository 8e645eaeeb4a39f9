// Routing of a mixture of experts by kernels of their own: of many rows, and where the experts' kernels do not route
// rows themselves. The pairs of row and expert are sorted by expert, as moe.cuh says. math.cuh, rows.cuh and
// moe_choose.cuh go before this.
//
//   scores [row, expert] --> a warp a row: softmax, top_k --> chosen, weights [row, rank]
//                                                             +-> counting sort --> lists, pairs, blocks

// A warp's row of so many experts that they do not fit registers: `powers` holds a float for each.
DEVICE ChosenExpert take_top_of_many(const float *scores, float *powers, float &total, int experts, int top_k) {
    const int lane = threadIdx.x & 31;
    float max = -INF;
    for (int e = lane; e < experts; e += 32) max = larger(scores[e], max);
    max = warp_max(max);
    for (int e = lane; e < experts; e += 32) powers[e] = exp_(scores[e] - max);
    __syncwarp();
    total = 0.0f;
#pragma unroll 8
    for (int e = 0; e < experts; e++) total += powers[e];
    ChosenExpert own = {0, 0.0f};
#pragma unroll 1
    for (int rank = 0; rank < top_k; rank++) {
        __syncwarp();
        float v = -1.0f;
        u32 at = 0;
        for (int e = lane; e < experts; e += 32) {
            const float w = powers[e];
            if (w > v) {
                v = w;
                at = e;
            }
        }
        // Floats that are not negative are in the order of their bits, and -1 before them.
        const int best = __reduce_max_sync(~0u, __float_as_int(v));
        at = __reduce_min_sync(~0u, __float_as_int(v) == best ? at : ~0u);
        if (lane == rank) own = {at, __int_as_float(best)};
        if (lane == (at & 31)) powers[at] = -1.0f;
    }
    return own;
}
// Scores that a lane has in registers; rows of more experts take the other path.
#define SCORES_PER_LANE 8
DEVICE void choose_row(const float *scores, const float *scale, u32 *chosen, float *weights, float *powers, int experts,
                       int top_k) {
    const int lane = threadIdx.x & 31;
    float total;
    ChosenExpert own;
    if (experts <= 32 * SCORES_PER_LANE) {
        SoftmaxPowers<SCORES_PER_LANE> in_registers;
        in_registers.load(scores, experts);
        in_registers.exponentiate(experts);
        total = in_registers.sum(experts);
        own = take_top(in_registers, top_k);
    } else {
        own = take_top_of_many(scores, powers, total, experts, top_k);
    }
    if (lane < top_k) chosen[lane] = own.which;
    store_expert_weights(own, total, scale, weights, top_k);
}
// Many rows: a warp a row here; `count_pairs` and `group_pairs` make the lists.
KERNEL __launch_bounds__(128)
    route(const float *scores, const float *scale, u32 *chosen, float *weights, int experts, int top_k, int rows) {
    extern __shared__ float powers[];
    pdl_sync();
    const int warp = threadIdx.x >> 5;
    const u64 row = blockIdx.x * 4 + warp;
    if (row < (u64) rows)
        choose_row(scores + row * experts, scale, chosen + row * top_k, weights + row * top_k, powers + warp * experts,
                   experts, top_k);
}
// Pairs of each block's share, of all `n`.
DEVICE int pairs_of_share(int n) {
    const int all = gridDim.x * blockDim.x;
    return (n + all - 1) / all * blockDim.x;
}
// How many pairs of each expert are in each block's share of all pairs: [blocks, experts].
KERNEL __launch_bounds__(1024, 1) count_pairs(const u32 *chosen, u32 *shares, int experts, int n) {
    extern __shared__ u32 counts[]; // [experts]
    pdl_launch();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    pdl_wait();
    const int share = pairs_of_share(n), to = min((int) (blockIdx.x + 1) * share, n);
    for (int i = blockIdx.x * share + threadIdx.x; i < to; i += blockDim.x) atomicAdd(counts + chosen[i], 1u);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) shares[blockIdx.x * experts + e] = counts[e];
}
// Sorts pairs (row, rank) by expert, stably. Blocks have a share of the pairs each, and their warps a run of those;
// `shares`, which a single block does not need, has what `count_pairs` counted. The first block stores `lists`: experts
// in use, then for each its number, first pair and end; and `blocks`: the same, `most` pairs of an expert at a time,
// unless null.
KERNEL __launch_bounds__(1024, 1) group_pairs(const u32 *chosen, const u32 *shares, u32 *lists, u32 *pairs,
                                              ExpertBlock *blocks, int experts, int n, int most) {
    // [warps, experts]: pairs of a warp's, then where they go; then two rows more, of all blocks and those before.
    extern __shared__ u32 counts[];
    pdl_sync();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int share = pairs_of_share(n), run = share / warps, from = blockIdx.x * share + warp * run,
              to = min(from + run, n);
    // Of all blocks, and of those before this one.
    u32 *own = counts + warp * experts, *all = counts + warps * experts, *earlier = all + experts;
    for (int e = lane; e < experts; e += 32) own[e] = 0;
    for (int e = threadIdx.x; e < 2 * experts; e += blockDim.x) all[e] = 0;
    // Calls f(pair, expert, the lanes of it) for all lanes that have a pair, then counts them.
    auto each = [&](auto f) {
        __syncwarp();
#pragma unroll 4
        for (int i = from; i < to; i += 32) {
            const bool there = i + lane < to;
            const u32 e = there ? chosen[i + lane] : ~0u, same = __match_any_sync(~0u, e),
                      before = same & ((1u << lane) - 1);
            if (there) f(i + lane, e, before);
            __syncwarp();
            if (there && before == 0) own[e] += __popc(same);
            __syncwarp();
        }
    };
    each([](int, u32, u32) {});
    __syncthreads();
    if (gridDim.x > 1)
#pragma unroll 4
        for (int i = threadIdx.x; i < (int) gridDim.x * experts; i += blockDim.x) {
            const u32 block = (u32) i / experts, e = i - block * experts, count = shares[i];
            if (count == 0) continue;
            atomicAdd(all + e, count);
            if (block < blockIdx.x) atomicAdd(earlier + e, count);
        }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        u32 sum = earlier[e];
#pragma unroll 8
        for (int w = 0; w < warps; w++) {
            const u32 count = counts[w * experts + e];
            counts[w * experts + e] = sum;
            sum += count;
        }
        if (gridDim.x == 1) all[e] = sum;
    }
    __syncthreads();
    // Prefix sums over experts by one warp, 32 at a time.
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
            if (count > 0 && blockIdx.x == 0) {
                u32 *list = lists + 1 + 3 * (used + __popc(some & ((1u << lane) - 1)));
                list[0] = e;
                list[1] = start;
                list[2] = start + count;
            }
            if (blocks && blockIdx.x == 0) {
                const u32 own = (count + most - 1) / most;
                u32 upto = own;
#pragma unroll
                for (int o = 1; o < 32; o *= 2) {
                    const u32 below = __shfl_up_sync(~0u, upto, o);
                    if (lane >= o) upto += below;
                }
                for (u32 i = 0; i < own; i++)
                    blocks[1 + cut + upto - own + i] = {e, start + i * most, min((u32) most, count - i * most)};
                cut += __shfl_sync(~0u, upto, 31);
            }
            if (e < (u32) experts) all[e] = start;
            used += __popc(some);
            at += __shfl_sync(~0u, sum, 31);
        }
        if (lane == 0 && blockIdx.x == 0) {
            lists[0] = used;
            if (blocks) blocks->count = cut;
        }
    }
    __syncthreads();
    each([&](int pair, u32 e, u32 before) { pairs[all[e] + own[e] + __popc(before)] = pair; });
}
// The same of few pairs, which `chosen` holds in shared memory, with room for as many flags: a thread a pair compares
// it with all others.
DEVICE void group_pairs_small(const u32 *chosen, u32 *lists, u32 *pairs, u32 *firsts, int n) {
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
        if (i == 0) lists[0] = used;
        if (at > 0) return;
        u32 *list = lists + 1 + 3 * before;
        list[0] = chosen[i];
        list[1] = start;
        list[2] = start + count;
    });
}
// Few rows: the first block routes, a warp a row, and sorts. The others compute a GLU that does not depend on it, a
// chunk of a row each.
KERNEL __launch_bounds__(512) route_and_group(const float *scores, const float *scale, float *weights, u32 *lists,
                                              u32 *pairs, int experts, int top_k, int rows, GluArgs gate) {
    extern __shared__ float powers[];
    pdl_sync();
    if (blockIdx.x > 0) {
        const int chunks = glu_chunks(gate.cols), at = blockIdx.x - 1;
        glu_chunk(gate, at % chunks, at / chunks);
        return;
    }
    const int warp = threadIdx.x >> 5;
    u32 *chosen = (u32 *) (powers + rows * experts);
    if (warp < rows)
        choose_row(scores + warp * experts, scale, chosen + warp * top_k, weights + warp * top_k,
                   powers + warp * experts, experts, top_k);
    __syncthreads();
    group_pairs_small(chosen, lists, pairs, chosen + rows * top_k, rows * top_k);
}
