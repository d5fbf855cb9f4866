// Owns the structure of the tree: keys and values, walking, splitting, merging. Must not know cursors, steps or marks
// beyond the counters they leave in a node.

#include "tree/radix_tree.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace phloem {

namespace {

constexpr uint32_t kBlock = 256;  // tokens compared by one memcmp

// Length of the common prefix of two runs of n tokens. 4 to 17 tokens per nanosecond in cache.
uint32_t common_prefix(const int32_t* a, const int32_t* b, uint32_t n) {
  uint32_t i = 0;
  while (i + kBlock <= n && std::memcmp(a + i, b + i, kBlock * sizeof(int32_t)) == 0) i += kBlock;
  const uint32_t stop = std::min(n, i + kBlock);
  while (i + 16 <= stop && std::memcmp(a + i, b + i, 16 * sizeof(int32_t)) == 0) i += 16;
  while (i < stop && a[i] == b[i]) ++i;
  return i;
}

// Negative ids are positions of an atomic span; all but its first have bit 30 clear.
bool inside_span(int32_t token) { return (static_cast<uint32_t>(token) >> 30) == 2; }

TreeConfig checked(const TreeConfig& config) {
  if (config.num_pages == 0 || config.num_pages >= 0x7fffffffu) {
    throw CacheError("num_pages must be from 1 to 2^31-2, got " + std::to_string(config.num_pages));
  }
  if (config.page_size == 0 || config.page_size > 256) {
    throw CacheError("page_size must be from 1 to 256, got " + std::to_string(config.page_size));
  }
  if (!(config.evict_watermark >= 0.0 && config.evict_watermark < 1.0)) {
    throw CacheError("evict_watermark must be at least 0 and below 1, got " + std::to_string(config.evict_watermark));
  }
  if (!(config.pin_budget >= 0.0 && config.pin_budget <= 1.0)) {
    throw CacheError("pin_budget must be from 0 to 1, got " + std::to_string(config.pin_budget));
  }
  return config;
}

}  // namespace

RadixTree::RadixTree(const TreeConfig& config)
    : config_(checked(config)), page_size_(config.page_size), pool_(config.num_pages), order_(nodes_, config.policy) {}

SpaceId RadixTree::create_space() {
  const NodeId root = nodes_.create();
  hot(root).flags |= kRoot;
  cold(root).space = static_cast<SpaceId>(roots_.size());
  roots_.push_back(root);
  return cold(root).space;
}

void RadixTree::check_space(SpaceId space) const {
  if (space >= roots_.size()) {
    throw CacheError("unknown namespace id " + std::to_string(space) +
                     ": expected one that namespace_id returned, of " + std::to_string(roots_.size()));
  }
}

void RadixTree::check_match(SpaceId space, const Match& match) const {
  if (nodes_.alive(match.node, match.generation) && cold(match.node).space != space) {
    throw CacheError("probe of namespace " + std::to_string(cold(match.node).space) + " used in namespace " +
                     std::to_string(space) + ": probe each namespace by itself");
  }
}

// --- keys and values ---

const int32_t* RadixTree::key(NodeId id) const {
  return reinterpret_cast<const int32_t*>(slab_.at(hot(id).chunk, hot(id).token_offset));
}
int32_t* RadixTree::key(NodeId id) { return reinterpret_cast<int32_t*>(slab_.at(hot(id).chunk, hot(id).token_offset)); }
const PageId* RadixTree::value(NodeId id) const { return slab_.at(hot(id).chunk, hot(id).page_offset); }
PageId* RadixTree::value(NodeId id) { return slab_.at(hot(id).chunk, hot(id).page_offset); }

uint32_t RadixTree::fingerprint(const int32_t* page) const {
  uint64_t h = 0;
  for (uint32_t i = 0; i < page_size_; ++i) {
    h = (h ^ static_cast<uint32_t>(page[i])) * 0x9e3779b97f4a7c15ull;
    h ^= h >> 32;
  }
  return static_cast<uint32_t>(h);
}

void RadixTree::hold(NodeId id) {
  NodeId& first = slab_.first_holder(hot(id).chunk);
  cold(id).chunk_prev = kNone;
  cold(id).chunk_next = first;
  if (first != kNone) cold(first).chunk_prev = id;
  first = id;
}

void RadixTree::unhold(NodeId id) {
  NodeCold& c = cold(id);
  (c.chunk_prev == kNone ? slab_.first_holder(hot(id).chunk) : cold(c.chunk_prev).chunk_next) = c.chunk_next;
  if (c.chunk_next != kNone) cold(c.chunk_next).chunk_prev = c.chunk_prev;
}

