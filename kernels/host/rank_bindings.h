// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace mokbench {

// Adds MokRank, PushRank and SignalRank to the module.
void bind_ranks(nanobind::module_& m);

}  // namespace mokbench
