// SPDX-License-Identifier: Apache-2.0
// How fast rows are copied, beside a plain memcpy of the same bytes on the same machine.
#pragma once

#include <string>
#include <vector>

#include "protocol.h"

namespace mokbench {

// GB/s of each repeat. kind: "memcpy" copies all rows as one block out of shared memory, "pull"
// gathers rows from shuffled places there, "push" scatters rows to shuffled places there.
std::vector<double> copy_rate(const std::string& kind, u64 row_bytes, u64 num_rows, u32 repeats);

}  // namespace mokbench
