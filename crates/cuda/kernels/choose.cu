// Which token follows each row of logits: speculate/src/sample.rs, without what edits
// logits, with equal bits. A block a row. Nothing in it depends on the order in which
// threads come: masses are integers, and of equal scores the lower token wins.

// As src/choose.rs lays it out.
struct TokenChoice {
    u64 seed, position;
    float scale; // 1/T, 0 if greedy
    float top_p;
    float min_p; // its logarithm, -inf if there is none
    u32 top_k;   // 0 if there is none
};

#define THREADS 1024
#define ONE_MASS 1099511627776.0 // 2^40
#define NO_MASS 29.0f
#define LEAST (-3.40282347e38f) // of all numbers
#define MAX_GUMBEL 16.635532f

// ---- noise of a token (speculate/src/noise.rs)
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

// What the block's threads share.
struct Shared {
    u64 weights[256]; // of a bucket: tokens, or their mass
    u64 found, before;
    u32 n_keys;
    float scores[THREADS / 32];
    u32 ids[THREADS / 32];
};

// The best score of the block and its token, for all threads.
__device__ __forceinline__ u32 block_best(float score, u32 id, Shared &s) {
    auto better = [&](float other, u32 its) {
        if (other > score || (other == score && its < id)) { score = other; id = its; }
    };
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        const float other = __shfl_xor_sync(~0u, score, o);
        const u32 its = __shfl_xor_sync(~0u, id, o);
        better(other, its);
    }
    __syncthreads();
    if ((threadIdx.x & 31) == 0) { s.scores[threadIdx.x >> 5] = score; s.ids[threadIdx.x >> 5] = id; }
    __syncthreads();
    for (int i = 0; i < THREADS / 32; i++) better(s.scores[i], s.ids[i]);
    return id;
}
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
// lies before it.
__device__ __forceinline__ u32 bucket_of(u64 wanted, u64 &before, Shared &s) {
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 sum = 0;
        u32 i = 0;
        while (i < 255 && sum + s.weights[i] < wanted) sum += s.weights[i++];
        s.found = i;
        s.before = sum;
    }
    __syncthreads();
    before = s.before;
    return (u32) s.found;
}
__device__ __forceinline__ void clear_buckets(Shared &s) {
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += THREADS) s.weights[i] = 0;
    __syncthreads();
}
// The least key up to which keys of at most `limit` weigh as much as `wanted`; all ones
// if they do not.
template <class F>
__device__ __forceinline__ u64 cut(const u64 *keys, u32 n, u64 limit, u64 wanted, F weight, Shared &s) {
    u64 total = 0;
    for (u32 i = threadIdx.x; i < n; i += THREADS)
        if (keys[i] <= limit) total += weight(keys[i]);
    if (block_total(total, s) < wanted) return ~0ull;
    u64 prefix = 0;
#pragma unroll 1
    for (int shift = 56; shift >= 0; shift -= 8) {
        clear_buckets(s);
        for (u32 i = threadIdx.x; i < n; i += THREADS) {
            const u64 key = keys[i];
            if (key <= limit && (shift == 56 || key >> (shift + 8) == prefix)) atomicAdd(&s.weights[key >> shift & 255], weight(key));
        }
        u64 before;
        prefix = prefix << 8 | bucket_of(wanted, before, s);
        wanted -= before;
    }
    return prefix;
}
// Tokens are sorted roughly by how far they are below the largest.
#define BUCKET(z) ((int) fminf((top - (z)) * 8.0f, 255.0f))

// `keys`: room for `cols` of each row.
KERNEL __launch_bounds__(THREADS, 1) choose_tokens(const float *x, const TokenChoice *choices, u64 *keys, u32 *chosen, int cols) {
    __shared__ Shared s;
    in_order();
    const float *row = x + (u64) blockIdx.x * cols;
    const TokenChoice c = choices[blockIdx.x];
    keys += (u64) blockIdx.x * cols;
    float score = -INFINITE;
    u32 id = ~0u;
    for (u32 i = threadIdx.x; i < (u32) cols; i += THREADS)
        if (row[i] > score) { score = row[i]; id = i; }
    const u32 first = block_best(score, id, s);
    const float top = first < (u32) cols ? row[first] * c.scale : -INFINITE;
    if (c.scale == 0.0f || !(fabsf(top) < INFINITE)) {
        if (threadIdx.x == 0) chosen[blockIdx.x] = first < (u32) cols ? first : 0;
        return;
    }
    const float least = larger(top + c.min_p, LEAST);
    const bool counts = c.top_k > 0 && c.top_k < (u32) cols;
    u64 limit = ~0ull;
    if (counts || c.top_p < 1.0f) {
        // The mass of all, and where the cut must lie.
        clear_buckets(s);
        if (threadIdx.x == 0) s.n_keys = 0;
        u64 rest = 0, total = 0;
        for (u32 i = threadIdx.x; i < (u32) cols; i += THREADS) {
            const float z = row[i] * c.scale;
            if (!(z >= LEAST)) continue;
            const int bucket = BUCKET(z);
            const u64 weight = counts ? 1 : mass(z - top);
            total += weight;
            if (bucket == 255) rest += weight;
            else if (weight) atomicAdd(&s.weights[bucket], weight);
        }
        if (rest) atomicAdd(&s.weights[255], rest);
        total = block_total(total, s);
        u64 wanted = counts ? c.top_k : (u64) ceil((double) c.top_p * (double) total), before;
        const int last = (int) bucket_of(wanted, before, s);
        for (u32 i = threadIdx.x; i < (u32) cols; i += THREADS) {
            const float z = row[i] * c.scale;
            if (z >= LEAST && BUCKET(z) <= last) keys[atomicAdd(&s.n_keys, 1)] = key(z, i);
        }
        __syncthreads();
        const u32 n = s.n_keys;
        auto mass_of = [&](u64 key) { return mass(z_of(key) - top); };
        if (counts) {
            limit = cut(keys, n, limit, wanted, [](u64) { return (u64) 1; }, s);
            if (c.top_p < 1.0f) {
                total = 0;
                for (u32 i = threadIdx.x; i < n; i += THREADS)
                    if (keys[i] <= limit) total += mass_of(keys[i]);
                total = block_total(total, s);
                wanted = (u64) ceil((double) c.top_p * (double) total);
            }
        }
        // Among those that top-k leaves.
        if (c.top_p < 1.0f) limit = min(limit, cut(keys, n, limit, wanted, mass_of, s));
    }
    // The largest has some noise; who could not beat it has none drawn.
    id = key(top, first) <= limit ? first : ~0u;
    score = id == first ? top + gumbel(draw(c, first)) : -INFINITE;
    for (u32 i = threadIdx.x; i < (u32) cols; i += THREADS) {
        const float z = row[i] * c.scale;
        if (!(z >= least) || key(z, i) > limit || z + MAX_GUMBEL < score) continue;
        const float v = z + gumbel(draw(c, i));
        if (v > score || (v == score && i < id)) { score = v; id = i; }
    }
    id = block_best(score, id, s);
    if (threadIdx.x == 0) chosen[blockIdx.x] = id;
}
