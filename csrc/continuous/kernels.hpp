// The kernels of the continuous-time engine: vectorised inner loops, compiled once per dispatch level.
//
// The model, its quadrature and the adjoint are described in docs/concepts/continuous.md. Units are updated lazily. A "touch"
// advances a list of units from their last touch to the current time and adds a jump to their activations. Between
// touches a unit is not computed. Arrays of a run are indexed by unit, arrays of a touch by the position in its list.
#pragma once

#include <cstdint>

#include "common/levels.hpp"

namespace egru::continuous {

constexpr int max_nodes = 32;
constexpr int max_points = max_nodes + 8;  // the nodes and the end of the panel, rounded up to whole vectors
constexpr int block = 64;                  // units that are processed together

// Parameters of one run.
struct Model {
    int units;
    bool linear;    // u = r = 1 and z = a_z: leaky integrate-and-fire units
    bool adaptive;  // linear, and z = a_z - a_u, where a_u has tau_a and increases by beta at every event of the unit
    bool shared_tau;      // all units have the same time constants
    double tau_s, tau_m;  // these, or the smallest ones
    double rate_s, rate_m;  // 1 / tau_s and 1 / tau_m
    const double *tau_s_of, *tau_m_of, *tau_o_of, *tau_a_of;  // by unit; tau_a is tau_s unless adaptive
    const double* beta;
    const double *b_u, *b_r, *b_z, *theta;
    const double* onset;  // z > theta if a_z > onset: artanh(theta), infinite for theta >= 1; theta if linear
    bool receiver_reset;  // the reset gate is that of the receiver, not of the emitter
    int nodes;            // the quadrature rule: x, w, and A[i * nodes + j], which integrates up to x_i
    double panel;
    const double *x, *w, *A;
    // The same rule with the end of the panel as an additional point, padded to whole vectors, for one unit at a time.
    // `columns` is A transposed with w as the row of the end; a column has `stride` doubles.
    int stride;
    const double *points, *weights, *columns;
};

// Temporary memory for units with more than one panel. `grow` provides at least `needed` doubles and keeps the contents.
// `check` throws if the run has been interrupted; long loops call it at intervals.
struct Scratch {
    double* data;
    int64_t capacity;
    void (*grow)(Scratch*, int64_t needed);
    void (*check)(Scratch*);
};

// Units at the time of their last touch, `last`. `key` is a time before which the unit emits no event.
struct State {
    double *a_u, *a_r, *a_z, *c, *last, *key;
};

// d_u, d_r and d_z before the jump, where d_x is a_x - b_x, and c after it, each as long as the list. The backward pass
// adds the jump again: subtracting it from the result would lose the digits of d before a large jump.
constexpr int record_rows = 4;
constexpr int record_rows_receiver_reset = 5;  // and the a_r that gated the jump

struct Touch {
    const int32_t* index;  // the units; null: 0 to count - 1
    int count;
    int emitter;  // position in the list of the unit whose c becomes 0, or -1
    double time;
    const double *w_u, *w_r, *w_z;  // null: no jump
    double scale, scale_z;          // the jump is scale * w_u, scale * w_r, scale_z * w_z
    bool gated;                     // w_z is also multiplied by the reset gate of the receiver
    const double* gate;             // a_r of that gate by unit; null: the current a_r
    bool keep_keys;                 // leave the keys as they are, because the trajectories do not change
    double* record;                 // where the rows for the backward pass are written
};

enum class Outcome { none_yet, found, never };

struct Crossing {
    Outcome outcome;  // before the horizon
    double time;      // since the last touch
    int evaluations;
};

// Derivatives p of the loss with respect to the state of each unit at `time`, and the gradients summed so far.
struct Adjoint {
    double *p_c, *p_u, *p_r, *p_z, *time;
    double *grad_b_u, *grad_b_r, *grad_b_z;
    double *grad_tau_s, *grad_tau_m;  // by unit; one number if the time constants are shared
    double* grad_tau_a;               // by unit
};

// The adjoint of a touch; see Touch for the fields of the same name.
struct TouchAdjoint {
    const int32_t* index;
    int count;
    int emitter;
    double time;
    const double* record;
    const double *w_u, *w_r, *w_z;
    double scale, scale_z;
    bool gated;
    double* pending_p_r;               // by unit: receives what the reset gates add to p_r; null: p_r itself
    double *grad_u, *grad_r, *grad_z;  // gradients of the weights
};

// Sums over the receivers. `slope` is that of p_c times the jump of dc/dt (before minus after), without the emitter.
struct ReceiverSums {
    double u, r, z;  // w_x p_x; z: times the gate if it is that of the receiver
    double rate;     // w_u p_u + w_r p_r, divided by tau_s of the receiver; gate u of adaptive units: by tau_a
    double rate_z;   // as z, divided by tau_s of the receiver
    double z_rate;   // w_z p_z times the time derivative of the gate
    double slope;
    double emitter_u, emitter_z;  // gates of the emitter after the jump
};

struct ContinuousTable {
    void (*advance)(const Model& model, const State& state, const Touch& touch, Scratch* scratch);
    Crossing (*find_crossing)(const Model& model, int unit, double a_u, double a_z, double c, double span,
                              Scratch* scratch);
    int (*argmin)(const double* keys, int count);  // the first of several minima
    double (*longest_panel)(const Model& model, const State& state, double time);  // of all units, from `time` on
    ReceiverSums (*pull_back)(const Model& model, Adjoint* adjoint, const TouchAdjoint& touch, Scratch* scratch);
};

}  // namespace egru::continuous

EGRU_DECLARE_TABLE(egru::continuous::ContinuousTable, continuous_table)
