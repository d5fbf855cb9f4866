#include "kernels/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace phloem {
namespace {

constexpr size_t kActBlockBytes = 160 << 10;  // activations that stay in a core's L2 beside a weight panel
constexpr int kChunksPerThread = 3;           // so that the last chunks even out; each begins with a wait for memory
constexpr int kNormRows = 16;                 // normalised in one go: neighbours share cache lines
constexpr int kLocalRows = 4;                 // up to here every thread normalises all rows for itself

int padded(int n, int to) { return (n + to - 1) / to * to; }

}  // namespace

// How a product is shared out: unit = row block * chunks + chunk of panels.
struct Decoder::Cut {
  int rows, row_blocks, panels, chunks;

  int units() const { return row_blocks * chunks; }
  int row_begin(int unit) const { return unit / chunks * rows; }
  int panel_begin(int unit) const { return unit % chunks * panels; }
};

// The normalised input of one product as a thread sees it.
class Decoder::NormedInput {
 public:
  NormedInput(Decoder& decoder, Member& member, const int32_t* picked, int num_rows, const std::vector<float>& weight)
      : decoder_(decoder), picked_(picked), num_rows_(num_rows), weight_(weight), ready_(num_rows > kLocalRows) {
    if (ready_) {
      view_ = decoder.normed_rows(member, picked, num_rows, weight);
      return;
    }
    const size_t ld = decoder.ld_hidden_, at = static_cast<size_t>(member.index()) * kLocalRows * ld;
    view_ = decoder.local_quantised_.view(decoder.local_.data() + at, decoder.ld_hidden_, num_rows, at);
  }

  // Only inside a unit: until its phase ends nobody changes x_.
  const ActView& get() {
    if (!ready_) {
      for (int row = 0; row < num_rows_; ++row)
        decoder_.norm_row(decoder_.x_.data() + static_cast<size_t>(picked_ ? picked_[row] : row) * view_.ld, weight_,
                          view_, row);
      ready_ = true;
    }
    return view_;
  }

 private:
  Decoder& decoder_;
  const int32_t* picked_;
  int num_rows_;
  const std::vector<float>& weight_;
  bool ready_;
  ActView view_{};
};

void Decoder::reserve(int num_rows) {
  const size_t rows = num_rows, threads = pool_.size();
  x_.reserve(rows * ld_hidden_);
  act_.reserve(rows * ld_hidden_);
  act_quantised_.reserve(rows * ld_hidden_);
  q_.reserve(rows * ld_q_);
  k_.reserve(rows * ld_kv_);
  v_.reserve(rows * ld_kv_);
  attn_.reserve(rows * ld_q_);
  gate_.reserve(rows * ld_inter_);
  up_.reserve(rows * ld_inter_);
  quantised_.reserve(rows * ld_most_);
  temp_.reserve(threads * padded(config_.head_dim, kGroup));
  local_.reserve(threads * kLocalRows * ld_hidden_);
  local_quantised_.reserve(threads * kLocalRows * ld_hidden_);
}

KvView Decoder::kv_view(int layer) const {
  const size_t vectors = static_cast<size_t>(config_.num_kv_heads) * kSegment;  // of K, or V, of a layer and segment
  const size_t part = vectors * config_.head_dim * element_bytes(config_.kv_format);
  KvView kv{};
  kv.format = config_.kv_format;
  kv.k = kv_.data() + 2 * layer * part;
  kv.v = kv.k + part;
  if (config_.kv_format == KvFormat::i8) {
    kv.k_scale = reinterpret_cast<float*>(kv_scales_.data()) + 2 * layer * vectors;
    kv.v_scale = kv.k_scale + vectors;
  }
  kv.segment_vectors = static_cast<int64_t>(2 * config_.num_layers * vectors);
  kv.num_kv_heads = config_.num_kv_heads;
  kv.head_dim = config_.head_dim;
  return kv;
}

