// The arithmetic of tcgen05.mma.kind::f16 with a float32 accumulator, one row of the result at a time.
//
// A template over the memory it reads and writes, so that the same code runs on a GPU (runtime.cu) and in a test on a
// host. Layouts are those of the PTX ISA: matrix descriptors of shared memory, the instruction descriptor, and which
// lane and column of tensor memory hold which element of the accumulator.
#pragma once
#include <stdint.h>

#ifdef __CUDACC__
#define ON_BOTH __device__ __forceinline__
#else
#define ON_BOTH inline
#endif

// A 16-bit operand in shared memory, as its 64-bit descriptor says.
struct Matrix {
  uint32_t start;        // bytes, of the shared window
  uint32_t leading;      // bytes: K-major without swizzle, to the next 8 of K; MN-major, to the next atom along MN
  uint32_t stride;       // bytes: K-major, to the next 8 rows; MN-major, to the next 8 of K
  uint32_t pitch;        // bytes of a row of the swizzle's atom
  uint32_t swizzle;      // which of the address's bits 7..9 are added (xor) to bits 4..6
  bool mn_major, known;  // known: a form that is emulated
};

ON_BOTH Matrix matrix_of(uint64_t descriptor, bool mn_major) {
  Matrix m;
  m.start = (uint32_t)(descriptor & 0x3fff) << 4;
  m.leading = (uint32_t)(descriptor >> 16 & 0x3fff) << 4;
  m.stride = (uint32_t)(descriptor >> 32 & 0x3fff) << 4;
  uint32_t version = descriptor >> 46 & 3, base_offset = descriptor >> 49 & 7, absolute_leading = descriptor >> 52 & 1;
  uint32_t layout = (uint32_t)(descriptor >> 61);
  m.pitch = layout == 2 ? 128 : layout == 4 ? 64 : layout == 6 ? 32 : 16;
  m.swizzle = m.pitch / 16 - 1;
  m.mn_major = mn_major;
  m.known = version == 1 && !base_offset && !absolute_leading && (layout == 0 ? !mn_major : layout % 2 == 0);
  return m;
}

// Where the element of row `i` (along M or N) and column `k` (0..15, along K) is.
ON_BOTH uint32_t address_of(const Matrix& m, uint32_t i, uint32_t k) {
  uint32_t offset;
  if (m.mn_major) {
    uint32_t span = m.pitch / 2;
    offset = i % span * 2 + i / span * m.leading + k % 8 * m.pitch + k / 8 * m.stride;
  } else if (m.swizzle == 0) {
    offset = i % 8 * 16 + i / 8 * m.stride + k % 8 * 2 + k / 8 * m.leading;
  } else {
    offset = i % 8 * m.pitch + i / 8 * m.stride + k * 2;
  }
  uint32_t address = m.start + offset;
  return address ^ (address >> 7 & m.swizzle) << 4;
}

ON_BOTH float float_of(uint32_t bits, bool is_bfloat16) {
  union { uint32_t u; float f; } value;
  bits &= 0xffff;
#ifdef __CUDA_ARCH__
  if (!is_bfloat16) {
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value.f) : "r"(bits));
    return value.f;
  }
#else
  if (!is_bfloat16) {
    uint32_t sign = bits >> 15, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 0) {
      value.f = (sign ? -1.0f : 1.0f) * fraction / 16777216.0f;  // 2^-24
      return value.f;
    }
    value.u = sign << 31 | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    return value.f;
  }
#endif
  value.u = bits << 16;
  return value.f;
}

// One tcgen05.mma: what its operands and its instruction descriptor say.
struct Product {
  Matrix a, b;
  uint32_t a_column;  // of A in tensor memory
  uint32_t d_column;
  uint32_t m, n;
  bool a_in_tensor_memory, pair, accumulate, a_bfloat16, b_bfloat16, negative;
  bool known;
};

