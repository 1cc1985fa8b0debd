// A tile of K from rows of positions to rows of columns, widened to float32.
#pragma once

#include "kernels/vec.h"

namespace slotwise {
namespace {

constexpr int kTile = static_cast<int>(kTilePositions);

// A square of words of 32 bits is turned in registers: a word is one float32 or two bfloat16.
#if defined(__AVX2__)
constexpr int kSquare = 8;
#else
constexpr int kSquare = 4;
#endif
typedef uint32_t Words __attribute__((vector_size(kSquare * 4)));

inline void transpose_square(Words (&w)[kSquare]) {
#if defined(__AVX2__)
  Words pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = __builtin_shufflevector(w[i], w[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    pairs[i + 1] = __builtin_shufflevector(w[i], w[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = i; j < i + 2; ++j) {
      Words* four = fours + 2 * j - i;
      four[0] = __builtin_shufflevector(pairs[j], pairs[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      four[1] = __builtin_shufflevector(pairs[j], pairs[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    w[i] = __builtin_shufflevector(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    w[i + 4] = __builtin_shufflevector(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
#else
  Words pairs[4];
  for (int i = 0; i < 4; i += 2) {
    pairs[i] = __builtin_shufflevector(w[i], w[i + 1], 0, 4, 1, 5);
    pairs[i + 1] = __builtin_shufflevector(w[i], w[i + 1], 2, 6, 3, 7);
  }
  for (int i = 0; i < 2; ++i) {
    w[2 * i] = __builtin_shufflevector(pairs[i], pairs[i + 2], 0, 1, 4, 5);
    w[2 * i + 1] = __builtin_shufflevector(pairs[i], pairs[i + 2], 2, 3, 6, 7);
  }
#endif
}

// A row of words is one row of keys in float32, and two in bfloat16.
constexpr int columns_per_word(const float*) { return 1; }
constexpr int columns_per_word(const uint16_t*) { return 2; }
inline void store_words(const float*, Words words, float* keys) {
  std::memcpy(keys, &words, sizeof(words));
}
inline void store_words(const uint16_t*, Words words, float* keys) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  const Words even = words << 16, odd = words & 0xffff0000u;
#else
  const Words even = words & 0xffff0000u, odd = words << 16;
#endif
  std::memcpy(keys, &even, sizeof(even));
  std::memcpy(keys + kTile, &odd, sizeof(odd));
}

inline float widen(float x) { return x; }
inline float widen(uint16_t x) { return bits<float>(static_cast<uint32_t>(x) << 16); }

// keys[d, j] = k[j, d] for j < count; what the other columns hold is never used.
template <typename Cache>
inline void transpose_keys(const Cache* k, int64_t stride, int64_t count, int64_t dim,
                           float* keys) {
  constexpr int kPerWord = columns_per_word(static_cast<const Cache*>(nullptr));
  constexpr int kColumns = kSquare * kPerWord;
  for (int64_t j = 0; j < count; j += kSquare) {
    // The last row stands in for rows that do not exist.
    const Cache* rows[kSquare];
    for (int i = 0; i < kSquare; ++i) rows[i] = k + min64(j + i, count - 1) * stride;
    int64_t d = 0;
    for (; d + kColumns <= dim; d += kColumns) {
      Words square[kSquare];
      for (int i = 0; i < kSquare; ++i) std::memcpy(&square[i], rows[i] + d, sizeof(Words));
      transpose_square(square);
      for (int i = 0; i < kSquare; ++i) {
        store_words(k, square[i], keys + (d + i * kPerWord) * kTile + j);
      }
    }
    for (; d < dim; ++d) {
      for (int i = 0; i < kSquare; ++i) keys[d * kTile + j + i] = widen(rows[i][d]);
    }
  }
}

}  // namespace
}  // namespace slotwise
