// A tile of K/V: which keys it has, and how they come out of the cache as floats. Owns loading, transposing and asking
// ahead. Must not know queries or states. Included like simd.h, which see.
#pragma once

#include "kernels/kernel_table.h"
#include "kernels/simd.h"

namespace phloem {
namespace PHLOEM_ISA {

struct Tile {
  const uint32_t* places;  // from the tile's first key on, as in AttendArgs
  int num_keys;
  int first_key;
  int num_next;  // keys of the tile that follows, to be fetched meanwhile
};

template <KvFormat kFormat, class V>
PHLOEM_INLINE V load_kv(const uint8_t* base, int64_t index) {
  if constexpr (kFormat == KvFormat::f16) {
    const auto* at = reinterpret_cast<const uint16_t*>(base) + index;
    if constexpr (kLanes<V> == 8) {
      return load_f16(at);
    } else {
      return load_wide_f16(at);
    }
  }
  if constexpr (kFormat == KvFormat::f32) return load_as<V>(reinterpret_cast<const float*>(base) + index);
  if constexpr (kFormat == KvFormat::i8) return load_i8<V>(reinterpret_cast<const int8_t*>(base) + index);
}

PHLOEM_INLINE void transpose(F8 v[8]) {
#ifdef __AVX2__
  const __m256 a0 = _mm256_unpacklo_ps(v[0], v[1]), a1 = _mm256_unpackhi_ps(v[0], v[1]);
  const __m256 a2 = _mm256_unpacklo_ps(v[2], v[3]), a3 = _mm256_unpackhi_ps(v[2], v[3]);
  const __m256 a4 = _mm256_unpacklo_ps(v[4], v[5]), a5 = _mm256_unpackhi_ps(v[4], v[5]);
  const __m256 a6 = _mm256_unpacklo_ps(v[6], v[7]), a7 = _mm256_unpackhi_ps(v[6], v[7]);
  const __m256 b0 = _mm256_shuffle_ps(a0, a2, 0x44), b1 = _mm256_shuffle_ps(a0, a2, 0xee);
  const __m256 b2 = _mm256_shuffle_ps(a1, a3, 0x44), b3 = _mm256_shuffle_ps(a1, a3, 0xee);
  const __m256 b4 = _mm256_shuffle_ps(a4, a6, 0x44), b5 = _mm256_shuffle_ps(a4, a6, 0xee);
  const __m256 b6 = _mm256_shuffle_ps(a5, a7, 0x44), b7 = _mm256_shuffle_ps(a5, a7, 0xee);
  v[0] = _mm256_permute2f128_ps(b0, b4, 0x20);
  v[1] = _mm256_permute2f128_ps(b1, b5, 0x20);
  v[2] = _mm256_permute2f128_ps(b2, b6, 0x20);
  v[3] = _mm256_permute2f128_ps(b3, b7, 0x20);
  v[4] = _mm256_permute2f128_ps(b0, b4, 0x31);
  v[5] = _mm256_permute2f128_ps(b1, b5, 0x31);
  v[6] = _mm256_permute2f128_ps(b2, b6, 0x31);
  v[7] = _mm256_permute2f128_ps(b3, b7, 0x31);
#else
  F8 t[8];
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 8; ++j) t[j][i] = v[i][j];
  for (int i = 0; i < 8; ++i) v[i] = t[i];
#endif
}

// Eight keys from `first` on, transposed; those that the tile does not have become zero. kAll: it has all eight.
template <KvFormat kFormat, bool kAll>
PHLOEM_INLINE void load_keys(const AttendArgs& args, const Tile& tile, int first, float* keys) {
  const KvView& kv = args.kv;
  const int d = kv.head_dim, live = tile.num_keys - first;
  uint32_t place[8];
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) place[j] = tile.places[kAll || j < live ? first + j : first];
  for (int i = 0; i < d; i += 8) {
    F8 v[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      v[j] = load_kv<kFormat, F8>(kv.k, static_cast<int64_t>(place[j]) * d + i);
      if constexpr (kFormat == KvFormat::i8) v[j] = v[j] * splat(kv.k_scale[place[j]]);
      if (!kAll && j >= live) v[j] = splat(0.0f);
    }
    transpose(v);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) store(keys + first + static_cast<size_t>(i + j) * kTile, v[j]);
  }
}

#ifdef __AVX2__

// In each half of the registers: element j of vector i becomes element i of vector j.
PHLOEM_INLINE void transpose_16_bits(__m256i v[8]) {
  __m256i a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_epi16(v[2 * i], v[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_epi16(v[2 * i], v[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      b[4 * i + 2 * j] = _mm256_unpacklo_epi32(a[4 * i + j], a[4 * i + j + 2]);
      b[4 * i + 2 * j + 1] = _mm256_unpackhi_epi32(a[4 * i + j], a[4 * i + j + 2]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = _mm256_unpacklo_epi64(b[i], b[i + 4]);
    v[2 * i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 4]);
  }
}

constexpr int kKeyParts = 16 / kWideLanes;  // registers that hold one dimension of sixteen keys

// Sixteen dimensions from `i` on of sixteen f16 keys: transposed before they are widened, which takes half the
// shuffles, and given to use(dimension, registers) in ascending order. Keys from `live` on are zero; kAll: all are
// there. Calls beside(key) with each load, for work that fits in there.
template <bool kAll, class Use, class Beside>
PHLOEM_INLINE void widen_16_keys(const uint16_t* const keys[16], int live, int i, const Use& use,
                                 const Beside& beside) {
  __m256i v[2][8];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      v[half][j] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys[8 * half + j] + i));
      if (!kAll && 8 * half + j >= live) v[half][j] = _mm256_setzero_si256();
      beside(8 * half + j);
    }
    transpose_16_bits(v[half]);
  }
