// Owns the views of the tree: counters, events, snapshots and the check of every invariant. Changes nothing but the
// event queue.

#include <algorithm>
#include <utility>

#include "tree/radix_tree.h"

namespace phloem {

TreeStats RadixTree::stats() const {
  TreeStats s{};
  s.pages_total = config_.num_pages;
  s.pages_free = pool_.num_free();
  s.pages_evictable = pages_evictable_;
  s.pages_protected = pages_protected_;
  s.pages_pending = pages_pending_;
  s.pages_pinned = pages_pinned_;
  s.nodes = nodes_.num_alive() - roots_.size();
  s.tokens = tokens_;
  s.tokens_pending = tokens_pending_;
  s.cursors = num_cursors_;
  s.pins = num_pins_;
  s.wants = num_wants_;
  s.spaces = roots_.size();
  s.evicted_pages = evicted_pages_;
  s.evicted_nodes = evicted_nodes_;
  s.evicted_pinned_pages = evicted_pinned_;
  s.evicted_wanted_pages = evicted_wanted_;
  s.flushed_pages = flushed_pages_;
  s.inserted_tokens = inserted_tokens_;
  s.splits = splits_;
  s.merges = merges_;
  s.rounding_loss_tokens = rounding_loss_;
  s.metadata_bytes = nodes_.bytes() + index_.bytes() + slab_.bytes();
  return s;
}

NodeId RadixTree::snapshot(NodeId from, uint32_t max_nodes, std::vector<NodeView>* out) const {
  NodeId id = from;
  for (uint32_t taken = 0; id < nodes_.num_ids() && taken < max_nodes; ++id) {
    const NodeHot& h = hot(id);
    if ((h.flags & kAlive) == 0) continue;
    const NodeCold& c = cold(id);
    out->push_back({id, h.parent, h.generation, c.space, h.start, h.len, h.lock_ref, c.hits, h.num_children,
                    h.len - h.pending_from, c.want_ref, c.pin_ref, c.tick});
    ++taken;
  }
  return id < nodes_.num_ids() ? id : kNone;
}

// --- events ---

void RadixTree::listen(bool on) {
  listening_ = on;
  events_.clear();
}

std::vector<Event> RadixTree::take_events() { return std::exchange(events_, {}); }

// The hash of the tokens before position `length`. O(length).
PrefixHash RadixTree::hash_prefix(NodeId node, uint32_t length) const {
  std::vector<NodeId> path;
  for (NodeId id = climb(node, length); !is_root(id); id = hot(id).parent) path.push_back(id);
  PrefixHash hash;
  for (size_t i = path.size(); i-- > 0;) {
    hash.update(key(path[i]), std::min(end(path[i]), length) - hot(path[i]).start);
  }
  return hash;
}

// Whole pages of settled tokens in [from, to) of a node have come or gone. Nothing when nobody listens.
void RadixTree::emit(EventKind kind, NodeId id, uint32_t from, uint32_t to) {
  if (!listening_ || (hot(id).flags & kDetached) != 0) return;
  const uint32_t first = floor(from + page_size_ - 1);
  const uint32_t last = floor(std::min(to, hot(id).start + hot(id).pending_from));
  if (first >= last) return;
  Event event{kind, cold(id).space, first, hash_prefix(id, first), {}};
  event.tokens.assign(key(id) + (first - hot(id).start), key(id) + (last - hot(id).start));
  events_.push_back(std::move(event));
}

// --- invariants ---

class TreeChecker {
 public:
  explicit TreeChecker(const RadixTree& tree) : t_(tree), page_owner_(tree.config_.num_pages, kNone) {}

  std::string run() {
    for (const NodeId root : t_.roots_) {
      if (!walk_space(root)) return error_;
    }
    for (const PageId page : t_.pool_.free_pages()) {
      if (page_owner_[page] != kNone) return "page " + std::to_string(page) + " is free twice, or free and in a node";
      page_owner_[page] = page;
    }
    if (nodes_ + t_.roots_.size() != t_.nodes_.num_alive()) return "a node is not reachable from any root";
    if (!check_order() || !check_locks() || !check_marks() || !check_counters() || !check_slab()) return error_;
    return "";
  }

 private:
  bool fail(NodeId id, const std::string& what) {
    error_ = "node " + std::to_string(id) + " (positions " + std::to_string(t_.hot(id).start) + " to " +
             std::to_string(t_.end(id)) + "): " + what;
    return false;
  }

