// Products with weights that have zero blocks, such as pruned ones. A block is the weights from one source to 16 units:
// a row of half a panel.
//
// The recurrent product multiplies a few dozen batch rows by the non-zero blocks of each half panel, whether the source
// has an event or not: the rows are vectors, and a weight serves all of them. Only sources without an event in any of
// these rows are skipped. The dot products of the backward pass skip zero blocks of a weight row. Zero weights do not
// change a sum, but the order of a sum differs from that of `gather`.
#pragma once

#include "sequence/dots.hpp"
#include "sequence/gather.hpp"

namespace egru::EGRU_LEVEL {
namespace {

template <class S>
inline bool is_nonzero_block(const S* from) {
    uint32_t found = 0;
    for (int i = 0; i < half; i += lanes<S>) found |= bits<S>(load<S>(from + i) != 0);
    return found != 0;
}

// ---- products of batch rows and half panels -------------------------------------------------------------------------

// The sources of the non-zero blocks of each half panel.
struct BlockSources {
    uint16_t* source;
    uint32_t* count;
    int64_t capacity;  // per half panel

    BlockSources() = default;
    BlockSources(Arena& arena, int64_t panels, int sources) : capacity(sources) {
        source = arena.take<uint16_t>(2 * panels * capacity);
        count = arena.take<uint32_t>(2 * panels);
    }
    // List the blocks of panel p: panel[source][32].
    template <class S>
    void list(const S* panel, int p) const {
        for (int i = 0; i < 2; ++i) {
            uint16_t* to = source + (2 * p + i) * capacity;
            uint32_t length = 0;
            for (int n = 0; n < capacity; ++n) {  // branch-free: zeros are not predictable
                to[length] = (uint16_t)n;
                length += is_nonzero_block(panel + (int64_t)n * block + i * half);
            }
            count[2 * p + i] = length;
        }
    }
    int64_t blocks_in(int panel, int panels) const {
        int64_t total = 0;
        for (int i = 2 * panel; i < 2 * (panel + panels); ++i) total += count[i];
        return total;
    }
};

// Batch rows in groups of one or two vectors, transposed: value[group][source][rows of a group].
template <class S>
struct TransposedRows {
    static constexpr int vectors_max = 2;
    S* value;
    uint8_t* active;     // [group][source]: whether one of the rows is not zero there
    uint16_t* filtered;  // the sources of a half panel that are active
    int rows, width, vectors;

    TransposedRows() = default;
    TransposedRows(Arena& arena, int rows_, int width_)
        : rows(rows_), width(width_), vectors(rows_ <= lanes<S> ? 1 : vectors_max) {
        value = arena.take<S>(groups() * padded() * group_rows());
        active = arena.take<uint8_t>(groups() * padded());
        filtered = arena.take<uint16_t>(width);
    }
    int group_rows() const { return vectors * lanes<S>; }
    int64_t groups() const { return divide_up(rows, group_rows()); }
    int64_t padded() const { return divide_up(width, lanes<S>) * lanes<S>; }

    // Find the active sources of step t. Returns the number of non-zero values and, in `sources`, the number of active
    // sources of all groups.
    int64_t survey(const Steps<S>& from, int t, int64_t& sources) const {
        constexpr int L = lanes<S>;
        int64_t nonzero = 0;
        sources = 0;
        for (int64_t g = 0; g < groups(); ++g) {
            const int first = (int)g * group_rows(), last = first + group_rows() < rows ? first + group_rows() : rows;
            for (int n = 0; n < width; n += L) {
                uint32_t found = 0;
                for (int s = first; s < last; ++s) {
                    const uint32_t values = bits<S>(load_part<S>(from.at(t, s) + n, width - n) != 0);
                    nonzero += __builtin_popcount(values);
                    found |= values;
                }
                sources += __builtin_popcount(found);
                for (int i = 0; i < L; ++i) active[g * padded() + n + i] = found >> i & 1;
            }
        }
        return nonzero;
    }
    // Copy the rows of step t.
    void fill(const Steps<S>& from, int t) const {
        constexpr int L = lanes<S>;
        const int R = group_rows();
        for (int64_t g = 0; g < groups(); ++g)
            for (int n = 0; n < width; n += L)
                for (int r0 = 0; r0 < R; r0 += L) {
                    Vector<S> v[L];
                    for (int i = 0; i < L; ++i) {
                        const int s = (int)g * R + r0 + i;
                        v[i] = s < rows ? load_part<S>(from.at(t, s) + n, width - n) : Vector<S>{};
                    }
                    transpose<S>(v);
                    S* to = value + (g * padded() + n) * R + r0;
                    for (int i = 0; i < L; ++i) store<S>(to + i * R, v[i]);
                }
    }
};

// products[unit][rows] = the sum over `sources` of weight * row, for O units of a half panel and V vectors of rows.
template <class S, int V, int O>
inline void multiply_units(const S* panel, const uint16_t* sources, int count, const S* rows, S* products) {
    constexpr int L = lanes<S>, R = V * L;
    Vector<S> total[O][V] = {};
    for (int k = 0; k < count; ++k) {
        const S* weight = panel + (int64_t)sources[k] * block;
        const S* from = rows + (int64_t)sources[k] * R;
        Vector<S> x[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) x[v] = load<S>(from + v * L);
#pragma GCC unroll 16
        for (int o = 0; o < O; ++o) {
            Vector<S> w = broadcast<S>(weight[o]);
            if (V > 1) keep_in_register<S>(w);
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) total[o][v] += w * x[v];
        }
    }
#pragma GCC unroll 16
    for (int o = 0; o < O; ++o)
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) store<S>(products + o * R + v * L, total[o][v]);
}

