// exp and log of 16 floats. The polynomials are least-squares fits of the relative error; every
// lane has the same arithmetic wherever it lies in an array.
#pragma once

#include "kernels/vec.h"

namespace slotwise {
namespace {

// e^x, error under 2 ulp; 0 below -104, inf above 88.73, NaN for NaN.
inline F vexp(F x) {
  const F magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  x = vmin(set1(89.0f), vmax(set1(-104.0f), x));
  const F shifted = fma(x, set1(1.44269504f), magic);
  const F n = shifted - magic;
  F r = fma(n, set1(-0.693145752f), x);
  r = fma(n, set1(-1.42860677e-6f), r);
  F p = set1(0.00138145f);
  p = fma(p, r, set1(0.00836875f));
  p = fma(p, r, set1(0.04166839f));
  p = fma(p, r, set1(0.1666652f));
  p = fma(p, r, set1(0.49999993f));
  p = fma(p, r * r, r) + set1(1.0f);
  // 2^n in two factors, so that subnormal and overflowing results come out right.
  const I exponent = bits<I>(shifted) - bits<I>(magic);
  const I half = shift_right_signed(exponent, 1);
  const I bias = iset1(127);
  const F first = bits<F>(shift_left(half + bias, 23));
  const F second = bits<F>(shift_left(exponent - half + bias, 23));
  return p * first * second;
}

// The natural logarithm of a positive normal number, error under 2 ulp.
inline F vlog(F x) {
  const I sqrt_half = iset1(0x3f3504f3);
  const I exponent = shift_right_signed(bits<I>(x) - sqrt_half, 23);
  const F f = bits<F>(bits<I>(x) - shift_left(exponent, 23)) - set1(1.0f);
  const F e = to_float(exponent);
  F p = set1(0.06746533f);
  p = fma(p, f, set1(-0.11675623f));
  p = fma(p, f, set1(0.11888197f));
  p = fma(p, f, set1(-0.12405596f));
  p = fma(p, f, set1(0.14219548f));
  p = fma(p, f, set1(-0.16667995f));
  p = fma(p, f, set1(0.20002119f));
  p = fma(p, f, set1(-0.2500001f));
  p = fma(p, f, set1(0.33333313f));
  const F square = f * f;
  p = fma(p, f * square, e * set1(-2.12194440e-4f));
  p = fma(square, set1(-0.5f), p);
  return fma(e, set1(0.693359375f), f + p);
}

}  // namespace
}  // namespace slotwise
