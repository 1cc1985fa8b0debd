#include "slotwise/aligned_buffer.h"

#include <cstdlib>
#include <new>
#include <utility>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace slotwise {
namespace {

constexpr size_t kCacheLine = 64;
constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

AlignedBuffer::AlignedBuffer(size_t num_bytes) {
  if (num_bytes == 0) return;
  const size_t alignment = num_bytes >= 4 * kHugePage ? kHugePage : kCacheLine;
  num_bytes_ = (num_bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  if (posix_memalign(&data_, alignment, num_bytes_) != 0) throw std::bad_alloc();
#ifdef __linux__
  // A hint only: without huge pages everything works, with more TLB misses.
  if (alignment == kHugePage) madvise(data_, num_bytes_, MADV_HUGEPAGE);
#endif
}

AlignedBuffer::~AlignedBuffer() { std::free(data_); }

AlignedBuffer::AlignedBuffer(AlignedBuffer&& other) noexcept { *this = std::move(other); }

AlignedBuffer& AlignedBuffer::operator=(AlignedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

void AlignedBuffer::reserve(size_t num_bytes) {
  if (num_bytes > num_bytes_) *this = AlignedBuffer(num_bytes);
}

}  // namespace slotwise
