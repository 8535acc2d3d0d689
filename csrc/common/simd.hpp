// Vectors as wide as the registers of the level, for the training kernels. One source for all levels: the compiler's
// vector extensions, and intrinsics only where the extensions do not suffice. Everything has internal linkage; see
// levels.hpp.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "common/neon.hpp"
#ifdef EGRU_X86
#include <immintrin.h>
#endif

namespace egru::EGRU_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int vector_bytes = 64;
#elif defined(__AVX2__)
constexpr int vector_bytes = 32;
#else
constexpr int vector_bytes = 16;
#endif
#if defined(__AVX512F__) || defined(EGRU_NEON)
constexpr int registers = 32;
#else
constexpr int registers = 16;
#endif

template <class S>
struct VectorOf {
    typedef S type __attribute__((vector_size(vector_bytes)));
};
template <class S>
using Vector = typename VectorOf<S>::type;
template <class S>
constexpr int lanes = vector_bytes / sizeof(S);

template <class S>
inline Vector<S> load(const S* from) {
    Vector<S> v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}
template <class S>
inline void store(S* to, Vector<S> v) {
    __builtin_memcpy(to, &v, sizeof v);
}
template <class S>
inline Vector<S> broadcast(S value) {
    return value - Vector<S>{};  // compiles to one broadcast; 0 + value would not, because it maps -0 to 0
}

// Makes the compiler load a vector once. Otherwise GCC repeats the load in every instruction that uses it.
template <class S>
inline void keep_in_register([[maybe_unused]] Vector<S>& v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(EGRU_X86)
    asm("" : "+x"(v));
#endif
}

// The first `count` elements (at least one), the rest zero: for the end of a row.
template <class S>
inline Vector<S> load_part(const S* from, int count) {
    if (__builtin_expect(count >= lanes<S>, 1)) return load<S>(from);
#if defined(__AVX512F__)
    if constexpr (sizeof(S) == 4)
        return (Vector<S>)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
    else
        return (Vector<S>)_mm512_maskz_loadu_pd((__mmask8)((1u << count) - 1), from);
#endif
    S padded[lanes<S>] = {};
    for (int i = 0; i < count; ++i) padded[i] = from[i];
    return load<S>(padded);
}
template <class S>
inline void store_part(S* to, Vector<S> v, int count) {
    if (__builtin_expect(count >= lanes<S>, 1)) return store<S>(to, v);
#if defined(__AVX512F__)
    if constexpr (sizeof(S) == 4)
        return _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)v);
    else
        return _mm512_mask_storeu_pd(to, (__mmask8)((1u << count) - 1), (__m512d)v);
#endif
    S padded[lanes<S>];
    store<S>(padded, v);
    for (int i = 0; i < count; ++i) to[i] = padded[i];
}

template <class S>
inline Vector<S> absolute(Vector<S> v) {
    return v < 0 ? -v : v;
}
template <class S>
inline Vector<S> clamp(Vector<S> v, S low, S high) {
    v = v < low ? broadcast<S>(low) : v;
    return v > high ? broadcast<S>(high) : v;
}

// One bit per lane, lane 0 lowest.
template <class S, class Mask>
inline uint32_t bits(Mask mask) {
#if defined(__AVX512F__)
    if constexpr (sizeof(S) == 4)
        return _mm512_movepi32_mask((__m512i)mask);
    else
        return _mm512_movepi64_mask((__m512i)mask);
#elif defined(__AVX2__)
    if constexpr (sizeof(S) == 4)
        return (uint32_t)_mm256_movemask_ps((__m256)mask);
    else
        return (uint32_t)_mm256_movemask_pd((__m256d)mask);
#elif defined(EGRU_NEON)
    if constexpr (sizeof(S) == 4)
        return arm::bits((uint32x4_t)mask);
    else
        return arm::bits((uint64x2_t)mask);
#else
    uint32_t result = 0;
    for (int i = 0; i < lanes<S>; ++i) result |= (uint32_t)(mask[i] & 1) << i;
    return result;
#endif
}

