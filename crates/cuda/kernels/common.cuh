// What every kernel shares: integer types, programmatic dependent launch (PDL), conversions, warp reductions,
// a step's rows, and the f16 form of activations. No headers: NVRTC compiles this alone, with --fmad=false, so that
// a * b + c rounds twice where it is written so, and once where it is fmaf.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define KERNEL extern "C" __global__ void
#define DEVICE __device__ __forceinline__
#define INF __int_as_float(0x7f800000)
#define NO_PAGE 0xffffffffu
#define PAGE_ROWS 64 // rows of a page of the KV cache, as in the crate `backend`

// ---- programmatic dependent launch: a kernel may start before the one ahead of it in the stream has ended

// Lets the next kernel of the stream start. Until `pdl_wait`, a kernel may read only its arguments, weights, the step's
// rows, which no kernel of a step writes, and states that no kernel writes that may still run (`is_settled` of Delta).
DEVICE void pdl_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Waits until the kernels before have ended and their writes can be seen. Every kernel calls this before it touches
// memory that another kernel writes, but for such states, and for what the kernel before has written, with a fence
// after it, before its `pdl_launch`: that can be read with __ldcg (moe_gemv_glu.cu).
DEVICE void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void pdl_sync() {
    pdl_launch();
    pdl_wait();
}

// ---- conversions
DEVICE float bf16_to_f32(u16 v) { return __uint_as_float((u32) v << 16); }
DEVICE u16 f32_to_bf16(float f) {
    u32 b = __float_as_uint(f);
    if ((b & 0x7fffffffu) > 0x7f800000u) return (u16) ((b >> 16) | 0x40);
    return (u16) ((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
DEVICE float f16_to_f32(u16 v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
}
DEVICE u16 f32_to_f16(float f) {
    u16 v;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(f));
    return v;
}
DEVICE u32 pack_f16x2(float low, float high) {
    u32 v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}
DEVICE u32 hmul2(u32 a, u32 b) {
    u32 v;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

// A token that has an embedding: a row of a chain that gave none goes on from the first.
DEVICE u32 known_token(u32 token) { return token == ~0u ? 0 : token; }

// ---- a step's rows, as src/batch.rs lays them out
#define NO_ROW 0xffffffffu // instead of a row of the KV cache: the row of the step writes none
struct Batch {
    const u32 *words;
    __device__ u32 rows() const { return words[0]; }
    __device__ u32 seqs() const { return words[1]; }
    __device__ const u32 *row(u32 r) const { return words + words[2] + 8 * r; }
    __device__ u32 token(u32 r) const { return row(r)[0]; }
    __device__ u32 at(u32 r) const { return row(r)[1]; } // row of the sequence's KV cache that it writes, or NO_ROW
    __device__ u32 sees_begin(u32 r) const { return row(r)[2]; } // rows of the KV cache that it may see
    __device__ u32 sees_end(u32 r) const { return row(r)[3]; }
    __device__ const u32 *position(u32 r) const { return row(r) + 4; } // three axes
    __device__ u32 seq_of(u32 r) const { return row(r)[7]; }
    __device__ const u32 *seq(u32 s) const { return words + words[3] + 12 * s; }
    __device__ const u32 *table(u32 s, u32 group) const { return words + seq(s)[6 + group]; } // page table
};
// Fields of a sequence.
enum { SEQ_START, SEQ_ROWS, SEQ_SLOT, SEQ_NEW, SEQ_KEPT, SEQ_CERTAIN };

// c += a b on tensor cores: [16, 8] += [16, 16] [16, 8], of f16.
DEVICE void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- reductions whose order depends on nothing but the number of lanes
DEVICE float larger(float a, float b) { return a > b ? a : b; }
DEVICE float smaller(float a, float b) { return a < b ? a : b; }
DEVICE float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
DEVICE float warp_max(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v = larger(v, __shfl_xor_sync(~0u, v, o));
    return v;
}
// Whether the block is the last of `count` to come here: it may then read what all of them have written. All blocks
// have called `pdl_wait`. `*counter` is 0 before and afterwards.
DEVICE bool is_last_block(u32 *counter, u32 count) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(counter, 1) + 1 == count;
        if (last) *counter = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}
DEVICE void prefetch_l2(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// ---- activations as tensor cores read them: f16 with a scale for each row's tile of 64 columns, a power of two that
// brings the tile's largest value to 2^14 .. 2^15 (block floating point). Columns after the last are zeros.
struct Activations {
    u16 *values;   // [n, stride]
    float *scales; // [n, stride / 64], what a tile's values are to be multiplied by
    int stride;    // columns, a multiple of 64; 0: there is no output of this kind
};
// The power of two that brings `max`, which is not negative, to 2^14 .. 2^15.
DEVICE float normalising_scale(float max) {
    u32 e = __float_as_uint(max) >> 23;
    e = e < 27 ? 27 : e > 240 ? 240 : e;
    return __uint_as_float((127 + 127 + 14 - e) << 23);
}
// 1 / v, of a power of two.
DEVICE float inverse_pow2(float v) { return __uint_as_float((254u << 23) - __float_as_uint(v)); }
// scale / common scale, twice in f16: brings a tile's values to a scale that several tiles have in common.
DEVICE u32 rescale_f16x2(float scale, float inverse_common) {
    u32 v;
    asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(v) : "f"(scale * inverse_common));
    return v;
}
// The rotation of weights in blocks of 32 columns, as quant/src/rotated.rs defines it and with its bits: signs, a
// Hadamard butterfly, 1 / sqrt(32).
DEVICE float rotated_sign(int column) { return 0x696b4b4au >> (column & 31) & 1 ? -1.0f : 1.0f; }
#define ROTATED_SCALE 0.17677669f
// Rotates both blocks of a tile of 64 columns, of which a warp's lanes have two neighbors each.
DEVICE void rotate_tile(float &v0, float &v1) {
    const int lane = threadIdx.x & 31;
    const float a = v0 * rotated_sign(2 * lane), b = v1 * rotated_sign(2 * lane + 1);
    v0 = a + b;
    v1 = a - b;
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
        const float other0 = __shfl_xor_sync(~0u, v0, step), other1 = __shfl_xor_sync(~0u, v1, step);
        v0 = lane & step ? other0 - v0 : v0 + other0;
        v1 = lane & step ? other1 - v1 : v1 + other1;
    }
    v0 *= ROTATED_SCALE;
    v1 *= ROTATED_SCALE;
}
// A warp stores a tile of 64 columns, two neighbors a lane, and its scale.
DEVICE void store_activation_tile(const Activations &out, u64 row, int tile, float v0, float v1) {
    // Floats that are not negative are in the order of their bits.
    const float max = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(larger(fabsf(v0), fabsf(v1)))));
    const float up = normalising_scale(max), scale = inverse_pow2(up);
    const int lane = threadIdx.x & 31;
    ((u32 *) (out.values + row * out.stride + tile * 64))[lane] = f32_to_f16(v0 * up) | (u32) f32_to_f16(v1 * up) << 16;
    if (lane == 0) out.scales[row * (out.stride / 64) + tile] = scale;
}
// Keeps a value in its register: the compiler would compute it again at every use.
DEVICE u32 opaque(u32 v) {
    asm volatile("" : "+r"(v));
    return v;
}
