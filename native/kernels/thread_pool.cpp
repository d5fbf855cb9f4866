#include "kernels/thread_pool.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace phloem {
namespace {

// Idle workers spin about 50 us for the next job, then sleep in the kernel and cost nothing.
constexpr int kSpinsBeforeSleep = 2000;
// Inside a job the others are soon done, unless the machine runs more threads than it has cores: then give way.
constexpr int kSpinsBeforeYield = 1000;

void pause() {
#ifdef __x86_64__
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

template <class Done>
void spin_until(const Done& done) {
  for (int spin = 0; !done(); ++spin) {
    if (spin < kSpinsBeforeYield) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
  for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
  settle();
  stopping_.store(true, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(Job job) {
  settle();
  job_ = std::move(job);
  first_phase_ = static_cast<uint32_t>(state_.load(std::memory_order_relaxed) >> 32);
  Member caller(*this, 0, first_phase_);
  if (num_threads_ > 1) {
    inside_.store(0, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  }
  job_(caller);
  if (num_threads_ > 1) inside_.fetch_add(kClosed, std::memory_order_acq_rel);
}

void ThreadPool::settle() {
  spin_until([this] { return inside_.load(std::memory_order_acquire) == kClosed; });
}

bool ThreadPool::enter() {
  int inside = inside_.load(std::memory_order_relaxed);
  while (inside >= 0)
    if (inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel)) return true;
  return false;
}

void ThreadPool::work(int index) {
  uint32_t seen = 0;
  for (;;) {
    for (int spin = 0; generation_.load(std::memory_order_acquire) == seen; ++spin) {
      if (spin < kSpinsBeforeSleep) {
        pause();
      } else {
        generation_.wait(seen, std::memory_order_acquire);
      }
    }
    seen = generation_.load(std::memory_order_acquire);
    if (stopping_.load(std::memory_order_relaxed)) return;
    if (!enter()) continue;
    Member member(*this, index, first_phase_);
    job_(member);
    inside_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

int ThreadPool::claim(uint32_t phase, int n) {
  uint64_t state = state_.load(std::memory_order_acquire);
  while (static_cast<uint32_t>(state >> 32) == phase && static_cast<int>(state & 0xffffffffu) < n)
    if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel, std::memory_order_acquire))
      return static_cast<int>(state & 0xffffffffu);
  return -1;
}

void ThreadPool::finish(uint32_t phase, int n) {
  if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 < n) return;
  done_.store(0, std::memory_order_relaxed);
  state_.store(static_cast<uint64_t>(phase + 1) << 32, std::memory_order_release);
}

void ThreadPool::wait_past(uint32_t phase) const {
  spin_until([this, phase] { return static_cast<uint32_t>(state_.load(std::memory_order_acquire) >> 32) != phase; });
}

}  // namespace phloem
