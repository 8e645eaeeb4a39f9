// Which experts a row takes, and what they add up to. Experts::choose in
// backend/src/moe.rs defines the choice, bit for bit.

// A block a row: softmax summed in ascending order, the top_k largest, divided by
// their sum in order of rank, times the expert's own factor.
KERNEL __launch_bounds__(256) route(const float *scores, const float *scale, u32 *chosen, float *weights, int experts, int top_k) {
    extern __shared__ float powers[];
    __shared__ float shared[32];
    __shared__ u32 places[8];
    __shared__ float total;
    in_order();
    const u64 row = blockIdx.x;
    scores += row * experts;
    float max = -INFINITE;
    for (int e = threadIdx.x; e < experts; e += 256) max = larger(scores[e], max);
    max = warp_max(max);
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = max;
    __syncthreads();
    for (int i = 0; i < 8; i++) max = larger(shared[i], max);
    for (int e = threadIdx.x; e < experts; e += 256) powers[e] = exp_(scores[e] - max);
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (int e = 0; e < experts; e++) sum += powers[e];
        total = sum;
    }
    __syncthreads();
    for (int rank = 0; rank < top_k; rank++) {
        float v = -1.0f;
        u32 at = 0;
        for (int e = threadIdx.x; e < experts; e += 256)
            if (powers[e] > v) { v = powers[e]; at = e; }
#pragma unroll
        for (int o = 16; o; o >>= 1) {
            float w = __shfl_xor_sync(~0u, v, o);
            u32 wat = __shfl_xor_sync(~0u, at, o);
            if (w > v || (w == v && wat < at)) { v = w; at = wat; }
        }
        if ((threadIdx.x & 31) == 0) { shared[threadIdx.x >> 5] = v; places[threadIdx.x >> 5] = at; }
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int i = 1; i < 8; i++)
                if (shared[i] > v || (shared[i] == v && places[i] < at)) { v = shared[i]; at = places[i]; }
            chosen[row * top_k + rank] = at;
            weights[row * top_k + rank] = v / total;
            powers[at] = -1.0f;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (int rank = 0; rank < top_k; rank++) sum += weights[row * top_k + rank];
        for (int rank = 0; rank < top_k; rank++) {
            float w = weights[row * top_k + rank] / sum;
            weights[row * top_k + rank] = w * (scale ? scale[chosen[row * top_k + rank]] : 1.0f);
        }
    }
}

// Pairs (row, rank) by expert, in order within one. `lists`: experts in use, then
// for each its number, first pair and end. One block.
KERNEL __launch_bounds__(1024) group(const u32 *chosen, u32 *lists, u32 *pairs, int experts, int n) {
    extern __shared__ u32 counts[];
    in_order();
    for (int e = threadIdx.x; e < experts; e += 1024) {
        u32 count = 0;
        for (int i = 0; i < n; i++) count += chosen[i] == (u32) e;
        counts[e] = count;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 used = 0, at = 0;
        for (int e = 0; e < experts; e++) {
            if (!counts[e]) continue;
            lists[1 + 3 * used] = e;
            lists[2 + 3 * used] = at;
            at += counts[e];
            lists[3 + 3 * used] = at;
            used++;
        }
        lists[0] = used;
    }
    __syncthreads();
    const u32 used = lists[0];
    for (u32 u = threadIdx.x; u < used; u += 1024) {
        u32 at = lists[2 + 3 * u], e = lists[1 + 3 * u];
        for (int i = 0; i < n; i++)
            if (chosen[i] == e) pairs[at++] = i;
    }
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
