// Eight float lanes: the vocabulary of the row and attention kernels. Owns lane arithmetic, the exponential and
// conversions to and from storage types. Must not know models, caches or threads.
//
// Included only by files that are compiled once per instruction set, inside namespace phloem::PHLOEM_ISA, so that no
// inline function built for a newer CPU can replace one of the portable build at link time. For the same reason those
// files use nothing of the standard library that instantiates code.
//
// Every function is a fixed sequence of IEEE operations, so a result depends on the operands alone.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifndef PHLOEM_ISA
#error "PHLOEM_ISA names the namespace of the instruction set this file is compiled for"
#endif

#define PHLOEM_INLINE static inline __attribute__((always_inline))

namespace phloem {
namespace PHLOEM_ISA {

using F8 = float __attribute__((vector_size(32)));
using I8 = int32_t __attribute__((vector_size(32)));

constexpr float kNegInf = -__builtin_inff();
constexpr float kF16Max = 65504.0f;

PHLOEM_INLINE int min_of(int a, int b) { return a < b ? a : b; }
PHLOEM_INLINE int max_of(int a, int b) { return a > b ? a : b; }

PHLOEM_INLINE F8 load(const float* p) {
  F8 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
PHLOEM_INLINE void store(float* p, F8 v) { std::memcpy(p, &v, sizeof v); }
// The value, and the compiler's word that it stays in a register: left alone it loads a vector again at each use, and
// loads are what the inner loops have fewest of; and it regroups chains of integer additions into trees that fill the
// stack.
#ifdef __AVX2__
PHLOEM_INLINE F8 in_register(F8 v) {
  asm("" : "+v"(v));
  return v;
}
PHLOEM_INLINE __m256i in_register(__m256i v) {
  asm("" : "+v"(v));
  return v;
}
#else
PHLOEM_INLINE F8 in_register(F8 v) { return v; }
#endif
PHLOEM_INLINE F8 splat(float x) { return F8{x, x, x, x, x, x, x, x}; }
PHLOEM_INLINE I8 splat_int(int32_t x) { return I8{x, x, x, x, x, x, x, x}; }
PHLOEM_INLINE F8 as_float(I8 v) { return reinterpret_cast<F8>(v); }
PHLOEM_INLINE I8 as_int(F8 v) { return reinterpret_cast<I8>(v); }
PHLOEM_INLINE F8 abs(F8 v) { return as_float(as_int(v) & splat_int(0x7fffffff)); }
// b where the comparison fails or an operand is NaN, as the machine instruction has it.
PHLOEM_INLINE F8 max(F8 a, F8 b) {
#ifdef __AVX2__
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
PHLOEM_INLINE F8 min(F8 a, F8 b) {
#ifdef __AVX2__
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
// a * b + c: rounded once where the instruction set has it, twice in the portable build.
PHLOEM_INLINE F8 fma(F8 a, F8 b, F8 c) {
#ifdef __AVX2__
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
PHLOEM_INLINE float fma(float a, float b, float c) {
#ifdef __AVX2__
  return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
#else
  return a * b + c;
#endif
}
PHLOEM_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }

// Sum of the lanes in one fixed order: ((0+4)+(2+6)) + ((1+5)+(3+7)).
PHLOEM_INLINE float sum_lanes(F8 v) {
  const float a = v[0] + v[4], b = v[1] + v[5], c = v[2] + v[6], d = v[3] + v[7];
  return (a + c) + (b + d);
}
PHLOEM_INLINE float max_lanes(F8 v) {
  float top = v[0];
  for (int i = 1; i < 8; ++i) top = v[i] > top ? v[i] : top;
  return top;
}

// e^x to about 2 ulp; 0 below -87.3 (so for -inf too), finite above. 2^n * P(r) with x = n ln 2 + r, |r| <= ln 2 / 2:
// P is the Taylor polynomial of degree 7, whose remainder on that range is below 2^-27.
PHLOEM_INLINE F8 exp(F8 x) {
  const F8 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  const I8 tiny = x < splat(-87.3f);
  x = min(max(x, splat(-87.3f)), splat(88.3f));
  const F8 shifted = fma(x, splat(1.44269504f), magic);
  const F8 n = shifted - magic;
  F8 r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F8 p = splat(1.98412698e-4f);
  p = fma(p, r, splat(1.38888889e-3f));
  p = fma(p, r, splat(8.33333333e-3f));
  p = fma(p, r, splat(4.16666667e-2f));
  p = fma(p, r, splat(1.66666667e-1f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  const I8 power = (as_int(shifted) - as_int(magic) + splat_int(127)) << 23;
  return as_float(as_int(p * as_float(power)) & ~tiny);
}
PHLOEM_INLINE float exp(float x) { return exp(splat(x))[0]; }

// ---- storage types -------------------------------------------------------------------------------------------------

PHLOEM_INLINE float f16_to_f32(uint16_t h) {
#ifdef __AVX2__
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
#else
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t magnitude = h & 0x7fff;
  float value;
  if (magnitude < 0x0400) {  // zero and subnormals: units of 2^-24
    value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
  } else {
    const uint32_t bits = (magnitude << 13) + (magnitude >= 0x7c00 ? 0x70000000u : 0x38000000u);
    std::memcpy(&value, &bits, 4);
  }
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
#endif
}

// Round to nearest even; |x| must not exceed kF16Max.
PHLOEM_INLINE uint16_t f32_to_f16(float x) {
#ifdef __AVX2__
  return static_cast<uint16_t>(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT)));
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits < 0x38800000) {  // below 2^-14: the result is subnormal, the addition rounds it to units of 2^-24
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000));
  }
  bits += 0xc8000fff + ((bits >> 13) & 1);
  return static_cast<uint16_t>(sign | (bits >> 13));
#endif
}

PHLOEM_INLINE F8 load_f16(const uint16_t* p) {
#ifdef __AVX2__
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  F8 v;
  for (int i = 0; i < 8; ++i) v[i] = f16_to_f32(p[i]);
  return v;
#endif
}
PHLOEM_INLINE void store_f16(uint16_t* p, F8 v) {
#ifdef __AVX2__
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < 8; ++i) p[i] = f32_to_f16(v[i]);
#endif
}
PHLOEM_INLINE F8 load_bf16(const uint16_t* p) {
#ifdef __AVX2__
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
#else
  I8 v;
  for (int i = 0; i < 8; ++i) v[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
  return as_float(v);
#endif
}
PHLOEM_INLINE F8 load_i8(const int8_t* p) {
#ifdef __AVX2__
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  F8 v;
  for (int i = 0; i < 8; ++i) v[i] = static_cast<float>(p[i]);
  return v;
#endif
}
// Round to nearest even and store as int8; |v| <= 127. Returns the rounded values.
PHLOEM_INLINE I8 store_i8(int8_t* p, F8 v) {
  const F8 magic = splat(12582912.0f);
  const I8 q = as_int(v + magic) - as_int(magic);
#ifdef __AVX2__
  const __m256i raw = reinterpret_cast<__m256i>(q);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(raw), _mm256_extracti128_si256(raw, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
#else
  for (int i = 0; i < 8; ++i) p[i] = static_cast<int8_t>(q[i]);
#endif
  return q;
}

}  // namespace PHLOEM_ISA
}  // namespace phloem
