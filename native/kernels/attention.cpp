// Paged attention of many query rows over one K/V head, tile by tile.
//
// A tile is 64 keys at absolute positions. Its K and V are converted to float once (K transposed, so that a key is a
// lane) and shared by all query rows of the heads and sequences that see it; where these are few, it is converted on
// the way and kept nowhere. Per row and tile the state is (maximum, denominator, sums); four tiles merge in ascending
// order into a super's state, supers in ascending order into the row's. Each row does the same operations in the same
// order whatever shares its tiles: the score of a key adds its products in ascending dimension, the sums add keys in
// ascending order, masked keys weigh exactly zero.
#include "kernels/attention_tile.h"
#include "kernels/rows.h"

namespace phloem {
namespace PHLOEM_ISA {
namespace {

constexpr int kMaxRows = 6;

struct Scratch {
  float *keys, *values, *weights, *queries, *super_states, *row_states;
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
  if (first + 16 <= tile.num_next) {
    find_16_keys<true>(args, tile, kTile + first, next);
  } else {
    std::memcpy(next, from, sizeof next);
  }
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
        if (args.kv.format == KvFormat::f16) load_tile<KvFormat::f16>(args, tile, scratch.keys, scratch.values);
        if (args.kv.format == KvFormat::f32) load_tile<KvFormat::f32>(args, tile, scratch.keys, scratch.values);
        if (args.kv.format == KvFormat::i8) load_tile<KvFormat::i8>(args, tile, scratch.keys, scratch.values);
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
