// Elementary functions on vectors of doubles, accurate to two units in the last place. Internal linkage: see
// common/levels.hpp.
#pragma once

#include "common/simd.hpp"

namespace egru::EGRU_LEVEL {
namespace {
namespace continuous {

using Doubles = Vector<double>;
typedef int64_t Longs __attribute__((vector_size(vector_bytes)));
constexpr int width = lanes<double>;

inline Doubles splat(double value) { return broadcast<double>(value); }
inline Doubles get(const double* from) { return load<double>(from); }
inline void put(double* to, Doubles v) { store<double>(to, v); }

inline Doubles max_of(Doubles a, Doubles b) {
#if defined(__AVX512F__)
    return (Doubles)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
    return (Doubles)_mm256_max_pd((__m256d)a, (__m256d)b);
#elif defined(EGRU_NEON)
    return (Doubles)vmaxnmq_f64((float64x2_t)a, (float64x2_t)b);
#else
    return a > b ? a : b;
#endif
}
inline Doubles min_of(Doubles a, Doubles b) {
#if defined(__AVX512F__)
    return (Doubles)_mm512_min_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
    return (Doubles)_mm256_min_pd((__m256d)a, (__m256d)b);
#elif defined(EGRU_NEON)
    return (Doubles)vminnmq_f64((float64x2_t)a, (float64x2_t)b);
#else
    return a < b ? a : b;
#endif
}
inline Doubles abs_of(Doubles v) { return max_of(v, -v); }

inline double sum_of(Doubles v) {
    double sum = v[0];
    for (int i = 1; i < width; ++i) sum += v[i];
    return sum;
}

inline bool any(Longs condition) { return bits<double>(condition) != 0; }

// exp for |x| <= 700: 2^n times a polynomial of the remainder, with error 1.3e-17.
inline Doubles exponential(Doubles x) {
    const Doubles magic = splat(0x1.8p52);  // adding it rounds to an integer, which is then in the low bits
    const Doubles shifted = x * 0x1.71547652b82fep0 + magic;
    const Doubles n = shifted - magic;
    const Doubles f = (x - n * 0x1.62e42fefap-1) - n * 0x1.cf79abc9e3b3ap-40;
    const Doubles f2 = f * f, f4 = f2 * f2;
    const Doubles p01 = 0x1.0000000000001p-1 + f * 0x1.5555555555556p-3;
    const Doubles p23 = 0x1.5555555553d37p-5 + f * 0x1.11111111109a6p-7;
    const Doubles p45 = 0x1.6c16c1789d1d7p-10 + f * 0x1.a01a01a7cebcdp-13;
    const Doubles p67 = 0x1.a019b8ca26fcfp-16 + f * 0x1.71de0d85293b8p-19;
    const Doubles p89 = 0x1.2891d4ffbb0f9p-22 + f * 0x1.af390ba7e6f47p-26;
    const Doubles p = (p01 + f2 * p23) + f4 * ((p45 + f2 * p67) + f4 * p89);
    const Doubles e = 1.0 + (f + f2 * p);
#if defined(__AVX512F__)
    return (Doubles)_mm512_scalef_pd((__m512d)e, (__m512d)n);
#else
    return e * (Doubles)(((Longs)shifted + 1023) << 52);
#endif
}

// log for positive, finite, normal x.
inline Doubles logarithm(Doubles x) {
    const Longs word = (Longs)x - 0x3fe6a09e667f3bcdLL;  // relative to sqrt(1/2)
    const Longs n = word >> 52;
    const Doubles m = (Doubles)((Longs)x - (n << 52));
    const Doubles s = (m - 1.0) / (m + 1.0), v = s * s, v2 = v * v;
    const Doubles low = 0x1.5555555555558p-1 + v * 0x1.9999999995273p-2;
    const Doubles middle = 0x1.2492492dfd86cp-2 + v * 0x1.c71c62d5e53e0p-3;
    const Doubles high = (0x1.7462b91b8df65p-3 + v * 0x1.39fdcceb4bb45p-3) + v2 * 0x1.2b5f68a50d903p-3;
    const Doubles rest = s * v * (low + v2 * (middle + v2 * high));
#if defined(__AVX512F__)
    const Doubles exponent = (Doubles)_mm512_cvtepi64_pd((__m512i)n);
#elif defined(EGRU_NEON)
    const Doubles exponent = (Doubles)vcvtq_f64_s64((int64x2_t)n);
#else
    const Doubles magic = splat(0x1.8p52);
    const Doubles exponent = (Doubles)(n + (Longs)magic) - magic;
#endif
    return exponent * 0x1.62e42fefa39efp-1 + (2.0 * s + rest);
}

// u = sigmoid(a_u), z = tanh(a_z) and their derivatives by a, with one division.
struct Gates {
    Doubles u, z, du, dz;
};

inline Doubles gate_exponential(Doubles x) { return exponential(min_of(max_of(x, splat(-300.0)), splat(300.0))); }

inline Gates gates(Doubles a_u, Doubles a_z) {
    const Doubles e = gate_exponential(-a_u), f = gate_exponential(-2.0 * a_z);
    const Doubles e1 = 1.0 + e, f1 = 1.0 + f, d = 1.0 / (e1 * f1), e1d = e1 * d;
    const Doubles u = f1 * d;
    return {u, (1.0 - f) * e1d, e * u * u, 4.0 * f * e1d * e1d};
}

inline Doubles sigmoid_of(Doubles a) { return 1.0 / (1.0 + gate_exponential(-a)); }

// tanh of two arguments, with one division.
inline void tanh_of(Doubles a, Doubles b, Doubles* tanh_a, Doubles* tanh_b) {
    const Doubles e = gate_exponential(-2.0 * a), f = gate_exponential(-2.0 * b);
    const Doubles e1 = 1.0 + e, f1 = 1.0 + f, d = 1.0 / (e1 * f1);
    *tanh_a = (1.0 - e) * f1 * d;
    *tanh_b = (1.0 - f) * e1 * d;
}

}  // namespace continuous
}  // namespace
}  // namespace egru::EGRU_LEVEL