// out[row][16] += the product of all rows with the non-zero blocks of half panel `at`. Rows of `out` are 32 apart.
template <class S, int V>
void multiply_blocks(const S* panel, const BlockSources& blocks, int at, const TransposedRows<S>& rows, S* out) {
    constexpr int L = lanes<S>, R = V * L, O = registers / 2 / V;
    const uint16_t* sources = blocks.source + at * blocks.capacity;
    const int all = (int)blocks.count[at];
    for (int64_t g = 0; g < rows.groups(); ++g) {
        const uint8_t* active = rows.active + g * rows.padded();
        int count = 0;
        for (int k = 0; k < all; ++k) {  // branch-free: activity is not predictable
            rows.filtered[count] = sources[k];
            count += active[sources[k]];
            if (g == 0)
                for (int i = 0; i < half; i += 64 / (int)sizeof(S))
                    __builtin_prefetch(panel + (int64_t)sources[k] * block + i, 0, 3);
        }
        alignas(64) S products[half * R];
        for (int o = 0; o < half; o += O)
            multiply_units<S, V, O>(panel + o, rows.filtered, count, rows.value + g * rows.padded() * R,
                                    products + o * R);
        const int left = rows.rows - (int)g * R;
        add_transposed<S>(products, left < R ? left : R, R, half, out + g * R * block);
    }
}

// The product of the batch rows of a step with packed weights, panels[gate * blocks + b], that skips either zero blocks
// or zeros of the rows, whichever is faster. Each thread has one.
template <class S>
class SkippingProduct {
public:
    SkippingProduct() = default;
    // `skip`: whether zero blocks are listed. Lists and transposed rows are not in use at the same time.
    SkippingProduct(Arena& arena, int rows_, int width_, int blocks_, const S* panels_, bool skip_)
        : rows(rows_), width(width_), tiles((int)divide_up(width_, tile)), blocks(blocks_), panels(panels_),
          skip(skip_) {
        Arena other = arena;
        if (skip) transposed = TransposedRows<S>(other, rows, width);
        lists = Lists<S>(arena, rows, width);
        arena.cover(other);
    }

    // Prepare the rows of step t for `count` gates from `gate`. The choice is the same for all threads. `always`: skip
    // zero blocks even if that is slower.
    void prepare(const Steps<S>& from, int t, int gate, int count, const BlockSources& sources, bool always) {
        skips = skip && (prefers_blocks(from, t, gate, count, sources) || always);
        if (skips) transposed.fill(from, t);
        for (int at = 0; at < tiles && !skips; ++at) list_tile(from, t, rows, rows, width, at, lists);
    }
    // The share of entries of the prepared rows that the product reads one by one.
    double listed() const { return skips ? 0.0 : lists.share(tiles, rows, width); }
    // out(j, g)[row][32] += the product for `count` gates from `gate` and `block_count` blocks from b. units(b) is the
    // number of units of a block.
    template <class Out, class Units>
    void add(int b, int block_count, int gate, int count, const BlockSources& sources, Out out, Units units) const {
        Columns<S> columns;
        for (int j = 0; j < block_count; ++j)
            for (int g = gate; g < gate + count; ++g) {
                const int p = g * blocks + b + j;
                const S* panel = panels + (int64_t)p * tiles * tile * block;
                if (!skips) columns.add(panel, out(j, g), units(b + j));
                for (int i = 0; skips && i < units(b + j); i += half) {
                    const auto multiply = transposed.vectors == 1 ? multiply_blocks<S, 1> : multiply_blocks<S, 2>;
                    multiply(panel + i, sources, 2 * p + i / half, transposed, out(j, g) + i);
                }
            }
        if (!skips) gather_all(columns, tiles, lists, rows);
    }

private:
    // Measured times, in units of a vector product of `gather`: per block and batch row, per block, and per half panel.
    static constexpr double row_cost = 0.55, block_cost = 1, half_cost = 300;

