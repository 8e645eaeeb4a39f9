// Barriers in shared memory, and the copy engine that arrives at them. `round` counts how
// often a barrier is used.
__device__ __forceinline__ u32 shared_at(const void *p) { return (u32) __cvta_generic_to_shared(p); }
__device__ __forceinline__ void arrivals(u32 barrier, u32 threads) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void await(u32 barrier, u32 round) {
    asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again;}" :: "r"(barrier), "r"(round & 1) : "memory");
}
// Tells a barrier of bytes to come, and has them come.
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bring(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
