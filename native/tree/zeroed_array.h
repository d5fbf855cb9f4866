// Owns one run of zeroed memory, in huge pages where the system has them: a tree is read at random, and with small
// pages every access would also miss the TLB. Must not know what is in it.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <type_traits>
#include <utility>

// Under the address sanitizer memory comes from where it looks.
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
#define PHLOEM_HUGE_PAGES 1
#include <sys/mman.h>
#endif

namespace phloem {

template <class T>
class ZeroedArray {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  ZeroedArray() = default;
  explicit ZeroedArray(size_t size) : size_(size) {
    const size_t align = bytes() >= kHuge / 2 ? kHuge : 64;
    data_ = static_cast<T*>(allocate((bytes() + align - 1) / align * align, align));
  }
  ZeroedArray(ZeroedArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  ZeroedArray& operator=(ZeroedArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~ZeroedArray() {
#ifdef PHLOEM_HUGE_PAGES
    if (mapped_size() > 0) {
      munmap(data_, mapped_size());
      return;
    }
#endif
    std::free(data_);
  }

  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  size_t size() const { return size_; }
  size_t bytes() const { return size_ * sizeof(T); }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  static constexpr size_t kHuge = size_t{2} << 20;

  // Large arrays come straight from the system, which hands out zeroes.
  size_t mapped_size() const {
    return data_ != nullptr && bytes() >= kHuge / 2 ? (bytes() + kHuge - 1) / kHuge * kHuge : 0;
  }

  static void* allocate(size_t size, size_t align) {
#ifdef PHLOEM_HUGE_PAGES
    if (align == kHuge) {
      // One huge page more than needed, so that an aligned run is inside; the rest is given back.
      auto* raw =
          static_cast<char*>(mmap(nullptr, size + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
      if (raw == MAP_FAILED) throw std::bad_alloc();
      char* aligned = raw + (kHuge - reinterpret_cast<size_t>(raw) % kHuge) % kHuge;
      if (aligned > raw) munmap(raw, static_cast<size_t>(aligned - raw));
      munmap(aligned + size, static_cast<size_t>(raw + size + kHuge - (aligned + size)));
      madvise(aligned, size, MADV_HUGEPAGE);
      return aligned;
    }
#endif
    void* data = std::aligned_alloc(align, size);
    if (data == nullptr && size > 0) throw std::bad_alloc();
    for (size_t i = 0; i < size; ++i) static_cast<char*>(data)[i] = 0;
    return data;
  }

  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace phloem
