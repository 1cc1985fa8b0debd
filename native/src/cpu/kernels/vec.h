// Vectors for the kernels. F and I are always 16 lanes wide, made of as many native vectors as the
// instruction set needs, so that every instruction set does the same arithmetic in the same order.
//
// Included once by each build of kernels.cpp; everything is local to that file.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace slotwise {
namespace {

#if defined(__AVX512F__)
constexpr int kNative = 16;
#elif defined(__AVX2__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
constexpr int kLanes = 16;
constexpr int kParts = kLanes / kNative;

typedef float NativeF __attribute__((vector_size(kNative * 4)));
typedef int32_t NativeI __attribute__((vector_size(kNative * 4)));
typedef uint32_t NativeU __attribute__((vector_size(kNative * 4)));
typedef uint16_t NativeH __attribute__((vector_size(kNative * 2)));

struct F {
  NativeF part[kParts];
};
struct I {
  NativeI part[kParts];
};

template <typename To, typename From>
inline To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// ---- native vectors ----

inline NativeF native_set1(float x) { return x - NativeF{}; }

inline NativeF native_load(const float* p) {
  NativeF r;
  std::memcpy(&r, p, sizeof(r));
  return r;
}

inline void native_store(float* p, NativeF x) { std::memcpy(p, &x, sizeof(x)); }

inline NativeF widen_bf16(NativeH h) {
  return bits<NativeF>(__builtin_convertvector(h, NativeU) << 16);
}

inline NativeF native_load(const uint16_t* p) {
  NativeH h;
  std::memcpy(&h, p, sizeof(h));
  return widen_bf16(h);
}

// a * b + c, rounded once where the instruction set has a fused multiply-add.
inline NativeF native_fma(NativeF a, NativeF b, NativeF c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__FP_FAST_FMAF)
  for (int i = 0; i < kNative; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

// ---- 16 lanes ----

#define SLOTWISE_EACH for (int i = 0; i < kParts; ++i)

inline F set1(float x) {
  F r;
  SLOTWISE_EACH r.part[i] = native_set1(x);
  return r;
}
inline I iset1(int32_t x) {
  I r;
  SLOTWISE_EACH r.part[i] = x - NativeI{};
  return r;
}
template <typename T>
inline F load(const T* p) {
  F r;
  SLOTWISE_EACH r.part[i] = native_load(p + i * kNative);
  return r;
}
inline I iload(const int32_t* p) { return bits<I>(load(reinterpret_cast<const float*>(p))); }
inline void store(float* p, F x) { SLOTWISE_EACH native_store(p + i * kNative, x.part[i]); }

inline F operator+(F a, F b) {
  SLOTWISE_EACH a.part[i] += b.part[i];
  return a;
}
inline F operator-(F a, F b) {
  SLOTWISE_EACH a.part[i] -= b.part[i];
  return a;
}
inline F operator*(F a, F b) {
  SLOTWISE_EACH a.part[i] *= b.part[i];
  return a;
}
inline F operator/(F a, F b) {
  SLOTWISE_EACH a.part[i] /= b.part[i];
  return a;
}
inline F fma(F a, F b, F c) {
  SLOTWISE_EACH c.part[i] = native_fma(a.part[i], b.part[i], c.part[i]);
  return c;
}
// The second operand where either is NaN.
inline F vmax(F a, F b) {
  SLOTWISE_EACH b.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
  return b;
}
inline F vmin(F a, F b) {
  SLOTWISE_EACH b.part[i] = a.part[i] < b.part[i] ? a.part[i] : b.part[i];
  return b;
}
// All bits set where true.
inline I less(F a, F b) {
  I r;
  SLOTWISE_EACH r.part[i] = a.part[i] < b.part[i];
  return r;
}
inline I equal(F a, F b) {
  I r;
  SLOTWISE_EACH r.part[i] = a.part[i] == b.part[i];
  return r;
}
inline I iless(I a, I b) {
  I r;
  SLOTWISE_EACH r.part[i] = a.part[i] < b.part[i];
  return r;
}
inline F select(I mask, F a, F b) {
  SLOTWISE_EACH b.part[i] = mask.part[i] ? a.part[i] : b.part[i];
  return b;
}
inline I iselect(I mask, I a, I b) {
  SLOTWISE_EACH b.part[i] = mask.part[i] ? a.part[i] : b.part[i];
  return b;
}
inline I operator+(I a, I b) {
  SLOTWISE_EACH a.part[i] = bits<NativeI>(bits<NativeU>(a.part[i]) + bits<NativeU>(b.part[i]));
  return a;
}
inline I operator-(I a, I b) {
  SLOTWISE_EACH a.part[i] = bits<NativeI>(bits<NativeU>(a.part[i]) - bits<NativeU>(b.part[i]));
  return a;
}
inline I operator&(I a, I b) {
  SLOTWISE_EACH a.part[i] &= b.part[i];
  return a;
}
inline I operator|(I a, I b) {
  SLOTWISE_EACH a.part[i] |= b.part[i];
  return a;
}
inline I operator^(I a, I b) {
  SLOTWISE_EACH a.part[i] ^= b.part[i];
  return a;
}
inline I shift_left(I a, int count) {
  SLOTWISE_EACH a.part[i] = bits<NativeI>(bits<NativeU>(a.part[i]) << count);
  return a;
}
inline I shift_right(I a, int count) {  // zeros come in
  SLOTWISE_EACH a.part[i] = bits<NativeI>(bits<NativeU>(a.part[i]) >> count);
  return a;
}
inline I shift_right_signed(I a, int count) {
  SLOTWISE_EACH a.part[i] >>= count;
  return a;
}
inline F to_float(I a) {
  F r;
  SLOTWISE_EACH r.part[i] = __builtin_convertvector(a.part[i], NativeF);
  return r;
}

// The high and low 32 bits of the unsigned products a * b.
struct Product {
  I high;
  I low;
};
inline Product multiply(I a, uint32_t b) {
  Product r;
#if defined(__AVX512F__)
  const __m512i va = bits<__m512i>(a.part[0]), vb = _mm512_set1_epi32(static_cast<int>(b));
  const __m512i even = _mm512_mul_epu32(va, vb);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(va, 32), vb);
  r.high.part[0] = bits<NativeI>(_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd));
  r.low.part[0] = bits<NativeI>(_mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32)));
