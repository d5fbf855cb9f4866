// Owns the order in which unlocked nodes are evicted. Must not know keys, pages or who wants what: it reads the
// counters of a node and compares.
//
// Classes come first: normal < pinned < wanted, each a counter that never rises from root to leaf. Inside a class:
//   lru       (tick)                      last release, oldest first
//   lfu       (hits, tick)                fewest cursors that came through
//   slru      (hits > 1, tick)            used once before used again
//   fifo      (tick)                      tick is the opening of the cursor that inserted it
//   priority  (priority, tick)            lowest priority first
//   gdsf      (clock + hits * cost, tick) cost of recomputing a page grows with its depth; clock = last key evicted
//
// lru is one intrusive list per class over all unlocked nodes: every list is sorted by (tick, deepest first), ticks
// never rise from root to leaf, so the oldest entry is a leaf and a parent is in its place before its last child goes.
// A node whose class rose stays where it is until it is the oldest; then it moves up one list. Thus whatever comes
// back to a lower list is older than all that never left it. The other policies are a heap over unlocked leaves.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "tree/node.h"

namespace phloem {

enum class Policy : uint8_t { kLru, kLfu, kSlru, kFifo, kPriority, kGdsf };

class EvictionOrder {
 public:
  EvictionOrder(NodeStore& nodes, Policy policy) : nodes_(nodes), policy_(policy) {}

  Policy policy() const { return policy_; }
  bool counts_hits() const { return policy_ == Policy::kLfu || policy_ == Policy::kSlru || policy_ == Policy::kGdsf; }

  static uint32_t class_of(const NodeCold& c) { return c.want_ref != 0 ? 2 : c.pin_ref != 0 ? 1 : 0; }

  // The node was unlocked; it is stamped already. O(1) for lru, O(log leaves) else.
  void add(NodeId id) {
    if (policy_ == Policy::kLru) {
      insert_from_newest(id, 0);
    } else if (nodes_.hot(id).num_children == 0) {
      heap_push(id);
    }
  }

  // The node is locked or about to go.
  void remove(NodeId id) {
    if ((nodes_.hot(id).flags & kListed) == 0) return;
    if (policy_ == Policy::kLru) {
      unlink(id);
    } else {
      heap_remove(id);
    }
  }

  // `upper` was split off the listed or inner node `lower`.
  void split(NodeId upper, NodeId lower) {
    if (policy_ != Policy::kLru || (nodes_.hot(lower).flags & kListed) == 0) return;
    link_after(upper, lower, list_of(lower));
  }

  // The last child of an unlocked node is gone.
  void became_leaf(NodeId id) {
    if (policy_ != Policy::kLru) heap_push(id);
  }

  // The counters or the length of an unlocked node changed.
  void rekey(NodeId id) {
    if ((nodes_.hot(id).flags & kListed) == 0) return;
    if (policy_ == Policy::kLru) {
      const uint32_t now = class_of(nodes_.cold(id));
      if (now >= list_of(id)) return;
      unlink(id);
      insert_from_oldest(id, now);
    } else {
      const uint32_t place = nodes_.cold(id).prev;
      sift_up(place);
      sift_down(nodes_.cold(id).prev);
    }
  }

  // The unlocked leaf that goes next, or kNone. O(1) amortised: a node moves up at most two lists per unlock or rekey.
  NodeId next() {
    if (policy_ != Policy::kLru) return heap_.empty() ? kNone : heap_[0];
    for (uint32_t list = 0; list < 3; ++list) {
      while (oldest_[list] != kNone) {
        const NodeId id = oldest_[list];
        if (class_of(nodes_.cold(id)) <= list) return id;
        unlink(id);
        insert_from_newest(id, list + 1);
      }
    }
    return kNone;
  }

  // The node that is likely to go after `id`, or kNone (heaps do not know).
  NodeId after(NodeId id) const { return policy_ == Policy::kLru && id != kNone ? nodes_.cold(id).next : kNone; }

  // The node is being evicted: gdsf's clock moves to its key.
  void note_evicted(NodeId id) {
    if (policy_ == Policy::kGdsf) clock_ = std::max(clock_, static_cast<float>(key(id).value));
  }

  float clock() const { return clock_; }

  // For check_invariants: every listed node in order, oldest first (lru), or in heap order.
  template <class Visit>
  std::string check(Visit visit) const {
    if (policy_ != Policy::kLru) {
      for (uint32_t i = 0; i < heap_.size(); ++i) {
        if (nodes_.cold(heap_[i]).prev != i) return "heap place of node " + std::to_string(heap_[i]) + " is wrong";
        if (i > 0 && before(heap_[i], heap_[(i - 1) / 4])) return "heap order breaks at " + std::to_string(heap_[i]);
        visit(heap_[i]);
      }
      return "";
    }
    for (uint32_t list = 0; list < 3; ++list) {
      NodeId last = kNone;
      for (NodeId id = oldest_[list]; id != kNone; last = id, id = nodes_.cold(id).next) {
        if (nodes_.cold(id).prev != last || list_of(id) != list) return "list link of " + std::to_string(id);
        if (last != kNone && older(id, last)) return "list order breaks at node " + std::to_string(id);
        visit(id);
      }
      if (newest_[list] != last) return "list " + std::to_string(list) + " has a wrong end";
    }
    return "";
  }

