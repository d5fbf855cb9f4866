// Takes snapshots, counters and lookups from other threads while one thread changes the tree. Meant for a build with
// the thread sanitizer.
//
//   tree_threads_stress [operations=30000]

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "tree/shared_tree.h"

namespace {

using namespace phloem;

std::vector<int32_t> random_tokens(std::mt19937& random) {
  std::vector<int32_t> tokens(1 + random() % 40);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 3);
  return tokens;
}

void write(SharedTree& shared, int operations) {
  std::mt19937 random(1);
  std::vector<CursorId> cursors;
  StepId step = 0;
  for (int i = 0; i < operations; ++i) {
    const std::vector<int32_t> tokens = random_tokens(random);
    shared.locked([&](RadixTree& tree) {
      const CursorId cursor = tree.open(0, {tokens.data(), static_cast<uint32_t>(tokens.size())}, 0).cursor;
      tree.append(cursor, {tokens.data(), static_cast<uint32_t>(tokens.size())}, ++step);
      tree.complete(step);
      cursors.push_back(cursor);
      if (cursors.size() > 8) {
        tree.close(cursors.front());
        cursors.erase(cursors.begin());
      }
    });
  }
}

bool is_sound(const SharedTree::Snapshot& s) {
  for (const NodeView& node : s.nodes) {
    if (node.num_pending > node.len || (node.parent != kNone && node.len == 0)) return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const int operations = argc > 1 ? std::atoi(argv[1]) : 30000;
  TreeConfig config;
  config.num_pages = 20000;
  SharedTree shared(config);
  shared.locked([](RadixTree& tree) { return tree.create_space(); });
  std::atomic<bool> done{false};
  std::atomic<int> taken{0}, bad{0};
  std::thread viewer([&] {
    while (!done) {
      bad += !is_sound(shared.snapshot());
      ++taken;
    }
  });
  std::thread reader([&] {
    std::mt19937 random(2);
    while (!done) {
      const std::vector<int32_t> tokens = random_tokens(random);
      shared.locked([&](RadixTree& tree) {
        bad += tree.peek(0, {tokens.data(), static_cast<uint32_t>(tokens.size())}).length > tokens.size();
        const TreeStats s = tree.stats();
        bad += s.pages_free + s.pages_evictable + s.pages_protected != s.pages_total;
      });
    }
  });
  write(shared, operations);
  done = true;
  viewer.join();
  reader.join();
  std::printf("%d snapshots beside %d operations, %d unsound\n", taken.load(), operations, bad.load());
  return bad == 0 && taken > 0 ? 0 : 1;
}
