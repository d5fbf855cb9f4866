// out = activations x weights^T for f32, f16 and bf16 weights with float32 accumulation.
//
// Panels hold [k][16 columns]. Every output lane adds its products in ascending k in one chain, whatever the number
// of rows, so a row's result does not depend on its batch.
#include "kernels/rows.h"

namespace phloem {
namespace PHLOEM_ISA {
namespace {

template <WeightFormat kFormat>
PHLOEM_INLINE F8 load_weights(const uint8_t* panel, int64_t index) {
  if constexpr (kFormat == WeightFormat::f32) return load(reinterpret_cast<const float*>(panel) + index);
  if constexpr (kFormat == WeightFormat::f16) return load_f16(reinterpret_cast<const uint16_t*>(panel) + index);
  return load_bf16(reinterpret_cast<const uint16_t*>(panel) + index);
}

template <WeightFormat kFormat, int kRows>
void tile(const GemmArgs& args, int row, int panel) {
  const uint8_t* weights = args.w->data + static_cast<size_t>(panel) * args.w->panel_bytes;
  const float* x = args.a.f + static_cast<int64_t>(row) * args.a.ld;
  F8 sums[kRows][2] = {};
  const int depth = args.w->groups * kGroup;
  for (int k = 0; k < depth; ++k) {
    const F8 w0 = in_register(load_weights<kFormat>(weights, static_cast<int64_t>(k) * kPanel));
    const F8 w1 = in_register(load_weights<kFormat>(weights, static_cast<int64_t>(k) * kPanel + 8));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F8 a = splat(x[static_cast<int64_t>(r) * args.a.ld + k]);
      sums[r][0] = fma(a, w0, sums[r][0]);
      sums[r][1] = fma(a, w1, sums[r][1]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float* out = args.out + (row + r) * args.ld_out + static_cast<int64_t>(panel) * kPanel;
    for (int h = 0; h < 2; ++h) {
      F8 y = sums[r][h];
      if (args.bias) y = y + load(args.bias + panel * kPanel + 8 * h);
      if (args.accumulate) y = load(out + 8 * h) + y;
      store(out + 8 * h, y);
    }
  }
}

template <WeightFormat kFormat>
void all_tiles(const GemmArgs& args) {
  for (int panel = args.panel_begin; panel < args.panel_end; ++panel) {
    int row = args.row_begin;
    for (; row + 6 <= args.row_end; row += 6) tile<kFormat, 6>(args, row, panel);
    for (; row + 2 <= args.row_end; row += 2) tile<kFormat, 2>(args, row, panel);
    if (row < args.row_end) tile<kFormat, 1>(args, row, panel);
  }
}

}  // namespace

void gemm_float(const GemmArgs& args) {
  if (args.w->format == WeightFormat::f32) return all_tiles<WeightFormat::f32>(args);
  if (args.w->format == WeightFormat::f16) return all_tiles<WeightFormat::f16>(args);
  all_tiles<WeightFormat::bf16>(args);
}

}  // namespace PHLOEM_ISA
}  // namespace phloem
