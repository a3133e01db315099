// Products on plain arrays.
#include "product.h"

namespace {

struct Memory {
  const uint8_t* shared;  // of two CTAs, 256 KB each
  uint32_t* tensors;      // of two CTAs: columns of 128 lanes
  uint32_t* place(uint32_t cta, uint32_t column, uint32_t lane) {
    return tensors + (cta * 512 + column) * 128 + lane;
  }
  void shared16(uint32_t cta, uint32_t address, uint32_t* w) { memcpy(w, shared + cta * 262144 + address, 16); }
  uint32_t shared2(uint32_t cta, uint32_t address) {
    uint16_t v;
    memcpy(&v, shared + cta * 262144 + address, 2);
    return v;
  }
  uint32_t tensor(uint32_t cta, uint32_t column, uint32_t lane) { return *place(cta, column, lane); }
  void store_tensor(uint32_t cta, uint32_t column, uint32_t lane, uint32_t v) { *place(cta, column, lane) = v; }
};

}  // namespace

extern "C" int product(const uint8_t* shared, uint32_t* tensors, uint32_t d, uint64_t a, uint64_t b, uint32_t instruction,
                   int flags) {
  Memory memory{shared, tensors};
  Product p = product_of(d, a, b, instruction, flags & 1, flags & 2, flags & 4);
  if (!p.known) return 0;
  for (uint32_t cta = 0; cta < (p.pair ? 2 : 1); cta++)
    for (uint32_t row = 0; row < rows_of(p); row++) row_product(memory, p, cta, row, 0, p.n);
  return 1;
}
