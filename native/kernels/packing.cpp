#include "kernels/packing.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "kernels/simd.h"

namespace phloem {
namespace {

using portable::f16_to_f32;
using portable::f32_to_f16;

constexpr const char* kNames[] = {"q4", "q4m", "q8", "f16", "bf16", "f32"};

size_t panel_bytes(WeightFormat format, int groups) {
  switch (format) {
    case WeightFormat::q4:
      return static_cast<size_t>(groups) * (kGroup * kPanel / 2 + 2 * kPanel);
    case WeightFormat::q4m:
      return static_cast<size_t>(groups) * (kGroup * kPanel / 2 + 4 * kPanel);
    case WeightFormat::q8:
      return static_cast<size_t>(groups) * (kGroup * kPanel + 2 * kPanel);
    case WeightFormat::f32:
      return static_cast<size_t>(groups) * kGroup * kPanel * 4;
    default:
      return static_cast<size_t>(groups) * kGroup * kPanel * 2;
  }
}

MatrixView describe(WeightFormat format, int n, int k, const uint8_t* data) {
  if (n <= 0 || k <= 0) throw std::invalid_argument("a matrix needs at least one row and one column");
  const int groups = (k + kGroup - 1) / kGroup;
  return MatrixView{format, n, k, groups, panel_bytes(format, groups), data};
}

uint32_t load_word(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}
void store_word(uint8_t* p, uint32_t word) { std::memcpy(p, &word, 4); }

// One stored block of 32 weights into column `lane` of a packed group.
void put_q8_block(const uint8_t* block, uint8_t* group, int lane) {
  for (int j = 0; j < 8; ++j) store_word(group + 64 * j + 4 * lane, load_word(block + 2 + 4 * j));
  std::memcpy(group + kGroup * kPanel + 2 * lane, block, 2);
}

// Stored nibbles: byte i holds weight i in its low and weight i + 16 in its high bits.
void put_q4_block(const uint8_t* nibbles, const uint8_t* scales, int num_scales, uint8_t* group, int lane) {
  constexpr uint32_t low = 0x0f0f0f0f;
  for (int j = 0; j < 2; ++j) {
    const uint32_t a = load_word(nibbles + 8 * j), b = load_word(nibbles + 8 * j + 4);
    store_word(group + 64 * j + 4 * lane, (a & low) | ((b & low) << 4));
    store_word(group + 64 * (j + 2) + 4 * lane, ((a >> 4) & low) | (b & ~low));
  }
  for (int i = 0; i < num_scales; ++i)
    std::memcpy(group + kGroup * kPanel / 2 + 2 * (kPanel * i + lane), scales + 2 * i, 2);
}

// NaN becomes `low`, so that a damaged file cannot make an undefined conversion.
int to_int(float x, float low, float high) { return static_cast<int>(x > low ? (x < high ? x : high) : low); }
float clamp_f16(float x) { return std::min(std::max(x, -65504.0f), 65504.0f); }

void quantise_q8(const float* x, uint8_t* block) {
  float amax = 0.0f;
  for (int i = 0; i < kGroup; ++i) amax = std::max(amax, std::fabs(x[i]));
  const uint16_t half = f32_to_f16(clamp_f16(amax / 127.0f));
  const float d = f16_to_f32(half);
  std::memcpy(block, &half, 2);
  for (int i = 0; i < kGroup; ++i) {
    const float q = d > 0.0f ? std::nearbyint(x[i] / d) : 0.0f;
    block[2 + i] = static_cast<uint8_t>(to_int(q, -127.0f, 127.0f));
  }
}

void quantise_q4m(const float* x, uint8_t* block) {  // as a stored q4_1 block: scale, minimum, nibbles
  const auto [low, high] = std::minmax_element(x, x + kGroup);
  const uint16_t half[2] = {f32_to_f16(clamp_f16((*high - *low) / 15.0f)), f32_to_f16(clamp_f16(*low))};
  const float d = f16_to_f32(half[0]), m = f16_to_f32(half[1]);
  std::memcpy(block, half, 4);
  uint8_t q[kGroup];
  for (int i = 0; i < kGroup; ++i)
    q[i] = static_cast<uint8_t>(to_int(d > 0.0f ? std::nearbyint((x[i] - m) / d) : 0.0f, 0.0f, 15.0f));
  for (int i = 0; i < 16; ++i) block[4 + i] = static_cast<uint8_t>(q[i] | (q[i + 16] << 4));
}

float stored_float(const std::string& source, const uint8_t* data, int64_t i) {
  if (source == "f32") {
    float x;
    std::memcpy(&x, data + 4 * i, 4);
    return x;
  }
  uint16_t half;
  std::memcpy(&half, data + 2 * i, 2);
  if (source == "f16") return f16_to_f32(half);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

uint16_t f32_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void put_float(WeightFormat format, uint8_t* panel, int64_t index, float x) {
  if (format == WeightFormat::f32) {
    std::memcpy(panel + 4 * index, &x, 4);
    return;
  }
  const uint16_t half = format == WeightFormat::f16 ? f32_to_f16(clamp_f16(x)) : f32_to_bf16(x);
  std::memcpy(panel + 2 * index, &half, 2);
}

void put_float_row(const MatrixView& w, uint8_t* panel, int lane, const std::string& source, const uint8_t* row) {
  if (!w.is_quantised()) {
    for (int k = 0; k < w.k; ++k)
      put_float(w.format, panel, static_cast<int64_t>(k) * kPanel + lane, stored_float(source, row, k));
    return;
  }
  const size_t group_bytes = w.panel_bytes / w.groups;
  for (int g = 0; g < w.groups; ++g) {
    float x[kGroup] = {};
    for (int i = 0; i < kGroup && g * kGroup + i < w.k; ++i) x[i] = stored_float(source, row, g * kGroup + i);
    uint8_t block[2 + kGroup];
    if (w.format == WeightFormat::q8) {
      quantise_q8(x, block);
      put_q8_block(block, panel + g * group_bytes, lane);
    } else {
      quantise_q4m(x, block);
      put_q4_block(block + 4, block, 2, panel + g * group_bytes, lane);
    }
  }
}

void put_block_row(const MatrixView& w, uint8_t* panel, int lane, const uint8_t* row) {
  const size_t group_bytes = w.panel_bytes / w.groups;
  for (int g = 0; g < w.groups; ++g, panel += group_bytes) {
    if (w.format == WeightFormat::q8) put_q8_block(row + 34 * g, panel, lane);
    if (w.format == WeightFormat::q4) put_q4_block(row + 18 * g + 2, row + 18 * g, 1, panel, lane);
    if (w.format == WeightFormat::q4m) put_q4_block(row + 20 * g + 4, row + 20 * g, 2, panel, lane);
  }
}

size_t expected_row_bytes(const std::string& source, int k) {
  if (source == "f32") return static_cast<size_t>(k) * 4;
  if (source == "f16" || source == "bf16") return static_cast<size_t>(k) * 2;
  const size_t groups = static_cast<size_t>(k) / kGroup;
  return groups * (source == "q8_0" ? 34 : source == "q4_0" ? 18 : 20);
}

}  // namespace

PackedMatrix::PackedMatrix(WeightFormat format, int n, int k) : view_(describe(format, n, k, nullptr)) {
  memory_ = ZeroedMemory(bytes());
  view_.data = memory_.data();
}

PackedMatrix::PackedMatrix(WeightFormat format, int n, int k, const uint8_t* data)
    : view_(describe(format, n, k, data)) {}

void PackedMatrix::fill(int row_begin, int rows, const std::string& source, const uint8_t* data, size_t row_bytes) {
  const bool is_float = source == "f32" || source == "f16" || source == "bf16";
  const bool same_blocks = (source == "q8_0" && view_.format == WeightFormat::q8) ||
                           (source == "q4_0" && view_.format == WeightFormat::q4) ||
                           (source == "q4_1" && view_.format == WeightFormat::q4m);
  if ((!is_float && (!same_blocks || view_.k % kGroup)) || (is_float && view_.format == WeightFormat::q4))
    throw std::invalid_argument("cannot pack " + source + " as " + weight_format_name(view_.format));
  if (row_begin < 0 || rows < 0 || row_begin > view_.n - rows) throw std::invalid_argument("rows out of range");
  if (row_bytes != expected_row_bytes(source, view_.k))
    throw std::invalid_argument("expected " + std::to_string(expected_row_bytes(source, view_.k)) +
                                " bytes per row, got " + std::to_string(row_bytes));
  if (!memory_.data()) throw std::invalid_argument("this matrix is read-only");
  for (int i = 0; i < rows; ++i) {
    const int row = row_begin + i;
    uint8_t* panel = memory_.data() + static_cast<size_t>(row / kPanel) * view_.panel_bytes;
    const uint8_t* from = data + static_cast<size_t>(i) * row_bytes;
    if (is_float) {
      put_float_row(view_, panel, row % kPanel, source, from);
    } else {
      put_block_row(view_, panel, row % kPanel, from);
    }
  }
}

WeightFormat parse_weight_format(const std::string& name) {
  for (size_t i = 0; i < std::size(kNames); ++i)
    if (name == kNames[i]) return static_cast<WeightFormat>(i);
  throw std::invalid_argument("unknown packed format " + name);
}

const char* weight_format_name(WeightFormat format) { return kNames[static_cast<size_t>(format)]; }

}  // namespace phloem
