// A team of threads for one step at a time. Owns the threads, their barriers and the sharing out of work units.
// Must not know what a unit computes: which thread takes it never changes a result.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace phloem {

class ThreadPool {
 public:
  // The face that a job sees on each thread.
  class Member {
   public:
    int index() const { return index_; }
    int size() const { return pool_.num_threads_; }

    // Calls f(i) once for every i in [0, n) over the whole team, then waits until all calls are done.
    template <class F>
    void for_each(int n, const F& f) {
      if (size() == 1) {
        for (int i = 0; i < n; ++i) f(i);
        return;
      }
      for (int i; (i = pool_.next_.fetch_add(1, std::memory_order_relaxed)) < n;) f(i);
      pool_.wait_for_all();
    }

   private:
    friend class ThreadPool;
    Member(ThreadPool& pool, int index) : pool_(pool), index_(index) {}
    ThreadPool& pool_;
    int index_;
  };

  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return num_threads_; }

  // Runs f(Member&) on every thread, the caller's included; all must make the same for_each calls. One job at a time.
  template <class F>
  void run(F f) {
    run_job([](void* job, Member& member) { (*static_cast<F*>(job))(member); }, &f);
  }

 private:
  using Call = void (*)(void*, Member&);

  void run_job(Call call, void* job);
  void work(int index);
  void wait_for_all();

  const int num_threads_;
  std::vector<std::thread> threads_;
  Call call_ = nullptr;
  void* job_ = nullptr;
  alignas(64) std::atomic<uint32_t> generation_{0};  // a new value: a new job, or the end
  alignas(64) std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

}  // namespace phloem
