// Owns the two exceptions that a caller's mistake raises. Must not know Python: bindings.cpp translates them.
#pragma once

#include <stdexcept>
#include <string>

namespace phloem {

// A call that breaks the contract; nothing was changed.
struct CacheError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A handle whose object no longer exists.
struct StaleHandleError : CacheError {
  using CacheError::CacheError;
};

// More pages than the pool has in all.
struct CapacityError : CacheError {
  using CacheError::CacheError;
};

}  // namespace phloem
