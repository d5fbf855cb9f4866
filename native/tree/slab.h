// Owns the memory of keys and values: append-only chunks of 32-bit words. Must not know what the words mean, nor
// who holds them beyond one list head per chunk (the tree threads its nodes through it to empty sparse chunks).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tree/zeroed_array.h"

namespace phloem {

class Slab {
 public:
  struct Ref {
    uint32_t chunk;
    uint32_t offset;
  };
  static constexpr uint32_t kNoChunk = 0xffffffffu;
  static constexpr uint32_t kChunkWords = 1u << 19;  // 2 MiB

  // Room for n words; O(1). An extent that would fill a quarter of a chunk gets a chunk of its own.
  Ref allocate(uint32_t n) {
    if (n >= kChunkWords / 4) {
      const uint32_t chunk = new_chunk(n);
      chunks_[chunk].used = chunks_[chunk].live = n;
      return {chunk, 0};
    }
    if (current_ == kNoChunk || chunks_[current_].used + n > chunks_[current_].size) {
      const uint32_t full = current_;
      current_ = new_chunk(kChunkWords);
      if (full != kNoChunk && chunks_[full].live == 0) drop(full);
    }
    Chunk& chunk = chunks_[current_];
    const Ref ref{current_, chunk.used};
    chunk.used += n;
    chunk.live += n;
    return ref;
  }

  // n words of a chunk are dead. True when the chunk is so sparse that its holders should move out.
  bool release(uint32_t id, uint32_t n) {
    Chunk& chunk = chunks_[id];
    chunk.live -= n;
    if (id == current_) return false;
    if (chunk.live == 0) {
      drop(id);
      return false;
    }
    return chunk.live < chunk.size / 8;
  }

  uint32_t* at(uint32_t chunk, uint32_t offset) { return chunks_[chunk].words.data() + offset; }
  const uint32_t* at(uint32_t chunk, uint32_t offset) const { return chunks_[chunk].words.data() + offset; }
  uint32_t& first_holder(uint32_t chunk) { return chunks_[chunk].first_holder; }
  uint32_t live_words(uint32_t chunk) const { return chunks_[chunk].live; }
  uint32_t num_chunks() const { return static_cast<uint32_t>(chunks_.size()); }
  bool alive(uint32_t chunk) const { return static_cast<bool>(chunks_[chunk].words); }
  uint64_t bytes() const { return bytes_; }

 private:
  struct Chunk {
    ZeroedArray<uint32_t> words;
    uint32_t size = 0;
    uint32_t used = 0;
    uint32_t live = 0;
    uint32_t first_holder = kNoChunk;
  };

  uint32_t new_chunk(uint32_t size) {
    uint32_t id;
    if (vacant_.empty()) {
      id = static_cast<uint32_t>(chunks_.size());
      chunks_.emplace_back();
    } else {
      id = vacant_.back();
      vacant_.pop_back();
    }
    Chunk& chunk = chunks_[id];
    if (size == kChunkWords && spare_) {
      chunk.words = std::move(spare_);
    } else {
      chunk.words = ZeroedArray<uint32_t>(size);
    }
    chunk.size = size;
    chunk.used = chunk.live = 0;
    chunk.first_holder = kNoChunk;
    bytes_ += uint64_t{size} * sizeof(uint32_t);
    return id;
  }

  void drop(uint32_t id) {
    Chunk& chunk = chunks_[id];
    bytes_ -= uint64_t{chunk.size} * sizeof(uint32_t);
    ZeroedArray<uint32_t> words = std::move(chunk.words);
    if (chunk.size == kChunkWords && !spare_) spare_ = std::move(words);
    vacant_.push_back(id);
  }

  std::vector<Chunk> chunks_;
  std::vector<uint32_t> vacant_;
  ZeroedArray<uint32_t> spare_;
  uint32_t current_ = kNoChunk;
  uint64_t bytes_ = 0;
};

}  // namespace phloem
