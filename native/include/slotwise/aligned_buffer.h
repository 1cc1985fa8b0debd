#pragma once

#include <cstddef>

namespace slotwise {

// Memory aligned for vectors, in huge pages where the system has them. Contents start undefined.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t num_bytes);  // throws std::bad_alloc
  ~AlignedBuffer();
  AlignedBuffer(AlignedBuffer&& other) noexcept;
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept;

  void* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }
  float* floats() const { return static_cast<float*>(data_); }

  // Grows to at least num_bytes; the contents are lost when it does.
  void reserve(size_t num_bytes);

 private:
  void* data_ = nullptr;
  size_t num_bytes_ = 0;
};

}  // namespace slotwise
