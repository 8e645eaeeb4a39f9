// What every kernel shares: names of integers, the order between kernels, and
// the elementary functions of backend/src/math.rs with equal bits. No headers:
// NVRTC compiles this alone, with --fmad=false, so that a*b + c rounds twice
// where it is written so and once where it is fmaf.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define KERNEL extern "C" __global__ void
#define INFINITE __int_as_float(0x7f800000)
#define NO_PAGE 0xffffffffu
#define PAGE_ROWS 64

// Lets the next kernel of the stream start. What follows may read parameters and
// the step's rows, which no kernel of a step writes.
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Waits for what the kernels before have written. Every kernel calls this before it
// touches memory that another one writes.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void in_order() {
    start_next();
    wait_for_previous();
}

__device__ __forceinline__ float bf16_to_f32(u16 v) { return __uint_as_float((u32) v << 16); }
__device__ __forceinline__ u16 f32_to_bf16(float f) {
    u32 b = __float_as_uint(f);
    if ((b & 0x7fffffffu) > 0x7f800000u) return (u16) ((b >> 16) | 0x40);
    return (u16) ((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
__device__ __forceinline__ float f16_to_f32(u16 v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
}
__device__ __forceinline__ u16 f32_to_f16(float f) {
    u16 v;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(f));
    return v;
}

// ---- a step's rows, as src/batch.rs lays them out
struct Batch {
    const u32 *words;
    __device__ u32 rows() const { return words[0]; }
    __device__ u32 seqs() const { return words[1]; }
    __device__ const u32 *row(u32 r) const { return words + words[2] + 4 * r; }
    __device__ u32 token(u32 r) const { return row(r)[0]; }
    __device__ u32 index(u32 r) const { return row(r)[1]; }
    __device__ u32 position(u32 r) const { return row(r)[2]; }
    __device__ u32 seq_of(u32 r) const { return row(r)[3]; }
    __device__ const u32 *seq(u32 s) const { return words + words[3] + 12 * s; }
    __device__ const u32 *table(u32 s, u32 group) const { return words + seq(s)[6 + group]; }
};
// A sequence's fields.
enum { SEQ_START, SEQ_ROWS, SEQ_SLOT, SEQ_NEW, SEQ_KEPT, SEQ_CERTAIN };

// ---- elementary functions
__device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }
__device__ __forceinline__ float smaller(float a, float b) { return a < b ? a : b; }

__device__ __forceinline__ float exp_(float x) {
    float y = larger(smaller(x, 88.0f), -87.0f);
    float n = rintf(y * 1.44269504088896340736f);
    float r = fmaf(n, -0.6933594f, y);
    r = fmaf(n, 2.1219444e-4f, r);
    float p = 1.0f / 5040.0f;
    p = fmaf(p, r, 1.0f / 720.0f);
    p = fmaf(p, r, 1.0f / 120.0f);
    p = fmaf(p, r, 1.0f / 24.0f);
    p = fmaf(p, r, 1.0f / 6.0f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    float power = __uint_as_float((u32) ((int) n + 127) << 23);
    return x < -87.0f ? 0.0f : p * power;
}
__device__ __forceinline__ float sigmoid_(float x) { return 1.0f / (1.0f + exp_(0.0f - x)); }
__device__ __forceinline__ float silu_(float x) { return x * sigmoid_(x); }
__device__ __forceinline__ float tanh_(float x) { return 1.0f - 2.0f / (exp_(x + x) + 1.0f); }
__device__ __forceinline__ float gelu_(float x) {
    float u2 = 1.595769f * fmaf(x * x * x, 0.044715f, x);
    return x * sigmoid_(u2);
}
__device__ __forceinline__ float artanh_double(float s) {
    float s2 = s * s;
    float p = 2.0f / 11.0f;
    p = fmaf(p, s2, 2.0f / 9.0f);
    p = fmaf(p, s2, 2.0f / 7.0f);
    p = fmaf(p, s2, 2.0f / 5.0f);
    p = fmaf(p, s2, 2.0f / 3.0f);
    return fmaf(p * s2, s, 2.0f * s);
}
__device__ __forceinline__ float ln_(float x) {
    u32 bits = __float_as_uint(x);
    int e = (int) (bits - 0x3f3504f3u) >> 23;
    float m = __uint_as_float(bits - ((u32) e << 23));
    float tail = artanh_double((m - 1.0f) / (m + 1.0f));
    return fmaf((float) e, 0.6933594f, fmaf((float) e, -2.1219444e-4f, tail));
}
__device__ __forceinline__ float softplus_(float x) {
    float y = exp_(0.0f - fabsf(x));
    float tail = y < 0.4f ? artanh_double(y / (2.0f + y)) : ln_(1.0f + y);
    return (x > 0.0f ? x : 0.0f) + tail;
}
__device__ __forceinline__ void sin_cos(float x, float &sin, float &cos) {
    float n = rintf(x * 0.63661977236758134308f);
    float r = fmaf(n, -1.5707964f, x);
    r = fmaf(n, 4.371139e-8f, r);
    float r2 = r * r;
    float s = 1.0f / 362880.0f;
    s = fmaf(s, r2, -1.0f / 5040.0f);
    s = fmaf(s, r2, 1.0f / 120.0f);
    s = fmaf(s, r2, -1.0f / 6.0f);
    s = fmaf(s * r2, r, r);
    float k = -1.0f / 3628800.0f;
    k = fmaf(k, r2, 1.0f / 40320.0f);
    k = fmaf(k, r2, -1.0f / 720.0f);
    k = fmaf(k, r2, 1.0f / 24.0f);
    k = fmaf(k, r2, -0.5f);
    k = fmaf(k, r2, 1.0f);
    float q = n - 4.0f * rintf(n * 0.25f - 0.375f);
    q = q < 0.0f ? q + 4.0f : q;
    q = q < 3.5f ? q : q - 4.0f;
    float odd = q < 1.5f ? (q < 0.5f ? s : k) : (q < 2.5f ? 0.0f - s : 0.0f - k);
    float even = q < 1.5f ? (q < 0.5f ? k : 0.0f - s) : (q < 2.5f ? 0.0f - k : s);
    sin = odd;
    cos = even;
}
// 0 SiLU, 1 GELU, 2 sigmoid
__device__ __forceinline__ float activate(int f, float x) {
    return f == 0 ? silu_(x) : f == 1 ? gelu_(x) : sigmoid_(x);
}

// ---- sums and maxima whose order depends on the number of lanes only
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v = larger(v, __shfl_xor_sync(~0u, v, o));
    return v;
}

// ---- activations as products read them: f16, scaled by a power of two for each
// row's tile of 64 columns so that the tile's largest lies in 2^14 .. 2^15. `kp`
// columns, a multiple of 64, zeros after the last; and of each tile the factor that undoes
// the scale.
struct Half {
    u16 *values;    // [n, kp]
    float *factors; // [n, kp / 64]
    int kp;
};
__device__ __forceinline__ float row_scale(float max) {
    u32 e = __float_as_uint(max) >> 23; // max is not negative
    e = e < 27 ? 27 : e > 240 ? 240 : e;
    return __uint_as_float((127 + 127 + 14 - e) << 23);
}
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
    u32 v;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}
