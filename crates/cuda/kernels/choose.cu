// Which token follows each row of logits: `TokenChoice` in backend/src/choice.rs, with
// equal bits. Five kernels one after the other: the largest of each part of
// a row; what tokens weigh, by how far they are below it; which is the last to be kept,
// the only one with a block a row; the best of each part; the best. Nothing depends on
// the order in which threads come: masses are integers, and of equal scores the lower
// token wins. Before them, `mask_logits` takes away the tokens that may not follow, and
// `edit_logits` does what penalties and biases ask for.

// As src/choose.rs lays it out.
struct TokenChoice {
    u64 seed, position;
    float scale; // 1/T, 0 if greedy
    float top_p;
    float min_p; // its logarithm, -inf if there is none
    u32 top_k;   // 0 if there is none
    float floor; // the least scaled logit, LEAST or more
    u32 unused;
};

#define THREADS 256
#define CUT_THREADS 1024
#define PART 2048 // columns of a block, as in src/choose.rs
#define BUCKETS 256
#define NO_MASS 29.0f
#define LEAST (-3.40282347e38f) // of all numbers
#define MAX_GUMBEL 16.635532f

// ---- noise of a token (backend/src/noise.rs)
__device__ __forceinline__ u32 draw(const TokenChoice &c, u32 token) {
    u32 x[4] = {token / 4, (u32) c.position, (u32) (c.position >> 32), 0};
#pragma unroll
    for (u32 i = 0; i < 10; i++) {
        const u64 p0 = (u64) x[0] * 0xd2511f53u, p1 = (u64) x[2] * 0xcd9e8d57u;
        x[0] = (u32) (p1 >> 32) ^ x[1] ^ ((u32) c.seed + 0x9e3779b9u * i);
        x[2] = (u32) (p0 >> 32) ^ x[3] ^ ((u32) (c.seed >> 32) + 0xbb67ae85u * i);
        x[1] = (u32) p1;
        x[3] = (u32) p0;
    }
    const u32 low = token & 1 ? x[1] : x[0], high = token & 1 ? x[3] : x[2];
    return (token & 2 ? high : low) >> 9;
}
__device__ __forceinline__ float gumbel(u32 draw) { return -ln_(-ln_(((float) draw + 0.5f) * 1.1920928955078125e-7f)); }

// e^d in units of 2^-40, for d <= 0.
__device__ __forceinline__ u64 mass(float d) {
    d = d > -NO_MASS - 1.0f ? d : -NO_MASS - 1.0f;
    const float shifted = d * 1.44269504088896340736f + 12582912.0f, n = shifted - 12582912.0f;
    const float r = d - n * 0.6933594f - n * -2.1219444e-4f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const float e = __uint_as_float(__float_as_uint(p) + ((__float_as_uint(shifted) - 0x4b400000u) << 23));
    return (u64) (__double_as_longlong((double) e + 4096.0) - 0x40b0000000000000ll);
}

// Ascending keys are descending z, then ascending ids.
__device__ __forceinline__ u64 key(float z, u32 id) {
    const u32 bits = __float_as_uint(z + 0.0f);
    return (u64) (bits >> 31 ? bits : bits ^ 0x7fffffffu) << 32 | id;
}
__device__ __forceinline__ float z_of(u64 key) {
    const u32 bits = (u32) (key >> 32);
    return __uint_as_float(bits >> 31 ? bits : bits ^ 0x7fffffffu);
}

// A token and how good it is; of no token, all ones.
struct Best {
    float score;
    u32 id;
    __device__ __forceinline__ void meet(float other, u32 its) {
        if (other > score || (other == score && its < id)) {
            score = other;
            id = its;
        }
    }
};
// The best of the block's, for all threads.
__device__ __forceinline__ Best block_best(Best best) {
    __shared__ Best bests[32];
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        const float other = __shfl_xor_sync(~0u, best.score, o);
        const u32 its = __shfl_xor_sync(~0u, best.id, o);
        best.meet(other, its);
    }
    __syncthreads();
    if ((threadIdx.x & 31) == 0) bests[threadIdx.x >> 5] = best;
    __syncthreads();
    for (int i = 0; i < (int) (blockDim.x >> 5); i++) best.meet(bests[i].score, bests[i].id);
    return best;
}
__device__ __forceinline__ Best best_part(const Best *parts, u32 n) {
    Best best = {-INF, ~0u};
#pragma unroll 1
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) best.meet(parts[i].score, parts[i].id);
    return block_best(best);
}

