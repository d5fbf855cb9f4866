// Paged attention of many query rows over one K/V head, tile by tile.
//
// A tile is 64 keys at absolute positions. Its K and V are converted to float once (K transposed, so that a key is a
// lane) and shared by all query rows of the heads and sequences that see it. Per row and tile the state is
// (maximum, denominator, sums); four tiles merge in ascending order into a super's state, supers in ascending order
// into the row's. Each row does the same operations in the same order whatever shares its tiles: the score of a key
// adds its products in ascending dimension, the sums add keys in ascending order, masked keys weigh exactly zero.
#include "kernels/rows.h"

namespace phloem {
namespace PHLOEM_ISA {
namespace {

constexpr int kMaxRows = 6;

struct Scratch {
  float *keys, *values, *weights, *queries, *super_states, *row_states;
};

struct Tile {
  const int32_t* slots;  // of the tile's first key
  int num_keys;
  int first_key;
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

template <KvFormat kFormat>
PHLOEM_INLINE F8 load_kv(const uint8_t* base, int64_t index) {
  if constexpr (kFormat == KvFormat::f16) return load_f16(reinterpret_cast<const uint16_t*>(base) + index);
  if constexpr (kFormat == KvFormat::f32) return load(reinterpret_cast<const float*>(base) + index);
  return load_i8(reinterpret_cast<const int8_t*>(base) + index);
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

// Eight keys from `key` on, transposed; those from `live` on become zero. kAll: all eight are there.
template <KvFormat kFormat, bool kAll>
PHLOEM_INLINE void load_keys(const AttendArgs& args, const int32_t* slots, int live, float* keys) {
  const KvView& kv = args.kv;
  const int d = kv.head_dim;
  int64_t index[8];
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) index[j] = kv.vector_index(args.kv_head, slots[kAll || j < live ? j : 0]);
  for (int i = 0; i < d; i += 8) {
    F8 v[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      v[j] = load_kv<kFormat>(kv.k, index[j] * d + i);
      if constexpr (kFormat == KvFormat::i8) v[j] = v[j] * splat(kv.k_scale[index[j]]);
      if (!kAll && j >= live) v[j] = splat(0.0f);
    }
    transpose(v);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) store(keys + static_cast<size_t>(i + j) * kTile, v[j]);
  }
}

// Keys as [d][64], values as [64][d]; lanes past num_keys are zero up to the next multiple of 16 keys (K).
template <KvFormat kFormat>
void load_tile(const AttendArgs& args, const Tile& tile, const Scratch& scratch) {
  const KvView& kv = args.kv;
  const int d = kv.head_dim;
  int key = 0;
  for (; key + 8 <= tile.num_keys; key += 8) load_keys<kFormat, true>(args, tile.slots + key, 8, scratch.keys + key);
  if (key < tile.num_keys) {
    load_keys<kFormat, false>(args, tile.slots + key, tile.num_keys - key, scratch.keys + key);
    key += 8;
  }
  if (key % 16)
    for (int i = 0; i < d; ++i) store(scratch.keys + static_cast<size_t>(i) * kTile + key, splat(0.0f));
  for (key = 0; key < tile.num_keys; ++key) {
    const int64_t index = kv.vector_index(args.kv_head, tile.slots[key]);
    const F8 scale = splat(kFormat == KvFormat::i8 ? kv.v_scale[index] : 1.0f);
#pragma GCC unroll 4
    for (int i = 0; i < d; i += 8) {
      F8 v = load_kv<kFormat>(kv.v, index * d + i);
      if constexpr (kFormat == KvFormat::i8) v = v * scale;
      store(scratch.values + static_cast<size_t>(key) * d + i, v);
    }
  }
}

void prefetch_tile(const AttendArgs& args, const int32_t* slots, int num_keys) {
  const KvView& kv = args.kv;
  const int element = kv.format == KvFormat::f16 ? 2 : kv.format == KvFormat::f32 ? 4 : 1;
  const int64_t bytes = static_cast<int64_t>(kv.head_dim) * element;
  for (int j = 0; j < num_keys; ++j) {
    const int64_t at = kv.vector_index(args.kv_head, slots[j]) * bytes;
    for (int64_t i = 0; i < bytes; i += 64) {
      __builtin_prefetch(kv.k + at + i);
      __builtin_prefetch(kv.v + at + i);
    }
  }
}

// weights[r][key] = q[r] . k[key] for 8 * kVectors keys.
template <int kRows, int kVectors>
PHLOEM_INLINE void scores(const float* q, const float* keys, int d, float* weights) {
  F8 sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = splat(0.0f);
  for (int i = 0; i < d; ++i) {
    F8 k[kVectors];
    for (int v = 0; v < kVectors; ++v) k[v] = in_register(load(keys + static_cast<size_t>(i) * kTile + 8 * v));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F8 a = splat(q[static_cast<size_t>(r) * d + i]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(a, k[v], sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) store(weights + r * kTile + 8 * v, sums[r][v]);
}

// In place: weights = exp(weights - maximum) with keys at and past `limit` masked. Returns maximum and sum.
PHLOEM_INLINE void softmax_tile(float* weights, int limit, float* maximum, float* sum) {
  const int padded = (limit + 7) / 8 * 8;
  for (int key = limit; key < padded; ++key) weights[key] = kNegInf;
  F8 top = load(weights);
  for (int key = 8; key < padded; key += 8) top = max(top, load(weights + key));
  *maximum = max_lanes(top);
  const F8 shift = splat(*maximum);
  F8 total = {};
  for (int key = 0; key < padded; key += 8) {
    const F8 p = exp(load(weights + key) - shift);
    store(weights + key, p);
    total = total + p;
  }
  *sum = sum_lanes(total);
}

// Merges (maximum, denominator) `m, l` into a state's and returns the factors of old and new sums.
PHLOEM_INLINE void merge_heads(float* state_ml, float m, float l, float* keep, float* add) {
  const float top = state_ml[0] > m ? state_ml[0] : m;
  const F8 factors = exp(F8{state_ml[0] - top, m - top, 0, 0, 0, 0, 0, 0});
  *keep = factors[0];
  *add = factors[1];
  state_ml[0] = top;
  state_ml[1] = fma(state_ml[1], *keep, l * *add);
}

// state sums = state sums * keep + (weights . values) * add, over 8 * kVectors dimensions.
template <int kRows, int kVectors>
PHLOEM_INLINE void weighted_values(const float* weights, const float* values, int d, int num_keys, float* state,
                                   size_t stride, const float* keep, const float* add) {
  F8 sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
    for (int i = 0; i < kVectors; ++i) sums[r][i] = splat(0.0f);
  for (int key = 0; key < num_keys; ++key) {
    F8 v[kVectors];
    for (int i = 0; i < kVectors; ++i) v[i] = in_register(load(values + static_cast<size_t>(key) * d + 8 * i));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F8 p = splat(weights[r * kTile + key]);
      for (int i = 0; i < kVectors; ++i) sums[r][i] = fma(p, v[i], sums[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVectors; ++i) {
      float* at = state + r * stride + 8 * i;
      store(at, fma(load(at), splat(keep[r]), sums[r][i] * splat(add[r])));
    }
  }
}

// kRows query rows from `first` on attend the loaded tile.
template <int kRows>
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
  constexpr int kWide = kRows <= 3 ? 4 : 2;  // vectors at a time: enough chains to hide the latency of an addition
  const float* queries = scratch.queries + static_cast<size_t>(first) * d;
  int key = 0;
  for (; key + 8 * kWide <= most; key += 8 * kWide)
    scores<kRows, kWide>(queries, scratch.keys + key, d, scratch.weights + key);
  for (; key < most; key += 16) scores<kRows, 2>(queries, scratch.keys + key, d, scratch.weights + key);
  float keep[kRows], add[kRows];
  for (int r = 0; r < kRows; ++r) {
    float m, l, *weights = scratch.weights + r * kTile;
    softmax_tile(weights, limits[r], &m, &l);
    for (key = (limits[r] + 7) / 8 * 8; key < most; ++key) weights[key] = 0.0f;
    merge_heads(state + r * stride + d, m, l, keep + r, add + r);
  }
  int i = 0;
  for (; i + 8 * kWide <= d; i += 8 * kWide)
    weighted_values<kRows, kWide>(scratch.weights, scratch.values + i, d, most, state + i, stride, keep, add);
  for (; i + 16 <= d; i += 16)
    weighted_values<kRows, 2>(scratch.weights, scratch.values + i, d, most, state + i, stride, keep, add);
  for (; i < d; i += 8)
    weighted_values<kRows, 1>(scratch.weights, scratch.values + i, d, most, state + i, stride, keep, add);
}

void attend_tile(const AttendArgs& args, const Tile& tile, const Scratch& scratch, int query_begin, int query_end) {
  int i = query_begin;
  for (; i + kMaxRows <= query_end; i += kMaxRows) attend_rows<kMaxRows>(args, tile, scratch, i);
  switch (query_end - i) {
    case 5:
      return attend_rows<5>(args, tile, scratch, i);
    case 4:
      return attend_rows<4>(args, tile, scratch, i);
    case 3:
      return attend_rows<3>(args, tile, scratch, i);
    case 2:
      return attend_rows<2>(args, tile, scratch, i);
    case 1:
      return attend_rows<1>(args, tile, scratch, i);
    default:
      return;
  }
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
      const int32_t* slots = args.slot_table + args.seq_table_row[s] * args.ld_table + first_key;
      const int keys_left = args.positions[row_end - 1] + 1 - first_key;
      const Tile tile{slots, min_of(kTile, keys_left), first_key};
      if (args.kv.format == KvFormat::f16) load_tile<KvFormat::f16>(args, tile, scratch);
      if (args.kv.format == KvFormat::f32) load_tile<KvFormat::f32>(args, tile, scratch);
      if (args.kv.format == KvFormat::i8) load_tile<KvFormat::i8>(args, tile, scratch);
      if (keys_left > kTile) prefetch_tile(args, slots + kTile, min_of(kTile, keys_left - kTile));
      attend_tile(args, tile, scratch, (row - args.row_begin) * group, (row_end - args.row_begin) * group);
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
  float keep, add;
  merge_heads(into + d, from[d], from[d + 1], &keep, &add);
  for (int i = 0; i < d; i += 8) store(into + i, fma(load(into + i), splat(keep), load(from + i) * splat(add)));
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
  if (args.states) scratch.super_states = args.states;
  for (int row = args.row_begin; row < args.row_end; ++row) {
    std::memcpy(scratch.queries + static_cast<size_t>(row - args.row_begin) * group * d,
                args.q + row * args.ld + static_cast<int64_t>(args.kv_head) * group * d, sizeof(float) * group * d);
  }
  if (!args.states) reset_states(scratch.row_states, query_rows, d);
  for (int super = args.super_begin; super < args.super_end; ++super) {
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
