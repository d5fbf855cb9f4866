// Declarations of one instruction set's kernels, for its table. Included inside no namespace.
#pragma once

#include "kernels/kernel_table.h"
#include "kernels/simd.h"

namespace phloem {
namespace PHLOEM_ISA {

void rms_norm(const float* x, const float* weight, float eps, int n, float* out);
void quantize_row(const ActView& a, int row, int begin, int count);
void gate(Activation kind, float* gate, const float* up, int padded);
void rope(float* x, const float* cos, const float* sin, int head_dim, float factor);
void write_kv(const KvView& kv, bool is_value, int32_t slot, const float* x);
void gather_row(const MatrixView& w, int row, float* out);
void gemm(const GemmArgs& args);
void gemm_float(const GemmArgs& args);
void attend(const AttendArgs& args);
void fold(const FoldArgs& args);
int64_t count_peak(int64_t rounds);

}  // namespace PHLOEM_ISA
}  // namespace phloem