#pragma GCC unroll 2
  for (int high = 0; high < 2; ++high) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      FW parts[kKeyParts];
#ifdef __AVX512F__
      parts[0] = widen_f16(high ? _mm256_permute2x128_si256(v[0][j], v[1][j], 0x31)
                                : _mm256_permute2x128_si256(v[0][j], v[1][j], 0x20));
#else
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half)
        parts[half] =
            _mm256_cvtph_ps(high ? _mm256_extracti128_si256(v[half][j], 1) : _mm256_castsi256_si128(v[half][j]));
#endif
      use(i + 8 * high + j, parts);
    }
  }
}

template <bool kAll>
PHLOEM_INLINE void find_16_keys(const AttendArgs& args, const Tile& tile, int first, const uint16_t* keys[16]) {
  const auto* base = reinterpret_cast<const uint16_t*>(args.kv.k);
  const uint64_t d = static_cast<uint32_t>(args.kv.head_dim);
  const int live = tile.num_keys - first;
  for (int j = 0; j < 16; ++j) keys[j] = base + tile.places[kAll || j < live ? first + j : first] * d;
}

// d must be a multiple of 16.
template <bool kAll>
PHLOEM_INLINE void load_16_keys(const AttendArgs& args, const Tile& tile, int first, float* keys) {
  const uint16_t* from[16];
  find_16_keys<kAll>(args, tile, first, from);
  const auto keep = [&](int dimension, const FW parts[kKeyParts]) {
    for (int part = 0; part < kKeyParts; ++part)
      store(keys + first + static_cast<size_t>(dimension) * kTile + kWideLanes * part, parts[part]);
  };
  for (int i = 0; i < args.kv.head_dim; i += 16) widen_16_keys<kAll>(from, tile.num_keys - first, i, keep, [](int) {});
}

#endif

template <KvFormat kFormat>
void load_tile_keys(const AttendArgs& args, const Tile& tile, float* keys) {
  const int d = args.kv.head_dim;
  int key = 0;
#ifdef __AVX2__
  if (kFormat == KvFormat::f16 && d % 16 == 0) {
    for (; key + 16 <= tile.num_keys; key += 16) load_16_keys<true>(args, tile, key, keys);
    if (key < tile.num_keys) load_16_keys<false>(args, tile, key, keys);
    return;
  }
#endif
  for (; key + 8 <= tile.num_keys; key += 8) load_keys<kFormat, true>(args, tile, key, keys);
  if (key < tile.num_keys) {
    load_keys<kFormat, false>(args, tile, key, keys);
    key += 8;
  }
  if (key % 16)
    for (int i = 0; i < d; ++i) store(keys + static_cast<size_t>(i) * kTile + key, splat(0.0f));
}

template <KvFormat kFormat>
void load_tile_values(const AttendArgs& args, const Tile& tile, float* values) {
  const KvView& kv = args.kv;
  const int d = kv.head_dim;
  for (int key = 0; key < tile.num_keys; ++key, values += d) {
    const int64_t place = tile.places[key], at = place * d;
    const float scale = kFormat == KvFormat::i8 ? kv.v_scale[place] : 1.0f;
    int i = 0;
    for (; i + kWideLanes <= d; i += kWideLanes) store(values + i, load_kv<kFormat, FW>(kv.v, at + i) * scale);
    for (; i < d; i += 8) store(values + i, load_kv<kFormat, F8>(kv.v, at + i) * scale);
  }
}

// Into the second cache, which can wait for far more lines at once than the first.
PHLOEM_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

PHLOEM_INLINE void prefetch_next(const AttendArgs& args, const Tile& tile) {
  const KvView& kv = args.kv;
  const int64_t bytes = static_cast<int64_t>(kv.head_dim * element_bytes(kv.format));
  for (int key = 0; key < tile.num_next; ++key) {
    const int64_t at = tile.places[kTile + key] * bytes;
    for (int64_t i = 0; i < bytes; i += 64) {
      prefetch(kv.k + at + i);
      prefetch(kv.v + at + i);
    }
  }
}

// Keys as [d][64], values as [64][d]; lanes past num_keys are zero up to the next multiple of 16 keys (K).
template <KvFormat kFormat>
void load_tile(const AttendArgs& args, const Tile& tile, float* keys, float* values) {
  load_tile_keys<kFormat>(args, tile, keys);
  load_tile_values<kFormat>(args, tile, values);
}

}  // namespace PHLOEM_ISA
}  // namespace phloem
