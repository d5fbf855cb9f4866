// A team of threads for one step at a time. Owns the threads and the sharing out of work units, phase by phase.
// Must not know what a unit computes: which thread takes it never changes a result.
//
// A phase ends when its units are done, not when every thread has arrived: a thread that the system has put aside
// holds up the others only while it is inside a unit. It finds the phases it missed closed and skips them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
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

    // Calls f(i) once for every i in [0, n) over the whole team, and returns when all calls are done. Outside of f
    // a job may only read what no f writes.
    template <class F>
    void for_each(int n, const F& f) {
      if (n <= 0) return;
      if (size() == 1) {
        for (int i = 0; i < n; ++i) f(i);
        return;
      }
      const uint32_t phase = phase_++;
      for (int i; (i = pool_.claim(phase, n)) >= 0;) {
        f(i);
        pool_.finish(phase, n);
      }
      pool_.wait_past(phase);
    }

   private:
    friend class ThreadPool;
    Member(ThreadPool& pool, int index, uint32_t phase) : pool_(pool), index_(index), phase_(phase) {}
    ThreadPool& pool_;
    int index_;
    uint32_t phase_;
  };

  using Job = std::function<void(Member&)>;

  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return num_threads_; }

  // Runs the job on every thread, the caller's included; all must make the same for_each calls. Returns when the
  // caller is through, so all units are done; a thread that lags may still read the job's captures until settle().
  void run(Job job);

  // Waits until no thread is inside the last job. Call before changing what a job reads outside of units.
  void settle();

 private:
  void work(int index);
  bool enter();
  int claim(uint32_t phase, int n);
  void finish(uint32_t phase, int n);
  void wait_past(uint32_t phase) const;

  static constexpr int kClosed = -(1 << 20);

  const int num_threads_;
  std::vector<std::thread> threads_;
  Job job_;
  uint32_t first_phase_ = 0;
  alignas(64) std::atomic<uint32_t> generation_{0};  // a new value: a new job, or the end
  alignas(64) std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<int> inside_{kClosed};  // workers inside the job; plus kClosed when none may enter
  alignas(64) std::atomic<uint64_t> state_{0};    // phase << 32 | next unit
  alignas(64) std::atomic<int> done_{0};          // units of the phase that are done
};

}  // namespace phloem