// Bit `column` of each of 16 words.
inline uint32_t bit_column(const uint32_t* words, int column) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask(_mm512_slli_epi32(_mm512_loadu_si512(words), 31 - column));
#elif defined(EGRU_NEON)
    const uint32x4_t bit = vdupq_n_u32(1u << column);
    uint32x4_t places = {1, 2, 4, 8}, result = {};
    for (int i = 0; i < 16; i += 4, places <<= 4) result |= vtstq_u32(vld1q_u32(words + i), bit) & places;
    return vaddvq_u32(result);
#else
    uint32_t result = 0;
    for (int i = 0; i < 16; ++i) result |= (words[i] >> column & 1u) << i;
    return result;
#endif
}

// Append (offset + lane, value) for the non-zero elements among `count` values, and return the new length. May write up
// to one vector past the new end.
template <class S>
inline int append_nonzero(const S* from, int count, int offset, uint8_t* index, S* value, int length) {
#if defined(__AVX512F__)
    if constexpr (sizeof(S) == 4) {
        if (count >= 16) {
            const __m512 v = _mm512_loadu_ps(from);
            const __mmask16 k = _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
            const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            const __m512i at = _mm512_maskz_compress_epi32(k, _mm512_add_epi32(lane, _mm512_set1_epi32(offset)));
            _mm_storeu_si128((__m128i*)(index + length), _mm512_cvtepi32_epi8(at));
            _mm512_storeu_ps(value + length, _mm512_maskz_compress_ps(k, v));
            return length + __builtin_popcount(k);
        }
    }
#elif defined(EGRU_NEON)
    if constexpr (sizeof(S) == 4) {
        if (count >= 4) {
            const float32x4_t v = vld1q_f32(from);
            const uint32_t mask = arm::bits(vmvnq_u32(vceqzq_f32(v)));
            if (mask == 0) return length;
            const uint32_t at = arm::packing.lanes[mask] + 0x01010101u * (uint32_t)offset;
            __builtin_memcpy(index + length, &at, sizeof at);
            vst1q_u8((uint8_t*)(value + length), arm::compress(vreinterpretq_u8_f32(v), mask));
            return length + arm::packing.count[mask];
        }
    }
#endif
    const int end = count < lanes<S> ? count : lanes<S>;
    for (int i = 0; i < end; ++i) {  // branch-free: zeros are not predictable
        index[length] = (uint8_t)(offset + i);
        value[length] = from[i];
        length += from[i] != 0;
    }
    return length;
}

// out[row] += the sum of a vector, for each of the N rows in `mask`, in ascending order.
template <class S, int N>
[[gnu::always_inline]] inline void add_sums(const Vector<S> (&v)[N], unsigned mask, S* out) {
#if defined(__AVX512F__)
    if constexpr (sizeof(S) == 4) {
        const __m512 none = _mm512_setzero_ps();
        __m512 result = none;
#pragma GCC unroll 4
        for (int i = 0; i < N; i += 4) {  // four vectors at a time, transposed while they are summed
            const __m512 a = (__m512)v[i], b = i + 1 < N ? (__m512)v[i + 1] : none;
            const __m512 c = i + 2 < N ? (__m512)v[i + 2] : none, d = i + 3 < N ? (__m512)v[i + 3] : none;
            const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            const __m512 quads = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
            const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quads), _mm512_extractf32x8_ps(quads, 1));
            const __m128 four = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
            switch (i) {
                case 0: result = _mm512_castps128_ps512(four); break;
                case 4: result = _mm512_insertf32x4(result, four, 1); break;
                case 8: result = _mm512_insertf32x4(result, four, 2); break;
                default: result = _mm512_insertf32x4(result, four, 3);
            }
        }
        const __m512 spread = _mm512_maskz_expand_ps((__mmask16)mask, result);
        _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), spread));
        return;
    }
#elif defined(EGRU_NEON)
    if constexpr (sizeof(S) == 4) {
        const auto at = [&v](int i) { return i < N ? (float32x4_t)v[i] : vdupq_n_f32(0); };
#pragma GCC unroll 4
        for (int i = 0; i < N; i += 4) {  // four vectors at a time, transposed while they are summed
            const float32x4_t four = vpaddq_f32(vpaddq_f32(at(i), at(i + 1)), vpaddq_f32(at(i + 2), at(i + 3)));
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j, mask &= mask - 1)
                if (i + j < N) out[__builtin_ctz(mask)] += four[j];
        }
        return;
    }
