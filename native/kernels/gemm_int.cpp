// out = activations x weights^T for 4- and 8-bit weights and int8 activations.
//
// Per group of 32 values of K the products are summed as integers (exact, so in any order) and enter the output lane's
// float chain in ascending group order:  y = fma(isum, d * s, y);  y = fma(m, s * sum(q), y)  with the weight group's
// scale d and minimum m (-8 d for plain 4 bits, none for 8) and the activation group's scale s. Tiles, threads and
// batch choose only which outputs are computed together. Last, in ascending order of K, each outlier of the row enters
// with its float value.
#include "kernels/rows.h"

namespace phloem {
namespace PHLOEM_ISA {
namespace {

constexpr int kQ4Bytes = kGroup * kPanel / 2;
constexpr int kQ8Bytes = kGroup * kPanel;
constexpr size_t kPrefetchBytes = 4096;  // how far ahead of one or two rows their weights are asked for

PHLOEM_INLINE void finish(const GemmArgs& args, int row, int panel, int half, F8 y) {
  float* out = args.out + row * args.ld_out + static_cast<int64_t>(panel) * kPanel + 8 * half;
  if (args.bias) y = y + load(args.bias + panel * kPanel + 8 * half);
  if (args.accumulate) y = load(out) + y;
  store(out, y);
}

// Scale and minimum of half a panel's columns.
template <WeightFormat kFormat>
PHLOEM_INLINE void load_scales(const uint8_t* block, int half, F8* d, F8* m) {
  const auto* scales =
      reinterpret_cast<const uint16_t*>(block + (kFormat == WeightFormat::q8 ? kQ8Bytes : kQ4Bytes)) + 8 * half;
  *d = load_f16(scales);
  if constexpr (kFormat == WeightFormat::q4m) *m = load_f16(scales + kPanel);
  if constexpr (kFormat == WeightFormat::q4) *m = *d * splat(-8.0f);
}

template <WeightFormat kFormat>
PHLOEM_INLINE F8 add_group(F8 y, I8 sum, F8 d, F8 m, float s, float s_sum) {
  y = fma(__builtin_convertvector(sum, F8), d * splat(s), y);
  if constexpr (kFormat != WeightFormat::q8) y = fma(m, splat(s_sum), y);
  return y;
}

#ifdef __AVX2__

PHLOEM_INLINE __m256i load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
PHLOEM_INLINE __m256i four_activations(const int8_t* q) {
  int32_t raw;
  std::memcpy(&raw, q, 4);
  return _mm256_set1_epi32(raw);
}

// Sums of products u8 x s8 on their way to 32 bits. Without VNNI pairs are added in 16 bits and widened at the end: for
// 4-bit weights the 16 products of a lane are at most 15 * 127 each and fit.
PHLOEM_INLINE __m256i add_products(__m256i sums, __m256i weights, __m256i activations) {
#ifdef __AVX512VNNI__
  return _mm256_dpbusd_epi32(sums, weights, activations);
#else
  return in_register(_mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, activations)));
#endif
}
PHLOEM_INLINE __m256i widened(__m256i sums) {
#ifdef __AVX512VNNI__
  return sums;
#else
  return _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
#endif
}
// The same for 8-bit weights, whose pairs must be widened at once (2 * 127 * 127 fits 16 bits): |w| times the
// activation with w's sign.
PHLOEM_INLINE __m256i add_wide_products(__m256i sums, __m256i weights, __m256i magnitudes, __m256i activations) {
  const __m256i signed_activations = _mm256_sign_epi8(activations, weights);
#ifdef __AVX512VNNI__
  return _mm256_dpbusd_epi32(sums, magnitudes, signed_activations);
#else
  const __m256i pairs = _mm256_maddubs_epi16(magnitudes, signed_activations);
  return in_register(_mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
#endif
}

template <int kRows>
PHLOEM_INLINE void clear(__m256i sums[kRows][2]) {
  for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
}
template <int kRows>
PHLOEM_INLINE void widen(__m256i sums[kRows][2]) {
  for (int r = 0; r < kRows; ++r)
    for (int h = 0; h < 2; ++h) sums[r][h] = widened(sums[r][h]);
}

// Sums of one group for kRows rows and 16 columns from packed 4-bit weights.
template <int kRows>
PHLOEM_INLINE void group_sums_q4(const uint8_t* block, const int8_t* q, int64_t ld, __m256i sums[kRows][2]) {
  const __m256i low_bits = _mm256_set1_epi8(15);
  clear<kRows>(sums);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m256i b0 = load_bytes(block + 64 * j), b1 = load_bytes(block + 64 * j + 32);
    const __m256i l0 = _mm256_and_si256(b0, low_bits), l1 = _mm256_and_si256(b1, low_bits);
    const __m256i h0 = _mm256_and_si256(_mm256_srli_epi16(b0, 4), low_bits);
    const __m256i h1 = _mm256_and_si256(_mm256_srli_epi16(b1, 4), low_bits);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m256i a = four_activations(q + r * ld + 8 * j), b = four_activations(q + r * ld + 8 * j + 4);
      sums[r][0] = add_products(add_products(sums[r][0], l0, a), h0, b);
      sums[r][1] = add_products(add_products(sums[r][1], l1, a), h1, b);
    }
  }
  widen<kRows>(sums);
}

