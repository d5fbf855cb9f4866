// Paged attention of many query rows over one K/V head, tile by tile.
//
// A tile is 64 keys at absolute positions. Its K and V are converted to float once (K transposed, so that a key is a
// lane) and shared by all query rows of the heads and sequences that see it; where these are few, it is converted on
// the way and kept nowhere. Per row and tile the state is (maximum, denominator, sums); four tiles merge in ascending
// order into a super's state, supers in ascending order into the row's. Each row does the same operations in the same
// order whatever shares its tiles: the score of a key adds its products in ascending dimension, the sums add keys in
// ascending order, masked keys weigh exactly zero.
#include "kernels/rows.h"

namespace phloem {
namespace PHLOEM_ISA {
namespace {

constexpr int kMaxRows = 6;

struct Scratch {
  float *keys, *values, *weights, *queries, *super_states, *row_states;
};

struct Tile {
  const uint32_t* places;  // from the tile's first key on, as in AttendArgs
  int num_keys;
  int first_key;
  int num_next;  // keys of the tile that follows, to be fetched meanwhile
};

Scratch layout(const AttendArgs& args, int query_rows) {
  const int d = args.kv.head_dim;
  const size_t state = attend_state_floats(d);
  Scratch s;
  s.keys = args.scratch;
  s.values = s.keys + static_cast<size_t>(kTile) * d;
  s.weights = s.values + static_cast<size_t>(kTile) * d;
  s.queries = s.weights + 8 * static_cast<size_t>(kTile);
  s.super_states = s.queries + static_cast<size_t>(query_rows) * d;
  s.row_states = s.super_states + static_cast<size_t>(query_rows) * state;
  return s;
}

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

// Keys as [d][64], values as [64][d]; lanes past num_keys are zero up to the next multiple of 16 keys (K).
template <KvFormat kFormat>
void load_tile(const AttendArgs& args, const Tile& tile, const Scratch& scratch) {
  load_tile_keys<kFormat>(args, tile, scratch.keys);
  load_tile_values<kFormat>(args, tile, scratch.values);
}

// Into the second cache, which can wait for far more lines at once than the first.
PHLOEM_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

void prefetch_next(const AttendArgs& args, const Tile& tile) {
  const KvView& kv = args.kv;
  const int element = kv.format == KvFormat::f16 ? 2 : kv.format == KvFormat::f32 ? 4 : 1;
  const int64_t bytes = static_cast<int64_t>(kv.head_dim) * element;
  for (int key = 0; key < tile.num_next; ++key) {
    const int64_t at = tile.places[kTile + key] * bytes;
    for (int64_t i = 0; i < bytes; i += 64) {
      prefetch(kv.k + at + i);
      prefetch(kv.v + at + i);
    }
  }
}

// weights[r][key] = q[r] . k[key] for kVectors registers of keys.
template <int kRows, int kVectors>
PHLOEM_INLINE void scores(const float* q, const float* keys, int d, float* weights) {
  FW sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = FW{};
  for (int i = 0; i < d; ++i) {
    FW k[kVectors];
    for (int v = 0; v < kVectors; ++v)
      k[v] = in_register(load_as<FW>(keys + static_cast<size_t>(i) * kTile + kWideLanes * v));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const FW a = splat_as<FW>(q[static_cast<size_t>(r) * d + i]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(a, k[v], sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) store(weights + r * kTile + kWideLanes * v, sums[r][v]);
}

#ifdef __AVX2__

// The same for sixteen f16 keys straight from the cache. Asks for the keys of the next tile on the way.
template <int kRows, bool kAll>
PHLOEM_INLINE void direct_scores(const AttendArgs& args, const Tile& tile, int first, const float* q, float* weights) {
  const int d = args.kv.head_dim;
  const uint16_t *from[16], *next[16];
  find_16_keys<kAll>(args, tile, first, from);
  find_16_keys<true>(args, tile, first + 16 <= tile.num_next ? kTile + first : 0, next);
  FW sums[kRows][kKeyParts];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
    for (int part = 0; part < kKeyParts; ++part) sums[r][part] = FW{};
  for (int i = 0; i < d; i += 16) {
    const auto add = [&](int dimension, const FW k[kKeyParts]) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const FW a = splat_as<FW>(q[static_cast<size_t>(r) * d + dimension]);
        for (int part = 0; part < kKeyParts; ++part) sums[r][part] = fma(a, k[part], sums[r][part]);
      }
    };
    // Inlined by force: the compiler takes a function that only prefetches for one that does nothing.
    const auto fetch = [&](int key) __attribute__((always_inline)) {
      if (i % 32 == 0) prefetch(next[key] + i);
    };
    widen_16_keys<kAll>(from, tile.num_keys - first, i, add, fetch);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
    for (int part = 0; part < kKeyParts; ++part) store(weights + r * kTile + first + kWideLanes * part, sums[r][part]);
}

#endif

// In place: weights = exp(weights - maximum) with keys at and past `limit` masked. Returns maximum and sum, which is
// added eight keys at a time whatever the width of the registers.
PHLOEM_INLINE void softmax_tile(float* weights, int limit, float* maximum, float* sum) {
  const int padded = (limit + kWideLanes - 1) / kWideLanes * kWideLanes;
  for (int key = limit; key < padded; ++key) weights[key] = kNegInf;
  F8 top = load(weights);
  for (int key = 8; key < padded; key += 8) top = max(top, load(weights + key));
  *maximum = max_lanes(top);
  F8 total = {};
  for (int key = 0; key < padded; key += kWideLanes) {
    const FW p = exp(load_as<FW>(weights + key) - *maximum);
    store(weights + key, p);
    for (int part = 0; part < kWideLanes; part += 8) total = total + load(weights + key + part);
  }
  *sum = sum_lanes(total);
}

// (maximum, denominator) of a state, each lane another row.
struct Heads {
  F8 m, l;
};

// Merges `from` into `into` and returns the factors of old and new sums.
PHLOEM_INLINE void merge_heads(Heads& into, const Heads& from, F8* keep, F8* add) {
  const F8 top = max(into.m, from.m);
  *keep = exp(into.m - top);
  *add = exp(from.m - top);
  into = {top, fma(into.l, *keep, from.l * *add)};
}

// state sums = state sums * keep + (weights . values) * add, over kVectors registers of dimensions. load(key, v) fills
// the registers with the values of a key.
template <class V, int kRows, int kVectors, class Load>
PHLOEM_INLINE void weighted_values(const float* weights, const Load& load, int num_keys, float* state, size_t stride,
                                   F8 keep, F8 add) {
  V sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
    for (int i = 0; i < kVectors; ++i) sums[r][i] = V{};
  for (int key = 0; key < num_keys; ++key) {
    V v[kVectors];
    load(key, v);
    for (int i = 0; i < kVectors; ++i) v[i] = in_register(v[i]);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const V p = splat_as<V>(weights[r * kTile + key]);
      for (int i = 0; i < kVectors; ++i) sums[r][i] = fma(p, v[i], sums[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVectors; ++i) {
      float* at = state + r * stride + kLanes<V> * i;
      store(at, fma(load_as<V>(at), splat_as<V>(keep[r]), sums[r][i] * add[r]));
    }
  }
}

// kRows query rows from `first` on attend the tile. kDirect: it is read from the cache, in f16, for these rows alone;
// else it is loaded.
template <int kRows, bool kDirect>
void attend_rows(const AttendArgs& args, const Tile& tile, const Scratch& scratch, int first) {
  const int d = args.kv.head_dim, group = args.num_heads / args.kv.num_kv_heads;
  const size_t stride = attend_state_floats(d);
  float* state = scratch.super_states + first * stride;
  int limits[kRows], most = 0;
  for (int r = 0; r < kRows; ++r) {
    const int position = args.positions[args.row_begin + (first + r) / group];
    limits[r] = min_of(kTile, position - tile.first_key + 1);
    most = max_of(most, limits[r]);
  }
  // Registers at a time: enough chains to hide the latency of an addition, and no more than there are.
  constexpr int kWide = kRows <= 3 || kWideLanes == 16 ? 4 : 2;
  constexpr int kNarrow = 16 / kWideLanes;
  const float* queries = scratch.queries + static_cast<size_t>(first) * d;
  int key = 0;
  if constexpr (kDirect) {
#ifdef __AVX2__
    for (; key + 16 <= most; key += 16) direct_scores<kRows, true>(args, tile, key, queries, scratch.weights);
    if (key < most) direct_scores<kRows, false>(args, tile, key, queries, scratch.weights);
#endif
  } else {
    for (; key + kWideLanes * kWide <= most; key += kWideLanes * kWide)
      scores<kRows, kWide>(queries, scratch.keys + key, d, scratch.weights + key);
    for (; key < most; key += 16) scores<kRows, kNarrow>(queries, scratch.keys + key, d, scratch.weights + key);
  }
  Heads before{}, found{};
  for (int r = 0; r < kRows; ++r) {
    float m, l, *weights = scratch.weights + r * kTile;
    softmax_tile(weights, limits[r], &m, &l);
    for (key = limits[r]; key < most; ++key) weights[key] = 0.0f;
    found.m[r] = m;
    found.l[r] = l;
    before.m[r] = state[r * stride + d];
    before.l[r] = state[r * stride + d + 1];
  }
  F8 keep, add;
  merge_heads(before, found, &keep, &add);
  for (int r = 0; r < kRows; ++r) {
    state[r * stride + d] = before.m[r];
    state[r * stride + d + 1] = before.l[r];
  }
  const uint8_t* cached = args.kv.v;
  const uint32_t* places = tile.places;
  const int64_t ld = d;
  const int num_next = tile.num_next;
  const auto values = [&]<class V, int kVectors>(int begin) {
    const auto load = [=, loaded = scratch.values](int k, V v[kVectors]) __attribute__((always_inline)) {
      if constexpr (kDirect) {
        if (k < num_next)
          for (int i = 0; i < kLanes<V> * kVectors; i += 32)
            prefetch(cached + 2 * (places[kTile + k] * ld + begin + i));
        for (int i = 0; i < kVectors; ++i)
          v[i] = load_kv<KvFormat::f16, V>(cached, places[k] * ld + begin + kLanes<V> * i);
      } else {
        const float* at = loaded + static_cast<size_t>(k) * d + begin;
        for (int i = 0; i < kVectors; ++i) v[i] = load_as<V>(at + kLanes<V> * i);
      }
    };
    weighted_values<V, kRows, kVectors>(scratch.weights, load, most, state + begin, stride, keep, add);
  };
  int i = 0;
  for (; i + kWideLanes * kWide <= d; i += kWideLanes * kWide) values.template operator()<FW, kWide>(i);
  for (; i + 16 <= d; i += 16) values.template operator()<FW, kNarrow>(i);
  for (; i < d; i += 8) values.template operator()<F8, 1>(i);
}

template <bool kDirect>
void attend_tile(const AttendArgs& args, const Tile& tile, const Scratch& scratch, int query_begin, int query_end) {
  int i = query_begin;
  for (; i + kMaxRows <= query_end; i += kMaxRows) attend_rows<kMaxRows, kDirect>(args, tile, scratch, i);
  switch (query_end - i) {
    case 5:
      return attend_rows<5, kDirect>(args, tile, scratch, i);
    case 4:
      return attend_rows<4, kDirect>(args, tile, scratch, i);
    case 3:
      return attend_rows<3, kDirect>(args, tile, scratch, i);
    case 2:
      return attend_rows<2, kDirect>(args, tile, scratch, i);
    case 1:
      return attend_rows<1, kDirect>(args, tile, scratch, i);
    default:
      return;
  }
}

// Rows that fill the registers once do not pay for loading a tile.
bool is_direct(const AttendArgs& args, int query_rows) {
#ifdef __AVX2__
  return query_rows <= kMaxRows && args.kv.format == KvFormat::f16 && args.kv.head_dim % 16 == 0;
#else
  (void)args, (void)query_rows;
  return false;
#endif
}

// All sequences of the block attend tile `t`; neighbours that have it in common load it once.
void attend_block_tile(const AttendArgs& args, int t, const Scratch& scratch) {
  const int group = args.num_heads / args.kv.num_kv_heads;
  const int first_key = t * kTile;
  for (int s = args.seq_begin; s < args.seq_end;) {
    int end = s + 1;
    while (end < args.seq_end && args.shared_tiles[end] > t) ++end;
    int row = max_of(args.row_begin, args.seq_row_start[s]);
    const int row_end = min_of(args.row_end, args.seq_row_start[end]);
    while (row < row_end && args.positions[row] < first_key) ++row;
    if (row < row_end) {
      const int keys_left = args.positions[row_end - 1] + 1 - first_key;
      const Tile tile{args.places + s * args.ld_places + first_key, min_of(kTile, keys_left), first_key,
                      max_of(0, min_of(kTile, keys_left - kTile))};
      const int query_begin = (row - args.row_begin) * group, query_end = (row_end - args.row_begin) * group;
      if (is_direct(args, query_end - query_begin)) {
        attend_tile<true>(args, tile, scratch, query_begin, query_end);
      } else {
        if (args.kv.format == KvFormat::f16) load_tile<KvFormat::f16>(args, tile, scratch);
        if (args.kv.format == KvFormat::f32) load_tile<KvFormat::f32>(args, tile, scratch);
        if (args.kv.format == KvFormat::i8) load_tile<KvFormat::i8>(args, tile, scratch);
        prefetch_next(args, tile);
        attend_tile<false>(args, tile, scratch, query_begin, query_end);
      }
    }
    s = end;
  }
}

void reset_states(float* states, int query_rows, int d) {
  const size_t stride = attend_state_floats(d);
  std::memset(states, 0, query_rows * stride * sizeof(float));
  for (int i = 0; i < query_rows; ++i) states[i * stride + d] = kNegInf;
}

PHLOEM_INLINE void merge_state(float* into, const float* from, int d) {
  Heads heads{splat(into[d]), splat(into[d + 1])};
  F8 keep, add;
  merge_heads(heads, {splat(from[d]), splat(from[d + 1])}, &keep, &add);
  into[d] = heads.m[0];
  into[d + 1] = heads.l[0];
  for (int i = 0; i < d; i += 8) store(into + i, fma(load(into + i), keep, load(from + i) * add));
}

PHLOEM_INLINE void write_out(const float* state, int d, float* out) {
  const F8 inverse = splat(1.0f / state[d + 1]);
  for (int i = 0; i < d; i += 8) store(out + i, load(state + i) * inverse);
}

}  // namespace

void attend(const AttendArgs& args) {
  const int d = args.kv.head_dim, group = args.num_heads / args.kv.num_kv_heads;
  const int query_rows = (args.row_end - args.row_begin) * group;
  const size_t stride = attend_state_floats(d);
  Scratch scratch = layout(args, query_rows);
  for (int row = args.row_begin; row < args.row_end; ++row) {
    std::memcpy(scratch.queries + static_cast<size_t>(row - args.row_begin) * group * d,
                args.q + row * args.ld + static_cast<int64_t>(args.kv_head) * group * d, sizeof(float) * group * d);
  }
  if (!args.states) reset_states(scratch.row_states, query_rows, d);
  for (int super = args.super_begin; super < args.super_end; ++super) {
    if (args.states) scratch.super_states = args.states + (super - args.super_begin) * query_rows * stride;
    reset_states(scratch.super_states, query_rows, d);
    for (int t = 0; t < kTilesPerSuper; ++t) attend_block_tile(args, super * kTilesPerSuper + t, scratch);
    if (args.states) continue;
    for (int i = 0; i < query_rows; ++i) {
      if (args.positions[args.row_begin + i / group] >= super * kSuper)
        merge_state(scratch.row_states + i * stride, scratch.super_states + i * stride, d);
    }
  }
  if (args.states) return;
  for (int i = 0; i < query_rows; ++i) {
    float* out = args.out + (args.row_begin + i / group) * args.ld;
    write_out(scratch.row_states + i * stride, d, out + static_cast<int64_t>(args.kv_head * group + i % group) * d);
  }
}

void fold(const FoldArgs& args) {
  const int d = args.head_dim;
  const size_t stride = attend_state_floats(d);
  float* state = args.scratch;
  for (int i = 0; i < args.query_rows; ++i) {
    const int row = args.row_begin + i / args.group;
    reset_states(state, 1, d);
    for (int super = 0; super < args.supers && args.positions[row] >= super * kSuper; ++super)
      merge_state(state, args.states + super * args.super_stride + i * stride, d);
    write_out(state, d,
              args.out + row * args.ld + static_cast<int64_t>(args.kv_head * args.group + i % args.group) * d);
  }
}

}  // namespace PHLOEM_ISA
}  // namespace phloem
