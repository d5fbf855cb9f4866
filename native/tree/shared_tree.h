// Owns the one mutex around a tree, so that views and bulk lookups can come from other threads. Must not know Python.
#pragma once

#include <mutex>
#include <utility>
#include <vector>

#include "tree/radix_tree.h"

namespace phloem {

class SharedTree {
 public:
  explicit SharedTree(const TreeConfig& config) : tree_(config) {}

  // Call with the tree while nobody else has it.
  template <class Call>
  auto locked(Call call) {
    const std::lock_guard guard(mutex_);
    return call(tree_);
  }

  struct Snapshot {
    std::vector<NodeView> nodes;
    bool exact = false;  // no change between the first slice and the last
  };

  // All nodes, in slices between which others get the tree. Each node is exact, all are when `exact`.
  Snapshot snapshot() {
    Snapshot s;
    uint64_t first = 0, last = 0;
    for (NodeId id = 0; id != kNone;) {
      const std::lock_guard guard(mutex_);
      if (id == 0) first = tree_.version();
      id = tree_.snapshot(id, kSlice, &s.nodes);
      last = tree_.version();
    }
    s.exact = first == last;
    return s;
  }

 private:
  static constexpr uint32_t kSlice = 2048;  // nodes copied while the mutex is held once: some 20 us

  std::mutex mutex_;
  RadixTree tree_;
};

}  // namespace phloem
