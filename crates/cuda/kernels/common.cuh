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

// Lets the next kernel of the stream start, then waits for what the ones before
// have written. Every kernel calls this before it touches memory that another
// one writes.
__device__ __forceinline__ void in_order() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
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
// row so that the largest lies in 2^14 .. 2^15, with the sum of every 32 columns
// and the factor that undoes the scale. `kp` columns, a multiple of 64, zeros
// after the last.
struct Half {
    u16 *values;   // [n, kp]
    float *sums;   // [n, kp / 32]
    float *factor; // [n]
    int kp;
};
__device__ __forceinline__ float row_scale(float max) {
    u32 e = __float_as_uint(max) >> 23; // max is not negative
    e = e < 27 ? 27 : e > 240 ? 240 : e;
    return __uint_as_float((127 + 127 + 14 - e) << 23);
}
// One warp turns 32 columns, a column a lane.
__device__ __forceinline__ void put_half(const Half &h, u64 row, int col, float value, float scale) {
    u16 v = f32_to_f16(value * scale);
    h.values[row * h.kp + col] = v;
    float sum = warp_sum(f16_to_f32(v));
    if ((threadIdx.x & 31) == 0) h.sums[row * (h.kp / 32) + col / 32] = sum;
}
// Largest of a block's values; `shared` holds a float for each warp.
__device__ __forceinline__ float block_max(float v, float *shared) {
    v = warp_max(v);
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
    __syncthreads();
    int warps = blockDim.x >> 5, lane = threadIdx.x & 31;
    v = warp_max(lane < warps ? shared[lane] : 0.0f);
    __syncthreads();
    return v;
}
__device__ __forceinline__ float block_sum(float v, float *shared) {
    v = warp_sum(v);
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
    __syncthreads();
    int warps = blockDim.x >> 5, lane = threadIdx.x & 31;
    v = warp_sum(lane < warps ? shared[lane] : 0.0f);
    __syncthreads();
    return v;
}
// A row in a block's registers: thread `t` has the columns t + i * blockDim.x, of
// which there are at most KEPT; the others are 0. A block has whole warps.
#define KEPT 12
struct Kept {
    float v[KEPT];
};
template <class F>
__device__ __forceinline__ void each_kept(int cols, F f) {
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        const int c = threadIdx.x + i * blockDim.x;
        if (c < cols) f(i, c);
    }
}
__device__ __forceinline__ Kept keep(const float *x, int cols) {
    Kept k;
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        const int c = threadIdx.x + i * blockDim.x;
        k.v[i] = c < cols ? x[c] : 0.0f;
    }
    return k;
}
__device__ __forceinline__ float sum_squares(const Kept &k, float *shared) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < KEPT; i++) sum = fmaf(k.v[i], k.v[i], sum);
    return block_sum(sum, shared);
}
__device__ __forceinline__ void kept_half(const Half &h, u64 row, const Kept &k, float *shared) {
    float max = 0.0f;
#pragma unroll
    for (int i = 0; i < KEPT; i++) max = larger(fabsf(k.v[i]), max);
    const float scale = row_scale(block_max(max, shared));
    if (threadIdx.x == 0) h.factor[row] = 1.0f / scale;
    // A warp has 32 neighbours, and rows end with a pair of such runs.
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        const int c = threadIdx.x + i * blockDim.x;
        if (c < h.kp) put_half(h, row, c, k.v[i], scale);
    }
}
