// Python face of the kernels: checks shapes and types at the border, releases the GIL, holds no state of its own.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kernels/decoder.h"
#include "kernels/isa.h"
#include "kernels/measure.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace phloem {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints2d = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2d = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes2d = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

int checked_threads(int num_threads) {
  require(num_threads >= 1 && num_threads <= 1024, "num_threads must be from 1 to 1024");
  return num_threads;
}

KvFormat kv_format(const std::string& name) {
  if (name == "f16") return KvFormat::f16;
  if (name == "f32") return KvFormat::f32;
  require(name == "int8", "kv_cache_dtype must be f16, f32 or int8, got " + name);
  return KvFormat::i8;
}

Activation activation(const std::string& name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  require(name == "gelu_tanh", "activation must be silu, gelu or gelu_tanh, got " + name);
  return Activation::gelu_tanh;
}

void step(Decoder& decoder, Ints token_ids, Ints positions, Ints write_slots, Ints seq_row_start, Ints seq_table_row,
          Ints2d slot_table, Ints logit_rows, FloatsOut logits, std::optional<Ints> hidden_rows,
          std::optional<FloatsOut> hidden) {
  const size_t rows = token_ids.shape(0), seqs = seq_table_row.shape(0);
  require(positions.shape(0) == rows && write_slots.shape(0) == rows,
          "token_ids, positions and write_slots must have one entry per row");
  require(seq_row_start.shape(0) == seqs + 1, "seq_row_start must have one entry more than seq_table_row");
  require(logits.shape(0) == logit_rows.shape(0) && logits.shape(1) >= static_cast<size_t>(decoder.padded_vocab()),
          "logits must be [logit rows, at least padded_vocab]");
  HiddenRows wanted{};
  if (hidden_rows && hidden) {
    require(
        hidden->shape(0) == hidden_rows->shape(0) && hidden->shape(1) >= static_cast<size_t>(decoder.padded_hidden()),
        "hidden must be [hidden rows, at least padded_hidden]");
    wanted = {hidden_rows->data(), static_cast<int>(hidden_rows->shape(0)), hidden->data(),
              static_cast<int64_t>(hidden->shape(1))};
  }
  const StepRows step{static_cast<int>(rows),
                      static_cast<int>(seqs),
                      static_cast<int>(slot_table.shape(0)),
                      token_ids.data(),
                      positions.data(),
                      write_slots.data(),
                      seq_row_start.data(),
                      seq_table_row.data(),
                      slot_table.data(),
                      static_cast<int64_t>(slot_table.shape(1))};
  nb::gil_scoped_release release;
  decoder.step(step, logit_rows.data(), static_cast<int>(logit_rows.shape(0)), logits.data(),
               static_cast<int64_t>(logits.shape(1)), wanted);
}

void bind_matrix(nb::module_& m) {
  nb::class_<PackedMatrix>(m, "PackedMatrix")
      .def(
          "__init__",
          [](PackedMatrix* self, const std::string& format, int n, int k) {
            new (self) PackedMatrix(parse_weight_format(format), n, k);
          },
          "format"_a, "n"_a, "k"_a)
      .def_static(
          "over",
          [](const std::string& format, int n, int k, Bytes data) {
            auto matrix = std::make_shared<PackedMatrix>(parse_weight_format(format), n, k, data.data());
            require(data.shape(0) == matrix->bytes(),
                    "expected " + std::to_string(matrix->bytes()) + " bytes, got " + std::to_string(data.shape(0)));
            return matrix;
          },
          "format"_a, "n"_a, "k"_a, "data"_a, nb::keep_alive<0, 4>())
      .def(
          "fill",
          [](PackedMatrix& self, int row_begin, const std::string& source, Bytes2d data) {
            nb::gil_scoped_release release;
            self.fill(row_begin, static_cast<int>(data.shape(0)), source, data.data(), data.shape(1));
          },
          "row_begin"_a, "source"_a, "data"_a)
      .def("data",
           [](const PackedMatrix& self) {
             const size_t shape[1] = {self.bytes()};
             return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(self.view().data, 1, shape, nb::find(self));
           })
      .def_prop_ro("format", [](const PackedMatrix& self) { return weight_format_name(self.view().format); })
      .def_prop_ro("shape", [](const PackedMatrix& self) { return nb::make_tuple(self.view().n, self.view().k); })
      .def_prop_ro("nbytes", &PackedMatrix::bytes);
}

