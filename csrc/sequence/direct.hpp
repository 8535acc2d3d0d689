// Dense products that read and write weights in torch's layout.
//
// Packing the weights and unpacking their gradients costs as much as multiplying them by a few dozen rows. Calls with
// few rows use these products instead. They do not skip zeros. Sums have the same order for any number of threads.
#pragma once

#include "sequence/layout.hpp"

namespace egru::EGRU_LEVEL {
namespace {

// ---- out[row][i] = weight[i] . x[row] + bias[i] ----------------------------------------------------------------------

// R rows, and as many rows of the weight as fit into registers.
template <int R>
constexpr int dot_units = dots_max / R < 8 ? dots_max / R : 8;

template <class S, int R>
inline void dot_tile(const S* weight, int64_t width, int units, const S* const* x, const S* bias, S* out) {
    constexpr int L = lanes<S>, U = dot_units<R>;
    const S* row[U];
    for (int i = 0; i < U; ++i) row[i] = weight + (i < units ? i : units - 1) * width;
    Vector<S> total[R * U] = {};
    int64_t k = 0;
    for (; k + L <= width; k += L) {
        Vector<S> v[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) v[r] = load<S>(x[r] + k);
#pragma GCC unroll 8
        for (int i = 0; i < U; ++i) {
            const Vector<S> w = load<S>(row[i] + k);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) total[r * U + i] += w * v[r];
        }
    }
    if (k < width) {
        const int count = (int)(width - k);
        Vector<S> v[R];
        for (int r = 0; r < R; ++r) v[r] = load_part<S>(x[r] + k, count);
#pragma GCC unroll 8
        for (int i = 0; i < U; ++i) {
            const Vector<S> w = load_part<S>(row[i] + k, count);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) total[r * U + i] += w * v[r];
        }
    }
    S sums[16] = {};
    add_sums<S, R * U>(total, (1u << R * U) - 1, sums);
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < U && i < units; ++i) out[r * block + i] = sums[r * U + i] + (bias ? bias[i] : S(0));
}

// For all `rows` rows and the `units` units of a block: out[row][32], zero past the last unit. at(row) returns the
// address of a row of x.
template <class S, int R, class At>
inline int dot_rows(const S* weight, int64_t width, int units, At at, int from, int rows, const S* bias, S* out) {
    for (; from + R <= rows; from += R) {
        const S* x[R];
        for (int r = 0; r < R; ++r) x[r] = at(from + r);
        dot_tile<S, R>(weight, width, units, x, bias, out + (int64_t)from * block);
    }
    return from;
}
template <class S, class At>
void multiply_rows(const S* weight, int64_t width, int units, At at, int rows, const S* bias, S* out) {
    for (int row = 0; row < rows && units < block; ++row)
        for (int i = units; i < block; ++i) out[(int64_t)row * block + i] = 0;
    constexpr int step = dot_units<4>;
    for (int i = 0; i < units && rows >= 4; i += step)
        dot_rows<S, 4>(weight + i * width, width, units - i, at, 0, rows, bias ? bias + i : nullptr, out + i);
    const int done = rows / 4 * 4;
    for (int i = 0; i < units && done < rows; i += dot_units<1>) {
        static_assert(dot_units<1> == dot_units<2> || dots_max < 16);
        const S* b = bias ? bias + i : nullptr;
        int from = done;
        if constexpr (dot_units<2> == dot_units<1>)
            from = dot_rows<S, 2>(weight + i * width, width, units - i, at, from, rows, b, out + i);
        dot_rows<S, 1>(weight + i * width, width, units - i, at, from, rows, b, out + i);
    }
}

// ---- out[row][n] += the sum over j of a[row][j] * weight[j][n] -------------------------------------------------------

// R rows, V vectors of columns, and the weights of up to 32 units. If not Whole, V is 1 and only the first `columns`
// columns exist. `ahead`: prefetch the next 32 rows of the weight, which the processor does not expect.
template <class S, int R, int V, bool Whole>
inline void combine_tile(const S* a, const S* weight, int units, int64_t width, int columns, bool ahead, S* out,
                         int64_t out_row) {
    constexpr int L = lanes<S>;
    const auto part = [columns](const S* from) { return Whole ? load<S>(from) : load_part<S>(from, columns); };
    Vector<S> total[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) total[r][v] = part(out + r * out_row + v * L);
    for (int i = 0; i < units; ++i, weight += width) {
        if (ahead)
            for (int line = 0; line < V * L; line += 64 / (int)sizeof(S))
                __builtin_prefetch(weight + block * width + line, 0, 3);
        Vector<S> w[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) w[v] = part(weight + v * L);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vector<S> x = broadcast<S>(a[r * block + i]);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) total[r][v] += x * w[v];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v)
            if constexpr (Whole)
                store<S>(out + r * out_row + v * L, total[r][v]);
            else
                store_part<S>(out + r * out_row + v * L, total[r][v], columns);
}

