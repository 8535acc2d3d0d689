// The streaming engine: runs a trained stack of event-based GRU or LSTM layers one step at a time, reading only the
// weights of active inputs and units.
//
// The receivers of a layer with delta events accumulate its changes: the layer itself, the layer above or the readout.
// Every `refresh` steps they compute their sums from the output instead, so that rounding errors do not accumulate.
//
// For a given dispatch level, the number of threads, the number of streams and the chunk size do not change the result.
//
// engine.cpp constructs the engine and handles its state; run.cpp computes steps, skip.cpp steps without input, and
// lazy.cpp both for pruned networks, in which an event reaches few units.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/threads.hpp"
#include "engine/kernels.hpp"
#include "engine/sparse.hpp"
#include "engine/team_size.hpp"

namespace egru::engine {

// Parameters of one layer in torch's layout: blocks r, u, z (GRU) or i, f, g, o (LSTM) of `hidden` rows. They are
// copied during construction.
struct LayerSource {
    int inputs;
    int hidden;
    const float* weight_ih;  // (gates * hidden, inputs)
    const float* weight_hh;  // (gates * hidden, hidden)
    const float* bias_ih;    // (gates * hidden) or null
    const float* bias_hh;    // (gates * hidden) or null
    const float* theta;      // (hidden)
    const float* rho;        // (hidden), reset_scale
    Events events;
    Reset reset;
    bool after;              // GRU: the reset gate acts after the recurrent product
    float keep;              // zoneout: fraction of the old state that is kept
    bool lstm;
    bool compare_output;     // LSTM: compare o * tanh(c) with the threshold, not c
};

struct ReadoutSource {
    int inputs;
    int outputs;
    const float* weight;  // (outputs, inputs)
    const float* bias;    // (outputs) or null
};

struct EngineOptions {
    WeightFormat weights = WeightFormat::float32;
    Packing packing = Packing::automatic;
    int threads = 1;
    int streams = 1;
    bool has_trace = false;
    double trace = 0;              // decay per step
    bool mean = false;             // divide the trace by the number of steps
    int refresh = 1024;            // steps between two computations of accumulated sums
    size_t token_table_bytes = 0;  // cache x W per token if the complete table is not larger than this
};

struct Counters {
    int64_t steps = 0;            // summed over streams
    int64_t macs = 0;
    std::vector<int64_t> events;  // one per layer
};

// The result of Engine::skip. The caller provides memory for `capacity` rows of `step` and `outputs`.
struct Gap {
    int64_t* step;       // steps at which the last layer sent events, from 0
    float* outputs;      // (capacity, outputs) at these steps
    int capacity;
    int count = 0;       // number of rows
    int64_t steps = 0;   // number of steps taken
    bool finite = true;  // whether all states are finite
};

class Engine {
public:
    Engine(const std::vector<LayerSource>& layers, const EngineOptions& options);
    void set_embedding(const float* table, int tokens, int width);
    void set_readout(const ReadoutSource& source);

    int streams() const { return options_.streams; }
    int inputs() const { return layers_.front().inputs; }
    int outputs() const { return readout_.outputs ? readout_.outputs : layers_.back().hidden; }
    int tokens() const { return tokens_; }
    const char* level() const { return level_; }
    size_t weight_bytes() const;
    // For the input and recurrent weights of every layer and the readout: whether zero blocks are left out.
    std::vector<bool> sparse_matrices() const;
    const Counters& counters() const { return counters_; }
    // The number of steps that `run` computes per chunk.
    int chunk_steps() const { return chunk_steps_; }
    // The index of the first value that is not finite, or -1.
    int64_t first_nonfinite(const float* values, size_t count) const;

    // log(sum(exp(scores))) of `outputs()` scores, and their k largest with their indices.
    double log_sum_exp(const float* scores) const { return table_->log_sum_exp(scores, outputs()); }
    void top(const float* scores, int k, int64_t* index, float* value) const;

    // Set states and trace to zero: those of the streams with a non-zero `mask`, (streams), or all if it is null.
    void reset(const uint8_t* mask = nullptr);
    void reset_counters();
    TeamSize& team_size() { return team_size_; }

    // Compute `steps` steps from `x`, (steps, streams, inputs), or from `ids`, (steps, streams), which the caller has
    // checked; the other is null. `out` is (steps, streams, outputs), or (streams, outputs) if `last`. Returns false if
    // a state is no longer finite. Streams whose `mask` is zero, (streams), keep their state, and their part of `out`
    // is not written.
    bool run(const float* x, const int64_t* ids, int steps, bool last, float* out, const uint8_t* mask = nullptr);
    // Compute one step of one stream from its active inputs, in ascending order.
    bool step_sparse(const int32_t* index, const float* value, int count, float* out);
    // Advance one stream by `steps` steps without input, or fewer after `capacity` steps that could not be skipped.
    // The output of the last step goes to its row of `out`, (streams, outputs).
    void skip(int stream, int64_t steps, float* out, Gap& gap);

