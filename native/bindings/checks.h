// Every argument of an operator is checked before anything is touched, with messages "[op] expected
// ..., got ...": kind, rank and layout of an array by Tensor's constructor, the rest here.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "slotwise/params.h"
#include "tensor.h"

namespace slotwise::bindings {

using Vector = Tensor<const float, 1>;
using Ints = Tensor<const int32_t, 1>;
using Longs = Tensor<const int64_t, 1>;
using OutInts = Tensor<int32_t, 1>;
using Matrix = Tensor<const float, 2>;
using OutMatrix = Tensor<float, 2>;
using AnyMatrix = Tensor<const void, 2>;
using Cache = Tensor<void, 4>;

[[noreturn]] inline void fail(const char* op, const std::string& expected, const std::string& got) {
  throw std::invalid_argument("[" + std::string(op) + "] expected " + expected + ", got " + got);
}

template <typename View>
std::string shape_text(const View& array) {
  std::string text = "[";
  for (size_t axis = 0; axis < array.ndim(); ++axis) {
    text += (axis ? ", " : "") + std::to_string(array.shape(axis));
  }
  return text + "]";
}

template <typename View>
void check_shape(const char* op, const char* name, const View& array,
                 std::initializer_list<int64_t> shape) {
  std::string expected = "[";
  bool equal = shape.size() == array.ndim();
  size_t axis = 0;
  for (const int64_t wanted : shape) {
    equal = equal && array.shape(axis) == wanted;
    expected += (axis ? ", " : "") + std::to_string(wanted);
    ++axis;
  }
  if (!equal) fail(op, std::string(name) + " of shape " + expected + "]", shape_text(array));
}

template <typename View>
void check_contiguous(const char* op, const char* name, const View& array) {
  int64_t expected = 1;
  for (size_t axis = array.ndim(); axis-- > 0;) {
    if (array.shape(axis) > 1 && array.stride(axis) != expected) {
      fail(op, std::string(name) + " contiguous", "another layout");
    }
    expected *= array.shape(axis);
  }
}

template <typename A, typename B>
void check_apart(const char* op, const char* name_a, const A& a, const char* name_b, const B& b) {
  if (a.size() == 0 || b.size() == 0) return;
  const auto begin = [](const auto& array) {
    return reinterpret_cast<uintptr_t>(static_cast<const void*>(array.data()));
  };
  const auto end = [&](const auto& array) {
    int64_t last = 0;
    for (size_t axis = 0; axis < array.ndim(); ++axis) {
      last += (array.shape(axis) - 1) * array.stride(axis);
    }
    return begin(array) + static_cast<uintptr_t>((last + 1) * array.itemsize());
  };
  if (begin(a) < end(b) && begin(b) < end(a)) {
    fail(op, std::string(name_a) + " and " + name_b + " apart in memory", "overlapping ones");
  }
}

template <typename View>
DType dtype_of(const View& array) {
  return array.is_bfloat16() ? DType::kBFloat16 : DType::kFloat32;
}

// Where K and V of shape [S, P, H_kv, D] lie.
template <typename View>
CacheParams cache_layout(const char* op, const View& k, const View& v, DType dtype) {
  check_shape(op, "v_cache", v, {k.shape(0), k.shape(1), k.shape(2), k.shape(3)});
  CacheParams params{};
  params.k = k.data();
  params.v = v.data();
  params.dtype = dtype;
  params.num_slots = k.shape(0);
  params.num_positions = k.shape(1);
  params.num_kv_heads = k.shape(2);
  params.head_dim = k.shape(3);
  params.k_slot_stride = k.stride(0);
  params.k_position_stride = k.stride(1);
  params.k_head_stride = k.stride(2);
  params.v_slot_stride = v.stride(0);
  params.v_position_stride = v.stride(1);
  params.v_head_stride = v.stride(2);
  return params;
}

inline void check_eps(const char* op, float eps) {
  if (!(eps >= 0.0f && eps < 1.0f)) fail(op, "eps in [0, 1)", std::to_string(eps));
}

inline void check_range(const char* op, const char* name, const Ints& values, int64_t limit) {
  for (int64_t i = 0; i < values.shape(0); ++i) {
    const int64_t value = values.data()[i];
    if (value < 0 || value >= limit) {
      fail(op,
           std::string(name) + "[" + std::to_string(i) + "] in [0, " + std::to_string(limit) + ")",
           std::to_string(value));
    }
  }
}

}  // namespace slotwise::bindings
