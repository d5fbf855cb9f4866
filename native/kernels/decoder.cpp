#include "kernels/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace phloem {
namespace {

int padded(int n) { return (n + kGroup - 1) / kGroup * kGroup; }

constexpr int kRowsPerUnit = 4;               // of the row-wise phases
constexpr size_t kActBlockBytes = 160 << 10;  // activations that stay in a core's L2 beside a weight panel
constexpr int kChunksPerThread = 6;

}  // namespace

void Decoder::reserve(int num_rows) {
  const size_t rows = num_rows;
  x_.reserve(rows * ld_hidden_);
  act_.reserve(rows * ld_hidden_);
  q_.reserve(rows * ld_q_);
  k_.reserve(rows * ld_kv_);
  v_.reserve(rows * ld_kv_);
  attn_.reserve(rows * ld_q_);
  gate_.reserve(rows * ld_inter_);
  up_.reserve(rows * ld_inter_);
  quantised_.reserve(rows * ld_most_);
  scale_.reserve(rows * ld_most_ / kGroup);
  sum_.reserve(rows * ld_most_ / kGroup);
  const size_t threads = pool_.size();
  gemm_scratch_.reserve(threads * gemm_scratch_bytes(most_groups_));
  temp_.reserve(threads * ld_most_);
}

KvView Decoder::kv_view(int layer) const {
  const size_t element = config_.kv_format == KvFormat::f16 ? 2 : config_.kv_format == KvFormat::f32 ? 4 : 1;
  const size_t vectors = static_cast<size_t>(config_.num_kv_heads) * config_.num_slots;
  const size_t layer_bytes = vectors * config_.head_dim * element;
  KvView kv{};
  kv.format = config_.kv_format;
  kv.k = kv_.data() + layer * layer_bytes;
  kv.v = kv_.data() + (config_.num_layers + layer) * layer_bytes;
  if (config_.kv_format == KvFormat::i8) {
    auto* scales = reinterpret_cast<float*>(kv_scales_.data());
    kv.k_scale = scales + layer * vectors;
    kv.v_scale = scales + (config_.num_layers + layer) * vectors;
  }
  kv.num_slots = config_.num_slots;
  kv.num_kv_heads = config_.num_kv_heads;
  kv.head_dim = config_.head_dim;
  return kv;
}

void Decoder::step(const StepRows& rows, const int32_t* logit_rows, int num_logits, float* logits, int64_t ld_logits) {
  check_ready();
  check_rows(rows, logit_rows, num_logits);
  if (rows.num_rows == 0) return;
  reserve(std::max(rows.num_rows, num_logits));
  plan_attention(
      rows, {config_.num_heads, config_.num_kv_heads, config_.head_dim, pool_.size(), config_.group_shared_prefixes},
      plan_);
  attend_scratch_stride_ = attend_scratch_floats(config_.head_dim, plan_.most_query_rows);
  attend_scratch_.reserve(attend_scratch_stride_ * pool_.size());
  states_.reserve(plan_.state_floats);
  const size_t counters = plan_.blocks.size() * config_.num_kv_heads;
  if (finished_.size() < counters) finished_ = std::vector<std::atomic<int>>(counters);

  pool_.run([&](Member& member) {
    const MatrixView& embed = embed_->view();
    member.for_each(rows.num_rows, [&](int row) {
      kernels_.gather_row(embed, rows.token_ids[row], x_.data() + static_cast<size_t>(row) * ld_hidden_);
    });
    for (int layer = 0; layer < config_.num_layers; ++layer) forward_layer(member, layer, rows);
    normalise(member, logit_rows, num_logits, final_norm_, !head_.weight->view().is_quantised());
    const ActView a{act_.data(), quantised_.data(), scale_.data(), sum_.data(), ld_hidden_};
    multiply(member, {{&head_, a, logits, ld_logits, false}}, num_logits);
  });
}

