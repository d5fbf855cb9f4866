// Owns the order in which unlocked nodes are evicted. Must not know keys, pages or who wants what: it reads the
// counters of a node and compares.
//
// Classes come first: normal < pinned < wanted, each a counter that never rises from root to leaf. Inside a class:
//   lru       (tick)                      last release, oldest first
//   lfu       (hits, tick)                fewest cursors that came through
//   slru      (hits > 1, tick)            used once before used again
//   fifo      (tick)                      tick is the opening of the cursor that inserted it
//   priority  (priority, tick)            lowest priority first
//   gdsf      (clock + hits * cost, tick) cost of recomputing a page grows with its depth; clock = highest key evicted
//
// lru is one intrusive list over all unlocked nodes, sorted by (tick, deepest first). Ticks never rise from root to
// leaf, so its oldest entry is a leaf, and a parent is in its place before its last child goes. A node that is oldest
// but spared, since it is pinned or wanted, moves to a heap of its class; when its class falls, to the heap of that. So
// the list holds nothing older than what has left it. The other policies are one heap over unlocked leaves.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>

#include "tree/node.h"
#include "tree/node_heap.h"

namespace phloem {

enum class Policy : uint8_t { kLru, kLfu, kSlru, kFifo, kPriority, kGdsf };

class EvictionOrder {
 public:
  EvictionOrder(NodeStore& nodes, Policy policy)
      : nodes_(nodes),
        policy_(policy),
        leaves_(nodes, Before{this}),
        spared_{{nodes, Older{&nodes}}, {nodes, Older{&nodes}}, {nodes, Older{&nodes}}} {}
  EvictionOrder(const EvictionOrder&) = delete;
  EvictionOrder& operator=(const EvictionOrder&) = delete;

  Policy policy() const { return policy_; }
  bool counts_hits() const { return policy_ == Policy::kLfu || policy_ == Policy::kSlru || policy_ == Policy::kGdsf; }

  static uint32_t class_of(const NodeCold& c) { return c.want_ref != 0 ? 2 : c.pin_ref != 0 ? 1 : 0; }

  // The node was unlocked just now; it is stamped already. O(1) for lru, O(log leaves) else.
  void add(NodeId id) {
    if (policy_ == Policy::kLru) {
      link_after(id, newest_);
    } else if (nodes_.hot(id).num_children == 0) {
      became_leaf(id);
    }
  }

  // The node is locked or about to go.
  void remove(NodeId id) {
    if ((nodes_.hot(id).flags & kListed) == 0) return;
    if (policy_ != Policy::kLru) {
      leaves_.remove(id);
    } else if (heap_of(id) != 0) {
      spared_[heap_of(id) - 1].remove(id);
    } else {
      unlink(id);
    }
    nodes_.hot(id).flags &= ~kListed;
  }

  // `upper` was split off `lower`, listed or not.
  void split(NodeId upper, NodeId lower) {
    if (policy_ != Policy::kLru || (nodes_.hot(lower).flags & kListed) == 0) return;
    if (heap_of(lower) != 0) {
      spare(upper, heap_of(lower) - 1);  // no key lies between what the lower one was and what it is now
    } else {
      link_after(upper, lower);
    }
  }

  // The last child of an unlocked node is gone.
  void became_leaf(NodeId id) {
    if (policy_ == Policy::kLru) return;
    nodes_.hot(id).flags |= kListed;
    leaves_.push(id);
  }

  // The counters, the start or the length of a node changed.
  void rekey(NodeId id) {
    if ((nodes_.hot(id).flags & kListed) == 0) return;
    if (policy_ != Policy::kLru) {
      leaves_.update(id);
    } else if (heap_of(id) != 0) {
      const uint32_t now = std::min(class_of(nodes_.cold(id)), heap_of(id) - 1);
      spared_[heap_of(id) - 1].remove(id);
      spare(id, now);
    }
  }

  // The unlocked leaf that goes next, or kNone. O(1) amortised while nothing is pinned or wanted: a node is spared at
  // most twice per unlock or change of class, each time O(log spared).
  NodeId next() {
    if (policy_ != Policy::kLru) return leaves_.top();
    for (uint32_t klass = 0; klass < 3; ++klass) {
      for (NodeId id = oldest_of(klass); id != kNone; id = oldest_of(klass)) {
        const uint32_t now = class_of(nodes_.cold(id));
        if (now <= klass) return id;
        remove(id);
        spare(id, now);
      }
    }
    return kNone;
  }

  // The node that is likely to go after `id`, or kNone (heaps do not know).
  NodeId after(NodeId id) const {
    return policy_ == Policy::kLru && id != kNone && heap_of(id) == 0 ? nodes_.cold(id).next : kNone;
  }

