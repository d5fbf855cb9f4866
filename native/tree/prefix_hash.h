// Owns the name of a prefix outside the tree: 128 bits chained over its tokens. Must not know nodes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phloem {

// Two independent lanes; continue from the hash of a prefix with the tokens that follow it. Not for use against an
// adversary: inside the tree tokens are compared, never hashes.
struct PrefixHash {
  uint64_t a = 0x243f6a8885a308d3ull;
  uint64_t b = 0x13198a2e03707344ull;

  void update(const int32_t* tokens, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      const uint64_t token = static_cast<uint32_t>(tokens[i]);
      a = (a ^ token) * 0x9e3779b97f4a7c15ull;
      a ^= a >> 31;
      b = (b + token + 1) * 0xd6e8feb86659fd93ull;
      b ^= b >> 29;
    }
  }
};

}  // namespace phloem
