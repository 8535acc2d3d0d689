// The inner loops of the continuous-time engine, once per dispatch level.
//
// The model, its quadrature and the adjoint over one panel are those of docs/continuous.md. A touch brings a list of
// units from their last touch to the present and adds a jump to their activations; between touches nothing happens to
// them. Arrays are indexed by unit; what concerns one touch by the position in its list.
#pragma once

#include <cstdint>

#include "common/levels.hpp"

namespace egru::continuous {

constexpr int max_nodes = 32;
constexpr int max_points = max_nodes + 8;  // with the end of the panel, in whole vectors
constexpr int block = 64;  // units that are treated together

// Parameters of one run. `onset` is artanh(theta), infinite for theta >= 1.
struct Model {
    int units;
    double tau_s, tau_m, tau_o;
    const double *b_u, *b_r, *b_z, *theta, *onset;
    bool receiver;  // reset gate of the receiver instead of the emitter
    int nodes;      // of the quadrature: x, w, and A[i * nodes + j], the integral up to x_i
    double panel;
    const double *x, *w, *A;
    // The nodes and then the end of the panel, padded to vectors, for one unit at a time; `columns` is A transposed,
    // w as the row of the end, `stride` doubles a column.
    int stride;
    const double *points, *weights, *columns;
};

// Scratch for panels beyond one per unit. `grow` makes room for `wanted` doubles.
struct Scratch {
    double* data;
    int64_t capacity;
    void (*grow)(Scratch*, int64_t wanted);
};

// Units as of their last touch; `key` is a time before which the unit will not fire.
struct State {
    double *a_u, *a_r, *a_z, *c, *last, *key;
};

constexpr int tape_rows = 4;           // a_u, a_r, a_z, c after the jump, each as long as the list
constexpr int tape_rows_receiver = 5;  // and the a_r that gated it

struct Touch {
    const int32_t* index;  // units; null: 0 to count - 1
    int count;
    int emitter;  // position in the list, or -1: its c becomes 0
    double time;
    const double *w_u, *w_r, *w_z;  // null: no jump
    double scale, scale_z;          // the jump is scale * w_u, scale * w_r, scale_z * w_z
    bool gated;                     // w_z also times the reset gate of the receiver
    const double* gate;             // a_r of the gate, by unit; null: that of the moment
    bool keep_keys;
    double* tape;
};

enum class Outcome { none_yet, found, never };

struct Crossing {
    Outcome outcome;  // before the horizon
    double time;      // since the last touch
    int evaluations;
};

// Derivatives of the loss by the state, as of time `back`, and of what is gathered per unit.
struct Adjoint {
    double *c, *u, *r, *z, *back;
    double *b_u, *b_r, *b_z;
    double tau_s, tau_m;
};

struct Pull {
    const int32_t* index;
    int count;
    int emitter;
    double time;
    const double* tape;
    const double *w_u, *w_r, *w_z;  // null: no jump here
    double scale, scale_z;
    bool gated;
    double* waiting;          // by unit: where the gates' share of p_r goes; null: to p_r itself
    double *g_u, *g_r, *g_z;  // gradients of the weights
};

// Sums over the receivers: w_x p_x (z: times the gate, if gated), w_z p_z times the gate's rate, and p_c times the jump
// of dc/dt (before minus after), the emitter left out.
struct Sums {
    double u, r, z, z_rate, slope;
};

struct ContinuousTable {
    void (*advance)(const Model& model, const State& state, const Touch& touch, Scratch* scratch);
    Crossing (*crossing)(const Model& model, int unit, double a_u, double a_z, double c, double span);
    int (*lowest)(const double* keys, int count);  // the first of the least
    Sums (*pull)(const Model& model, Adjoint* adjoint, const Pull& pull, Scratch* scratch);
};

}  // namespace egru::continuous

// By level: the tables are filled from three sources.
EGRU_DECLARE_TABLE(egru::continuous::ContinuousTable, continuous_table)