template <class S, int R, int V, bool Whole>
inline int combine_rows(const S* a, const S* weight, int units, int64_t width, int columns, int from, int rows, S* out,
                        int64_t out_row) {
    for (; from + R <= rows; from += R)
        combine_tile<S, R, V, Whole>(a + (int64_t)from * block, weight, units, width, columns, from == 0,
                                     out + from * out_row, out_row);
    return from;
}

// The product with the weights of one gate, weight[H][width], for up to 32 columns from where `weight` points. Block b
// of the coefficients is a + b * panel_size, with rows of 32 units.
template <class S>
void combine(const S* a, int64_t panel_size, const S* weight, int H, int64_t width, int columns, int rows, S* out,
             int64_t out_row) {
    constexpr int L = lanes<S>, V = block / L, R = dots_max / V > 1 ? dots_max / V : 1;
    for (int unit = 0; unit < H; unit += block, a += panel_size, weight += block * width) {
        const int units = H - unit < block ? H - unit : block;
        if (columns >= block) {
            int from = combine_rows<S, R, V, true>(a, weight, units, width, block, 0, rows, out, out_row);
            if constexpr (R > 2)
                from = combine_rows<S, 2, V, true>(a, weight, units, width, block, from, rows, out, out_row);
            combine_rows<S, 1, V, true>(a, weight, units, width, block, from, rows, out, out_row);
            continue;
        }
        for (int n = 0; n < columns; n += L) {
            const int left = columns - n;
            int from = combine_rows<S, 4, 1, false>(a, weight + n, units, width, left, 0, rows, out + n, out_row);
            combine_rows<S, 1, 1, false>(a, weight + n, units, width, left, from, rows, out + n, out_row);
        }
    }
}

// ---- grad[i][n] = the sum over rows of a[row][i] * x[row][n] ---------------------------------------------------------

constexpr int outer_units = 4;

template <class S, int V, bool Whole>
inline void outer_tile(const S* a, const S* const* x, int rows, int units, int64_t offset, int columns, bool add,
                       S* grad, int64_t width) {
    constexpr int L = lanes<S>, U = outer_units;
    const auto part = [columns](const S* from) { return Whole ? load<S>(from) : load_part<S>(from, columns); };
    Vector<S> total[U][V] = {};
    for (int row = 0; row < rows; ++row, a += block) {
        Vector<S> v[V];
#pragma GCC unroll 8
        for (int k = 0; k < V; ++k) v[k] = part(x[row] + offset + k * L);
#pragma GCC unroll 4
        for (int i = 0; i < U; ++i) {
            const Vector<S> d = broadcast<S>(a[i]);
#pragma GCC unroll 8
            for (int k = 0; k < V; ++k) total[i][k] += d * v[k];
        }
    }
    for (int i = 0; i < U && i < units; ++i)
        for (int k = 0; k < V; ++k) {
            S* to = grad + i * width + offset + k * L;
            if (add) total[i][k] += part(to);
            if constexpr (Whole)
                store<S>(to, total[i][k]);
            else
                store_part<S>(to, total[i][k], columns);
        }
}

// The rows of a weight gradient that belong to the `units` units of a block. Coefficients are a[row][32], zero for
// units that do not exist. If `add`, the sums are added to `grad`.
template <class S>
void outer_sum(const S* a, const S* const* x, int rows, int units, bool add, S* grad, int64_t width) {
    constexpr int L = lanes<S>, V = dots_max / outer_units;
    if (rows == 0) {
        if (!add) __builtin_memset(grad, 0, units * width * sizeof(S));
        return;
    }
    for (int i = 0; i < units; i += outer_units) {
        S* to = grad + i * width;
        int64_t n = 0;
        for (; n + V * L <= width; n += V * L)
            outer_tile<S, V, true>(a + i, x, rows, units - i, n, 0, add, to, width);
        for (; n < width; n += L)
            outer_tile<S, 1, false>(a + i, x, rows, units - i, n, (int)(width - n), add, to, width);
    }
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