// Capacity for a key that is expected to go on growing: copying it when it is full costs O(1) per token.
uint32_t RadixTree::roomy(uint32_t tokens) const { return tokens + std::clamp(tokens / 4, 32u, 16384u); }

// Copy key and value to a new extent. True when the old chunk is sparse now: tidy it when no pointers are held.
bool RadixTree::move_key(NodeId id, uint32_t capacity) {
  NodeHot& h = hot(id);
  NodeCold& c = cold(id);
  const Slab::Ref ref = slab_.allocate(words(capacity));
  const uint32_t old_chunk = h.chunk;
  bool sparse = false;
  if (old_chunk != Slab::kNoChunk) {
    std::memcpy(slab_.at(ref.chunk, ref.offset), key(id), h.len * sizeof(int32_t));
    std::memcpy(slab_.at(ref.chunk, ref.offset + capacity), value(id), num_pages(h.len) * sizeof(PageId));
    unhold(id);
    sparse = slab_.release(old_chunk, words(c.capacity));
  }
  h.chunk = ref.chunk;
  h.token_offset = ref.offset;
  h.page_offset = ref.offset + capacity;
  c.capacity = capacity;
  hold(id);
  return sparse;
}

// Move the last eighth out of a chunk, so that it can go: amortised O(1) per word that died in it.
void RadixTree::tidy(uint32_t chunk) {
  for (NodeId id = slab_.first_holder(chunk); id != kNone; id = slab_.first_holder(chunk)) {
    const NodeId next = cold(id).chunk_next;
    if (next != kNone) {
      __builtin_prefetch(key(next));
      if (cold(next).chunk_next != kNone) nodes_.prefetch(cold(next).chunk_next);
    }
    move_key(id, hot(id).len);
  }
}

// --- accounting ---

// Add or take away what a node contributes to the counters; every change of length, lock or pin is between two calls.
void RadixTree::account(NodeId id, int sign) {
  const NodeHot& h = hot(id);
  const uint64_t pages = num_pages(h.len);
  const auto apply = [sign](uint64_t& counter, uint64_t by) { counter += sign > 0 ? by : -by; };
  apply(h.lock_ref != 0 ? pages_protected_ : pages_evictable_, pages);
  apply(tokens_, h.len);
  if (cold(id).pin_ref != 0) apply(pages_pinned_, pages);
  if (h.pending_from < h.len) {
    apply(tokens_pending_, h.len - h.pending_from);
    apply(pages_pending_, pages - h.pending_from / page_size_);
  }
}

// --- lookups ---

NodeId RadixTree::find_child(NodeId parent, const int32_t* page) const {
  const uint32_t print = fingerprint(page);
  const auto same = [&](NodeId id) {
    const NodeHot& h = hot(id);
    return h.fingerprint == print && h.parent == parent && (h.flags & kIndexed) != 0 &&
           std::memcmp(key(id), page, page_size_ * sizeof(int32_t)) == 0;
  };
  if (hot(parent).num_children == 1) {
    const NodeId only = hot(parent).first_child;
    return same(only) ? only : kNone;
  }
  return index_.find(ChildIndex::hash(parent, print), same);
}

// The deepest node reached and the length matched, rounded down to a page. O(tokens compared + nodes passed).
RadixTree::Spot RadixTree::walk(Spot from, Tokens tokens, uint32_t base) const {
  NodeId node = from.node;
  uint32_t at = from.length;
  const uint32_t total = base + tokens.size;
  if (at > total) return {node, floor(total)};
  for (;;) {
    const NodeHot& h = hot(node);
    const uint32_t stop = h.start + floor(h.len);
    if (at < stop) {
      at += common_prefix(key(node) + (at - h.start), tokens.data + (at - base), std::min(stop, total) - at);
      if (at < stop) break;
    }
    if (h.num_children == 0 || total - at < page_size_) break;
    const NodeId child = find_child(node, tokens.data + (at - base));
    if (child == kNone) break;
    node = child;
  }
  return {node, floor(at)};
}

// Move a match out of an atomic span that it ends inside, but not before `base`.
RadixTree::Spot RadixTree::leave_span(Spot spot, Tokens tokens, uint32_t base) const {
  uint32_t at = spot.length;
  while (at > base && at < base + tokens.size && inside_span(tokens.data[at - base])) {
    while (at > base && inside_span(tokens.data[at - base])) --at;
    at = std::max(floor(at), base);
  }
  return {spot.node, at};
}

