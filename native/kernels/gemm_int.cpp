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
constexpr size_t kCloseBytes = 4096;
constexpr int kParts = kPanel / kWideLanes;  // registers that hold a panel's columns

PHLOEM_INLINE void finish(const GemmArgs& args, int row, int panel, int part, FW y) {
  const int column = panel * kPanel + part * kWideLanes;
  float* out = args.out + row * args.ld_out + column;
  if (args.bias) y = y + load_as<FW>(args.bias + column);
  if (args.accumulate) y = load_as<FW>(out) + y;
  store(out, y);
}

// Scale and minimum of a part of the panel's columns.
template <WeightFormat kFormat>
PHLOEM_INLINE void load_scales(const uint8_t* block, int part, FW* d, FW* m) {
  const uint8_t* scales = block + (kFormat == WeightFormat::q8 ? kQ8Bytes : kQ4Bytes);
  const auto* at = reinterpret_cast<const uint16_t*>(scales) + part * kWideLanes;
  *d = load_wide_f16(at);
  if constexpr (kFormat == WeightFormat::q4m) *m = load_wide_f16(at + kPanel);
  if constexpr (kFormat == WeightFormat::q4) *m = *d * -8.0f;
}

template <WeightFormat kFormat>
PHLOEM_INLINE FW add_group(FW y, IW sum, FW d, FW m, const ActGroup& a) {
  y = fma(__builtin_convertvector(sum, FW), d * a.scale, y);
  if constexpr (kFormat != WeightFormat::q8) y = fma(m, splat_as<FW>(a.sum), y);
  return y;
}

#ifdef __AVX2__

template <WeightFormat kFormat>
constexpr size_t kBlockBytes = kFormat == WeightFormat::q8    ? kQ8Bytes + 2 * kPanel
                               : kFormat == WeightFormat::q4m ? kQ4Bytes + 4 * kPanel
                                                              : kQ4Bytes + 2 * kPanel;

PHLOEM_INLINE int32_t four_bytes(const int8_t* q) {
  int32_t raw;
  std::memcpy(&raw, q, 4);
  return raw;
}

// Asks for a block that is `ahead` bytes further on: into the first cache when it is close, else into the second,
// which can wait for more lines at once.
template <WeightFormat kFormat>
PHLOEM_INLINE void prefetch_block(const uint8_t* block, size_t ahead) {
#pragma GCC unroll 16
  for (size_t at = 0; at < kBlockBytes<kFormat>; at += 64) {
    if (ahead <= kCloseBytes) {
      __builtin_prefetch(block + ahead + at);
    } else {
      __builtin_prefetch(block + ahead + at, 0, 2);
    }
  }
}

#endif

#if defined(__AVX512VNNI__)

// A panel's 16 columns are the lanes of one register, and four products a lane are added to 32 bits at once. (Where an
// intrinsic starts from an undefined register GCC 12 warns, so those are written as vector operations.)
using U16 = uint32_t __attribute__((vector_size(64)));

constexpr int kMostRows = 8;

PHLOEM_INLINE __m512i load_block(const uint8_t* p) { return _mm512_loadu_si512(p); }
PHLOEM_INLINE __m512i splat_bytes(int byte) { return _mm512_set1_epi8(static_cast<char>(byte)); }
PHLOEM_INLINE __m512i add_products(__m512i sums, __m512i weights, const int8_t* q) {
  return _mm512_dpbusd_epi32(sums, weights, _mm512_set1_epi32(four_bytes(q)));
}