// A power of two, the other way.
__device__ __forceinline__ float inverse(float v) { return __uint_as_float((254u << 23) - __float_as_uint(v)); }
// What takes a tile's values to the unit of its slice, twice in f16.
__device__ __forceinline__ u32 ratio(float factor, float unit_inverse) {
    u32 v;
    asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(v) : "f"(factor * unit_inverse));
    return v;
}
// A warp turns a tile, two neighbours a lane.
__device__ __forceinline__ void put_half(const Half &h, u64 row, int tile, float v0, float v1) {
    // Floats that are not negative are in the order of their bits.
    const float most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(larger(fabsf(v0), fabsf(v1)))));
    const float scale = row_scale(most), factor = inverse(scale);
    const int lane = threadIdx.x & 31;
    ((u32 *) (h.values + row * h.kp + tile * 64))[lane] = f32_to_f16(v0 * scale) | (u32) f32_to_f16(v1 * scale) << 16;
    if (lane == 0) h.factors[row * (h.kp / 64) + tile] = factor;
}
// The threads that share a row: a block, or the blocks of a cluster.
__device__ __forceinline__ u32 blocks_of_row() {
    u32 v = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %cluster_nctaid.x;" : "=r"(v));
#endif
    return v;
}
__device__ __forceinline__ u32 block_in_row() {
    u32 v = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(v));
