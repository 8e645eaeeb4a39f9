// Barriers in shared memory (mbarrier) and bulk copies by the copy engine (TMA) that complete on them, from compute
// capability 9.0 on. `phase` counts how often a barrier has been used. common.cuh goes before this.

DEVICE u32 smem_address(const void *p) { return (u32) __cvta_generic_to_shared(p); }
DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// A warp's arrival, once all its lanes have read what is to be overwritten: one lane's, after __syncwarp, which
// compilers leave out where the warp is converged. Tools that look for races then cannot see the order; for them,
// CHECK_RACES lets every lane arrive.
#ifdef CHECK_RACES
#define WARP_ARRIVALS 32
#else
#define WARP_ARRIVALS 1
#endif
DEVICE void mbarrier_arrive_warp(u32 barrier, int lane) {
    __syncwarp();
    if (WARP_ARRIVALS == 32 || lane == 0) mbarrier_arrive(barrier);
}
DEVICE void mbarrier_wait(u32 barrier, u32 phase) {
    asm volatile(
        "{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again;}" ::"r"(
            barrier),
        "r"(phase & 1)
        : "memory");
}
// Waits until the barrier has counted all bytes that blocks of the cluster send with `st.async`, which can then be
// read.
DEVICE void mbarrier_wait_cluster(u32 barrier, u32 phase) {
    asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1; "
                 "@!done bra again;}" ::"r"(barrier),
                 "r"(phase & 1)
                 : "memory");
}
// Arrives, and tells the barrier how many bytes `bulk_copy` or `st.async` will bring.
DEVICE void mbarrier_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void bulk_copy(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
DEVICE void bulk_prefetch_l2(const void *from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// ---- thread block clusters
DEVICE u32 cluster_blocks() {
    u32 v = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %cluster_nctaid.x;" : "=r"(v));
#endif
    return v;
}
DEVICE u32 cluster_rank() {
    u32 v = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(v));
#endif
    return v;
}
DEVICE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
DEVICE void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
// Sends a number, or four, to the same place of block `rank` of the cluster; of four, `to` is a multiple of 16. The
// barrier at the same place of that block counts the bytes.
DEVICE void send_to_block(u32 rank, u32 to, u32 barrier, float v) {
    asm volatile("{.reg .b32 there, barrier; mapa.shared::cluster.u32 there, %0, %2; "
                 "mapa.shared::cluster.u32 barrier, %1, %2; "
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [barrier];}" ::"r"(to),
                 "r"(barrier), "r"(rank), "f"(v)
                 : "memory");
}
DEVICE void send_to_block(u32 rank, u32 to, u32 barrier, const float4 &v) {
    asm volatile("{.reg .b32 there, barrier; mapa.shared::cluster.u32 there, %0, %2; "
                 "mapa.shared::cluster.u32 barrier, %1, %2; "
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, "
                 "[barrier];}" ::"r"(to),
                 "r"(barrier), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}
// Arrives at the barrier that lies at the same place of block `rank` of the cluster, after what the thread has read of
// its own block's shared memory. A release at the cluster's scope would wait for all of its stores, too
// (MEMBAR.ALL.GPU).
DEVICE void mbarrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}
// `bulk_copy` to the same place of each block of the cluster that `blocks` has a bit of; the barrier at the same place
// of each counts the bytes.
DEVICE void bulk_copy_multicast(u32 to, const void *from, u32 bytes, u32 barrier, u16 blocks) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "h"(blocks)
                 : "memory");
}

// ---- asynchronous copies by lanes (cp.async)
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most GROUPS of the committed groups are under way.
template <int GROUPS>
DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}
DEVICE void cp_async_16(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void cp_async_4(u32 to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// Predicated: without a branch.
DEVICE void cp_async_16_if(bool yes, u32 to, const void *from) {
    asm volatile("{.reg .pred yes; setp.ne.u32 yes, %2, 0; "
                 "@yes cp.async.cg.shared.global.L2::128B [%0], [%1], 16;}" ::"r"(to),
                 "l"(from), "r"((u32) yes)
                 : "memory");
}
// Zeros where `present` is false.
DEVICE void cp_async_16_or_zeros(u32 to, const void *from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0)
                 : "memory");
}
