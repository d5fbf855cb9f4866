// Speed of single kernels and of the machine itself, for benchmarks and the roofline. Owns timing loops only.
#pragma once

#include "kernels/packing.h"

namespace phloem {

// x [rows, k] times matrix^T into out [rows, n]; quantises x where the matrix is quantised.
void matmul(const PackedMatrix& matrix, const KernelTable& kernels, int num_threads, const float* x, int rows,
            float* out);

// Median seconds of one product of `rows` random activation rows, over `repeats` runs.
double time_matmul(const PackedMatrix& matrix, const KernelTable& kernels, int num_threads, int rows, int repeats);

// Bytes per second that `num_threads` threads read from memory far larger than any cache.
double measure_bandwidth(int num_threads);

// Integer operations per second of all threads in registers: the ceiling of quantised products.
double measure_peak(const KernelTable& kernels, int num_threads);

}  // namespace phloem
