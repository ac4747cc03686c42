// SPDX-License-Identifier: Apache-2.0
// What an expanded dispatch needs around grouped GEMMs that know neither weights nor FP8. Its rows
// are one a route, sorted by expert; how many there are is read on the device, and what lies behind
// them is never touched. A warp a row, any grid.
#pragma once

#include "push/experts.cuh"

namespace mokbench {

constexpr u32 kRowThreads = 512;
constexpr u32 kRowWarps = kRowThreads / 32;
constexpr u32 kScaleBlock = 128;  // channels that share a scale
constexpr u32 kScaleLanes = kScaleBlock / kVecElements;
constexpr float kMaxE4m3 = 448.f;
constexpr float kLeastAmax = 1e-4f;  // a block of zeros must not divide by zero

struct RowsArgs {
  const i32* last_end;   // where the number of rows is on the device, or null
  u32 num_rows;          // where it is not
  const char* in;        // BF16 or E4M3 rows
  char* out;             // BF16 or E4M3 rows
  const float* weights;  // [rows]
  float* scales;         // [rows][hidden / kScaleBlock]
};

// Calls visit(row) for the rows of this warp.
template <class Visit>
__device__ __forceinline__ void for_own_rows(const RowsArgs& a, Visit visit) {
  const u32 num_rows = a.last_end == nullptr ? a.num_rows : static_cast<u32>(*a.last_end);
  for (u32 row = blockIdx.x * kRowWarps + threadIdx.x / 32; row < num_rows;
       row += gridDim.x * kRowWarps) {
    visit(row);
  }
}

__device__ __forceinline__ u32 weighted_swiglu_pair(u32 gate, u32 up, float weight) {
  return ptx::cvt_rn_bf16x2(swiglu(bf16_low(gate), bf16_low(up)) * weight,
                            swiglu(bf16_high(gate), bf16_high(up)) * weight);
}

// out [rows, I] = silu(gate) * up * weight in FP32; in [rows, 2 I] has gate, then up.
template <u32 kIntermediate>
__global__ void __launch_bounds__(kRowThreads, 1)
    weighted_swiglu(const __grid_constant__ RowsArgs a) {
  constexpr u64 kRowBytes = u64{kIntermediate} * 2;
  for_own_rows(a, [&](u32 row) {
    const float weight = a.weights[row];
    swiglu_row<kIntermediate>(
        a.in + row * (2 * kRowBytes), a.out + row * kRowBytes,
        [weight](u32 gate, u32 up) { return weighted_swiglu_pair(gate, up, weight); });
  });
}

__device__ __forceinline__ float pair_amax(u32 pair) {
  return fmaxf(fabsf(bf16_low(pair)), fabsf(bf16_high(pair)));
}

// Two BF16 pairs, divided by the scale, as four E4M3.
__device__ __forceinline__ u32 quantize_pairs(u32 first, u32 second, float inverse) {
  const u32 low =
      ptx::cvt_rn_satfinite_e4m3x2(bf16_low(first) * inverse, bf16_high(first) * inverse);
  const u32 high =
      ptx::cvt_rn_satfinite_e4m3x2(bf16_low(second) * inverse, bf16_high(second) * inverse);
  return low | high << 16;
}

// BF16 to E4M3 with a scale of amax / 448 for each 128 channels of a row.
template <u32 kHidden>
__global__ void __launch_bounds__(kRowThreads, 1)
    quantize_rows(const __grid_constant__ RowsArgs a) {
  constexpr u32 kVecs = kHidden / kVecElements;
  static_assert(kHidden % kScaleBlock == 0, "whole blocks");
  for_own_rows(a, [&](u32 row) {
    const char* from = a.in + u64{row} * kHidden * 2;
    char* to = a.out + u64{row} * kHidden;
    for (u32 first = 0; first < kVecs; first += 32) {
      const u32 vec = first + threadIdx.x % 32;
      const ptx::Vec16 v = kFromHere(from + min(vec, kVecs - 1) * 16);
      float amax =
          fmaxf(fmaxf(pair_amax(v.x), pair_amax(v.y)), fmaxf(pair_amax(v.z), pair_amax(v.w)));
#pragma unroll
      for (u32 apart = kScaleLanes / 2; apart > 0; apart /= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, apart));
      }
      const float scale = fmaxf(amax, kLeastAmax) / kMaxE4m3;
      if (vec >= kVecs) continue;
      const float inverse = 1.f / scale;
      u32* words = reinterpret_cast<u32*>(to + vec * kVecElements);
      words[0] = quantize_pairs(v.x, v.y, inverse);
      words[1] = quantize_pairs(v.z, v.w, inverse);
      if (vec % kScaleLanes == 0) {
        a.scales[u64{row} * (kHidden / kScaleBlock) + vec / kScaleLanes] = scale;
      }
    }
  });
}

// Two E4M3 times their scale, as a BF16 pair.
__device__ __forceinline__ u32 dequantize_pair(u32 packed, float scale) {
  float low;
  float high;
  ptx::cvt_f32_e4m3x2(low, high, static_cast<u16>(packed));
  return ptx::cvt_rn_bf16x2(low * scale, high * scale);
}

// E4M3 with its scales back to BF16, which the GEMMs multiply.
template <u32 kHidden>
__global__ void __launch_bounds__(kRowThreads, 1)
    dequantize_rows(const __grid_constant__ RowsArgs a) {
  constexpr u32 kVecs = kHidden / kVecElements;
  static_assert(kHidden % kScaleBlock == 0, "whole blocks");
  for_own_rows(a, [&](u32 row) {
    const char* from = a.in + u64{row} * kHidden;
    char* to = a.out + u64{row} * kHidden * 2;
    const float* scales = a.scales + u64{row} * (kHidden / kScaleBlock);
    for (u32 vec = threadIdx.x % 32; vec < kVecs; vec += 32) {
      const uint2 eight = *reinterpret_cast<const uint2*>(from + vec * kVecElements);
      const float scale = scales[vec / kScaleLanes];
      kToHere(to + vec * 16,
              {dequantize_pair(eight.x, scale), dequantize_pair(eight.x >> 16, scale),
               dequantize_pair(eight.y, scale), dequantize_pair(eight.y >> 16, scale)});
    }
  });
}

}  // namespace mokbench
