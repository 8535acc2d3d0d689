#include "engine/engine.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace egru::engine {
namespace {

constexpr int chunk_items = 64;   // steps times streams that share one reading of the input weights
constexpr int few_inputs = 16;    // input weights this small stay float32: rounding them would gain nothing
constexpr double dense_share = 0.5;  // of non-zero inputs, above which a dense product is faster
// Sharing a reading of all rows pays once the items together read this many times as many, each for itself.
constexpr int shared_share = 2;

const char* pick_level(const EngineTable** table) {
    *table = &EGRU_PICK(engine_table);
    return level_name(current_level());
}

// Floats from one row of projected inputs to the next: an odd number of cache lines, see PackedRows.
size_t projected_stride(int columns) { return static_cast<size_t>(columns / 16 % 2 == 0 ? columns + 16 : columns); }

void copy_blocks(const float* from, int blocks, int width, int padded, float* to) {
    if (from == nullptr) return;
    for (int b = 0; b < blocks; ++b)
        for (int i = 0; i < width; ++i) to[b * padded + i] += from[b * width + i];
}

}  // namespace

Engine::Engine(const std::vector<LayerSource>& sources, const EngineOptions& options) : options_(options) {
    level_ = pick_level(&table_);
    const size_t streams = static_cast<size_t>(options.streams);
    chunk_steps_ = std::max(1, chunk_items / options.streams);
    int units_max = 0, inputs_max = 0;
    for (const LayerSource& source : sources) {
        Layer layer;
        const int H = layer.hidden = source.hidden;
        const int U = layer.units = round_up(H, granule(options.weights));
        layer.inputs = source.inputs;
        const Weights input_kind = source.inputs <= few_inputs ? Weights::float32 : options.weights;
        const Block r{0, H, U}, u{H, H, U}, z{2 * H, H, U};
        layer.w = PackedRows(input_kind, table_->interleaved, source.weight_ih, source.inputs, {r, u, z});
        layer.v = PackedRows(options.weights, table_->interleaved, source.weight_hh, H, {z, r, u});
        const size_t units = static_cast<size_t>(U);
        layer.theta = Buffer<float>(units);
        std::fill_n(layer.theta.data(), U, std::numeric_limits<float>::infinity());
        std::copy_n(source.theta, H, layer.theta.data());
        layer.rho = Buffer<float>(units);
        std::copy_n(source.rho, H, layer.rho.data());
        layer.start = Buffer<float>(3 * units);
        layer.start_q = Buffer<float>(units);
        copy_blocks(source.bias_ih, 3, H, U, layer.start.data());
        copy_blocks(source.bias_hh, source.after ? 2 : 3, H, U, layer.start.data());
        if (source.after && source.bias_hh != nullptr) std::copy_n(source.bias_hh + 2 * H, H, layer.start_q.data());
        layer.cell = Cell{source.reset, source.after, source.keep, layer.theta.data(), layer.rho.data()};
        layer.c = Buffer<float>(streams * units);
        for (Buffer<float>& y : layer.y) y = Buffer<float>(streams * units);
        layer.gated = Buffer<float>(streams * units);
        layer.record = Buffer<float>(static_cast<size_t>(chunk_steps_) * streams * units);
        units_max = std::max(units_max, U);
        inputs_max = std::max({inputs_max, source.inputs, U});
        layers_.push_back(std::move(layer));
    }
    const size_t items = static_cast<size_t>(chunk_steps_) * streams;
    const size_t list = static_cast<size_t>(units_max) + 16, input_list = static_cast<size_t>(inputs_max) + 16;
    // Streams that advance together: one where threads divide the streams, all where they divide the units.
    const size_t together = static_cast<size_t>(std::min(options.streams, std::max(1, options.threads - 1)));
    scratch_ = std::vector<Scratch>(static_cast<size_t>(options.threads));
    for (Scratch& s : scratch_) {
        s.sum = Buffer<float>(together * 4 * static_cast<size_t>(units_max));
        s.projected = Buffer<float>(items * projected_stride(3 * units_max));
        s.index = Buffer<int32_t>(together * list);
        s.value = Buffer<float>(together * list);
        s.chunk_index = Buffer<int32_t>(items * input_list);
        s.chunk_value = Buffer<float>(items * input_list);
        s.integers = Buffer<int32_t>(4 * static_cast<size_t>(units_max));
        s.rounded_index = Buffer<int32_t>(input_list);
        s.rounded_q = Buffer<uint8_t>(input_list);
        for (size_t i = 0; i < together; ++i)
            s.lists.push_back(List{s.index.data() + i * list, s.value.data() + i * list, 0});
        for (size_t i = 0; i < items; ++i)
            s.chunk_lists.push_back(List{s.chunk_index.data() + i * input_list, s.chunk_value.data() + i * input_list, 0});
        s.rows.resize(items);
        s.events.resize(layers_.size());
    }
    if (options.has_trace) trace_ = Buffer<float>(streams * static_cast<size_t>(layers_.back().units));
    reset_counters();
}

