// The gradient of the input, a W, where every entry is needed: a dense product, except for gradients that are zero
// wherever a unit had no event.
#pragma once

#include "sequence/layer.hpp"

namespace egru::EGRU_LEVEL {
namespace {

// Blocks of 32 inputs computed together. Coefficients come from the third-level cache once for all of them.
constexpr int strips_max = 6;
constexpr int dense_panels = 2;   // panels of coefficients per pass: weights of a strip stay in the first-level cache
constexpr int dense_rows = 1032;  // batch rows per pass: their coefficients stay in the second-level cache

// Copy block q of the columns of weight (gates * H, width) to to[panel][unit][32]. Zero past the ends.
template <class S>
void pack_strip(const S* weight, int H, int width, int blocks, int panels, int q, S* to) {
    const int columns = width - q * block < block ? width - q * block : block;
    for (int p = 0; p < panels; ++p)
        for (int k = 0; k < block; ++k, to += block) {
            const int unit = p % blocks * block + k;
            const S* row = weight + ((int64_t)(p / blocks) * H + unit) * width + q * block;
            for (int v = 0; v < block; v += lanes<S>)
                store<S>(to + v, unit < H && v < columns ? load_part<S>(row + v, columns - v) : Vector<S>{});
        }
}

// List the non-zero entries of `count` rows of tile `at`, given panels of 32 positions: from[block][row][32].
template <class S>
void list_panels(const S* from, int blocks, int count, int at, const Lists<S>& lists) {
    constexpr int wide = tile / block;
    uint8_t* index = lists.index + at * lists.capacity();
    S* value = lists.value + at * lists.capacity();
    uint32_t* start = lists.start + at * (lists.rows + 1);
    const int begin = at * wide, end = begin + wide < blocks ? begin + wide : blocks;
    int length = 0;
    for (int row = 0; row < count; ++row) {
        start[row] = (uint32_t)length;
        for (int b = begin; b < end; ++b) {
            const S* values = from + ((int64_t)b * count + row) * block;
            for (int v = 0; v < block; v += lanes<S>)
                length = append_nonzero<S>(values + v, block, (b - begin) * block + v, index, value, length);
        }
    }
    start[count] = (uint32_t)length;
}

// Rows whose sums fit into registers.
template <class S>
constexpr int dense_tile = (registers - 8) / (block / lanes<S>) > 1 ? (registers - 8) / (block / lanes<S>) : 1;

// out[row][32] += the sum over panels and units of a[panel][row][unit] * weight[panel][unit][32], for R rows.
template <class S, int R>
inline void dense_product(const S* a, int64_t panel_size, int panels, const S* weight, S* out) {
    constexpr int L = lanes<S>, V = block / L;
    Vector<S> total[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) total[r][v] = load<S>(out + r * block + v * L);
    for (int p = 0; p < panels; ++p, a += panel_size)
        for (int k = 0; k < block; ++k, weight += block) {
            Vector<S> w[V];
#pragma GCC unroll 16
            for (int v = 0; v < V; ++v) w[v] = load<S>(weight + v * L);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Vector<S> x = broadcast<S>(a[r * block + k]);
#pragma GCC unroll 16
                for (int v = 0; v < V; ++v) total[r][v] += x * w[v];
            }
        }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) store<S>(out + r * block + v * L, total[r][v]);
}

template <class S>
void dense_rows_product(const S* a, int64_t panel_size, int panels, const S* weight, int rows, S* out) {
    constexpr int R = dense_tile<S>;
    int row = 0;
    for (; row + R <= rows; row += R)
        dense_product<S, R>(a + row * block, panel_size, panels, weight, out + row * block);
    if constexpr (R > 4)
        for (; row + 4 <= rows; row += 4)
            dense_product<S, 4>(a + row * block, panel_size, panels, weight, out + row * block);
    for (; row < rows; ++row) dense_product<S, 1>(a + row * block, panel_size, panels, weight, out + row * block);
}

// Whether the inputs are too few for strips of 32.
template <class S>
bool narrow_input(const Layer<S>& layer) {
    return layer.I <= block / 2;
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
