// What runtime.cu needs of the machine and CUDA has no words for. A test on a host has its own.
#ifndef SM100_MACHINE_H
#define SM100_MACHINE_H
#include <stdint.h>

// Words in global memory that other warps, or warps of other multiprocessors, write meanwhile.
__device__ inline uint32_t load(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline uint64_t load(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline uint32_t load_acquired(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline void store(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// Shared memory, of this CTA and of its cluster.
__device__ inline void load_shared16(uint32_t address, uint32_t* w) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(address) : "memory");
}
__device__ inline void load_shared16_of_cluster(uint32_t address, uint32_t* w) {
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(address) : "memory");
}
__device__ inline uint32_t load_shared2(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}
__device__ inline uint32_t load_shared2_of_cluster(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared::cluster.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}
__device__ inline void store_shared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
// The place of the same address in another CTA of the cluster.
__device__ inline uint32_t in_cluster(uint32_t address, uint32_t rank) {
  uint32_t v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(v) : "r"(address), "r"(rank));
  return v;
}

// Mbarriers.
__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline bool phase_is_over(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
               "selp.b32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}

__device__ inline uint32_t multiprocessor() {
  uint32_t v;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(v));
  return v;
}
__device__ inline uint32_t launch_number() {
  uint64_t v;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(v));
  return (uint32_t)v;
}
// The two halves are read one by one. When both were read at once, and several processes shared the GPU, some CTAs were
// ended for a time that had not passed; perhaps a new low half had come beside an old high one.
__device__ inline uint64_t nanoseconds() {
  uint32_t low, high, before;
  do {
    asm volatile("mov.u32 %0, %%globaltimer_hi;" : "=r"(before));
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(low));
    asm volatile("mov.u32 %0, %%globaltimer_hi;" : "=r"(high));
  } while (high != before);
  return (uint64_t)high << 32 | low;
}
__device__ inline uint32_t rank_in_cluster() {
  uint32_t v;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(v));
  return v;
}

// A cta_group::2 TMA load signals a barrier that may be the other CTA's, and Hopper's TMA that of the CTA it writes to.
// So there it runs on the barrier of the same offset in its own CTA, of one arrival, and the other one is told after.
__device__ inline uint32_t box_bytes(uint64_t map) {
  const uint32_t* w = (const uint32_t*)map;  // 128 bytes; box lengths - 1 are in bytes 55 to 59, the type in word 2
  uint32_t type = w[2] >> 7 & 15;
  uint32_t bytes = type == 0 ? 1 : type == 1 || type == 6 || type == 10 ? 2 : type == 4 || type == 5 || type == 8 ? 8 : 4;
  uint32_t lengths[5] = {w[13] >> 24, w[14] & 255, w[14] >> 8 & 255, w[14] >> 16 & 255, w[14] >> 24};
  for (int i = 0; i < 5; i++) bytes *= lengths[i] + 1;
  return bytes;
}
__device__ inline uint64_t expect_bytes(uint32_t barrier, uint32_t bytes) {
  uint64_t state;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 %0, [%1], %2;"
               : "=l"(state) : "r"(barrier), "r"(bytes) : "memory");
  return state;
}
__device__ inline bool phase_of_is_over(uint32_t barrier, uint64_t state) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.acquire.cta.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(barrier), "l"(state) : "memory");
  return done;
}
__device__ inline void bring_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("fence.acq_rel.cluster;\nmbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], %1;"
               ::"r"(barrier), "r"(bytes) : "memory");
}

#endif