ON_BOTH Product product_of(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool a_in_tensor_memory, bool pair,
                           bool accumulate) {
  Product p;
  bool a_mn_major = instruction >> 15 & 1, b_mn_major = instruction >> 16 & 1;
  uint32_t a_type = instruction >> 7 & 7, b_type = instruction >> 10 & 7;
  p.a = matrix_of(a, a_mn_major);
  p.b = matrix_of(b, b_mn_major);
  p.a_column = (uint32_t)a & 0xffff;
  p.d_column = d & 0xffff;
  p.n = (instruction >> 17 & 63) * 8;
  p.m = (instruction >> 24 & 31) * 16;
  p.a_in_tensor_memory = a_in_tensor_memory;
  p.pair = pair;
  p.accumulate = accumulate;
  p.a_bfloat16 = a_type == 1;
  p.b_bfloat16 = b_type == 1;
  p.negative = (instruction >> 13 ^ instruction >> 14) & 1;
  bool float32 = (instruction >> 4 & 3) == 1, dense = !(instruction & 15), no_more = instruction >> 29 == 0;
  bool rows = pair ? p.m == 256 || (p.m == 128 && !a_in_tensor_memory) : p.m == 128 || (p.m == 64 && !a_in_tensor_memory);
  bool half = pair && p.m == 128;
  bool columns = p.n >= 8 && p.n <= 256 && p.n % (half ? 32 : pair ? 16 : p.m == 128 ? 16 : 8) == 0;
  p.known = float32 && dense && no_more && a_type <= 1 && b_type <= 1 && rows && columns && p.b.known && d >> 16 == 0 &&
            p.d_column + (half ? p.n / 2 : p.n) <= 512 &&
            (a_in_tensor_memory ? a >> 16 == 0 && !a_mn_major && p.a_column + 8 <= 512 : p.a.known);
  return p;
}

// Rows of the result that a CTA holds.
ON_BOTH uint32_t rows_of(const Product& p) { return p.pair ? p.m / 2 : p.m; }

// Adds to (or sets) columns n0 .. n0 + 7 of a row of the result that `cta` holds: 0, or with a pair 0 or 1.
//
// Memory: void shared16(cta, address, uint32_t[4]); uint32_t shared2(cta, address);
//         uint32_t tensor(cta, column, lane); void store_tensor(cta, column, lane, value).
template <class Memory>
ON_BOTH void eight_columns(Memory& memory, const Product& p, const float (&a)[16], uint32_t cta, uint32_t row,
                           uint32_t n0) {
  uint32_t of_a_cta = p.pair ? p.n / 2 : p.n, half = n0 / of_a_cta, local = n0 - half * of_a_cta;
  uint32_t lane = row, column = p.d_column + n0;
  if (!p.pair && p.m == 64) lane = row / 16 * 32 + row % 16;
  if (p.pair && p.m == 128) lane = row + half * 64, column = p.d_column + local;
  union { uint32_t u; float f; } sum[8];
  for (int j = 0; j < 8; j++) sum[j].u = p.accumulate ? memory.tensor(cta, column + j, lane) : 0;
  if (p.b.mn_major) {
    for (int k = 0; k < 16; k++) {
      uint32_t w[4];
      memory.shared16(half, address_of(p.b, local, k), w);
#pragma unroll
      for (int j = 0; j < 8; j++) sum[j].f += a[k] * float_of(w[j / 2] >> j % 2 * 16, p.b_bfloat16);
    }
  } else {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      uint32_t w[8];
      memory.shared16(half, address_of(p.b, local + j, 0), w);
      memory.shared16(half, address_of(p.b, local + j, 8), w + 4);
#pragma unroll
      for (int k = 0; k < 16; k++) sum[j].f += a[k] * float_of(w[k / 2] >> k % 2 * 16, p.b_bfloat16);
    }
  }
  for (int j = 0; j < 8; j++) memory.store_tensor(cta, column + j, lane, sum[j].u);
}

template <class Memory>
ON_BOTH void row_of_a(Memory& memory, const Product& p, uint32_t cta, uint32_t row, float (&a)[16]) {
  uint32_t w[8];
  if (p.a_in_tensor_memory) {
    for (int k = 0; k < 8; k++) w[k] = memory.tensor(cta, p.a_column + k, row);
  } else if (p.a.mn_major) {
    for (int k = 0; k < 8; k++) {
      w[k] = memory.shared2(cta, address_of(p.a, row, 2 * k)) | memory.shared2(cta, address_of(p.a, row, 2 * k + 1)) << 16;
    }
  } else {
    memory.shared16(cta, address_of(p.a, row, 0), w);
    memory.shared16(cta, address_of(p.a, row, 8), w + 4);
  }
#pragma unroll
  for (int k = 0; k < 16; k++) a[k] = float_of(w[k / 2] >> k % 2 * 16, p.a_bfloat16) * (p.negative ? -1.0f : 1.0f);
}

// Columns begin .. end - 1 of a row; both are multiples of 8.
template <class Memory>
ON_BOTH void row_product(Memory& memory, const Product& p, uint32_t cta, uint32_t row, uint32_t begin, uint32_t end) {
  float a[16];
  row_of_a(memory, p, cta, row, a);
  for (uint32_t n0 = begin; n0 < end; n0 += 8) eight_columns(memory, p, a, cta, row, n0);
}
