// Decoder: construction, weights by name, and the checks at its border.
#include <algorithm>
#include <stdexcept>

#include "kernels/decoder.h"

namespace phloem {
namespace {

int padded(int n, int to) { return (n + to - 1) / to * to; }

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

void require(bool holds, const std::string& message) {
  if (!holds) fail(message);
}

// "layers.7.attn_norm" -> (7, "attn_norm"); a name without a layer -> (-1, name).
std::pair<int, std::string> split_name(const std::string& name) {
  const std::string prefix = "layers.";
  if (name.compare(0, prefix.size(), prefix) != 0) return {-1, name};
  size_t end = prefix.size();
  int layer = 0;
  for (; end < name.size() && name[end] >= '0' && name[end] <= '9' && layer < 1 << 20; ++end)
    layer = layer * 10 + (name[end] - '0');
  if (end == prefix.size() || end >= name.size() || name[end] != '.') fail("unknown weight " + name);
  return {layer, name.substr(end + 1)};
}

}  // namespace

Decoder::Decoder(const DecoderConfig& config, const KernelTable& kernels)
    : config_(config), kernels_(kernels), layers_(config.num_layers), pool_(config.num_threads) {
  require(config.vocab_size > 0 && config.hidden_size > 0 && config.intermediate_size > 0 && config.num_layers > 0,
          "vocabulary, hidden size, intermediate size and layers must be positive");
  require(config.num_kv_heads > 0 && config.num_heads > 0 && config.num_heads % config.num_kv_heads == 0,
          "the number of heads must be a multiple of the number of K/V heads");
  require(config.head_dim > 0 && config.head_dim % 8 == 0 && config.head_dim <= 1024,
          "head_dim must be a multiple of 8 and at most 1024");
  require(config.num_slots > 0 && config.num_slots <= INT32_MAX, "num_slots must be from 1 to 2^31-1");
  ld_hidden_ = padded(config.hidden_size, kGroup);
  ld_q_ = padded(config.num_heads * config.head_dim, kGroup);
  ld_kv_ = padded(config.num_kv_heads * config.head_dim, kGroup);
  ld_inter_ = padded(config.intermediate_size, kGroup);
  ld_most_ = std::max({ld_hidden_, ld_q_, ld_inter_, padded(config.head_dim, kGroup)});
  const size_t segments = (static_cast<size_t>(config.num_slots) + kSegment - 1) / kSegment;
  const size_t vectors = segments * 2 * config.num_layers * config.num_kv_heads * kSegment;
  require(vectors <= UINT32_MAX, "num_slots is too large: at most 2^32 K/V vectors can be counted");
  kv_ = ZeroedMemory(vectors * config.head_dim * element_bytes(config.kv_format));
  if (config.kv_format == KvFormat::i8) kv_scales_ = ZeroedMemory(vectors * sizeof(float));
}

Linear* Decoder::find_linear(const std::string& name, int* n, int* k) {
  const int hidden = config_.hidden_size, inter = config_.intermediate_size;
  const int q = config_.num_heads * config_.head_dim, kv = config_.num_kv_heads * config_.head_dim;
  const auto [index, part] = split_name(name);
  if (index < 0 && part == "head") {
    *n = config_.vocab_size, *k = hidden;
    return &head_;
  }
  if (index < 0 || index >= config_.num_layers) fail("unknown weight " + name);
  DecoderLayer& layer = layers_[index];
  const struct {
    const char* name;
    Linear* linear;
    int n, k;
  } all[] = {{"q", &layer.q, q, hidden},           {"k", &layer.k, kv, hidden},
             {"v", &layer.v, kv, hidden},          {"o", &layer.o, hidden, q},
             {"gate", &layer.gate, inter, hidden}, {"up", &layer.up, inter, hidden},
             {"down", &layer.down, hidden, inter}};
  for (const auto& entry : all) {
    if (part != entry.name) continue;
    *n = entry.n, *k = entry.k;
    return entry.linear;
  }
  fail("unknown weight " + name);
}

void Decoder::set_matrix(const std::string& name, std::shared_ptr<const PackedMatrix> matrix) {
  const MatrixView& view = matrix->view();
  int n = config_.vocab_size, k = config_.hidden_size;
  Linear* linear = name == "embed" ? nullptr : find_linear(name, &n, &k);
  if (view.n != n || view.k != k)
    fail(name + ": expected [" + std::to_string(n) + ", " + std::to_string(k) + "], got [" + std::to_string(view.n) +
         ", " + std::to_string(view.k) + "]");
  if (linear) {
    linear->weight = std::move(matrix);
    return;
  }
  if (!head_.weight) head_.weight = matrix;  // tied unless a head follows
  embed_ = std::move(matrix);
}

std::vector<float>* Decoder::find_vector(const std::string& name, int* count, int* padding) {
  *count = config_.hidden_size, *padding = kGroup;
  const auto [index, part] = split_name(name);
  if (index < 0 && part == "final_norm") return &final_norm_;
  if (index < 0 || index >= config_.num_layers) fail("unknown weight " + name);
  DecoderLayer& layer = layers_[index];
  if (part == "attn_norm") return &layer.attn_norm;
  if (part == "mlp_norm") return &layer.mlp_norm;
  if (part == "q_norm" || part == "k_norm") {
    *count = config_.head_dim;
    return part == "q_norm" ? &layer.q_norm : &layer.k_norm;
  }
  const std::string suffix = "_bias";
  if (part.size() <= suffix.size() || part.substr(part.size() - suffix.size()) != suffix)
    fail("unknown weight " + name);
  int k;
  *padding = kPanel;
  return &find_linear(name.substr(0, name.size() - suffix.size()), count, &k)->bias;
}

void Decoder::set_vector(const std::string& name, const float* values, int count) {
  int expected, padding;
  std::vector<float>* vector = find_vector(name, &expected, &padding);
  if (count != expected)
    fail(name + ": expected " + std::to_string(expected) + " values, got " + std::to_string(count));
  vector->assign(values, values + count);
  vector->resize(padded(count, padding), 0.0f);
}

void Decoder::set_rope(const float* cos, const float* sin, int num_positions) {
  const size_t count = static_cast<size_t>(num_positions) * (config_.head_dim / 2);
  cos_.assign(cos, cos + count);
  sin_.assign(sin, sin + count);
  num_positions_ = num_positions;
}

void Decoder::check_ready() const {
  bool complete = embed_ && head_.weight && !final_norm_.empty() && num_positions_ > 0;
  for (const DecoderLayer& layer : layers_) {
    for (const Linear* linear : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down})
      complete = complete && linear->weight;
    complete = complete && !layer.attn_norm.empty() && !layer.mlp_norm.empty();
  }
  require(complete, "weights are missing: set every matrix, norm and the rotary tables before the first step");
}