void Decoder::step(const StepRows& rows, const int32_t* logit_rows, int num_logits, float* logits, int64_t ld_logits,
                   const HiddenRows& hidden) {
  check_ready();
  check_rows(rows, logit_rows, num_logits, hidden);
  if (rows.num_rows == 0) return;
  pool_.settle();
  reserve(std::max(rows.num_rows, num_logits));
  plan_attention(
      rows, {config_.num_heads, config_.num_kv_heads, config_.head_dim, pool_.size(), config_.group_shared_prefixes},
      plan_);
  attend_scratch_stride_ = attend_scratch_floats(config_.head_dim, plan_.most_query_rows);
  attend_scratch_.reserve(attend_scratch_stride_ * pool_.size());
  states_.reserve(plan_.state_floats);
  places_.reserve(rows.num_seqs * rows.ld_table);
  const size_t counters = plan_.blocks.size() * config_.num_kv_heads;
  if (finished_.size() < counters) finished_ = std::vector<std::atomic<int>>(counters);
  pool_.run([=, this](Member& member) { forward(member, rows, logit_rows, num_logits, logits, ld_logits, hidden); });
}

void Decoder::forward(Member& member, const StepRows& rows, const int32_t* logit_rows, int num_logits, float* logits,
                      int64_t ld_logits, const HiddenRows& hidden) {
  member.for_each(rows.num_rows, [&](int row) {
    kernels_.gather_row(embed_->view(), rows.token_ids[row], x_.data() + static_cast<size_t>(row) * ld_hidden_);
  });
  member.for_each(rows.num_seqs, [&](int s) { find_places(rows, s); });
  for (int i = 0; i < config_.num_layers; ++i) {
    const DecoderLayer& layer = layers_[i];
    const KvView kv = kv_view(i);
    project(member, layer, kv, rows);
    attention(member, layer, kv, rows);
    add_product(member, layer.o, quantised_.view(attn_.data(), ld_q_, rows.num_rows), rows.num_rows);
    gated(member, layer, rows.num_rows);
    add_product(member, layer.down, quantised_.view(gate_.data(), ld_inter_, rows.num_rows), rows.num_rows);
  }
  member.for_each(hidden.count, [&](int i) {
    kernels_.rms_norm(x_.data() + static_cast<size_t>(hidden.rows[i]) * ld_hidden_, final_norm_.data(),
                      config_.rms_norm_eps, config_.hidden_size, hidden.out + i * hidden.ld);
  });
  NormedInput input(*this, member, logit_rows, num_logits, final_norm_);
  const Cut shares = cut(head_, ld_hidden_, num_logits, head_.weight->view().panels(), 1);
  member.for_each(shares.units(),
                  [&](int unit) { product(head_, input.get(), shares, unit, num_logits, logits, ld_logits, false); });
}

// Once for all layers and heads.
void Decoder::find_places(const StepRows& rows, int seq) {
  const KvView kv = kv_view(0);
  const int32_t* slots = rows.slot_table + rows.seq_table_row[seq] * rows.ld_table;
  uint32_t* places = places_.data() + seq * rows.ld_table;
  const int length = rows.positions[rows.seq_row_start[seq + 1] - 1] + 1;
  for (int i = 0; i < length; ++i) places[i] = static_cast<uint32_t>(kv.vector_index(slots[i]));
}

// Queries, keys and values of all rows; rotates each head as soon as it is there and writes K/V to the cache. All rows
// write before any attends: sequences of one step may read each other's slots.
void Decoder::project(Member& member, const DecoderLayer& layer, const KvView& kv, const StepRows& rows) {
  const int d = config_.head_dim, m = rows.num_rows;
  const int align = std::lcm(d, kPanel) / kPanel;  // panels that hold whole heads
  const float factor = 1.0f / std::sqrt(static_cast<float>(d));
  NormedInput input(*this, member, nullptr, m, layer.attn_norm);
  const Linear* linears[3] = {&layer.q, &layer.k, &layer.v};
  float* const outs[3] = {q_.data(), k_.data(), v_.data()};
  const int ld_outs[3] = {ld_q_, ld_kv_, ld_kv_};
  const int total = layer.q.weight->view().panels() + 2 * layer.k.weight->view().panels();
  Cut shares[3];
  for (int i = 0; i < 3; ++i) shares[i] = cut(*linears[i], ld_hidden_, m, total, align);
  const int q_units = shares[0].units(), k_units = shares[1].units();
  member.for_each(q_units + k_units + shares[2].units(), [&](int unit) {
    const int part = unit < q_units ? 0 : unit < q_units + k_units ? 1 : 2;
    if (part > 0) unit -= q_units;
    if (part > 1) unit -= k_units;
    const Cut& share = shares[part];
    product(*linears[part], input.get(), share, unit, m, outs[part], ld_outs[part], false);
    const int head_begin = share.panel_begin(unit) * kPanel / d;
    const int head_end = std::min(part ? config_.num_kv_heads : config_.num_heads,
                                  (share.panel_begin(unit) + share.panels) * kPanel / d);
    const int row_begin = share.row_begin(unit), row_end = std::min(row_begin + share.rows, m);
    for (int row = row_begin; row < row_end; ++row) {
      const int32_t slot = rows.write_slots[row];
      if (part > 0 && slot < 0) continue;
      for (int head = head_begin; head < head_end; ++head) {
        float* x = outs[part] + static_cast<size_t>(row) * ld_outs[part] + head * d;
        if (part == 0) rotate(x, layer.q_norm, rows.positions[row], factor, member.index());
        if (part == 1) rotate(x, layer.k_norm, rows.positions[row], 1.0f, member.index());
        if (part > 0) kernels_.write_kv(kv.from_head(head), part == 2, slot, x);
      }
    }
  });
}