void Decoder::forward_layer(Member& member, int index, const StepRows& rows) {
  const DecoderLayer& layer = layers_[index];
  const int m = rows.num_rows;
  const auto is_float = [](const Linear& linear) { return !linear.weight->view().is_quantised(); };
  const ActView hidden{act_.data(), quantised_.data(), scale_.data(), sum_.data(), ld_hidden_};
  normalise(member, nullptr, m, layer.attn_norm, is_float(layer.q) || is_float(layer.k) || is_float(layer.v));
  multiply(member,
           {{&layer.q, hidden, q_.data(), ld_q_, false},
            {&layer.k, hidden, k_.data(), ld_kv_, false},
            {&layer.v, hidden, v_.data(), ld_kv_, false}},
           m);
  attention(member, layer, kv_view(index), rows);
  const ActView attended{attn_.data(), quantised_.data(), scale_.data(), sum_.data(), ld_q_};
  multiply(member, {{&layer.o, attended, x_.data(), ld_hidden_, true}}, m);

  normalise(member, nullptr, m, layer.mlp_norm, is_float(layer.gate) || is_float(layer.up));
  multiply(member,
           {{&layer.gate, hidden, gate_.data(), ld_inter_, false}, {&layer.up, hidden, up_.data(), ld_inter_, false}},
           m);
  const ActView gated{gate_.data(), quantised_.data(), scale_.data(), sum_.data(), ld_inter_};
  member.for_each(m, [&](int row) {
    const size_t at = static_cast<size_t>(row) * ld_inter_;
    kernels_.gate(config_.activation, gated.f + at, up_.data() + at, ld_inter_);
    kernels_.quantize_row(gated.f + at, ld_inter_, gated.q + at, gated.scale + at / kGroup, gated.sum + at / kGroup);
  });
  multiply(member, {{&layer.down, gated, x_.data(), ld_hidden_, true}}, m);
}

void Decoder::attention(Member& member, const DecoderLayer& layer, const KvView& kv, const StepRows& rows) {
  // All rows write before any attends: sequences of one step may read each other's slots.
  member.for_each(rows.num_rows, [&](int row) {
    rotate_and_write(layer, kv, rows, row, temp_.data() + static_cast<size_t>(member.index()) * ld_most_);
  });
  member.for_each(static_cast<int>(plan_.units.size()),
                  [&](int i) { attend_unit(plan_.units[i], kv, rows, member.index()); });
  if (!layer.o.weight->view().is_quantised()) return;
  member.for_each(rows.num_rows, [&](int row) {
    const size_t at = static_cast<size_t>(row) * ld_q_;
    kernels_.quantize_row(attn_.data() + at, ld_q_, quantised_.data() + at, scale_.data() + at / kGroup,
                          sum_.data() + at / kGroup);
  });
}

void Decoder::rotate_and_write(const DecoderLayer& layer, const KvView& kv, const StepRows& rows, int row,
                               float* temp) {
  const int d = config_.head_dim;
  const float* cos = cos_.data() + static_cast<size_t>(rows.positions[row]) * (d / 2);
  const float* sin = sin_.data() + static_cast<size_t>(rows.positions[row]) * (d / 2);
  const auto rotate = [&](float* head, const std::vector<float>& norm, float factor) {
    if (!norm.empty()) {
      std::memset(temp, 0, sizeof(float) * padded(d));
      std::memcpy(temp, head, sizeof(float) * d);
      kernels_.rms_norm(temp, norm.data(), config_.rms_norm_eps, d, temp);
      std::memcpy(head, temp, sizeof(float) * d);
    }
    kernels_.rope(head, cos, sin, d, factor);
  };
  float* q = q_.data() + static_cast<size_t>(row) * ld_q_;
  float* k = k_.data() + static_cast<size_t>(row) * ld_kv_;
  const float* v = v_.data() + static_cast<size_t>(row) * ld_kv_;
  const float factor = 1.0f / std::sqrt(static_cast<float>(d));
  for (int head = 0; head < config_.num_heads; ++head) rotate(q + head * d, layer.q_norm, factor);
  if (rows.write_slots[row] < 0) return;
  for (int head = 0; head < config_.num_kv_heads; ++head) {
    rotate(k + head * d, layer.k_norm, 1.0f);
    kernels_.write_kv(kv, head, rows.write_slots[row], k + head * d, v + head * d);
  }
}

