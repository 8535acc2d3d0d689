// Construction, state and counters of the streaming engine.
#include "engine/engine.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

namespace egru::engine {
namespace {

constexpr int chunk_items = 64;         // steps times streams that share a pass over the input weights
constexpr int max_float32_inputs = 16;  // input weights of smaller layers stay float32: quantising them gains nothing
constexpr double largest_lazy_reach = 0.5;  // fraction of units that an event reaches, for lazy updates to be faster
constexpr double unit_work = 40;        // the update of a unit takes as long as about this many multiply-adds

void add_blocks(const float* from, int blocks, int width, int padded, float* to) {
    if (from == nullptr) return;
    for (int b = 0; b < blocks; ++b)
        for (int i = 0; i < width; ++i) to[b * padded + i] += from[b * width + i];
}

}  // namespace

Engine::Engine(const std::vector<LayerSource>& sources, const EngineOptions& options)
    : options_(options), team_size_(options.threads) {
    table_ = &EGRU_PICK(engine_table);
    level_ = level_name(current_level());
    const size_t streams = static_cast<size_t>(options.streams);
    chunk_steps_ = std::max(1, chunk_items / options.streams);
    int units_max = 0, inputs_max = 0;
    for (const LayerSource& source : sources) {
        Layer layer;
        const int H = layer.hidden = source.hidden;
        const int U = layer.units = round_up(H, column_block(options.weights));
        layer.inputs = source.inputs;
        const WeightFormat input_format = source.inputs <= max_float32_inputs ? WeightFormat::float32 : options.weights;
        layer.gates = source.lstm ? 4 : 3;
        layer.first_sum = source.lstm ? 0 : 1;
        const Block r{0, H, U}, u{H, H, U}, z{2 * H, H, U}, o{3 * H, H, U};  // i, f, g, o of an LSTM
        const std::vector<Block> w = source.lstm ? std::vector<Block>{r, u, z, o} : std::vector<Block>{r, u, z};
        const std::vector<Block> v = source.lstm ? w : std::vector<Block>{z, r, u};
        layer.w = WeightMatrix(input_format, *table_, source.weight_ih, source.inputs, w, options.packing, true);
        layer.v = WeightMatrix(options.weights, *table_, source.weight_hh, H, v, options.packing, false);
        const size_t units = static_cast<size_t>(U);
        layer.theta = Buffer<float>(units);
        std::fill_n(layer.theta.data(), U, std::numeric_limits<float>::infinity());
        std::copy_n(source.theta, H, layer.theta.data());
        layer.rho = Buffer<float>(units);
        std::copy_n(source.rho, H, layer.rho.data());
        layer.bias = Buffer<float>(static_cast<size_t>(layer.gates) * units);
        layer.bias_q = Buffer<float>(units);
        add_blocks(source.bias_ih, layer.gates, H, U, layer.bias.data());
        add_blocks(source.bias_hh, source.after ? 2 : layer.gates, H, U, layer.bias.data());
        if (source.after && source.bias_hh != nullptr) std::copy_n(source.bias_hh + 2 * H, H, layer.bias_q.data());
        layer.cell = Cell{source.events, source.reset, source.after, source.lstm, source.compare_output, source.keep,
                           layer.theta.data(), layer.rho.data()};
        layer.c = Buffer<float>(streams * units);
        for (Buffer<float>& y : layer.y) y = Buffer<float>(streams * units);
        layer.gated = Buffer<float>(streams * units);
        if (layer.delta()) {
            for (Buffer<float>& sent : layer.sent) sent = Buffer<float>(streams * units);
            layer.chunk_sent = Buffer<float>(static_cast<size_t>(chunk_steps_) * streams * units);
            layer.recurrent = Buffer<float>(streams * layer.sums());
        }
        if (!layers_.empty() && layers_.back().delta()) layer.received = Buffer<float>(streams * layer.sums());
        layer.chunk_y = Buffer<float>(static_cast<size_t>(chunk_steps_) * streams * units);
        units_max = std::max(units_max, U);
        inputs_max = std::max({inputs_max, source.inputs, U});
        element_work_ += unit_work * H;
        layers_.push_back(std::move(layer));
    }
    const size_t items = static_cast<size_t>(chunk_steps_) * streams;
    const size_t unit_entries = static_cast<size_t>(units_max) + 16;    // find_nonzero may write 16 entries more
    const size_t input_entries = static_cast<size_t>(inputs_max) + 16;
    // A thread advances one stream at a time if threads divide the streams, all streams if they divide the units.
    const size_t at_once = static_cast<size_t>(std::min(options.streams, std::max(1, options.threads - 1)));
    scratch_ = std::vector<Scratch>(static_cast<size_t>(options.threads));
    for (Scratch& s : scratch_) {
        s.sum = Buffer<float>(at_once * 4 * static_cast<size_t>(units_max));
        s.projected = Buffer<float>(items * projected_stride(4 * units_max));
        s.index = Buffer<int32_t>(at_once * unit_entries);
        s.value = Buffer<float>(at_once * unit_entries);
        s.chunk_index = Buffer<int32_t>(items * input_entries);
        s.chunk_value = Buffer<float>(items * input_entries);
        s.integers = Buffer<int32_t>(4 * static_cast<size_t>(units_max));
        s.quantised_index = Buffer<int32_t>(input_entries);
        s.quantised_q = Buffer<uint8_t>(input_entries);
        for (size_t i = 0; i < at_once; ++i)
            s.active_units.push_back(
                SparseVector{s.index.data() + i * unit_entries, s.value.data() + i * unit_entries, 0});
        for (size_t i = 0; i < items; ++i)
            s.active_inputs.push_back(
                SparseVector{s.chunk_index.data() + i * input_entries, s.chunk_value.data() + i * input_entries, 0});
        s.rows.resize(items);
        s.events.resize(layers_.size());
    }
    if (options.has_trace) trace_ = Buffer<double>(streams * static_cast<size_t>(layers_.back().units));
    trace_steps_.assign(streams, 0);
    age_.assign(streams, 0);
    sums_fresh_.assign(streams, 0);
    readout_stale_.assign(streams, 0);
    lazy_.resize(streams);
    reached_.resize((static_cast<size_t>(units_max) / sparse_block + 63) / 64);
    can_be_lazy_ = options.packing != Packing::dense &&
                   std::none_of(layers_.begin(), layers_.end(), [](const Layer& layer) { return layer.delta(); }) &&
                   std::any_of(layers_.begin(), layers_.end(), [](const Layer& layer) {
                       return std::max(layer.w.mean_reach(), layer.v.mean_reach()) <= largest_lazy_reach;
                   });
    reset_counters();
}

void Engine::set_embedding(const float* table, int tokens, int width) {
    const size_t count = static_cast<size_t>(tokens) * static_cast<size_t>(width);
    embedding_ = Buffer<float>(count);
    std::copy_n(table, count, embedding_.data());
    tokens_ = tokens;
    const size_t entries = static_cast<size_t>(tokens) * static_cast<size_t>(layers_.front().gates * layers_.front().units);
    if (entries * sizeof(float) <= options_.token_table_bytes) {
        token_table_ = Buffer<float>(entries, true);
        token_filled_.assign(static_cast<size_t>(tokens), 0);
    }
}

void Engine::set_readout(const ReadoutSource& source) {
    readout_.outputs = source.outputs;
    readout_.columns = round_up(source.outputs, column_block(options_.weights));
    const size_t columns = static_cast<size_t>(readout_.columns);
    readout_.weights = WeightMatrix(options_.weights, *table_, source.weight, source.inputs,
                                    {Block{0, source.outputs, readout_.columns}}, options_.packing, false);
    readout_.bias = Buffer<float>(columns);
    if (source.bias != nullptr) std::copy_n(source.bias, source.outputs, readout_.bias.data());
    for (Scratch& s : scratch_) {
        if (s.sum.size() < columns) s.sum = Buffer<float>(columns);
        if (s.integers.size() < columns) s.integers = Buffer<int32_t>(columns);
        const size_t items = static_cast<size_t>(chunk_steps_) * static_cast<size_t>(options_.streams);
        if (s.projected.size() < items * columns) s.projected = Buffer<float>(items * columns);
    }
    if (options_.has_trace) trace_ = Buffer<double>(static_cast<size_t>(options_.streams) * columns);
    if (layers_.back().delta()) readout_sum_ = Buffer<float>(static_cast<size_t>(options_.streams) * columns);
}

size_t Engine::weight_bytes() const {
    size_t bytes = readout_.weights.bytes();
    for (const Layer& layer : layers_) bytes += layer.w.bytes() + layer.v.bytes();
    return bytes;
}

std::vector<bool> Engine::sparse_matrices() const {
    std::vector<bool> sparse;
    for (const Layer& layer : layers_) {
        sparse.push_back(layer.w.is_sparse());
        sparse.push_back(layer.v.is_sparse());
    }
    if (readout_.outputs != 0) sparse.push_back(readout_.weights.is_sparse());
    return sparse;
}

int64_t Engine::first_nonfinite(const float* values, size_t count) const {
    if (table_->all_finite(values, count)) return -1;
    for (size_t i = 0; i < count; ++i)
        if (!std::isfinite(values[i])) return static_cast<int64_t>(i);
    return -1;
}

// ---- state ---------------------------------------------------------------------------------------------------------

void Engine::reset(const uint8_t* mask) {
    const size_t streams = static_cast<size_t>(options_.streams);
    const auto clear = [streams](auto& buffer, size_t stream) {
        const size_t width = buffer.size() / streams;
        std::fill_n(buffer.data() + stream * width, width, 0);
    };
    for (size_t s = 0; s < streams; ++s) {
        if (mask != nullptr && mask[s] == 0) continue;
        for (Layer& layer : layers_) {
            clear(layer.c, s);
            for (Buffer<float>& y : layer.y) clear(y, s);
        }
        age_[s] = 0;
        sums_fresh_[s] = 0;
        lazy_[s] = Lazy{};
        clear(trace_, s);
        trace_steps_[s] = 0;
    }
    if (mask == nullptr) time_ = 0;
}

void Engine::reset_counters() {
    counters_ = Counters{};
    counters_.events.assign(layers_.size(), 0);
}

void Engine::get_state(int index, float* c, float* y) {
    end_lazy();
    std::fill(lazy_.begin(), lazy_.end(), Lazy{});
    std::fill(age_.begin(), age_.end(), 0);
    std::fill(sums_fresh_.begin(), sums_fresh_.end(), 0);
    const Layer& layer = layers_[static_cast<size_t>(index)];
    for (int s = 0; s < options_.streams; ++s) {
        const size_t from = static_cast<size_t>(s) * layer.units, to = static_cast<size_t>(s) * layer.hidden;
        std::copy_n(layer.c.data() + from, layer.hidden, c + to);
        std::copy_n(layer.y[layer.current].data() + from, layer.hidden, y + to);
    }
}

void Engine::set_state(int index, const float* c, const float* y) {
    end_lazy();
    std::fill(lazy_.begin(), lazy_.end(), Lazy{});
    std::fill(age_.begin(), age_.end(), 0);
    std::fill(sums_fresh_.begin(), sums_fresh_.end(), 0);
    Layer& layer = layers_[static_cast<size_t>(index)];
    for (int s = 0; s < options_.streams; ++s) {
        const size_t to = static_cast<size_t>(s) * layer.units, from = static_cast<size_t>(s) * layer.hidden;
        std::copy_n(c + from, layer.hidden, layer.c.data() + to);
        std::copy_n(y + from, layer.hidden, layer.y[layer.current].data() + to);
    }
}

void Engine::get_trace(double* trace, int64_t* steps) const {
    const size_t width = trace_.size() / static_cast<size_t>(options_.streams);
    for (int s = 0; s < options_.streams; ++s) std::copy_n(trace_.data() + s * width, outputs(), trace + s * outputs());
    std::copy(trace_steps_.begin(), trace_steps_.end(), steps);
}

void Engine::set_trace(const double* trace, const int64_t* steps) {
    const size_t width = trace_.size() / static_cast<size_t>(options_.streams);
    for (int s = 0; s < options_.streams; ++s) std::copy_n(trace + s * outputs(), outputs(), trace_.data() + s * width);
    std::copy_n(steps, options_.streams, trace_steps_.begin());
}

void Engine::top(const float* scores, int k, int64_t* index, float* value) const {
    constexpr int most_inserted = 64;
    if (k <= most_inserted) return table_->top(scores, outputs(), k, index, value);
    std::vector<int64_t> order(static_cast<size_t>(outputs()));
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + k, order.end(), [scores](int64_t a, int64_t b) {
        return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    });
    for (int i = 0; i < k; ++i) value[i] = scores[index[i] = order[static_cast<size_t>(i)]];
}

}  // namespace egru::engine
