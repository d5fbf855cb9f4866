// Owns the free list of page ids. Must not know tokens, nodes or requests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tree/errors.h"

namespace phloem {

using PageId = uint32_t;

// Fixed ids 0 .. num_pages-1. O(1) per page; the last page freed is the first handed out, and a run freed from its
// end comes back in ascending order. Trusts its caller: the tree's own books say which pages are in use.
class PagePool {
 public:
  explicit PagePool(uint32_t num_pages) : free_(num_pages), num_free_(num_pages) {
    for (uint32_t i = 0; i < num_pages; ++i) free_[i] = num_pages - 1 - i;
  }

  uint32_t num_pages() const { return static_cast<uint32_t>(free_.size()); }
  uint32_t num_free() const { return num_free_; }
  std::span<const PageId> free_pages() const { return {free_.data(), num_free_}; }

  // Write n ids to out, or nothing and false when fewer are free.
  bool allocate(uint32_t n, PageId* out) {
    if (n > num_free_) return false;
    num_free_ -= n;
    std::reverse_copy(free_.data() + num_free_, free_.data() + num_free_ + n, out);
    return true;
  }

  // Give n pages back, the last one first.
  void free(const PageId* pages, uint32_t n) {
    std::reverse_copy(pages, pages + n, free_.data() + num_free_);
    num_free_ += n;
  }

 private:
  std::vector<PageId> free_;  // the first num_free_ are free
  uint32_t num_free_;
};

// The same for callers who keep no books.
class CheckedPagePool {
 public:
  explicit CheckedPagePool(uint32_t num_pages) : pool_(num_pages), in_use_(num_pages, false) {}

  uint32_t num_pages() const { return pool_.num_pages(); }
  uint32_t num_free() const { return pool_.num_free(); }

  bool allocate(uint32_t n, PageId* out) {
    if (!pool_.allocate(n, out)) return false;
    for (uint32_t i = 0; i < n; ++i) in_use_[out[i]] = true;
    return true;
  }

  // Raises CacheError for an id that is out of range or not in use, or comes twice; then none is freed.
  void free(const PageId* pages, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
      if (pages[i] >= in_use_.size() || !in_use_[pages[i]]) {
        for (uint32_t j = 0; j < i; ++j) in_use_[pages[j]] = true;
        throw CacheError("page " + std::to_string(static_cast<int32_t>(pages[i])) +
                         " is not in use: expected an allocated id below " + std::to_string(in_use_.size()) +
                         ", each once");
      }
      in_use_[pages[i]] = false;
    }
    pool_.free(pages, n);
  }

 private:
  PagePool pool_;
  std::vector<bool> in_use_;
};

}  // namespace phloem