// The node on the path of `node` that holds the token before position `length`; the root for 0.
NodeId RadixTree::climb(NodeId node, uint32_t length) const {
  while (!is_root(node) && length <= hot(node).start) node = hot(node).parent;
  return node;
}

Match RadixTree::match_at(Spot spot) const {
  return {spot.length, spot.node, hot(spot.node).generation, hot(spot.node).epoch};
}

Match RadixTree::peek(SpaceId space, Tokens tokens) const {
  return match_at(leave_span(walk({roots_[space], 0}, tokens, 0), tokens, 0));
}

Match RadixTree::peek_again(SpaceId space, Tokens tokens, const Match& last) const {
  if (!nodes_.alive(last.node, last.generation) || (hot(last.node).flags & kDetached) != 0) return peek(space, tokens);
  const uint32_t length = std::min(last.length, hot(last.node).start + floor(hot(last.node).len));
  return match_at(leave_span(walk({climb(last.node, length), length}, tokens, 0), tokens, 0));
}

// --- children ---

void RadixTree::link_child(NodeId parent, NodeId child) {
  NodeHot& p = hot(parent);
  NodeHot& c = hot(child);
  c.parent = parent;
  c.prev_sibling = kNone;
  c.next_sibling = p.first_child;
  if (p.first_child != kNone) hot(p.first_child).prev_sibling = child;
  p.first_child = child;
  ++p.num_children;
}

void RadixTree::unlink_child(NodeId child) {
  NodeHot& c = hot(child);
  NodeHot& p = hot(c.parent);
  (c.prev_sibling == kNone ? p.first_child : hot(c.prev_sibling).next_sibling) = c.next_sibling;
  if (c.next_sibling != kNone) hot(c.next_sibling).prev_sibling = c.prev_sibling;
  --p.num_children;
}

void RadixTree::index_child(NodeId child) {
  NodeHot& c = hot(child);
  c.fingerprint = fingerprint(key(child));
  c.flags |= kIndexed;
  index_.insert(ChildIndex::hash(c.parent, c.fingerprint), child);
  ++hot(c.parent).epoch;
}

void RadixTree::unindex_child(NodeId child) {
  NodeHot& c = hot(child);
  if ((c.flags & kIndexed) == 0) return;
  index_.erase(ChildIndex::hash(c.parent, c.fingerprint), child);
  c.flags &= ~kIndexed;
}

// An empty child with room for `capacity` tokens; the caller fills, locks, counts and indexes it.
NodeId RadixTree::create_node(NodeId parent, uint32_t capacity) {
  const NodeId id = nodes_.create();
  NodeHot& h = hot(id);
  h.start = end(parent);
  h.flags |= hot(parent).flags & kDetached;
  cold(id).space = cold(parent).space;
  cold(id).tick = is_root(parent) ? tick_ : cold(parent).tick;
  move_key(id, capacity);
  link_child(parent, id);
  return id;
}

// --- split and merge ---

// Cut a node before its token `at`, a page boundary inside it. The node keeps its id and the lower half; the new
// upper half is returned. O(1), nothing is copied.
NodeId RadixTree::split(NodeId node, uint32_t at) {
  assert(at > 0 && at < hot(node).len && at % page_size_ == 0);
  const NodeId upper = nodes_.create();
  NodeHot& u = hot(upper);
  NodeHot& n = hot(node);
  NodeCold& uc = cold(upper);
  NodeCold& nc = cold(node);
  const uint32_t generation = u.generation;
  u = n;
  u.generation = generation;
  u.len = at;
  u.pending_from = std::min(n.pending_from, at);
  u.flags &= ~kListed;
  u.epoch = 0;
  uc = nc;
  uc.capacity = at;
  uc.prev = uc.next = uc.first_mark = kNone;
  hold(upper);
  if (n.prev_sibling != kNone) hot(n.prev_sibling).next_sibling = upper;
  if (n.prev_sibling == kNone) hot(n.parent).first_child = upper;
  if (n.next_sibling != kNone) hot(n.next_sibling).prev_sibling = upper;
  if ((n.flags & kIndexed) != 0) index_.replace(ChildIndex::hash(n.parent, n.fingerprint), node, upper);
  u.first_child = kNone;
  u.num_children = 0;
  n.flags &= ~(kIndexed | kCutOff);
  n.start += at;
  n.len -= at;
  n.token_offset += at;
  n.page_offset += at / page_size_;
  n.pending_from = std::max(n.pending_from, at) - at;
  nc.capacity -= at;
  ++n.epoch;
  link_child(upper, node);
  if (n.len >= page_size_) index_child(node);
  order_.split(upper, node);
  ++splits_;
  return upper;
}

