// The streaming engine: a trained stack of event-based GRUs, one step at a time, at the cost of its events.
//
// Levels, threads, streams and chunks change the time a step takes and never its result (given the level).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/kernels.hpp"
#include "engine/packed.hpp"
#include "common/threads.hpp"

namespace egru::engine {

// One layer as torch keeps it: blocks r, u, z of `hidden` rows. Addresses are read during construction only.
struct LayerSource {
    int inputs;
    int hidden;
    const float* weight_ih;  // (3 * hidden, inputs)
    const float* weight_hh;  // (3 * hidden, hidden)
    const float* bias_ih;    // (3 * hidden) or null
    const float* bias_hh;
    const float* theta;      // (hidden)
    const float* rho;        // (hidden), reset_scale
    Reset reset;
    bool after;
    float keep;
};

struct ReadoutSource {
    int inputs;
    int outputs;
    const float* weight;  // (outputs, inputs)
    const float* bias;    // (outputs) or null
};

struct EngineOptions {
    Weights weights = Weights::float32;
    int threads = 1;
    int streams = 1;
    bool has_trace = false;
    float trace = 0;  // decay per step
    size_t token_table_bytes = 0;  // keep x W per token if the whole table is no larger
};

struct Counters {
    int64_t steps = 0;
    int64_t macs = 0;
    std::vector<int64_t> events;  // per layer
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
    const Counters& counters() const { return counters_; }
    // Index of the first value that is not finite, or -1.
    int64_t first_bad(const float* values, size_t count) const;

    void reset();         // states, trace
    void reset_counters();

    // `x` is (steps, streams, inputs); or `ids` is (steps, streams), checked by the caller. `out` is
    // (steps, streams, outputs), or (streams, outputs) if only the last step is wanted. False if a state stopped being
    // finite.
    bool run(const float* x, const int64_t* ids, int steps, bool last, float* out);
    // One step of one stream from active inputs, ascending.
    bool step_list(const int32_t* index, const float* value, int count, float* out);

    void get_state(int layer, float* c, float* y) const;  // (streams, hidden)
    void set_state(int layer, const float* c, const float* y);
    void get_trace(float* trace) const;  // (streams, outputs)
    void set_trace(const float* trace);
    int chunk_steps() const { return chunk_steps_; }

private:
    struct Layer {
        int inputs, hidden, units;  // units: hidden, padded
        Cell cell;
        PackedRows w, v;        // rows of [r | u | z], rows of [z | r | u]
        Buffer<float> theta;    // infinite for padded units
        Buffer<float> rho;
        Buffer<float> start;    // biases [r | u | z]
        Buffer<float> start_q;  // bias of q, the recurrent part of z in the "after" form
        Buffer<float> c, y[2];  // (streams, units); y by turns, so that no thread overwrites what another still reads
        Buffer<float> gated;    // (streams, units): r * y of active units, by place in their list
        Buffer<float> record;   // y of a chunk, (steps, streams, units): what the next layer and the readout see
        int now = 0;            // which y is current
    };
    struct Readout {
        int outputs = 0, columns = 0;
        PackedRows weights;
        Buffer<float> bias;
    };
    // What one thread needs for itself.
    struct Scratch {
        Buffer<float> sum;        // (streams at once, 4 * units) as [q | r | u | z], or the readout's columns
        Buffer<float> projected;  // x W of a chunk, (items, 3 * units)
        Buffer<int32_t> index, chunk_index, integers, rounded_index;
        Buffer<float> value, chunk_value;
        Buffer<uint8_t> rounded_q;
        std::vector<List> lists;        // active units, one per stream at once
        std::vector<List> chunk_lists;  // active inputs, one per item of a chunk
        std::vector<const float*> rows;
        std::vector<int64_t> events;
        int64_t macs = 0;
        bool finite = true;
    };
    // The part of the work that falls to one thread: some streams entirely, or some units of all streams.
    struct Share {
        const Team& team;
        Scratch& scratch;
        int block;  // columns are divided in blocks of this many
        bool by_stream;
        int first_stream, last_stream;

        int streams() const { return last_stream - first_stream; }
        int begin(int columns) const { return by_stream ? 0 : team.begin(columns / block) * block; }
        int end(int columns) const { return by_stream ? columns : team.end(columns / block) * block; }
        void meet() const {
            if (!by_stream) team.meet();
        }
        bool counts() const { return by_stream || team.index == 0; }
    };
    // What enters a layer over a chunk: dense rows, tokens, or the active inputs of one step of one stream.
    struct Input {
        const float* x = nullptr;  // (steps, streams, `stride`)
        size_t stride = 0;
        const int64_t* ids = nullptr;
        const List* list = nullptr;
    };

    bool launch(const Input& input, int steps, bool last, float* out);
    void chunk(const Share& share, Input input, int steps, bool last, float* out);
    const float* const* project(const Share& share, const Layer& layer, const Input& input, int steps);
    void advance(const Share& share, Layer& layer, int step, const float* const* start);
    void write_events(const Share& share, const Layer& layer, int steps, bool last, float* out);
    void read_out(const Share& share, const Layer& layer, int steps, bool last, float* out);
    void add(const Rows& rows, int first, int columns, const List& list, Scratch& scratch, float* sum) const;
    void fill_tokens(const int64_t* ids, size_t count);

    EngineOptions options_;
    const EngineTable* table_;
    const char* level_;
    std::vector<Layer> layers_;
    Readout readout_;
    Buffer<float> trace_;        // (streams, columns of the readout or units of the last layer)
    Buffer<float> embedding_;    // (tokens, inputs)
    Buffer<float> token_table_;  // (tokens, 3 * units), filled as tokens are met
    std::vector<char> token_known_;
    int tokens_ = 0;
    std::vector<Scratch> scratch_;
    Counters counters_;
    int chunk_steps_ = 1;
};

}  // namespace egru::engine
