// The network in the layout of the kernels: the receivers of each unit and channel, and the parameters.
#pragma once

#include <cstdint>
#include <vector>

#include "continuous/call.hpp"
#include "continuous/kernels.hpp"

namespace egru::continuous {

// The receivers of each source (a unit or an input channel) in ascending order, with their weights.
struct FanOut {
    bool dense;                         // every source reaches every unit
    std::vector<int64_t> start;         // source n has the entries start[n] to start[n + 1]; sources + 1
    std::vector<int32_t> index;         // the receivers; empty if dense
    std::vector<double> w[3];           // by gate
    std::vector<int32_t> self_position; // of each source in its list of receivers; empty for input channels
    std::vector<uint8_t> self_absent;   // whether the source is listed without having a self connection
    bool sparse = false;                // the weights are a list of connections, not a matrix
    int64_t connections = 0;            // the length of that list
    std::vector<int64_t> origin;        // of each entry in that list, or -1; empty if not sparse

    const int32_t* receivers(int source) const { return dense ? nullptr : index.data() + start[source]; }
    int count(int source) const { return static_cast<int>(start[source + 1] - start[source]); }
    int64_t size() const { return start.back(); }
    double mean_count() const { return start.size() > 1 ? double(size()) / double(start.size() - 1) : 0; }
};

// In the recurrent fan-out every unit is among its receivers, so that an event touches its emitter together with the
// receivers. Without a self connection this weight is 0 and has no gradient. With delays, an event touches its emitter
// alone, and its receivers later: the sources are then lines, and the emitters are not among the receivers.
class Network {
public:
    explicit Network(const ContinuousCall& call);

    const Model& model() const { return model_; }
    const FanOut& recurrent() const { return recurrent_; }
    const FanOut& input() const { return input_; }
    int lines() const { return lines_; }  // sources of the recurrent fan-out if events are delayed, else 0
    int64_t max_events() const { return max_events_; }  // per sample
    double amplitude(int unit) const { return unit_amplitude_ ? 1.0 : model_.theta[unit]; }

    // Copies gradients in the order of fan.w to an array of shape (3, H, sources), or (3, connections) if sparse.
    void scatter(const FanOut& fan, const double* const gradient[3], double* to) const;

private:
    Network(const Network&) = delete;
    void limit_events(const ContinuousCall& call);

    Model model_;
    FanOut recurrent_, input_;
    bool unit_amplitude_;
    int lines_;
    int64_t max_events_;
    std::vector<double> b_, theta_, onset_, taus_, tau_a_, beta_, rule_, padded_rule_;
};

}  // namespace egru::continuous