// A row of logits, how its token is chosen, and its largest.
struct Row {
    const float *x;
    const u32 *ids;
    TokenChoice c;
    u32 cols, parts, first; // `first` is all ones where the row gives no token
    float top;              // scaled
    // For a block of the row; `tops` are those of its parts.
    __device__ __forceinline__ Row(const float *x, const u32 *ids, int apart, const TokenChoice *choices,
                                   const Best *tops, u32 row, int cols)
        : x(x + (u64) row * cols), ids(ids ? ids + (u64) row * apart : ids), c(choices[row]), cols(cols),
          parts((cols + PART - 1) / PART) {
        const Best best = best_part(tops + row * parts, parts);
        // A row with NaN, too: `choose_tops` has it pass for the largest.
        first = fabsf(best.score) < INF ? best.id : ~0u;
        top = best.score * c.scale;
    }
    __device__ __forceinline__ u32 id(u32 i) const { return ids ? ids[i] : i; }
    // The largest alone decides.
    __device__ __forceinline__ bool alone() const { return first == ~0u || c.scale == 0.0f || !(fabsf(top) < INF); }
    __device__ __forceinline__ bool counts() const { return c.top_k > 0 && c.top_k < cols; }
    __device__ __forceinline__ bool cuts() const { return !alone() && (counts() || c.top_p < 1.0f); }
    __device__ __forceinline__ float z(u32 i) const { return x[i] * c.scale; }
    // How far a token is below the largest, roughly. The last bucket's have no mass.
    __device__ __forceinline__ int bucket(float z) const { return (int) fminf((top - z) * 8.0f, BUCKETS - 1.0f); }
};
template <class F>
__device__ __forceinline__ void each_of_part(int cols, F f) {
    const u32 first = blockIdx.x * PART + threadIdx.x;
#pragma unroll 4
    for (int i = 0; i < PART / THREADS; i++)
        if (first + i * THREADS < (u32) cols) f(first + i * THREADS);
}

#define NO_MASK 0xffffffffu // instead of where a row's mask starts: the row has none

// x[row][token] = -inf where the row's mask has no bit of the token. `masks`: for each row the word at which its mask
// starts, or NO_MASK, then the masks, 32 tokens a word, the lowest bit first. Block (part, row).
KERNEL __launch_bounds__(THREADS) mask_logits(float *x, const u32 *masks, int cols) {
    pdl_sync();
    const u32 start = masks[blockIdx.y];
    if (start == NO_MASK) return;
    x += (u64) blockIdx.y * cols;
    masks += start;
    each_of_part(cols, [&](u32 i) {
        if (!(masks[i >> 5] >> (i & 31) & 1)) x[i] = -INF;
    });
}

#define EDIT_SHIFT 30 // as in src/choose.rs

// x[row][column] after the row's edits, each rounded on its own, as `Edit` in backend/src/edit.rs has them: 0 divides
// by a number or multiplies with it, 1 adds it, 2 makes -inf. `edits`: for each row the word at which its edits start,
// and where the last row's end; then two words an edit, what is done over the column, and the number. Edits of a column
// lie side by side, and the thread of the first one does them all. What is NaN or inf stays. Block (edits, row).
KERNEL __launch_bounds__(THREADS) edit_logits(float *x, const u32 *edits, int cols) {
    pdl_sync();
    const u32 first = edits[blockIdx.y], end = edits[blockIdx.y + 1];
    u32 at = first + 2 * (blockIdx.x * THREADS + threadIdx.x);
    if (at >= end) return;
    const u32 below = (1u << EDIT_SHIFT) - 1, column = edits[at] & below;
    if (at > first && (edits[at - 2] & below) == column) return;
    x += (u64) blockIdx.y * cols + column;
    float l = *x;
    if (!(l < INF)) return;
#pragma unroll 1
    for (; at < end && (edits[at] & below) == column; at += 2) {
        const u32 what = edits[at] >> EDIT_SHIFT;
        const float by = __uint_as_float(edits[at + 1]);
        if (what == 0) l = l > 0.0f ? __fdiv_rn(l, by) : __fmul_rn(l, by);
        else l = what == 1 ? __fadd_rn(l, by) : -INF;
    }
    *x = l;
}

