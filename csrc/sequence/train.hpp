// Training on the CPU: one call of the sequence operation, and the functions that run it.
//
// The caller (cpu/kernel.py) owns every buffer and runs a call in chunks of time steps, so that a long call can be
// interrupted between chunks. Layouts are torch's, contiguous unless strides are given; weights have their blocks in
// torch's order r, u, z (torch calls the last two z and n, and its z is 1 - u).
#pragma once

#include <cstdint>

#include "common/levels.hpp"
#include "common/reset.hpp"

namespace egru {

struct TrainCall {
    int T = 0, B = 0, I = 0, H = 0;
    int first = 0, last = 0;  // the steps of this chunk: first <= t < last
    int chunk = 0;            // the most steps a chunk has; sizes the workspace
    int threads = 1;
    bool float64 = false;
    bool after = false;  // reset gate after the recurrent product (torch) or before it (the paper)
    Reset reset = Reset::output;
    bool bounded = false;
    double width = 1, height = 1;  // surrogate
    double rho = 1;                // reset_scale of all units, unless rho_units holds one for each

    // Addresses, 0 where absent.
    std::uintptr_t input = 0, c0 = 0, y0 = 0, weight_ih = 0, weight_hh = 0, bias_ih = 0, bias_hh = 0, theta = 0;
    std::uintptr_t rho_units = 0, keep = 0, lengths = 0;
    std::int64_t input_t = 0, input_b = 0;           // strides, in elements; the last one is 1
    std::int64_t keep_t = 0, keep_b = 0, keep_h = 0;  // the last one is 0 or 1
    std::uintptr_t y = 0, c = 0, c_last = 0, y_last = 0;
    std::uintptr_t gates = 0;  // the reserve; 0: forward keeps none, backward computes them again
    std::uintptr_t workspace = 0;

    // Backward: what comes in (strides as for the input), and what goes out.
    std::uintptr_t grad_y = 0, grad_c = 0;
    std::int64_t grad_y_t = 0, grad_y_b = 0, grad_c_t = 0, grad_c_b = 0;
    // grad_c0 and grad_y0 hold the gradients of the final state on entry and carry those of each chunk's start.
    std::uintptr_t grad_c0 = 0, grad_y0 = 0;
    std::uintptr_t grad_input = 0;  // 0 where not wanted
    std::uintptr_t grad_weight_ih = 0, grad_weight_hh = 0, grad_bias_ih = 0, grad_bias_hh = 0, grad_theta = 0;
};

// A call: `begin` once, `chunk` for each chunk of steps (ascending forward, descending backward), backward `finish`.
struct ForwardTable {
    std::int64_t (*gates_size)(const TrainCall&);  // elements of the reserve
    std::int64_t (*workspace)(const TrainCall&);   // bytes
    void (*begin)(const TrainCall&);
    void (*chunk)(const TrainCall&);
};
struct BackwardTable {
    std::int64_t (*workspace)(const TrainCall&);
    void (*begin)(const TrainCall&);
    void (*chunk)(const TrainCall&);
    void (*finish)(const TrainCall&);
};

}  // namespace egru

EGRU_DECLARE_TABLE(egru::ForwardTable, forward_table)
EGRU_DECLARE_TABLE(egru::BackwardTable, backward_table)
