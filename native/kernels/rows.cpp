// Work on single rows: norm, dynamic quantisation, gates, rotary embedding, K/V writes, embedding look-up, and the
// table of this instruction set. Must not know threads, plans or models.
#include "kernels/rows.h"

namespace phloem {
namespace PHLOEM_ISA {

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  const int padded = (n + kGroup - 1) / kGroup * kGroup;
  F8 sums[4] = {};
  for (int i = 0; i < padded; i += kGroup) {
    for (int j = 0; j < 4; ++j) {
      const F8 v = load(x + i + 8 * j);
      sums[j] = fma(v, v, sums[j]);
    }
  }
  const float total = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
  const F8 factor = splat(1.0f / sqrt(total / static_cast<float>(n) + eps));
  for (int i = 0; i < padded; i += 8) store(out + i, load(x + i) * factor * load(weight + i));
}

namespace {

constexpr float kOutlierRatio = 3.0f;  // to the next largest of the group

struct Extremes {
  float largest, second;
};

Extremes extremes(const F8 v[4]) {
  F8 top = abs(v[0]), next = splat(0.0f);
  for (int j = 1; j < 4; ++j) {
    const F8 a = abs(v[j]);
    next = max(next, min(top, a));
    top = max(top, a);
  }
  const auto fold = [&](F8 others, F8 others_next) {
    next = max(max(next, others_next), min(top, others));
    top = max(top, others);
  };
  fold(__builtin_shufflevector(top, top, 4, 5, 6, 7, 0, 1, 2, 3),
       __builtin_shufflevector(next, next, 4, 5, 6, 7, 0, 1, 2, 3));
  fold(__builtin_shufflevector(top, top, 2, 3, 0, 1, 6, 7, 4, 5),
       __builtin_shufflevector(next, next, 2, 3, 0, 1, 6, 7, 4, 5));
  fold(__builtin_shufflevector(top, top, 1, 0, 3, 2, 5, 4, 7, 6),
       __builtin_shufflevector(next, next, 1, 0, 3, 2, 5, 4, 7, 6));
  return {top[0], next[0]};
}

}  // namespace

void quantize_row(const ActView& a, int row, int begin, int count) {
  const size_t at = static_cast<size_t>(row) * a.ld + begin;
  const float* x = a.f + at;
  int8_t* q = a.q + at;
  uint8_t* outlier_at = a.outlier_at + static_cast<size_t>(begin / kGroup) * a.rows + row;
  for (size_t g = at / kGroup; g < (at + count) / kGroup; ++g, x += kGroup, q += kGroup, outlier_at += a.rows) {
    F8 v[4];
    for (int j = 0; j < 4; ++j) v[j] = load(x + 8 * j);
    const Extremes found = extremes(v);
    float amax = found.largest;
    *outlier_at = 0;
    float outlier = 0.0f;
    if (found.largest > kOutlierRatio * found.second && found.largest > 1e-30f) {
      int place = 0;
      while (place < kGroup - 1 && __builtin_fabsf(x[place]) != found.largest) ++place;
      v[place / 8][place % 8] = 0.0f;
      *outlier_at = static_cast<uint8_t>(place + 1);
      outlier = x[place];
      amax = found.second;
    }
    const F8 inverse = splat(amax > 1e-30f ? 127.0f / amax : 0.0f);
    I8 total = {};
    for (int j = 0; j < 4; ++j) total += store_i8(q + 8 * j, v[j] * inverse);
    total += __builtin_shufflevector(total, total, 4, 5, 6, 7, 0, 1, 2, 3);
    total += __builtin_shufflevector(total, total, 2, 3, 0, 1, 6, 7, 4, 5);
    const int32_t whole = total[0] + total[1];
    const float scale = amax > 1e-30f ? amax * (1.0f / 127.0f) : 0.0f;
    a.groups[g] = {scale, scale * static_cast<float>(whole), outlier, whole};
  }
}

namespace {

PHLOEM_INLINE F8 sigmoid(F8 x) { return splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - x)); }

// Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7.
PHLOEM_INLINE F8 erf(F8 x) {
  const F8 a = abs(x);
  const F8 t = splat(1.0f) / fma(splat(0.3275911f), a, splat(1.0f));
  F8 p = splat(1.061405429f);
  p = fma(p, t, splat(-1.453152027f));
  p = fma(p, t, splat(1.421413741f));
  p = fma(p, t, splat(-0.284496736f));
  p = fma(p, t, splat(0.254829592f));
  const F8 y = splat(1.0f) - p * t * exp(splat(0.0f) - a * a);
  return as_float(as_int(y) | (as_int(x) & splat_int(static_cast<int32_t>(0x80000000u))));
}

PHLOEM_INLINE F8 activate(Activation kind, F8 x) {
  if (kind == Activation::silu) return x * sigmoid(x);
  if (kind == Activation::gelu) return splat(0.5f) * x * (splat(1.0f) + erf(x * splat(0.70710678f)));
  // 0.5 x (1 + tanh u) = x * sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
  const F8 u = x * fma(splat(0.044715f) * x, x, splat(1.0f));
  return x * sigmoid(splat(1.5957691216f) * u);
}

}  // namespace

