// SPDX-License-Identifier: Apache-2.0
#include "copy_rate.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>

#include "memory.h"
#include "shared_memory.h"

namespace mokbench {

namespace {

constexpr u64 kMaxBytes = 1ull << 32;

void check_arguments(const std::string& kind, u64 row_bytes, u64 num_rows) {
  if (kind != "memcpy" && kind != "pull" && kind != "push") {
    throw std::invalid_argument("kind is '" + kind + "'; allowed are memcpy, pull and push");
  }
  if (row_bytes == 0 || num_rows == 0 || row_bytes > kMaxBytes / num_rows) {
    throw std::invalid_argument("row_bytes * num_rows is " + std::to_string(row_bytes) + " * " +
                                std::to_string(num_rows) + "; allowed are 1 byte to 4 GiB");
  }
}

}  // namespace

std::vector<double> copy_rate(const std::string& kind, u64 row_bytes, u64 num_rows, u32 repeats) {
  check_arguments(kind, row_bytes, num_rows);
  const u64 bytes = row_bytes * num_rows;
  const auto remote = map_anonymous(bytes, true);
  const auto local = map_anonymous(bytes, false);
  char* shared = static_cast<char*>(remote.get());
  char* own = static_cast<char*>(local.get());
  std::memset(shared, 1, bytes);
  std::memset(own, 2, bytes);
  std::vector<u64> place(num_rows);
  std::iota(place.begin(), place.end(), 0);
  std::shuffle(place.begin(), place.end(), std::mt19937_64(1));

  std::vector<double> rates;
  for (u32 repeat = 0; repeat < repeats; ++repeat) {
    const u64 started_ns = monotonic_ns();
    if (kind == "memcpy") copy_row(own, shared, bytes);
    for (u64 row = 0; row < num_rows && kind == "pull"; ++row) {
      copy_row(own + row * row_bytes, shared + place[row] * row_bytes, row_bytes);
    }
    for (u64 row = 0; row < num_rows && kind == "push"; ++row) {
      copy_row(shared + place[row] * row_bytes, own + row * row_bytes, row_bytes);
    }
    rates.push_back(static_cast<double>(bytes) / static_cast<double>(monotonic_ns() - started_ns));
  }
  return rates;
}

}  // namespace mokbench
