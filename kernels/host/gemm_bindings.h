// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace mokbench {

// Adds gemm_tiles and gemm_layout, the plan of the GPU's grouped GEMM, for its tests.
void bind_gemm(nanobind::module_& m);

}  // namespace mokbench
