// Owns the nodes of the tree as plain records in fixed blocks, and their ids and generations. Must not know what
// a lookup or an eviction is.
#pragma once

#include <cstdint>
#include <vector>

#include "tree/slab.h"
#include "tree/zeroed_array.h"

namespace phloem {

using NodeId = uint32_t;
constexpr NodeId kNone = 0xffffffffu;

enum NodeFlag : uint32_t {
  kAlive = 1,      // in use (its id is not on the free list)
  kRoot = 2,       // the empty node of a namespace, or of the flushed
  kIndexed = 4,    // reachable by the first page of its key
  kDetached = 8,   // flushed while locked: nobody but its holders can reach it
  kCutOff = 32,    // the topmost flushed node: not in its parent's index, whatever its parent is
  kListed = 16,    // on the eviction order
  kHeapShift = 8,  // bits 8-9: where on the order
};

// What a walk touches: one cache line.
struct alignas(64) NodeHot {
  uint32_t start;         // position of the first token of the key
  uint32_t len;           // tokens in the key; 0 for roots only
  uint32_t chunk;         // where key and value lie in the slab
  uint32_t token_offset;  // words from the chunk's start
  uint32_t page_offset;
  NodeId parent;
  NodeId first_child;
  uint32_t num_children;
  NodeId next_sibling;
  NodeId prev_sibling;
  uint32_t generation;    // changes when the id is used again
  uint32_t epoch;         // changes when a match that ended here may end elsewhere
  uint32_t lock_ref;      // cursors at this node or below
  uint32_t pending_from;  // tokens [pending_from, len) of the key are written by a step that has not completed
  uint32_t fingerprint;   // hash of the first page of the key
  uint32_t flags;
};

// What locking, releasing and evicting touch beside it: one more.
struct alignas(64) NodeCold {
  uint64_t tick;  // last release (fifo: first insertion)
  uint32_t prev;  // neighbours on the eviction list; `prev` is the place in the heap for heap policies
  uint32_t next;
  uint32_t capacity;    // tokens there is room for at token_offset
  uint32_t hits;        // cursors that came through, the inserting one included
  uint32_t aux;         // priority, or the clock of gdsf
  uint32_t want_ref;    // wants at this node or below
  uint32_t pin_ref;     // pins at this node or below
  uint32_t first_mark;  // wants and pins that end at this node
  uint32_t chunk_prev;  // holders of the same chunk
  uint32_t chunk_next;
  uint32_t space;  // index of the namespace's root
};

// Ids are dense and reused, each time with a new generation. create and destroy cost O(1).
class NodeStore {
 public:
  NodeHot& hot(NodeId id) { return hot_[id >> kShift][id & kMask]; }
  const NodeHot& hot(NodeId id) const { return hot_[id >> kShift][id & kMask]; }
  NodeCold& cold(NodeId id) { return cold_[id >> kShift][id & kMask]; }
  const NodeCold& cold(NodeId id) const { return cold_[id >> kShift][id & kMask]; }

  void prefetch(NodeId id) const {
    __builtin_prefetch(&hot(id));
    __builtin_prefetch(&cold(id));
  }

  NodeId create() {
    const NodeId id = free_ != kNone ? free_ : fresh();
    NodeHot& h = hot(id);
    if (free_ != kNone) free_ = h.next_sibling;
    const uint32_t generation = h.generation + 1;
    h = NodeHot{};
    h.generation = generation;
    h.flags = kAlive;
    h.chunk = Slab::kNoChunk;
    h.parent = h.first_child = h.next_sibling = h.prev_sibling = kNone;
    NodeCold& c = cold(id);
    c = NodeCold{};
    c.prev = c.next = c.first_mark = c.chunk_prev = c.chunk_next = kNone;
    ++num_alive_;
    return id;
  }

  void destroy(NodeId id) {
    NodeHot& h = hot(id);
    h.flags = 0;
    ++h.epoch;
    h.next_sibling = free_;
    free_ = id;
    --num_alive_;
  }

  bool alive(NodeId id, uint32_t generation) const {
    return id < fresh_ && (hot(id).flags & kAlive) != 0 && hot(id).generation == generation;
  }
  uint32_t num_alive() const { return num_alive_; }
  uint32_t num_ids() const { return fresh_; }
  uint64_t bytes() const { return (uint64_t{hot_.size()} << kShift) * (sizeof(NodeHot) + sizeof(NodeCold)); }

 private:
  static constexpr uint32_t kShift = 15;  // two huge pages per block
  static constexpr uint32_t kMask = (1u << kShift) - 1;

  // An id that was never used; its record is zero.
  NodeId fresh() {
    if (fresh_ == hot_.size() << kShift) {
      hot_.emplace_back(size_t{1} << kShift);
      cold_.emplace_back(size_t{1} << kShift);
    }
    return fresh_++;
  }

  std::vector<ZeroedArray<NodeHot>> hot_;
  std::vector<ZeroedArray<NodeCold>> cold_;
  NodeId fresh_ = 0;
  NodeId free_ = kNone;
  uint32_t num_alive_ = 0;
};

}  // namespace phloem