// `ids`, here and below: the tokens of a row's columns, those of the next row `apart` words behind; null if a column is
// its own token.

// The largest logit of each part, block (part, row); also clears what `choose_weigh` adds to, if there is any.
KERNEL __launch_bounds__(THREADS)
    choose_tops(const float *x, const u32 *ids, int apart, Best *tops, u64 *weights, int cols) {
    pdl_sync();
    const float *row = x + (u64) blockIdx.y * cols;
    if (ids) ids += (u64) blockIdx.y * apart;
    Best best = {-INF, ~0u};
    each_of_part(cols, [&](u32 i) {
        if (!(row[i] <= -INF)) best.meet(row[i] == row[i] ? row[i] : INF, ids ? ids[i] : i);
    });
    best = block_best(best);
    if (threadIdx.x == 0) tops[blockIdx.y * gridDim.x + blockIdx.x] = best;
    if (weights && blockIdx.x == 0)
        for (int i = threadIdx.x; i < 2 * BUCKETS; i += THREADS) weights[(u64) blockIdx.y * 2 * BUCKETS + i] = 0;
}

// Block (part, row). `weights`: [rows, 2, BUCKETS], tokens and their mass.
KERNEL __launch_bounds__(THREADS) choose_weigh(const float *x, const u32 *ids, int apart, const TokenChoice *choices,
                                               const Best *tops, u64 *weights, int cols) {
    __shared__ u32 tokens[BUCKETS], low[BUCKETS],
        high[BUCKETS]; // a mass is high 2^20 + low: 2^32 is not reached in a part
    pdl_sync();
    const Row row(x, ids, apart, choices, tops, blockIdx.y, cols);
    if (!row.cuts()) return;
    for (int i = threadIdx.x; i < BUCKETS; i += THREADS) tokens[i] = low[i] = high[i] = 0;
    __syncthreads();
    u32 far = 0;
    each_of_part(cols, [&](u32 i) {
        const float z = row.z(i);
        if (!(z >= row.c.floor)) return;
        const int bucket = row.bucket(z);
        if (bucket == BUCKETS - 1) {
            far++;
            return;
        }
        atomicAdd(&tokens[bucket], 1u);
        const u64 m = mass(z - row.top);
        if (u32 part = (u32) m & 0xfffffu) atomicAdd(&low[bucket], part);
        if (u32 part = (u32) (m >> 20)) atomicAdd(&high[bucket], part);
    });
#pragma unroll
    for (int o = 16; o; o >>= 1) far += __shfl_xor_sync(~0u, far, o);
    if ((threadIdx.x & 31) == 0) atomicAdd(&tokens[BUCKETS - 1], far);
    __syncthreads();
    weights += (u64) blockIdx.y * 2 * BUCKETS;
    for (int i = threadIdx.x; i < BUCKETS; i += THREADS) {
        if (tokens[i]) atomicAdd(&weights[i], (u64) tokens[i]);
        const u64 m = ((u64) high[i] << 20) + low[i];
        if (m) atomicAdd(&weights[BUCKETS + i], m);
    }
}

