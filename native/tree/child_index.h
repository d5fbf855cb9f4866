// Owns the map (parent, first page of the key) -> child as one open-addressing table of 8-byte entries. Must not
// know keys: a hit is a candidate that the tree compares.
#pragma once

#include <cstdint>
#include <utility>

#include "tree/node.h"
#include "tree/zeroed_array.h"

namespace phloem {

class ChildIndex {
 public:
  ChildIndex() : table_(64) {}

  static uint32_t hash(NodeId parent, uint32_t fingerprint) {
    uint64_t h = (uint64_t{parent} << 32 | fingerprint) * 0x9e3779b97f4a7c15ull;
    h ^= h >> 29;
    h *= 0xbf58476d1ce4e5b9ull;
    return static_cast<uint32_t>(h >> 32);
  }

  // First child with this hash for which same(id) holds, or kNone.
  template <class Same>
  NodeId find(uint32_t hash, Same same) const {
    for (size_t i = hash & mask();; i = (i + 1) & mask()) {
      const Entry& entry = table_[i];
      if (entry.id_plus_1 == 0) return kNone;
      if (entry.hash == hash && same(entry.id_plus_1 - 1)) return entry.id_plus_1 - 1;
    }
  }

  void insert(uint32_t hash, NodeId id) {
    if ((count_ + 1) * 4 > table_.size() * 3) resize();
    place({hash, id + 1});
    ++count_;
  }

  void replace(uint32_t hash, NodeId from, NodeId to) { table_[locate(hash, from)].id_plus_1 = to + 1; }

  // Close the gap behind the entry, so that lookups need no tombstones.
  void erase(uint32_t hash, NodeId id) {
    size_t hole = locate(hash, id);
    for (size_t i = (hole + 1) & mask(); table_[i].id_plus_1 != 0; i = (i + 1) & mask()) {
      const size_t home = table_[i].hash & mask();
      if (((i - home) & mask()) >= ((i - hole) & mask())) {
        table_[hole] = table_[i];
        hole = i;
      }
    }
    table_[hole] = Entry{};
    --count_;
  }

  void prefetch(uint32_t hash) const { __builtin_prefetch(&table_[hash & mask()]); }

  size_t size() const { return count_; }
  uint64_t bytes() const { return table_.bytes(); }

 private:
  struct Entry {
    uint32_t hash;
    uint32_t id_plus_1;  // 0: empty
  };

  size_t mask() const { return table_.size() - 1; }

  size_t locate(uint32_t hash, NodeId id) const {
    size_t i = hash & mask();
    while (table_[i].id_plus_1 != id + 1) i = (i + 1) & mask();
    return i;
  }

  void place(Entry entry) {
    size_t i = entry.hash & mask();
    while (table_[i].id_plus_1 != 0) i = (i + 1) & mask();
    table_[i] = entry;
  }

  void resize() {
    ZeroedArray<Entry> old(table_.size() * 2);
    std::swap(old, table_);
    for (const Entry& entry : old) {
      if (entry.id_plus_1 != 0) place(entry);
    }
  }

  ZeroedArray<Entry> table_;
  size_t count_ = 0;
};

}  // namespace phloem