void Engine::set_embedding(const float* table, int tokens, int width) {
    const size_t count = static_cast<size_t>(tokens) * static_cast<size_t>(width);
    embedding_ = Buffer<float>(count);
    std::copy_n(table, count, embedding_.data());
    tokens_ = tokens;
    const size_t entries = static_cast<size_t>(tokens) * 3 * static_cast<size_t>(layers_.front().units);
    if (entries * sizeof(float) <= options_.token_table_bytes) {
        token_table_ = Buffer<float>(entries, true);
        token_known_.assign(static_cast<size_t>(tokens), 0);
    }
}

void Engine::set_readout(const ReadoutSource& source) {
    readout_.outputs = source.outputs;
    readout_.columns = round_up(source.outputs, granule(options_.weights));
    const size_t columns = static_cast<size_t>(readout_.columns);
    readout_.weights = PackedRows(options_.weights, table_->interleaved, source.weight, source.inputs,
                                  {Block{0, source.outputs, readout_.columns}});
    readout_.bias = Buffer<float>(columns);
    if (source.bias != nullptr) std::copy_n(source.bias, source.outputs, readout_.bias.data());
    for (Scratch& s : scratch_) {
        if (s.sum.size() < columns) s.sum = Buffer<float>(columns);
        if (s.integers.size() < columns) s.integers = Buffer<int32_t>(columns);
        const size_t items = static_cast<size_t>(chunk_steps_) * static_cast<size_t>(options_.streams);
        if (s.projected.size() < items * columns) s.projected = Buffer<float>(items * columns);
    }
    if (options_.has_trace) trace_ = Buffer<float>(static_cast<size_t>(options_.streams) * columns);
}

size_t Engine::weight_bytes() const {
    size_t bytes = readout_.weights.bytes();
    for (const Layer& layer : layers_) bytes += layer.w.bytes() + layer.v.bytes();
    return bytes;
}

int64_t Engine::first_bad(const float* values, size_t count) const {
    if (table_->finite(values, count)) return -1;
    for (size_t i = 0; i < count; ++i)
        if (!std::isfinite(values[i])) return static_cast<int64_t>(i);
    return -1;
}

// ---- running --------------------------------------------------------------------------------------------------------

bool Engine::run(const float* x, const int64_t* ids, int steps, bool last, float* out) {
    const size_t streams = static_cast<size_t>(options_.streams);
    if (ids != nullptr) fill_tokens(ids, static_cast<size_t>(steps) * streams);
    for (int from = 0; from < steps; from += chunk_steps_) {
        const int count = std::min(chunk_steps_, steps - from);
        const size_t offset = static_cast<size_t>(from) * streams;
        Input input;
        input.stride = static_cast<size_t>(inputs());
        input.x = x == nullptr ? nullptr : x + offset * input.stride;
        input.ids = ids == nullptr ? nullptr : ids + offset;
        if (!launch(input, count, last, last ? out : out + offset * static_cast<size_t>(outputs()))) return false;
    }
    return true;
}

bool Engine::step_list(const int32_t* index, const float* value, int count, float* out) {
    const List list{const_cast<int32_t*>(index), const_cast<float*>(value), count};
    Input input;
    input.list = &list;
    return launch(input, 1, false, out);
}