#endif
    return v;
}
// Blocks of a cluster meet, and see what they have written to each other.
__device__ __forceinline__ void meet_in_row() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Sums of a row's values, wherever its threads are; `shared` holds a float for each warp of
// them in each block, and is not written again before they meet.
template <int N>
__device__ __forceinline__ void row_sums(float (&v)[N], float (*shared)[32]) {
    const u32 lane = threadIdx.x & 31, warps = blockDim.x >> 5, warp = threadIdx.x >> 5, blocks = blocks_of_row();
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = warp_sum(v[i]);
    if (blocks == 1) {
        if (lane == 0)
#pragma unroll
            for (int i = 0; i < N; i++) shared[i][warp] = v[i];
        __syncthreads();
    } else {
#if __CUDA_ARCH__ >= 900
        if (lane < blocks)
#pragma unroll
            for (int i = 0; i < N; i++)
                asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.f32 [there], %2;}" :: "r"((u32) __cvta_generic_to_shared(&shared[i][block_in_row() * warps + warp])), "r"(lane), "f"(v[i]) : "memory");
#endif
        meet_in_row();
    }
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = warp_sum(lane < warps * blocks ? shared[i][lane] : 0.0f);
}
__device__ __forceinline__ float row_sum(float v, float *shared) {
    float all[1] = {v};
    row_sums(all, (float (*)[32]) shared);
    return all[0];
}
// Whether the block is the last of `count` to come here: then it may read what they all have
// written. Blocks have waited for the kernels before. `arrived` is 0 before and afterwards.
__device__ __forceinline__ bool comes_last(u32 *arrived, u32 count) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(arrived, 1) + 1 == count;
        if (last) *arrived = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}
