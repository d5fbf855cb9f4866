// Memory for quantised activations. Must not know products or layers.
#pragma once

#include "kernels/buffer.h"
#include "kernels/kernel_table.h"

namespace phloem {

struct QuantisedRows {
  // Room for this many values, padding included; what was there is lost when it grows.
  void reserve(size_t count) {
    q.reserve(count);
    groups.reserve(count / kGroup);
    outlier_at.reserve(count / kGroup);
  }
  // From value `at` on, which begins a group; `f` are the same rows as floats.
  ActView view(float* f, int ld, int rows, size_t at = 0) const {
    return {f, q.data() + at, groups.data() + at / kGroup, outlier_at.data() + at / kGroup, ld, rows};
  }

  Workspace<int8_t> q;
  Workspace<ActGroup> groups;
  Workspace<uint8_t> outlier_at;
};

}  // namespace phloem
