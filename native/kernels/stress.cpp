// Stress driver for sanitizer builds: small models of odd sizes, every weight and KV format, every instruction set,
// random plans; compares the bits of a batch with those of one row at a time. Exit code 0 when all agree.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "kernels/decoder.h"
#include "kernels/isa.h"
#include "kernels/measure.h"

using namespace phloem;

namespace {

constexpr int kSlots = 700;

struct Sizes {
  int vocab, hidden, inter, heads, kv_heads, head_dim;
};

struct Plan {
  std::vector<int32_t> tokens, positions, write, starts = {0}, table_rows, table, logit_rows;
  int width = 0;

  StepRows rows() const {
    return {static_cast<int>(tokens.size()),
            static_cast<int>(table_rows.size()),
            static_cast<int>(table_rows.size()),
            tokens.data(),
            positions.data(),
            write.data(),
            starts.data(),
            table_rows.data(),
            table.data(),
            width};
  }
};

std::vector<float> random_floats(std::mt19937& random, size_t count, float scale) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

std::shared_ptr<PackedMatrix> random_matrix(std::mt19937& random, WeightFormat format, int n, int k) {
  auto matrix = std::make_shared<PackedMatrix>(format, n, k);
  if (format == WeightFormat::q4) {  // has no float source: random blocks with scale 2^-6
    std::vector<uint8_t> blocks(static_cast<size_t>(n) * (k / kGroup) * 18);
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<uint8_t>(random());
    for (size_t i = 0; i < blocks.size(); i += 18) blocks[i] = 0, blocks[i + 1] = 0x24;
    matrix->fill(0, n, "q4_0", blocks.data(), static_cast<size_t>(k / kGroup) * 18);
    return matrix;
  }
  const std::vector<float> values = random_floats(random, static_cast<size_t>(n) * k, 1.0f / std::sqrt(float(k)));
  matrix->fill(0, n, "f32", reinterpret_cast<const uint8_t*>(values.data()), sizeof(float) * k);
  return matrix;
}

void fill_decoder(Decoder& decoder, const Sizes& s, WeightFormat format, int layers) {
  std::mt19937 random(7);
  const auto matrix = [&](const std::string& name, int n, int k) {
    decoder.set_matrix(name, random_matrix(random, format, n, k));
  };
  const auto vector = [&](const std::string& name, int count) {
    decoder.set_vector(name, random_floats(random, count, 1.0f).data(), count);
  };
  const int q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
  matrix("embed", s.vocab, s.hidden);
  vector("final_norm", s.hidden);
  for (int i = 0; i < layers; ++i) {
    const std::string at = "layers." + std::to_string(i) + ".";
    matrix(at + "q", q, s.hidden), matrix(at + "k", kv, s.hidden), matrix(at + "v", kv, s.hidden);
    matrix(at + "o", s.hidden, q), matrix(at + "gate", s.inter, s.hidden), matrix(at + "up", s.inter, s.hidden);
    matrix(at + "down", s.hidden, s.inter);
    vector(at + "attn_norm", s.hidden), vector(at + "mlp_norm", s.hidden);
    vector(at + "q_bias", q), vector(at + "down_bias", s.hidden);
    vector(at + "q_norm", s.head_dim), vector(at + "k_norm", s.head_dim);
  }
  std::vector<float> cos(512 * s.head_dim / 2), sin(cos.size());
  for (size_t i = 0; i < cos.size(); ++i) cos[i] = std::cos(0.01f * i), sin[i] = std::sin(0.01f * i);
  decoder.set_rope(cos.data(), sin.data(), 512);
}

// Sequences of a common prefix of `shared` tokens and own tails; all in one step.
Plan batch(std::mt19937& random, int vocab, int num_seqs, int shared, int most_tail) {
  Plan plan;
  plan.width = shared + most_tail;
  std::vector<int32_t> trunk(shared);
  for (int& token : trunk) token = static_cast<int>(random() % vocab);
  int next_slot = shared;
  for (int s = 0; s < num_seqs; ++s) {
    const int length = shared + 1 + static_cast<int>(random() % most_tail);
    const int first = s == 0 || random() % 4 == 0 ? 0 : shared;
    std::vector<int32_t> slots(plan.width, -1);
    for (int p = 0; p < length; ++p) slots[p] = (p < shared ? p : next_slot++) * 37 % kSlots;
    for (int p = first; p < length; ++p) {
      plan.tokens.push_back(p < shared ? trunk[p] : static_cast<int>(random() % vocab));
      plan.positions.push_back(p);
      plan.write.push_back(p < shared && s > 0 ? -1 : slots[p]);
      plan.logit_rows.push_back(static_cast<int>(plan.logit_rows.size()));
    }
    plan.starts.push_back(static_cast<int>(plan.tokens.size()));
    plan.table_rows.push_back(s);
    plan.table.insert(plan.table.end(), slots.begin(), slots.end());
  }
  return plan;
}

std::vector<float> run(Decoder& decoder, const Plan& plan) {
  std::vector<float> logits(plan.logit_rows.size() * decoder.padded_vocab());
  decoder.step(plan.rows(), plan.logit_rows.data(), static_cast<int>(plan.logit_rows.size()), logits.data(),
               decoder.padded_vocab());
  return logits;
}

std::vector<float> run_one_by_one(Decoder& decoder, const Plan& plan) {
  std::vector<float> all;
  for (size_t s = 0; s < plan.table_rows.size(); ++s) {
    for (int row = plan.starts[s]; row < plan.starts[s + 1]; ++row) {
      Plan one;
      one.tokens = {plan.tokens[row]}, one.positions = {plan.positions[row]}, one.write = {plan.write[row]};
      one.starts = {0, 1}, one.table_rows = {0}, one.logit_rows = {0}, one.width = plan.width;
      one.table.assign(plan.table.begin() + s * plan.width, plan.table.begin() + (s + 1) * plan.width);
      const std::vector<float> logits = run(decoder, one);
      all.insert(all.end(), logits.begin(), logits.end());
    }
  }
  return all;
}

bool check_model(const std::string& isa, const Sizes& s, WeightFormat format, KvFormat kv, int threads) {
  const auto make = [&](int num_threads, bool grouped) {
    const DecoderConfig config{s.vocab, s.hidden,         s.inter, 2,      s.heads,     s.kv_heads, s.head_dim,
                               1e-6f,   Activation::silu, kv,      kSlots, num_threads, grouped};
    auto decoder = std::make_unique<Decoder>(config, kernels_for(isa));
    fill_decoder(*decoder, s, format, 2);
    return decoder;
  };
  std::mt19937 random(11);
  const auto subject = make(threads, true), oracle = make(1, false);
  for (const auto& [shared, most_tail] : {std::pair{0, 5}, {0, 20}, {70, 20}, {300, 20}}) {
    const Plan plan = batch(random, s.vocab, 3, shared, most_tail);
    const std::vector<float> a = run(*subject, plan), b = run_one_by_one(*oracle, plan);
    if (a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0) continue;
    std::printf("%s, weights %s: batch and single rows differ\n", isa.c_str(), weight_format_name(format));
    return false;
  }
  return true;
}

void check_products(const std::string& isa, int threads) {
  std::mt19937 random(3);
  for (WeightFormat format : {WeightFormat::q8, WeightFormat::q4m, WeightFormat::f16, WeightFormat::bf16})
    for (int rows = 1; rows <= 33; ++rows)
      time_matmul(*random_matrix(random, format, 5 + rows, 40 + rows), kernels_for(isa), threads, rows, 1);
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 3;
  const Sizes odd{37, 72, 88, 6, 2, 24}, even{64, 64, 96, 4, 4, 16};
  bool good = true;
  for (const std::string& isa : supported_isas()) {
    check_products(isa, threads);
    for (KvFormat kv : {KvFormat::f16, KvFormat::f32, KvFormat::i8})
      good = check_model(isa, odd, WeightFormat::q4m, kv, threads) && good;
    for (WeightFormat format : {WeightFormat::q8, WeightFormat::f16, WeightFormat::bf16, WeightFormat::f32})
      good = check_model(isa, odd, format, KvFormat::f16, threads) && good;
    good = check_model(isa, even, WeightFormat::q4, KvFormat::f16, threads) && good;
  }
  std::printf("%s\n", good ? "all rows agree" : "FAILED");
  return good ? 0 : 1;
}
