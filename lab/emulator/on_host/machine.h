// What lab/emulator/runtime.cu needs of CUDA and of the machine, on a host: a thread here is a lane there, the
// only active one of its warp or one of 32. Multiprocessors, shared memory and mbarriers are variables.
#define SM100_MACHINE_H  // in the place of machine.h
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define __device__
#define __noinline__
#define __align__(n) alignas(n)

struct Index { uint32_t x, y, z; };
inline thread_local Index threadIdx, blockIdx;
inline Index blockDim = {512, 1, 1}, gridDim = {8, 1, 1};
struct uint4 { uint32_t x, y, z, w; };
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

// 32 threads that meet where lanes of a warp do.
struct Warp {
  pthread_barrier_t barrier;
  uint64_t values[32];
  Warp() { pthread_barrier_init(&barrier, nullptr, 32); }
  void meet() { pthread_barrier_wait(&barrier); }
};
inline thread_local Warp* warp = nullptr;  // none: this thread is the only active one

inline uint32_t lane() { return threadIdx.x % 32; }
inline uint32_t __activemask() { return warp ? ~0u : 1u << lane(); }
inline uint32_t __ffs(uint32_t x) { return __builtin_ffs(x); }
inline uint32_t __popc(uint32_t x) { return __builtin_popcount(x); }
inline bool is_alone(uint32_t lanes) { return !warp || lanes == 1u << lane(); }
inline uint32_t __shfl_sync(uint32_t lanes, uint32_t v, uint32_t from) {
  if (is_alone(lanes)) return v;
  warp->values[lane()] = v;
  warp->meet();
  uint32_t found = warp->values[from];
  warp->meet();
  return found;
}
inline bool __all_sync(uint32_t lanes, bool v) {
  if (is_alone(lanes)) return v;
  warp->values[lane()] = v;
  warp->meet();
  bool all = true;
  for (uint64_t each : warp->values) all &= each != 0;
  warp->meet();
  return all;
}
inline void __syncwarp(uint32_t lanes = ~0u) {
  if (!is_alone(lanes)) warp->meet();
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __threadfence(); }
inline void __nanosleep(uint32_t) { sched_yield(); }
inline void __trap() { abort(); }
template <class T> T atomicAdd(T* p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
inline uint32_t atomicAdd(uint32_t* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
inline uint32_t atomicAnd(uint32_t* p, uint32_t v) { return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST); }
template <class T, class U> T atomicExch(T* p, U v) { return __atomic_exchange_n(p, (T)v, __ATOMIC_SEQ_CST); }
template <class T, class U, class V> T atomicCAS(T* p, U expected, V v) {
  T found = (T)expected;
  __atomic_compare_exchange_n(p, &found, (T)v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return found;
}

template <class T> T load(const T* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline uint32_t load_acquired(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void store(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }

// Of CTA n (on multiprocessor n, of rank n % 2) bits 24 and up of addresses in the cluster say which of two it is.
inline uint8_t shared[8][1 << 18];
inline uint8_t* own() { return shared[blockIdx.x]; }
inline uint8_t* of_cluster(uint32_t address) { return shared[(blockIdx.x & ~1u) + (address >> 24)] + (address & 0xffffff); }
inline void load_shared16(uint32_t address, uint32_t* w) { memcpy(w, own() + address, 16); }
inline void load_shared16_of_cluster(uint32_t address, uint32_t* w) { memcpy(w, of_cluster(address), 16); }
inline uint32_t load_shared2(uint32_t address) { uint16_t v; memcpy(&v, own() + address, 2); return v; }
inline uint32_t load_shared2_of_cluster(uint32_t address) { uint16_t v; memcpy(&v, of_cluster(address), 2); return v; }
inline void store_shared(uint32_t address, uint32_t v) { memcpy(own() + address, &v, 4); }
inline uint32_t in_cluster(uint32_t address, uint32_t rank) { return (address & 0xffffff) | rank << 24; }
inline uint32_t multiprocessor() { return blockIdx.x; }
inline uint32_t launch_number() { return 7; }
inline uint32_t rank_in_cluster() { return blockIdx.x % 2; }
inline uint64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}

// Mbarriers whose count is 1: a phase more with every arrival.
inline void arrive(uint32_t address) {
  __atomic_fetch_add((uint32_t*)of_cluster(address < 1 << 24 ? in_cluster(address, rank_in_cluster()) : address), 1,
                     __ATOMIC_SEQ_CST);
}
inline bool phase_is_over(uint32_t address, uint32_t parity) {
  return (__atomic_load_n((uint32_t*)(own() + address), __ATOMIC_SEQ_CST) & 1) != parity;
}

inline uint32_t box_bytes(uint64_t) { return 0; }
inline uint64_t expect_bytes(uint32_t, uint32_t) { return 0; }
inline bool phase_of_is_over(uint32_t, uint64_t) { return true; }
inline void bring_bytes(uint32_t, uint32_t) {}
