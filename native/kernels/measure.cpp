#include "kernels/measure.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

#include "kernels/activations.h"
#include "kernels/thread_pool.h"

namespace phloem {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The buffers of one product, padded as the kernels want them.
struct Product {
  Product(const PackedMatrix& matrix, const KernelTable& kernels, int num_threads, int rows)
      : w(matrix.view()), kernels(kernels), pool(num_threads), rows(rows), ld(w.groups * kGroup) {
    const size_t count = static_cast<size_t>(rows) * ld;
    ld_out = static_cast<int64_t>(w.panels()) * kPanel;
    quantised.reserve(count);
    a = quantised.view(f.reserve(count), ld, rows);
    y.reserve(static_cast<size_t>(rows) * ld_out);
  }

  void quantise() {
    for (int row = 0; row < rows; ++row) kernels.quantize_row(a, row, 0, ld);
  }

  void run() {
    const int step = std::max(1, w.panels() / (8 * pool.size()));
    const int block = std::max(48, (160 << 10) / ld / 12 * 12);
    const int chunks = (w.panels() + step - 1) / step, blocks = (rows + block - 1) / block;
    pool.run([=, this](ThreadPool::Member& member) {
      member.for_each(chunks * blocks, [&](int unit) {
        const int row = unit / chunks * block, panel = unit % chunks * step;
        kernels.gemm({&w, a, row, std::min(row + block, rows), panel, std::min(panel + step, w.panels()), y.data(),
                      ld_out, nullptr, false});
      });
    });
  }

  const MatrixView& w;
  const KernelTable& kernels;
  ThreadPool pool;
  int rows, ld;
  int64_t ld_out;
  Workspace<float> f, y;
  QuantisedRows quantised;
  ActView a;
};

}  // namespace

void matmul(const PackedMatrix& matrix, const KernelTable& kernels, int num_threads, const float* x, int rows,
            float* out) {
  if (rows == 0) return;
  Product product(matrix, kernels, num_threads, rows);
  const int n = matrix.view().n, k = matrix.view().k;
  for (int row = 0; row < rows; ++row)
    std::copy_n(x + static_cast<size_t>(row) * k, k, product.a.f + static_cast<size_t>(row) * product.ld);
  product.quantise();
  product.run();
  for (int row = 0; row < rows; ++row)
    std::copy_n(product.y.data() + row * product.ld_out, n, out + static_cast<size_t>(row) * n);
}

double time_matmul(const PackedMatrix& matrix, const KernelTable& kernels, int num_threads, int rows, int repeats) {
  Product product(matrix, kernels, num_threads, rows);
  uint32_t state = 1;
  for (size_t i = 0; i < static_cast<size_t>(rows) * product.ld; ++i) {
    state = state * 1664525u + 1013904223u;
    product.a.f[i] = static_cast<float>(state >> 8) * (2.0f / 16777216.0f) - 1.0f;
  }
  product.quantise();
  std::vector<double> seconds;
  for (int i = 0; i < repeats; ++i) {
    const double start = now();
    product.run();
    seconds.push_back(now() - start);
  }
  std::nth_element(seconds.begin(), seconds.begin() + repeats / 2, seconds.end());
  return seconds[repeats / 2];
}

double measure_bandwidth(int num_threads) {
  const size_t bytes = size_t{256} << 20;
  ZeroedMemory memory(bytes);
  std::fill_n(memory.data(), bytes, uint8_t{1});
  ThreadPool pool(num_threads);
  std::vector<uint64_t> sums(num_threads * 8);
  double best = 0.0;
  for (int i = 0; i < 3; ++i) {
    const double start = now();
    pool.run([&](ThreadPool::Member& member) {
      constexpr size_t kChunk = size_t{1} << 20;
      member.for_each(static_cast<int>(bytes / kChunk), [&](int chunk) {
        const auto* words = reinterpret_cast<const uint64_t*>(memory.data() + chunk * kChunk);
        uint64_t sum[8] = {};
        for (size_t j = 0; j < kChunk / 8; j += 8)
          for (int lane = 0; lane < 8; ++lane) sum[lane] += words[j + lane];
        for (int lane = 0; lane < 8; ++lane) sums[member.index() * 8] += sum[lane];
      });
    });
    best = std::max(best, static_cast<double>(bytes) / (now() - start));
  }
  return sums[0] ? best : 0.0;
}

double measure_peak(const KernelTable& kernels, int num_threads) {
  constexpr int kUnits = 64;
  ThreadPool pool(num_threads);
  double best = 0.0;
  for (int i = 0; i < 5; ++i) {
    std::atomic<int64_t> operations = 0;
    const double start = now();
    pool.run([&](ThreadPool::Member& member) {
      member.for_each(kUnits, [&](int) { operations.fetch_add(kernels.count_peak(10000), std::memory_order_relaxed); });
    });
    best = std::max(best, static_cast<double>(operations) / (now() - start));
    pool.settle();
  }
  return best;
}

}  // namespace phloem
