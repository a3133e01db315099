// Tensor memory and the tcgen05 unit of an SM100 GPU, for translated kernels on a Hopper GPU.
//
// Tensor memory is a piece of global memory a multiprocessor; a CTA keeps the one of the multiprocessor that it allocates
// on, should it be moved to another. tcgen05.mma and tcgen05.commit only put an entry into a
// queue of their CTA, in the order of issue; entries are executed later, one after the other, by the warps that wait for
// an mbarrier. So products are as asynchronous as on the hardware, and many warps share one product. An entry may be held
// back for a random time, as may accesses to tensor memory and the end of a wait (jitter).
//
// Faults and settings are in a page of the host's memory at a fixed address (mailbox.py).
#include "machine.h"
#include "product.h"

namespace {

constexpr uint32_t kMultiprocessors = 144, kColumns = 512, kLanes = 128, kQueues = 2, kEntries = 512, kKeys = 1 << 16;
constexpr uint32_t kUnitColumns = 32;  // of a product, that a warp computes at a time, of 32 rows
constexpr uint64_t kMailbox = 0x6a0000000000;
constexpr uint32_t kRecords = 128, kFirstRecord = 16, kRecordWords = 16;
constexpr uint32_t kQuietNaN = 0x7fc0dead;

// The same numbers are in mailbox.py, with what they mean.
enum Fault : uint32_t {
  kBadAllocation = 1, kNoColumns, kBadFree, kNotAllocated, kWrongLanes, kDifferentAddresses, kBadProduct, kMaskedLanes, kNoQueue,
  kUncommitted, kOtherThread, kHang, kBadPair, kTransfer,
};

struct Entry {
  uint32_t sequence;  // its number + 1, once all else is written
  uint32_t units;
  uint32_t is_commit, site;
  uint64_t not_before;  // ns
  uint32_t barrier, ctas;  // of a commit; no ctas: the barrier at that address alone
  uint32_t d, instruction, flags, peer;  // peer: its tensor memory's number
  uint64_t a, b;
};

struct Queue {
  uint64_t owner;     // the CTA's identity; 0: free
  uint32_t columns;   // allocated
  uint32_t base;      // of the last allocation
  uint32_t reserved;  // entries
  uint32_t done;      // units of the entry at hand
  uint64_t claim;     // the entry at hand << 32 | its first unit that nobody has taken
  uint64_t started;   // ns
  uint32_t uncommitted[32];  // by warp: the thread whose product has no commit behind it, + 1
  Entry entries[kEntries];
};

}  // namespace

extern "C" {
__device__ __align__(128) uint32_t sm100_tensor_memory[kMultiprocessors * kColumns * kLanes];
__device__ uint32_t sm100_allocated[kMultiprocessors];  // a bit for every 32 columns
__device__ uint32_t sm100_queue_of[kKeys];              // by the CTA's identity: the queue's number + 1
__device__ uint32_t sm100_num_faults, sm100_jitter, sm100_limit_ms;
}
__device__ Queue queues[kMultiprocessors * kQueues];

namespace {

__device__ uint32_t thread_number() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
// Of the CTA of this launch whose first index is x, the others being this one's. Not 0.
__device__ uint64_t identity_of(uint32_t x) {
  return (uint64_t)launch_number() << 32 | (x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z) + 1);
}
__device__ uint64_t identity() { return identity_of(blockIdx.x); }
__device__ uint32_t* place_of(uint64_t identity) {
  return &sm100_queue_of[((uint32_t)identity + (uint32_t)(identity >> 32) * 7919) % kKeys];
}
__device__ uint32_t first_lane(uint32_t lanes) { return __ffs(lanes) - 1; }
__device__ bool is_first_lane(uint32_t lanes) { return thread_number() % 32 == first_lane(lanes); }
__device__ uint32_t blocks_of(uint32_t columns) { return columns == 512 ? 0xffffu : (1u << columns / 32) - 1; }
__device__ uint32_t* tensor_memory(uint32_t number) { return sm100_tensor_memory + (size_t)number * kColumns * kLanes; }

__device__ __noinline__ void fault(uint32_t code, uint32_t site, uint32_t a, uint32_t b, uint32_t c) {
  volatile uint32_t* record = (volatile uint32_t*)kMailbox + kFirstRecord + atomicAdd(&sm100_num_faults, 1) % kRecords * kRecordWords;
  record[1] = blockIdx.x;
  record[2] = blockIdx.y;
  record[3] = blockIdx.z;
  record[4] = thread_number();
  record[5] = site;
  record[6] = a;
  record[7] = b;
  record[8] = c;
  __threadfence_system();
  record[0] = code;
  __threadfence_system();
}