void Decoder::check_rows(const StepRows& rows, const int32_t* logit_rows, int num_logits,
                         const HiddenRows& hidden) const {
  const auto check = [](bool holds, const char* what, int value, int row) {
    if (!holds) fail(std::string(what) + " is wrong: got " + std::to_string(value) + " at " + std::to_string(row));
  };
  require(rows.num_seqs > 0 || rows.num_rows == 0, "rows without a sequence");
  if (rows.num_seqs > 0) {
    check(rows.seq_row_start[0] == 0, "seq_row_start", rows.seq_row_start[0], 0);
    check(rows.seq_row_start[rows.num_seqs] == rows.num_rows, "seq_row_start", rows.num_rows, rows.num_seqs);
  }
  for (int s = 0; s < rows.num_seqs; ++s) {
    const int begin = rows.seq_row_start[s], end = rows.seq_row_start[s + 1];
    check(begin < end && end <= rows.num_rows, "seq_row_start", end, s + 1);
    check(rows.seq_table_row[s] >= 0 && rows.seq_table_row[s] < rows.num_tables, "seq_table_row", rows.seq_table_row[s],
          s);
    for (int row = begin; row < end; ++row) {
      const int token = rows.token_ids[row], position = rows.positions[row], slot = rows.write_slots[row];
      check(token >= 0 && token < config_.vocab_size, "token id", token, row);
      check(position >= 0 && position < num_positions_ && position < rows.ld_table, "position", position, row);
      check(row == begin || position == rows.positions[row - 1] + 1, "position", position, row);
      check(slot >= -1 && slot < config_.num_slots, "write slot", slot, row);
    }
    const int32_t* slots = rows.slot_table + rows.seq_table_row[s] * rows.ld_table;
    for (int p = 0; p <= rows.positions[end - 1]; ++p)
      check(slots[p] >= 0 && slots[p] < config_.num_slots, "slot of the table", slots[p], p);
  }
  for (int i = 0; i < num_logits; ++i)
    check(logit_rows[i] >= 0 && logit_rows[i] < rows.num_rows, "logit row", logit_rows[i], i);
  for (int i = 0; i < hidden.count; ++i)
    check(hidden.rows[i] >= 0 && hidden.rows[i] < rows.num_rows, "hidden row", hidden.rows[i], i);
}

size_t Decoder::weight_bytes() const {
  size_t bytes = embed_ ? embed_->bytes() : 0;
  if (head_.weight && head_.weight != embed_) bytes += head_.weight->bytes();
  for (const DecoderLayer& layer : layers_)
    for (const Linear* linear : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down})
      bytes += linear->weight ? linear->weight->bytes() : 0;
  return bytes;
}

size_t Decoder::kv_bytes_per_token() const {
  const size_t vectors = 2 * static_cast<size_t>(config_.num_layers) * config_.num_kv_heads;
  const size_t scale_bytes = config_.kv_format == KvFormat::i8 ? sizeof(float) : 0;
  return vectors * (config_.head_dim * element_bytes(config_.kv_format) + scale_bytes);
}

}  // namespace phloem
