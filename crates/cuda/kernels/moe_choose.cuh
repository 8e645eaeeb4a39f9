// Routing of a mixture of experts: which experts a row takes (softmax and top-k, as Experts::choose in
// backend/src/moe.rs defines it, bit for bit), by a warp; and which experts a step of few rows takes, by a block.
// common.cuh, math.cuh, moe.cuh and mbarrier.cuh go before this.

// ---- a row, by a warp
// exp(score - largest score) of a row's experts, in registers: a lane has the experts lane + 32 i, of which there are
// 32 N at most, and -1 where there is none.
template <int N>
struct SoftmaxPowers {
    float v[N];
    // Scores, still as they are.
    DEVICE void load(const float *scores, int experts) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = lane + 32 * i < experts ? __ldcg(scores + lane + 32 * i) : -INF;
    }
    DEVICE void exponentiate(int experts) {
        const int lane = threadIdx.x & 31;
        float most[N];
#pragma unroll
        for (int i = 0; i < N; i++) most[i] = larger(v[i], -INF); // and not what is no number
#pragma unroll
        for (int step = 1; step < N; step *= 2)
#pragma unroll
            for (int i = 0; i + step < N; i += 2 * step) most[i] = larger(most[i], most[i + step]);
        // Integers in the order of floats, and back.
        auto ordered = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
        const float max = __int_as_float(ordered(__reduce_max_sync(~0u, ordered(__float_as_int(most[0])))));
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float power = exp_(v[i] - max);
            v[i] = lane + 32 * i < experts && power >= 0.0f ? power : -1.0f;
        }
    }
    // Their sum, in ascending order of experts, in every lane.
    DEVICE float sum(int experts) const {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (32 * i >= experts) break;
            const float own = larger(v[i], 0.0f); // nothing changes where 0 is added
#pragma unroll 8
            for (int l = 0; l < 32; l++) total += __shfl_sync(~0u, own, l);
        }
        return total;
    }
    // Takes the largest away, the first of equal ones, and returns it; `which` is its expert.
    DEVICE float take_largest(u32 &which) {
        float best[N];
        int at[N];
#pragma unroll
        for (int i = 0; i < N; i++) best[i] = v[i], at[i] = i;
#pragma unroll
        for (int step = 1; step < N; step *= 2)
#pragma unroll
            for (int i = 0; i + step < N; i += 2 * step)
                if (best[i + step] > best[i]) best[i] = best[i + step], at[i] = at[i + step];
        // Floats that are not negative are in the order of their bits, and -1 before them.
        const int own = __float_as_int(best[0]), largest = __reduce_max_sync(~0u, own);
        const u32 expert = best[0] < 0.0f ? 0 : (threadIdx.x & 31) + 32 * at[0];
        which = __reduce_min_sync(~0u, own == largest ? expert : ~0u);
#pragma unroll
        for (int i = 0; i < N; i++)
            if (which == (threadIdx.x & 31) + 32 * i) v[i] = -1.0f;
        return __int_as_float(largest);
    }
};
// A lane's rank, there are at most 32: its expert, and what belongs to it.
struct ChosenExpert {
    u32 which;
    float value;
};
template <int N>
DEVICE ChosenExpert take_top(SoftmaxPowers<N> &powers, int top_k) {
    ChosenExpert own = {0, 0.0f};
#pragma unroll 1
    for (int rank = 0; rank < top_k; rank++) {
        u32 which;
        const float value = powers.take_largest(which);
        if ((threadIdx.x & 31) == rank) own = {which, value};
    }
    return own;
}
// Stores weights of a row's experts: their powers divided by the `total` of all, then by their sum in order of rank,
// times the expert's own factor.
DEVICE void store_expert_weights(const ChosenExpert &own, float total, const float *scale, float *weights, int top_k) {
    const int lane = threadIdx.x & 31;
    const float weight = own.value / total;
    float sum = 0.0f;
    for (int rank = 0; rank < top_k; rank++) sum += __shfl_sync(~0u, weight, rank);
    if (lane < top_k) weights[lane] = weight / sum * (scale ? scale[own.which] : 1.0f);
}

