// The sparse product of the gradient of y:
//   out[row][n] += panel[n] . d[row], only for the pairs (row, n) that are requested
// Panels are visited in ascending order for any number of threads, so the result does not depend on it.
#pragma once

#include <utility>

#include "sequence/layout.hpp"

namespace egru::EGRU_LEVEL {
namespace {

// A range of panels, divided into groups of at most `most`. A dot product takes one group at a time and reads both
// operands in whole rows: the weights of a group are weight[row][panels * 32], stored where its first panel would be.
struct PanelGroups {
    int first, count;  // panels of the range
    int size_max;      // panels per group

    PanelGroups(int first_, int count_, int most = panels_max)
        : first(first_), count(count_), size_max(count_ ? (int)divide_up(count_, divide_up(count_, most)) : 0) {}
    int size(int from) const { return count - from < size_max ? count - from : size_max; }
};

constexpr int d_width = panels_max * block;  // columns of a packed row of d

// Copy rows [0, rows) of up to panels_max panels so that each row is contiguous: d[row][panel * 32 + column].
template <class S>
void pack_rows(const S* const* panel, int panels, int rows, S* d) {
    for (int j = 0; j < panels; ++j)
        for (int row = 0; row < rows; ++row)
            for (int v = 0; v < block; v += lanes<S>)
                store<S>(d + row * d_width + j * block + v, load<S>(panel[j] + (int64_t)row * block + v));
}

// For each weight row, a bit mask of the (at most 16) rows that need a product with it. `order` sorts the weight rows
// by the number of such rows: products of equal size are adjacent, so that branches are predictable.
struct Requests {
    uint16_t* mask;
    uint32_t* order;  // weight rows needed by n rows: order[start[n]] to order[start[n + 1] - 1]
    int rows;         // that exist
    uint32_t start[rows_max + 2];

    void sort(int count) {
        uint32_t ends[rows_max + 2] = {};
        for (int n = 0; n < count; ++n) ++ends[__builtin_popcount(mask[n]) + 1];
        for (int i = 1; i < rows_max + 2; ++i) ends[i] += ends[i - 1];
        for (int i = 0; i < rows_max + 2; ++i) start[i] = ends[i];
        for (int n = 0; n < count; ++n) order[ends[__builtin_popcount(mask[n])]++] = (uint32_t)n;
    }
};

// out[row] += weight . d[row] over `panels` * 32 columns, for the N rows in `mask`. Takes three panels at a time, so
// that the address of a row of d is computed once for several products.
template <class S, int N>
inline void dots(const S* weight, const S* d, unsigned mask, int panels, S* out) {
    constexpr int L = lanes<S>, wide = block / L;
    constexpr int together = wide <= 2 ? 3 : 1;  // panels
    Vector<S> total[N];
    const S* row[N];
    unsigned left = mask;
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
        total[i] = Vector<S>{};
        row[i] = d + __builtin_ctz(left) * d_width;
        left &= left - 1;
    }
    int64_t at = 0;
    int j = 0;
    for (; j + together <= panels; j += together, at += together * block) {
        Vector<S> w[together * wide];
#pragma GCC unroll 16
        for (int k = 0; k < together * wide; ++k) w[k] = load<S>(weight + at + k * L);
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            const S* x = row[i] + at;
            asm("" : "+r"(x));  // otherwise GCC keeps one address per product and runs out of registers
#pragma GCC unroll 16
            for (int k = 0; k < together * wide; ++k) total[i] += w[k] * load<S>(x + k * L);
        }
    }
    for (; j < panels; ++j, at += block)
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            const S* x = row[i] + at;
            asm("" : "+r"(x));
#pragma GCC unroll 16
            for (int v = 0; v < wide; ++v) total[i] += load<S>(weight + at + v * L) * load<S>(x + v * L);
        }
    add_sums<S, N>(total, mask, out);
}

// Memory that the next step reads. Dot products leave time to fetch it: their operands come from nearer caches.
class Upcoming {
public:
    // `rows` runs of `bytes` bytes that start `stride` bytes apart.
    void add(const void* base, int64_t stride, int64_t bytes, int rows) {
        areas_[count_++] = {static_cast<const char*>(base), stride, divide_up(bytes, line), rows};
    }
    void fetch(int lines) {
        for (; lines && area_ < count_; --lines) {
            const Area& area = areas_[area_];
            __builtin_prefetch(area.base + row_ * area.stride + at_ * line, 0, 2);
            if (++at_ < area.lines) continue;
            at_ = 0;
            if (++row_ < area.rows) continue;
            row_ = 0;
            ++area_;
        }
    }

private:
    static constexpr int line = 64;
    struct Area {
        const char* base;
        int64_t stride, lines, rows;
    };
    Area areas_[3];
    int count_ = 0, area_ = 0;
    int64_t row_ = 0, at_ = 0;
};
constexpr int upcoming_lines = 4;  // per dot product of a weight row

// Weight rows that at least `dense_from` of 16 rows need are multiplied by all 16, three weight rows at a time: one
// load then serves several products. With 16 registers this gains nothing.
constexpr int dense_from = 13, dense_weights = 3, dense_sums = 8;