template <int kRows>
PHLOEM_INLINE void group_sums_q8(const uint8_t* block, const int8_t* q, int64_t ld, __m256i sums[kRows][2]) {
  clear<kRows>(sums);
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    const __m256i b0 = load_bytes(block + 64 * j), b1 = load_bytes(block + 64 * j + 32);
    const __m256i u0 = _mm256_abs_epi8(b0), u1 = _mm256_abs_epi8(b1);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m256i a = four_activations(q + r * ld + 4 * j);
      sums[r][0] = add_wide_products(sums[r][0], b0, u0, a);
      sums[r][1] = add_wide_products(sums[r][1], b1, u1, a);
    }
  }
}

template <WeightFormat kFormat, int kRows>
void tile(const GemmArgs& args, int row, int panel) {
  const MatrixView& w = *args.w;
  constexpr size_t kBlockBytes = kFormat == WeightFormat::q8    ? kQ8Bytes + 2 * kPanel
                                 : kFormat == WeightFormat::q4m ? kQ4Bytes + 4 * kPanel
                                                                : kQ4Bytes + 2 * kPanel;
  const uint8_t* block = w.data + static_cast<size_t>(panel) * w.panel_bytes;
  const int64_t ld = args.a.ld, ld_group = ld / kGroup;
  const int8_t* q = args.a.q + row * ld;
  const float* s = args.a.scale + row * ld_group;
  const float* s_sum = args.a.sum + row * ld_group;
  F8 y[kRows][2];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) y[r][0] = y[r][1] = splat(0.0f);
  for (int g = 0; g < w.groups; ++g, block += kBlockBytes) {
    if constexpr (kRows <= 2) {  // few rows wait for memory
#pragma GCC unroll 16
      for (size_t at = 0; at < kBlockBytes; at += 64) __builtin_prefetch(block + kPrefetchBytes + at);
    }
    __m256i sums[kRows][2];
    if constexpr (kFormat == WeightFormat::q8) {
      group_sums_q8<kRows>(block, q + g * kGroup, ld, sums);
    } else {
      group_sums_q4<kRows>(block, q + g * kGroup, ld, sums);
    }
    F8 d[2], m[2] = {};
    for (int h = 0; h < 2; ++h) load_scales<kFormat>(block, h, &d[h], &m[h]);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const int64_t i = r * ld_group + g;
      for (int h = 0; h < 2; ++h)
        y[r][h] = add_group<kFormat>(y[r][h], reinterpret_cast<I8>(sums[r][h]), d[h], m[h], s[i], s_sum[i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
    for (int h = 0; h < 2; ++h) finish(args, row + r, panel, h, y[r][h]);
}

template <WeightFormat kFormat>
void all_tiles(const GemmArgs& args) {
  for (int panel = args.panel_begin; panel < args.panel_end; ++panel) {
    int row = args.row_begin;
    for (; row + 4 <= args.row_end; row += 4) tile<kFormat, 4>(args, row, panel);
    if (row + 2 <= args.row_end) {
      tile<kFormat, 2>(args, row, panel);
      row += 2;
    }
    if (row < args.row_end) tile<kFormat, 1>(args, row, panel);
  }
}

#else

// Sums of one group for one row and half a panel.
template <WeightFormat kFormat>
PHLOEM_INLINE I8 group_sum(const uint8_t* block, const int8_t* q, int half) {
  I8 sum = {};
  for (int k = 0; k < kGroup; ++k) {
    const int32_t a = q[k];
    I8 w;
    for (int c = 0; c < 8; ++c) {
      const int lane = (8 * half + c) * 4 + k % 4;
      if constexpr (kFormat == WeightFormat::q8) {
        w[c] = static_cast<int8_t>(block[k / 4 * 64 + lane]);
      } else {
        const uint8_t pair = block[k / 8 * 64 + lane];
        w[c] = k % 8 < 4 ? pair & 15 : pair >> 4;
      }
    }
    sum += w * splat_int(a);
  }
  return sum;
}

template <WeightFormat kFormat>
void all_tiles(const GemmArgs& args) {
  const MatrixView& w = *args.w;
  const size_t block_bytes = w.panel_bytes / w.groups;
  for (int panel = args.panel_begin; panel < args.panel_end; ++panel) {
    for (int row = args.row_begin; row < args.row_end; ++row) {
      const int64_t at = static_cast<int64_t>(row) * args.a.ld;
      for (int half = 0; half < 2; ++half) {
        const uint8_t* block = w.data + static_cast<size_t>(panel) * w.panel_bytes;
        F8 y = {};
        for (int g = 0; g < w.groups; ++g, block += block_bytes) {
          F8 d, m = {};
          load_scales<kFormat>(block, half, &d, &m);
          const I8 sum = group_sum<kFormat>(block, args.a.q + at + g * kGroup, half);
          y = add_group<kFormat>(y, sum, d, m, args.a.scale[at / kGroup + g], args.a.sum[at / kGroup + g]);
        }
        finish(args, row, panel, half, y);
      }
    }
  }
}

#endif

// Weights of one value of K for half a panel's columns, as stored integers.
template <WeightFormat kFormat>
PHLOEM_INLINE I8 stored_weights(const uint8_t* block, int k, int half) {
  I8 words;
  if constexpr (kFormat == WeightFormat::q8) {
    std::memcpy(&words, block + k / 4 * 64 + 32 * half, sizeof words);
    return words << (24 - 8 * (k % 4)) >> 24;
  } else {
    std::memcpy(&words, block + k / 8 * 64 + 32 * half, sizeof words);
    return words >> (8 * (k % 4) + (k % 8 < 4 ? 0 : 4)) & 15;
  }
}

// Adds outlier value times weight to the panel's outputs of the row.
template <WeightFormat kFormat>
void add_outlier(const GemmArgs& args, int row, int panel, int group, int k, float value) {
  const MatrixView& w = *args.w;
  const uint8_t* block = w.data + static_cast<size_t>(panel) * w.panel_bytes + group * (w.panel_bytes / w.groups);
  for (int half = 0; half < 2; ++half) {
    float* out = args.out + row * args.ld_out + static_cast<int64_t>(panel) * kPanel + 8 * half;
    F8 d, m = {};
    load_scales<kFormat>(block, half, &d, &m);
    const F8 weights = fma(__builtin_convertvector(stored_weights<kFormat>(block, k, half), F8), d, m);
    store(out, fma(splat(value), weights, load(out)));
  }
}

template <WeightFormat kFormat>
void add_outliers(const GemmArgs& args) {
  const int groups = args.a.ld / kGroup;
  const uint8_t* places = args.a.outlier_at + static_cast<int64_t>(args.row_begin) * groups;
  const int count = (args.row_end - args.row_begin) * groups;
  for (int i = 0; i < count; ++i) {
    uint64_t eight;
    if (i % 8 == 0 && i + 8 <= count) {
      // Most groups have none.
      std::memcpy(&eight, places + i, 8);
      if (eight == 0) {
        i += 7;
        continue;
      }
    }
    if (places[i] == 0) continue;
    const int row = args.row_begin + i / groups, group = i % groups;
    const float value = args.a.outlier[static_cast<int64_t>(row) * groups + group];
    for (int panel = args.panel_begin; panel < args.panel_end; ++panel)
      add_outlier<kFormat>(args, row, panel, group, places[i] - 1, value);
  }
}

template <WeightFormat kFormat>
void product(const GemmArgs& args) {
  all_tiles<kFormat>(args);
  add_outliers<kFormat>(args);
}

}  // namespace

int64_t count_peak(int64_t rounds) {
  constexpr int kChains = 12;
#ifdef __AVX2__
  __m256i sums[kChains] = {};
  __m256i a = _mm256_set1_epi8(3);
  const __m256i b = _mm256_set1_epi8(1);
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) {
      asm volatile("" : "+v"(a));  // else the compiler sees that the product never changes
      sums[j] = in_register(_mm256_add_epi16(sums[j], _mm256_maddubs_epi16(a, b)));
    }
  }
  for (int j = 0; j < kChains; ++j) asm volatile("" : : "x"(sums[j]));
  return rounds * kChains * 32 * 2;
#else
  I8 sums[kChains] = {};
  I8 a = splat_int(3);
  for (int64_t i = 0; i < rounds; ++i) {
    for (int j = 0; j < kChains; ++j) {
      asm volatile("" : "+m"(a));
      sums[j] += a * splat_int(5);
    }
  }
  for (int j = 0; j < kChains; ++j) asm volatile("" : : "m"(sums[j]));
  return rounds * kChains * 8 * 2;
#endif
}

void gemm(const GemmArgs& args) {
  switch (args.w->format) {
    case WeightFormat::q4:
      return product<WeightFormat::q4>(args);
    case WeightFormat::q4m:
      return product<WeightFormat::q4m>(args);
    case WeightFormat::q8:
      return product<WeightFormat::q8>(args);
    default:
      return gemm_float(args);
  }
}

}  // namespace PHLOEM_ISA
}  // namespace phloem
