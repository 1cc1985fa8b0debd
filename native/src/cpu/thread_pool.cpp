#include "slotwise/thread_pool.h"

#include <algorithm>
#include <chrono>

namespace slotwise {
namespace {

constexpr int64_t kMaxChunks = 0xffff;
constexpr std::chrono::microseconds kSpin{50};

uint64_t job_number(uint64_t ticket) { return ticket >> 32; }
int64_t num_chunks(uint64_t ticket) { return static_cast<int64_t>((ticket >> 16) & 0xffff); }
int64_t next_chunk(uint64_t ticket) { return static_cast<int64_t>(ticket & 0xffff); }

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  for (int thread = 1; thread < num_threads; ++thread) {
    threads_.emplace_back([this, thread] { work(thread); });
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(int64_t count, int64_t grain, Task task, void* context) {
  if (count <= 0) return;
  grain = std::max({grain, int64_t{1}, (count + kMaxChunks - 1) / kMaxChunks});
  const int64_t chunks = (count + grain - 1) / grain;
  if (threads_.empty() || chunks == 1) {
    task(context, 0, count, 0);
    return;
  }
  job_.task.store(task, std::memory_order_relaxed);
  job_.context.store(context, std::memory_order_relaxed);
  job_.count.store(count, std::memory_order_relaxed);
  job_.grain.store(grain, std::memory_order_relaxed);
  chunks_done_.store(0, std::memory_order_relaxed);
  const uint64_t number = job_number(ticket_.load(std::memory_order_relaxed)) + 1;
  ticket_.store(number << 32 | static_cast<uint64_t>(chunks) << 16);
  if (sleepers_.load() > 0) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
    }
    wake_.notify_all();
  }
  while (run_one(0)) {
  }
  for (int spins = 0; chunks_done_.load(std::memory_order_acquire) < chunks; ++spins) {
    // A thread that holds the last chunk may have lost its core to us.
    if (spins < 1000) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

// Takes one chunk of the present job and runs it; false where none is left.
bool ThreadPool::run_one(int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  if (next_chunk(ticket) >= num_chunks(ticket)) return false;
  const Task task = job_.task.load(std::memory_order_acquire);
  void* const context = job_.context.load(std::memory_order_acquire);
  const int64_t count = job_.count.load(std::memory_order_acquire);
  const int64_t grain = job_.grain.load(std::memory_order_acquire);
  // The fields belong to this ticket if it still stands: they change only after its last chunk.
  if (!ticket_.compare_exchange_strong(ticket, ticket + 1, std::memory_order_acq_rel)) return true;
  const int64_t begin = next_chunk(ticket) * grain;
  task(context, begin, std::min(begin + grain, count), thread);
  chunks_done_.fetch_add(1, std::memory_order_release);
  return true;
}

// Returns true when there may be work, false when the pool is being destroyed.
bool ThreadPool::wait_for_work(uint64_t seen) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (job_number(ticket_.load(std::memory_order_relaxed)) != seen || stop_) return !stop_;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1);
  wake_.wait(lock, [&] { return stop_ || job_number(ticket_.load()) != seen; });
  sleepers_.fetch_sub(1);
  return !stop_;
}

void ThreadPool::work(int thread) {
  uint64_t seen = 0;
  while (wait_for_work(seen)) {
    seen = job_number(ticket_.load());
    while (run_one(thread)) {
    }
  }
}

}  // namespace slotwise
