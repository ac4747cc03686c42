// SPDX-License-Identifier: Apache-2.0
// wgmma: BF16 in, FP32 sums, both operands in shared memory, K-major with 128-byte swizzle.
#pragma once

#include "ptx.cuh"

namespace mokbench {
namespace ptx {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}
// Until all but the last kGroups groups are done.
template <u32 kGroups>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kGroups) : "memory");
}
// Keeps the compiler from reading sums before the wait above it.
template <u32 kSize>
__device__ __forceinline__ void pin_sums(float (&d)[kSize], u32 first, u32 count) {
#pragma unroll
  for (u32 i = first; i < first + count; ++i) asm volatile("" : "+f"(d[i]) : : "memory");
}

// Rows of 128 bytes from a 1024-byte boundary, eight of them after 1024 bytes.
__device__ __forceinline__ u64 matrix_descriptor(u32 at) {
  constexpr u64 kSwizzle128 = 1ull << 62;
  constexpr u64 kStride = u64{1024 >> 4} << 32;
  return u64{(at & 0x3ffff) >> 4} | (1ull << 16) | kStride | kSwizzle128;
}

#define MOKBENCH_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MOKBENCH_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define MOKBENCH_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define MOKBENCH_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define MOKBENCH_R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define MOKBENCH_R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define MOKBENCH_R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define MOKBENCH_R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define MOKBENCH_R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define MOKBENCH_R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define MOKBENCH_R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define MOKBENCH_R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define MOKBENCH_R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define MOKBENCH_R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define MOKBENCH_R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define MOKBENCH_R15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define MOKBENCH_D4(i) \
  "+f"(d[kFirst + i]), "+f"(d[kFirst + i + 1]), "+f"(d[kFirst + i + 2]), "+f"(d[kFirst + i + 3])
#define MOKBENCH_D8(i) MOKBENCH_D4(i), MOKBENCH_D4(i + 4)
// n columns, the names of n / 2 sums, the numbers of the three operands behind them, the sums.
#define MOKBENCH_WGMMA(n, names, a_at, b_at, add_at, ...)                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #add_at                                    \
               ", 0;\n"                                                                        \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" names "}, %" #a_at \
               ", %" #b_at ", p, 1, 1, 0, 0;\n}"                                               \
               : __VA_ARGS__                                                                   \
               : "l"(a), "l"(b), "r"(static_cast<u32>(add)))

