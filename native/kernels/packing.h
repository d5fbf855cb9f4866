// Weight matrices in the order in which the kernels stream them. Owns the packed layout and the conversion of stored
// formats into it. Must not know layers or files.
//
// A panel is 16 output columns (rows of the [n, k] matrix). Per group of 32 values of K a quantised panel holds
//   q8         512 B: for k4 = 0..7: 16 columns x 4 consecutive k, int8;            then 16 scales f16
//   q4, q4m    256 B: for k8 = 0..3: 16 columns x 4 bytes; byte b holds k = 8 k8 + b in its low and 8 k8 + 4 + b in
//              its high bits;                        then 16 scales f16, and for q4m 16 minima f16
// and a float panel holds [k][16]. Columns past n and values past k are zero.
#pragma once

#include <string>

#include "kernels/buffer.h"
#include "kernels/kernel_table.h"

namespace phloem {

class PackedMatrix {
 public:
  PackedMatrix(WeightFormat format, int n, int k);
  // Over memory that the caller keeps, laid out as above.
  PackedMatrix(WeightFormat format, int n, int k, const uint8_t* data);

  // Rows [row_begin, row_begin + rows) from a stored format: q8_0, q4_0, q4_1, f32, f16 or bf16, C-contiguous.
  // Quantised sources go into the same kind only. Throws std::invalid_argument for a pair that does not exist.
  void fill(int row_begin, int rows, const std::string& source, const uint8_t* data, size_t row_bytes);

  const MatrixView& view() const { return view_; }
  size_t bytes() const { return view_.panel_bytes * view_.panels(); }

 private:
  ZeroedMemory memory_;
  MatrixView view_;
};

WeightFormat parse_weight_format(const std::string& name);
const char* weight_format_name(WeightFormat format);

}  // namespace phloem