bool Engine::launch(const Input& input, int steps, bool last, float* out) {
    const auto body = [&](const Team& team) {
        Scratch& scratch = scratch_[static_cast<size_t>(team.index)];
        const bool by_stream = options_.streams >= team.size;
        const Share share{team, scratch, granule(options_.weights), by_stream, by_stream ? team.begin(options_.streams) : 0,
                          by_stream ? team.end(options_.streams) : options_.streams};
        chunk(share, input, steps, last, out);
    };
    if (options_.threads == 1) {
        Barrier alone(1);
        body(Team{0, 1, &alone});
    } else {
        run_team(options_.threads, body);
    }
    bool finite = true;
    for (Scratch& s : scratch_) {
        counters_.macs += s.macs;
        for (size_t l = 0; l < layers_.size(); ++l) counters_.events[l] += s.events[l];
        finite = finite && s.finite;
        s.macs = 0;
        std::fill(s.events.begin(), s.events.end(), 0);
        s.finite = true;
    }
    for (Layer& layer : layers_) layer.now = (layer.now + steps) % 2;
    counters_.steps += steps;
    return finite;
}

void Engine::chunk(const Share& share, Input input, int steps, bool last, float* out) {
    for (size_t l = 0; l < layers_.size(); ++l) {
        Layer& layer = layers_[l];
        const float* const* start = project(share, layer, input, steps);
        for (int t = 0; t < steps; ++t) advance(share, layer, t, start + t * share.streams());
        input = Input{};
        input.x = layer.record.data();
        input.stride = static_cast<size_t>(layer.units);
    }
    if (readout_.outputs != 0)
        read_out(share, layers_.back(), steps, last, out);
    else
        write_events(share, layers_.back(), steps, last, out);
}

void Engine::add(const Rows& rows, int first, int columns, const List& list, Scratch& scratch, float* sum) const {
    if (list.count == 0) return;
    if (rows.kind != Weights::int8) {
        table_->add_rows(rows, first, columns, list, sum);
        return;
    }
    Rounded rounded{scratch.rounded_index.data(), scratch.rounded_q.data(), 0, 0, 0};
    table_->round(list, &rounded);
    table_->add_rows_int8(rows, first, columns, rounded, scratch.integers.data(), sum);
}

// x W + b for every item of the chunk, this share's units only: one address per item, step by step, stream by stream.
const float* const* Engine::project(const Share& share, const Layer& layer, const Input& input, int steps) {
    Scratch& scratch = share.scratch;
    const int U = layer.units, from = share.begin(U), to = share.end(U), items = steps * share.streams();
    const size_t row = projected_stride(3 * U);
    std::vector<const float*>& starts = scratch.rows;
    if (input.ids != nullptr && token_table_.size() != 0) {
        for (int i = 0; i < items; ++i) {
            const int t = i / share.streams(), s = share.first_stream + i % share.streams();
            starts[i] = token_table_.data() + static_cast<size_t>(input.ids[t * options_.streams + s]) * 3 * U;
        }
        return starts.data();
    }
    int64_t active = 0;
    for (int i = 0; i < items; ++i) {
        const int t = i / share.streams(), s = share.first_stream + i % share.streams();
        const size_t place = static_cast<size_t>(t) * options_.streams + s;
        if (input.list != nullptr) {
            active = input.list->count;
            break;
        }
        List& list = scratch.chunk_lists[i];
        starts[i] = input.ids != nullptr ? embedding_.data() + static_cast<size_t>(input.ids[place]) * layer.inputs
                                         : input.x + place * input.stride;
        list.count = table_->scan(starts[i], layer.inputs, list.index, list.value);
        active += list.count;
    }
    const List* lists = input.list != nullptr ? input.list : scratch.chunk_lists.data();
    if (share.counts()) scratch.macs += active * 3 * layer.hidden;

    const Rows rows = layer.w.view();
    const int blocks = to - from == U ? 1 : 3, width = blocks == 1 ? 3 * U : to - from;
    const bool dense = static_cast<double>(active) > dense_share * items * layer.inputs;
    const bool shared = items > 1 && active > shared_share * static_cast<int64_t>(layer.inputs);
    // One item: where advance() wants it, behind the block of q.
    float* out = items == 1 ? scratch.sum.data() + U : scratch.projected.data();
    for (int b = 0; b < blocks; ++b) {
        const int first = b * U + from;
        if (shared && rows.kind != Weights::int8) {
            if (dense)
                table_->project_dense(rows, first, width, starts.data(), items, layer.start.data() + first, out + first,
                                      row);
            else
                table_->project(rows, first, width, lists, items, layer.start.data() + first,
                                out + first, row);
            continue;
        }
        for (int i = 0; i < items; ++i) {
            float* sum = out + i * row + first;
            std::copy_n(layer.start.data() + first, width, sum);
            add(rows, first, width, lists[i], scratch, sum);
        }
    }
    for (int i = 0; i < items; ++i) starts[i] = out + i * row;
    return starts.data();
}

