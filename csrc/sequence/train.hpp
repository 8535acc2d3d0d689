// The arguments of one call of the sequence operation on the CPU, and the functions that run it.
//
// The caller (kernels/cpu/kernel.py) owns the arguments and results. A call runs in chunks of steps (run.cpp), so that a
// long call can be interrupted between chunks. Layouts are torch's, contiguous unless strides are given. Weights have
// torch's block order r, u, z, or i, f, g, o. (torch calls the last two gates of a GRU z and n, and its z is 1 - u.)
#pragma once

#include <cstdint>

#include "common/events.hpp"
#include "common/levels.hpp"
#include "common/reset.hpp"

namespace egru {

struct TrainCall {
    int T = 0, B = 0, I = 0, H = 0;
    int first = 0, last = 0;  // steps of this chunk: first <= t < last
    int chunk = 0;            // maximum number of steps per chunk; determines the size of the workspace
    int threads = 1;
    std::int64_t one_thread = 0;  // multiplications of a call up to which one thread is faster than several
    bool float64 = false;
    bool direct = false;  // multiply the weights without packing them: dense, for few rows
    bool direct_input = false;  // the same for the input weights in the forward pass
    bool direct_gates = false;  // backward pass without the reserve: the forward pass was direct
    // Share of zero blocks (zero_blocks.hpp) in a weight from which products skip them; above 1, they never do. At 0,
    // they skip them even where it is slower.
    double zero_blocks = 2;
    bool skip_hh = false, skip_ih = false;  // the recurrent and the input weights have that share
    bool rest = false;    // y0 is zero in all rows: the first step has no recurrent product
    bool lstm = false;            // the cell; otherwise a GRU
    bool compare_output = false;  // LSTM: compare o * tanh(c) with the threshold, not c
    bool after = false;  // GRU: the reset gate acts after the recurrent product (torch), not before it (the paper)
    Events events = Events::positive;  // delta requires `after` and Reset::none
    Reset reset = Reset::output;
    bool bounded = false;
    double width = 1, height = 1;  // surrogate
    double rho = 1;                // reset_scale of all units, unless rho_units has one per unit

    // Addresses; 0 if absent.
    std::uintptr_t input = 0, c0 = 0, y0 = 0, weight_ih = 0, weight_hh = 0, bias_ih = 0, bias_hh = 0, theta = 0;
    std::uintptr_t rho_units = 0, keep = 0, lengths = 0;
    std::int64_t input_t = 0, input_b = 0;            // strides in elements; the last one is 1
    std::int64_t c0_b = 0, y0_b = 0;                  // 0 if all rows are the same
    std::int64_t keep_t = 0, keep_b = 0, keep_h = 0;  // the last one is 0 or 1
    std::uintptr_t y = 0, c = 0, c_last = 0, y_last = 0;
    bool last_c = false;  // forward pass of a GRU: c has room for one step, and every step overwrites it
    std::uintptr_t gates = 0;  // the reserve; if 0, the backward pass recomputes the gates
    std::uintptr_t cells = 0;  // if compare_output: where the memory cells of all steps are saved for the backward pass
    std::uintptr_t workspace = 0;

    // Backward: gradients of the outputs (strides as for the input), then gradients of the arguments.
    std::uintptr_t grad_y = 0, grad_c = 0;
    std::int64_t grad_y_t = 0, grad_y_b = 0, grad_c_t = 0, grad_c_b = 0;
    std::uintptr_t grad_c_last = 0, grad_y_last = 0;  // gradients of the final state; 0 for zeros
    std::uintptr_t grad_c0 = 0, grad_y0 = 0;  // 0 if not requested, both of them
    std::uintptr_t grad_input = 0;            // 0 if not requested
    std::uintptr_t grad_weight_ih = 0, grad_weight_hh = 0, grad_bias_ih = 0, grad_bias_hh = 0, grad_theta = 0;
};

// Values that are not finite, as flags.
enum Bad : int {
    bad_input = 1,
    bad_c0 = 2,
    bad_y0 = 4,
    bad_theta = 8,
    bad_biases = 16,
    bad_weights = 32,
    bad_result = 64,
};

// Call `begin` once, then `chunk` for each chunk of steps (ascending in the forward pass, descending in the backward
// pass), then `finish`.
struct ForwardTable {
    std::int64_t (*gates_size)(const TrainCall&);  // elements of the reserve
    std::int64_t (*workspace)(const TrainCall&);   // bytes
    int (*begin)(const TrainCall&);                // Bad flags of the arguments
    int (*chunk)(const TrainCall&);                // bad_weights if a product with unpacked weights is not finite
    int (*finish)(const TrainCall&);               // bad_result if the final state is not finite
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
EGRU_DECLARE_TABLE(egru::ForwardTable, lstm_forward_table)
EGRU_DECLARE_TABLE(egru::BackwardTable, lstm_backward_table)