  // The node is being evicted.
  void note_evicted(NodeId id) {
    if (policy_ == Policy::kGdsf) clock_ = std::max(clock_, static_cast<float>(value_of(id)));
  }

  float clock() const { return clock_; }

  // "" or what is wrong with the order itself; visits every node on it.
  template <class Visit>
  std::string check(Visit visit) const {
    NodeId last = kNone;
    for (NodeId id = oldest_; id != kNone; last = id, id = nodes_.cold(id).next) {
      if (nodes_.cold(id).prev != last || heap_of(id) != 0) return "list links of node " + std::to_string(id);
      if (last != kNone && Older{&nodes_}(id, last)) return "list order breaks at node " + std::to_string(id);
      visit(id);
    }
    if (newest_ != last) return "the list has a wrong end";
    std::string wrong = leaves_.check(visit);
    for (const auto& heap : spared_) {
      if (wrong.empty()) wrong = heap.check(visit);
    }
    return wrong;
  }

 private:
  static constexpr double kCostTokens = 4096.0;  // a page at this depth costs twice what the first one does

  struct Older {
    const NodeStore* nodes;
    bool operator()(NodeId a, NodeId b) const {
      const uint64_t x = nodes->cold(a).tick, y = nodes->cold(b).tick;
      return x != y ? x < y : nodes->hot(a).start > nodes->hot(b).start;
    }
  };

  struct Before {
    const EvictionOrder* order;
    bool operator()(NodeId a, NodeId b) const {
      const NodeCold &x = order->nodes_.cold(a), &y = order->nodes_.cold(b);
      if (class_of(x) != class_of(y)) return class_of(x) < class_of(y);
      const double value_a = order->value_of(a), value_b = order->value_of(b);
      return value_a != value_b ? value_a < value_b : x.tick < y.tick;
    }
  };

  double value_of(NodeId id) const {
    const NodeCold& c = nodes_.cold(id);
    const NodeHot& h = nodes_.hot(id);
    switch (policy_) {
      case Policy::kLfu:
        return c.hits;
      case Policy::kSlru:
        return c.hits > 1 ? 1.0 : 0.0;
      case Policy::kPriority:
        return static_cast<int32_t>(c.aux);
      case Policy::kGdsf:
        return std::bit_cast<float>(c.aux) + c.hits * (1.0 + (uint64_t{h.start} + h.len) / kCostTokens);
      default:
        return 0.0;
    }
  }

  // 0: on the list; 1 + class: in that heap.
  uint32_t heap_of(NodeId id) const { return (nodes_.hot(id).flags >> kHeapShift) & 3u; }

  void mark(NodeId id, uint32_t heap) {
    uint32_t& flags = nodes_.hot(id).flags;
    flags = (flags & ~(3u << kHeapShift)) | kListed | heap << kHeapShift;
  }

  void spare(NodeId id, uint32_t klass) {
    mark(id, 1 + klass);
    spared_[klass].push(id);
  }

  NodeId oldest_of(uint32_t klass) const {
    const NodeId spared = spared_[klass].top();
    return spared == kNone && klass == 0 ? oldest_ : spared;
  }

  // place == kNone: the list is empty.
  void link_after(NodeId id, NodeId place) {
    NodeCold& c = nodes_.cold(id);
    c.prev = place;
    c.next = place == kNone ? kNone : nodes_.cold(place).next;
    (place == kNone ? oldest_ : nodes_.cold(place).next) = id;
    (c.next == kNone ? newest_ : nodes_.cold(c.next).prev) = id;
    mark(id, 0);
  }

  void unlink(NodeId id) {
    NodeCold& c = nodes_.cold(id);
    (c.prev == kNone ? oldest_ : nodes_.cold(c.prev).next) = c.next;
    (c.next == kNone ? newest_ : nodes_.cold(c.next).prev) = c.prev;
    c.prev = c.next = kNone;
  }

  NodeStore& nodes_;
  const Policy policy_;
  NodeId oldest_ = kNone;
  NodeId newest_ = kNone;
  NodeHeap<Before> leaves_;    // all policies but lru
  NodeHeap<Older> spared_[3];  // lru, by class
  float clock_ = 0.0f;
};

// The node that goes and those that are likely to go after it. A guess, good for fetching: entries may be dead by now.
struct EvictionWindow {
  NodeId ids[8] = {kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone};

  // One step along the order where the guess was right: O(1), and the window is not walked again.
  void move_to(NodeId id, const EvictionOrder& order) {
    std::copy(ids + 1, ids + 8, ids);
    ids[7] = order.after(ids[6]);
    if (ids[0] == id) return;
    ids[0] = id;
    for (int i = 1; i < 8; ++i) ids[i] = order.after(ids[i - 1]);
  }
};

}  // namespace phloem
