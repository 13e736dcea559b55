// SPDX-License-Identifier: Apache-2.0
// What every CUDA source here begins with.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;  // its bits
typedef unsigned char u8;

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// Four values as E4M3 codes, the first lowest: rounded to nearest even, clamped.
DEVICE u32 to_codes(float x, float y, float z, float w) {
  u32 codes;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(codes)
      : "f"(x), "f"(y), "f"(z), "f"(w));
  return codes;
}
