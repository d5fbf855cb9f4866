// Zeroed, 64-byte aligned memory in large pages where the system has them. Owns mapping and unmapping only.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace phloem {

// Pages are taken from the system when they are first touched, so a KV cache costs what is used of it.
class ZeroedMemory {
 public:
  ZeroedMemory() = default;
  explicit ZeroedMemory(size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    madvise(p, bytes, MADV_HUGEPAGE);  // a wish: the kernel may refuse it
    data_ = static_cast<uint8_t*>(p);
  }
  ZeroedMemory(ZeroedMemory&& other) noexcept { swap(other); }
  ZeroedMemory& operator=(ZeroedMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~ZeroedMemory() {
    if (data_) munmap(data_, bytes_);
  }

  uint8_t* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  void swap(ZeroedMemory& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

// Growing array of plain values. Growing discards the contents and zeroes them; it never shrinks. The address sanitizer
// knows how many values were asked for last.
template <class T>
class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { show_all(); }

  T* reserve(size_t count) {
    show_all();
    if (count * sizeof(T) > memory_.size()) {
      memory_ = ZeroedMemory();
      memory_ = ZeroedMemory(count * sizeof(T));
    }
    hide_from(count * sizeof(T));
    return data();
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }

 private:
#ifdef __SANITIZE_ADDRESS__
  size_t mapped() const { return (memory_.size() + kPageBytes - 1) / kPageBytes * kPageBytes; }
  void show_all() { ASAN_UNPOISON_MEMORY_REGION(memory_.data(), mapped()); }
  void hide_from(size_t bytes) { ASAN_POISON_MEMORY_REGION(memory_.data() + bytes, mapped() - bytes); }
#else
  void show_all() {}
  void hide_from(size_t) {}
#endif

  static constexpr size_t kPageBytes = 4096;
  ZeroedMemory memory_;
};

}  // namespace phloem