#elif defined(__AVX2__)
  SLOTWISE_EACH {
    const __m256i va = bits<__m256i>(a.part[i]), vb = _mm256_set1_epi32(static_cast<int>(b));
    const __m256i even = _mm256_mul_epu32(va, vb);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(va, 32), vb);
    r.high.part[i] = bits<NativeI>(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa));
    r.low.part[i] = bits<NativeI>(_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa));
  }
#else
  SLOTWISE_EACH for (int j = 0; j < kNative; ++j) {
    const uint64_t product = static_cast<uint64_t>(static_cast<uint32_t>(a.part[i][j])) * b;
    r.high.part[i][j] = static_cast<int32_t>(product >> 32);
    r.low.part[i][j] = static_cast<int32_t>(product);
  }
#endif
  return r;
}

#undef SLOTWISE_EACH

// ---- parts of a vector, bfloat16, reductions ----

// The first count elements, the rest zero.
template <typename T>
inline F load_part(const T* p, int64_t count) {
  T padded[kLanes] = {};
  std::memcpy(padded, p, static_cast<size_t>(count) * sizeof(T));
  return load(padded);
}
inline void store_part(float* p, F x, int64_t count) {
  float padded[kLanes];
  store(padded, x);
  std::memcpy(p, padded, static_cast<size_t>(count) * sizeof(float));
}

// Rounds to nearest, ties to even; a NaN stays a NaN.
inline uint16_t to_bf16(float x) {
  const uint32_t b = bits<uint32_t>(x);
  if (x != x) return static_cast<uint16_t>(b >> 16 | 0x40);
  return static_cast<uint16_t>((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
inline void store_part(uint16_t* p, F x, int64_t count) {
  float lanes[kLanes];
  store(lanes, x);
  for (int64_t i = 0; i < count; ++i) p[i] = to_bf16(lanes[i]);
}

// Lane i + lane i + 8, then + 4, + 2, + 1.
inline float sum_lanes(F x) {
  float lane[kLanes];
  store(lane, x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  }
  return lane[0];
}
inline float max_lanes(F x) {
  NativeF best = x.part[0];
  for (int i = 1; i < kParts; ++i) best = x.part[i] > best ? x.part[i] : best;
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(best);
#else
  float result = best[0];
  for (int i = 1; i < kNative; ++i) result = best[i] > result ? best[i] : result;
  return result;
#endif
}

inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace
}  // namespace slotwise
