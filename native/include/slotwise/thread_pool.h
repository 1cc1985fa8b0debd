#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace slotwise {

// A fixed set of threads that run one loop at a time; the caller is one of them.
//
// Idle threads spin for a short while, because a decode step is some hundred loops a few
// microseconds apart, and then sleep. Tasks are handed out by a counter; a loop ends when all tasks
// have ended, so a thread that the system keeps off the CPU delays nobody unless it holds a task.
class ThreadPool {
 public:
  using Task = void (*)(void* context, int64_t begin, int64_t end, int thread);

  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  // Calls task(context, begin, end, thread) for ranges of at most `grain` that cover [0, count),
  // thread in [0, num_threads). One caller at a time.
  void run(int64_t count, int64_t grain, Task task, void* context);

  template <typename Body>
  void parallel_for(int64_t count, int64_t grain, Body&& body) {
    run(
        count, grain,
        [](void* context, int64_t begin, int64_t end, int thread) {
          (*static_cast<Body*>(context))(begin, end, thread);
        },
        &body);
  }

 private:
  struct Job {
    std::atomic<Task> task{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<int64_t> count{0};
    std::atomic<int64_t> grain{1};
  };

  void work(int thread);
  bool run_one(int thread);
  bool wait_for_work(uint64_t seen);

  Job job_;
  // The job's number (32 bits), its chunks (16) and the next chunk (16), in one word: a chunk can
  // be taken only from the job whose fields were read.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> chunks_done_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

}  // namespace slotwise
