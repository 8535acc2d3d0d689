// Products with int8 weights: the input is quantised to eight bits, multiplied in integers, and scaled back.
//
// Included by kernels.cpp, which is compiled once per dispatch level.
#pragma once

#include <cstring>

#include "common/floats.hpp"
#include "engine/kernels.hpp"

namespace egru::EGRU_LEVEL {
namespace {

using namespace egru::engine;

using simd::all;
using simd::Floats;
using simd::Ints;
using simd::load;
using simd::loadf;
using simd::store;
using simd::width;

constexpr int int8_sum_block = 4096;  // columns whose sums stay in the L1 cache while rows stream past

#ifdef EGRU_NEON
// sum += q * w for sixteen columns.
[[gnu::always_inline]] inline void neon_multiply_add(int32x4_t* sum, int8x16_t w, int16_t q) {
    const int16x8_t low = vmovl_s8(vget_low_s8(w)), high = vmovl_high_s8(w);
    sum[0] = vmlal_n_s16(sum[0], vget_low_s16(low), q);
    sum[1] = vmlal_high_n_s16(sum[1], low, q);
    sum[2] = vmlal_n_s16(sum[2], vget_low_s16(high), q);
    sum[3] = vmlal_high_n_s16(sum[3], high, q);
}
#endif

#ifdef __AVX512VNNI__
// The bytes of four rows at a time are transposed in registers into the order that the dot product requires.
template <int quads>
void stream_int8(const int8_t* const* row, const uint8_t* q, int columns, int32_t* sum) {
    __m512i v[quads];
    for (int i = 0; i < quads; ++i) v[i] = _mm512_set1_epi32(load<int32_t>(q + 4 * i));
    for (int j = 0; j < columns; j += 64) {
        __m512i s[4];
        for (int i = 0; i < 4; ++i) s[i] = _mm512_loadu_si512(sum + j + 16 * i);
#pragma GCC unroll 4
        for (int i = 0; i < quads; ++i) {
            const __m512i a = _mm512_loadu_si512(row[4 * i] + j), b = _mm512_loadu_si512(row[4 * i + 1] + j);
            const __m512i c = _mm512_loadu_si512(row[4 * i + 2] + j), d = _mm512_loadu_si512(row[4 * i + 3] + j);
            const __m512i ab = _mm512_unpacklo_epi8(a, b), ab2 = _mm512_unpackhi_epi8(a, b);
            const __m512i cd = _mm512_unpacklo_epi8(c, d), cd2 = _mm512_unpackhi_epi8(c, d);
            s[0] = _mm512_dpbusd_epi32(s[0], v[i], _mm512_unpacklo_epi16(ab, cd));
            s[1] = _mm512_dpbusd_epi32(s[1], v[i], _mm512_unpackhi_epi16(ab, cd));
            s[2] = _mm512_dpbusd_epi32(s[2], v[i], _mm512_unpacklo_epi16(ab2, cd2));
            s[3] = _mm512_dpbusd_epi32(s[3], v[i], _mm512_unpackhi_epi16(ab2, cd2));
        }
        for (int i = 0; i < 4; ++i) _mm512_storeu_si512(sum + j + 16 * i, s[i]);
    }
}
constexpr bool int8_interleaved = true;
#elif defined(EGRU_NEON) && defined(__ARM_FEATURE_DOTPROD)
// The same, with products of unsigned bytes: weights are increased by 128, and 128 times the sum of `q` is subtracted.
// Sums are modulo 2^32.
template <int quads>
void stream_int8(const int8_t* const* row, const uint8_t* q, int columns, int32_t* sum) {
    uint8x16_t v[quads];
    uint32_t excess = 0;
    for (int i = 0; i < quads; ++i) v[i] = vreinterpretq_u8_u32(vdupq_n_u32(load<uint32_t>(q + 4 * i)));
    for (int r = 0; r < 4 * quads; ++r) excess += 128u * q[r];
    for (int j = 0; j < columns; j += 16) {
        uint32x4_t s[4];
        for (int i = 0; i < 4; ++i) s[i] = vsubq_u32(load<uint32x4_t>(sum + j + 4 * i), vdupq_n_u32(excess));
#pragma GCC unroll 4
        for (int i = 0; i < quads; ++i) {
            uint8x16_t w[4];
            for (int r = 0; r < 4; ++r) w[r] = veorq_u8(load<uint8x16_t>(row[4 * i + r] + j), vdupq_n_u8(128));
            const uint16x8_t ab = vreinterpretq_u16_u8(vzip1q_u8(w[0], w[1]));
            const uint16x8_t cd = vreinterpretq_u16_u8(vzip1q_u8(w[2], w[3]));
            const uint16x8_t ab2 = vreinterpretq_u16_u8(vzip2q_u8(w[0], w[1]));
            const uint16x8_t cd2 = vreinterpretq_u16_u8(vzip2q_u8(w[2], w[3]));
            s[0] = vdotq_u32(s[0], vreinterpretq_u8_u16(vzip1q_u16(ab, cd)), v[i]);
            s[1] = vdotq_u32(s[1], vreinterpretq_u8_u16(vzip2q_u16(ab, cd)), v[i]);
            s[2] = vdotq_u32(s[2], vreinterpretq_u8_u16(vzip1q_u16(ab2, cd2)), v[i]);
            s[3] = vdotq_u32(s[3], vreinterpretq_u8_u16(vzip2q_u16(ab2, cd2)), v[i]);
        }
        for (int i = 0; i < 4; ++i) store(sum + j + 4 * i, s[i]);
    }
}
constexpr bool int8_interleaved = false;
#elif defined(EGRU_NEON)
template <int quads>
void stream_int8(const int8_t* const* row, const uint8_t* q, int columns, int32_t* sum) {
    for (int j = 0; j < columns; j += 16) {
        int32x4_t s[4];
        for (int i = 0; i < 4; ++i) s[i] = load<int32x4_t>(sum + j + 4 * i);
#pragma GCC unroll 16
        for (int r = 0; r < 4 * quads; ++r) neon_multiply_add(s, vld1q_s8(row[r] + j), q[r]);
        for (int i = 0; i < 4; ++i) store(sum + j + 4 * i, s[i]);
    }
}
constexpr bool int8_interleaved = false;
#else
template <int quads>
void stream_int8(const int8_t* const* row, const uint8_t* q, int columns, int32_t* sum) {
    for (int r = 0; r < 4 * quads; r += 4) {
        const int8_t *a = row[r], *b = row[r + 1], *c = row[r + 2], *d = row[r + 3];
        const int16_t qa = q[r], qb = q[r + 1], qc = q[r + 2], qd = q[r + 3];
        // One product fits into sixteen bits: 255 * 127 < 2^15.
        for (int j = 0; j < columns; ++j)
            sum[j] += static_cast<int16_t>(qa * a[j]) + static_cast<int16_t>(qb * b[j]) +
                      static_cast<int16_t>(qc * c[j]) + static_cast<int16_t>(qd * d[j]);
    }
}
constexpr bool int8_interleaved = false;
#endif

template <int quads>
int stream_quads(const Rows& rows, int first, int columns, const int32_t* index, const uint8_t* q, int k, int n,
                 int32_t* sum) {
    for (; k + 4 * quads <= n; k += 4 * quads) {
        const int8_t* row[4 * quads];
        for (int r = 0; r < 4 * quads; ++r)
            row[r] = reinterpret_cast<const int8_t*>(rows.base + index[k + r] * rows.stride) + first;
        stream_int8<quads>(row, q + k, columns, sum);
    }
    return k;
}

void add_magnitudes(const Rows& rows, int first, int columns, const int32_t* index, const uint8_t* q, int n,
                    int32_t* sum) {
    const int k = stream_quads<4>(rows, first, columns, index, q, 0, n, sum);
    stream_quads<1>(rows, first, columns, index, q, k, n, sum);
}

void add_rows_int8(const Rows& rows, int first, int columns, const QuantisedVector& x, int32_t* integers, float* sum) {
    for (int j = 0; j < columns; j += int8_sum_block) {
        const int n = columns - j < int8_sum_block ? columns - j : int8_sum_block;
        std::memset(integers, 0, sizeof(int32_t) * static_cast<size_t>(n));
        if (x.negative > 0) {
            add_magnitudes(rows, first + j, n, x.index, x.q, x.negative, integers);
            for (int i = 0; i < n; ++i) integers[i] = -integers[i];
        }
        add_magnitudes(rows, first + j, n, x.index + x.negative, x.q + x.negative, x.positive, integers);
        const Floats unit = all(x.unit);
        for (int i = 0; i < n; i += width) {
            const Floats product = __builtin_convertvector(load<Ints>(integers + i), Floats);
            store(sum + j + i, simd::fma(product, unit * loadf(rows.scale + first + j + i), loadf(sum + j + i)));
        }
    }
}

void quantise(const SparseVector& x, QuantisedVector* quantised) {
    typedef uint8_t Bytes __attribute__((vector_size(width)));
    Floats high{}, low{};
    int k = 0;
    for (; k + width <= x.count; k += width) {
        const Floats v = loadf(x.value + k);
        high = v > high ? v : high;
        low = v < low ? v : low;
    }
    float largest = 0, least = 0;
    const auto extend = [&](float top, float bottom) {
        largest = top > largest ? top : largest;
        least = bottom < least ? bottom : least;
    };
    for (int i = 0; i < width; ++i) extend(high[i], low[i]);
    for (; k < x.count; ++k) extend(x.value[k], x.value[k]);
    const float magnitude = largest > -least ? largest : -least;
    const float per_unit = magnitude > 0 ? 255.0f / magnitude : 0.0f;
    quantised->unit = magnitude / 255.0f;

    int n = 0;
    const auto append = [&](float value, int32_t index) {
        quantised->index[n] = index;
        quantised->q[n++] = static_cast<uint8_t>(static_cast<int>(value * per_unit + 0.5f));
    };
    const auto pad = [&] {
        for (; n % 4 != 0; ++n) {
            quantised->index[n] = quantised->index[n - 1];
            quantised->q[n] = 0;
        }
    };
    if (least < 0) {
        for (k = 0; k < x.count; ++k)
            if (x.value[k] < 0) append(-x.value[k], x.index[k]);
        pad();
        quantised->negative = n;
        for (k = 0; k < x.count; ++k)
            if (x.value[k] > 0) append(x.value[k], x.index[k]);
    } else {
        quantised->negative = 0;
        for (k = 0; k + width <= x.count; k += width) {
            const Floats scaled = loadf(x.value + k) * per_unit + 0.5f;
            store(quantised->q + k, __builtin_convertvector(__builtin_convertvector(scaled, Ints), Bytes));
        }
        std::memcpy(quantised->index, x.index, sizeof(int32_t) * static_cast<size_t>(k));
        for (n = k; k < x.count; ++k) append(x.value[k], x.index[k]);
    }
    pad();
    quantised->positive = n - quantised->negative;
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
