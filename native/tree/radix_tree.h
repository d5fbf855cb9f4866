// Owns the tree, its pages and every cursor in it. Must not know Python, models, clocks or who asks.
//
// One thread calls it at a time. A call that raises has changed nothing. Positions, lengths and starts are in tokens;
// a node's key begins on a page boundary, so only the end of a leaf can be a partly filled page (its "tail"), and a
// tail belongs to the only cursor at that leaf.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tree/child_index.h"
#include "tree/errors.h"
#include "tree/eviction.h"
#include "tree/node.h"
#include "tree/page_pool.h"
#include "tree/prefix_hash.h"
#include "tree/slab.h"

namespace phloem {

using SpaceId = uint32_t;
using CursorId = int64_t;
using MarkId = int64_t;
using StepId = int64_t;

struct TreeConfig {
  uint32_t num_pages = 0;
  uint32_t page_size = 1;
  Policy policy = Policy::kLru;
  double evict_watermark = 0.0;
  double pin_budget = 0.3;
};

// A borrowed run of token ids.
struct Tokens {
  const int32_t* data;
  uint32_t size;
};

// Where a match ended, and what must be unchanged for it to end there still.
struct Match {
  uint32_t length = 0;
  NodeId node = kNone;
  uint32_t generation = 0;
  uint32_t epoch = 0;
};

struct AppendResult {
  bool done;
  uint32_t num_shared;  // leading tokens that were there already
  int64_t moved_from;   // position from which the cursor's slots changed, or -1
};

// Counters; those named pages_* and the token counts are of now, the others only rise.
struct TreeStats {
  uint64_t pages_total, pages_free, pages_evictable, pages_protected, pages_pending, pages_pinned;
  uint64_t nodes, tokens, tokens_pending, cursors, pins, wants, spaces;
  uint64_t evicted_pages, evicted_nodes, evicted_pinned_pages, evicted_wanted_pages, flushed_pages;
  uint64_t inserted_tokens, splits, merges, rounding_loss_tokens, metadata_bytes;
};

enum class EventKind : uint8_t { kStored, kRemoved, kCleared };

// A change of what can be matched. Prefixes are named by a 128-bit hash of all tokens before `position`.
struct Event {
  EventKind kind;
  SpaceId space;
  uint32_t position;
  PrefixHash prefix;
  std::vector<int32_t> tokens;
};

// One node as a view shows it.
struct NodeView {
  NodeId node, parent;
  uint32_t generation;
  SpaceId space;
  uint32_t start, len, lock_ref, hits, num_children, num_pending, want_ref, pin_ref;
  uint64_t tick;
};

class RadixTree {
 public:
  explicit RadixTree(const TreeConfig& config);
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;

  const TreeConfig& config() const { return config_; }

  // --- namespaces ---
  SpaceId create_space();

  // --- lookups: change nothing, not even recency ---
  Match peek(SpaceId space, Tokens tokens) const;
  // O(1) when nothing changed where `last` ended, else O(tokens matched beyond it); from the root if its node is gone.
  Match peek_again(SpaceId space, Tokens tokens, const Match& last) const;
  bool unchanged(const Match& match) const {
    return nodes_.alive(match.node, match.generation) && nodes_.hot(match.node).epoch == match.epoch;
  }
  void check_space(SpaceId space) const;
  // The match, if it is one of ours, belongs to another namespace: raises CacheError.
  void check_match(SpaceId space, const Match& match) const;

  // --- cursors ---
  struct Opened {
    CursorId cursor;
    uint32_t length;
  };
  Opened open(SpaceId space, Tokens tokens, int32_t priority);
  uint32_t advance(CursorId cursor, Tokens tokens);
  AppendResult append(CursorId cursor, Tokens tokens, StepId step);
  struct Extended {
    uint32_t slot;
    bool write;
    int64_t moved_from;
  };
  // One token. False when the pool cannot supply a page.
  bool extend(CursorId cursor, int32_t token, StepId step, Extended* out);
  uint32_t length(CursorId cursor) const;
  CursorId fork(CursorId cursor);
  void close(CursorId cursor);
  void fill_slots(CursorId cursor, uint32_t start, int32_t* out, uint64_t out_size) const;