// What the threads of `choose_cut` share.
struct Shared {
    u64 weights[BUCKETS];
    u64 found, before;
    u32 n_keys;
};
__device__ __forceinline__ u64 block_total(u64 v, Shared &s) {
    __syncthreads();
    if (threadIdx.x == 0) s.found = 0;
    __syncthreads();
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    if ((threadIdx.x & 31) == 0) atomicAdd(&s.found, v);
    __syncthreads();
    return s.found;
}
// The first bucket up to which there is as much as `wanted`, or the last one; how much
// lies before it. A lane of the first warp has eight.
__device__ __forceinline__ u32 bucket_of(u64 wanted, u64 &before, Shared &s) {
    __syncthreads();
    if (threadIdx.x < 32) {
        const u64 *own = s.weights + 8 * threadIdx.x;
        u64 sum = 0;
        for (int i = 0; i < 8; i++) sum += own[i];
        u64 up_to = sum;
#pragma unroll
        for (int o = 1; o < 32; o *= 2) {
            const u64 left = __shfl_up_sync(~0u, up_to, o);
            if ((int) threadIdx.x >= o) up_to += left;
        }
        const u32 reached = __ballot_sync(~0u, up_to >= wanted);
        if (threadIdx.x == (reached ? __ffs(reached) - 1 : 31)) {
            u64 all = up_to - sum;
            int i = 0;
            while (i < 7 && all + own[i] < wanted) all += own[i++];
            s.found = 8 * threadIdx.x + i;
            s.before = all;
        }
    }
    __syncthreads();
    before = s.before;
    return (u32) s.found;
}
// The least key up to which `n` keys weigh as much as `wanted`; all ones if they do not.
template <class F>
__device__ __forceinline__ u64 cut(const u64 *keys, u32 n, u64 wanted, F weight, Shared &s) {
    u64 total = 0, differ = 0;
    const u64 any = n ? keys[0] : 0;
    for (u32 i = threadIdx.x; i < n; i += CUT_THREADS) {
        total += weight(keys[i]);
        differ |= keys[i] ^ any;
    }
    if (block_total(total, s) < wanted) return ~0ull;
    __syncthreads();
    if (threadIdx.x == 0) s.before = 0;
    __syncthreads();
    if (differ) atomicOr(&s.before, differ);
    __syncthreads();
    // Digits of eight bits from the first one that differs.
    int high = s.before ? 64 - __clzll((long long) s.before) : 0;
    u64 prefix = high < 64 ? any >> high : 0;
#pragma unroll 1
    while (high > 0) {
        const int from = high > 8 ? high - 8 : 0;
        __syncthreads();
        for (int i = threadIdx.x; i < BUCKETS; i += CUT_THREADS) s.weights[i] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < n; i += CUT_THREADS) {
            const u64 key = keys[i];
            if (high == 64 || key >> high == prefix)
                atomicAdd(&s.weights[key >> from & ((1u << (high - from)) - 1)], weight(key));
        }
        u64 before;
        prefix = prefix << (high - from) | bucket_of(wanted, before, s);
        wanted -= before;
        high = from;
    }
    return prefix;
}
// The keys of a bucket's tokens, in no order.
__device__ __forceinline__ u32 collect(const Row &row, int bucket, u64 *keys, Shared &s) {
    __syncthreads();
    if (threadIdx.x == 0) s.n_keys = 0;
    __syncthreads();
#pragma unroll 4
    for (u32 i = threadIdx.x; i < row.cols; i += CUT_THREADS) {
        const float z = row.z(i);
        if (z >= row.c.floor && row.bucket(z) == bucket) keys[atomicAdd(&s.n_keys, 1u)] = key(z, row.id(i));
    }
    __syncthreads();
    return s.n_keys;
}
// A block a row: the last key that is kept. `keys`: room for `cols` of each row.
KERNEL __launch_bounds__(CUT_THREADS, 1)
    choose_cut(const float *x, const u32 *ids, int apart, const TokenChoice *choices, const Best *tops,
               const u64 *weights, u64 *keys, u64 *limits, int cols) {
    __shared__ Shared s;
    pdl_sync();
    const Row row(x, ids, apart, choices, tops, blockIdx.x, cols);
    if (!row.cuts()) {
        if (threadIdx.x == 0) limits[blockIdx.x] = ~0ull;
        return;
    }
    keys += (u64) blockIdx.x * cols;
    weights += (u64) blockIdx.x * 2 * BUCKETS;
    auto mass_of = [&](u64 key) { return mass(z_of(key) - row.top); };
    u64 limit = ~0ull, before;
    int collected = -1;
    u32 n = 0;
    if (row.counts()) {
        for (int i = threadIdx.x; i < BUCKETS; i += CUT_THREADS) s.weights[i] = weights[i];
        collected = (int) bucket_of(row.c.top_k, before, s);
        n = collect(row, collected, keys, s);
        limit = cut(keys, n, row.c.top_k - before, [](u64) { return (u64) 1; }, s);
    }
    if (row.c.top_p < 1.0f) {
        // Of those that top-k leaves.
        auto left = [&](u64 key) { return key <= limit ? mass_of(key) : 0; };
        u64 edge = 0;
        if (limit != ~0ull) {
            for (u32 i = threadIdx.x; i < n; i += CUT_THREADS) edge += left(keys[i]);
            edge = block_total(edge, s);
        }
        u64 total = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < BUCKETS; i += CUT_THREADS) {
            u64 m = weights[BUCKETS + i];
            if (limit != ~0ull && i >= collected) m = i == collected ? edge : 0;
            s.weights[i] = m;
            total += m;
        }
        total = block_total(total, s);
        const u64 wanted = (u64) ceil((double) row.c.top_p * (double) total);
        const int bucket = (int) bucket_of(wanted, before, s);
        if (bucket != collected) n = collect(row, bucket, keys, s);
        limit = min(limit, cut(keys, n, wanted - before, left, s));
    }
    if (threadIdx.x == 0) limits[blockIdx.x] = limit;
}

