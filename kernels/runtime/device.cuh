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

// What follows quantizes as reference.py does, bit for bit; `pow2`: the format of the scales.

DEVICE float scale_of(u32 amax_bits, bool pow2) {
  const u32 floor = 0x2EDBE6FFu;  // 1e-10; magnitudes compare like their bits, and NaN and infinity stay what they are
  const u32 bits = amax_bits > floor ? amax_bits : floor;
  if (!pow2) return __fdiv_rn(__uint_as_float(bits), 448.0f);
  // smallest 2^k with 448 * 2^k >= 1.f * 2^e; 448 = 1.75 * 2^8
  if (bits >= 0x7F800000u) return __uint_as_float(bits);
  return __uint_as_float(((bits >> 23) - 8 + ((bits & 0x7FFFFFu) > 0x600000u)) << 23);
}

// Codes of x / scale for four BF16. One reciprocal and one correction give the correctly rounded quotient (tried for every
// pair of mantissas, see the test). The signs are such that -0 stays -0; the conversion takes back a rounding above 448.
DEVICE u32 codes_of(u32 first, u32 second, float scale, float inverse, bool pow2) {
  const float x[4] = {__uint_as_float(first << 16), __uint_as_float(first & 0xFFFF0000u), __uint_as_float(second << 16),
                      __uint_as_float(second & 0xFFFF0000u)};
  float q[4];
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    if (pow2) {
      q[i] = x[i] * inverse;
      continue;
    }
    asm("{\n.reg .f32 g, r, m;\nmul.rn.f32 g, %1, %2;\nneg.f32 m, %1;\nfma.rn.f32 r, g, %3, m;\nneg.f32 m, %2;\n"
        "fma.rn.f32 %0, r, m, g;\n}"
        : "=f"(q[i])
        : "f"(x[i]), "f"(inverse), "f"(scale));
  }
  return to_codes(q[0], q[1], q[2], q[3]);
}

// Magnitudes of pairs of BF16 compare like their bits, NaN above all.
DEVICE u32 larger(u32 pair, u32 other) {
  u32 found;
  asm("max.u16x2 %0, %1, %2;" : "=r"(found) : "r"(pair), "r"(other));
  return found;
}