// ---- a step of few rows, by a block
// What rows choose by. Each block of the experts' first product routes all rows for itself: that takes less time than a
// kernel between the router and the experts.
struct Routing {
    const float *scores;  // [rows, experts]
    const float *scale;   // the experts' own factors, or null
    float *weights;       // [rows, top_k]
    const u64 *tables[2]; // the experts' matrices, of either product
    // For the second product: the pairs, and the experts in use, either as a list that begins with one whose `count`
    // says how many there are, or as `lists`. The other is null.
    ActiveExpert *list;
    u32 *lists;
    int *pairs;
    int experts, top_k, rows;
    int prefetched; // bytes of each matrix of the second product that go to L2 while the first is computed
};
// Asks for the tables of matrices, which are read soon.
DEVICE void prefetch_tables(const Routing &r) {
    const int lines = r.experts / 16 + 1; // a table may begin anywhere
    for (int i = threadIdx.x; i < 2 * lines; i += blockDim.x)
        prefetch_l2((i < lines ? r.tables[0] : r.tables[1]) + min(i % lines * 16, r.experts - 1));
}
// Lists the experts in use with their matrices of the first product, and the sorted pairs, in shared memory; returns
// how many experts there are. `scratch` has room for rows top_k numbers, rounded up to a multiple of four, and rows
// top_k more; it may be used again afterwards.
// `meanwhile` is called while scores are on their way. A warp takes a row at a time, of at most 32 N experts.
template <int N, class F>
DEVICE int route_in_block(const Routing &r, bool stores_weights, ActiveExpert *list, int *pair, u32 *scratch,
                          F meanwhile) {
    __shared__ int used;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = r.rows * r.top_k;
    const u64 *matrices = r.tables[0];
    // The compiler may read `chosen` four numbers at a time, up to three behind its end: `firsts`, which other threads
    // write, begins behind those.
    u32 *chosen = scratch, *firsts = scratch + (n + 3 & ~3);
    SoftmaxPowers<N> powers;
    if (warp < r.rows) powers.load(r.scores + warp * r.experts, r.experts);
    meanwhile();
#pragma unroll 1
    for (int row = warp; row < r.rows; row += blockDim.x >> 5) {
        if (row != warp) powers.load(r.scores + row * r.experts, r.experts);
        powers.exponentiate(r.experts);
        const float total = stores_weights ? powers.sum(r.experts) : 1.0f;
        const ChosenExpert own = take_top(powers, r.top_k);
        if (lane < r.top_k) {
            chosen[row * r.top_k + lane] = own.which;
            // The experts of a single row need no sorting.
            if (r.rows == 1) {
                list[lane] = {(const u8 *) matrices[own.which], lane, 1, (u16) own.which};
                pair[lane] = lane;
            }
        }
        if (stores_weights) store_expert_weights(own, total, r.scale, r.weights + row * r.top_k, r.top_k);
    }
    __syncthreads();
    if (r.rows == 1) return n;
    // A thread a pair compares it with all others. The first pair of an expert notes where its pairs begin, and how
    // many there are.
    const u64 own_matrix = threadIdx.x < n ? matrices[chosen[threadIdx.x]] : 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const u32 own = chosen[i];
        u32 start = 0, count = 0, at = 0;
#pragma unroll 4
        for (int j = 0; j < n; j++) {
            const u32 other = chosen[j];
            start += other < own;
            count += other == own;
            at += other == own && j < i;
        }
        pair[start + at] = i;
        firsts[i] = at == 0 ? start << 16 | count : ~0u;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const u32 own = firsts[i];
        int before = 0, all = 0;
#pragma unroll 4
        for (int j = 0; j < n; j++) {
            before += firsts[j] < own;
            all += firsts[j] != ~0u;
        }
        if (i == 0) used = all;
        if (own == ~0u) continue;
        const u64 matrix = i == threadIdx.x ? own_matrix : matrices[chosen[i]];
        list[before] = {(const u8 *) matrix, (int) (own >> 16), (u16) own, (u16) chosen[i]};
    }
    __syncthreads();
    return used;
}
// Hands the experts in use on to the kernel of the second product and lets it start, by one block. That kernel may
// read them before it waits for this one; all other blocks have let it start.
DEVICE void hand_on_experts(const Routing &r, int used, const ActiveExpert *list, const int *pair) {
    for (int i = threadIdx.x; i < used; i += blockDim.x) {
        ActiveExpert e = list[i];
        if (r.lists) {
            u32 *of = r.lists + 1 + 3 * i;
            of[0] = e.expert;
            of[1] = e.first;
            of[2] = e.first + e.count;
        } else {
            e.w = (const u8 *) r.tables[1][e.expert];
            r.list[1 + i] = e;
        }
    }
    for (int i = threadIdx.x; i < r.rows * r.top_k; i += blockDim.x) r.pairs[i] = pair[i];
    if (threadIdx.x == 0) {
        if (r.lists) r.lists[0] = used;
        else r.list->count = used;
    }
    __threadfence();
    __syncthreads();
    pdl_launch(); // now that everybody sees it
}
// Asks for the matrices of the second product, some of them by each of `blocks`.
DEVICE void prefetch_second_product(const Routing &r, int used, const ActiveExpert *list, int block, int blocks) {
    constexpr int BYTES = 4096;
    const int each = (r.prefetched + BYTES - 1) / BYTES;
    for (int i = block + threadIdx.x * blocks; i < each * used; i += blockDim.x * blocks) {
        const int e = i / each, at = (i - e * each) * BYTES;
        bulk_prefetch_l2((const u8 *) r.tables[1][list[e].expert] + at, min(BYTES, r.prefetched - at));
    }
}