    bool prefers_blocks(const Steps<S>& from, int t, int gate, int count, const BlockSources& sources) {
        int64_t active;
        const int64_t nonzero = transposed.survey(from, t, active), halves = 2 * (int64_t)blocks * count;
        const double groups = (double)transposed.groups(), share = (double)active / (groups * width);
        const double listed = (double)sources.blocks_in(gate * blocks, blocks * count);
        const double per_block = share * transposed.group_rows() * row_cost + block_cost;
        return groups * (listed * per_block + half_cost * (double)halves) < (double)(nonzero * halves);
    }

    int rows, width, tiles, blocks;
    const S* panels;
    bool skip, skips = false;
    Lists<S> lists;
    TransposedRows<S> transposed;
};

// ---- dot products ---------------------------------------------------------------------------------------------------

// Panels per dot product: a bit per half panel fits into 64 bits, and 16 rows of them into the first-level cache.
constexpr int block_panels_max = 20;
constexpr int packed_block = half * rows_max;  // elements of 16 packed rows of a half panel

// Copy rows [0, rows) of panels to d[half panel][row][16].
template <class S>
void pack_half_panels(const S* const* panel, int panels, int rows, S* d) {
    for (int j = 0; j < panels; ++j)
        for (int row = 0; row < rows; ++row)
            for (int v = 0; v < block; v += lanes<S>)
                store<S>(d + (2 * j + v / half) * packed_block + row * half + v % half,
                         load<S>(panel[j] + (int64_t)row * block + v));
}

// One bit per half panel of a weight row: whether it is not zero.
template <class S>
inline uint64_t nonzero_halves(const S* weight, int panels) {
    uint64_t result = 0;
    for (int j = 0; j < 2 * panels; ++j) result |= (uint64_t)is_nonzero_block(weight + j * half) << j;
    return result;
}

// The same for rows [begin, end) of weights that are packed in groups.
template <class S>
void list_halves(const PanelGroups& groups, int tiles, const S* weight, int begin, int end, uint64_t* to) {
    for (int from = 0; from < groups.count; from += groups.size_max) {
        const int64_t first = (int64_t)(groups.first + from) * tiles * tile;
        const int panels = groups.size(from);
        for (int n = begin; n < end; ++n)
            to[first + n] = nonzero_halves(weight + (first + (int64_t)n * panels) * block, panels);
    }
}

// out[row] += weight . d[row] over the half panels in `halves`, for the N rows in `mask`.
template <class S, int N>
inline void block_dots(const S* weight, uint64_t halves, const S* d, unsigned mask, S* out) {
    constexpr int L = lanes<S>, V = half_vectors<S>;
    Vector<S> total[N] = {};
    int row[N];
    unsigned left = mask;
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i, left &= left - 1) row[i] = __builtin_ctz(left) * half;
    for (; halves; halves &= halves - 1) {
        const int j = __builtin_ctzll(halves);
        const S* x = d + j * packed_block;
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            const Vector<S> w = load<S>(weight + j * half + v * L);
#pragma GCC unroll 16
            for (int i = 0; i < N; ++i) total[i] += w * load<S>(x + row[i] + v * L);
        }
    }
    add_sums<S, N>(total, mask, out);
}

// As dots_of and dots_all. halves[n] has the non-zero half panels of weight row n.
template <class S, int N>
void block_dots_of(const S* weight, const uint64_t* halves, const S* d, int panels, const Requests& requests,
                   bool fresh, Upcoming& upcoming, S* out) {
    for (uint32_t i = requests.start[N]; i < requests.start[N + 1]; ++i) {
        const int64_t n = requests.order[i];
        upcoming.fetch(upcoming_lines);
        if (fresh) {
            const int64_t next = requests.order[i + 1 < requests.start[N + 1] ? i + 1 : i];
            for (uint64_t left = halves[next]; left; left &= left - 1)
                __builtin_prefetch(weight + next * panels * block + __builtin_ctzll(left) * half, 0, 3);
        }
        if (!halves[n]) continue;
        const S* row = weight + n * panels * block;
        unsigned mask = requests.mask[n], rest = mask;
        if constexpr (N > dots_max) {
            for (int k = 0; k < dots_max; ++k) rest &= rest - 1;
            block_dots<S, dots_max>(row, halves[n], d, mask ^ rest, out + n * rows_max);
            block_dots<S, N - dots_max>(row, halves[n], d, rest, out + n * rows_max);
        } else {
            block_dots<S, N>(row, halves[n], d, mask, out + n * rows_max);
        }
    }
}
template <class S, int... N>
void block_dots_each(const S* weight, const uint64_t* halves, const S* d, int panels, const Requests& requests,
                     bool fresh, Upcoming& upcoming, S* out, std::integer_sequence<int, N...>) {
    (block_dots_of<S, N + 1>(weight, halves, d, panels, requests, fresh, upcoming, out), ...);
}
template <class S>
void block_dots_all(const S* weight, const uint64_t* halves, const S* d, int panels, const Requests& requests,
                    bool fresh, Upcoming& upcoming, S* out) {
    block_dots_each<S>(weight, halves, d, panels, requests, fresh, upcoming, out,
                       std::make_integer_sequence<int, rows_max>{});
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
