// Owns a heap of nodes, each of which knows its place in it. Must not know what the order means.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tree/node.h"

namespace phloem {

// Of arity 4. The place of a node is its `prev` while it is in here. Before(a, b): a goes first. O(log size).
template <class Before>
class NodeHeap {
 public:
  NodeHeap(NodeStore& nodes, Before before) : nodes_(nodes), before_(before) {}

  NodeId top() const { return ids_.empty() ? kNone : ids_[0]; }

  void push(NodeId id) {
    ids_.push_back(id);
    set(size() - 1, id);
    sift_up(size() - 1);
  }

  void remove(NodeId id) {
    const uint32_t place = nodes_.cold(id).prev;
    const NodeId last = ids_.back();
    ids_.pop_back();
    nodes_.cold(id).prev = kNone;
    if (last == id) return;
    set(place, last);
    update(last);
  }

  // The order of the node has changed.
  void update(NodeId id) {
    sift_up(nodes_.cold(id).prev);
    sift_down(nodes_.cold(id).prev);
  }

  // "" or what is wrong; visits every node.
  template <class Visit>
  std::string check(Visit visit) const {
    for (uint32_t i = 0; i < size(); ++i) {
      if (nodes_.cold(ids_[i]).prev != i) return "heap place of node " + std::to_string(ids_[i]) + " is wrong";
      if (i > 0 && before_(ids_[i], ids_[(i - 1) / 4])) return "heap order breaks at node " + std::to_string(ids_[i]);
      visit(ids_[i]);
    }
    return "";
  }

 private:
  uint32_t size() const { return static_cast<uint32_t>(ids_.size()); }

  void set(uint32_t place, NodeId id) {
    ids_[place] = id;
    nodes_.cold(id).prev = place;
  }

  void sift_up(uint32_t place) {
    const NodeId id = ids_[place];
    while (place > 0 && before_(id, ids_[(place - 1) / 4])) {
      set(place, ids_[(place - 1) / 4]);
      place = (place - 1) / 4;
    }
    set(place, id);
  }

  void sift_down(uint32_t place) {
    const NodeId id = ids_[place];
    for (uint32_t child = 4 * place + 1; child < size(); child = 4 * place + 1) {
      uint32_t best = child;
      for (uint32_t i = child + 1; i < size() && i < child + 4; ++i) {
        if (before_(ids_[i], ids_[best])) best = i;
      }
      if (!before_(ids_[best], id)) break;
      set(place, ids_[best]);
      place = best;
    }
    set(place, id);
  }

  NodeStore& nodes_;
  Before before_;
  std::vector<NodeId> ids_;
};

}  // namespace phloem
