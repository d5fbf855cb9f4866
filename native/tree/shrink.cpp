// Owns how the tree gives pages back: cutting leaves short, removing them, evicting by the order. Must not know why.

#include <algorithm>
#include <cassert>

#include "tree/radix_tree.h"

namespace phloem {

// Cut a leaf down to its first `len` tokens, at least 1, and free the pages behind them. O(pages freed).
void RadixTree::truncate(NodeId id, uint32_t len) {
  NodeHot& h = hot(id);
  assert(len > 0 && len < h.len && h.num_children == 0);
  emit(EventKind::kRemoved, id, h.start + len, h.start + h.len);
  account(id, -1);
  const uint32_t keep = num_pages(len);
  pool_.free(value(id) + keep, num_pages(h.len) - keep);
  const uint32_t dead = words(cold(id).capacity) - words(len);
  h.len = len;
  h.pending_from = std::min(h.pending_from, len);
  cold(id).capacity = len;
  ++h.epoch;
  account(id, +1);
  const uint32_t chunk = h.chunk;
  if (slab_.release(chunk, dead)) tidy(chunk);
}

// Free a node without children, locked or not. What ended at it ends at its parent now. O(pages).
void RadixTree::remove_leaf(NodeId id) {
  NodeHot& h = hot(id);
  assert(h.num_children == 0 && !is_root(id));
  emit(EventKind::kRemoved, id, h.start, h.start + h.len);
  if (cold(id).first_mark != kNone) lift_marks(id, h.parent);
  if (h.pending_from < h.len) lift_records(id);
  order_.remove(id);
  account(id, -1);
  pool_.free(value(id), num_pages(h.len));
  unindex_child(id);
  unlink_child(id);
  unhold(id);
  const uint32_t chunk = h.chunk;
  const bool sparse = slab_.release(chunk, words(cold(id).capacity));
  nodes_.destroy(id);
  if (sparse) tidy(chunk);
}

void RadixTree::after_child_removed(NodeId parent) {
  if (is_root(parent)) return;
  if (hot(parent).num_children == 0 && hot(parent).lock_ref == 0) {
    order_.became_leaf(parent);
  } else {
    merge_only_child(parent);
  }
}

// Free up to `num_pages` pages from the end of an unlocked leaf; return how many.
uint32_t RadixTree::trim(NodeId id, uint32_t num_wanted) {
  NodeHot& h = hot(id);
  assert(h.lock_ref == 0 && h.num_children == 0);
  const uint32_t have = num_pages(h.len);
  const uint32_t freed = std::min(have, num_wanted);
  evicted_pages_ += freed;
  if (cold(id).want_ref != 0) {
    evicted_wanted_ += freed;
  } else if (cold(id).pin_ref != 0) {
    evicted_pinned_ += freed;
  }
  order_.note_evicted(id);
  if (freed < have) {
    truncate(id, (have - freed) * page_size_);
    order_.rekey(id);
    return freed;
  }
  ++evicted_nodes_;
  const NodeId parent = h.parent;
  remove_leaf(id);
  after_child_removed(parent);
  return freed;
}

// Evicting a node touches some fifteen cache lines all over the tree. Fetch those of the next ones in the order: the
// last of the window itself, five turns ahead what it points to, two turns ahead what may be merged when it goes.
// Inlined by force: GCC takes a function that does nothing but fetch for one without effect, and drops the call.
[[gnu::always_inline]] inline void RadixTree::prefetch(const EvictionWindow& window) const {
  const NodeId far = window.ids[7], middle = window.ids[5], near = window.ids[2];
  if (far != kNone) nodes_.prefetch(far);
  if (middle != kNone && (hot(middle).flags & kListed) != 0) {
    const NodeHot& h = hot(middle);
    const NodeCold& c = cold(middle);
    __builtin_prefetch(value(middle));
    __builtin_prefetch(value(middle) + 15);
    index_.prefetch(ChildIndex::hash(h.parent, h.fingerprint));
    for (const NodeId id : {h.parent, h.prev_sibling, h.next_sibling}) {
      if (id != kNone) __builtin_prefetch(&hot(id));
    }
    for (const NodeId id : {c.chunk_prev, c.chunk_next}) {
      if (id != kNone) __builtin_prefetch(&cold(id));
    }
  }
  if (near != kNone && (hot(near).flags & kListed) != 0 && hot(hot(near).parent).num_children == 2) {
    for (const NodeId id : {hot(near).parent, hot(near).prev_sibling, hot(near).next_sibling}) {
      if (id != kNone) __builtin_prefetch(&cold(id));
    }
  }
}

uint32_t RadixTree::evict(uint32_t num_wanted) {
  if (num_wanted > config_.num_pages) {
    throw CapacityError("cannot evict " + std::to_string(num_wanted) + " pages: the pool has " +
                        std::to_string(config_.num_pages));
  }
  uint32_t freed = 0;
  EvictionWindow window;
  while (freed < num_wanted) {
    const NodeId id = order_.next();
    if (id == kNone) break;
    window.move_to(id, order_);
    prefetch(window);
    freed += trim(id, num_wanted - freed);
  }
  if (freed > 0) ++version_;
  return freed;
}

void RadixTree::keep_watermark() {
  const uint32_t target = static_cast<uint32_t>(config_.evict_watermark * config_.num_pages);
  if (pool_.num_free() < target) evict(target - pool_.num_free());
}

}  // namespace phloem
