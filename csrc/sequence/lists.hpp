// Lists of the non-zero entries of a matrix, by row or by column, tile by tile.
#pragma once

#include "sequence/layout.hpp"

namespace egru::EGRU_LEVEL {
namespace {

// Share of the values of a layer with delta events above which products with the values are faster than with the changes.
constexpr double most_changes = 0.5;

// For each tile of 64 positions and each of `rows` rows: the positions of the non-zero entries, and their values. Each
// tile has separate memory, so that threads can list different tiles at the same time.
template <class S>
struct Lists {
    uint8_t* index;
    S* value;
    uint32_t* start;  // rows + 1 entries per tile
    int64_t rows;

    Lists() = default;
    Lists(Arena& arena, int64_t rows_, int64_t positions) : rows(rows_) {
        const int64_t tiles = divide_up(positions, tile);
        index = arena.take<uint8_t>(tiles * capacity());
        value = arena.take<S>(tiles * capacity());
        start = arena.take<uint32_t>(tiles * (rows + 1));
    }
    // The share of non-zero entries in `tiles` tiles that list the first `count` rows of `width` entries in all.
    double share(int tiles, int64_t count, int64_t width) const {
        int64_t listed = 0;
        for (int at = 0; at < tiles; ++at) listed += start[at * (rows + 1) + count];
        return (double)listed / (double)(count * width);
    }
    int64_t capacity() const { return rows * tile + tile; }  // writers may run up to one vector past the end
};

// List the non-zero entries of rows [0, count) of a chunk that starts at step `first`, for one tile of positions.
template <class S>
void list_tile(const Steps<S>& from, int first, int B, int count, int width, int at, const Lists<S>& lists) {
    uint8_t* index = lists.index + at * lists.capacity();
    S* value = lists.value + at * lists.capacity();
    uint32_t* start = lists.start + at * (lists.rows + 1);
    const int begin = at * tile, end = begin + tile < width ? begin + tile : width;
    int length = 0;
    for (int row = 0, t = first, s = 0; row < count; ++row) {
        start[row] = (uint32_t)length;
        const S* values = from.at(t, s);
        for (int i = begin; i < end; i += lanes<S>)
            length = append_nonzero<S>(values + i, end - i, i - begin, index, value, length);
        if (++s == B) s = 0, ++t;
    }
    start[count] = (uint32_t)length;
}

// Transpose 64 x 64 bits in place (Hacker's Delight, 7-3; bit 0 is column 0).
inline void transpose_bits(uint64_t* words) {
    uint64_t mask = 0x00000000ffffffffull;
    for (int width = 32; width; width >>= 1, mask ^= mask << width)
        for (int k = 0; k < 64; k = (k + width + 1) & ~width) {
            const uint64_t swap = ((words[k] >> width) ^ words[k + width]) & mask;
            words[k] ^= swap << width;
            words[k + width] ^= swap;
        }
}

// The same by column: for each position, the rows of tile `at` (64 batch rows of a chunk) where it is non-zero. With
// `changes`, rows after the first step are listed as differences from the previous step.
template <bool changes = false, class S>
void list_columns(const Steps<S>& from, int first, int B, int count, int width, int at, const Lists<S>& lists) {
    uint8_t* index = lists.index + at * lists.capacity();
    S* value = lists.value + at * lists.capacity();
    uint32_t* start = lists.start + at * (lists.rows + 1);
    const int begin = at * tile, rows = count - begin < tile ? count - begin : tile;
    const S *row_of[tile], *before[tile] = {};
    for (int i = 0; i < rows; ++i) {
        const int t = first + (begin + i) / B, s = (begin + i) % B;
        row_of[i] = from.at(t, s);
        if (changes && t > first) before[i] = from.at(t - 1, s);
    }
    int length = 0;
    for (int n0 = 0; n0 < width; n0 += tile) {
        const int columns = width - n0 < tile ? width - n0 : tile;
        uint64_t words[tile] = {};
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < columns; j += lanes<S>) {
                Vector<S> values = load_part<S>(row_of[i] + n0 + j, columns - j);
                if (changes && before[i]) values -= load_part<S>(before[i] + n0 + j, columns - j);
                words[i] |= (uint64_t)bits<S>(values != 0) << j;
            }
        transpose_bits(words);
        for (int j = 0; j < columns; ++j) {
            start[n0 + j] = (uint32_t)length;
            for (uint64_t word = words[j]; word; word &= word - 1) {
                const int i = __builtin_ctzll(word);
                index[length] = (uint8_t)i;
                value[length++] = row_of[i][n0 + j] - (changes && before[i] ? before[i][n0 + j] : S(0));
            }
        }
    }
    start[width] = (uint32_t)length;
}

// Multiply the values of lists by column by factor(step, batch row)[position / 32 * stride + position % 32].
template <class S, class Factor>
void scale_columns(Factor factor, int64_t stride, int first, int B, int count, int width, int at,
                   const Lists<S>& lists) {
    const uint8_t* index = lists.index + at * lists.capacity();
    S* value = lists.value + at * lists.capacity();
    const uint32_t* start = lists.start + at * (lists.rows + 1);
    const int begin = at * tile, rows = count - begin < tile ? count - begin : tile;
    const S* row_of[tile];
    for (int i = 0; i < rows; ++i) row_of[i] = factor(first + (begin + i) / B, (begin + i) % B);
    for (int n = 0; n < width; ++n) {
        const int64_t offset = n / block * stride + n % block;
        for (uint32_t k = start[n]; k < start[n + 1]; ++k) value[k] *= row_of[index[k]][offset];
    }
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