void Decoder::rotate(float* head, const std::vector<float>& norm, int position, float factor, int thread) {
  const int d = config_.head_dim;
  if (!norm.empty()) {
    float* temp = temp_.data() + static_cast<size_t>(thread) * padded(d, kGroup);
    std::memcpy(temp, head, sizeof(float) * d);
    std::memset(temp + d, 0, sizeof(float) * (padded(d, kGroup) - d));
    kernels_.rms_norm(temp, norm.data(), config_.rms_norm_eps, d, temp);
    std::memcpy(head, temp, sizeof(float) * d);
  }
  const size_t at = static_cast<size_t>(position) * (d / 2);
  kernels_.rope(head, cos_.data() + at, sin_.data() + at, d, factor);
}

void Decoder::attention(Member& member, const DecoderLayer& layer, const KvView& kv, const StepRows& rows) {
  const int columns = config_.num_heads / config_.num_kv_heads * config_.head_dim;
  const bool quantise = layer.o.weight->view().is_quantised();
  const bool by_head = quantise && columns % kGroup == 0;  // else a group of values straddles K/V heads
  const ActView a = quantised_.view(attn_.data(), ld_q_, rows.num_rows);
  member.for_each(static_cast<int>(plan_.units.size()), [&](int i) {
    const AttentionUnit& unit = plan_.units[i];
    if (!attend_unit(unit, kv, rows, member.index()) || !by_head) return;
    const AttentionBlock& block = plan_.blocks[unit.block];
    for (int row = block.row_begin; row < block.row_end; ++row)
      quantize_columns(a, row, unit.kv_head * columns, (unit.kv_head + 1) * columns);
  });
  if (quantise && !by_head) member.for_each(rows.num_rows, [&](int row) { quantize_columns(a, row, 0, ld_q_); });
}

bool Decoder::attend_unit(const AttentionUnit& unit, const KvView& kv, const StepRows& rows, int thread) {
  const AttentionBlock& block = plan_.blocks[unit.block];
  const int group = config_.num_heads / config_.num_kv_heads;
  const int64_t query_rows = static_cast<int64_t>(block.row_end - block.row_begin) * group;
  const int64_t super_stride = query_rows * static_cast<int64_t>(attend_state_floats(config_.head_dim));
  float* states =
      block.parts > 1 ? states_.data() + block.state_offset + unit.kv_head * block.supers * super_stride : nullptr;
  float* scratch = attend_scratch_.data() + attend_scratch_stride_ * thread;
  AttendArgs args{};
  args.kv = kv.from_head(unit.kv_head);
  args.q = q_.data();
  args.out = attn_.data();
  args.ld = ld_q_;
  args.num_heads = config_.num_heads;
  args.kv_head = unit.kv_head;
  args.row_begin = block.row_begin;
  args.row_end = block.row_end;
  args.seq_begin = block.seq_begin;
  args.seq_end = block.seq_end;
  args.positions = rows.positions;
  args.seq_row_start = rows.seq_row_start;
  args.shared_tiles = plan_.shared_tiles.data();
  args.places = places_.data();
  args.ld_places = rows.ld_table;
  args.super_begin = unit.super_begin;
  args.super_end = unit.super_end;
  args.states = states ? states + unit.super_begin * super_stride : nullptr;
  args.scratch = scratch;
  kernels_.attend(args);
  if (block.parts == 1) return true;
  std::atomic<int>& finished = finished_[static_cast<size_t>(unit.block) * config_.num_kv_heads + unit.kv_head];
  if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < block.parts) return false;
  finished.store(0, std::memory_order_relaxed);
  kernels_.fold({states, super_stride, block.supers, static_cast<int>(query_rows), group, block.row_begin, unit.kv_head,
                 config_.head_dim, rows.positions, attn_.data(), ld_q_, scratch});
  return true;
}

