// Float lanes, eight or as many as the instruction set has: the vocabulary of the row and attention kernels. Owns lane
// arithmetic, the exponential and conversions to and from storage types. Must not know models, caches or threads.
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

using F4 = float __attribute__((vector_size(16)));
using F8 = float __attribute__((vector_size(32)));
using I8 = int32_t __attribute__((vector_size(32)));
// The widest: for work in which each lane stands alone, so that the width changes no result.
#ifdef __AVX512F__
using FW = float __attribute__((vector_size(64)));
#else
using FW = F8;
#endif
using IW = decltype(FW{} < FW{});
constexpr int kWideLanes = sizeof(FW) / sizeof(float);
template <class V>
constexpr int kLanes = sizeof(V) / sizeof(float);

constexpr float kNegInf = -__builtin_inff();
constexpr float kF16Max = 65504.0f;

PHLOEM_INLINE int min_of(int a, int b) { return a < b ? a : b; }
PHLOEM_INLINE int max_of(int a, int b) { return a > b ? a : b; }

template <class V>
PHLOEM_INLINE V load_as(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
PHLOEM_INLINE F8 load(const float* p) { return load_as<F8>(p); }
template <class V>
PHLOEM_INLINE void store(float* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
// The value, and the compiler's word that it stays in a register: left alone it loads a vector again at each use, and
// loads are what the inner loops have fewest of; and it regroups chains of integer additions into trees that fill the
// stack.
template <class V>
PHLOEM_INLINE V in_register(V v) {
#ifdef __AVX2__
  asm("" : "+v"(v));
#endif
  return v;
}
template <class V>
PHLOEM_INLINE V splat_as(float x) {
  return x - V{};  // minus zero keeps the sign of x
}
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
#ifdef __AVX512F__
PHLOEM_INLINE FW max(FW a, FW b) { return _mm512_maskz_max_ps(0xffff, a, b); }
PHLOEM_INLINE FW min(FW a, FW b) { return _mm512_maskz_min_ps(0xffff, a, b); }
PHLOEM_INLINE FW fma(FW a, FW b, FW c) { return _mm512_fmadd_ps(a, b, c); }
#endif
PHLOEM_INLINE float fma(float a, float b, float c) {
#ifdef __AVX2__
  return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
#else
  return a * b + c;
#endif
}
PHLOEM_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }

PHLOEM_INLINE F4 low_half(F8 v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3); }
PHLOEM_INLINE F4 high_half(F8 v) { return __builtin_shufflevector(v, v, 4, 5, 6, 7); }

// Sum of the lanes in one fixed order: ((0+4)+(2+6)) + ((1+5)+(3+7)).
PHLOEM_INLINE float sum_lanes(F8 v) {
  const F4 fours = low_half(v) + high_half(v);
  const F4 twos = fours + __builtin_shufflevector(fours, fours, 2, 3, 0, 1);
  return twos[0] + twos[1];
}
PHLOEM_INLINE float max_lanes(F8 v) {
  v = max(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  v = max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
  return v[0] > v[1] ? v[0] : v[1];
}

// e^x to about 2 ulp; 0 below -87.3 (so for -inf too), finite above. 2^n * P(r) with x = n ln 2 + r, |r| <= ln 2 / 2:
// P is the Taylor polynomial of degree 7, whose remainder on that range is below 2^-27.
template <class V>
PHLOEM_INLINE V exp(V x) {
  using I = decltype(x < x);
  const V magic = splat_as<V>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  const V least = splat_as<V>(-87.3f);
  const I tiny = x < least;
  x = min(max(x, least), splat_as<V>(88.3f));
  const V shifted = fma(x, splat_as<V>(1.44269504f), magic);
  const V n = shifted - magic;
  V r = fma(n, splat_as<V>(-0.693359375f), x);
  r = fma(n, splat_as<V>(2.12194440e-4f), r);
  V p = splat_as<V>(1.98412698e-4f);
  p = fma(p, r, splat_as<V>(1.38888889e-3f));
  p = fma(p, r, splat_as<V>(8.33333333e-3f));
  p = fma(p, r, splat_as<V>(4.16666667e-2f));
  p = fma(p, r, splat_as<V>(1.66666667e-1f));
  p = fma(p, r, splat_as<V>(0.5f));
  p = fma(p, r, splat_as<V>(1.0f));
  p = fma(p, r, splat_as<V>(1.0f));
  const I power = (reinterpret_cast<I>(shifted) - reinterpret_cast<I>(magic) + 127) << 23;
  return reinterpret_cast<V>(reinterpret_cast<I>(p * reinterpret_cast<V>(power)) & ~tiny);
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
#ifdef __AVX512F__
PHLOEM_INLINE FW widen_f16(__m256i halves) { return _mm512_maskz_cvtph_ps(0xffff, halves); }
PHLOEM_INLINE FW load_wide_f16(const uint16_t* p) {
  return widen_f16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
#else
PHLOEM_INLINE FW load_wide_f16(const uint16_t* p) { return load_f16(p); }
#endif
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
template <class V>
PHLOEM_INLINE V load_i8(const int8_t* p) {
  int8_t __attribute__((vector_size(kLanes<V>))) bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, V);
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