#endif
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i, mask &= mask - 1) {
        S total = v[i][0];
        for (int j = 1; j < lanes<S>; ++j) total += v[i][j];
        out[__builtin_ctz(mask)] += total;
    }
}

// to[i] += from[i] for the bits i of `mask`, of 16 elements.
template <class S>
inline void add_where(const S* from, unsigned mask, S* to) {
#if defined(__AVX512F__)
    if constexpr (sizeof(S) == 4) {
        const __m512 v = _mm512_loadu_ps(to);
        _mm512_storeu_ps(to, _mm512_mask_add_ps(v, (__mmask16)mask, v, _mm512_loadu_ps(from)));
        return;
    }
#endif
    for (int i = 0; i < 16; ++i) {
        const S value = from[i];
        to[i] += mask >> i & 1 ? value : S(0);
    }
}

// Exchange the elements of a in the columns where `bit` is set with those of b where it is not.
template <class S, int bit, int... J>
inline void exchange(Vector<S>& a, Vector<S>& b, std::integer_sequence<int, J...>) {
    constexpr int L = lanes<S>;
#ifdef __clang__
    const Vector<S> low = __builtin_shufflevector(a, b, (J & bit ? L + J - bit : J)...);
    b = __builtin_shufflevector(a, b, (J & bit ? L + J : J + bit)...);
#else
    using Int = std::conditional_t<sizeof(S) == 4, int32_t, int64_t>;
    const Vector<S> low = __builtin_shuffle(a, b, Vector<Int>{(J & bit ? L + J - bit : J)...});
    b = __builtin_shuffle(a, b, Vector<Int>{(J & bit ? L + J : J + bit)...});
#endif
    a = low;
}

// Transpose a square of vectors, one bit of the row and column numbers at a time.
template <class S, int bit = 1>
inline void transpose(Vector<S> (&v)[lanes<S>]) {
    constexpr int L = lanes<S>;
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i)
        if (!(i & bit)) exchange<S, bit>(v[i], v[i + bit], std::make_integer_sequence<int, L>{});
    if constexpr (2 * bit < L) transpose<S, 2 * bit>(v);
}

// ---- functions -------------------------------------------------------------------------------------------------------

// exp to about one unit in the last place (Cephes). Arguments are clamped to +-87, where gates are saturated.
inline Vector<float> exponential(Vector<float> x) {
    typedef int32_t Int __attribute__((vector_size(vector_bytes)));
    x = clamp<float>(x, -87.0f, 87.0f);
    const Vector<float> magic = broadcast<float>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vector<float> shifted = x * 1.44269504f + magic;
    const Vector<float> n = shifted - magic;
    const Vector<float> f = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    Vector<float> p = f * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * (f * f) + (f + 1.0f);
    const Int power = ((Int)shifted - 0x4B400000 + 127) << 23;  // 0x4B400000: the bits of `magic`
    return p * (Vector<float>)power;
}

inline Vector<float> sigmoid(Vector<float> x) { return 1.0f / (1.0f + exponential(-x)); }

inline Vector<float> hyperbolic_tangent(Vector<float> x) {
    const Vector<float> far = 1.0f - 2.0f / (exponential(x + x) + 1.0f);
    const Vector<float> s = x * x;  // near zero `far` loses digits; the polynomial (Cephes) does not
    Vector<float> p = s * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * s - 5.37397155531e-2f;
    p = p * s + 1.33314422036e-1f;
    p = p * s - 3.33332819422e-1f;
    return absolute<float>(x) < 0.625f ? p * s * x + x : far;
}

// float64 is used by the parity tests: the library's functions, lane by lane.
inline Vector<double> sigmoid(Vector<double> x) {
    for (int i = 0; i < lanes<double>; ++i) x[i] = 1.0 / (1.0 + ::exp(-x[i]));
    return x;
}
inline Vector<double> hyperbolic_tangent(Vector<double> x) {
    for (int i = 0; i < lanes<double>; ++i) x[i] = ::tanh(x[i]);
    return x;
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
