// Products with matrices that are packed without their zero blocks.
//
// Included by kernels.cpp, which is compiled once per dispatch level.
#pragma once

#include <cstring>

#include "common/floats.hpp"
#include "engine/int8_products.hpp"
#include "engine/kernels.hpp"

namespace egru::EGRU_LEVEL {
namespace {

using namespace egru::engine;

struct BlockRange {
    uint32_t begin, end;
};

// Which blocks of a row have columns in [first, first + columns).
class Sections {
public:
    Sections(const Rows& rows, int first, int columns) : sections_(static_cast<size_t>(rows.sections)) {
        const int width = rows.columns / rows.sections;
        first_ = rows.start + first / width;
        last_ = rows.start + (first + columns + width - 1) / width;
    }
    BlockRange of(int row) const {
        const size_t at = static_cast<size_t>(row) * sections_;
        return {first_[at], last_[at]};
    }

private:
    const uint32_t *first_, *last_;
    size_t sections_;
};

// The first block of `range` with columns from `column` on.
inline uint32_t find_block(BlockRange range, const uint16_t* block, int column) {
    while (range.begin < range.end) {
        const uint32_t middle = range.begin + (range.end - range.begin) / 2;
        if (block[middle] < column / sparse_block)
            range.begin = middle + 1;
        else
            range.end = middle;
    }
    return range.begin;
}

// The part of `range` with columns in [first, first + columns), for shares of several threads, which cut sections.
inline BlockRange cut_range(BlockRange range, const uint16_t* block, int first, int columns) {
    return {find_block(range, block, first), find_block(range, block, first + columns)};
}

constexpr int ranges_at_once = 128;

// Call `add(weights, column, factor(k))` for the blocks with columns in [first, first + columns) of all entries k of
// `index`, and prefetch those of the next entry meanwhile: rows are read in an order that the hardware cannot predict.
// The ranges of many rows are looked up first, so that the inner loop needs few registers.
template <int bytes, class Factor, class Add>
inline void for_each_block(const Rows& rows, int first, int columns, const int32_t* index, int count, Factor factor,
                           Add add) {
    const int width = rows.columns / rows.sections;
    const bool cut = first % width != 0 || columns % width != 0;
    const Sections sections(rows, first, columns);
    // Copies: the compiler cannot know that sums do not overlap `rows`.
    const uint16_t* const ids = rows.block;
    const unsigned char* const values = rows.values;
    BlockRange ranges[ranges_at_once + 1];
    for (int from = 0; from < count; from += ranges_at_once) {
        const int here = count - from < ranges_at_once ? count - from : ranges_at_once;
        if (cut)
            for (int k = 0; k < here; ++k) ranges[k] = cut_range(sections.of(index[from + k]), ids, first, columns);
        else
            for (int k = 0; k < here; ++k) ranges[k] = sections.of(index[from + k]);
        ranges[here] = ranges[here - 1];
        for (int k = 0; k < here; ++k) {
            const BlockRange blocks = ranges[k], next = ranges[k + 1];
            const unsigned char* weights = values + static_cast<size_t>(blocks.begin) * bytes;
            const unsigned char* ahead = values + static_cast<size_t>(next.begin) * bytes;
            const uint16_t *block = ids + blocks.begin, *end = ids + blocks.end;
            const auto value = factor(from + k);
            __builtin_prefetch(ids + next.begin);
            __builtin_prefetch(ids + next.begin + 32);
            // A cache line holds four int8 blocks. One prefetch per block would request each line four times.
            constexpr bool prefetch_per_block = bytes >= 32;
            for (int line = 0; !prefetch_per_block && line < 4; ++line) __builtin_prefetch(ahead + 64 * line);
            // Not unrolled: the end of a second loop, over the remaining blocks, would also be mispredicted.
            for (; block < end; ++block, weights += bytes, ahead += bytes) {
                if (prefetch_per_block) __builtin_prefetch(ahead);
                add(weights, *block * sparse_block, value);
            }
        }
    }
}

template <WeightFormat format>
void add_blocks_as(const Rows& rows, int first, int columns, const SparseVector& x, float* sum) {
    constexpr int bytes = sparse_block * (format == WeightFormat::float32 ? 4 : 2);
    typedef uint16_t Halves __attribute__((vector_size(2 * width)));
    const auto factor = [value = x.value](int k) { return all(value[k]); };
    const auto add = [to = sum - first](const unsigned char* weights, int column, Floats v) {
        for (int i = 0; i < sparse_block; i += width) {
            Floats w;
            if constexpr (format == WeightFormat::float32)
                w = load<Floats>(weights + 4 * i);
            else
                w = (Floats)(__builtin_convertvector(load<Halves>(weights + 2 * i), Words) << 16);
            store(to + column + i, simd::fma(v, w, loadf(to + column + i)));
        }
    };
    for_each_block<bytes>(rows, first, columns, x.index, x.count, factor, add);
}

void add_blocks(const Rows& rows, int first, int columns, const SparseVector& x, float* sum) {
    if (rows.format == WeightFormat::float32)
        add_blocks_as<WeightFormat::float32>(rows, first, columns, x, sum);
    else
        add_blocks_as<WeightFormat::bfloat16>(rows, first, columns, x, sum);
}

void add_blocks_int8(const Rows& rows, int first, int columns, const QuantisedVector& x, int32_t* integers, float* sum) {
    std::memset(integers, 0, sizeof(int32_t) * static_cast<size_t>(columns));
    const auto factor = [q = x.q, negative = x.negative](int k) {
        const int32_t value = k < negative ? -q[k] : q[k];
#ifdef __AVX512VNNI__
        return _mm512_set1_epi32(value & 0xffff);  // the high halves are zero: only the low halves are multiplied
#else
        return value;
#endif
    };
    const auto add = [from = integers - first](const unsigned char* weights, int column, auto q) {
        int32_t* to = from + column;
#ifdef __AVX512VNNI__
        const __m512i w = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weights)));
        _mm512_storeu_si512(to, _mm512_dpwssd_epi32(_mm512_loadu_si512(to), w, q));
#elif defined(EGRU_NEON)
        int32x4_t s[4];
        for (int i = 0; i < 4; ++i) s[i] = load<int32x4_t>(to + 4 * i);
        neon_multiply_add(s, load<int8x16_t>(weights), static_cast<int16_t>(q));
        for (int i = 0; i < 4; ++i) store(to + 4 * i, s[i]);
#else
        typedef int8_t Bytes __attribute__((vector_size(width)));
        for (int i = 0; i < sparse_block; i += width)
            store(to + i, load<Ints>(to + i) + __builtin_convertvector(load<Bytes>(weights + i), Ints) * q);
#endif
    };
    int count = x.negative + x.positive;
    while (count > 0 && x.q[count - 1] == 0) --count;  // padding
    for_each_block<sparse_block>(rows, first, columns, x.index, count, factor, add);
    const Floats unit = all(x.unit);
    for (int i = 0; i < columns; i += width) {
        const Floats product = __builtin_convertvector(load<Ints>(integers + i), Floats);
        store(sum + i, simd::fma(product, unit * loadf(rows.scale + first + i), loadf(sum + i)));
    }
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