// Block (part, row). `limits` null: all are kept.
KERNEL __launch_bounds__(THREADS) choose_noise(const float *x, const u32 *ids, int apart, const TokenChoice *choices,
                                               const Best *tops, const u64 *limits, Best *bests, int cols) {
    pdl_sync();
    const Row row(x, ids, apart, choices, tops, blockIdx.y, cols);
    if (row.alone()) return;
    const u64 limit = limits ? limits[blockIdx.y] : ~0ull;
    const float least = larger(row.top + row.c.min_p, row.c.floor);
    auto noise = [&](u32 id) { return gumbel(draw(row.c, id)); };
    // The largest has some noise; who could not beat it has none drawn. Of those that are
    // equal once scaled, another may be all that is left.
    Best best = {-INF, ~0u};
    if (key(row.top, row.first) <= limit) best = {row.top + noise(row.first), row.first};
    each_of_part(cols, [&](u32 i) {
        const float z = row.z(i);
        const u32 id = row.id(i);
        if (!(z >= least) || key(z, id) > limit || z + MAX_GUMBEL < best.score) return;
        best.meet(z + noise(id), id);
    });
    best = block_best(best);
    if (threadIdx.x == 0) bests[blockIdx.y * gridDim.x + blockIdx.x] = best;
}
// A block a row.
KERNEL __launch_bounds__(THREADS) choose_best(const float *x, const u32 *ids, int apart, const TokenChoice *choices,
                                              const Best *tops, const Best *bests, u32 *chosen, int cols) {
    pdl_sync();
    const Row row(x, ids, apart, choices, tops, blockIdx.x, cols);
    Best best = {0.0f, row.first};
    if (!row.alone()) best = best_part(bests + blockIdx.x * row.parts, row.parts);
    if (threadIdx.x == 0) chosen[blockIdx.x] = best.id;
}