// Sums of one group for kRows rows. A sum is two chains, or few rows would wait for each addition.
template <WeightFormat kFormat, int kRows>
PHLOEM_INLINE void group_sums(const uint8_t* block, const int8_t* q, const ActGroup* groups, int64_t ld,
                              __m512i sums[kRows]) {
  __m512i more[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) sums[r] = more[r] = _mm512_setzero_si512();
  if constexpr (kFormat == WeightFormat::q8) {
    // Weights plus 128 are unsigned; what that adds is taken off first.
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) more[r] = _mm512_set1_epi32(-128 * groups[r * ld / kGroup].total);
#pragma GCC unroll 4
    for (int j = 0; j < 8; j += 2) {
      const __m512i even = _mm512_xor_si512(load_block(block + 64 * j), splat_bytes(128));
      const __m512i odd = _mm512_xor_si512(load_block(block + 64 * j + 64), splat_bytes(128));
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r] = add_products(sums[r], even, q + r * ld + 4 * j);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) more[r] = add_products(more[r], odd, q + r * ld + 4 * j + 4);
    }
  } else {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i pairs = load_block(block + 64 * j);
      const __m512i low = _mm512_and_si512(pairs, splat_bytes(15));
      const __m512i high =
          _mm512_and_si512(reinterpret_cast<__m512i>(reinterpret_cast<U16>(pairs) >> 4), splat_bytes(15));
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r] = add_products(sums[r], low, q + r * ld + 8 * j);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) more[r] = add_products(more[r], high, q + r * ld + 8 * j + 4);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) sums[r] = _mm512_add_epi32(sums[r], more[r]);
}

