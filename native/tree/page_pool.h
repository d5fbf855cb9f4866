// Owns the free list of page ids. Must not know tokens, nodes or requests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tree/errors.h"

namespace phloem {

using PageId = uint32_t;

// Fixed ids 0 .. num_pages-1. allocate and free cost O(1) per page; the last page freed is the first handed out,
// and a run freed from its end comes back in ascending order.
class PagePool {
 public:
  explicit PagePool(uint32_t num_pages) : in_use_(num_pages, false) {
    free_.reserve(num_pages);
    for (uint32_t page = num_pages; page-- > 0;) free_.push_back(page);
  }

  uint32_t num_pages() const { return static_cast<uint32_t>(in_use_.size()); }
  uint32_t num_free() const { return static_cast<uint32_t>(free_.size()); }
  bool in_use(PageId page) const { return in_use_[page]; }

  // Write n ids to out, or nothing and false when fewer are free.
  bool allocate(uint32_t n, PageId* out) {
    if (n > free_.size()) return false;
    for (uint32_t i = 0; i < n; ++i) {
      out[i] = free_.back();
      free_.pop_back();
      in_use_[out[i]] = true;
    }
    return true;
  }

  // Give n pages back, the last one first. Raises CacheError for an id that is out of range or already free.
  void free(const PageId* pages, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
      if (pages[i] >= in_use_.size() || !in_use_[pages[i]]) {
        for (uint32_t j = 0; j < i; ++j) in_use_[pages[j]] = true;
        throw CacheError("page " + std::to_string(pages[i]) + " is not in use: expected an allocated id below " +
                         std::to_string(in_use_.size()) + ", free each page once");
      }
      in_use_[pages[i]] = false;
    }
    for (uint32_t i = n; i-- > 0;) free_.push_back(pages[i]);
  }

  uint64_t bytes() const { return free_.capacity() * sizeof(PageId) + in_use_.size() / 8; }

 private:
  std::vector<PageId> free_;
  std::vector<bool> in_use_;
};

}  // namespace phloem