// A row in registers: thread `t` of the `n` that share it has the pairs of columns t + i * n,
// of which there are at most KEPT; columns after the last are 0. Blocks have whole warps, so
// each of them has whole tiles of a product.
#define KEPT 3
struct Kept {
    float2 v[KEPT];
};
template <class F>
__device__ __forceinline__ void each_kept(F f) {
#pragma unroll
    for (int i = 0; i < KEPT; i++) f(i, 2 * (int) (block_in_row() * blockDim.x + threadIdx.x + i * blocks_of_row() * blockDim.x));
}
__device__ __forceinline__ Kept keep(const float *x, int cols) {
    Kept k;
    each_kept([&](int i, int c) {
        k.v[i] = make_float2(0.0f, 0.0f);
        if (cols % 2 == 0) {
            if (c < cols) k.v[i] = *(const float2 *) (x + c);
        } else {
            if (c < cols) k.v[i].x = x[c];
            if (c + 1 < cols) k.v[i].y = x[c + 1];
        }
    });
    return k;
}
__device__ __forceinline__ void put(float *y, int cols, const Kept &k) {
    each_kept([&](int i, int c) {
        if (cols % 2 == 0) {
            if (c < cols) *(float2 *) (y + c) = k.v[i];
        } else {
            if (c < cols) y[c] = k.v[i].x;
            if (c + 1 < cols) y[c + 1] = k.v[i].y;
        }
    });
}
__device__ __forceinline__ float squares(const Kept &k) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < KEPT; i++) sum = fmaf(k.v[i].y, k.v[i].y, fmaf(k.v[i].x, k.v[i].x, sum));
    return sum;
}
__device__ __forceinline__ void kept_half(const Half &h, u64 row, const Kept &k) {
    each_kept([&](int i, int c) {
        if (c / 64 < h.kp / 64) put_half(h, row, c / 64, k.v[i].x, k.v[i].y);
    });
}
// Columns that exist of a parameter that may not.
#define PARAMETER(weight, cols) keep(weight, weight ? cols : 0)
// 1 / sqrt(mean(k²) + eps). The sum of squares: a partial sum a thread over its pairs of
// columns, then trees. How many threads there are depends on the width alone.
__device__ __forceinline__ float inverse_rms(float sum_of_squares, int width, float eps) {
    return 1.0f / sqrtf(sum_of_squares / (float) width + eps);
}
// k inverse weight
__device__ __forceinline__ void stretch(Kept &k, float inverse, const Kept &weight, bool weighted) {
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        k.v[i].x *= inverse;
        k.v[i].y *= inverse;
        if (weighted) {
            k.v[i].x *= weight.v[i].x;
            k.v[i].y *= weight.v[i].y;
        }
    }
}
__device__ __forceinline__ void normalise(Kept &k, int width, float eps, const Kept &weight, bool weighted, float *shared) {
    stretch(k, inverse_rms(row_sum(squares(k), shared), width, eps), weight, weighted);
}
// x = (x + k) factor
__device__ __forceinline__ void add_kept(Kept &x, const Kept &k, float factor) {
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        x.v[i].x = (x.v[i].x + k.v[i].x) * factor;
        x.v[i].y = (x.v[i].y + k.v[i].y) * factor;
    }
}
__device__ __forceinline__ void ask_kept(const float *x, int cols) {
    each_kept([&](int i, int c) {
        if (x && c < cols) asm volatile("prefetch.global.L2 [%0];" :: "l"(x + c));
    });
}
// What is made of a row: norms of it, with a weight each, beside each what products read;
// or, where the first has no weight, the row itself as they read it.
#define NEXT 3
struct Next {
    const float *weight[NEXT];
    float *n[NEXT];
    Half h[NEXT];
    int count;
};
// What the row's kernel asks for before it waits, from weight number `from` on.
__device__ __forceinline__ void ask_next(const Next &next, int from, int cols) {
#pragma unroll
    for (int i = 0; i < NEXT; i++)
        if (i >= from) ask_kept(next.weight[i], cols);
}
// Makes them of row `x`, `first` being the first weight.
__device__ __forceinline__ void put_next(const Next &next, u64 row, int cols, const Kept &x, const Kept &first, float eps, float *shared) {
    if (next.count == 0) return;
    if (!next.weight[0]) {
        kept_half(next.h[0], row, x);
        return;
    }
    const float inverse = inverse_rms(row_sum(squares(x), shared), cols, eps);
    Kept weight = first;
    float *to = next.n[0];
    Half h = next.h[0];
#pragma unroll 1
    for (int i = 1;; i++) {
        Kept n = x;
        stretch(n, inverse, weight, true);
        put(to + row * cols, cols, n);
        kept_half(h, row, n);
        if (i == next.count) break;
        const bool last = i == NEXT - 1;
        weight = keep(last ? next.weight[2] : next.weight[1], cols);
        to = last ? next.n[2] : next.n[1];
        h = last ? next.h[2] : next.h[1];
    }
}
// y = activation(gate) * x, rows of either so many columns apart, and y as products read
// it. `copy`: where x goes besides, or null.
struct Glu {
    const float *gate, *x;
    u64 gate_stride, x_stride;
    float *y, *copy;
    int cols, f;
    Half h;
};
// Calls f with what a thread has of a row that many blocks share, each two neighbours a
// thread, so that a warp has a product's tile.
template <class F>
__device__ __forceinline__ void in_share(int share, int cols, F f) {
    const int c = 2 * (share * blockDim.x + threadIdx.x);
    if (c / 64 * 64 < cols) f(c);
}
__device__ __forceinline__ void glu_share(const Glu &a, int share, u64 row) {
    in_share(share, a.cols, [&](int c) {
        float v[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (c + j < a.cols) {
                const float x = a.x[row * a.x_stride + c + j];
                v[j] = activate(a.f, a.gate[row * a.gate_stride + c + j]) * x;
                a.y[row * a.cols + c + j] = v[j];
                if (a.copy) a.copy[row * a.cols + c + j] = x;
            }
        put_half(a.h, row, c / 64, v[0], v[1]);
    });
}
// A head turned by its position: column `c`, and `offset` from it the other one of a pair.
// What does not depend on the head, for the columns of a block's thread, c + i blockDim.x.
#define TURNS 2 // of a thread, at most: a block has one for each two columns
struct Angles {
    float sin[TURNS], cos[TURNS];
    __device__ __forceinline__ static bool second(int c, int offset, int pairs) { return c >= offset && c < offset + pairs; }
    __device__ __forceinline__ void find(float position, const float *frequencies, int head_dim, int offset, int pairs) {
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            const int c = threadIdx.x + i * blockDim.x;
            const bool later = second(c, offset, pairs);
            sin[i] = 0.0f;
            cos[i] = 1.0f;
            if (c < head_dim && (c < pairs || later)) sin_cos(position * frequencies[later ? c - offset : c], sin[i], cos[i]);
        }
    }
    // Calls f(c, what becomes of it).
    template <class F> __device__ __forceinline__ void each(const float *head, int head_dim, int offset, int pairs, F f) const {
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            const int c = threadIdx.x + i * blockDim.x;
            if (c >= head_dim) return;
            const float own = head[c];
            if (second(c, offset, pairs)) f(c, fmaf(head[c - offset], sin[i], own * cos[i]));
            else f(c, c < pairs ? fmaf(-head[c + offset], sin[i], own * cos[i]) : own);
        }
    }
};
// An expert that rows chose: its matrix, its first pair and how many. A list of `most`, at
// most, begins with one whose `count` says how many there are; a second list, of the experts'
// other matrix, follows it without one.
struct Chosen {
    const u8 *w;
    int first, count;
};
// Some of an expert's pairs. A list begins with one whose `count` says how many there are.
struct Some {
    u32 expert, first, count;
};