void Decoder::attend_unit(const AttentionUnit& unit, const KvView& kv, const StepRows& rows, int thread) {
  const AttentionBlock& block = plan_.blocks[unit.block];
  const int group = config_.num_heads / config_.num_kv_heads;
  const int64_t query_rows = static_cast<int64_t>(block.row_end - block.row_begin) * group;
  const int64_t super_stride = query_rows * static_cast<int64_t>(attend_state_floats(config_.head_dim));
  float* states =
      block.split ? states_.data() + block.state_offset + unit.kv_head * block.supers * super_stride : nullptr;
  float* scratch = attend_scratch_.data() + attend_scratch_stride_ * thread;
  AttendArgs args{};
  args.kv = kv;
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
  args.seq_table_row = rows.seq_table_row;
  args.slot_table = rows.slot_table;
  args.shared_tiles = plan_.shared_tiles.data();
  args.ld_table = rows.ld_table;
  args.super_begin = unit.super_begin;
  args.super_end = unit.super_end;
  args.states = states ? states + unit.super_begin * super_stride : nullptr;
  args.scratch = scratch;
  kernels_.attend(args);
  if (!block.split) return;
  std::atomic<int>& finished = finished_[static_cast<size_t>(unit.block) * config_.num_kv_heads + unit.kv_head];
  if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < block.supers) return;
  finished.store(0, std::memory_order_relaxed);
  kernels_.fold({states, super_stride, block.supers, static_cast<int>(query_rows), group, block.row_begin, unit.kv_head,
                 config_.head_dim, rows.positions, attn_.data(), ld_q_, scratch});
}

void Decoder::normalise(Member& member, const int32_t* picked, int num_rows, const std::vector<float>& weight,
                        bool as_float) {
  member.for_each(num_rows, [&](int row) {
    const size_t at = static_cast<size_t>(row) * ld_hidden_;
    float* out = as_float ? act_.data() + at : temp_.data() + static_cast<size_t>(member.index()) * ld_most_;
    const float* x = x_.data() + static_cast<size_t>(picked ? picked[row] : row) * ld_hidden_;
    kernels_.rms_norm(x, weight.data(), config_.rms_norm_eps, config_.hidden_size, out);
    kernels_.quantize_row(out, ld_hidden_, quantised_.data() + at, scale_.data() + at / kGroup,
                          sum_.data() + at / kGroup);
  });
}

void Decoder::multiply(Member& member, const std::vector<Task>& tasks, int num_rows) {
  struct Cut {
    int row_blocks, rows, chunks, panels;
  };
  constexpr size_t kMostTasks = 3;
  Cut cuts[kMostTasks];
  int total = 0, total_panels = 0;
  for (const Task& task : tasks) total_panels += task.linear->weight->view().panels();
  const int panels = std::max(1, total_panels / (kChunksPerThread * member.size()));
  for (size_t i = 0; i < tasks.size(); ++i) {
    const MatrixView& w = tasks[i].linear->weight->view();
    const size_t row_bytes = static_cast<size_t>(tasks[i].a.ld) * (w.is_quantised() ? 1 : 4);
    const int most = std::max(48, static_cast<int>(kActBlockBytes / row_bytes / 12 * 12));
    const int row_blocks = (num_rows + most - 1) / most;
    cuts[i] = {row_blocks, most, (w.panels() + panels - 1) / panels, panels};
    total += cuts[i].row_blocks * cuts[i].chunks;
  }
  uint8_t* scratch = gemm_scratch_.data() + gemm_scratch_bytes(most_groups_) * member.index();
  member.for_each(total, [&](int unit) {
    size_t i = 0;
    for (; unit >= cuts[i].row_blocks * cuts[i].chunks; ++i) unit -= cuts[i].row_blocks * cuts[i].chunks;
    const Task& task = tasks[i];
    const MatrixView& w = task.linear->weight->view();
    const int row = unit / cuts[i].chunks * cuts[i].rows, panel = unit % cuts[i].chunks * cuts[i].panels;
    const float* bias = task.linear->bias.empty() ? nullptr : task.linear->bias.data();
    kernels_.gemm({&w, task.a, row, std::min(row + cuts[i].rows, num_rows), panel,
                   std::min(panel + cuts[i].panels, w.panels()), task.out, task.ld_out, bias, task.accumulate,
                   scratch});
  });
}

}  // namespace phloem