// The node that ends at a match: splits the one it ends inside.
NodeId RadixTree::node_ending_at(Spot spot) {
  const NodeId node = climb(spot.node, spot.length);
  return spot.length < end(node) ? split(node, spot.length - hot(node).start) : node;
}

// Equal locks, wants and pins mean that no cursor and no mark ends at the parent. Only the child may have pending
// tokens: the records of steps name nodes, and the parent's name goes.
bool RadixTree::mergeable(NodeId parent, NodeId child) const {
  const NodeHot& p = hot(parent);
  const NodeHot& c = hot(child);
  if (p.num_children != 1 || p.lock_ref != c.lock_ref || (p.flags & kRoot) != 0) return false;
  if (p.pending_from < p.len || (c.flags & kCutOff) != 0) return false;
  const NodeCold& pc = cold(parent);
  const NodeCold& cc = cold(child);
  return pc.tick == cc.tick && pc.want_ref == cc.want_ref && pc.pin_ref == cc.pin_ref && pc.aux == cc.aux &&
         (!order_.counts_hits() || pc.hits == cc.hits);
}

// Put the parent's key before the child's. Copies nothing when they lie side by side (as after a split), only the
// child's where the parent has room behind it, else both.
void RadixTree::absorb_key(NodeId parent, NodeId child) {
  NodeHot& p = hot(parent);
  NodeHot& c = hot(child);
  NodeCold& pc = cold(parent);
  NodeCold& cc = cold(child);
  uint32_t sparse = Slab::kNoChunk;
  if (p.chunk == c.chunk && pc.capacity == p.len && c.token_offset == p.token_offset + p.len &&
      c.page_offset == p.page_offset + p.len / page_size_) {
    unhold(parent);
    cc.capacity += p.len;
  } else {
    if (pc.capacity < p.len + c.len) {
      const uint32_t old = p.chunk;
      if (move_key(parent, c.lock_ref != 0 ? roomy(p.len + c.len) : p.len + c.len)) sparse = old;
    }
    std::memcpy(key(parent) + p.len, key(child), c.len * sizeof(int32_t));
    std::memcpy(value(parent) + p.len / page_size_, value(child), num_pages(c.len) * sizeof(PageId));
    const uint32_t old = c.chunk;
    unhold(child);
    if (slab_.release(old, words(cc.capacity))) sparse = old;
    unhold(parent);
    c.chunk = p.chunk;
    cc.capacity = pc.capacity;
    hold(child);
  }
  c.token_offset = p.token_offset;
  c.page_offset = p.page_offset;
  c.start = p.start;
  c.len += p.len;
  c.pending_from += p.len;
  if (sparse != Slab::kNoChunk && slab_.alive(sparse)) tidy(sparse);
}

// Let a node absorb its parent, if they differ in nothing; the node keeps its id. O(1) plus what absorb_key copies.
bool RadixTree::try_merge(NodeId child) {
  const NodeId parent = hot(child).parent;
  if (parent == kNone || !mergeable(parent, child)) return false;
  assert(cold(parent).first_mark == kNone);
  NodeHot& p = hot(parent);
  NodeHot& c = hot(child);
  unindex_child(child);
  absorb_key(parent, child);
  c.flags |= p.flags & kCutOff;
  if ((p.flags & kIndexed) != 0) {
    index_.replace(ChildIndex::hash(p.parent, p.fingerprint), parent, child);
    c.flags |= kIndexed;
    c.fingerprint = p.fingerprint;
  }
  c.parent = p.parent;
  c.prev_sibling = p.prev_sibling;
  c.next_sibling = p.next_sibling;
  (p.prev_sibling == kNone ? hot(p.parent).first_child : hot(p.prev_sibling).next_sibling) = child;
  if (p.next_sibling != kNone) hot(p.next_sibling).prev_sibling = child;
  order_.remove(parent);
  nodes_.destroy(parent);
  ++merges_;
  return true;
}

// Merge what differs in nothing on the path of a node; the node itself stays. O(nodes on the path).
void RadixTree::merge_path(NodeId node) {
  while (!is_root(node)) {
    if (!try_merge(node)) node = hot(node).parent;
  }
}

void RadixTree::merge_only_child(NodeId parent) {
  if (!is_root(parent) && hot(parent).num_children == 1) try_merge(hot(parent).first_child);
}

}  // namespace phloem
