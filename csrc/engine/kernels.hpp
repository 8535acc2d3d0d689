// The inner loops of the streaming engine, once per dispatch level.
//
// One rule makes results independent of threads, streams and chunking: a pre-activation is one chain of fused
// multiply-adds, from its bias through the active inputs in ascending order, then the active units in ascending order.
// Blocking changes which chains advance together, never the order within one; skipping a zero changes nothing. int8
// sums are integers, whose order does not matter.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/levels.hpp"
#include "common/reset.hpp"

namespace egru::engine {

enum class Weights : int { float32, bfloat16, int8 };

// Columns of a packed matrix come in blocks of this many.
[[gnu::always_inline]] constexpr int granule(Weights kind) { return kind == Weights::float32 ? 16 : kind == Weights::bfloat16 ? 32 : 64; }

// A packed matrix, row by row (one row per source unit), so that only rows of active units are read.
//   float32   as they are
//   bfloat16  blocks of 32 columns, word i holding column i in its low half and column 16 + i in its high half
//   int8      times scale[column]; where the table says `interleaved`, blocks of 64 columns are permuted so that
//             transposing four rows for the dot product leaves columns in order
struct Rows {
    Weights kind;
    const unsigned char* base;
    size_t stride;       // bytes
    int count;           // rows
    int columns;         // a multiple of 16, 32 or 64 by kind
    const float* scale;  // int8 only, one per column
};

// Active sources in ascending order.
struct List {
    int32_t* index;
    float* value;
    int count;
};

// A list rounded to eight bits: value ~ unit * q, negative values first as magnitudes, since the dot product takes
// unsigned bytes. Both parts are padded to a multiple of four with q = 0.
struct Rounded {
    int32_t* index;
    uint8_t* q;
    int negative;
    int positive;
    float unit;
};

// What the element-wise update of a layer needs besides its pre-activations.
struct Cell {
    Reset reset;
    bool after;    // the reset gate acts after the recurrent product
    float keep;    // zoneout: the share of the old state that is kept
    const float* theta;
    const float* rho;  // reset_scale
};

struct EngineTable {
    bool interleaved;

    // Non-zero entries of dense[0, n) as a list; its arrays have 16 entries to spare.
    int (*scan)(const float* dense, int n, int32_t* index, float* value);
    bool (*finite)(const float* values, size_t n);

    // sum[j] += value * row[first + j] for every entry of the list in turn, 0 <= j < columns. Not for int8.
    void (*add_rows)(const Rows& rows, int first, int columns, const List& list, float* sum);
    // The same product rounded to integers, then scaled and added to sum; `integers` is scratch of `columns` entries.
    void (*add_rows_int8)(const Rows& rows, int first, int columns, const Rounded& list, int32_t* integers, float* sum);
    void (*round)(const List& list, Rounded* rounded);

    // start[j] + products for several lists at once, every panel of the matrix being read from memory once:
    // out[m * stride + j], 0 <= j < columns. The dense form takes whole inputs, one address per item. Not for int8.
    void (*project)(const Rows& rows, int first, int columns, const List* lists, int items, const float* start,
                    float* out, size_t stride);
    void (*project_dense)(const Rows& rows, int first, int columns, const float* const* x, int items,
                          const float* start, float* out, size_t stride);

    // gated[k] = sigmoid(a[index[k]]) * value[k] for entries k in [from, to).
    void (*gate)(const List& list, int from, int to, const float* a, float* gated);

    // Units [from, to), multiples of 16: new c in place, new y from the old. `sum` holds the blocks q, r, u, z, each
    // `units` wide; q is read in the "after" form only. Returns the number of events, or -1 if a state is not finite.
    int (*update)(const Cell& cell, int from, int to, int units, const float* sum, float* c, const float* y_old,
                  float* y_new);
};

}  // namespace egru::engine

EGRU_DECLARE_TABLE(egru::engine::EngineTable, engine_table)
