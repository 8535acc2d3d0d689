// What a run is given, and the network made ready for it: who reaches whom, and the parameters as the kernels want them.
#pragma once

#include <cstdint>
#include <vector>

#include "continuous/kernels.hpp"

namespace egru::continuous {

// Addresses and sizes as Python gives them; float64 and int64 throughout, C order. The caller has checked them.
struct ContinuousCall {
    int batch = 0, units = 0, channels = 0, readouts = 0, nodes = 0, threads = 1;
    int64_t limit = 0;  // events of one sample
    double tau_s = 1, tau_m = 1, tau_o = 1, horizon = 0, panel = 0.5, tie = 0, floor = 0;
    bool self_connections = false, receiver = false, unit_amplitude = false;
    // (3, H, H), (3, H, D), (3, H), (H), (B, 3, H), (B, H); masks (H, H) and (H, D) of bytes or 0
    uintptr_t V = 0, U = 0, b = 0, theta = 0, a0 = 0, c0 = 0, mask = 0, input_mask = 0;
    uintptr_t input_times = 0, input_channels = 0, input_values = 0, input_offsets = 0, readout_times = 0;
    uintptr_t x = 0, w = 0, A = 0;  // quadrature: (nodes), (nodes), (nodes, nodes)
    // results of the forward pass: (B, R, H) twice, (B, 3, H)
    uintptr_t c_read = 0, o_read = 0, a_last = 0;
    // backward: derivatives of the loss by events (N), readouts and a_last (or 0)
    uintptr_t by_time = 0, by_amplitude = 0, by_c_read = 0, by_o_read = 0, by_a_last = 0;
    // gradients; those of V and U are zero where the caller made them zero and nothing is connected
    uintptr_t grad_V = 0, grad_U = 0, grad_b = 0, grad_theta = 0, grad_tau = 0, grad_a0 = 0, grad_c0 = 0;
    uintptr_t grad_input_times = 0, grad_input_values = 0, floored = 0;
};

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// The receivers of each source in ascending order, and the weights to them, gate by gate.
struct Fan {
    bool dense;
    std::vector<int64_t> start;   // sources + 1
    std::vector<int32_t> index;   // empty if dense
    std::vector<double> w[3];
    std::vector<int32_t> itself;  // position of each source in its own list; empty for inputs
    std::vector<uint8_t> severed;  // whether that is there for the touch alone, without a connection

    const int32_t* list(int source) const { return dense ? nullptr : index.data() + start[source]; }
    int count(int source) const { return static_cast<int>(start[source + 1] - start[source]); }
    int64_t size() const { return start.back(); }
    double mean() const { return start.size() > 1 ? double(size()) / double(start.size() - 1) : 0; }
};

// Recurrent fans hold every source itself, so that an event touches its emitter as it does the receivers; without a self
// connection that weight is 0 and has no gradient.
class Network {
public:
    explicit Network(const ContinuousCall& call);

    const Model& model() const { return model_; }
    const Fan& recurrent() const { return recurrent_; }
    const Fan& input() const { return input_; }
    double amplitude(int unit) const { return unit_amplitude_ ? 1.0 : model_.theta[unit]; }

    // Gradients in the order of the fans' weights, to (3, H, sources).
    void spread(const Fan& fan, const double* const gradient[3], double* to) const;

private:
    Network(const Network&) = delete;

    Model model_;
    Fan recurrent_, input_;
    bool unit_amplitude_;
    std::vector<double> b_, theta_, onset_, rule_, padded_;
};

}  // namespace egru::continuous