  // --- steps ---
  void complete(StepId step);
  void discard(StepId step);

  // --- wants and pins ---
  MarkId want(SpaceId space, Tokens tokens);
  void unwant(MarkId mark);
  // 0 when the budget does not hold the pages it would add.
  MarkId pin(SpaceId space, Tokens tokens, double expires_at, uint32_t* length);
  void unpin(MarkId mark);
  uint32_t expire_pins(double now);

  // --- space ---
  uint32_t evict(uint32_t num_pages);
  uint64_t flush_all();
  uint64_t flush_space(SpaceId space);
  uint64_t flush_prefix(SpaceId space, Tokens prefix);

  // --- views ---
  TreeStats stats() const;
  uint32_t num_free() const { return pool_.num_free(); }
  uint64_t num_evictable() const { return pages_evictable_; }
  void note_rounding_loss(uint64_t tokens) { rounding_loss_ += tokens; }
  // "" or a sentence naming the node that breaks an invariant. O(everything).
  std::string check_invariants() const;
  // Up to `max_nodes` nodes with ids from `from` on; returns the id to go on from, or kNone at the end.
  NodeId snapshot(NodeId from, uint32_t max_nodes, std::vector<NodeView>* out) const;
  uint64_t version() const { return version_; }
  void listen(bool on);
  std::vector<Event> take_events();

 private:
  friend class TreeChecker;

  struct Spot {
    NodeId node;
    uint32_t length;  // start(node) < length <= end(node), or 0 at a root
  };
  struct Cursor {
    NodeId node = kNone;
    uint32_t generation = 0;
    int32_t priority = 0;
    bool open = false;
    uint64_t birth = 0;
  };
  struct Record {
    NodeId node;
    uint32_t generation;
    uint32_t from, to;  // positions
  };
  struct Step {
    StepId id;
    std::vector<Record> records;
  };
  struct Mark {
    NodeId node = kNone;  // kNone: what it marked is gone
    uint32_t generation = 0;
    uint32_t prev = kNone, next = kNone;  // marks that end at the same node
    bool live = false, is_pin = false;
    double expires_at = 0.0;
  };

  // radix_tree.cpp, shrink.cpp: structure
  NodeHot& hot(NodeId id) { return nodes_.hot(id); }
  const NodeHot& hot(NodeId id) const { return nodes_.hot(id); }
  NodeCold& cold(NodeId id) { return nodes_.cold(id); }
  const NodeCold& cold(NodeId id) const { return nodes_.cold(id); }
  bool is_root(NodeId id) const { return (hot(id).flags & kRoot) != 0; }
  uint32_t end(NodeId id) const { return hot(id).start + hot(id).len; }
  uint32_t num_pages(uint32_t tokens) const { return (tokens + page_size_ - 1) / page_size_; }
  uint32_t floor(uint32_t tokens) const { return page_size_ == 1 ? tokens : tokens - tokens % page_size_; }
  uint32_t words(uint32_t capacity) const { return capacity + num_pages(capacity); }
  const int32_t* key(NodeId id) const;
  int32_t* key(NodeId id);
  const PageId* value(NodeId id) const;
  PageId* value(NodeId id);
  uint32_t fingerprint(const int32_t* page) const;
  Match match_at(Spot spot) const;
  NodeId find_child(NodeId parent, const int32_t* page) const;
  // tokens.data[i] is the token at position base + i; `from.length >= base`.
  Spot walk(Spot from, Tokens tokens, uint32_t base) const;
  Spot leave_span(Spot spot, Tokens tokens, uint32_t base) const;
  NodeId climb(NodeId node, uint32_t length) const;
  void account(NodeId id, int sign);
  void hold(NodeId id);
  void unhold(NodeId id);
  uint32_t roomy(uint32_t tokens) const;
  bool move_key(NodeId id, uint32_t capacity);
  void tidy(uint32_t chunk);
  void link_child(NodeId parent, NodeId child);
  void unlink_child(NodeId child);
  void index_child(NodeId child);
  void unindex_child(NodeId child);
  NodeId create_node(NodeId parent, uint32_t capacity);
  NodeId split(NodeId node, uint32_t at);
  NodeId node_ending_at(Spot spot);
  bool mergeable(NodeId parent, NodeId child) const;
  bool try_merge(NodeId child);
  void absorb_key(NodeId parent, NodeId child);
  void merge_path(NodeId node);
  void merge_only_child(NodeId parent);
  void truncate(NodeId id, uint32_t len);
  void remove_leaf(NodeId id);
  void after_child_removed(NodeId parent);
  uint32_t trim(NodeId id, uint32_t num_pages);
  void prefetch(const EvictionWindow& window) const;
  void keep_watermark();

