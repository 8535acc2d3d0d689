// The three sparse products of training, and the layouts they share.
//
// Units are cut into blocks of 32 and rows that multiply them into tiles of 64. A matrix with 32-column blocks is kept
// as panels, panel[block][row][32]: the tiles of three panels (24 KB of float32) stay in the first-level cache while
// every batch row passes over them.
//   gather  out[row] += sum over the row's non-zero entries i of value_i * panel[i]     (forward, weight gradients)
//   dots    out[row][n] += panel[n] . d[row]    only for the (row, n) asked for          (gradient of y)
// Both visit entries in ascending order, whatever the number of threads, so results do not depend on it.
#pragma once

#include <utility>

#include "common/simd.hpp"

namespace egru::EGRU_LEVEL {
namespace {

constexpr int block = 32;       // units, hence columns of a panel
constexpr int tile = 64;        // rows of a panel that are worked on together
constexpr int panels_max = 12;  // panels a dot product takes at a time: 16 rows of them fill the first-level cache
constexpr int rows_max = 16;    // rows a dot product takes at a time
constexpr int registers = vector_bytes == 64 ? 32 : 16;
constexpr int dots_max = registers / 2;  // accumulators that leave room for operands

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Memory handed out piece by piece, each piece on its own cache line; with base 0 it only counts.
class Arena {
public:
    explicit Arena(uintptr_t base) : base_(base), at_(base) {}
    template <class E>
    E* take(int64_t count) {
        at_ = (at_ + 63) / 64 * 64;
        E* result = reinterpret_cast<E*>(at_);
        at_ += (uintptr_t)count * sizeof(E);
        return result;
    }
    int64_t bytes() const { return (int64_t)(at_ - base_) + 64; }
    // What two arenas that went on from the same place handed out is never used at the same time.
    void cover(const Arena& other) { at_ = at_ > other.at_ ? at_ : other.at_; }

private:
    uintptr_t base_, at_;
};

// Where batch rows of a (T, B, width) tensor lie; step -1 is the state handed in, where there is one.
template <class S>
struct Steps {
    const S* base;
    int64_t step, row;
    const S* before = nullptr;
    int64_t before_row = 0;

    const S* at(int t, int s) const { return t < 0 ? before + s * before_row : base + t * step + s * row; }
};

// ---- lists of non-zero entries ----------------------------------------------------------------------------------------

// For each tile of 64 positions and each of `rows` rows: which positions are non-zero, and their values. A tile's lists
// are compact and start at a place of their own, so that tiles can be listed by different threads.
template <class S>
struct Lists {
    uint8_t* index;
    S* value;
    uint32_t* start;  // rows + 1 a tile
    int64_t rows;