    // The number of steps since the last reset of all streams, which is the index of the next step. skip() counts its
    // steps when it advances the last stream.
    int64_t time() const { return time_; }
    void set_time(int64_t time) { time_ = time; }

    // (streams, hidden). Accumulated sums are not part of the state: both functions make the next step compute them, so
    // that an engine and a copy of it continue with the same bits. For the same reason, both end lazy updates and forget
    // how many units recent steps have updated.
    void get_state(int layer, float* c, float* y);
    void set_state(int layer, const float* c, const float* y);
    // The trace, (streams, outputs), and the number of steps that it covers, (streams).
    void get_trace(double* trace, int64_t* steps) const;
    void set_trace(const double* trace, const int64_t* steps);

private:
    struct Layer {
        int inputs, hidden;
        int units;             // hidden, padded to a column block
        int gates;             // blocks of the weights: 3 or 4
        int first_sum;         // blocks of the sums before those that start with the input product
        Cell cell;
        WeightMatrix w;          // columns [r | u | z], or [i | f | g | o]
        WeightMatrix v;          // columns [z | r | u], or [i | f | g | o]
        Buffer<float> theta;   // infinite for padding units
        Buffer<float> rho;
        Buffer<float> bias;    // of the columns of w
        Buffer<float> bias_q;  // bias of q, the recurrent part of z if the reset gate acts after the product
        Buffer<float> c;       // (streams, units)
        Buffer<float> y[2];    // (streams, units); alternate, since other threads may still read the previous step
        Buffer<float> gated;   // (streams, units): r * y of the active units, in the order of their sparse vector
        Buffer<float> chunk_y; // (steps, streams, units): y of a chunk, the input of the next layer or the readout
        int current = 0;       // which y is the current one
        // Delta events only. The changes of y at the last step alternate like y; chunk_sent is to them what chunk_y is
        // to y. The product of y and v, one block per gate: (streams, gates * units).
        Buffer<float> sent[2], chunk_sent, recurrent;
        // The product of input and w plus bias, if the layer below has delta events: (streams, gates * units).
        Buffer<float> received;
        // Memory of `relaxation`, allocated by the first call of skip(): (3, units) and (units).
        Buffer<double> relaxation_rates;
        Buffer<float> relaxed;      // (units): the states after `relaxed_steps` steps, if this is not zero
        int64_t relaxed_steps = 0;
        Buffer<float> relaxation_gate;
        // Memory of lazy updates, (streams, groups), allocated by the first of them: the step at which the states of a
        // group of units were computed, and the next step at which it sends an event if nothing reaches it (`unknown`
        // until a leap asks for it).
        Buffer<int64_t> computed, due;

        bool delta() const { return cell.events == Events::delta; }
        size_t sums() const { return static_cast<size_t>(gates) * static_cast<size_t>(units); }
        Relaxation relaxation() {
            double* rates = relaxation_rates.data();
            return {rates, rates + units, rates + 2 * units, relaxation_gate.data()};
        }
        int groups() const { return units / sparse_block; }
    };
    struct Readout {
        int outputs = 0, columns = 0;
        WeightMatrix weights;
        Buffer<float> bias;
    };
    // Working memory of one thread. An item is the input of one stream at one step of a chunk.
    struct Scratch {
        Buffer<float> sum;        // (concurrent streams, 4 * units) as [q | r | u | z] or [i | f | g | o], or columns
        Buffer<float> projected;  // (items, gates * units): x W + b of a chunk
        Buffer<int32_t> index, chunk_index, integers, quantised_index;
        Buffer<float> value, chunk_value;
        Buffer<uint8_t> quantised_q;
        std::vector<SparseVector> active_units;   // one per concurrent stream
        std::vector<SparseVector> active_inputs;  // one per item of a chunk
        std::vector<const float*> rows;
        std::vector<int64_t> events;
        int64_t macs = 0;
        bool finite = true;
    };
    // The work of one thread: all units of some streams, or some units of all streams.
    struct Share {
        const Team& team;
        Scratch& scratch;
        int block;  // columns are divided in blocks of this size
        bool by_stream;
        int first_stream, last_stream;
        const uint8_t* mask;

        int streams() const { return last_stream - first_stream; }
        int begin(int columns) const { return by_stream ? 0 : team.begin(columns / block) * block; }
        int end(int columns) const { return by_stream ? columns : team.end(columns / block) * block; }
        bool runs(int stream) const { return mask == nullptr || mask[stream] != 0; }
        void meet() const {
            if (!by_stream) team.meet();
        }
        // Whether this thread counts MACs: threads that divide the units of a stream must count them once.
        bool counts_macs() const { return by_stream || team.index == 0; }
    };
    // The input of a layer over a chunk: dense rows, token ids, or the active inputs of one step of one stream.
    struct Input {
        const float* x = nullptr;  // (steps, streams, `stride`)
        size_t stride = 0;
        const int64_t* ids = nullptr;
        const SparseVector* sparse = nullptr;
        const float* changes = nullptr;  // of x since the previous step, if it is the output of delta events
    };

