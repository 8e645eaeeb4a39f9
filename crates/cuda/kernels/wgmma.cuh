// Warpgroup matrix products (wgmma), for compute capability 9.0 alone: 64 rows of A in a warpgroup's registers or in
// shared memory, B in shared memory. Accumulators lie as those of mma.sync do, 16 rows a warp. Each call adds the
// products of 16 columns to `c`, or replaces it. common.cuh goes before this.

#define C4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define C16 C4(0), C4(1), C4(2), C4(3)
#define C32 C4(0), C4(1), C4(2), C4(3), C4(4), C4(5), C4(6), C4(7)
#define C64 C32, C4(8), C4(9), C4(10), C4(11), C4(12), C4(13), C4(14), C4(15)
#define C96 C64, C4(16), C4(17), C4(18), C4(19), C4(20), C4(21), C4(22), C4(23)
#define R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define R32                                                                                                            \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                           \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define R64                                                                                                            \
    R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                                            \
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define R96                                                                                                            \
    R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"                                            \
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
// clang-format off
DEVICE void wgmma(float (&c)[24][4], const u32 (&a)[4], u64 b, bool add) {
    asm volatile("{.reg .pred add; setp.ne.u32 add, %101, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {" R96 "}, {%96,%97,%98,%99}, %100, add, 1, 1, 0;}"
        : C96 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32) add));
}
DEVICE void wgmma(float (&c)[16][4], const u32 (&a)[4], u64 b, bool add) {
    asm volatile("{.reg .pred add; setp.ne.u32 add, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" R64 "}, {%64,%65,%66,%67}, %68, add, 1, 1, 0;}"
        : C64 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32) add));
}
DEVICE void wgmma(float (&c)[8][4], const u32 (&a)[4], u64 b, bool add) {
    asm volatile("{.reg .pred add; setp.ne.u32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" R32 "}, {%32,%33,%34,%35}, %36, add, 1, 1, 0;}"
        : C32 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32) add));
}
DEVICE void wgmma(float (&c)[4][4], const u32 (&a)[4], u64 b, bool add) {
    asm volatile("{.reg .pred add; setp.ne.u32 add, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" R16 "}, {%16,%17,%18,%19}, %20, add, 1, 1, 0;}"
        : C16 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32) add));
}
// A in shared memory.
DEVICE void wgmma(float (&c)[16][4], u64 a, u64 b, bool add) {
    asm volatile("{.reg .pred add; setp.ne.u32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" R64 "}, %64, %65, add, 1, 1, 0, 0;}"
        : C64 : "l"(a), "l"(b), "r"((u32) add));
}
DEVICE void wgmma(float (&c)[8][4], u64 a, u64 b, bool add) {
    asm volatile("{.reg .pred add; setp.ne.u32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" R32 "}, %32, %33, add, 1, 1, 0, 0;}"
        : C32 : "l"(a), "l"(b), "r"((u32) add));
}
// clang-format on
// Registers and shared memory that were written before can be read by the products that follow.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most GROUPS of the committed groups are under way.
template <int GROUPS>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
// Tells the compiler that accumulators change here, so that it moves no read of them before the wait above.
template <int E>
DEVICE void wgmma_pin(float (&c)[E][4]) {
#pragma unroll
    for (int n = 0; n < E; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[n][i])::"memory");
}
// Waits for all committed products; until then nothing may read `c`.
template <int E>
DEVICE void wgmma_wait(float (&c)[E][4]) {
    wgmma_wait<0>();
    wgmma_pin(c);
}
// Keeps fragments of A in their registers until here. To the compiler a product has read its fragments when it is
// issued, but the tensor cores read them later: without this, called after the wait for the product, it may load the
// next fragments into the same registers before.
template <int STEPS>
DEVICE void keep_in_registers(u32 (&a)[STEPS][4]) {
#pragma unroll
    for (int j = 0; j < STEPS; j++)
#pragma unroll
        for (int q = 0; q < 4; q++) asm volatile("" : "+r"(a[j][q]));
}
