// Owns flushing while requests run: what nobody holds is freed at once, what is held can no longer be matched and is
// freed by its last holder. Must not know why something is flushed.

#include "tree/radix_tree.h"

namespace phloem {

// Flush a node and all below it. Its parent is told by the caller. O(nodes below).
uint64_t RadixTree::flush_subtree(NodeId top) {
  std::vector<NodeId> nodes{top};
  for (size_t i = 0; i < nodes.size(); ++i) {
    for (NodeId child = hot(nodes[i]).first_child; child != kNone; child = hot(child).next_sibling) {
      nodes.push_back(child);
    }
  }
  for (const NodeId id : nodes) {
    while (cold(id).first_mark != kNone) {
      const uint32_t index = cold(id).first_mark;
      detach(index);
      count_mark(id, marks_[index].is_pin, -1);
    }
  }
  const uint32_t free_before = pool_.num_free();
  std::vector<std::pair<NodeId, uint32_t>> held;
  for (size_t i = nodes.size(); i-- > 0;) {
    const NodeId id = nodes[i];
    if (hot(id).lock_ref == 0) {
      remove_leaf(id);
      continue;
    }
    emit(EventKind::kRemoved, id, hot(id).start, end(id));
    hot(id).flags |= kDetached;
    ++hot(id).epoch;
    held.emplace_back(id, hot(id).generation);
  }
  if (!held.empty()) {
    unindex_child(top);
    hot(top).flags |= kCutOff;
  }
  for (const auto& [id, generation] : held) {
    while (nodes_.alive(id, generation) && try_merge(id)) {
    }
  }
  const uint64_t freed = pool_.num_free() - free_before;
  flushed_pages_ += freed;
  return freed;
}

uint64_t RadixTree::flush_space(SpaceId space) {
  check_space(space);
  const NodeId root = roots_[space];
  uint64_t freed = 0;
  for (NodeId child = hot(root).first_child; child != kNone;) {
    const NodeId next = hot(child).next_sibling;
    if ((hot(child).flags & kDetached) == 0) freed += flush_subtree(child);
    child = next;
  }
  if (listening_) events_.push_back({EventKind::kCleared, space, 0, {}, {}});
  ++version_;
  return freed;
}

uint64_t RadixTree::flush_all() {
  uint64_t freed = 0;
  for (SpaceId space = 0; space < roots_.size(); ++space) freed += flush_space(space);
  return freed;
}

// Flush everything that starts with `prefix` (rounded down to a page), and of the prefix itself what leads nowhere
// else. 0 when nothing starts with it.
uint64_t RadixTree::flush_prefix(SpaceId space, Tokens prefix) {
  check_space(space);
  if (prefix.size < page_size_) return prefix.size == 0 ? flush_space(space) : 0;
  const uint32_t wanted = floor(prefix.size);
  const Spot spot = walk({roots_[space], 0}, {prefix.data, wanted}, 0);
  if (spot.length < wanted) return 0;
  NodeId top = climb(spot.node, spot.length);
  while (!is_root(hot(top).parent) && hot(hot(top).parent).num_children == 1) top = hot(top).parent;
  const NodeId parent = hot(top).parent;
  const uint64_t freed = flush_subtree(top);
  if (hot(parent).num_children < 2) after_child_removed(parent);
  ++version_;
  return freed;
}

}  // namespace phloem
