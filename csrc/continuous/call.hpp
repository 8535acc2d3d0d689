// The arguments of one run, as Python passes them.
#pragma once

#include <cstdint>

namespace egru::continuous {

// Sizes, options and addresses. Arrays are float64 or int64 in C order (masks: bytes); 0 is an absent or empty array.
// Python has validated everything. B: batch, H: units, D: channels, R: readouts, K: input events, N: events.
struct ContinuousCall {
    int batch = 0, units = 0, channels = 0, readouts = 0, nodes = 0, threads = 1;
    int64_t max_events = 0;  // per sample; units that are not linear also have a bound of their own
    double tau_s = 1, tau_m = 1, tau_o = 1;  // if shared by all units
    uintptr_t taus = 0;                      // else those of each unit, (3, H): tau_s, tau_m, tau_o
    double panel = 0.5;        // longest panel, in units of the fastest rate
    double tie = 0;            // events closer than this are simultaneous
    double grazing_floor = 0;  // smallest z - theta that the backward pass divides by
    bool linear = false;  // u = r = 1 and z = a_z
    uintptr_t beta = 0, tau_a = 0;  // adaptation of linear units: (H) twice
    bool self_connections = false;
    bool receiver_reset = false;  // the reset gate is that of the receiver, not of the emitter
    bool unit_amplitude = false;  // events carry 1, not theta
    bool integrate = false;       // visit the nodes of an integral over time
    int64_t checkpoint_every = 0;  // steps between two checkpoints; 0: record every step
    // Parameters and initial state: (3, H, H), (3, H, D), (3, H), (H), (B, 3, H), (B, H); masks (H, H) and (H, D)
    uintptr_t V = 0, U = 0, b = 0, theta = 0, a0 = 0, c0 = 0, mask = 0, input_mask = 0;
    // Sparse weights: V is (3, E), and its connections are (2, E): receivers, then sources. They are sorted by source,
    // then receiver. U likewise.
    int64_t connection_count = -1, input_connection_count = -1;  // -1: dense
    uintptr_t connections = 0, input_connections = 0;
    // Delays: the connections of unit n are divided into the lines line_offsets[n] to line_offsets[n + 1], each with a
    // delay. The sources of V are then lines, not units. (H + 1), (lines), (lines)
    int lines = 0;  // 0: no delays
    uintptr_t line_offsets = 0, line_units = 0, delays = 0;
    // Input events: (K), (K), (K), (B + 1); horizons: (B); readouts: (B, R)
    uintptr_t input_times = 0, input_channels = 0, input_values = 0, input_offsets = 0;
    uintptr_t horizons = 0, readout_times = 0;
    // Quadrature rule: (nodes), (nodes), (nodes, nodes)
    uintptr_t rule_x = 0, rule_w = 0, rule_A = 0;
    // Results of the forward pass: (B, R, H) twice, (B, 3, H), then four counters (B)
    uintptr_t c_read = 0, o_read = 0, a_last = 0;
    uintptr_t event_counts = 0, root_solves = 0, flow_evaluations = 0, min_slope = 0;
    // Derivatives of the loss with respect to the results: events (N) twice, readouts, a_last
    uintptr_t cotangent_times = 0, cotangent_amplitudes = 0;
    uintptr_t cotangent_c_read = 0, cotangent_o_read = 0, cotangent_a_last = 0;
    uintptr_t cotangent_nodes = 0;  // c at the nodes of the integral (nodes, H)
    // Results of the backward pass. Entries of grad_V and grad_U without a connection are not written. Gradients of the
    // time constants are (H) if these differ between units, else one number.
    uintptr_t grad_V = 0, grad_U = 0, grad_b = 0, grad_theta = 0, grad_tau_s = 0, grad_tau_m = 0, grad_tau_o = 0;
    uintptr_t grad_a0 = 0, grad_c0 = 0, grad_delays = 0, grad_input_times = 0, grad_input_values = 0;
    uintptr_t grad_beta = 0, grad_tau_a = 0;  // (H) twice, with adaptation
    uintptr_t floored = 0;  // the number of events per sample to which grazing_floor applied (B)
};

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace egru::continuous