// The probability of each row's likeliest token, roughly; 0 for a row that gives none. A block a row.
KERNEL __launch_bounds__(CUT_THREADS) confidences(const float *x, float *out, int cols) {
    __shared__ float maxima[CUT_THREADS / 32], sums[CUT_THREADS / 32];
    pdl_sync();
    const float *row = x + (u64) blockIdx.x * cols;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    // A sum of exponentials relative to the largest so far; NaN stays.
    float max = LEAST, sum = 0.0f;
    auto meet = [&](float other, float of_other) {
        const float top = other > max ? other : max;
        sum = sum * __expf(max - top) + of_other * __expf(other - top);
        max = top;
    };
#pragma unroll 4
    for (int i = threadIdx.x; i < cols; i += CUT_THREADS) meet(row[i], 1.0f);
#pragma unroll
    for (int o = 16; o; o >>= 1) meet(__shfl_xor_sync(~0u, max, o), __shfl_xor_sync(~0u, sum, o));
    if (lane == 0) {
        maxima[warp] = max;
        sums[warp] = sum;
    }
    __syncthreads();
    if (warp > 0) return;
    max = maxima[lane];
    sum = sums[lane];
#pragma unroll
    for (int o = 16; o; o >>= 1) meet(__shfl_xor_sync(~0u, max, o), __shfl_xor_sync(~0u, sum, o));
    if (lane == 0) out[blockIdx.x] = sum > 0.0f && max < INF ? 1.0f / sum : 0.0f;
}

// What some ways of sampling ask of a whole row of logits (`Moments` in backend/src/moments.rs). `out`: for each part
// of each row that `rows` names how many are above -inf, their distances from the row's largest in units of 2^-12, the
// squares of those, the tokens' mass, and mass times distance; then the bits of the largest. Block (part, named row).
KERNEL __launch_bounds__(THREADS) moments(const float *x, const u32 *rows, const Best *tops, u64 *out, int cols) {
    __shared__ u64 sums[5];
    pdl_sync();
    const u32 row = rows[blockIdx.y];
    x += (u64) row * cols;
    if (threadIdx.x < 5) sums[threadIdx.x] = 0;
    // Waits for the zeros, too.
    const float top = best_part(tops + (u64) row * gridDim.x, gridDim.x).score;
    u64 own[5] = {0, 0, 0, 0, 0};
    if (fabsf(top) < INF) {
        each_of_part(cols, [&](u32 i) {
            const float l = x[i];
            if (!(l > -INF)) return;
            const u64 distance = min(__float2uint_rz((top - l) * 4096.0f), 1u << 24), m = mass(l - top);
            own[0]++;
            own[1] += distance;
            own[2] += distance * distance;
            own[3] += m;
            own[4] += m * __float2uint_rz((top - l) * 1048576.0f) >> 20;
        });
    }
#pragma unroll
    for (int i = 0; i < 5; i++) {
#pragma unroll
        for (int o = 16; o; o >>= 1) own[i] += __shfl_xor_sync(~0u, own[i], o);
        if ((threadIdx.x & 31) == 0) atomicAdd(&sums[i], own[i]);
    }
    __syncthreads();
    out += ((u64) blockIdx.y * gridDim.x + blockIdx.x) * 6;
    if (threadIdx.x < 5) out[threadIdx.x] = sums[threadIdx.x];
    if (threadIdx.x == 5) out[5] = __float_as_uint(top);
}

// What a row says of its tokens, `Likeliest` in backend/src/choice.rs. Three kernels: the
// best of each part, what each part weighs, and both of the row.

// As src/choose.rs lays it out: a row of logits and a token.
struct Asked {
    u32 row, token;
};
// The same, followed by the `n` best.
struct Likeliest {
    u64 mass;
    float logit;
    u32 unused;
};

// The `n` best of what `each` hands out, the best first; of no token where there are fewer.
template <class Each>
__device__ __forceinline__ void best_first(Best *bests, int n, Each each) {
    Best last = {INF, ~0u};
#pragma unroll 1
    for (int i = 0; i < n; i++) {
        Best best = {-INF, ~0u};
        each([&](float x, u32 id) {
            const bool follows = i == 0 || x < last.score || (x == last.score && id > last.id);
            if (x > -INF && follows) best.meet(x, id);
        });
        last = block_best(best);
        if (threadIdx.x == 0) bests[i] = last;
    }
}