// One step of one layer.
void Engine::advance(const Share& share, Layer& layer, int step, const float* const* start) {
    Scratch& scratch = share.scratch;
    const int U = layer.units, from = share.begin(U), to = share.end(U), width = to - from;
    const bool whole = width == U, after = layer.cell.after;
    const int now = (layer.now + step) % 2;
    const Rows v = layer.v.view();  // columns [z | r | u], sums [q | r | u | z]
    const int together = share.by_stream ? 1 : share.streams();

    for (int s0 = share.first_stream; s0 < share.last_stream; s0 += together) {
        for (int i = 0; i < together; ++i) {
            const size_t at = static_cast<size_t>(s0 + i) * U;
            float* sum = scratch.sum.data() + static_cast<size_t>(i) * 4 * U;
            const float* given = start[s0 + i - share.first_stream];
            List& list = scratch.lists[i];
            list.count = table_->scan(layer.y[now].data() + at, U, list.index, list.value);
            if (given != sum + U)
                for (int b = 0; b < 3; ++b) std::copy_n(given + b * U + from, width, sum + (b + 1) * U + from);
            if (after) std::copy_n(layer.start_q.data() + from, width, sum + from);
            if (whole) {
                const int first = after ? 0 : U;
                add(v, first, 3 * U - first, list, scratch, sum + first);
            } else {
                for (int b = after ? 0 : 1; b < 3; ++b)
                    add(v, b * U + from, width, list, scratch, sum + b * U + from);
            }
            if (!after) {
                const int32_t* end = list.index + list.count;
                const int k0 = static_cast<int>(std::lower_bound(list.index, const_cast<int32_t*>(end), from) - list.index);
                const int k1 = static_cast<int>(std::lower_bound(list.index, const_cast<int32_t*>(end), to) - list.index);
                table_->gate(list, k0, k1, sum + U, layer.gated.data() + at);
            }
            if (share.counts()) scratch.macs += static_cast<int64_t>(list.count) * 3 * layer.hidden + 3 * layer.hidden;
        }
        if (!after) {
            share.meet();  // every unit's reset gate is needed in front of V_z
            for (int i = 0; i < together; ++i) {
                const size_t at = static_cast<size_t>(s0 + i) * U;
                const List gated{scratch.lists[i].index, layer.gated.data() + at, scratch.lists[i].count};
                add(v, from, width, gated, scratch, scratch.sum.data() + static_cast<size_t>(i) * 4 * U + 3 * U + from);
            }
        }
        for (int i = 0; i < together; ++i) {
            const size_t at = static_cast<size_t>(s0 + i) * U;
            const float* sum = scratch.sum.data() + static_cast<size_t>(i) * 4 * U;
            float* y = layer.y[1 - now].data() + at;
            const int events =
                table_->update(layer.cell, from, to, U, sum, layer.c.data() + at, layer.y[now].data() + at, y);
            scratch.finite = scratch.finite && events >= 0;
            scratch.events[static_cast<size_t>(&layer - layers_.data())] += std::max(events, 0);
            float* record = layer.record.data() + (static_cast<size_t>(step) * options_.streams + s0 + i) * U;
            std::copy_n(y + from, width, record + from);
        }
    }
    share.meet();
}

// ---- what comes out -------------------------------------------------------------------------------------------------

void Engine::write_events(const Share& share, const Layer& layer, int steps, bool last, float* out) {
    const int U = layer.units, to = std::min(share.end(U), layer.hidden), from = std::min(share.begin(U), to);
    for (int t = 0; t < steps; ++t)
        for (int s = share.first_stream; s < share.last_stream; ++s) {
            const size_t place = static_cast<size_t>(t) * options_.streams + s;
            const float* y = layer.record.data() + place * U;
            if (options_.has_trace) {
                float* trace = trace_.data() + static_cast<size_t>(s) * U;
                for (int j = from; j < to; ++j) trace[j] = options_.trace * trace[j] + y[j];
                y = trace;
            }
            const size_t row = last ? static_cast<size_t>(s) : place;
            if (!last || t == steps - 1) std::copy(y + from, y + to, out + row * layer.hidden + from);
        }
}

