// The three sparse products of training, and the layouts they share.
//
// Units are cut into blocks of 32 and rows that multiply them into tiles of 64. A matrix with 32-column blocks is kept
// as panels, panel[block][row][32]: three tiles of three panels (24 KB of float32) stay in the first-level cache while
// every batch row passes over them.
//   gather  out[row] += sum over the row's non-zero entries i of value_i * panel[i]     (forward, weight gradients)
//   dots    out[row][n] += panel[n] . d[row]    only for the (row, n) asked for          (gradient of y)
// Both visit entries in ascending order, whatever the number of threads, so results do not depend on it.
#pragma once

#include <utility>

#include "simd.hpp"

namespace egru::EGRU_LEVEL {
namespace {

constexpr int block = 32;       // units, hence columns of a panel
constexpr int tile = 64;        // rows of a panel that are worked on together
constexpr int panels_max = 12;  // panels a dot product takes at a time: 16 rows of them fill the first-level cache
constexpr int rows_max = 16;    // rows a dot product takes at a time
// Accumulators that leave room for operands in 32 (AVX-512) or 16 registers.
#if defined(__AVX512F__)
constexpr int dots_max = 16;
#else
constexpr int dots_max = 8;
#endif

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
// `scale` (may be null) multiplies the values: scale(t, s, position).
template <class S, class Value>
void list_columns(const Steps<S>& from, int first, int B, int count, int width, int at, const Lists<S>& lists, Value value_of) {
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
                value[length++] = value_of(begin + i, n0 + j, row_of[i][n0 + j]);
            }
        }
    }
    start[width] = (uint32_t)length;
}

// ---- gather -----------------------------------------------------------------------------------------------------------

// The same for two rows that have the first `length` positions in full: each panel row is loaded once for both.
template <class S, int G>
void gather_pair(const S* const* panel, const S* value, const S* other, int length, S* const* out) {
    constexpr int L = lanes<S>;
    constexpr int room = vector_bytes == 64 ? 12 / G : 6 / G, wide = room >= 4 ? 4 : room >= 2 ? 2 : 1;
    constexpr int some = wide < block / L ? wide : block / L;  // vectors of each panel and row in registers
    for (int column = 0; column < block; column += some * L) {
        Vector<S> total[2][G][some] = {};
        for (int i = 0; i < length; ++i) {
            const Vector<S> v = broadcast<S>(value[i]), w = broadcast<S>(other[i]);
#pragma GCC unroll 12
            for (int g = 0; g < G; ++g)
#pragma GCC unroll 12
                for (int k = 0; k < some; ++k) {
                    const Vector<S> x = load<S>(panel[g] + i * block + column + k * L);
                    total[0][g][k] += v * x;
                    total[1][g][k] += w * x;
                }
        }
#pragma GCC unroll 2
        for (int row = 0; row < 2; ++row)
#pragma GCC unroll 12
            for (int g = 0; g < G; ++g)
#pragma GCC unroll 12
                for (int k = 0; k < some; ++k) {
                    S* to = out[g] + row * block + column + k * L;
                    store<S>(to, load<S>(to) + total[row][g][k]);
                }
    }
}

// out[g][row][32] += sum of value * panel[g][index][32] over each row's list, for G panels side by side. Meanwhile
// fetches the tiles `next` (may be null) into the second-level cache, a little with every row.
template <class S, int G>
void gather(const S* const* panel, const Lists<S>& lists, int at, int rows, S* const* out, const S* const* next) {
    constexpr int L = lanes<S>;
    constexpr int room = G == 1 ? 8 : 4;  // vectors of each panel that fit into 16 registers; divides block / L
    constexpr int wide = room < block / L ? room : block / L;
    const uint8_t* index = lists.index + at * lists.capacity();
    const S* value = lists.value + at * lists.capacity();
    const uint32_t* start = lists.start + at * (lists.rows + 1);
    constexpr int line = 64 / sizeof(S), lines = tile * block / line;
    const int some_lines = next ? (int)divide_up(lines, rows) : 0;
    for (int row = 0; row < rows; ++row) {
        if (row * some_lines < lines)
            for (int i = row * some_lines; i < (row + 1) * some_lines; ++i)
#pragma GCC unroll 3
                for (int g = 0; g < G; ++g) __builtin_prefetch(next[g] + i * line, 0, 2);
        const uint32_t begin = start[row], end = start[row + 1];
        if (begin == end) continue;
        const uint32_t length = end - begin;
        // Lists ascend, so a last index of length - 1 says that none before it is missing.
        if (row + 1 < rows && start[row + 2] - end == length && index[end - 1] == length - 1 &&
            index[end + length - 1] == length - 1 && length > 1) {
            S* to[G];
            for (int g = 0; g < G; ++g) to[g] = out[g] + (int64_t)row * block;
            gather_pair<S, G>(panel, value + begin, value + end, (int)length, to);
            ++row;
            continue;
        }
        for (int column = 0; column < block; column += wide * L) {
            Vector<S> total[G][wide] = {};
            for (uint32_t k = begin; k < end; ++k) {
                const int64_t from = (int64_t)index[k] * block + column;
                const Vector<S> v = broadcast<S>(value[k]);
#pragma GCC unroll 12
                for (int g = 0; g < G; ++g)
#pragma GCC unroll 12
                    for (int w = 0; w < wide; ++w) total[g][w] += v * load<S>(panel[g] + from + w * L);
            }
#pragma GCC unroll 12
            for (int g = 0; g < G; ++g)
#pragma GCC unroll 12
                for (int w = 0; w < wide; ++w) {
                    S* to = out[g] + (int64_t)row * block + column + w * L;
                    store<S>(to, load<S>(to) + total[g][w]);
                }
        }
    }
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