// gate_ = act(x gate^T) * (x up^T), quantised for the down projection, in pieces of whole groups.
void Decoder::gated(Member& member, const DecoderLayer& layer, int num_rows) {
  NormedInput input(*this, member, nullptr, num_rows, layer.mlp_norm);
  const int panels = layer.gate.weight->view().panels();
  const Cut share = cut(layer.gate, ld_hidden_, num_rows, panels, kGroup / kPanel);
  const bool quantise = layer.down.weight->view().is_quantised();
  const ActView out = quantised_.view(gate_.data(), ld_inter_, num_rows);
  member.for_each(share.units(), [&](int unit) {
    product(layer.gate, input.get(), share, unit, num_rows, gate_.data(), ld_inter_, false);
    product(layer.up, input.get(), share, unit, num_rows, up_.data(), ld_inter_, false);
    const int begin = share.panel_begin(unit) * kPanel, end = std::min(begin + share.panels * kPanel, ld_inter_);
    const int row_end = std::min(share.row_begin(unit) + share.rows, num_rows);
    for (int row = share.row_begin(unit); row < row_end; ++row) {
      const size_t at = static_cast<size_t>(row) * ld_inter_ + begin;
      kernels_.gate(config_.activation, gate_.data() + at, up_.data() + at, end - begin);
      if (quantise) quantize_columns(out, row, begin, end);
    }
  });
}

void Decoder::add_product(Member& member, const Linear& linear, const ActView& input, int num_rows) {
  const Cut share = cut(linear, input.ld, num_rows, linear.weight->view().panels(), 1);
  member.for_each(share.units(),
                  [&](int unit) { product(linear, input, share, unit, num_rows, x_.data(), ld_hidden_, true); });
}

void Decoder::quantize_columns(const ActView& a, int row, int begin, int end) {
  kernels_.quantize_row(a, row, begin, end - begin);
}

ActView Decoder::normed_rows(Member& member, const int32_t* picked, int num_rows, const std::vector<float>& weight) {
  const ActView a = act_quantised_.view(act_.data(), ld_hidden_, num_rows);
  member.for_each((num_rows + kNormRows - 1) / kNormRows, [&](int unit) {
    const int end = std::min((unit + 1) * kNormRows, num_rows);
    for (int row = unit * kNormRows; row < end; ++row)
      norm_row(x_.data() + static_cast<size_t>(picked ? picked[row] : row) * ld_hidden_, weight, a, row);
  });
  return a;
}

void Decoder::norm_row(const float* x, const std::vector<float>& weight, const ActView& a, int row) {
  kernels_.rms_norm(x, weight.data(), config_.rms_norm_eps, config_.hidden_size, a.f + static_cast<size_t>(row) * a.ld);
  quantize_columns(a, row, 0, a.ld);
}

Decoder::Cut Decoder::cut(const Linear& linear, int ld, int num_rows, int total_panels, int align) const {
  const MatrixView& w = linear.weight->view();
  const size_t row_bytes = static_cast<size_t>(ld) * (w.is_quantised() ? 1 : 4);
  const int rows = std::max(48, static_cast<int>(kActBlockBytes / row_bytes / 12 * 12));
  const int panels = padded(std::max(1, total_panels / (kChunksPerThread * pool_.size())), align);
  return {rows, (num_rows + rows - 1) / rows, panels, (w.panels() + panels - 1) / panels};
}

void Decoder::product(const Linear& linear, const ActView& a, const Cut& cut, int unit, int num_rows, float* out,
                      int64_t ld_out, bool accumulate) {
  const MatrixView& w = linear.weight->view();
  const int row = cut.row_begin(unit), panel = cut.panel_begin(unit);
  kernels_.gemm({&w, a, row, std::min(row + cut.rows, num_rows), panel, std::min(panel + cut.panels, w.panels()), out,
                 ld_out, linear.bias.empty() ? nullptr : linear.bias.data(), accumulate});
}

}  // namespace phloem