__device__ __noinline__ void give_up() {
  uint64_t start = nanoseconds();
  while (nanoseconds() - start < 100000000) __nanosleep(1000000);  // others have something to tell, too
  __trap();
}

// The number of the tensor memory that a CTA allocates from.
__device__ uint32_t memory_of(const Queue* queue) { return (uint32_t)(queue - queues) / kQueues; }

__device__ Queue* queue_of(uint64_t identity) {
  uint32_t number = load(place_of(identity));
  if (!number) return nullptr;
  Queue* queue = &queues[number - 1];
  return load(&queue->owner) == identity ? queue : nullptr;
}

// Mostly none, sometimes up to a 32nd of the longest time, seldom up to all of it; ns.
__device__ uint32_t random_time(uint32_t salt) {
  uint32_t longest = load(&sm100_jitter);
  if (!longest) return 0;
  uint32_t x = (uint32_t)nanoseconds() ^ salt * 0x9e3779b1u ^ multiprocessor() << 20 ^ thread_number() / 32 << 10;
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  x ^= x >> 16;
  uint32_t kind = x & 15, scale = x >> 4 & 255;
  return kind < 10 ? 0 : (uint32_t)((uint64_t)longest * scale / 255 >> (kind < 15 ? 5 : 0));
}
// Holds threads of a warp for a random time, the same for all.
__device__ void delay(uint32_t lanes, uint32_t salt) {
  uint32_t time = 0;
  if (is_first_lane(lanes)) time = random_time(salt);
  time = __shfl_sync(lanes, time, first_lane(lanes));
  uint64_t start = nanoseconds();
  while (time && nanoseconds() - start < time) __nanosleep(500);
  __syncwarp(lanes);
}

// The memory of a CTA, or of a pair of them, for product.h.
struct Memory {
  uint32_t* tensor_memories[2];
  uint32_t windows[2];  // where the shared memory of each begins
  bool pair;

  __device__ void shared16(uint32_t cta, uint32_t address, uint32_t* w) {
    if (pair) load_shared16_of_cluster(windows[cta] + address, w);
    else load_shared16(address, w);
  }
  __device__ uint32_t shared2(uint32_t cta, uint32_t address) {
    return pair ? load_shared2_of_cluster(windows[cta] + address) : load_shared2(address);
  }
  __device__ uint32_t tensor(uint32_t cta, uint32_t column, uint32_t lane) {
    return load(tensor_memories[cta] + column * kLanes + lane);
  }
  __device__ void store_tensor(uint32_t cta, uint32_t column, uint32_t lane, uint32_t value) {
    store(tensor_memories[cta] + column * kLanes + lane, value);
  }
};

__device__ Product decoded(const Entry& e) {
  return product_of(e.d, e.a, e.b, e.instruction, e.flags & 1, e.flags & 2, e.flags & 4);
}
__device__ uint32_t row_units(const Product& p) { return (rows_of(p) + 31) / 32; }
__device__ uint32_t units_of(const Product& p) {
  return row_units(p) * ((p.n + kUnitColumns - 1) / kUnitColumns) * (p.pair ? 2 : 1);
}

__device__ void execute_product(const Queue* queue, const Entry& e, uint32_t unit, uint32_t lanes) {
  Product p = decoded(e);
  Memory memory;
  memory.pair = p.pair;
  memory.tensor_memories[0] = tensor_memory(memory_of(queue));
  if (p.pair) {
    uint32_t rank = rank_in_cluster();  // even: that of the leader
    memory.tensor_memories[1] = tensor_memory(e.peer);
    memory.windows[0] = in_cluster(0, rank);
    memory.windows[1] = in_cluster(0, rank + 1);
  }
  uint32_t of_rows = row_units(p), cta = p.pair ? unit & 1 : 0, rest = p.pair ? unit >> 1 : unit;
  uint32_t first = rest % of_rows * 32, begin = rest / of_rows * kUnitColumns;
  uint32_t end = begin + kUnitColumns < p.n ? begin + kUnitColumns : p.n;
  uint32_t position = __popc(lanes & ((1u << thread_number() % 32) - 1)), step = __popc(lanes);
  for (uint32_t row = first + position; row < first + 32 && row < rows_of(p); row += step) {
    row_product(memory, p, cta, row, begin, end);
  }
}

__device__ void execute_commit(const Entry& e) {
  if (!e.ctas) arrive(e.barrier);
  for (uint32_t rank = 0; rank < 16; rank++) {
    if (e.ctas >> rank & 1) arrive(in_cluster(e.barrier, rank));
  }
}

