// A kernel of one or of two CTAs on the runtime: a warp issues products and commits, others wait for them and add up.
#include <atomic>
#include <thread>
#include <vector>

#include "runtime.cu"

namespace {

constexpr uint32_t kBarriers = 0, kHolder = 64, kA = 1024, kB = 65536;
uint64_t word(uint32_t address) { return address >> 4 | 1ull << 46 | (uint64_t)(1024 >> 4) << 32 | 2ull << 61; }

}  // namespace

// Every step adds the products of A and B, of 16 of K each, `products` times to the result; its commit is waited for by
// `waiters` warps of every CTA. Returns how many of them did not see all of the results that they waited for.
extern "C" int kernel(int ctas, int steps, int products, int waiters, int commits, uint32_t instruction, float* expected) {
  std::atomic<int> wrong{0}, ready{0}, waiting{0}, done{0};
  uint32_t rows = ctas == 2 ? 128 : (instruction >> 24 & 31) * 16, columns = (instruction >> 17 & 63) * 8;
  std::vector<std::thread> threads;
  for (int cta = 0; cta < ctas; cta++) {
    memset(shared[cta], 0, 1024);
    threads.emplace_back([=, &ready, &waiting, &done] {  // warp 0
      blockIdx = {(uint32_t)cta, 0, 0};
      threadIdx = {0, 0, 0};
      sm100_alloc(kHolder, 512, ctas == 2, 1);
      ready++;
      while (ready < ctas) sched_yield();
      if (cta == 0) {
        for (int step = 0; step < steps; step++) {
          for (int i = 0; i < products; i++) {
            sm100_mma(0, word(kA), word(kB), instruction, (ctas == 2 ? 2 : 0) | (step + i ? 4 : 0), 0, 2);
          }
          for (int i = 0; i < commits; i++) sm100_commit(kBarriers, ctas == 2 ? 3 : 0, 3);
          while (waiting < (step + 1) * waiters * ctas) {
            sm100_wait(kBarriers, step & 1, 0, 4);
            sched_yield();
          }
        }
      }
      done++;
      while (done < ctas) sched_yield();
      sm100_dealloc(0, 512, ctas == 2, 5);
    });
    for (int warp = 1; warp <= waiters; warp++) {
      threads.emplace_back([=, &ready, &waiting, &wrong] {
        blockIdx = {(uint32_t)cta, 0, 0};
        threadIdx = {(uint32_t)warp * 32, 0, 0};
        while (ready < ctas) sched_yield();
        for (int step = 0; step < steps; step++) {
          while (!sm100_wait(kBarriers, step & 1, 1, 6)) sched_yield();
          bool same = true;
          for (uint32_t lane = 0; lane < 32 && warp % 4 * 32 + lane < rows; lane++) {
            uint32_t row = warp % 4 * 32 + lane;
            threadIdx.x = warp * 32 + lane;
            const float* found = (const float*)sm100_lane(warp % 4 * 32 << 16, columns, 7);
            for (uint32_t n = 0; n < columns; n++) {
              float value;
              memcpy(&value, found + n * 128, 4);
              same &= value == (step + 1) * products * expected[(cta * rows + row) * columns + n];
            }
          }
          threadIdx.x = warp * 32;
          wrong += !same;
          waiting++;
        }
      });
    }
  }
  for (auto& thread : threads) thread.join();
  return wrong;
}

extern "C" uint8_t* shared_memory() { return shared[0]; }
// Columns, and CTAs that have a queue.
extern "C" uint32_t in_use() {
  uint32_t count = sm100_allocated[0] | sm100_allocated[1];
  for (const Queue& queue : queues) count += queue.owner != 0;
  return count;
}