  // cursors.cpp
  Cursor& cursor_at(CursorId id);
  const Cursor& cursor_at(CursorId id) const;
  CursorId create_cursor(NodeId node, int32_t priority);
  void lock(NodeId id);
  void unlock(NodeId id);
  void lock_path(NodeId from, NodeId above, const Cursor& cursor, bool counts);
  void move_down(Cursor& cursor, Spot spot);
  uint32_t partial_match(Spot spot, Tokens tokens) const;
  void release(NodeId node);
  NodeId drop_tail(NodeId node);
  bool grows_in_place(const Cursor& cursor) const;
  void insert(Cursor& cursor, Tokens tokens, StepId step);
  void grow(NodeId id, Tokens tokens);
  NodeId equal_sibling(NodeId node, Tokens tokens) const;

  // steps.cpp
  Step& step_at(StepId id);
  void settle(const Record& record);
  void lift_records(NodeId from);
  void release_zombies();
  void check_discardable(const Step& step) const;
  NodeId discarded_top(const Record& record) const;
  void discard_record(const Record& record);
  void remove_subtree(NodeId top);

  // marks.cpp
  MarkId create_mark(NodeId node, bool is_pin, double expires_at);
  Mark& mark_at(MarkId id, bool is_pin);
  void count_mark(NodeId from, bool is_pin, int sign);
  void attach(uint32_t index, NodeId node);
  void detach(uint32_t index);
  void drop_mark(uint32_t index);
  void lift_marks(NodeId from, NodeId to);
  uint32_t mark_index(MarkId id) const { return static_cast<uint32_t>(id & 0xffffffff); }

  // flush.cpp
  uint64_t flush_subtree(NodeId top);

  // inspect.cpp
  PrefixHash hash_prefix(NodeId node, uint32_t length) const;
  void emit(EventKind kind, NodeId node, uint32_t from, uint32_t to);

  const TreeConfig config_;
  const uint32_t page_size_;
  PagePool pool_;
  Slab slab_;
  NodeStore nodes_;
  ChildIndex index_;
  EvictionOrder order_;
  std::vector<NodeId> roots_;  // [space]
  std::vector<Cursor> cursors_;
  std::vector<uint32_t> free_cursors_;
  std::vector<NodeId> zombies_;  // closed cursors that wait for the step that writes their node
  std::vector<Step> steps_;
  std::vector<Mark> marks_;
  std::vector<uint32_t> free_marks_;
  std::vector<std::pair<double, MarkId>> expiries_;  // heap, earliest first
  std::vector<Event> events_;
  bool listening_ = false;

  uint64_t tick_ = 0;
  uint64_t version_ = 0;
  uint64_t pages_evictable_ = 0, pages_protected_ = 0, pages_pending_ = 0, pages_pinned_ = 0;
  uint64_t tokens_ = 0, tokens_pending_ = 0, num_cursors_ = 0, num_pins_ = 0, num_wants_ = 0;
  uint64_t evicted_pages_ = 0, evicted_nodes_ = 0, evicted_pinned_ = 0, evicted_wanted_ = 0, flushed_pages_ = 0;
  uint64_t inserted_tokens_ = 0, splits_ = 0, merges_ = 0, rounding_loss_ = 0;
};

}  // namespace phloem
