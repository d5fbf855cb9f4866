#include "kernels/thread_pool.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace phloem {
namespace {

// Idle workers spin about 50 us for the next job, then sleep in the kernel and cost nothing.
constexpr int kSpinsBeforeSleep = 2000;
// Inside a job the others arrive soon, unless the machine runs more threads than it has cores: then give way.
constexpr int kSpinsBeforeYield = 4000;

void pause() {
#ifdef __x86_64__
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
  for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
  stopping_.store(true, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run_job(Call call, void* job) {
  Member caller(*this, 0);
  if (num_threads_ == 1) return call(job, caller);
  call_ = call;
  job_ = job;
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  call(job, caller);
  wait_for_all();
}

void ThreadPool::work(int index) {
  Member member(*this, index);
  uint32_t seen = 0;
  for (;;) {
    for (int spin = 0; generation_.load(std::memory_order_acquire) == seen; ++spin) {
      if (spin < kSpinsBeforeSleep) {
        pause();
      } else {
        generation_.wait(seen, std::memory_order_acquire);
      }
    }
    ++seen;
    if (stopping_.load(std::memory_order_relaxed)) return;
    call_(job_, member);
    wait_for_all();
  }
}

void ThreadPool::wait_for_all() {
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  for (int spin = 0; phase_.load(std::memory_order_acquire) == phase; ++spin) {
    if (spin < kSpinsBeforeYield) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace phloem