  bool walk_space(NodeId root) {
    std::vector<NodeId> stack{root};
    while (!stack.empty()) {
      const NodeId id = stack.back();
      stack.pop_back();
      uint32_t children = 0;
      NodeId prev = kNone;
      for (NodeId c = t_.hot(id).first_child; c != kNone; prev = c, c = t_.hot(c).next_sibling, ++children) {
        if (t_.hot(c).parent != id || t_.hot(c).prev_sibling != prev) return fail(c, "broken sibling links");
        stack.push_back(c);
      }
      if (children != t_.hot(id).num_children) return fail(id, "num_children is wrong");
      if (id != root && !check_node(id)) return false;
    }
    return true;
  }

  bool check_node(NodeId id) {
    const NodeHot& h = t_.hot(id);
    const NodeCold& c = t_.cold(id);
    const NodeHot& p = t_.hot(h.parent);
    const NodeCold& pc = t_.cold(h.parent);
    const bool parent_is_root = t_.is_root(h.parent);
    ++nodes_;
    if ((h.flags & kAlive) == 0 || h.len == 0) return fail(id, "empty edge");
    if (h.start != t_.end(h.parent) || h.start % t_.page_size_ != 0) return fail(id, "start is not its parent's end");
    if (c.space != pc.space) return fail(id, "namespace differs from its parent's");
    if (h.len % t_.page_size_ != 0 && (h.num_children != 0 || h.lock_ref != 1)) {
      return fail(id, "partly filled page that is not the tail of one locker");
    }
    if (h.lock_ref > p.lock_ref) return fail(id, "lock_ref above its parent's");
    if (!parent_is_root && (c.want_ref > pc.want_ref || c.pin_ref > pc.pin_ref))
      return fail(id, "marks above parent's");
    if (!parent_is_root && p.lock_ref == 0 && t_.order_.policy() != Policy::kFifo && c.tick > pc.tick) {
      return fail(id, "released after its parent");
    }
    if (h.pending_from < h.len && h.lock_ref == 0) return fail(id, "pending and not locked");
    if (t_.mergeable(h.parent, id)) return fail(id, "could be merged with its parent");
    const bool detached = (h.flags & kDetached) != 0, parent_detached = (p.flags & kDetached) != 0;
    if (parent_detached && !detached) return fail(id, "matchable below a flushed node");
    if (detached && h.lock_ref == 0) return fail(id, "flushed and not locked, but still there");
    const bool cut_off = (h.flags & kCutOff) != 0;
    if (detached && !parent_detached && !cut_off) return fail(id, "flushed, but not cut off");
    const bool indexed = h.len >= t_.page_size_ && !cut_off;
    if (((h.flags & kIndexed) != 0) != indexed) return fail(id, "index flag is wrong");
    if (indexed && t_.find_child(h.parent, t_.key(id)) != id)
      return fail(id, "not found by its first page, or not alone");
    indexed_ += indexed;
    return check_pages(id);
  }

  bool check_pages(NodeId id) {
    const NodeHot& h = t_.hot(id);
    const uint32_t pages = t_.num_pages(h.len);
    for (uint32_t i = 0; i < pages; ++i) {
      const PageId page = t_.value(id)[i];
      if (page >= page_owner_.size()) return fail(id, "page id " + std::to_string(page) + " out of range");
      if (page_owner_[page] != kNone) {
        return fail(id, "page " + std::to_string(page) + " also in node " + std::to_string(page_owner_[page]));
      }
      page_owner_[page] = id;
    }
    (h.lock_ref != 0 ? protected_ : evictable_) += pages;
    tokens_ += h.len;
    if (t_.cold(id).pin_ref != 0) pinned_ += pages;
    if (h.pending_from < h.len) {
      pending_tokens_ += h.len - h.pending_from;
      pending_ += pages - h.pending_from / t_.page_size_;
    }
    words_ += t_.words(t_.cold(id).capacity);
    if (t_.cold(id).capacity < h.len) return fail(id, "key longer than its room");
    return true;
  }

