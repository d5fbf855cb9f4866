// Runs random operations of every kind, over small alphabets and pools that are always full, and checks the books
// after each and every invariant now and then. Meant for builds with sanitizers and assertions.
//
//   tree_random_stress [operations=1000000] [seed=1]

#include <cstdio>
#include <cstdlib>
#include <random>

#include "tree/radix_tree.h"

namespace {

using namespace phloem;

class Driver {
 public:
  Driver(uint64_t seed, uint32_t page_size, Policy policy)
      : random_(seed), page_size_(page_size), tree_(config(page_size, policy, seed)) {
    for (int i = 0; i < 3; ++i) tree_.create_space();
    tree_.listen(seed % 2 == 0);
  }

  void run(uint64_t operations) {
    for (uint64_t i = 0; i < operations; ++i) {
      one();
      const TreeStats s = tree_.stats();
      if (s.pages_free + s.pages_evictable + s.pages_protected != s.pages_total) die("pages do not add up");
      if (i % 256 == 0) check();
    }
    while (!cursors_.empty()) close(0);
    while (newest_ >= oldest_) tree_.complete(oldest_++);
    check();
    if (tree_.stats().pages_protected != 0) die("protected pages with no cursor open");
    tree_.evict(static_cast<uint32_t>(tree_.stats().pages_total));
    if (tree_.stats().pages_free != tree_.stats().pages_total) die("not everything could be evicted");
    check();
  }

 private:
  static TreeConfig config(uint32_t page_size, Policy policy, uint64_t seed) {
    TreeConfig c;
    c.num_pages = 48 + static_cast<uint32_t>(seed * 37 % 64);
    c.page_size = page_size;
    c.policy = policy;
    c.evict_watermark = seed % 3 == 0 ? 0.1 : 0.0;
    return c;
  }

  [[noreturn]] void die(const std::string& what) {
    std::fprintf(stderr, "page_size %u: %s\n", page_size_, what.c_str());
    std::abort();
  }

  void check() {
    const std::string broken = tree_.check_invariants();
    if (!broken.empty()) die(broken);
    tree_.take_events();
  }

  uint32_t below(uint32_t n) { return std::uniform_int_distribution<uint32_t>(0, n - 1)(random_); }

  Tokens tokens() {
    tokens_.clear();
    for (uint32_t runs = 1 + below(4); runs-- > 0;) {
      tokens_.insert(tokens_.end(), (1 + below(6)) * (page_size_ + 1) / 2, static_cast<int32_t>(below(4)));
    }
    return {tokens_.data(), static_cast<uint32_t>(tokens_.size())};
  }

  void close(size_t i) {
    tree_.close(cursors_[i]);
    cursors_[i] = cursors_.back();
    cursors_.pop_back();
  }

  void one() {
    const uint32_t kind = below(100);
    const uint32_t space = below(8) == 0 ? 1 : 0;
    if (kind < 15 && cursors_.size() < 12) {
      cursors_.push_back(tree_.open(space, tokens(), static_cast<int32_t>(below(3))).cursor);
    } else if (kind < 60 && !cursors_.empty()) {
      use(cursors_[below(static_cast<uint32_t>(cursors_.size()))], kind);
    } else if (kind < 72 && !cursors_.empty()) {
      close(below(static_cast<uint32_t>(cursors_.size())));
    } else if (kind < 84) {
      if (newest_ >= oldest_) tree_.complete(oldest_++);
    } else if (kind < 86) {
      discard();
    } else if (kind < 90) {
      tree_.evict(1 + below(6));
    } else {
      mark_or_flush(kind, space);
    }
  }

  void use(CursorId cursor, uint32_t kind) {
    if (kind < 25) {
      tree_.advance(cursor, tokens());
    } else if (kind < 38) {
      tree_.append(cursor, tokens(), step());
    } else if (kind < 58) {
      RadixTree::Extended e;
      tree_.extend(cursor, static_cast<int32_t>(below(4)), step(), &e);
      slots_.resize(tree_.length(cursor));
      tree_.fill_slots(cursor, static_cast<uint32_t>(slots_.size()) / 2, slots_.data(), slots_.size());
    } else if (cursors_.size() < 12) {
      cursors_.push_back(tree_.fork(cursor));
    }
  }

  StepId step() {
    if (newest_ < oldest_ || (below(4) == 0 && newest_ < oldest_ + 2)) ++newest_;
    return newest_;
  }

  // A failing step takes its requests with it; here: all.
  void discard() {
    if (newest_ < oldest_) return;
    while (!cursors_.empty()) close(0);
    if (newest_ > oldest_ && below(2) == 0) {
      tree_.discard(oldest_++);
    } else {
      tree_.discard(newest_--);
    }
  }

  void mark_or_flush(uint32_t kind, uint32_t space) {
    now_ += 1.0;
    tree_.expire_pins(now_);
    if (kind < 93) {
      wants_.push_back(tree_.want(space, tokens()));
    } else if (kind < 95) {
      uint32_t length;
      tree_.pin(space, tokens(), now_ + below(20), &length);
    } else if (kind < 98 && !wants_.empty()) {
      tree_.unwant(wants_.back());
      wants_.pop_back();
    } else if (kind == 98) {
      tree_.flush_prefix(space, tokens());
    } else if (below(10) == 0) {
      tree_.flush_space(space);
    }
  }

  std::mt19937_64 random_;
  uint32_t page_size_;
  RadixTree tree_;
  std::vector<CursorId> cursors_;
  std::vector<MarkId> wants_;
  std::vector<int32_t> tokens_, slots_;
  StepId oldest_ = 1, newest_ = 0;
  double now_ = 0.0;
};

}  // namespace

int main(int argc, char** argv) {
  const uint64_t operations = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000000;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const Policy policies[] = {Policy::kLru,  Policy::kLfu,      Policy::kSlru,
                             Policy::kFifo, Policy::kPriority, Policy::kGdsf};
  const uint32_t page_sizes[] = {1, 4, 16};
  uint64_t run = 0;
  for (const Policy policy : policies) {
    for (const uint32_t page_size : page_sizes) Driver(seed + run++, page_size, policy).run(operations / 18 + 1);
  }
  std::printf("%llu operations, every invariant held\n", static_cast<unsigned long long>((operations / 18 + 1) * 18));
  return 0;
}
