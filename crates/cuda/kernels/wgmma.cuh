// Products by warpgroups, for compute capability 9.0 alone: 64 rows of `a` in a warpgroup's
// registers or shared memory, what they are multiplied by in shared memory. Results lie as
// those of mma.sync do, 16 rows a warp.

#define C4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
// Products of 16 columns are added to `c`, or replace it.
__device__ __forceinline__ void wgmma(float (&c)[16][4], const u32 (&a)[4], u64 b, bool add) {
    asm volatile("{.reg .pred add; setp.ne.u32 add, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, add, 1, 1, 0;}"
        : C4(0), C4(1), C4(2), C4(3), C4(4), C4(5), C4(6), C4(7), C4(8), C4(9), C4(10), C4(11), C4(12), C4(13), C4(14), C4(15) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32) add));
}
__device__ __forceinline__ void wgmma(float (&c)[8][4], const u32 (&a)[4], u64 b, bool add) {
    asm volatile("{.reg .pred add; setp.ne.u32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, add, 1, 1, 0;}"
        : C4(0), C4(1), C4(2), C4(3), C4(4), C4(5), C4(6), C4(7) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32) add));
}
// The same of rows that lie in shared memory.
__device__ __forceinline__ void wgmma(float (&c)[8][4], u64 a, u64 b, bool add) {
    asm volatile("{.reg .pred add; setp.ne.u32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, add, 1, 1, 0, 0;}"
        : C4(0), C4(1), C4(2), C4(3), C4(4), C4(5), C4(6), C4(7) : "l"(a), "l"(b), "r"((u32) add));
}
// What was written to registers or shared memory is there for the products that follow.
__device__ __forceinline__ void before_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
template <int E>
__device__ __forceinline__ void await_products(float (&c)[E][4]) {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int n = 0; n < E; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[n][i]) :: "memory");
}
