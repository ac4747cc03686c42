// SPDX-License-Identifier: Apache-2.0
#include "array_checks.h"

#include <stdexcept>

namespace nb = nanobind;

namespace mokbench {

namespace {

std::string dtype_name(nb::dlpack::dtype dtype) {
  const char* kind = "unknown";
  if (dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Int)) kind = "int";
  if (dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt)) kind = "uint";
  if (dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float)) kind = "float";
  if (dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat)) kind = "bfloat";
  return kind + std::to_string(dtype.bits);
}

bool is_dtype(nb::dlpack::dtype dtype, nb::dlpack::dtype_code code, u32 bits) {
  return dtype.code == static_cast<uint8_t>(code) && dtype.bits == bits && dtype.lanes == 1;
}

template <class Array>
std::string shape_of(const Array& array) {
  std::string text = "[";
  for (size_t i = 0; i < array.ndim(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(array.shape(i));
  }
  return text + "]";
}

template <class Array>
void check_layout(const std::string& name, const Array& array, u64 columns, const char* allowed) {
  if (array.device_type() != nb::device::cpu::value) {
    throw std::invalid_argument(name + " is not on the CPU; the twin runs on the CPU only");
  }
  if (array.ndim() != 2 || array.shape(1) != columns) {
    throw std::invalid_argument(name + " has shape " + shape_of(array) + "; it needs [" + allowed +
                                ", " + std::to_string(columns) + "]");
  }
  if (array.size() == 0) return;
  const bool dense = (array.shape(1) == 1 || array.stride(1) == 1) &&
                     (array.shape(0) == 1 || array.stride(0) == static_cast<int64_t>(columns));
  if (!dense) throw std::invalid_argument(name + " is not contiguous; pass a contiguous copy");
}

template <class Array>
void check_element(const std::string& name, const Array& array, u32 element_bytes) {
  const auto dtype = array.dtype();
  const bool right = element_bytes == 4 ? is_dtype(dtype, nb::dlpack::dtype_code::Float, 32)
                                        : is_dtype(dtype, nb::dlpack::dtype_code::Bfloat, 16) ||
                                              is_dtype(dtype, nb::dlpack::dtype_code::UInt, 16);
  if (right) return;
  throw std::invalid_argument(name + " is of " + dtype_name(dtype) + "; element_bytes " +
                              std::to_string(element_bytes) + " needs " +
                              (element_bytes == 4 ? "float32" : "bfloat16 (or its bits, uint16)"));
}

void check_table(const std::string& name, const InputArray& array, u64 tokens, u32 top_k,
                 nb::dlpack::dtype_code code, const char* wanted) {
  check_layout(name, array, top_k, "T");
  if (array.shape(0) != tokens) {
    throw std::invalid_argument(name + " has " + std::to_string(array.shape(0)) +
                                " tokens, x has " + std::to_string(tokens));
  }
  if (!is_dtype(array.dtype(), code, 32)) {
    throw std::invalid_argument(name + " is of " + dtype_name(array.dtype()) + "; it needs " +
                                wanted);
  }
}

}  // namespace

char* checked_rows(const char* name, const OutputArray& array, u64 rows, u64 columns,
                   u32 element_bytes) {
  check_layout(name, array, columns, std::to_string(rows).c_str());
  check_element(name, array, element_bytes);
  if (array.shape(0) != rows) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(array.shape(0)) +
                                " rows; it needs " + std::to_string(rows));
  }
  return static_cast<char*>(array.data());
}

TokenBatch checked_batch(const Config& config, const InputArray& x, const InputArray& topk_idx,
                         const InputArray& topk_weights) {
  check_layout("x", x, config.hidden, "T");
  check_element("x", x, config.element_bytes);
  const u64 tokens = x.shape(0);
  if (tokens > config.max_tokens) {
    throw std::invalid_argument("x has " + std::to_string(tokens) + " tokens and max_tokens is " +
                                std::to_string(config.max_tokens) +
                                "; build the workspace with max_tokens of at least " +
                                std::to_string(tokens));
  }
  check_table("topk_idx", topk_idx, tokens, config.top_k, nb::dlpack::dtype_code::Int, "int32");
  check_table("topk_weights", topk_weights, tokens, config.top_k, nb::dlpack::dtype_code::Float,
              "float32");
  return {static_cast<const char*>(x.data()), static_cast<const i32*>(topk_idx.data()),
          static_cast<const float*>(topk_weights.data()), static_cast<u32>(tokens)};
}

}  // namespace mokbench