// Takes a unit of the entry at hand; false if there is none.
__device__ bool take_unit(Queue* queue, uint32_t& number, uint32_t& unit) {
  for (;;) {
    uint64_t claim = load(&queue->claim);
    number = (uint32_t)(claim >> 32);
    unit = (uint32_t)claim;
    Entry* e = &queue->entries[number % kEntries];
    if (load_acquired(&e->sequence) != number + 1 || unit >= load(&e->units)) return false;
    if (unit == 0 && nanoseconds() < load(&e->not_before)) return false;
    if (atomicCAS((unsigned long long*)&queue->claim, claim, claim + 1) == claim) return true;
  }
}

// Threads of a warp execute a part of the entry at hand; false if there is nothing to do.
__device__ __noinline__ bool help(Queue* queue, uint32_t lanes) {
  uint32_t number = 0, unit = 0, taken = 0;
  if (is_first_lane(lanes)) taken = take_unit(queue, number, unit);
  taken = __shfl_sync(lanes, taken, first_lane(lanes));
  if (!taken) return false;
  number = __shfl_sync(lanes, number, first_lane(lanes));
  unit = __shfl_sync(lanes, unit, first_lane(lanes));
  __threadfence();
  Entry* there = &queue->entries[number % kEntries];
  Entry e;
  const uint32_t* from = (const uint32_t*)there;
  for (uint32_t i = 0; i < sizeof(Entry) / 4; i++) ((uint32_t*)&e)[i] = load(from + i);
  if (e.is_commit) {
    if (is_first_lane(lanes)) execute_commit(e);
  } else {
    execute_product(queue, e, unit, lanes);
  }
  __threadfence();
  __syncwarp(lanes);
  if (is_first_lane(lanes) && atomicAdd(&queue->done, 1) + 1 == e.units) {
    atomicExch(&queue->done, 0);
    __threadfence();
    atomicExch((unsigned long long*)&queue->claim, (unsigned long long)(number + 1) << 32);
  }
  __syncwarp(lanes);
  return true;
}

// Whether a CTA has been running for too long.
__device__ bool is_late(const Queue* queue) {
  return nanoseconds() - load(&queue->started) > (uint64_t)load(&sm100_limit_ms) * 1000000;
}

// Ends the kernel with a fault if a CTA is late.
__device__ void watch(Queue* queue, uint32_t site, uint32_t a, uint32_t b) {
  if (!is_late(queue)) return;
  uint32_t left = load(&queue->reserved) - (uint32_t)(load(&queue->claim) >> 32);
  if (is_first_lane(__activemask())) fault(kHang, site, a, b, left);
  give_up();
}

// By one thread: a place in the queue, with nothing in it yet.
__device__ Entry* reserve(Queue* queue, uint32_t site, uint32_t& number) {
  number = atomicAdd(&queue->reserved, 1);
  while (number - (uint32_t)(load(&queue->claim) >> 32) >= kEntries) {
    if (!help(queue, 1u << thread_number() % 32)) __nanosleep(200);
    watch(queue, site, 0, 0);
  }
  return &queue->entries[number % kEntries];
}
__device__ void publish(Entry* there, const Entry& e, uint32_t number) {
  uint32_t* to = (uint32_t*)there;
  for (uint32_t i = 1; i < sizeof(Entry) / 4; i++) store(to + i, ((const uint32_t*)&e)[i]);
  __threadfence();
  atomicExch(&there->sequence, number + 1);
}
__device__ Queue* queue_or_fault(uint32_t site) {
  Queue* queue = queue_of(identity());
  if (!queue) {
    fault(kNoQueue, site, 0, 0, 0);
    give_up();
  }
  return queue;
}

__device__ void take_queue(uint32_t site) {
  uint32_t number = multiprocessor() % kMultiprocessors * kQueues, last = number + kQueues;
  while (number < last && atomicCAS((unsigned long long*)&queues[number].owner, 0ull, ~0ull) != 0) number++;
  if (number == last) {
    fault(kNoQueue, site, 0, 0, 0);
    give_up();
  }
  Queue* queue = &queues[number];
  queue->columns = queue->reserved = queue->done = 0;
  queue->claim = 0;
  queue->started = nanoseconds();
  for (int i = 0; i < 32; i++) queue->uncommitted[i] = 0;
  for (uint32_t i = 0; i < kEntries; i++) store(&queue->entries[i].sequence, 0);
  __threadfence();
  atomicExch((unsigned long long*)&queue->owner, (unsigned long long)identity());
  atomicExch(place_of(identity()), number + 1);
}

}  // namespace