    Lists() = default;
    Lists(Arena& arena, int64_t rows_, int64_t positions) : rows(rows_) {
        const int64_t tiles = divide_up(positions, tile);
        index = arena.take<uint8_t>(tiles * capacity());
        value = arena.take<S>(tiles * capacity());
        start = arena.take<uint32_t>(tiles * (rows + 1));
    }
    int64_t capacity() const { return rows * tile + tile; }  // writers run up to one vector over
};

// Lists the rows [0, count) of a chunk that starts at step `first`, for one tile of their positions.
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

// 64 x 64 bits, in place (Hacker's Delight, 7-3; bit 0 is column 0).
inline void transpose_bits(uint64_t* words) {
    uint64_t mask = 0x00000000ffffffffull;
    for (int width = 32; width; width >>= 1, mask ^= mask << width)
        for (int k = 0; k < 64; k = (k + width + 1) & ~width) {
            const uint64_t swap = ((words[k] >> width) ^ words[k + width]) & mask;
            words[k] ^= swap << width;
            words[k + width] ^= swap;
        }
}

// The transposed lists of 64 batch rows (tile `at` of a chunk): for each position, the rows where it is non-zero.
template <class S>
void list_columns(const Steps<S>& from, int first, int B, int count, int width, int at, const Lists<S>& lists) {
    uint8_t* index = lists.index + at * lists.capacity();
    S* value = lists.value + at * lists.capacity();
    uint32_t* start = lists.start + at * (lists.rows + 1);
    const int begin = at * tile, rows = count - begin < tile ? count - begin : tile;
    const S* row_of[tile];
    for (int i = 0; i < rows; ++i) row_of[i] = from.at(first + (begin + i) / B, (begin + i) % B);
    int length = 0;
    for (int n0 = 0; n0 < width; n0 += tile) {
        const int columns = width - n0 < tile ? width - n0 : tile;
        uint64_t words[tile] = {};
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < columns; j += lanes<S>)
                words[i] |= (uint64_t)bits<S>(load_part<S>(row_of[i] + n0 + j, columns - j) != 0) << j;
        transpose_bits(words);
        for (int j = 0; j < columns; ++j) {
            start[n0 + j] = (uint32_t)length;
            for (uint64_t word = words[j]; word; word &= word - 1) {
                const int i = __builtin_ctzll(word);
                index[length] = (uint8_t)i;
                value[length++] = row_of[i][n0 + j];
            }
        }
    }
    start[width] = (uint32_t)length;
}

// Multiplies the values of such lists, by factor(step, batch row)[position / 32 * stride + position % 32].
template <class S, class Factor>
void scale_columns(Factor factor, int64_t stride, int first, int B, int count, int width, int at, const Lists<S>& lists) {
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

// ---- gather -----------------------------------------------------------------------------------------------------------

// Columns that are gathered side by side, 16 of a panel each, and where their sums go. Rows of both are 32 apart.
constexpr int half = block / 2;
template <class S>
constexpr int half_vectors = half / lanes<S>;
// As many as leave a tile in the first-level cache and accumulators in registers.
template <class S>
constexpr int halves_max = half_vectors<S> <= 2 ? 6 : half_vectors<S> == 4 ? 3 : 1;

// The rows `row` and `row` + 1 of `gather`, where both have the first `length` positions in full: each panel row is
// loaded once for both.
template <class S, int N>
void gather_pair(const S* const* panel, const S* value, const S* other, int length, int64_t row, S* const* out) {
    constexpr int L = lanes<S>, V = half_vectors<S>;
    constexpr int some = 2 * N * V <= registers - 4 ? N : 1;  // halves whose sums fit into registers
    for (int first = 0; first < N; first += some) {
        Vector<S> total[2][some][V] = {};
        for (int i = 0; i < length; ++i) {
            const Vector<S> v = broadcast<S>(value[i]), w = broadcast<S>(other[i]);
#pragma GCC unroll 12
            for (int n = 0; n < some; ++n)
#pragma GCC unroll 12
                for (int k = 0; k < V; ++k) {
                    const Vector<S> x = load<S>(panel[first + n] + i * block + k * L);
                    total[0][n][k] += v * x;
                    total[1][n][k] += w * x;
                }
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i)
#pragma GCC unroll 12
            for (int n = 0; n < some; ++n)
#pragma GCC unroll 12
                for (int k = 0; k < V; ++k) {
                    S* to = out[first + n] + (row + i) * block + k * L;
                    store<S>(to, load<S>(to) + total[i][n][k]);
                }
    }
}

// out[n][row][16] += sum of value * panel[n][index][16] over each row's list, for N halves of panels side by side.
// Meanwhile fetches the tile behind them into the second-level cache, a little with every row, if there is one.
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
        // Lists ascend, so a last index of length - 1 says that none before it is missing.
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

// Panels to gather, and where to.
template <class S>
struct Columns {
    static constexpr int most = 4 * 3 * 2;  // four blocks of three gates
    const S* panel[most];
    S* out[most];
    int count = 0;

    // The first `units` columns of a panel.
    void add(const S* panel_, S* out_, int units) {
        for (int i = 0; i < units; i += half) {
            panel[count] = panel_ + i;
            out[count++] = out_ + i;
        }
    }
};

template <class S, int N>
void gather_some(const S* const* panel, int tiles, const Lists<S>& lists, int rows, S* const* out) {
    const S* here[N];
    for (int n = 0; n < N; ++n) here[n] = panel[n];
    for (int at = 0; at < tiles; ++at) {
        gather<S, N>(here, lists, at, rows, out, at + 1 < tiles);
        for (int n = 0; n < N; ++n) here[n] += tile * block;
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

// ---- dots -------------------------------------------------------------------------------------------------------------

// Dot products run over a range of panels in pieces of at most panels_max, and take both operands in whole rows: the
// weights of a piece are weight[row][panels * 32], a piece starting where its first panel would.
struct Pieces {
    int first, count;  // panels of the range
    int most;          // panels of a piece

    Pieces(int first_, int count_)
        : first(first_), count(count_), most(count_ ? (int)divide_up(count_, divide_up(count_, panels_max)) : 0) {}
    int size(int from) const { return count - from < most ? count - from : most; }
};

constexpr int d_width = panels_max * block;  // columns of a packed row of d

// Rows [0, rows) of up to panels_max panels of d, each row in one piece: d[row][panel * 32 + column].
template <class S>
void pack_rows(const S* const* panel, int panels, int rows, S* d) {
    for (int j = 0; j < panels; ++j)
        for (int row = 0; row < rows; ++row)
            for (int v = 0; v < block; v += lanes<S>)
                store<S>(d + row * d_width + j * block + v, load<S>(panel[j] + (int64_t)row * block + v));
}

// Which of up to 16 rows want their product with each weight row, as bits, and the weight rows in the order of how many
// do: products of one size follow one another, so that no branch has to be guessed.
struct Wanted {
    uint16_t* mask;
    uint32_t* order;  // those wanted by n rows are order[start[n]] to order[start[n + 1] - 1]
    uint32_t start[rows_max + 2];

    void sort(int count) {
        uint32_t ends[rows_max + 2] = {};
        for (int n = 0; n < count; ++n) ++ends[__builtin_popcount(mask[n]) + 1];
        for (int i = 1; i < rows_max + 2; ++i) ends[i] += ends[i - 1];
        for (int i = 0; i < rows_max + 2; ++i) start[i] = ends[i];
        for (int n = 0; n < count; ++n) order[ends[__builtin_popcount(mask[n])]++] = (uint32_t)n;
    }
};

// out[row] += weight . d[row] over `panels` * 32 columns, for the N rows that `mask` names. Three panels at a time, so
// that the address of a row of d is formed once for several products.
template <class S, int N>
inline void dots(const S* weight, const S* d, unsigned mask, int panels, S* out) {
    constexpr int L = lanes<S>, wide = block / L;
    constexpr int together = wide <= 2 ? 3 : 1;
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
            asm("" : "+r"(x));  // else GCC keeps an address per product in a register, and runs out of them
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

// The weight rows that N rows of d want. Fetches `lines` cache lines of each a row early.
template <class S, int N>
void dots_of(const S* weight, const S* d, int panels, const Wanted& wanted, int lines, S* out) {
    for (uint32_t i = wanted.start[N]; i < wanted.start[N + 1]; ++i) {
        const int64_t n = wanted.order[i];
        const S* row = weight + n * panels * block;
        unsigned mask = wanted.mask[n];
        const S* next = weight + (int64_t)wanted.order[i + 1 < wanted.start[N + 1] ? i + 1 : i] * panels * block;
        for (int k = 0; k < lines; ++k) __builtin_prefetch((const char*)next + 64 * k, 0, 3);
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

// out[n * 16 + row] += weight row n . d[row], for up to 16 packed rows of d, where wanted. Weight row n is
// weight[n][panels * 32]; `fresh` weights are not expected in the second-level cache.
template <class S, int... N>
void dots_each(const S* weight, const S* d, int panels, const Wanted& wanted, int lines, S* out,
               std::integer_sequence<int, N...>) {
    (dots_of<S, N + 1>(weight, d, panels, wanted, lines, out), ...);
}
template <class S>
void dots_all(const S* weight, const S* d, int panels, const Wanted& wanted, bool fresh, S* out) {
    const int lines = fresh ? panels * block * (int)sizeof(S) / 64 : 6;
    dots_each<S>(weight, d, panels, wanted, lines, out, std::make_integer_sequence<int, rows_max>{});
}

// out[row][32] += the transpose of from[32][16], for the first `rows` rows.
template <class S>
void add_transposed(const S* from, int rows, S* out) {
    constexpr int L = lanes<S>;
    for (int row = 0; row < rows; row += L)
        for (int column = 0; column < block; column += L) {
            Vector<S> v[L];
            for (int i = 0; i < L; ++i) v[i] = load<S>(from + (column + i) * rows_max + row);
            transpose<S>(v);
            for (int i = 0; i < L && row + i < rows; ++i) {
                S* to = out + (row + i) * block + column;
                store<S>(to, load<S>(to) + v[i]);
            }
        }
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