 private:
  struct Key {
    uint32_t klass;
    double value;
    uint64_t tick;
  };

  static constexpr double kCostTokens = 4096.0;  // a page at this depth costs twice what the first one does

  Key key(NodeId id) const {
    const NodeCold& c = nodes_.cold(id);
    const NodeHot& h = nodes_.hot(id);
    double value = 0.0;
    switch (policy_) {
      case Policy::kLru:
      case Policy::kFifo:
        break;
      case Policy::kLfu:
        value = c.hits;
        break;
      case Policy::kSlru:
        value = c.hits > 1 ? 1.0 : 0.0;
        break;
      case Policy::kPriority:
        value = static_cast<int32_t>(c.aux);
        break;
      case Policy::kGdsf:
        value = std::bit_cast<float>(c.aux) + c.hits * (1.0 + (uint64_t{h.start} + h.len) / kCostTokens);
        break;
    }
    return {class_of(c), value, c.tick};
  }

  bool before(NodeId a, NodeId b) const {
    const Key x = key(a), y = key(b);
    if (x.klass != y.klass) return x.klass < y.klass;
    if (x.value != y.value) return x.value < y.value;
    return x.tick != y.tick ? x.tick < y.tick : a < b;
  }

  // --- lists ---

  uint32_t list_of(NodeId id) const { return (nodes_.hot(id).flags >> kListShift) & 3u; }

  bool older(NodeId a, NodeId b) const {
    const uint64_t x = nodes_.cold(a).tick, y = nodes_.cold(b).tick;
    return x != y ? x < y : nodes_.hot(a).start > nodes_.hot(b).start;
  }

  void insert_from_newest(NodeId id, uint32_t list) {
    NodeId place = newest_[list];
    while (place != kNone && older(id, place)) place = nodes_.cold(place).prev;
    link_after(id, place, list);
  }

  void insert_from_oldest(NodeId id, uint32_t list) {
    NodeId place = kNone, next = oldest_[list];
    while (next != kNone && older(next, id)) {
      place = next;
      next = nodes_.cold(next).next;
    }
    link_after(id, place, list);
  }

  // place == kNone: at the oldest end.
  void link_after(NodeId id, NodeId place, uint32_t list) {
    NodeCold& c = nodes_.cold(id);
    c.prev = place;
    c.next = place == kNone ? oldest_[list] : nodes_.cold(place).next;
    (place == kNone ? oldest_[list] : nodes_.cold(place).next) = id;
    (c.next == kNone ? newest_[list] : nodes_.cold(c.next).prev) = id;
    uint32_t& flags = nodes_.hot(id).flags;
    flags = (flags & ~(3u << kListShift)) | kListed | list << kListShift;
  }

  void unlink(NodeId id) {
    const uint32_t list = list_of(id);
    NodeCold& c = nodes_.cold(id);
    (c.prev == kNone ? oldest_[list] : nodes_.cold(c.prev).next) = c.next;
    (c.next == kNone ? newest_[list] : nodes_.cold(c.next).prev) = c.prev;
    c.prev = c.next = kNone;
    nodes_.hot(id).flags &= ~kListed;
  }

  // --- heap of arity 4, the place of a node kept in its `prev` ---

  void set(uint32_t place, NodeId id) {
    heap_[place] = id;
    nodes_.cold(id).prev = place;
  }

  void heap_push(NodeId id) {
    nodes_.hot(id).flags |= kListed;
    heap_.push_back(id);
    set(static_cast<uint32_t>(heap_.size()) - 1, id);
    sift_up(static_cast<uint32_t>(heap_.size()) - 1);
  }

  void heap_remove(NodeId id) {
    const uint32_t place = nodes_.cold(id).prev;
    const NodeId last = heap_.back();
    heap_.pop_back();
    nodes_.hot(id).flags &= ~kListed;
    nodes_.cold(id).prev = kNone;
    if (last == id) return;
    set(place, last);
    sift_up(place);
    sift_down(nodes_.cold(last).prev);
  }

  void sift_up(uint32_t place) {
    const NodeId id = heap_[place];
    while (place > 0 && before(id, heap_[(place - 1) / 4])) {
      set(place, heap_[(place - 1) / 4]);
      place = (place - 1) / 4;
    }
    set(place, id);
  }

  void sift_down(uint32_t place) {
    const NodeId id = heap_[place];
    const uint32_t size = static_cast<uint32_t>(heap_.size());
    for (uint32_t child = 4 * place + 1; child < size; child = 4 * place + 1) {
      uint32_t best = child;
      for (uint32_t i = child + 1; i < size && i < child + 4; ++i) {
        if (before(heap_[i], heap_[best])) best = i;
      }
      if (!before(heap_[best], id)) break;
      set(place, heap_[best]);
      place = best;
    }
    set(place, id);
  }

  NodeStore& nodes_;
  const Policy policy_;
  NodeId oldest_[3] = {kNone, kNone, kNone};
  NodeId newest_[3] = {kNone, kNone, kNone};
  std::vector<NodeId> heap_;
  float clock_ = 0.0f;
};

}  // namespace phloem