    // Floats between rows of projected inputs: an odd number of cache lines, as in PackedRows.
    static size_t projected_stride(int columns) {
        return static_cast<size_t>(columns / 16 % 2 == 0 ? columns + 16 : columns);
    }

    // The factor between the trace of a stream and its output, at a step of the current chunk.
    double trace_scale(int stream, int step) const {
        return options_.mean ? 1.0 / static_cast<double>(trace_steps_[static_cast<size_t>(stream)] + step + 1) : 1.0;
    }
    // Whether to recompute the accumulated sums of a stream at this step of the current chunk.
    bool refreshes(int stream, int step) const {
        return (age_[static_cast<size_t>(stream)] + step) % options_.refresh == 0;
    }
    bool launch(const Input& input, int steps, bool last, float* out, const uint8_t* mask);
    bool collect_counters();
    bool is_quiet(int stream);
    void settle(const Share& share, Layer& layer);
    int64_t silent_steps(const Share& share, int64_t limit);
    int64_t leap(const Share& share, int64_t limit, float* out, bool* sends);
    int advance_silent(const Share& share, Layer& layer, int64_t steps);
    int advance_stream(const Share& share, Layer& layer, const Input& input);
    void decay_trace(int stream, int64_t steps);
    void write_output(const Share& share, float* out);
    Share alone(const Team& team, int stream);
    bool start_lazy(const Share& share);
    void end_lazy(int stream);
    void end_lazy();
    int64_t leap_lazy(const Share& share, int64_t limit, float* out, bool* sends);
    bool step_lazy(const SparseVector& x, float* out);
    int advance_all_lazy(const Share& share, const SparseVector& x);
    int advance_lazy(const Share& share, Layer& layer, const SparseVector& x);
    void find_reached(const Layer& layer, const SparseVector& x, const SparseVector& active);
    const float* sum_reached(const Share& share, Layer& layer, const SparseVector& x, const SparseVector& active);
    void relax_group(Layer& layer, size_t stream, int group, int64_t steps);
    int64_t next_due(int stream);
    void run_chunk(const Share& share, Input input, int steps, bool last, float* out);
    const float* const* project(const Share& share, Layer& layer, const Input& input, int steps);
    const float* const* project_changes(const Share& share, Layer& layer, const Input& input, int steps);
    void advance(const Share& share, Layer& layer, int step, const float* const* projected);
    void add_changes(const Share& share, Layer& layer, int stream, const SparseVector& active, bool refresh, float* sum);
    void write_events(const Share& share, const Layer& layer, int steps, bool last, float* out);
    void write_readout(const Share& share, const Layer& layer, int steps, bool last, float* out);
    void add_product(const Rows& rows, int first, int columns, const SparseVector& x, Scratch& scratch,
                     float* sum) const;
    void fill_token_table(const int64_t* ids, size_t count, const uint8_t* mask);

    EngineOptions options_;
    const EngineTable* table_;
    const char* level_;
    std::vector<Layer> layers_;
    Readout readout_;
    // (streams, columns of the readout or units of the last layer). Double, because a sum or mean over millions of
    // steps would lose small terms in float32.
    Buffer<double> trace_;
    std::vector<int64_t> trace_steps_;  // (streams)
    // Delta events: steps since accumulated sums were computed; the readout of the last layer, (streams, columns); and
    // whether steps were skipped in it.
    std::vector<int64_t> age_;
    Buffer<float> readout_sum_;
    std::vector<char> readout_stale_;
    // Delta events: whether nothing was sent since the sums were computed, so that another computation has no effect.
    std::vector<char> sums_fresh_;
    // Lazy updates (lazy.cpp): whether the network is suitable, and for each stream whether its states are computed
    // lazily, whether a unit sent an event at the last step, its clock, and the fraction of units that recent steps
    // updated. Where this fraction is large, ordinary updates are faster.
    bool can_be_lazy_ = false;
    struct Lazy {
        bool on = false, sends = false;
        int64_t now = 0;
        double updated = 0;
    };
    std::vector<Lazy> lazy_;  // (streams)
    std::vector<uint64_t> reached_;  // scratch memory: one bit per group of units
    Buffer<float> embedding_;    // (tokens, inputs)
    Buffer<float> token_table_;  // (tokens, gates * units), filled when a token first occurs
    std::vector<char> token_filled_;
    int tokens_ = 0;
    std::vector<Scratch> scratch_;
    Counters counters_;
    int64_t time_ = 0;
    TeamSize team_size_;
    double element_work_ = 0;  // cost of the element-wise update of one stream and step, in multiply-adds
    int chunk_steps_ = 1;
};

}  // namespace egru::engine