extern "C" {

// tcgen05.alloc, by a warp: the first column's address goes to shared memory.
__device__ __noinline__ void sm100_alloc(uint32_t destination, uint32_t columns, uint32_t pair, uint32_t site) {
  __syncwarp();
  if (columns < 32 || columns > 512 || columns & (columns - 1)) {
    fault(kBadAllocation, site, columns, 0, 0);
    give_up();
  }
  uint32_t lane = thread_number() % 32, number = 0, base = 0;
  if (lane == 0) {
    volatile uint32_t* mailbox = (volatile uint32_t*)kMailbox;
    store(&sm100_jitter, mailbox[1]);
    store(&sm100_limit_ms, mailbox[2]);
    if (!queue_of(identity())) take_queue(site);
    Queue* queue = queue_of(identity());
    number = memory_of(queue);
    for (bool found = false; !found;) {
      uint32_t taken = load(&sm100_allocated[number]);
      for (base = 0; base + columns <= kColumns; base += columns) {
        uint32_t blocks = blocks_of(columns) << base / 32;
        if (!(taken & blocks)) {
          found = atomicCAS(&sm100_allocated[number], taken, taken | blocks) == taken;
          break;
        }
      }
      if (!found) __nanosleep(1000);
      if (!found && is_late(queue)) {
        fault(kNoColumns, site, columns, taken, 0);
        give_up();
      }
    }
    queue->columns += columns;
    store(&queue->base, base);
    if (pair && gridDim.x % 2) fault(kBadPair, site, gridDim.x, 0, 0);
  }
  number = __shfl_sync(0xffffffffu, number, 0);
  base = __shfl_sync(0xffffffffu, base, 0);
  uint4* from = (uint4*)(tensor_memory(number) + base * kLanes);
  for (uint32_t i = lane; i < columns * kLanes / 4; i += 32) from[i] = make_uint4(kQuietNaN, kQuietNaN, kQuietNaN, kQuietNaN);
  __threadfence();
  __syncwarp();
  if (lane == 0) store_shared(destination, base);
  __syncwarp();
}

// tcgen05.dealloc, by a warp: all that was issued has been executed behind it.
__device__ __noinline__ void sm100_dealloc(uint32_t address, uint32_t columns, uint32_t pair, uint32_t site) {
  __syncwarp();
  Queue* queue = queue_or_fault(site);
  while (!__all_sync(0xffffffffu, load(&queue->reserved) == (uint32_t)(load(&queue->claim) >> 32))) {
    if (!help(queue, 0xffffffffu)) __nanosleep(200);
    watch(queue, site, 0, 0);
  }
  __syncwarp();
  if (thread_number() % 32 == 0) {
    for (int i = 0; i < 32; i++) {
      uint32_t thread = load(&queue->uncommitted[i]);
      if (thread) fault(kUncommitted, site, thread - 1, 0, 0);
    }
    uint32_t blocks = blocks_of(columns) << (address & 0xffff) / 32;
    __threadfence();
    uint32_t before = atomicAnd(&sm100_allocated[memory_of(queue)], ~blocks);
    if ((before & blocks) != blocks) fault(kBadFree, site, address, columns, before);
    queue->columns -= columns;
    if (queue->columns == 0) {
      atomicExch(place_of(identity()), 0u);
      __threadfence();
      atomicExch((unsigned long long*)&queue->owner, 0ull);
    }
  }
  __syncwarp();
}

// The place of this thread's lane in the first column of tcgen05.ld or st of shape 32x32b, by a warp.
__device__ __noinline__ uint64_t sm100_lane(uint32_t address, uint32_t columns, uint32_t site) {
  uint32_t lanes = 0xffffffffu, column = address & 0xffff, number = memory_of(queue_or_fault(site));
  __syncwarp();
  if (!__all_sync(lanes, address == __shfl_sync(lanes, address, 0)) && is_first_lane(lanes)) {
    fault(kDifferentAddresses, site, address, 0, 0);
  }
  delay(lanes, site);
  uint32_t own = thread_number() / 32 % 4 * 32;
  if (address >> 16 != own && is_first_lane(lanes)) fault(kWrongLanes, site, address, own, 0);
  uint32_t blocks = 0;
  for (uint32_t i = column / 32; i <= (column + columns - 1) / 32; i++) blocks |= i < 16 ? 1u << i : 0;
  if (column + columns > kColumns || (load(&sm100_allocated[number]) & blocks) != blocks) {
    if (is_first_lane(lanes)) fault(kNotAllocated, site, address, columns, load(&sm100_allocated[number]));
    column = 0;
  }
  return (uint64_t)(tensor_memory(number) + column * kLanes + own + thread_number() % 32);
}

// tcgen05.mma.kind::f16, by the threads that issue it. flags: 1 A is in tensor memory, 2 a pair of CTAs, 4 accumulates.
__device__ __noinline__ void sm100_mma(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t flags,
                                       uint32_t disabled, uint32_t site) {
  Queue* queue = queue_or_fault(site);
  Entry e;
  e.is_commit = 0;
  e.site = site;
  e.d = d;
  e.a = a;
  e.b = b;
  e.instruction = instruction;
  e.flags = flags;
  Product p = decoded(e);
  e.units = units_of(p);
  e.peer = 0;
  if (disabled) fault(kMaskedLanes, site, disabled, 0, 0);
  if (!p.known) {
    fault(kBadProduct, site, instruction, d, (uint32_t)(b >> 32));
    return;
  }
  if (p.pair) {
    Queue* peer = queue_of(identity_of(blockIdx.x ^ 1));
    while (!peer && !is_late(queue)) {
      __nanosleep(1000);
      peer = queue_of(identity_of(blockIdx.x ^ 1));
    }
    if (!peer || rank_in_cluster() % 2 || load(&peer->base) != load(&queue->base)) {
      fault(kBadPair, site, rank_in_cluster(), peer != nullptr, 0);
      give_up();
    }
    e.peer = memory_of(peer);
  }
  uint32_t columns = p.pair && p.m == 128 ? p.n / 2 : p.n, blocks = 0;
  for (uint32_t i = p.d_column / 32; i <= (p.d_column + columns - 1) / 32; i++) blocks |= 1u << i;
  if (flags & 1) blocks |= 1u << p.a_column / 32 | 1u << (p.a_column + 7) / 32;
  uint32_t allocated = load(&sm100_allocated[memory_of(queue)]);
  if ((allocated & blocks) != blocks) fault(kNotAllocated, site, d, columns, allocated);
  store(&queue->uncommitted[thread_number() / 32], thread_number() + 1);
  e.not_before = nanoseconds() + random_time(site);
  uint32_t number;
  Entry* there = reserve(queue, site, number);
  publish(there, e, number);
}

// tcgen05.commit, by the threads that issue it. No ctas: to the barrier at that address; else to that of each of them.
__device__ __noinline__ void sm100_commit(uint32_t barrier, uint32_t ctas, uint32_t site) {
  Queue* queue = queue_or_fault(site);
  Entry e = {};
  e.is_commit = 1;
  e.units = 1;
  e.site = site;
  e.barrier = barrier;
  e.ctas = ctas;
  uint32_t thread = thread_number();
  uint32_t issuer = load(&queue->uncommitted[thread / 32]);
  if (issuer && issuer != thread + 1) fault(kOtherThread, site, issuer - 1, 0, 0);
  store(&queue->uncommitted[thread / 32], 0);
  e.not_before = nanoseconds() + random_time(site);
  uint32_t number;
  Entry* there = reserve(queue, site, number);
  publish(there, e, number);
}

// mbarrier.try_wait.parity (patient) or test_wait.parity: whether the phase is over, for all threads that ask together,
// as the branch behind it may have to be uniform. Waiting warps execute products.
__device__ __noinline__ uint32_t sm100_wait(uint32_t barrier, uint32_t parity, uint32_t patient, uint32_t site) {
  uint32_t lanes = __activemask();
  for (uint32_t turn = 0; turn < (patient ? 300 : 1); turn++) {
    if (__all_sync(lanes, phase_is_over(barrier, parity))) {
      delay(lanes, site);
      return 1;
    }
    Queue* queue = queue_of(identity());
    // A few threads alone would take long over what a warp that also waits does soon.
    bool helps = __all_sync(lanes, queue && (lanes == 0xffffffffu || turn >= 200));
    bool helped = helps && help(queue, lanes);
    if (!helped && patient) __nanosleep(200);
    if (queue) watch(queue, site, barrier, parity);
  }
  return 0;
}

// A TMA load of a pair of CTAs, before and after it: machine.h says what they are for.
__device__ __noinline__ uint64_t sm100_before_load(uint32_t barrier, uint32_t own, uint64_t map) {
  return barrier == own ? 0 : expect_bytes(own, box_bytes(map));
}
__device__ __noinline__ void sm100_after_load(uint32_t barrier, uint32_t own, uint64_t map, uint64_t state, uint32_t site) {
  if (barrier == own) return;
  uint64_t start = nanoseconds();
  while (!phase_of_is_over(own, state)) {
    if (nanoseconds() - start > 2000000000) {
      fault(kTransfer, site, barrier, own, box_bytes(map));
      give_up();
    }
  }
  bring_bytes(barrier, box_bytes(map));
}

}  // extern "C"
