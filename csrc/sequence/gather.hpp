// The sparse product of the forward pass and of the weight gradients:
//   out[row] += sum over the non-zero entries i of a row: value_i * panel[i]
// Entries are added in ascending order for any number of threads, so the result does not depend on it.
#pragma once

#include <utility>

#include "sequence/lists.hpp"

namespace egru::EGRU_LEVEL {
namespace {

// Half a panel: 16 columns. Rows are 32 elements apart.
constexpr int half = block / 2;
template <class S>
constexpr int half_vectors = half / lanes<S>;
// Halves gathered together: their tiles fit into the first-level cache and their accumulators into registers. Seven are
// those of four blocks if the last one has at most 16 units.
template <class S>
constexpr int halves_max = half_vectors<S> * 7 <= registers / 2     ? 7
                           : half_vectors<S> * 6 <= registers - 4 ? 6
                           : half_vectors<S> * 3 <= registers - 4 ? 3
                                                                  : 1;

// `gather` for rows `row` and `row` + 1 if the first `length` positions of both are non-zero. Loads each panel row
// once.
template <class S, int N>
void gather_pair(const S* const* panel, const S* value, const S* other, int length, int64_t row, S* const* out) {
    constexpr int L = lanes<S>, V = half_vectors<S>;
    constexpr int together = 2 * N * V <= registers - 4 ? N : 1;  // halves whose sums fit into registers
    for (int first = 0; first < N; first += together) {
        Vector<S> total[2][together][V] = {};
        for (int i = 0; i < length; ++i) {
            const Vector<S> v = broadcast<S>(value[i]), w = broadcast<S>(other[i]);
#pragma GCC unroll 12
            for (int n = 0; n < together; ++n)
#pragma GCC unroll 12
                for (int k = 0; k < V; ++k) {
                    Vector<S> x = load<S>(panel[first + n] + i * block + k * L);
                    keep_in_register<S>(x);
                    total[0][n][k] += v * x;
                    total[1][n][k] += w * x;
                }
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i)
#pragma GCC unroll 12
            for (int n = 0; n < together; ++n)
#pragma GCC unroll 12
                for (int k = 0; k < V; ++k) {
                    S* to = out[first + n] + (row + i) * block + k * L;
                    store<S>(to, load<S>(to) + total[i][n][k]);
                }
    }
}

// out[n][row][16] += the sum of value * panel[n][index][16] over each row's list, for N halves of panels. If `more`,
// prefetches the next tile into the second-level cache, a few lines with every row.
template <class S, int N>
void gather(const S* const* panel, const Lists<S>& lists, int at, int rows, S* const* out, bool more) {
    constexpr int L = lanes<S>, V = half_vectors<S>;
    const uint8_t* index = lists.index + at * lists.capacity();
    const S* value = lists.value + at * lists.capacity();
    const uint32_t* start = lists.start + at * (lists.rows + 1);
    const int ahead = more ? (int)divide_up(tile, rows) : 0;  // rows of the next tile
    const S* from[N];
    for (int n = 0; n < N; ++n) from[n] = panel[n];
    for (int row = 0; row < rows; ++row) {
        for (int i = row * ahead; i < (row + 1) * ahead && i < tile; ++i)
#pragma GCC unroll 12
            for (int n = 0; n < N; ++n) __builtin_prefetch(from[n] + (tile + i) * block, 0, 2);
        const uint32_t begin = start[row], end = start[row + 1];
        if (begin == end) continue;
        const uint32_t length = end - begin;
        // Lists ascend: a last index of length - 1 means that no position is missing.
        if (row + 1 < rows && start[row + 2] - end == length && index[end - 1] == length - 1 &&
            index[end + length - 1] == length - 1 && length > 1) {
            gather_pair<S, N>(panel, value + begin, value + end, (int)length, row, out);
            ++row;
            continue;
        }
        Vector<S> total[N][V] = {};
        for (uint32_t k = begin; k < end; ++k) {
            const int64_t position = (int64_t)index[k] * block;
            const Vector<S> v = broadcast<S>(value[k]);
#pragma GCC unroll 12
            for (int n = 0; n < N; ++n)
#pragma GCC unroll 12
                for (int w = 0; w < V; ++w) total[n][w] += v * load<S>(from[n] + position + w * L);
        }
#pragma GCC unroll 12
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 12
            for (int w = 0; w < V; ++w) {
                S* to = out[n] + (int64_t)row * block + w * L;
                store<S>(to, load<S>(to) + total[n][w]);
            }
    }
}

// The halves of panels to gather, and their outputs.
template <class S>
struct Columns {
    static constexpr int capacity = 4 * 3 * 2;  // four blocks of three gates
    const S* panel[capacity];
    S* out[capacity];
    int count = 0;

    // Add the first `units` columns of a panel.
    void add(const S* panel_, S* out_, int units) {
        for (int i = 0; i < units; i += half) {
            panel[count] = panel_ + i;
            out[count++] = out_ + i;
        }
    }
};

template <class S, int N>
void gather_some(const S* const* panel, int tiles, const Lists<S>& lists, int rows, S* const* out) {
    const S* tile_of[N];
    for (int n = 0; n < N; ++n) tile_of[n] = panel[n];
    for (int at = 0; at < tiles; ++at) {
        gather<S, N>(tile_of, lists, at, rows, out, at + 1 < tiles);
        for (int n = 0; n < N; ++n) tile_of[n] += tile * block;
    }
}
template <class S, int... N>
void gather_each(const Columns<S>& columns, int tiles, const Lists<S>& lists, int rows,
                 std::integer_sequence<int, N...>) {
    const int parts = (int)divide_up(columns.count, halves_max<S>);
    for (int i = 0; i < parts; ++i) {
        const int from = columns.count * i / parts, count = columns.count * (i + 1) / parts - from;
        const S* const* panel = columns.panel + from;
        S* const* out = columns.out + from;
        ((count == N + 1 ? gather_some<S, N + 1>(panel, tiles, lists, rows, out) : void()), ...);
    }
}
// out += lists * panel for all of `columns`, tile by tile.
template <class S>
void gather_all(const Columns<S>& columns, int tiles, const Lists<S>& lists, int rows) {
    gather_each(columns, tiles, lists, rows, std::make_integer_sequence<int, halves_max<S>>{});
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