  // Unlocked nodes (for heap policies: unlocked leaves) are on the order, nothing else is.
  bool check_order() {
    std::vector<bool> listed(t_.nodes_.num_ids(), false);
    error_ = t_.order_.check([&](NodeId id) { listed[id] = true; });
    if (!error_.empty()) return false;
    for (NodeId id = 0; id < t_.nodes_.num_ids(); ++id) {
      const NodeHot& h = t_.hot(id);
      const bool should = (h.flags & kAlive) != 0 && (h.flags & kRoot) == 0 && h.lock_ref == 0 &&
                          (t_.order_.policy() == Policy::kLru || h.num_children == 0);
      if (should != listed[id] || should != ((h.flags & kListed) != 0)) {
        return fail(id,
                    should ? "unlocked, but not on the eviction order" : "on the eviction order, but locked or gone");
      }
    }
    const NodeId next = const_cast<RadixTree&>(t_).order_.next();
    if (next == kNone ? evictable_ != 0 : t_.hot(next).num_children != 0) return fail(next, "next to go, but no leaf");
    return true;
  }

  bool check_locks() {
    std::vector<uint32_t> locks(t_.nodes_.num_ids(), 0);
    const auto count = [&](NodeId id) {
      for (; id != kNone; id = t_.hot(id).parent) ++locks[id];
    };
    uint64_t open = 0;
    for (const auto& cursor : t_.cursors_) {
      if (!cursor.open) continue;
      ++open;
      count(cursor.node);
    }
    for (const NodeId id : t_.zombies_) count(id);
    for (NodeId id = 0; id < t_.nodes_.num_ids(); ++id) {
      if ((t_.hot(id).flags & kAlive) == 0) continue;
      if (locks[id] != t_.hot(id).lock_ref) {
        return fail(id, "lock_ref " + std::to_string(t_.hot(id).lock_ref) + ", but " + std::to_string(locks[id]) +
                            " cursors at or below it");
      }
    }
    error_ = open == t_.num_cursors_ ? "" : "count of cursors is wrong";
    return error_.empty();
  }

  bool check_marks() {
    std::vector<uint32_t> wants(t_.nodes_.num_ids(), 0), pins(t_.nodes_.num_ids(), 0);
    for (const auto& mark : t_.marks_) {
      if (!mark.live || mark.node == kNone) continue;
      for (NodeId id = mark.node; id != kNone; id = t_.hot(id).parent) ++(mark.is_pin ? pins : wants)[id];
    }
    for (NodeId id = 0; id < t_.nodes_.num_ids(); ++id) {
      if ((t_.hot(id).flags & kAlive) == 0 || t_.is_root(id)) continue;
      if (wants[id] != t_.cold(id).want_ref || pins[id] != t_.cold(id).pin_ref) return fail(id, "marks are miscounted");
    }
    return true;
  }

  bool check_counters() {
    const auto same = [&](const char* name, uint64_t have, uint64_t counted) {
      if (have == counted || !error_.empty()) return;
      error_ = std::string(name) + " is " + std::to_string(have) + ", counted " + std::to_string(counted);
    };
    error_.clear();
    same("evictable pages", t_.pages_evictable_, evictable_);
    same("protected pages", t_.pages_protected_, protected_);
    same("pending pages", t_.pages_pending_, pending_);
    same("pinned pages", t_.pages_pinned_, pinned_);
    same("tokens", t_.tokens_, tokens_);
    same("pending tokens", t_.tokens_pending_, pending_tokens_);
    same("indexed nodes", t_.index_.size(), indexed_);
    same("free + evictable + protected pages", t_.pool_.num_free() + evictable_ + protected_, t_.config_.num_pages);
    return error_.empty();
  }

  bool check_slab() {
    uint64_t live = 0, holders = 0;
    for (uint32_t chunk = 0; chunk < t_.slab_.num_chunks(); ++chunk) {
      if (!t_.slab_.alive(chunk)) continue;
      live += t_.slab_.live_words(chunk);
      NodeId prev = kNone;
      for (NodeId id = const_cast<Slab&>(t_.slab_).first_holder(chunk); id != kNone;
           prev = id, id = t_.cold(id).chunk_next, ++holders) {
        if (t_.hot(id).chunk != chunk || t_.cold(id).chunk_prev != prev) return fail(id, "broken chunk links");
      }
    }
    error_ = live != words_ ? "live words of the slab are miscounted" : holders != nodes_ ? "chunk holders" : "";
    return error_.empty();
  }

  const RadixTree& t_;
  std::string error_;
  std::vector<NodeId> page_owner_;
  uint64_t nodes_ = 0, indexed_ = 0, evictable_ = 0, protected_ = 0, pending_ = 0, pinned_ = 0, tokens_ = 0;
  uint64_t pending_tokens_ = 0, words_ = 0;
};

std::string RadixTree::check_invariants() const { return TreeChecker(*this).run(); }

}  // namespace phloem