// d[kFirst ...] (+)= A [64, 16] * B [kN, 16]^T; the sums are those of mma's 16 x 8 tiles, kN / 2.
template <u32 kN, u32 kFirst, u32 kSize>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[kSize], u64 a, u64 b, bool add) {
  static_assert(kN % 16 == 0 && kFirst + kN / 2 <= kSize);
  if constexpr (kN == 16) {
    MOKBENCH_WGMMA(16, MOKBENCH_R0, 8, 9, 10, MOKBENCH_D8(0));
  } else if constexpr (kN == 32) {
    MOKBENCH_WGMMA(32, MOKBENCH_R0 ", " MOKBENCH_R1, 16, 17, 18, MOKBENCH_D8(0), MOKBENCH_D8(8));
  } else if constexpr (kN == 48) {
    MOKBENCH_WGMMA(48, MOKBENCH_R0 ", " MOKBENCH_R1 ", " MOKBENCH_R2, 24, 25, 26, MOKBENCH_D8(0),
                   MOKBENCH_D8(8), MOKBENCH_D8(16));
  } else if constexpr (kN == 64) {
    MOKBENCH_WGMMA(64, MOKBENCH_R0 ", " MOKBENCH_R1 ", " MOKBENCH_R2 ", " MOKBENCH_R3, 32, 33, 34,
                   MOKBENCH_D8(0), MOKBENCH_D8(8), MOKBENCH_D8(16), MOKBENCH_D8(24));
  } else if constexpr (kN == 80) {
    MOKBENCH_WGMMA(
        80, MOKBENCH_R0 ", " MOKBENCH_R1 ", " MOKBENCH_R2 ", " MOKBENCH_R3 ", " MOKBENCH_R4, 40, 41,
        42, MOKBENCH_D8(0), MOKBENCH_D8(8), MOKBENCH_D8(16), MOKBENCH_D8(24), MOKBENCH_D8(32));
  } else if constexpr (kN == 96) {
    MOKBENCH_WGMMA(96,
                   MOKBENCH_R0 ", " MOKBENCH_R1 ", " MOKBENCH_R2 ", " MOKBENCH_R3 ", " MOKBENCH_R4
                               ", " MOKBENCH_R5,
                   48, 49, 50, MOKBENCH_D8(0), MOKBENCH_D8(8), MOKBENCH_D8(16), MOKBENCH_D8(24),
                   MOKBENCH_D8(32), MOKBENCH_D8(40));
  } else if constexpr (kN == 112) {
    MOKBENCH_WGMMA(112,
                   MOKBENCH_R0 ", " MOKBENCH_R1 ", " MOKBENCH_R2 ", " MOKBENCH_R3 ", " MOKBENCH_R4
                               ", " MOKBENCH_R5 ", " MOKBENCH_R6,
                   56, 57, 58, MOKBENCH_D8(0), MOKBENCH_D8(8), MOKBENCH_D8(16), MOKBENCH_D8(24),
                   MOKBENCH_D8(32), MOKBENCH_D8(40), MOKBENCH_D8(48));
  } else if constexpr (kN == 128) {
    MOKBENCH_WGMMA(128,
                   MOKBENCH_R0 ", " MOKBENCH_R1 ", " MOKBENCH_R2 ", " MOKBENCH_R3 ", " MOKBENCH_R4
                               ", " MOKBENCH_R5 ", " MOKBENCH_R6 ", " MOKBENCH_R7,
                   64, 65, 66, MOKBENCH_D8(0), MOKBENCH_D8(8), MOKBENCH_D8(16), MOKBENCH_D8(24),
                   MOKBENCH_D8(32), MOKBENCH_D8(40), MOKBENCH_D8(48), MOKBENCH_D8(56));
  } else if constexpr (kN == 144) {
    MOKBENCH_WGMMA(144,
                   MOKBENCH_R0 ", " MOKBENCH_R1 ", " MOKBENCH_R2 ", " MOKBENCH_R3 ", " MOKBENCH_R4
                               ", " MOKBENCH_R5 ", " MOKBENCH_R6 ", " MOKBENCH_R7 ", " MOKBENCH_R8,
                   72, 73, 74, MOKBENCH_D8(0), MOKBENCH_D8(8), MOKBENCH_D8(16), MOKBENCH_D8(24),
                   MOKBENCH_D8(32), MOKBENCH_D8(40), MOKBENCH_D8(48), MOKBENCH_D8(56),
                   MOKBENCH_D8(64));
  } else if constexpr (kN == 160) {
    MOKBENCH_WGMMA(160,
                   MOKBENCH_R0 ", " MOKBENCH_R1 ", " MOKBENCH_R2 ", " MOKBENCH_R3 ", " MOKBENCH_R4
                               ", " MOKBENCH_R5 ", " MOKBENCH_R6 ", " MOKBENCH_R7 ", " MOKBENCH_R8
                               ", " MOKBENCH_R9,
                   80, 81, 82, MOKBENCH_D8(0), MOKBENCH_D8(8), MOKBENCH_D8(16), MOKBENCH_D8(24),
                   MOKBENCH_D8(32), MOKBENCH_D8(40), MOKBENCH_D8(48), MOKBENCH_D8(56),
                   MOKBENCH_D8(64), MOKBENCH_D8(72));
  } else if constexpr (kN == 176) {
    MOKBENCH_WGMMA(176,
                   MOKBENCH_R0 ", " MOKBENCH_R1 ", " MOKBENCH_R2 ", " MOKBENCH_R3 ", " MOKBENCH_R4
                               ", " MOKBENCH_R5 ", " MOKBENCH_R6 ", " MOKBENCH_R7 ", " MOKBENCH_R8
                               ", " MOKBENCH_R9 ", " MOKBENCH_R10,
                   88, 89, 90, MOKBENCH_D8(0), MOKBENCH_D8(8), MOKBENCH_D8(16), MOKBENCH_D8(24),
                   MOKBENCH_D8(32), MOKBENCH_D8(40), MOKBENCH_D8(48), MOKBENCH_D8(56),
                   MOKBENCH_D8(64), MOKBENCH_D8(72), MOKBENCH_D8(80));
  } else if constexpr (kN == 192) {
    MOKBENCH_WGMMA(192,
                   MOKBENCH_R0 ", " MOKBENCH_R1 ", " MOKBENCH_R2 ", " MOKBENCH_R3 ", " MOKBENCH_R4
                               ", " MOKBENCH_R5 ", " MOKBENCH_R6 ", " MOKBENCH_R7 ", " MOKBENCH_R8
                               ", " MOKBENCH_R9 ", " MOKBENCH_R10 ", " MOKBENCH_R11,
                   96, 97, 98, MOKBENCH_D8(0), MOKBENCH_D8(8), MOKBENCH_D8(16), MOKBENCH_D8(24),
                   MOKBENCH_D8(32), MOKBENCH_D8(40), MOKBENCH_D8(48), MOKBENCH_D8(56),
                   MOKBENCH_D8(64), MOKBENCH_D8(72), MOKBENCH_D8(80), MOKBENCH_D8(88));
  } else if constexpr (kN == 208) {
    MOKBENCH_WGMMA(
        208,
        MOKBENCH_R0 ", " MOKBENCH_R1 ", " MOKBENCH_R2 ", " MOKBENCH_R3 ", " MOKBENCH_R4
                    ", " MOKBENCH_R5 ", " MOKBENCH_R6 ", " MOKBENCH_R7 ", " MOKBENCH_R8
                    ", " MOKBENCH_R9 ", " MOKBENCH_R10 ", " MOKBENCH_R11 ", " MOKBENCH_R12,
        104, 105, 106, MOKBENCH_D8(0), MOKBENCH_D8(8), MOKBENCH_D8(16), MOKBENCH_D8(24),
        MOKBENCH_D8(32), MOKBENCH_D8(40), MOKBENCH_D8(48), MOKBENCH_D8(56), MOKBENCH_D8(64),
        MOKBENCH_D8(72), MOKBENCH_D8(80), MOKBENCH_D8(88), MOKBENCH_D8(96));
  } else if constexpr (kN == 224) {
    MOKBENCH_WGMMA(224,
                   MOKBENCH_R0 ", " MOKBENCH_R1 ", " MOKBENCH_R2 ", " MOKBENCH_R3 ", " MOKBENCH_R4
                               ", " MOKBENCH_R5 ", " MOKBENCH_R6 ", " MOKBENCH_R7 ", " MOKBENCH_R8
                               ", " MOKBENCH_R9 ", " MOKBENCH_R10 ", " MOKBENCH_R11
                               ", " MOKBENCH_R12 ", " MOKBENCH_R13,
                   112, 113, 114, MOKBENCH_D8(0), MOKBENCH_D8(8), MOKBENCH_D8(16), MOKBENCH_D8(24),
                   MOKBENCH_D8(32), MOKBENCH_D8(40), MOKBENCH_D8(48), MOKBENCH_D8(56),
                   MOKBENCH_D8(64), MOKBENCH_D8(72), MOKBENCH_D8(80), MOKBENCH_D8(88),
                   MOKBENCH_D8(96), MOKBENCH_D8(104));
  } else if constexpr (kN == 240) {
    MOKBENCH_WGMMA(240,
                   MOKBENCH_R0 ", " MOKBENCH_R1 ", " MOKBENCH_R2 ", " MOKBENCH_R3 ", " MOKBENCH_R4
                               ", " MOKBENCH_R5 ", " MOKBENCH_R6 ", " MOKBENCH_R7 ", " MOKBENCH_R8
                               ", " MOKBENCH_R9 ", " MOKBENCH_R10 ", " MOKBENCH_R11
                               ", " MOKBENCH_R12 ", " MOKBENCH_R13 ", " MOKBENCH_R14,
                   120, 121, 122, MOKBENCH_D8(0), MOKBENCH_D8(8), MOKBENCH_D8(16), MOKBENCH_D8(24),
                   MOKBENCH_D8(32), MOKBENCH_D8(40), MOKBENCH_D8(48), MOKBENCH_D8(56),
                   MOKBENCH_D8(64), MOKBENCH_D8(72), MOKBENCH_D8(80), MOKBENCH_D8(88),
                   MOKBENCH_D8(96), MOKBENCH_D8(104), MOKBENCH_D8(112));
  } else if constexpr (kN == 256) {
    MOKBENCH_WGMMA(256,
                   MOKBENCH_R0 ", " MOKBENCH_R1 ", " MOKBENCH_R2 ", " MOKBENCH_R3 ", " MOKBENCH_R4
                               ", " MOKBENCH_R5 ", " MOKBENCH_R6 ", " MOKBENCH_R7 ", " MOKBENCH_R8
                               ", " MOKBENCH_R9 ", " MOKBENCH_R10 ", " MOKBENCH_R11
                               ", " MOKBENCH_R12 ", " MOKBENCH_R13 ", " MOKBENCH_R14
                               ", " MOKBENCH_R15,
                   128, 129, 130, MOKBENCH_D8(0), MOKBENCH_D8(8), MOKBENCH_D8(16), MOKBENCH_D8(24),
                   MOKBENCH_D8(32), MOKBENCH_D8(40), MOKBENCH_D8(48), MOKBENCH_D8(56),
                   MOKBENCH_D8(64), MOKBENCH_D8(72), MOKBENCH_D8(80), MOKBENCH_D8(88),
                   MOKBENCH_D8(96), MOKBENCH_D8(104), MOKBENCH_D8(112), MOKBENCH_D8(120));
  }
}

#undef MOKBENCH_WGMMA
#undef MOKBENCH_D8
#undef MOKBENCH_D4
#undef MOKBENCH_R0
#undef MOKBENCH_R1
#undef MOKBENCH_R2
#undef MOKBENCH_R3
#undef MOKBENCH_R4
#undef MOKBENCH_R5
#undef MOKBENCH_R6
#undef MOKBENCH_R7
#undef MOKBENCH_R8
#undef MOKBENCH_R9
#undef MOKBENCH_R10
#undef MOKBENCH_R11
#undef MOKBENCH_R12
#undef MOKBENCH_R13
#undef MOKBENCH_R14
#undef MOKBENCH_R15

}  // namespace ptx
}  // namespace mokbench
