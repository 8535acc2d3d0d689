// The computation of the streaming engine: input product, recurrent step, readout.
#include "engine/engine.hpp"

#include <algorithm>

namespace egru::engine {
namespace {

constexpr double dense_density = 0.5;  // density of the input above which a dense product is faster
// Items share one pass over all rows if separate passes would read more than this many times as many rows.
constexpr int shared_reads = 2;

}  // namespace

bool Engine::run(const float* x, const int64_t* ids, int steps, bool last, float* out, const uint8_t* mask) {
    const size_t streams = static_cast<size_t>(options_.streams);
    end_lazy();
    if (ids != nullptr) fill_token_table(ids, static_cast<size_t>(steps) * streams, mask);
    for (int from = 0; from < steps; from += chunk_steps_) {
        const int count = std::min(chunk_steps_, steps - from);
        const size_t offset = static_cast<size_t>(from) * streams;
        Input input;
        input.stride = static_cast<size_t>(inputs());
        input.x = x == nullptr ? nullptr : x + offset * input.stride;
        input.ids = ids == nullptr ? nullptr : ids + offset;
        float* part = last ? out : out + offset * static_cast<size_t>(outputs());
        if (!launch(input, count, last, part, mask)) return false;
    }
    return true;
}

bool Engine::step_sparse(const int32_t* index, const float* value, int count, float* out) {
    const SparseVector x{const_cast<int32_t*>(index), const_cast<float*>(value), count};
    if (lazy_.front().on) return step_lazy(x, out);
    Input input;
    input.sparse = &x;
    return launch(input, 1, false, out, nullptr);
}

bool Engine::launch(const Input& input, int steps, bool last, float* out, const uint8_t* mask) {
    const int streams = options_.streams;
    const auto body = [&](const Team& team) {
        Scratch& scratch = scratch_[static_cast<size_t>(team.index)];
        const bool by_stream = streams >= team.size;
        const int first_stream = by_stream ? team.begin(streams) : 0;
        const int last_stream = by_stream ? team.end(streams) : streams;
        const Share share{team, scratch, column_block(options_.weights), by_stream, first_stream, last_stream, mask};
        run_chunk(share, input, steps, last, out);
    };
    const int64_t active = mask == nullptr ? streams : streams - std::count(mask, mask + streams, 0);
    const int64_t macs = counters_.macs;
    bool finite = true;
    team_size_.run(steps, [&](int threads) {
        if (threads == 1) {
            Barrier alone(1);
            body(Team{0, 1, &alone});
        } else {
            run_team(threads, body);
        }
        finite = collect_counters();
        return static_cast<double>(counters_.macs - macs) + element_work_ * static_cast<double>(active * steps);
    });
    for (Layer& layer : layers_) layer.current = (layer.current + steps) % 2;
    for (int s = 0; s < streams; ++s) {
        if (mask != nullptr && mask[s] == 0) continue;
        trace_steps_[static_cast<size_t>(s)] += steps;
        age_[static_cast<size_t>(s)] += steps;
        sums_fresh_[static_cast<size_t>(s)] = 0;
        readout_stale_[static_cast<size_t>(s)] = last && !options_.has_trace;
    }
    counters_.steps += active * steps;
    time_ += steps;
    return finite;
}

// Add the counters of all threads to those of the engine. Returns whether all states are finite.
bool Engine::collect_counters() {
    bool finite = true;
    for (Scratch& s : scratch_) {
        counters_.macs += s.macs;
        for (size_t l = 0; l < layers_.size(); ++l) counters_.events[l] += s.events[l];
        finite = finite && s.finite;
        s.macs = 0;
        std::fill(s.events.begin(), s.events.end(), 0);
        s.finite = true;
    }
    return finite;
}

void Engine::run_chunk(const Share& share, Input input, int steps, bool last, float* out) {
    for (size_t l = 0; l < layers_.size(); ++l) {
        Layer& layer = layers_[l];
        const float* const* projected = project(share, layer, input, steps);
        for (int t = 0; t < steps; ++t) advance(share, layer, t, projected + t * share.streams());
        input = Input{};
        input.x = layer.chunk_y.data();
        input.stride = static_cast<size_t>(layer.units);
        input.changes = layer.delta() ? layer.chunk_sent.data() : nullptr;
    }
    if (readout_.outputs != 0)
        write_readout(share, layers_.back(), steps, last, out);
    else
        write_events(share, layers_.back(), steps, last, out);
}

void Engine::add_product(const Rows& rows, int first, int columns, const SparseVector& x, Scratch& scratch,
                         float* sum) const {
    if (x.count == 0) return;
    if (rows.format != WeightFormat::int8) {
        (rows.sections ? table_->add_blocks : table_->add_rows)(rows, first, columns, x, sum);
        return;
    }
    QuantisedVector quantised{scratch.quantised_index.data(), scratch.quantised_q.data(), 0, 0, 0};
    table_->quantise(x, &quantised);
    const auto add = rows.sections ? table_->add_blocks_int8 : table_->add_rows_int8;
    add(rows, first, columns, quantised, scratch.integers.data(), sum);
}

// Compute x W + b for every item of the chunk, for the units of this share. Returns one address per item, ordered by
// step, then stream.
const float* const* Engine::project(const Share& share, Layer& layer, const Input& input, int steps) {
    if (input.changes != nullptr) return project_changes(share, layer, input, steps);
    Scratch& scratch = share.scratch;
    const int U = layer.units, from = share.begin(U), to = share.end(U), items = steps * share.streams();
    const int gates = layer.gates;
    const size_t row = projected_stride(gates * U);
    std::vector<const float*>& addresses = scratch.rows;
    if (input.ids != nullptr && token_table_.size() != 0) {
        for (int i = 0; i < items; ++i) {
            const int t = i / share.streams(), s = share.first_stream + i % share.streams();
            addresses[i] = token_table_.data() + static_cast<size_t>(input.ids[t * options_.streams + s]) * gates * U;
        }
        return addresses.data();
    }
    int64_t active = 0;
    for (int i = 0; i < items; ++i) {
        const int t = i / share.streams(), s = share.first_stream + i % share.streams();
        const size_t place = static_cast<size_t>(t) * options_.streams + s;
        if (input.sparse != nullptr) {
            active = input.sparse->count;
            break;
        }
        SparseVector& nonzero = scratch.active_inputs[i];
        nonzero.count = 0;
        addresses[i] = input.ids != nullptr ? embedding_.data() + static_cast<size_t>(input.ids[place]) * layer.inputs
                                            : input.x + place * input.stride;
        if (!share.runs(s)) continue;
        nonzero.count = table_->find_nonzero(addresses[i], layer.inputs, nonzero.index, nonzero.value);
        active += nonzero.count;
    }
    const SparseVector* sparse = input.sparse != nullptr ? input.sparse : scratch.active_inputs.data();
    for (int i = 0; share.counts_macs() && i < items; ++i) scratch.macs += layer.w.macs(sparse[i]);

    const Rows rows = layer.w.view();
    const int blocks = to - from == U ? 1 : gates, width = blocks == 1 ? gates * U : to - from;
    const bool dense = static_cast<double>(active) > dense_density * items * layer.inputs;
    const bool shared = items > 1 && active > shared_reads * static_cast<int64_t>(layer.inputs);
    // A single item is written to where advance() needs it, in a GRU after the block of q.
    float* out = items == 1 ? scratch.sum.data() + layer.first_sum * U : scratch.projected.data();
    for (int b = 0; b < blocks; ++b) {
        const int first = b * U + from;
        if (shared && rows.format != WeightFormat::int8 && rows.sections == 0) {
            if (dense)
                table_->project_dense(rows, first, width, addresses.data(), items, layer.bias.data() + first,
                                      out + first, row);
            else
                table_->project(rows, first, width, sparse, items, layer.bias.data() + first, out + first, row);
            continue;
        }
        for (int i = 0; i < items; ++i) {
            float* sum = out + i * row + first;
            std::copy_n(layer.bias.data() + first, width, sum);
            add_product(rows, first, width, sparse[i], scratch, sum);
        }
    }
    for (int i = 0; i < items; ++i) addresses[i] = out + i * row;
    return addresses.data();
}

// The same for the output of a layer with delta events: add the product of its changes to that of the previous step.
const float* const* Engine::project_changes(const Share& share, Layer& layer, const Input& input, int steps) {
    Scratch& scratch = share.scratch;
    const int U = layer.units, from = share.begin(U), to = share.end(U), items = steps * share.streams();
    const int gates = layer.gates, blocks = to - from == U ? 1 : gates, width = blocks == 1 ? gates * U : to - from;
    const size_t row = projected_stride(gates * U);
    const Rows rows = layer.w.view();
    float* out = items == 1 ? scratch.sum.data() + layer.first_sum * U : scratch.projected.data();
    for (int i = 0; i < items; ++i) {
        const int t = i / share.streams(), s = share.first_stream + i % share.streams();
        scratch.rows[i] = out + i * row;
        if (!share.runs(s)) continue;
        const size_t place = (static_cast<size_t>(t) * options_.streams + s) * input.stride;
        const bool refresh = refreshes(s, t);
        SparseVector& active = scratch.active_inputs[i];
        active.count = table_->find_nonzero((refresh ? input.x : input.changes) + place, layer.inputs, active.index,
                                            active.value);
        float* total = layer.received.data() + static_cast<size_t>(s) * layer.sums();
        for (int b = 0; b < blocks; ++b) {
            const int first = b * U + from;
            if (refresh) std::copy_n(layer.bias.data() + first, width, total + first);
            add_product(rows, first, width, active, scratch, total + first);
            std::copy_n(total + first, width, out + i * row + first);
        }
        if (share.counts_macs()) scratch.macs += layer.w.macs(active);
    }
    return scratch.rows.data();
}

// Add the recurrent product of a layer with delta events to `sum`, which holds the input product. `active` are the
// changes of its output, or if `refresh` the output.
void Engine::add_changes(const Share& share, Layer& layer, int stream, const SparseVector& active, bool refresh,
                         float* sum) {
    const int U = layer.units, from = share.begin(U), to = share.end(U), width = to - from;
    const Rows v = layer.v.view();
    float* total = layer.recurrent.data() + static_cast<size_t>(stream) * layer.sums();
    for (int b = 0; refresh && b < layer.gates; ++b) {
        if (b < layer.first_sum)  // q
            std::copy_n(layer.bias_q.data() + from, width, total + from);
        else
            std::fill_n(total + b * U + from, width, 0.0f);
    }
    if (width == U)
        add_product(v, 0, layer.gates * U, active, share.scratch, total);
    else
        for (int b = 0; b < layer.gates; ++b)
            add_product(v, b * U + from, width, active, share.scratch, total + b * U + from);
    for (int b = 0; b < layer.gates; ++b) {
        float* to_sum = sum + b * U;
        const float* product = total + b * U;
        for (int j = from; j < to; ++j) to_sum[j] = b < layer.first_sum ? product[j] : to_sum[j] + product[j];
    }
}

// Compute one step of one layer from its projected inputs.
void Engine::advance(const Share& share, Layer& layer, int step, const float* const* projected) {
    Scratch& scratch = share.scratch;
    const int U = layer.units, from = share.begin(U), to = share.end(U), width = to - from;
    const bool whole = width == U, after = layer.cell.after, before = !after && !layer.cell.lstm;
    const int gates = layer.gates, first_sum = layer.first_sum;
    const int current = (layer.current + step) % 2;
    // Columns [z | r | u], sums [q | r | u | z]; for an LSTM both are [i | f | g | o].
    const Rows v = layer.v.view();
    const int at_once = share.by_stream ? 1 : share.streams();

    for (int s0 = share.first_stream; s0 < share.last_stream; s0 += at_once) {
        for (int i = 0; i < at_once; ++i) {
            if (!share.runs(s0 + i)) continue;
            const size_t at = static_cast<size_t>(s0 + i) * U;
            float* sum = scratch.sum.data() + static_cast<size_t>(i) * 4 * U;
            const float* input = projected[s0 + i - share.first_stream];
            SparseVector& active = scratch.active_units[i];
            const bool refresh = layer.delta() && refreshes(s0 + i, step);
            const Buffer<float>& source = layer.delta() && !refresh ? layer.sent[current] : layer.y[current];
            active.count = table_->find_nonzero(source.data() + at, U, active.index, active.value);
            if (input != sum + first_sum * U)
                for (int b = 0; b < gates; ++b)
                    std::copy_n(input + b * U + from, width, sum + (b + first_sum) * U + from);
            if (after) std::copy_n(layer.bias_q.data() + from, width, sum + from);
            if (layer.delta()) {
                add_changes(share, layer, s0 + i, active, refresh, sum);
            } else if (whole) {
                const int first = before ? U : 0;
                add_product(v, first, gates * U - first, active, scratch, sum + first);
            } else {
                for (int b = before ? 1 : 0; b < gates; ++b)
                    add_product(v, b * U + from, width, active, scratch, sum + b * U + from);
            }
            if (before) {
                int32_t* end = active.index + active.count;
                const int k0 = static_cast<int>(std::lower_bound(active.index, end, from) - active.index);
                const int k1 = static_cast<int>(std::lower_bound(active.index, end, to) - active.index);
                table_->apply_reset_gate(active, k0, k1, sum + U, layer.gated.data() + at);
            }
            if (share.counts_macs())
                scratch.macs += layer.v.macs(active) + static_cast<int64_t>(gates) * layer.hidden;
        }
        if (before) {
            share.meet();  // V_z needs the reset gates of all units
            for (int i = 0; i < at_once; ++i) {
                if (!share.runs(s0 + i)) continue;
                const size_t at = static_cast<size_t>(s0 + i) * U;
                const SparseVector& active = scratch.active_units[i];
                const SparseVector gated{active.index, layer.gated.data() + at, active.count};
                float* z = scratch.sum.data() + static_cast<size_t>(i) * 4 * U + 3 * U;
                add_product(v, from, width, gated, scratch, z + from);
            }
        }
        for (int i = 0; i < at_once; ++i) {
            const size_t at = static_cast<size_t>(s0 + i) * U;
            const float* sum = scratch.sum.data() + static_cast<size_t>(i) * 4 * U;
            float* y = layer.y[1 - current].data() + at;
            const float* y_old = layer.y[current].data() + at;
            float* sent = layer.delta() ? layer.sent[1 - current].data() + at : nullptr;
            if (!share.runs(s0 + i)) {
                std::copy(y_old + from, y_old + to, y + from);
                if (sent != nullptr)  // the changes of the last step have not been added yet
                    std::copy_n(layer.sent[current].data() + at + from, width, sent + from);
                continue;
            }
            const auto update = layer.cell.lstm ? table_->update_lstm : table_->update_units;
            const int events = update(layer.cell, from, to, U, sum, layer.c.data() + at, y_old, y, sent);
            scratch.finite = scratch.finite && events >= 0;
            scratch.events[static_cast<size_t>(&layer - layers_.data())] += std::max(events, 0);
            const size_t row = (static_cast<size_t>(step) * options_.streams + s0 + i) * U + from;
            std::copy_n(y + from, width, layer.chunk_y.data() + row);
            if (sent != nullptr) std::copy_n(sent + from, width, layer.chunk_sent.data() + row);
        }
    }
    share.meet();
}

// ---- output --------------------------------------------------------------------------------------------------------

void Engine::write_events(const Share& share, const Layer& layer, int steps, bool last, float* out) {
    const int U = layer.units, to = std::min(share.end(U), layer.hidden), from = std::min(share.begin(U), to);
    for (int t = 0; t < steps; ++t)
        for (int s = share.first_stream; s < share.last_stream; ++s) {
            if (!share.runs(s)) continue;
            const size_t place = static_cast<size_t>(t) * options_.streams + s;
            const float* y = layer.chunk_y.data() + place * U;
            const bool written = !last || t == steps - 1;
            float* row = out + (last ? static_cast<size_t>(s) : place) * layer.hidden;
            if (options_.has_trace) {
                double* trace = trace_.data() + static_cast<size_t>(s) * U;
                const double scale = trace_scale(s, t);
                for (int j = from; j < to; ++j) trace[j] = options_.trace * trace[j] + y[j];
                for (int j = from; written && j < to; ++j) row[j] = static_cast<float>(scale * trace[j]);
            } else if (written) {
                std::copy(y + from, y + to, row + from);
            }
        }
}

// Apply the readout to the events or to their trace. The readout is linear, so the trace is computed after it: one
// multiply-add per output and step instead of a dense product.
void Engine::write_readout(const Share& share, const Layer& layer, int steps, bool last, float* out) {
    Scratch& scratch = share.scratch;
    const int U = layer.units, outputs = readout_.outputs, columns = readout_.columns;
    const int from = share.begin(columns), to = share.end(columns), end = std::min(to, outputs);
    const Rows rows = readout_.weights.view();
    const float* bias = readout_.bias.data();
    float* sum = scratch.sum.data();
    const int first_step = last && !options_.has_trace ? steps - 1 : 0;
    const bool accumulate = layer.delta() && !(last && !options_.has_trace);
    for (int t = first_step; t < steps; ++t)
        for (int s = share.first_stream; s < share.last_stream; ++s) {
            if (!share.runs(s)) continue;
            const size_t place = static_cast<size_t>(t) * options_.streams + s;
            const bool changes = accumulate && !refreshes(s, t) && !(t == 0 && readout_stale_[static_cast<size_t>(s)]);
            if (accumulate) sum = readout_sum_.data() + static_cast<size_t>(s) * columns;
            SparseVector& active = scratch.active_units[0];
            const Buffer<float>& source = changes ? layer.chunk_sent : layer.chunk_y;
            active.count = table_->find_nonzero(source.data() + place * U, U, active.index, active.value);
            if (share.counts_macs()) scratch.macs += readout_.weights.macs(active);
            if (!changes && options_.has_trace)
                std::fill(sum + from, sum + to, 0.0f);
            else if (!changes)
                std::copy(bias + from, bias + to, sum + from);
            add_product(rows, from, to - from, active, scratch, sum + from);
            const bool written = !last || t == steps - 1;
            float* row = out + (last ? static_cast<size_t>(s) : place) * outputs;
            if (options_.has_trace) {
                double* trace = trace_.data() + static_cast<size_t>(s) * columns;
                const double scale = trace_scale(s, t);
                for (int j = from; j < end; ++j) trace[j] = options_.trace * trace[j] + sum[j];
                for (int j = from; written && j < end; ++j) row[j] = static_cast<float>(scale * trace[j] + bias[j]);
            } else if (written) {
                std::copy(sum + from, sum + end, row + from);
            }
        }
}

// Compute x W + b of tokens that occur for the first time.
void Engine::fill_token_table(const int64_t* ids, size_t count, const uint8_t* mask) {
    if (token_table_.size() == 0) return;
    const Layer& layer = layers_.front();
    const size_t row = static_cast<size_t>(layer.gates) * static_cast<size_t>(layer.units);
    Scratch& scratch = scratch_.front();
    SparseVector nonzero = scratch.active_inputs.front();
    for (size_t i = 0; i < count; ++i) {
        if (mask != nullptr && mask[i % static_cast<size_t>(options_.streams)] == 0) continue;
        const size_t id = static_cast<size_t>(ids[i]);
        if (token_filled_[id]) continue;
        float* sum = token_table_.data() + id * row;
        const float* x = embedding_.data() + id * layer.inputs;
        nonzero.count = table_->find_nonzero(x, layer.inputs, nonzero.index, nonzero.value);
        std::copy_n(layer.bias.data(), row, sum);
        add_product(layer.w.view(), 0, static_cast<int>(row), nonzero, scratch, sum);
        counters_.macs += layer.w.macs(nonzero);
        token_filled_[id] = 1;
    }
}

}  // namespace egru::engine