// sums[k][i] += weight[k] . d[i], for dense_weights weight rows and dense_sums rows of d. Not inlined: the caller's
// variables would take registers that the sums need.
template <class S>
[[gnu::noinline]] void dots_dense(const S* const (&weight)[dense_weights], const S* d, int panels, int first,
                                  S (&sums)[dense_weights][rows_max]) {
    constexpr int L = lanes<S>, W = dense_weights, R = dense_sums;
    Vector<S> total[W][R] = {};
    d += first * d_width;
    for (int at = 0; at < panels * block; at += L) {
        Vector<S> w[W];
#pragma GCC unroll 4
        for (int k = 0; k < W; ++k) w[k] = load<S>(weight[k] + at);
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) {
            Vector<S> x = load<S>(d + i * d_width + at);
            keep_in_register<S>(x);
#pragma GCC unroll 4
            for (int k = 0; k < W; ++k) total[k][i] += w[k] * x;
        }
    }
#pragma GCC unroll 4
    for (int k = 0; k < W; ++k) add_sums<S, R>(total[k], ((1u << R) - 1) << first, sums[k]);
}

// The weight rows order[begin] to order[end - 1], as many as a multiple of dense_weights.
template <class S>
void dots_dense_of(const S* weight, const S* d, int panels, const Requests& requests, uint32_t begin, int lines,
                   Upcoming& upcoming, S* out) {
    constexpr int W = dense_weights;
    const uint32_t end = requests.start[rows_max + 1];
    for (uint32_t i = begin; i < end; i += W) {
        const S* rows[W];
        for (int k = 0; k < W; ++k) {
            rows[k] = weight + (int64_t)requests.order[i + k] * panels * block;
            const S* next = i + W < end ? weight + (int64_t)requests.order[i + W + k] * panels * block : rows[k];
            for (int line = 0; line < lines; ++line) __builtin_prefetch((const char*)next + 64 * line, 0, 3);
        }
        upcoming.fetch(W * upcoming_lines);
        alignas(64) S sums[W][rows_max] = {};
        for (int first = 0; first < rows_max; first += dense_sums) dots_dense<S>(rows, d, panels, first, sums);
        for (int k = 0; k < W; ++k) {
            const int64_t n = requests.order[i + k];
            add_where<S>(sums[k], requests.mask[n], out + n * rows_max);
        }
    }
}

// The weight rows before order[end] that N rows of d need. Prefetches `lines` cache lines of the next weight row.
template <class S, int N>
void dots_of(const S* weight, const S* d, int panels, const Requests& requests, uint32_t end, int lines,
             Upcoming& upcoming, S* out) {
    end = end < requests.start[N + 1] ? end : requests.start[N + 1];
    for (uint32_t i = requests.start[N]; i < end; ++i) {
        const int64_t n = requests.order[i];
        const S* row = weight + n * panels * block;
        unsigned mask = requests.mask[n];
        const S* next = weight + (int64_t)requests.order[i + 1 < end ? i + 1 : i] * panels * block;
        for (int k = 0; k < lines; ++k) __builtin_prefetch((const char*)next + 64 * k, 0, 3);
        upcoming.fetch(upcoming_lines);
        if constexpr (N <= dots_max) {
            dots<S, N>(row, d, mask, panels, out + n * rows_max);
        } else {
            unsigned rest = mask;
            for (int k = 0; k < dots_max; ++k) rest &= rest - 1;
            dots<S, dots_max>(row, d, mask ^ rest, panels, out + n * rows_max);
            dots<S, N - dots_max>(row, d, rest, panels, out + n * rows_max);
        }
    }
}

// out[n * 16 + row] += weight row n . d[row], for up to 16 packed rows of d, where requested. Weight row n is
// weight[n][panels * 32]. `fresh` weights are not expected in the second-level cache.
template <class S, int... N>
void dots_each(const S* weight, const S* d, int panels, const Requests& requests, uint32_t end, int lines,
               Upcoming& upcoming, S* out, std::integer_sequence<int, N...>) {
    (dots_of<S, N + 1>(weight, d, panels, requests, end, lines, upcoming, out), ...);
}
template <class S>
void dots_all(const S* weight, const S* d, int panels, const Requests& requests, bool fresh, Upcoming& upcoming,
              S* out) {
    const int lines = fresh ? panels * block * (int)sizeof(S) / 64 : 6;
    uint32_t end = requests.start[rows_max + 1];
    if constexpr (dots_max >= rows_max)
        if (requests.rows == rows_max) end -= (end - requests.start[dense_from]) / dense_weights * dense_weights;
    dots_each<S>(weight, d, panels, requests, end, lines, upcoming, out, std::make_integer_sequence<int, rows_max>{});
    if constexpr (dots_max >= rows_max) dots_dense_of<S>(weight, d, panels, requests, end, lines, upcoming, out);
}

// out[row][column] += from[column][row], for the first `rows` rows. Columns are `stride` apart in `from`, rows 32 in
// `out`.
template <class S>
void add_transposed(const S* from, int rows, int stride, int columns, S* out) {
    constexpr int L = lanes<S>;
    for (int row = 0; row < rows; row += L)
        for (int column = 0; column < columns; column += L) {
            Vector<S> v[L];
            for (int i = 0; i < L; ++i) v[i] = load<S>(from + (column + i) * stride + row);
            transpose<S>(v);
            for (int i = 0; i < L && row + i < rows; ++i) {
                S* to = out + (row + i) * block + column;
                store<S>(to, load<S>(to) + v[i]);
            }
        }
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