template <WeightFormat kFormat, int kRows>
void tile(const GemmArgs& args, int row, int panel, size_t ahead) {
  const MatrixView& w = *args.w;
  const uint8_t* block = w.data + static_cast<size_t>(panel) * w.panel_bytes;
  const int64_t ld = args.a.ld, ld_group = ld / kGroup;
  const int8_t* q = args.a.q + row * ld;
  const ActGroup* groups = args.a.groups + row * ld_group;
  FW y[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) y[r] = FW{};
  for (int g = 0; g < w.groups; ++g, block += kBlockBytes<kFormat>, q += kGroup, ++groups) {
    if (ahead) prefetch_block<kFormat>(block, ahead);
    __m512i sums[kRows];
    group_sums<kFormat, kRows>(block, q, groups, ld, sums);
    FW d, m = {};
    load_scales<kFormat>(block, 0, &d, &m);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
      y[r] = add_group<kFormat>(y[r], reinterpret_cast<IW>(sums[r]), d, m, groups[r * ld_group]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) finish(args, row + r, panel, 0, y[r]);
}

#elif defined(__AVX2__)

constexpr int kMostRows = 4;

PHLOEM_INLINE __m256i load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
PHLOEM_INLINE __m256i four_activations(const int8_t* q) { return _mm256_set1_epi32(four_bytes(q)); }

// Pairs of products u8 x s8 are added in 16 bits and widened at the end of the group: for 4-bit weights the 16 products
// of a lane are at most 15 * 127 each and fit.
PHLOEM_INLINE __m256i add_products(__m256i sums, __m256i weights, __m256i activations) {
  return in_register(_mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, activations)));
}
PHLOEM_INLINE __m256i widened(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
// The same for 8-bit weights, whose pairs must be widened at once (2 * 127 * 127 fits 16 bits): |w| times the
// activation with w's sign.
PHLOEM_INLINE __m256i add_wide_products(__m256i sums, __m256i weights, __m256i magnitudes, __m256i activations) {
  const __m256i pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(activations, weights));
  return in_register(_mm256_add_epi32(sums, widened(pairs)));
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
void tile(const GemmArgs& args, int row, int panel, size_t ahead) {
  const MatrixView& w = *args.w;
  const uint8_t* block = w.data + static_cast<size_t>(panel) * w.panel_bytes;
  const int64_t ld = args.a.ld, ld_group = ld / kGroup;
  const int8_t* q = args.a.q + row * ld;
  const ActGroup* groups = args.a.groups + row * ld_group;
  FW y[kRows][2];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) y[r][0] = y[r][1] = FW{};
  for (int g = 0; g < w.groups; ++g, block += kBlockBytes<kFormat>, ++groups) {
    if (ahead) prefetch_block<kFormat>(block, ahead);
    __m256i sums[kRows][2];
    if constexpr (kFormat == WeightFormat::q8) {
      group_sums_q8<kRows>(block, q + g * kGroup, ld, sums);
    } else {
      group_sums_q4<kRows>(block, q + g * kGroup, ld, sums);
    }
    FW d[2], m[2] = {};
    for (int h = 0; h < 2; ++h) load_scales<kFormat>(block, h, &d[h], &m[h]);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      for (int h = 0; h < 2; ++h)
        y[r][h] = add_group<kFormat>(y[r][h], reinterpret_cast<IW>(sums[r][h]), d[h], m[h], groups[r * ld_group]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
    for (int h = 0; h < 2; ++h) finish(args, row + r, panel, h, y[r][h]);
}

#endif

#ifdef __AVX2__

// How far ahead the first tile of a panel asks for weights. Few rows wait for memory: one or two for the blocks that
// follow, more for the panel that follows.
size_t prefetch_distance(const GemmArgs& args) {
  const int rows = args.row_end - args.row_begin;
  return rows <= 2 ? kCloseBytes : rows <= 32 ? args.w->panel_bytes : 0;
}

template <WeightFormat kFormat>
void all_tiles(const GemmArgs& args) {
  for (int panel = args.panel_begin; panel < args.panel_end; ++panel) {
    int row = args.row_begin;
    size_t ahead = prefetch_distance(args);
    const auto next_rows = [&]<int kRows>() {
      tile<kFormat, kRows>(args, row, panel, ahead);
      row += kRows;
      ahead = 0;
    };
    while (row + kMostRows <= args.row_end) next_rows.template operator()<kMostRows>();
    if (row + 4 <= args.row_end) next_rows.template operator()<4>();
    if (row + 2 <= args.row_end) next_rows.template operator()<2>();
    if (row < args.row_end) next_rows.template operator()<1>();
  }
}

#else

// Sums of one group for one row and a part of the panel's columns.
template <WeightFormat kFormat>
PHLOEM_INLINE IW group_sum(const uint8_t* block, const int8_t* q, int part) {
  IW sum = {};
  for (int k = 0; k < kGroup; ++k) {
    const int32_t a = q[k];
    IW w;
    for (int c = 0; c < kWideLanes; ++c) {
      const int lane = (kWideLanes * part + c) * 4 + k % 4;
      if constexpr (kFormat == WeightFormat::q8) {
        w[c] = static_cast<int8_t>(block[k / 4 * 64 + lane]);
      } else {
        const uint8_t pair = block[k / 8 * 64 + lane];
        w[c] = k % 8 < 4 ? pair & 15 : pair >> 4;
      }
    }
    sum += w * a;
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
      for (int part = 0; part < kParts; ++part) {
        const uint8_t* block = w.data + static_cast<size_t>(panel) * w.panel_bytes;
        FW y = {};
        for (int g = 0; g < w.groups; ++g, block += block_bytes) {
          FW d, m = {};
          load_scales<kFormat>(block, part, &d, &m);
          const IW sum = group_sum<kFormat>(block, args.a.q + at + g * kGroup, part);
          y = add_group<kFormat>(y, sum, d, m, args.a.groups[at / kGroup + g]);
        }
        finish(args, row, panel, part, y);
      }
    }
  }
}

#endif

// Weights of one value of K for a part of the panel's columns.
template <WeightFormat kFormat>
PHLOEM_INLINE FW stored_weights(const uint8_t* block, int k, int part) {
  FW d, m = {};
  load_scales<kFormat>(block, part, &d, &m);
  IW words;
  std::memcpy(&words, block + k / (kFormat == WeightFormat::q8 ? 4 : 8) * 64 + part * sizeof words, sizeof words);
  if constexpr (kFormat == WeightFormat::q8) {
    words = words << (24 - 8 * (k % 4)) >> 24;
  } else {
    words = words >> (8 * (k % 4) + (k % 8 < 4 ? 0 : 4)) & 15;
  }
  return fma(__builtin_convertvector(words, FW), d, m);
}

struct Outlier {
  int row, group, place;
  float value;
};

// Adds each outlier's value times its weights to the outputs of its row. Neighbours of one column share its weights.
template <WeightFormat kFormat>
void add_outliers(const GemmArgs& args, const Outlier* outliers, int count) {
  const MatrixView& w = *args.w;
  const size_t block_bytes = w.panel_bytes / w.groups;
  for (int panel = args.panel_begin; panel < args.panel_end; ++panel) {
    const uint8_t* blocks = w.data + static_cast<size_t>(panel) * w.panel_bytes;
    FW weights[kParts] = {};
    for (int i = 0; i < count; ++i) {
      const auto [row, group, place, value] = outliers[i];
      if (i == 0 || group != outliers[i - 1].group || place != outliers[i - 1].place) {
        for (int part = 0; part < kParts; ++part)
          weights[part] = stored_weights<kFormat>(blocks + group * block_bytes, place, part);
      }
      float* out = args.out + row * args.ld_out + static_cast<int64_t>(panel) * kPanel;
      for (int part = 0; part < kParts; ++part, out += kWideLanes)
        store(out, fma(splat_as<FW>(value), weights[part], load_as<FW>(out)));
    }
  }
}

PHLOEM_INLINE uint64_t up_to_eight_bytes(const uint8_t* p, int count) {
  uint64_t bytes = 0;
  if (count == 8) {
    std::memcpy(&bytes, p, 8);
  } else {
    for (int i = 0; i < count; ++i) bytes |= static_cast<uint64_t>(p[i]) << 8 * i;
  }
  return bytes;
}

// Goes through the groups in ascending order and in each through all rows, since a column tends to stand out in many.
// Most groups have none.
template <WeightFormat kFormat>
void find_and_add_outliers(const GemmArgs& args) {
  constexpr int kMost = 256;
  Outlier found[kMost];
  int count = 0;
  const int groups = args.a.ld / kGroup;
  for (int group = 0; group < groups; ++group) {
    const uint8_t* places = args.a.outlier_at + static_cast<int64_t>(group) * args.a.rows;
    for (int first = args.row_begin; first < args.row_end; first += 8) {
      uint64_t eight = up_to_eight_bytes(places + first, min_of(8, args.row_end - first));
      for (int row = first; eight; ++row, eight >>= 8) {
        if ((eight & 255) == 0) continue;
        if (count == kMost) {
          add_outliers<kFormat>(args, found, count);
          count = 0;
        }
        const float value = args.a.groups[static_cast<int64_t>(row) * groups + group].outlier;
        found[count++] = {row, group, static_cast<int>(eight & 255) - 1, value};
      }
    }
  }
  add_outliers<kFormat>(args, found, count);
}

template <WeightFormat kFormat>
void product(const GemmArgs& args) {
  all_tiles<kFormat>(args);
  find_and_add_outliers<kFormat>(args);
}

// Adds to enough sums at once to hide the latency of an addition; returns how many additions that were.
template <class V, class Add>
int64_t run_chains(int64_t rounds, V a, Add add) {
#ifdef __AVX2__
#define PHLOEM_ANYWHERE "v"
#else
#define PHLOEM_ANYWHERE "m"
#endif
  constexpr int kChains = 12;
  V sums[kChains] = {};
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) {
      asm volatile("" : "+" PHLOEM_ANYWHERE(a));  // else the compiler sees that the product never changes
      sums[j] = add(sums[j], a);
    }
  }
  for (int j = 0; j < kChains; ++j) asm volatile("" : : PHLOEM_ANYWHERE(sums[j]));
  return rounds * kChains;
}

}  // namespace

int64_t count_peak(int64_t rounds) {
#if defined(__AVX512VNNI__)
  const __m512i b = splat_bytes(1);
  return 2 * 64 *
         run_chains(rounds, splat_bytes(3), [b](__m512i sum, __m512i a) { return _mm512_dpbusd_epi32(sum, a, b); });
#elif defined(__AVX2__)
  const __m256i b = _mm256_set1_epi8(1);
  return 2 * 32 *
         run_chains(rounds, _mm256_set1_epi8(3), [b](__m256i sum, __m256i a) { return add_products(sum, a, b); });
#else
  return 2 * 8 * run_chains(rounds, splat_int(3), [](I8 sum, I8 a) { return sum + a * splat_int(5); });
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
