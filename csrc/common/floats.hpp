// Vectors of floats as wide as the registers of the level, for the streaming engine.
//
// Multiply-adds are explicit calls of fma. Sources that include this file are compiled without contraction, so that an
// expression has the same bits wherever it is inlined. (simd.hpp, for the training kernels, allows contraction.)
// Everything has internal linkage; see levels.hpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/neon.hpp"
#ifdef EGRU_X86
#include <immintrin.h>
#endif

namespace egru::EGRU_LEVEL {
namespace {
namespace simd {

#if defined(__AVX512F__)
constexpr int width = 16;
#elif defined(__AVX2__)
constexpr int width = 8;
#else
constexpr int width = 4;
#endif

typedef float Floats __attribute__((vector_size(width * 4)));
typedef int32_t Ints __attribute__((vector_size(width * 4)));
typedef uint32_t Words __attribute__((vector_size(width * 4)));

template <class V, class T>
inline V load(const T* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V, class T>
inline void store(T* to, V v) {
    std::memcpy(to, &v, sizeof v);
}
inline Floats loadf(const float* from) { return load<Floats>(from); }
inline Floats all(float x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_set1_ps(x);
#elif defined(__AVX2__)
    return (Floats)_mm256_set1_ps(x);
#else
    return Floats{x, x, x, x};
#endif
}

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(EGRU_NEON)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Bit i is set if lane i of `condition` is true. Lanes are all ones or all zeros.
inline uint32_t bits(Ints condition) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)condition);
#elif defined(__AVX2__)
    return static_cast<uint32_t>(_mm256_movemask_ps((__m256)condition));
#elif defined(EGRU_NEON)
    return arm::bits((uint32x4_t)condition);
#else
    uint32_t mask = 0;
    for (int i = 0; i < width; ++i) mask |= (condition[i] ? 1u : 0u) << i;
    return mask;
#endif
}

// The number of lanes of `condition` that are true.
inline int count(Ints condition) {
#if defined(EGRU_NEON)
    return -vaddvq_s32((int32x4_t)condition);
#else
    return __builtin_popcount(bits(condition));
#endif
}

// Store the lanes of `v` that are set in `mask`, packed. May write a whole vector.
template <class V, class T>
inline void compress(T* to, V v, uint32_t mask) {
#if defined(__AVX512F__)
    // compress in the register, then store: the compressing store is microcoded on some processors
    store(to, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), (__m512i)v));
#elif defined(EGRU_NEON)
    store(to, arm::compress((uint8x16_t)v, mask));
#else
    for (; mask != 0; mask &= mask - 1) *to++ = v[__builtin_ctz(mask)];
#endif
}

inline Ints lanes() {
    Ints v;
    for (int i = 0; i < width; ++i) v[i] = i;
    return v;
}

// exp to about one unit in the last place on [-40, 40]; arguments are clamped to this range, so that the product of two
// results does not overflow. NaN stays NaN.
inline Floats exp(Floats x) {
    x = x > 40.0f ? all(40.0f) : x;
    x = x < -40.0f ? all(-40.0f) : x;
    const Floats magic = all(12582912.0f);  // adding 1.5 * 2^23 rounds to an integer
    const Floats n = fma(x, all(1.44269504f), magic) - magic;
    Floats f = fma(n, all(-0.693359375f), x);
    f = fma(n, all(2.12194440e-4f), f);
    Floats p = all(1.9875691500e-4f);
    p = fma(p, f, all(1.3981999507e-3f));
    p = fma(p, f, all(8.3334519073e-3f));
    p = fma(p, f, all(4.1665795894e-2f));
    p = fma(p, f, all(1.6666665459e-1f));
    p = fma(p, f, all(5.0000001201e-1f));
    p = fma(p, f * f, f + 1.0f);
    const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    return p * (Floats)exponent;
}

inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }
inline Floats tanh(Floats x) {
    const Floats e = exp(-2.0f * x);
    return (1.0f - e) / (1.0f + e);
}

}  // namespace simd
}  // namespace
}  // namespace egru::EGRU_LEVEL
