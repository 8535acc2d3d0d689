// Inner loops of the streaming engine, compiled once per dispatch level.
//
// One rule makes results independent of threads, streams and chunking: a pre-activation is one chain of fused
// multiply-adds. The chain starts at the bias, continues through the active inputs in ascending order, and ends with
// the active units in ascending order. Blocking changes which chains advance together, never the order within a chain.
// Skipping a zero does not change a sum. int8 sums are integers, whose order does not matter.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/events.hpp"
#include "common/levels.hpp"
#include "common/reset.hpp"

namespace egru::engine {

enum class WeightFormat : int { float32, bfloat16, int8 };
WeightFormat parse_weight_format(const char* name);  // throws std::invalid_argument if there is no such format

// The number of columns of a packed matrix is a multiple of this.
[[gnu::always_inline]] constexpr int column_block(WeightFormat format) {
    return format == WeightFormat::float32 ? 16 : format == WeightFormat::bfloat16 ? 32 : 64;
}

// Columns of a block that is left out if all its weights are zero.
constexpr int sparse_block = 16;

// A packed matrix with one row per input, so that only the rows of active inputs are read.
//   float32   row-major
//   bfloat16  blocks of 32 columns; word i of a block holds column i in its low half and column 16 + i in its high half
//   int8      row-major, to be multiplied by scale[column]. If the table is `int8_interleaved`, blocks of 64 columns
//             are permuted such that transposing four rows for the dot product restores the column order.
struct Rows {
    WeightFormat format;
    const unsigned char* base;
    size_t stride;       // bytes between rows
    int count;           // number of rows
    int columns;         // a multiple of column_block(format)
    const float* scale;  // int8 only: one per column
    // If the matrix is packed without its zero blocks (sparse.hpp), `sections` is not zero, `base` is null, and these
    // are set.
    int sections = 0;                // equal parts of the columns, such as gates
    const uint32_t* start = nullptr;  // (count * sections + 1): first block of each section of each row
    const uint16_t* block = nullptr;  // column of each block / sparse_block
    const unsigned char* values = nullptr;  // sparse_block values per block, in the order of the columns
};

// The non-zero entries of a vector, indices in ascending order.
struct SparseVector {
    int32_t* index;
    float* value;
    int count;
};

// A sparse vector quantised to eight bits: value ~ unit * q. The dot product takes unsigned bytes, so negative entries
// come first, as magnitudes. Both parts are padded with q = 0 to a multiple of four.
struct QuantisedVector {
    int32_t* index;
    uint8_t* q;
    int negative;  // number of entries in the first part
    int positive;  // number of entries in the second part
    float unit;
};

// Parameters of a layer's element-wise update.
struct Cell {
    Events events;
    Reset reset;
    bool after;         // GRU: the reset gate acts after the recurrent product
    bool lstm;
    bool compare_output;  // LSTM: compare o * tanh(c) with the threshold, not c
    float keep;         // zoneout: fraction of the old state that is kept
    const float* theta;
    const float* rho;   // reset_scale
};

// The units of a layer while its input and its output do not change. After n steps, the state is
// target + decay^n (c - target) + n slope; `slope` is zero unless `decay` is one.
struct Relaxation {
    double* decay;
    double* target;
    double* slope;
    float* out_gate;  // LSTM only
};

// A step that is never reached.
constexpr int64_t never = INT64_MAX;

// The kernels of one dispatch level.
struct EngineTable {
    bool int8_interleaved;

    // Write the non-zero entries of dense[0, n) and return their number. `index` and `value` must have room for n + 16
    // entries.
    int (*find_nonzero)(const float* dense, int n, int32_t* index, float* value);
    bool (*all_finite)(const float* values, size_t n);

    // sum[j] += value * row[first + j] for every entry of `x` in order, 0 <= j < columns. int8 is not supported.
    void (*add_rows)(const Rows& rows, int first, int columns, const SparseVector& x, float* sum);
    // The same product in integers, scaled and added to `sum`. `integers` is scratch memory for `columns` entries.
    void (*add_rows_int8)(const Rows& rows, int first, int columns, const QuantisedVector& x, int32_t* integers,
                          float* sum);
    void (*quantise)(const SparseVector& x, QuantisedVector* quantised);
    // The same products with a matrix that is packed without its zero blocks.
    void (*add_blocks)(const Rows& rows, int first, int columns, const SparseVector& x, float* sum);
    void (*add_blocks_int8)(const Rows& rows, int first, int columns, const QuantisedVector& x, int32_t* integers,
                            float* sum);

    // bias[j] + product for several inputs at once, reading each panel of the matrix from memory once. The result goes
    // to out[m * stride + j], 0 <= j < columns. Inputs are sparse vectors, or dense rows passed by address. int8 is not
    // supported.
    void (*project)(const Rows& rows, int first, int columns, const SparseVector* inputs, int count, const float* bias,
                    float* out, size_t stride);
    void (*project_dense)(const Rows& rows, int first, int columns, const float* const* inputs, int count,
                          const float* bias, float* out, size_t stride);

    // gated[k] = sigmoid(a[index[k]]) * value[k] for entries k in [from, to).
    void (*apply_reset_gate)(const SparseVector& y, int from, int to, const float* a, float* gated);

    // Update units [from, to), both multiples of 16: c in place, y_new from y_old. `sum` has the blocks q, r, u, z,
    // each `units` wide; q is read only if the reset gate acts after the product. With delta events, `sent` receives
    // the changes of y. Returns the number of events, or -1 if a state is not finite.
    int (*update_units)(const Cell& cell, int from, int to, int units, const float* sum, float* c, const float* y_old,
                        float* y_new, float* sent);
    // The same for an LSTM. `sum` has the blocks i, f, g, o.
    int (*update_lstm)(const Cell& cell, int from, int to, int units, const float* sum, float* c, const float* y_old,
                       float* y_new, float* sent);

    // Compute the relaxation of all units from their sums, arranged as for the updates.
    void (*settle)(const Cell& cell, int units, const float* sum, const Relaxation& relaxation);
    // The first step, 1 to `limit`, at which a unit sends an event, or limit + 1. In this case, `next` receives the
    // states after `limit` steps.
    int64_t (*first_event)(const Cell& cell, int units, const Relaxation& relaxation, const float* c, const float* y,
                           int64_t limit, float* next);
    // Advance the states of units [from, to) by `steps` steps without comparing them with the thresholds.
    void (*relax)(int from, int to, const Relaxation& relaxation, int64_t steps, float* c);
    // For every group of `sparse_block` units in [from, to), both multiples of it, whose states at step `now` are c: the
    // step at which the first of them sends an event, or `never`. It goes to due[unit / sparse_block]. `next` is scratch
    // memory for all units. Delta events are not supported.
    void (*find_due)(const Cell& cell, int from, int to, const Relaxation& relaxation, const float* c, int64_t now,
                     float* next, int64_t* due);
    // Compare the states of units [from, to) with the thresholds, as at the end of a step: y and c in place. Returns the
    // number of events, or -1 if a state is not finite.
    int (*emit_relaxed)(const Cell& cell, int from, int to, const Relaxation& relaxation, float* c, float* y,
                        float* sent);

    // log(sum(exp(scores))) of n >= 1 scores.
    double (*log_sum_exp)(const float* scores, int n);
    // The k <= n largest scores and their indices, largest first.
    void (*top)(const float* scores, int n, int k, int64_t* index, float* value);
};

}  // namespace egru::engine

EGRU_DECLARE_TABLE(egru::engine::EngineTable, engine_table)
