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

// Which blocks of a row have columns in [first, first + columns). Shares of several threads may cut a section.
class BlockRange {
public:
    BlockRange(const Rows& rows, int first, int columns)
        : start_(rows.start), block_(rows.block), sections_(static_cast<size_t>(rows.sections)) {
        const int width = rows.columns / rows.sections, last = first + columns;
        s0_ = first / width;
        s1_ = (last + width - 1) / width;
        if (first % width != 0) cut_begin_ = first / sparse_block;
        if (last % width != 0) cut_end_ = last / sparse_block;
    }
    struct Blocks {
        uint32_t begin, end;
    };
    Blocks of(int row) const {
        const uint32_t* start = start_ + static_cast<size_t>(row) * sections_;
        Blocks blocks{start[s0_], start[s1_]};
        if (cut_begin_ >= 0) blocks.begin = at(blocks, cut_begin_);
        if (cut_end_ >= 0) blocks.end = at(blocks, cut_end_);
        return blocks;
    }

private:
    uint32_t at(Blocks blocks, int block) const {
        uint32_t low = blocks.begin, high = blocks.end;  // binary search for the first block that is not smaller
        while (low < high) {
            const uint32_t middle = low + (high - low) / 2;
            if (block_[middle] < block)
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    }
    const uint32_t* start_;
    const uint16_t* block_;
    size_t sections_;
    int s0_, s1_;
    int cut_begin_ = -1, cut_end_ = -1;  // if not negative, the first block and the end of a section that is cut
};

// Call `add(weights, column, factor(k))` for the blocks of all entries k of `index`, and prefetch those of the next
// entry meanwhile: rows are read in an order that the hardware cannot predict.
template <int bytes, class Factor, class Add>
inline void for_each_block(const Rows& rows, int first, int columns, const int32_t* index, int count, Factor factor,
                           Add add) {
    if (count == 0) return;
    const BlockRange range(rows, first, columns);
    // Copies: the compiler cannot know that sums do not overlap `rows`.
    const uint16_t* const ids = rows.block;
    const unsigned char* const values = rows.values;
    BlockRange::Blocks next = range.of(index[0]);
    for (int k = 0; k < count; ++k) {
        const BlockRange::Blocks blocks = next;
        next = range.of(index[k + 1 < count ? k + 1 : k]);
        const unsigned char* weights = values + static_cast<size_t>(blocks.begin) * bytes;
        const unsigned char* ahead = values + static_cast<size_t>(next.begin) * bytes;
        const uint16_t *block = ids + blocks.begin, *end = ids + blocks.end;
        const auto value = factor(k);
        __builtin_prefetch(ids + next.begin);
        __builtin_prefetch(ids + next.begin + 32);
        constexpr int per_line = 64 / bytes;
        for (; block + per_line <= end; ahead += 64) {
            __builtin_prefetch(ahead);
#pragma GCC unroll 4
            for (int i = 0; i < per_line; ++i, ++block, weights += bytes) add(weights, *block * sparse_block, value);
        }
        for (; block < end; ++block, weights += bytes) add(weights, *block * sparse_block, value);
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
    const auto factor = [q = x.q, negative = x.negative](int k) -> int32_t { return k < negative ? -q[k] : q[k]; };
    const auto add = [from = integers - first](const unsigned char* weights, int column, int32_t q) {
        int32_t* to = from + column;
#ifdef __AVX512VNNI__
        const __m512i w = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weights)));
        // The high halves of q are zero, so that only the low halves of the weights are multiplied.
        _mm512_storeu_si512(to, _mm512_dpwssd_epi32(_mm512_loadu_si512(to), w, _mm512_set1_epi32(q & 0xffff)));
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
