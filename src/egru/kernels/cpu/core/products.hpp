// The three sparse products of training, and the layouts they share.
//
// Units are cut into blocks of 32 and rows that multiply them into tiles of 64. A matrix with 32-column blocks is kept
// as panels, panel[block][row][32]: three tiles of three panels (24 KB of float32) stay in the first-level cache while
// every batch row passes over them.
//   gather  out[row] += sum over the row's non-zero entries i of value_i * panel[i]     (forward, weight gradients)
//   dots    out[row][n] += panel[n] . d[row]    only for the (row, n) asked for          (gradient of y)
// Both visit entries in ascending order, whatever the number of threads, so results do not depend on it.
#pragma once

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

// out[i] = weight . d[row_i], over `panels` * 32 columns, for N rows. Three panels at a time, so that the address of a
// row of d is formed once for several products.
template <class S, int N>
void dots(const S* weight, const S* d, const uint8_t* row, int panels, S* out) {
    constexpr int L = lanes<S>, wide = block / L;
    constexpr int together = wide <= 2 ? 3 : 1;
    Vector<S> total[N];
    int32_t from[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
        total[i] = Vector<S>{};
        from[i] = row[i] * d_width;
    }
    int j = 0;
    for (; j + together <= panels; j += together) {
        Vector<S> w[together * wide];
#pragma GCC unroll 16
        for (int k = 0; k < together * wide; ++k) w[k] = load<S>(weight + k * L);
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            const S* x = d + from[i];
            asm("" : "+r"(x));  // else GCC keeps an address per product in a register, and runs out of them
#pragma GCC unroll 16
            for (int k = 0; k < together * wide; ++k) total[i] += w[k] * load<S>(x + k * L);
        }
        weight += together * block;
        d += together * block;
    }
    for (; j < panels; ++j) {
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            const S* x = d + from[i];
            asm("" : "+r"(x));
#pragma GCC unroll 16
            for (int v = 0; v < wide; ++v) total[i] += load<S>(weight + v * L) * load<S>(x + v * L);
        }
        weight += block;
        d += block;
    }
    sums<S, N>(total, out);
}

// The same for two weight rows and all 16 rows of d: every operand is loaded for several products.
template <class S>
void dots_pair(const S* weight, const S* other, const S* d, int panels, S* out, S* other_out) {
    constexpr int L = lanes<S>, some = dots_max / 2;
    for (int row = 0; row < rows_max; row += some) {
        Vector<S> total[some], other_total[some];
#pragma GCC unroll 8
        for (int i = 0; i < some; ++i) total[i] = other_total[i] = Vector<S>{};
        const S* x = d + row * d_width;
        for (int k = 0; k < panels * block; k += L) {
            const Vector<S> v = load<S>(weight + k), w = load<S>(other + k);
#pragma GCC unroll 8
            for (int i = 0; i < some; ++i) {
                const Vector<S> each = load<S>(x + i * d_width + k);
                total[i] += v * each;
                other_total[i] += w * each;
            }
        }
        sums<S, some>(total, out + row);
        sums<S, some>(other_total, other_out + row);
    }
}

template <class S>
using DotsFunction = void (*)(const S*, const S*, const uint8_t*, int, S*);
template <class S>
constexpr DotsFunction<S> dots_of[dots_max + 1] = {
    nullptr,   dots<S, 1>, dots<S, 2>, dots<S, 3>, dots<S, 4>, dots<S, 5>, dots<S, 6>, dots<S, 7>, dots<S, 8>,
#if defined(__AVX512F__)
    dots<S, 9>, dots<S, 10>, dots<S, 11>, dots<S, 12>, dots<S, 13>, dots<S, 14>, dots<S, 15>, dots<S, 16>,
#endif
};

// The positions of the set bits of a byte, for listing a mask without a loop.
struct BitPositions {
    uint8_t of[256][8];
    constexpr BitPositions() : of() {
        for (int mask = 0; mask < 256; ++mask)
            for (int bit = 0, n = 0; bit < 8; ++bit)
                if (mask >> bit & 1) of[mask][n++] = (uint8_t)bit;
    }
};
constexpr BitPositions bit_positions{};

// out[row * 32 + n] += weight row n . d[row], for the positions n of a block and up to 16 packed rows of d, where bit
// `row` of wanted[n] is set. Weight row n is weight[n][panels * 32].
template <class S>
void dots_block(const S* weight, const S* d, int panels, const uint16_t* wanted, int positions, S* out) {
    for (int n = 0; n < positions; ++n) {
        const unsigned mask = wanted[n];
        if (!mask) continue;
        S result[rows_max + 4];
        if (mask == 0xffff && n + 1 < positions && wanted[n + 1] == 0xffff) {
            S other[rows_max + 4];
            const S* row_n = weight + (int64_t)n * panels * block;
            dots_pair<S>(row_n, row_n + panels * block, d, panels, result, other);
            for (int i = 0; i < rows_max; ++i) {
                out[i * block + n] += result[i];
                out[i * block + n + 1] += other[i];
            }
            ++n;
            continue;
        }
        alignas(8) uint8_t row[rows_max + 8];
        __builtin_memcpy(row, bit_positions.of[mask & 255], 8);
        const int low = __builtin_popcount(mask & 255), count = low + __builtin_popcount(mask >> 8);
        uint64_t high;
        __builtin_memcpy(&high, bit_positions.of[mask >> 8], 8);
        high += 0x0808080808080808ull;
        __builtin_memcpy(row + low, &high, 8);
        for (int i = 0; i < count; i += dots_max) {
            const int some = count - i < dots_max ? count - i : dots_max;
            dots_of<S>[some](weight + (int64_t)n * panels * block, d, row + i, panels, result + i);
        }
        for (int i = 0; i < count; ++i) out[row[i] * block + n] += result[i];
    }
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