void gate(Activation kind, float* g, const float* up, int padded) {
  for (int i = 0; i < padded; i += 8) store(g + i, activate(kind, load(g + i)) * load(up + i));
}

void rope(float* x, const float* cos, const float* sin, int head_dim, float factor) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float low = x[i], high = x[i + half];
    x[i] = (low * cos[i] - high * sin[i]) * factor;
    x[i + half] = (high * cos[i] + low * sin[i]) * factor;
  }
}

namespace {

// A masked key has weight zero, and zero times a cached value must be zero: so nothing infinite or NaN may enter.
PHLOEM_INLINE F8 finite(F8 v, float limit) { return max(min(v, splat(limit)), splat(-limit)); }

PHLOEM_INLINE void write_vector(KvFormat format, uint8_t* base, float* scales, int64_t index, int d, const float* x) {
  if (format == KvFormat::f16) {
    auto* to = reinterpret_cast<uint16_t*>(base) + index * d;
    for (int i = 0; i < d; i += 8) store_f16(to + i, finite(load(x + i), kF16Max));
  } else if (format == KvFormat::f32) {
    auto* to = reinterpret_cast<float*>(base) + index * d;
    for (int i = 0; i < d; i += 8) store(to + i, finite(load(x + i), 1e18f));
  } else {
    F8 top = splat(0.0f);
    for (int i = 0; i < d; i += 8) top = max(abs(finite(load(x + i), 1e18f)), top);
    const float amax = max_lanes(top);
    const F8 inverse = splat(amax > 1e-30f ? 127.0f / amax : 0.0f);
    auto* to = reinterpret_cast<int8_t*>(base) + index * d;
    for (int i = 0; i < d; i += 8) store_i8(to + i, finite(load(x + i), 1e18f) * inverse);
    scales[index] = amax > 1e-30f ? amax * (1.0f / 127.0f) : 0.0f;
  }
}

}  // namespace

void write_kv(const KvView& kv, bool is_value, int32_t slot, const float* x) {
  write_vector(kv.format, is_value ? kv.v : kv.k, is_value ? kv.v_scale : kv.k_scale, kv.vector_index(slot),
               kv.head_dim, x);
}

namespace {

// One weight of a packed matrix; the embedding look-up needs a few hundred per row.
PHLOEM_INLINE float weight_at(const MatrixView& w, int row, int k) {
  const uint8_t* panel = w.data + static_cast<size_t>(row / kPanel) * w.panel_bytes;
  const int lane = row % kPanel;
  if (!w.is_quantised()) {
    const int64_t i = static_cast<int64_t>(k) * kPanel + lane;
    if (w.format == WeightFormat::f32) return reinterpret_cast<const float*>(panel)[i];
    const uint16_t half = reinterpret_cast<const uint16_t*>(panel)[i];
    if (w.format == WeightFormat::f16) return f16_to_f32(half);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  const uint8_t* block = panel + static_cast<size_t>(k / kGroup) * (w.panel_bytes / w.groups);
  const int in_group = k % kGroup;
  if (w.format == WeightFormat::q8) {
    const auto* scales = reinterpret_cast<const uint16_t*>(block + kGroup * kPanel);
    const auto q = static_cast<int8_t>(block[in_group / 4 * 64 + lane * 4 + in_group % 4]);
    return static_cast<float>(q) * f16_to_f32(scales[lane]);
  }
  const auto* scales = reinterpret_cast<const uint16_t*>(block + kGroup * kPanel / 2);
  const uint8_t pair = block[in_group / 8 * 64 + lane * 4 + in_group % 4];
  const int q = in_group % 8 < 4 ? pair & 15 : pair >> 4;
  const float d = f16_to_f32(scales[lane]);
  const float m = w.format == WeightFormat::q4m ? f16_to_f32(scales[kPanel + lane]) : d * -8.0f;
  return fma(static_cast<float>(q), d, m);
}

}  // namespace

void gather_row(const MatrixView& w, int row, float* out) {
  for (int k = 0; k < w.k; ++k) out[k] = weight_at(w, row, k);
  for (int k = w.k; k < w.groups * kGroup; ++k) out[k] = 0.0f;
}

#define PHLOEM_STRING(x) #x
#define PHLOEM_NAME(x) PHLOEM_STRING(x)

const KernelTable& kernel_table() {
  static constexpr KernelTable table = {PHLOEM_NAME(PHLOEM_ISA),
                                        gemm,
                                        rms_norm,
                                        quantize_row,
                                        gate,
                                        rope,
                                        write_kv,
                                        gather_row,
                                        attend,
                                        fold,
                                        count_peak};
  return table;
}

}  // namespace PHLOEM_ISA
}  // namespace phloem
