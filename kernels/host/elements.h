// SPDX-License-Identifier: Apache-2.0
// Rows of FP32 or BF16 elements: sums are FP32, stores round to nearest even.
#pragma once

#include <bit>

#include "protocol.h"

namespace mokbench {

struct Bf16 {
  u16 bits;
};

inline float load_element(float value) { return value; }
inline float load_element(Bf16 value) { return std::bit_cast<float>(u32{value.bits} << 16); }

inline void store_element(float value, float& to) { to = value; }
inline void store_element(float value, Bf16& to) {
  const u32 bits = std::bit_cast<u32>(value);
  const u32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;  // rounding could carry a NaN to infinity
  to.bits = static_cast<u16>(is_nan ? (bits >> 16) | 0x40 : rounded);
}

// sum[i] += weight * row[i]
inline void add_scaled_row(float* sum, const void* row, float weight, u32 n, u32 element_bytes) {
  const auto add = [=]<class T>(const T* from) {
    for (u32 i = 0; i < n; ++i) sum[i] += weight * load_element(from[i]);
  };
  if (element_bytes == 2) {
    add(static_cast<const Bf16*>(row));
  } else {
    add(static_cast<const float*>(row));
  }
}

inline void store_row(void* row, const float* sum, u32 n, u32 element_bytes) {
  const auto store = [=]<class T>(T* to) {
    for (u32 i = 0; i < n; ++i) store_element(sum[i], to[i]);
  };
  if (element_bytes == 2) {
    store(static_cast<Bf16*>(row));
  } else {
    store(static_cast<float*>(row));
  }
}

}  // namespace mokbench
