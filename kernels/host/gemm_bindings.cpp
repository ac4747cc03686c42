// SPDX-License-Identifier: Apache-2.0
#include "gemm_bindings.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "gemm/plan.h"
#include "mok/plan.h"

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

nb::dict mok_order_of(u32 tile_rows, u32 group_tiles, u32 hidden, u32 intermediate, u32 num_ctas) {
  const MokOrder order = mok_order(tile_rows, group_tiles, hidden, intermediate, num_ctas);
  nb::dict fields;
  fields["lag"] = order.lag;
  fields["gemm1_blocks"] = order.blocks[0];
  fields["gemm2_blocks"] = order.blocks[1];
  fields["least_ring_tiles"] = least_ring_tiles(order);
  fields["least_hidden_ring_tiles"] = least_hidden_ring_tiles(order);
  return fields;
}

nb::list mok_items(const std::vector<u32>& group_tiles, u32 lag, u32 gemm1_blocks,
                   u32 gemm2_blocks) {
  if (gemm1_blocks == 0 || gemm2_blocks == 0) throw std::invalid_argument("blocks must be above 0");
  const MokOrder order{0, 0, lag, {gemm1_blocks, gemm2_blocks}};
  std::vector<u32> tile_ends;
  for (const u32 tiles : group_tiles) {
    if (tiles == 0) throw std::invalid_argument("a group has at least one tile");
    tile_ends.push_back((tile_ends.empty() ? 0 : tile_ends.back()) + tiles);
  }
  const MokWalk walk{order, tile_ends.data(), static_cast<u32>(tile_ends.size())};
  nb::list found;
  for (u32 index = 0; index < walk.items(); ++index) {
    const MokItem item = walk.at(index);
    found.append(nb::make_tuple(item.gemm, item.group, item.in_group, item.block));
  }
  return found;
}

// What place_experts does on the GPU.
void place_groups(const MokOrder& order, const std::vector<u32>& expert_rows,
                  std::vector<MokGroup>& groups, std::vector<u32>& tile_ends) {
  u32 row = 0;
  u32 tile = 0;
  for (u32 expert = 0; expert < expert_rows.size(); ++expert) {
    const u32 rows = expert_rows[expert];
    const u32 tiles = mok_row_tiles(order, rows);
    for (u32 done = 0; done < tiles; done += order.group_tiles) {
      groups.push_back({expert, row, rows, done});
      tile_ends.push_back(tile + min_of(done + order.group_tiles, tiles));
    }
    row += rows;
    tile += tiles;
  }
}

nb::dict mok_pass(const std::vector<u32>& expert_rows, const Config& layer, u32 group_tiles,
                  u32 num_ctas, std::pair<u32, u32> x_at, std::pair<u32, u32> hidden_at) {
  if (layer.block_m == 0 || layer.block_m % kRowUnit != 0 || group_tiles == 0 || num_ctas == 0) {
    throw std::invalid_argument("block_m must be a multiple of " + std::to_string(kRowUnit) +
                                ", group_tiles and num_ctas at least 1");
  }
  const MokOrder order =
      mok_order(layer.block_m, group_tiles, layer.hidden, layer.intermediate, num_ctas);
  std::vector<MokGroup> groups;
  std::vector<u32> tile_ends;
  place_groups(order, expert_rows, groups, tile_ends);
  const MokWalk walk{order, tile_ends.data(), static_cast<u32>(tile_ends.size())};
  const MokRings rings{{x_at.first, x_at.second}, {hidden_at.first, hidden_at.second}};
  nb::list works;
  for (u32 index = 0; index < walk.items(); ++index) {
    const MokWork work = mok_work(walk, groups.data(), rings, layer, index);
    nb::dict item;
    item["gemm"] = work.tag.gemm();
    item["units"] = work.units;
    item["narrow"] = work.narrow != 0;
    item["num_rows"] = work.num_rows;
    item["row"] = work.row;
    item["column"] = work.column;
    item["expert"] = work.expert;
    item["x"] = nb::make_tuple(work.tag.x_slot(), work.x_lap);
    item["hidden"] = nb::make_tuple(work.tag.hidden_slot(), work.hidden_lap);
    works.append(item);
  }
  nb::list tiles;
  for (u32 group = 0; group < groups.size(); ++group) {
    for (u32 tile = walk.tiles_before(group); tile < tile_ends[group]; ++tile) {
      const MokRows rows = rows_of_tile(order, groups[group], tile - walk.tiles_before(group));
      const Cursor at = cursor_behind(rings.x, tile, layer.ring_tiles);
      tiles.append(nb::make_tuple(rows.first, rows.count, nb::make_tuple(at.slot, at.lap)));
    }
  }
  const Cursor x = cursor_behind(rings.x, walk.all_tiles(), layer.ring_tiles);
  const Cursor hidden = cursor_behind(rings.hidden, walk.all_tiles(), layer.hidden_ring_tiles);
  nb::dict pass;
  pass["works"] = works;
  pass["tiles"] = tiles;
  pass["rings"] =
      nb::make_tuple(nb::make_tuple(x.slot, x.lap), nb::make_tuple(hidden.slot, hidden.lap));
  pass["num_groups"] = static_cast<u32>(groups.size());
  return pass;
}

}  // namespace

void bind_gemm(nb::module_& m) {
  m.def("gemm_tiles", &gemm_tiles, "row_ends"_a, "n"_a, "k_blocks"_a, nb::kw_only(), "num_ctas"_a,
        "tile_rows"_a, "group_tiles"_a, "split_k"_a);
  m.attr("GEMM_PARTS_A_CTA") = TileQueue::kPartsACta;
  m.attr("GEMM_PART_BYTES") = kPartBytes;
  m.def("gemm_layout", &gemm_layout_of, "tile_rows"_a, "stages"_a);
  m.def("mok_order", &mok_order_of, nb::kw_only(), "tile_rows"_a, "group_tiles"_a, "hidden"_a,
        "intermediate"_a, "num_ctas"_a);
  m.def("mok_items", &mok_items, "group_tiles"_a, nb::kw_only(), "lag"_a, "gemm1_blocks"_a,
        "gemm2_blocks"_a);
  m.def("mok_pass", &mok_pass, "expert_rows"_a, "layer"_a, nb::kw_only(), "group_tiles"_a,
        "num_ctas"_a, "x_at"_a, "hidden_at"_a);
  m.attr("MOK_PULL_ROWS") = kPullRows;
}

}  // namespace mokbench
