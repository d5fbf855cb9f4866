// One decoder-only transformer of the Llama family: weights, KV cache, and a whole forward pass as one call.
// Owns the order of operations and the buffers between them. Must not know files, requests, sampling or Python.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "kernels/activations.h"
#include "kernels/attention_plan.h"
#include "kernels/buffer.h"
#include "kernels/kernel_table.h"
#include "kernels/packing.h"
#include "kernels/thread_pool.h"

namespace phloem {

struct DecoderConfig {
  int vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim;
  float rms_norm_eps;
  Activation activation;
  KvFormat kv_format;
  int64_t num_slots;
  int num_threads;
  bool group_shared_prefixes;
};

struct Linear {
  std::shared_ptr<const PackedMatrix> weight;
  std::vector<float> bias;  // padded to panels; empty: none
};

struct DecoderLayer {
  Linear q, k, v, o, gate, up, down;
  std::vector<float> attn_norm, mlp_norm, q_norm, k_norm;  // padded to groups; q_norm, k_norm may be empty
};

// Where a step leaves hidden states after the final norm, [count, ld], ld >= padded_hidden(); what lies beyond
// hidden_size is padding.
struct HiddenRows {
  const int32_t* rows;
  int count;
  float* out;
  int64_t ld;
};

class Decoder {
 public:
  // Throws std::invalid_argument naming a shape that the kernels do not serve.
  Decoder(const DecoderConfig& config, const KernelTable& kernels);

  // Names as in models/weights.py; shapes are checked. Throws std::invalid_argument.
  void set_matrix(const std::string& name, std::shared_ptr<const PackedMatrix> matrix);
  void set_vector(const std::string& name, const float* values, int count);
  // cos and sin, [num_positions, head_dim / 2].
  void set_rope(const float* cos, const float* sin, int num_positions);

  // Writes K/V of all rows, the logits of `logit_rows`, [num_logits, ld_logits], ld_logits >= padded_vocab(), and the
  // hidden states of `hidden`. Throws std::invalid_argument for a plan that does not fit, before anything is written.
  void step(const StepRows& rows, const int32_t* logit_rows, int num_logits, float* logits, int64_t ld_logits,
            const HiddenRows& hidden = {});

  int padded_vocab() const { return (config_.vocab_size + kPanel - 1) / kPanel * kPanel; }
  int padded_hidden() const { return ld_hidden_; }
  size_t weight_bytes() const;
  size_t kv_bytes_per_token() const;
  const DecoderConfig& config() const { return config_; }
  const KernelTable& kernels() const { return kernels_; }

 private:
  using Member = ThreadPool::Member;
  struct Cut;

  void check_ready() const;
  void check_rows(const StepRows& rows, const int32_t* logit_rows, int num_logits, const HiddenRows& hidden) const;
  void reserve(int num_rows);
  KvView kv_view(int layer) const;
  Linear* find_linear(const std::string& name, int* n, int* k);
  std::vector<float>* find_vector(const std::string& name, int* count, int* padding);

  void forward(Member& member, const StepRows& rows, const int32_t* logit_rows, int num_logits, float* logits,
               int64_t ld_logits, const HiddenRows& hidden);
  void project(Member& member, const DecoderLayer& layer, const KvView& kv, const StepRows& rows);
  void attention(Member& member, const DecoderLayer& layer, const KvView& kv, const StepRows& rows);
  void gated(Member& member, const DecoderLayer& layer, int num_rows);
  // x_ += input times linear.
  void add_product(Member& member, const Linear& linear, const ActView& input, int num_rows);

  // True when the unit was the last of its block and head, so that their output is there.
  bool attend_unit(const AttentionUnit& unit, const KvView& kv, const StepRows& rows, int thread);
  void find_places(const StepRows& rows, int seq);
  void rotate(float* head, const std::vector<float>& norm, int position, float factor, int thread);
  void quantize_columns(const ActView& a, int row, int begin, int end);

  // Norm and quantisation of rows of x_ (of those that `picked` names), shared by all threads; for few rows instead
  // each thread makes its own copy inside the product that needs it (NormedInput), which saves a phase.
  ActView normed_rows(Member& member, const int32_t* picked, int num_rows, const std::vector<float>& weight);
  void norm_row(const float* x, const std::vector<float>& weight, const ActView& a, int row);
  class NormedInput;

  Cut cut(const Linear& linear, int ld, int num_rows, int total_panels, int align) const;
  void product(const Linear& linear, const ActView& a, const Cut& cut, int unit, int num_rows, float* out,
               int64_t ld_out, bool accumulate);

  const DecoderConfig config_;
  const KernelTable& kernels_;
  std::shared_ptr<const PackedMatrix> embed_;
  Linear head_;
  std::vector<DecoderLayer> layers_;
  std::vector<float> final_norm_, cos_, sin_;
  int num_positions_ = 0;

  // See KvView for the order.
  ZeroedMemory kv_, kv_scales_;

  int ld_hidden_, ld_q_, ld_kv_, ld_inter_, ld_most_;
  Workspace<uint32_t> places_;  // AttendArgs::places
  Workspace<float> x_, act_, q_, k_, v_, attn_, gate_, up_, states_, attend_scratch_, temp_, local_;
  QuantisedRows act_quantised_, quantised_, local_quantised_;
  std::vector<std::atomic<int>> finished_;  // parts done, per block and head
  AttentionPlan plan_;
  size_t attend_scratch_stride_ = 0;

  ThreadPool pool_;  // last, so that its threads are gone before what they read
};

}  // namespace phloem
