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
// `waiters` warps of every CTA, of `lanes` threads (1 or 32). Returns how many of those did not see all of the results
// that they waited for.
extern "C" int kernel(int ctas, int steps, int products, int waiters, int lanes, int commits, uint32_t instruction,
                      float* expected) {
  std::atomic<int> wrong{0}, ready{0}, seen{0}, done{0};
  uint32_t rows = ctas == 2 ? 128 : (instruction >> 24 & 31) * 16, columns = (instruction >> 17 & 63) * 8;
  std::vector<Warp> warps(ctas * (waiters + 1));
  std::vector<std::thread> threads;
  auto begin = [&](int cta, int number, int lane) {
    blockIdx = {(uint32_t)cta, 0, 0};
    threadIdx = {(uint32_t)(number * 32 + lane), 0, 0};
    warp = lanes == 32 ? &warps[cta * (waiters + 1) + number] : nullptr;
  };
  auto first = [&](int cta, int lane) {
    begin(cta, 0, lane);
    sm100_alloc(kHolder, 512, ctas == 2, 1);
    ready++;
    while (ready < ctas * lanes) sched_yield();
    for (int step = 0; cta == 0 && lane == 0 && step < steps; step++) {
      for (int i = 0; i < products; i++) {
        sm100_mma(0, word(kA), word(kB), instruction, (ctas == 2 ? 2 : 0) | (step + i ? 4 : 0), 0, 2);
      }
      for (int i = 0; i < commits; i++) sm100_commit(kBarriers, ctas == 2 ? 3 : 0, 3);
      while (seen < (step + 1) * waiters * ctas * lanes) sched_yield();
    }
    done++;
    while (done < ctas * lanes) sched_yield();
    sm100_dealloc(0, 512, ctas == 2, 5);
  };
  auto other = [&](int cta, int number, int lane) {
    begin(cta, number, lane);
    while (ready < ctas * lanes) sched_yield();
    uint32_t quarter = number % 4 * 32;
    for (int step = 0; step < steps; step++) {
      while (!sm100_wait(kBarriers, step & 1, 1, 6)) sched_yield();
      bool same = true;
      for (uint32_t row = quarter + lane; row < quarter + 32 && row < rows; row += lanes) {
        threadIdx.x = number * 32 + row % 32;
        const float* found = (const float*)sm100_lane(quarter << 16, columns, 7);
        for (uint32_t n = 0; n < columns; n++) {
          float value;
          memcpy(&value, found + n * 128, 4);
          same &= value == (step + 1) * products * expected[(cta * rows + row) * columns + n];
        }
      }
      threadIdx.x = number * 32 + lane;
      wrong += !same;
      seen++;
    }
  };
  for (int cta = 0; cta < ctas; cta++) {
    memset(shared[cta], 0, 1024);
    for (int lane = 0; lane < lanes; lane++) {
      threads.emplace_back(first, cta, lane);
      for (int number = 1; number <= waiters; number++) threads.emplace_back(other, cta, number, lane);
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
