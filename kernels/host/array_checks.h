// SPDX-License-Identifier: Apache-2.0
// Arrays handed over from Python (NumPy, torch): all is checked before a byte is touched.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

#include "workspace.h"

namespace mokbench {

using InputArray = nanobind::ndarray<nanobind::ro>;
using OutputArray = nanobind::ndarray<>;

// [rows, columns] on the CPU, row after row without gaps, of the workspace's element type: FP32 for
// 4 bytes; BF16, or uint16 holding its bits, for 2. Throws std::invalid_argument.
char* checked_rows(const char* name, const OutputArray& array, u64 rows, u64 columns,
                   u32 element_bytes);

// x [T, hidden], topk_idx [T, K] int32, topk_weights [T, K] float32, T <= max_tokens.
TokenBatch checked_batch(const Config& config, const InputArray& x, const InputArray& topk_idx,
                         const InputArray& topk_weights);

}  // namespace mokbench