// Readout of the events, or of their trace: since it is linear, the trace is kept behind it, where it costs one decay
// per output and step instead of a dense product.
void Engine::read_out(const Share& share, const Layer& layer, int steps, bool last, float* out) {
    Scratch& scratch = share.scratch;
    const int U = layer.units, N = readout_.outputs, columns = readout_.columns;
    const int from = share.begin(columns), to = share.end(columns), shown = std::min(to, N);
    const Rows rows = readout_.weights.view();
    const float* bias = readout_.bias.data();
    const int first_step = last && !options_.has_trace ? steps - 1 : 0;
    for (int t = first_step; t < steps; ++t)
        for (int s = share.first_stream; s < share.last_stream; ++s) {
            const size_t place = static_cast<size_t>(t) * options_.streams + s;
            List& list = scratch.lists[0];
            list.count = table_->scan(layer.record.data() + place * U, U, list.index, list.value);
            if (share.counts()) scratch.macs += static_cast<int64_t>(list.count) * N;
            float* sum = scratch.sum.data();
            if (options_.has_trace) {
                sum = trace_.data() + static_cast<size_t>(s) * columns;
                for (int j = from; j < to; ++j) sum[j] *= options_.trace;
            } else {
                std::copy(bias + from, bias + to, sum + from);
            }
            add(rows, from, to - from, list, scratch, sum + from);
            if (last && t != steps - 1) continue;
            float* row = out + (last ? static_cast<size_t>(s) : place) * N;
            for (int j = from; j < shown; ++j) row[j] = options_.has_trace ? sum[j] + bias[j] : sum[j];
        }
}

void Engine::fill_tokens(const int64_t* ids, size_t count) {
    if (token_table_.size() == 0) return;
    const Layer& layer = layers_.front();
    const size_t row = 3 * static_cast<size_t>(layer.units);
    Scratch& scratch = scratch_.front();
    List list = scratch.chunk_lists.front();
    for (size_t i = 0; i < count; ++i) {
        const size_t id = static_cast<size_t>(ids[i]);
        if (token_known_[id]) continue;
        float* sum = token_table_.data() + id * row;
        list.count = table_->scan(embedding_.data() + id * layer.inputs, layer.inputs, list.index, list.value);
        std::copy_n(layer.start.data(), row, sum);
        add(layer.w.view(), 0, static_cast<int>(row), list, scratch, sum);
        counters_.macs += static_cast<int64_t>(list.count) * 3 * layer.hidden;
        token_known_[id] = 1;
    }
}

// ---- state ----------------------------------------------------------------------------------------------------------

void Engine::reset() {
    for (Layer& layer : layers_) {
        std::fill_n(layer.c.data(), layer.c.size(), 0.0f);
        for (Buffer<float>& y : layer.y) std::fill_n(y.data(), y.size(), 0.0f);
        layer.now = 0;
    }
    if (trace_.size() != 0) std::fill_n(trace_.data(), trace_.size(), 0.0f);
}

void Engine::reset_counters() {
    counters_ = Counters{};
    counters_.events.assign(layers_.size(), 0);
}

void Engine::get_state(int index, float* c, float* y) const {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    for (int s = 0; s < options_.streams; ++s) {
        const size_t from = static_cast<size_t>(s) * layer.units, to = static_cast<size_t>(s) * layer.hidden;
        std::copy_n(layer.c.data() + from, layer.hidden, c + to);
        std::copy_n(layer.y[layer.now].data() + from, layer.hidden, y + to);
    }
}

void Engine::set_state(int index, const float* c, const float* y) {
    Layer& layer = layers_[static_cast<size_t>(index)];
    for (int s = 0; s < options_.streams; ++s) {
        const size_t to = static_cast<size_t>(s) * layer.units, from = static_cast<size_t>(s) * layer.hidden;
        std::copy_n(c + from, layer.hidden, layer.c.data() + to);
        std::copy_n(y + from, layer.hidden, layer.y[layer.now].data() + to);
    }
}

void Engine::get_trace(float* trace) const {
    const size_t width = trace_.size() / static_cast<size_t>(options_.streams);
    for (int s = 0; s < options_.streams; ++s) std::copy_n(trace_.data() + s * width, outputs(), trace + s * outputs());
}

void Engine::set_trace(const float* trace) {
    const size_t width = trace_.size() / static_cast<size_t>(options_.streams);
    for (int s = 0; s < options_.streams; ++s) std::copy_n(trace + s * outputs(), outputs(), trace_.data() + s * width);
}

}  // namespace egru::engine
