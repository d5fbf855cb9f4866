// Owns wants (a waiting request will use this prefix) and pins (keep this prefix for a while). Both only raise the
// eviction class of a path. Must not know clocks: times come with the call.

#include <algorithm>
#include <cassert>

#include "tree/radix_tree.h"

namespace phloem {

namespace {

constexpr auto kLater = [](const auto& a, const auto& b) { return a.first > b.first; };

}  // namespace

MarkId RadixTree::create_mark(NodeId node, bool is_pin, double expires_at) {
  uint32_t index;
  if (free_marks_.empty()) {
    index = static_cast<uint32_t>(marks_.size());
    marks_.emplace_back();
  } else {
    index = free_marks_.back();
    free_marks_.pop_back();
  }
  Mark& mark = marks_[index];
  mark.generation = (mark.generation + 1) & 0x7fffffffu;
  mark.live = true;
  mark.is_pin = is_pin;
  mark.expires_at = expires_at;
  attach(index, node);
  count_mark(node, is_pin, +1);
  ++(is_pin ? num_pins_ : num_wants_);
  return static_cast<MarkId>(uint64_t{mark.generation} << 32 | index);
}

RadixTree::Mark& RadixTree::mark_at(MarkId id, bool is_pin) {
  const uint32_t index = mark_index(id);
  const uint64_t generation = static_cast<uint64_t>(id) >> 32;
  if (id <= 0 || index >= marks_.size() || !marks_[index].live || marks_[index].generation != generation ||
      marks_[index].is_pin != is_pin) {
    const std::string kind = is_pin ? "pin" : "want";
    throw StaleHandleError(kind + " " + std::to_string(id) + " is not set: expected an id that " + kind +
                           " returned and that was not taken back" + (is_pin ? " and has not expired" : ""));
  }
  return marks_[index];
}

// Count a mark in on, or out of, a node and its ancestors. O(nodes on the path).
void RadixTree::count_mark(NodeId from, bool is_pin, int sign) {
  for (NodeId id = from; !is_root(id); id = hot(id).parent) {
    account(id, -1);
    uint32_t& count = is_pin ? cold(id).pin_ref : cold(id).want_ref;
    count += static_cast<uint32_t>(sign);
    account(id, +1);
    order_.rekey(id);
  }
}

void RadixTree::attach(uint32_t index, NodeId node) {
  Mark& mark = marks_[index];
  mark.node = node;
  mark.prev = kNone;
  mark.next = cold(node).first_mark;
  if (mark.next != kNone) marks_[mark.next].prev = index;
  cold(node).first_mark = index;
}

void RadixTree::detach(uint32_t index) {
  Mark& mark = marks_[index];
  (mark.prev == kNone ? cold(mark.node).first_mark : marks_[mark.prev].next) = mark.next;
  if (mark.next != kNone) marks_[mark.next].prev = mark.prev;
  mark.node = kNone;
}

void RadixTree::drop_mark(uint32_t index) {
  Mark& mark = marks_[index];
  const NodeId node = mark.node;
  if (node != kNone) {
    detach(index);
    count_mark(node, mark.is_pin, -1);
    merge_only_child(node);
  }
  --(mark.is_pin ? num_pins_ : num_wants_);
  mark.live = false;
  free_marks_.push_back(index);
  ++version_;
}

// What ended at `from`, which is about to go, ends at its parent `to` now.
void RadixTree::lift_marks(NodeId from, NodeId to) {
  while (cold(from).first_mark != kNone) {
    const uint32_t index = cold(from).first_mark;
    detach(index);
    attach(index, to);
  }
}

MarkId RadixTree::want(SpaceId space, Tokens tokens) {
  check_space(space);
  const Spot spot = leave_span(walk({roots_[space], 0}, tokens, 0), tokens, 0);
  ++version_;
  return create_mark(node_ending_at(spot), false, 0.0);
}

void RadixTree::unwant(MarkId id) {
  mark_at(id, false);
  drop_mark(mark_index(id));
}

MarkId RadixTree::pin(SpaceId space, Tokens tokens, double expires_at, uint32_t* length) {
  check_space(space);
  const Spot spot = leave_span(walk({roots_[space], 0}, tokens, 0), tokens, 0);
  uint64_t added = 0;
  for (NodeId id = climb(spot.node, spot.length); !is_root(id); id = hot(id).parent) {
    if (cold(id).pin_ref == 0) added += (std::min(end(id), spot.length) - hot(id).start) / page_size_;
  }
  *length = spot.length;
  const auto budget = static_cast<uint64_t>(config_.pin_budget * config_.num_pages);
  if (spot.length == 0 || pages_pinned_ + added > budget) return 0;
  const MarkId id = create_mark(node_ending_at(spot), true, expires_at);
  expiries_.emplace_back(expires_at, id);
  std::push_heap(expiries_.begin(), expiries_.end(), kLater);
  ++version_;
  return id;
}

void RadixTree::unpin(MarkId id) {
  mark_at(id, true);
  drop_mark(mark_index(id));
}

uint32_t RadixTree::expire_pins(double now) {
  uint32_t count = 0;
  while (!expiries_.empty() && expiries_.front().first <= now) {
    const MarkId id = expiries_.front().second;
    std::pop_heap(expiries_.begin(), expiries_.end(), kLater);
    expiries_.pop_back();
    const Mark& mark = marks_[mark_index(id)];
    if (!mark.live || mark.generation != static_cast<uint64_t>(id) >> 32) continue;
    drop_mark(mark_index(id));
    ++count;
  }
  return count;
}

}  // namespace phloem