void bind_decoder(nb::module_& m) {
  nb::class_<Decoder>(m, "Decoder")
      .def(
          "__init__",
          [](Decoder* self, int vocab_size, int hidden_size, int intermediate_size, int num_layers, int num_heads,
             int num_kv_heads, int head_dim, float rms_norm_eps, const std::string& act,
             const std::string& kv_cache_dtype, int64_t num_slots, int num_threads, bool group_shared_prefixes,
             const std::string& isa) {
            const DecoderConfig config{vocab_size,
                                       hidden_size,
                                       intermediate_size,
                                       num_layers,
                                       num_heads,
                                       num_kv_heads,
                                       head_dim,
                                       rms_norm_eps,
                                       activation(act),
                                       kv_format(kv_cache_dtype),
                                       num_slots,
                                       checked_threads(num_threads),
                                       group_shared_prefixes};
            new (self) Decoder(config, kernels_for(isa));
          },
          nb::kw_only(), "vocab_size"_a, "hidden_size"_a, "intermediate_size"_a, "num_layers"_a, "num_heads"_a,
          "num_kv_heads"_a, "head_dim"_a, "rms_norm_eps"_a, "activation"_a, "kv_cache_dtype"_a, "num_slots"_a,
          "num_threads"_a, "group_shared_prefixes"_a, "isa"_a)
      .def(
          "set_matrix",
          [](Decoder& self, const std::string& name, std::shared_ptr<PackedMatrix> matrix) {
            self.set_matrix(name, std::move(matrix));
          },
          "name"_a, "matrix"_a)
      .def(
          "set_vector",
          [](Decoder& self, const std::string& name, Floats values) {
            self.set_vector(name, values.data(), static_cast<int>(values.shape(0)));
          },
          "name"_a, "values"_a)
      .def(
          "set_rope",
          [](Decoder& self, Floats2d cos, Floats2d sin) {
            require(cos.shape(0) == sin.shape(0) && cos.shape(1) == sin.shape(1) &&
                        cos.shape(1) == static_cast<size_t>(self.config().head_dim / 2),
                    "cos and sin must be [positions, head_dim / 2]");
            self.set_rope(cos.data(), sin.data(), static_cast<int>(cos.shape(0)));
          },
          "cos"_a, "sin"_a)
      .def("step", &step, "token_ids"_a, "positions"_a, "write_slots"_a, "seq_row_start"_a, "seq_table_row"_a,
           "slot_table"_a, "logit_rows"_a, "logits"_a, "hidden_rows"_a = nb::none(), "hidden"_a = nb::none())
      .def_prop_ro("isa", [](const Decoder& self) { return self.kernels().name; })
      .def_prop_ro("num_threads", [](const Decoder& self) { return self.config().num_threads; })
      .def_prop_ro("padded_vocab", &Decoder::padded_vocab)
      .def_prop_ro("padded_hidden", &Decoder::padded_hidden)
      .def_prop_ro("weight_bytes", &Decoder::weight_bytes)
      .def_prop_ro("kv_bytes_per_token", &Decoder::kv_bytes_per_token);
}

}  // namespace

NB_MODULE(_kernels, m) {
  m.def("supported_isas", &supported_isas);
  bind_matrix(m);
  bind_decoder(m);
  m.def(
      "matmul",
      [](const PackedMatrix& matrix, Floats2d x, FloatsOut out, const std::string& isa, int num_threads) {
        require(x.shape(1) == static_cast<size_t>(matrix.view().k) && out.shape(0) == x.shape(0) &&
                    out.shape(1) == static_cast<size_t>(matrix.view().n),
                "expected x [rows, k] and out [rows, n]");
        const KernelTable& kernels = kernels_for(isa);
        checked_threads(num_threads);
        nb::gil_scoped_release release;
        matmul(matrix, kernels, num_threads, x.data(), static_cast<int>(x.shape(0)), out.data());
      },
      "matrix"_a, "x"_a, "out"_a, "isa"_a, "num_threads"_a);
  m.def(
      "time_matmul",
      [](const PackedMatrix& matrix, int rows, int repeats, const std::string& isa, int num_threads) {
        require(rows > 0 && repeats > 0, "rows and repeats must be positive");
        const KernelTable& kernels = kernels_for(isa);
        checked_threads(num_threads);
        nb::gil_scoped_release release;
        return time_matmul(matrix, kernels, num_threads, rows, repeats);
      },
      "matrix"_a, "rows"_a, "repeats"_a, "isa"_a, "num_threads"_a);
  m.def(
      "measure_bandwidth",
      [](int num_threads) {
        checked_threads(num_threads);
        nb::gil_scoped_release release;
        return measure_bandwidth(num_threads);
      },
      "num_threads"_a);
  m.def(
      "measure_peak",
      [](const std::string& isa, int num_threads) {
        const KernelTable& kernels = kernels_for(isa);
        checked_threads(num_threads);
        nb::gil_scoped_release release;
        return measure_peak(kernels, num_threads);
      },
      "isa"_a, "num_threads"_a);
}

}  // namespace phloem