// Block (part, asked). `bests`: [asked, parts, n].
KERNEL __launch_bounds__(THREADS) likely_parts(const float *x, const Asked *asked, Best *bests, int cols, int n) {
    pdl_sync();
    const float *row = x + (u64) asked[blockIdx.y].row * cols;
    const u32 first = blockIdx.x * PART + threadIdx.x;
    float own[PART / THREADS];
#pragma unroll
    for (int i = 0; i < PART / THREADS; i++) {
        const u32 id = first + i * THREADS;
        own[i] = id < (u32) cols ? row[id] : -INF;
    }
    auto each = [&](auto meet) {
#pragma unroll
        for (int i = 0; i < PART / THREADS; i++) meet(own[i], first + i * THREADS);
    };
    best_first(bests + ((u64) blockIdx.y * gridDim.x + blockIdx.x) * n, n, each);
}

// Block (part, asked). `masses`: [asked, parts].
KERNEL __launch_bounds__(THREADS)
    likely_masses(const float *x, const Asked *asked, const Best *bests, u64 *masses, int cols, int n) {
    __shared__ u64 sums[THREADS / 32];
    pdl_sync();
    const float *row = x + (u64) asked[blockIdx.y].row * cols;
    bests += (u64) blockIdx.y * gridDim.x * n;
    Best best = {-INF, ~0u};
    for (u32 i = threadIdx.x; i < gridDim.x; i += THREADS) best.meet(bests[i * n].score, bests[i * n].id);
    best = block_best(best);
    u64 sum = 0;
    each_of_part(cols, [&](u32 i) { sum += mass(row[i] - best.score); });
#pragma unroll
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < THREADS / 32; i++) sum += sums[i];
    masses[(u64) blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

// A block an asked. `out`: a `Likeliest` and `n` bests for each.
KERNEL __launch_bounds__(THREADS) likely_rows(const float *x, const Asked *asked, const Best *bests, const u64 *masses,
                                              Likeliest *out, int cols, int n, int parts) {
    pdl_sync();
    const Asked a = asked[blockIdx.x];
    bests += (u64) blockIdx.x * parts * n;
    masses += (u64) blockIdx.x * parts;
    out = (Likeliest *) ((char *) out + (u64) blockIdx.x * (sizeof(Likeliest) + n * sizeof(Best)));
    auto each = [&](auto meet) {
#pragma unroll 1
        for (int i = threadIdx.x; i < parts * n; i += THREADS) meet(bests[i].score, bests[i].id);
    };
    best_first((Best *) (out + 1), n, each);
    if (threadIdx.x > 0) return;
    u64 mass = 0;
    for (int i = 0; i < parts; i++) mass += masses[i];
    const float logit = x[(u64) a.row * cols + a.token];
    *out = {mass, logit > -INF ? logit : -INF, 0};
}

// Which groups of tokens are the best `top` of a row's: a thread a group, block (some
// groups, row). A better group comes earlier in `ids: [rows, top, size]`.
KERNEL __launch_bounds__(128)
    best_groups(const float *scores, const u32 *tokens, u32 *ids, int groups, int size, int top) {
    pdl_sync();
    const float *row = scores + (u64) blockIdx.y * groups;
    const int own = blockIdx.x * 128 + threadIdx.x;
    if (own >= groups) return;
    // The order of all numbers, those of either sign of zero and those that are none.
    auto rank = [&](int i) {
        const int bits = __float_as_int(row[i]);
        return bits ^ (int) ((u32) (bits >> 31) >> 1);
    };
    const int mine = rank(own);
    int before = 0;
#pragma unroll 8
    for (int i = 0; i < groups; i++) {
        const int other = rank(i);
        before += other > mine || (other == mine && i < own);
    }
    if (before >= top) return;
    ids += ((u64) blockIdx.y * top + before) * size;
    for (int i = 0; i < size; i++) ids[i] = tokens[own * size + i];
}
