// SPDX-License-Identifier: Apache-2.0
#include "gemm_bindings.h"

#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "gemm/plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mokbench {

namespace {

GemmConfig checked_config(u32 tile_rows, u32 stages, u32 group_tiles, bool split_k = false) {
  if (tile_rows == 0 || tile_rows % kRowUnit != 0 || stages == 0 || group_tiles == 0) {
    throw std::invalid_argument("tile_rows must be a multiple of " + std::to_string(kRowUnit) +
                                ", stages and group_tiles at least 1");
  }
  return GemmConfig{
      .tile_rows = tile_rows, .stages = stages, .group_tiles = group_tiles, .split_k = split_k};
}

// What count_tiles does on the GPU.
std::vector<u32> tile_ends_of(const GemmConfig& config, const std::vector<i32>& row_ends, u32 n) {
  std::vector<u32> tile_ends;
  i32 begin = 0;
  for (const i32 end : row_ends) {
    if (end < begin) throw std::invalid_argument("row_ends must not fall");
    tile_ends.push_back((tile_ends.empty() ? 0 : tile_ends.back()) +
                        expert_tiles(config, end - begin, n));
    begin = end;
  }
  return tile_ends;
}

nb::list gemm_tiles(const std::vector<i32>& row_ends, u32 n, u32 k_blocks, u32 num_ctas,
                    u32 tile_rows, u32 group_tiles, bool split_k) {
  const GemmConfig config = checked_config(tile_rows, 1, group_tiles, split_k);
  if (n == 0 || k_blocks == 0 || num_ctas == 0) {
    throw std::invalid_argument("n, k_blocks and num_ctas must be at least 1");
  }
  const std::vector<u32> tile_ends = tile_ends_of(config, row_ends, n);
  TileWalk walk(config, tile_ends.data(), row_ends.data(), static_cast<u32>(row_ends.size()), n,
                k_blocks);
  walk.queue.cut_last(config, num_ctas, k_blocks);
  nb::list found;
  for (u32 index = 0; index < walk.queue.items; ++index) {
    const GemmWork work = walk.at(index);
    nb::dict item;
    item["units"] = work.units;
    item["narrow"] = work.narrow != 0;
    item["expert"] = work.expert;
    item["row"] = work.row;
    item["num_rows"] = work.num_rows;
    item["column"] = work.column;
    item["first_block"] = work.first_block;
    item["num_blocks"] = work.num_blocks;
    item["k_part"] = work.k_part;
    item["k_parts"] = work.k_parts;
    item["parts_at"] = work.parts_at;
    found.append(item);
  }
  return found;
}

nb::dict gemm_layout_of(u32 tile_rows, u32 stages) {
  const GemmLayout layout = gemm_layout(checked_config(tile_rows, stages, 1));
  nb::dict fields;
  fields["stage_bytes"] = layout.stage_bytes;
  fields["staging"] = layout.staging;
  fields["barriers"] = layout.barriers;
  fields["work"] = layout.work;
  fields["tile_ends"] = layout.tile_ends;
  fields["bytes"] = layout.bytes;
  return fields;
}

}  // namespace

void bind_gemm(nb::module_& m) {
  m.def("gemm_tiles", &gemm_tiles, "row_ends"_a, "n"_a, "k_blocks"_a, nb::kw_only(), "num_ctas"_a,
        "tile_rows"_a, "group_tiles"_a, "split_k"_a);
  m.attr("GEMM_PARTS_A_CTA") = TileQueue::kPartsACta;
  m.attr("GEMM_PART_BYTES") = kPartBytes;
  m.def("gemm_layout", &gemm_layout_of, "tile_rows"_a, "stages"_a);
}

}  // namespace mokbench
