// Owns the verbs of a request: open, advance, append, extend, fork, close. Must not know what a step or a mark is
// beyond recording what was inserted for which step.

#include <algorithm>
#include <cassert>
#include <cstring>

#include "tree/radix_tree.h"

namespace phloem {

// --- ids ---

RadixTree::Cursor& RadixTree::cursor_at(CursorId id) {
  return const_cast<Cursor&>(static_cast<const RadixTree*>(this)->cursor_at(id));
}

const RadixTree::Cursor& RadixTree::cursor_at(CursorId id) const {
  const uint64_t index = static_cast<uint64_t>(id) & 0xffffffffu;
  const uint64_t generation = static_cast<uint64_t>(id) >> 32;
  if (id < 0 || index >= cursors_.size() || !cursors_[index].open || cursors_[index].generation != generation) {
    throw StaleHandleError("cursor " + std::to_string(id) +
                           " is not open: expected one that open or fork returned and " + "that was not closed yet");
  }
  return cursors_[index];
}

CursorId RadixTree::create_cursor(NodeId node, int32_t priority) {
  uint32_t index;
  if (free_cursors_.empty()) {
    index = static_cast<uint32_t>(cursors_.size());
    cursors_.emplace_back();
  } else {
    index = free_cursors_.back();
    free_cursors_.pop_back();
  }
  Cursor& cursor = cursors_[index];
  cursor.node = node;
  cursor.generation = (cursor.generation + 1) & 0x7fffffffu;
  cursor.priority = priority;
  cursor.open = true;
  cursor.birth = ++tick_;
  ++num_cursors_;
  return static_cast<CursorId>(uint64_t{cursor.generation} << 32 | index);
}

// --- locks ---

void RadixTree::lock(NodeId id) {
  NodeHot& h = hot(id);
  if (h.lock_ref++ != 0 || h.len == 0) return;
  order_.remove(id);
  const uint64_t pages = num_pages(h.len);
  pages_evictable_ -= pages;
  pages_protected_ += pages;
}

// At zero a node goes to the newest end of the eviction order, or away if it was flushed meanwhile.
void RadixTree::unlock(NodeId id) {
  NodeHot& h = hot(id);
  assert(h.lock_ref > 0);
  if (h.lock_ref > 1 || h.len == 0) {
    --h.lock_ref;
    return;
  }
  if ((h.flags & kDetached) != 0) {
    remove_leaf(id);
    return;
  }
  h.lock_ref = 0;
  const uint64_t pages = num_pages(h.len);
  pages_evictable_ += pages;
  pages_protected_ -= pages;
  if (order_.policy() != Policy::kFifo) cold(id).tick = tick_;
  if (order_.policy() == Policy::kGdsf) cold(id).aux = std::bit_cast<uint32_t>(order_.clock());
  order_.add(id);
}

// Lock `from` and its ancestors up to, not including, `above` (kNone: the root included).
void RadixTree::lock_path(NodeId from, NodeId above, const Cursor& cursor, bool counts) {
  for (NodeId id = from; id != above; id = hot(id).parent) {
    lock(id);
    if (!counts || is_root(id)) continue;
    NodeCold& c = cold(id);
    if (c.hits != 0xffffffffu) ++c.hits;
    if (order_.policy() == Policy::kPriority) {
      c.aux = static_cast<uint32_t>(std::max(static_cast<int32_t>(c.aux), cursor.priority));
    }
  }
}

// Move a cursor down to a match below it. What was its node may now differ in nothing from the child it went to.
void RadixTree::move_down(Cursor& cursor, Spot spot) {
  const NodeId above = cursor.node;
  const NodeId node = node_ending_at(spot);
  if (node == above) return;
  lock_path(node, above, cursor, true);
  cursor.node = node;
  if (order_.policy() == Policy::kPriority) return merge_path(node);
  NodeId child = node;
  while (hot(child).parent != above) child = hot(child).parent;
  try_merge(child);
}

// Forget the partly filled page at the end of a cursor's leaf; return the node that is left.
NodeId RadixTree::drop_tail(NodeId node) {
  const uint32_t tail = hot(node).len % page_size_;
  if (tail == 0) return node;
  assert(hot(node).lock_ref == 1);
  if (hot(node).len > tail) {
    truncate(node, hot(node).len - tail);
    return node;
  }
  const NodeId parent = hot(node).parent;
  remove_leaf(node);
  return parent;
}

// Take one lock off the path of a node, deepest first, and merge what no longer differs. O(nodes on the path).
void RadixTree::release(NodeId node) {
  node = drop_tail(node);
  ++tick_;
  NodeId lowest = node;
  for (NodeId id = node; id != kNone;) {
    const NodeId parent = hot(id).parent;
    const uint32_t generation = hot(id).generation;
    unlock(id);
    if (!nodes_.alive(id, generation)) lowest = parent;
    id = parent;
  }
  if (!is_root(lowest) && hot(lowest).num_children == 1) {
    const NodeId child = hot(lowest).first_child;
    if (try_merge(child)) lowest = child;
  }
  merge_path(lowest);
}

// --- verbs ---

// Tokens that equal the start of the page behind a match, in a node or in one of the first 64 children.
uint32_t RadixTree::partial_match(Spot spot, Tokens tokens) const {
  const NodeId node = climb(spot.node, spot.length);
  const uint32_t room = std::min(page_size_, tokens.size - spot.length);
  const auto common = [&](NodeId id, uint32_t at) {
    uint32_t n = 0;
    const uint32_t stop = std::min(room, hot(id).len - at);
    while (n < stop && key(id)[at + n] == tokens.data[spot.length + n]) ++n;
    return n;
  };
  if (spot.length < end(node)) return common(node, spot.length - hot(node).start);
  uint32_t best = 0, seen = 0;
  for (NodeId id = hot(node).first_child; id != kNone && seen < 64; id = hot(id).next_sibling, ++seen) {
    if ((hot(id).flags & kIndexed) != 0) best = std::max(best, common(id, 0));
  }
  return best;
}

RadixTree::Opened RadixTree::open(SpaceId space, Tokens tokens, int32_t priority) {
  check_space(space);
  const Spot spot = leave_span(walk({roots_[space], 0}, tokens, 0), tokens, 0);
  if (page_size_ > 1) rounding_loss_ += partial_match(spot, tokens) % page_size_;
  const NodeId node = node_ending_at(spot);
  const CursorId id = create_cursor(node, priority);
  lock_path(node, kNone, cursor_at(id), true);
  if (order_.policy() == Policy::kPriority) merge_path(node);  // it may have made the priorities on the path equal
  ++version_;
  return {id, spot.length};
}

uint32_t RadixTree::advance(CursorId id, Tokens tokens) {
  Cursor& cursor = cursor_at(id);
  const uint32_t base = end(cursor.node);
  if (base % page_size_ != 0 || hot(cursor.node).num_children == 0) return 0;
  const Spot spot = leave_span(walk({cursor.node, base}, tokens, base), tokens, base);
  move_down(cursor, spot);
  ++version_;
  return spot.length - base;
}

// The child of the node's parent that has the page which `tokens` would complete in the node, or kNone.
NodeId RadixTree::equal_sibling(NodeId node, Tokens tokens) const {
  const uint32_t tail = hot(node).len;
  if (tail >= page_size_ || is_root(node) || tail + tokens.size < page_size_) return kNone;
  int32_t page[256];
  std::copy_n(key(node), tail, page);
  std::copy_n(tokens.data, page_size_ - tail, page + tail);
  return find_child(hot(node).parent, page);
}

// O(tokens) plus eviction. First everything that is there already is found without a change, then it is known how
// many pages are needed and how many can be had.
AppendResult RadixTree::append(CursorId id, Tokens tokens, StepId step) {
  Cursor& cursor = cursor_at(id);
  const NodeId node = cursor.node;
  const uint32_t base = end(node);
  const uint32_t total = base + tokens.size;
  const uint32_t tail = base % page_size_;
  const NodeId sibling = tail != 0 ? equal_sibling(node, tokens) : kNone;
  Spot spot{node, base};
  if (tail == 0) {
    spot = walk(spot, tokens, base);
  } else if (sibling != kNone) {
    spot = walk({sibling, base - tail + page_size_}, tokens, base);
  }
  spot.node = climb(spot.node, spot.length);
  const uint64_t own = sibling != kNone ? 1 : 0;
  const uint32_t needed = num_pages(total) - num_pages(spot.length);
  uint64_t locking = 0;  // evictable pages that the cursor is about to lock
  const NodeId above = sibling != kNone ? hot(node).parent : node;
  for (NodeId at = spot.node; at != above; at = hot(at).parent) {
    if (hot(at).lock_ref == 0) locking += (std::min(end(at), spot.length) - hot(at).start) / page_size_;
  }
  if (needed > pool_.num_free() + own + pages_evictable_ - locking) return {false, 0, -1};

  if (sibling != kNone) {
    remove_leaf(node);
    cursor.node = above;
  }
  if (spot.node != cursor.node) move_down(cursor, spot);
  if (needed > pool_.num_free()) evict(needed - pool_.num_free());
  if (spot.length < total) {
    const uint32_t shared = spot.length - base;
    insert(cursor, {tokens.data + shared, tokens.size - shared}, step);
    if (config_.evict_watermark > 0.0) keep_watermark();
  }
  ++version_;
  return {true, spot.length - base, sibling != kNone ? int64_t{base} - tail : -1};
}

// A partly filled page must be filled where it is; else a leaf grows when all of its tokens are this cursor's alike.
bool RadixTree::grows_in_place(const Cursor& cursor) const {
  const NodeHot& h = hot(cursor.node);
  if (h.len == 0) return false;
  if (h.len % page_size_ != 0) return true;
  const NodeCold& c = cold(cursor.node);
  if (h.num_children != 0 || h.lock_ref != 1 || c.want_ref != 0 || c.pin_ref != 0) return false;
  switch (order_.policy()) {
    case Policy::kLru:
      return true;
    case Policy::kFifo:
      return c.tick == cursor.birth;
    case Policy::kPriority:
      return static_cast<int32_t>(c.aux) == cursor.priority;
    default:
      return c.hits == 1;
  }
}

void RadixTree::grow(NodeId id, Tokens tokens) {
  NodeHot& h = hot(id);
  account(id, -1);
  if (cold(id).capacity < h.len + tokens.size) {
    const uint32_t chunk = h.chunk;
    if (move_key(id, roomy(h.len + tokens.size))) tidy(chunk);
  }
  std::copy_n(tokens.data, tokens.size, key(id) + h.len);
  const uint32_t have = num_pages(h.len);
  const bool supplied = pool_.allocate(num_pages(h.len + tokens.size) - have, value(id) + have);
  assert(supplied);
  (void)supplied;
  h.len += tokens.size;
  ++h.epoch;
  account(id, +1);
  if ((h.flags & (kIndexed | kCutOff)) == 0 && h.len >= page_size_) index_child(id);
}

// Put tokens that are not there behind a cursor, as pending; the pages are known to be free.
void RadixTree::insert(Cursor& cursor, Tokens tokens, StepId step) {
  const uint32_t base = end(cursor.node);
  if (!grows_in_place(cursor)) {
    const NodeId id = create_node(cursor.node, tokens.size);
    hot(id).lock_ref = 1;
    NodeCold& c = cold(id);
    c.hits = 1;
    if (order_.policy() == Policy::kPriority) c.aux = static_cast<uint32_t>(cursor.priority);
    if (order_.policy() == Policy::kFifo) c.tick = cursor.birth;
    cursor.node = id;
  }
  grow(cursor.node, tokens);
  inserted_tokens_ += tokens.size;
  step_at(step).records.push_back({cursor.node, hot(cursor.node).generation, base, base + tokens.size});
}

bool RadixTree::extend(CursorId id, int32_t token, StepId step, Extended* out) {
  const AppendResult result = append(id, {&token, 1}, step);
  if (!result.done) return false;
  const NodeId node = cursor_at(id).node;
  const uint32_t last = hot(node).len - 1;
  out->slot = value(node)[last / page_size_] * page_size_ + last % page_size_;
  out->write = result.num_shared == 0;
  out->moved_from = result.moved_from;
  return true;
}

uint32_t RadixTree::length(CursorId id) const { return end(cursor_at(id).node); }

CursorId RadixTree::fork(CursorId id) {
  const Cursor source = cursor_at(id);
  NodeId node = source.node;
  const uint32_t tail = hot(node).len % page_size_;
  if (tail != 0) node = hot(node).len > tail ? split(node, hot(node).len - tail) : hot(node).parent;
  const CursorId forked = create_cursor(node, source.priority);
  lock_path(node, kNone, source, false);
  ++version_;
  return forked;
}

void RadixTree::close(CursorId id) {
  Cursor& cursor = cursor_at(id);
  const NodeId node = cursor.node;
  cursor.open = false;
  cursor.node = kNone;
  free_cursors_.push_back(static_cast<uint32_t>(id & 0xffffffff));
  --num_cursors_;
  if (hot(node).pending_from < hot(node).len) {
    zombies_.push_back(node);
  } else {
    release(node);
  }
  ++version_;
}

void RadixTree::fill_slots(CursorId id, uint32_t start, int32_t* out, uint64_t out_size) const {
  NodeId node = cursor_at(id).node;
  const uint32_t length = end(node);
  if (start > length || length > out_size) {
    throw CacheError("fill_slots from " + std::to_string(start) + " into an array of " + std::to_string(out_size) +
                     ": expected start <= " + std::to_string(length) + " (the cursor's length) <= size");
  }
  for (uint32_t stop = length; start < stop; node = hot(node).parent) {
    const uint32_t begin = hot(node).start;
    const uint32_t first = std::max(begin, start);
    const PageId* pages = value(node);
    if (page_size_ == 1) {
      std::memcpy(out + first, pages + (first - begin), (stop - first) * sizeof(int32_t));
    } else {
      for (uint32_t at = first; at < stop; ++at) {
        const uint32_t offset = at - begin;
        out[at] = static_cast<int32_t>(pages[offset / page_size_] * page_size_ + offset % page_size_);
      }
    }
    stop = first;
  }
}

}  // namespace phloem
