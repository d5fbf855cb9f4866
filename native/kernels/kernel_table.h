// The border between what a step does (decoder, attention plan, threads) and how one instruction set does it.
// Owns the argument records of the kernels and the table of their addresses. Must not know nanobind or threads.
//
// Padding: buffers of activations have rows padded to a multiple of kGroup columns; the padding is zero and stays
// zero, since packed weights are padded with zeros too. So no kernel has a tail in K or N.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phloem {

constexpr int kGroup = 32;         // weights and activations share one scale per this many values of K
constexpr int kPanel = 16;         // output columns that are packed together
constexpr int kTile = 64;          // keys of one attention tile, at absolute positions
constexpr int kTilesPerSuper = 4;  // tiles whose states are merged before they join the row's state
constexpr int kSuper = kTile * kTilesPerSuper;

enum class WeightFormat : uint8_t { q4, q4m, q8, f16, bf16, f32 };  // q4m: 4 bits with a minimum per group
enum class KvFormat : uint8_t { f16, f32, i8 };
enum class Activation : uint8_t { silu, gelu, gelu_tanh };

constexpr size_t element_bytes(KvFormat format) {
  return format == KvFormat::f16 ? 2 : format == KvFormat::f32 ? 4 : 1;
}

// A packed matrix [n, k]: panels of kPanel output columns (see packing.h for the bytes).
struct MatrixView {
  WeightFormat format;
  int n, k, groups;  // groups = padded k / kGroup
  size_t panel_bytes;
  const uint8_t* data;

  int panels() const { return (n + kPanel - 1) / kPanel; }
  bool is_quantised() const { return format <= WeightFormat::q8; }
};

// What the int8 values of a group stand for. A value that stands out from its group is left out of them and kept as a
// float, or it would cost the other 31 their precision.
struct ActGroup {
  float scale;
  float sum;  // scale * total
  float outlier;
  int32_t total;  // of the int8 values
};

// Rows of activations: float, or int8 with what belongs to it, or both.
struct ActView {
  float* f;          // [rows, ld]
  int8_t* q;         // [rows, ld]
  ActGroup* groups;  // [rows, ld / kGroup]
  // [ld / kGroup, rows]: place in the group plus one, 0 for none. Products look for them group by group; and threads
  // that quantise neighbouring columns do not write to the same cache line.
  uint8_t* outlier_at;
  int ld, rows;
};

struct GemmArgs {
  const MatrixView* w;
  ActView a;
  int row_begin, row_end, panel_begin, panel_end;
  float* out;  // [rows, ld_out], at least panels * kPanel columns
  int64_t ld_out;
  const float* bias;  // padded to panels, or null
  bool accumulate;    // out += result instead of out = result
};

// K and V of one layer. The cache is cut into segments of kSegment slots, each [layers, K and V, kv_heads, kSegment,
// d], so that the memory in use is as compact as the slots in use; `k` and `v` point at the layer's part of the first
// segment. int8 has one scale per vector, in the same order.
constexpr int kSegmentBits = 10;
constexpr int kSegment = 1 << kSegmentBits;

struct KvView {
  KvFormat format;
  uint8_t *k, *v;
  float *k_scale, *v_scale;
  int64_t segment_vectors;  // of a whole segment
  int num_kv_heads, head_dim;

  // Of a slot's vector in the first head.
  int64_t vector_index(int32_t slot) const {
    return (slot >> kSegmentBits) * segment_vectors + (slot & (kSegment - 1));
  }

  // With `head` as its first.
  KvView from_head(int head) const {
    KvView view = *this;
    const int64_t vectors = static_cast<int64_t>(head) * kSegment;
    const size_t bytes = vectors * head_dim * element_bytes(format);
    view.k += bytes;
    view.v += bytes;
    if (format == KvFormat::i8) {
      view.k_scale += vectors;
      view.v_scale += vectors;
    }
    return view;
  }
};

// Rows of one or more neighbouring sequences that attend together. `shared_tiles[s]` counts the leading full tiles
// that sequence s has in common with sequence s - 1.
struct AttendArgs {
  KvView kv;       // from the head on that is attended
  const float* q;  // [rows, ld], rotated and scaled by d^-1/2
  float* out;      // [rows, ld], heads * d columns
  int64_t ld;
  int num_heads, kv_head;
  int row_begin, row_end, seq_begin, seq_end;
  const int32_t *positions, *seq_row_start, *shared_tiles;
  const uint32_t* places;  // [seqs, ld_places]: vector_index of each position's slot
  int64_t ld_places;
  int super_begin, super_end;
  float* states;   // partial: each super's states of all query rows (attend_state_floats each); else null
  float* scratch;  // attend_scratch_floats
};

// Per query row: d sums, then maximum and denominator.
constexpr size_t attend_state_floats(int head_dim) { return static_cast<size_t>(head_dim) + 2; }
constexpr size_t attend_scratch_floats(int head_dim, int query_rows) {
  return 2 * static_cast<size_t>(kTile) * head_dim + 8 * static_cast<size_t>(kTile) +
         static_cast<size_t>(query_rows) * (2 * attend_state_floats(head_dim) + head_dim);
}

struct FoldArgs {
  const float* states;  // [supers, query rows, attend_state_floats]
  int64_t super_stride;
  int supers, query_rows, group;  // query row i: token row i / group, head i % group
  int row_begin, kv_head, head_dim;
  const int32_t* positions;
  float* out;
  int64_t ld;
  float* scratch;  // attend_state_floats
};

struct KernelTable {
  const char* name;
  void (*gemm)(const GemmArgs&);
  // out[i] = x[i] / rms(x) * weight[i]; n true columns, out padded to a group with zeros.
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
  // Columns [begin, begin + count) of one row of `a`, whole groups.
  void (*quantize_row)(const ActView& a, int row, int begin, int count);
  // gate[i] = act(gate[i]) * up[i]
  void (*gate)(Activation kind, float* gate, const float* up, int padded);
  // In place; half-split pairs; then every value times `factor`.
  void (*rope)(float* x, const float* cos, const float* sin, int head_dim, float factor);
  // Stores one rotated key (or one value) of head_dim floats in the first head of the view.
  void (*write_kv)(const KvView& kv, bool is_value, int32_t slot, const float* x);
  void (*gather_row)(const MatrixView& w, int row, float* out);
  void (*attend)(const AttendArgs&);
  void (*fold)(const FoldArgs&);
  // Runs the plainest loop of integer products in registers and returns how many operations (a multiply and an add
  // each count) that were: what no product can beat.
  int64_t (*count_peak)(int64_t rounds);
};

namespace portable {
const KernelTable& kernel_table();
}
namespace avx2 {
const KernelTable& kernel_table();
}
namespace avx512 {
const KernelTable& kernel_table();
}

}  // namespace phloem
