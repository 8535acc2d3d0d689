// Steps without input. While no unit sends an event, n steps have a closed form (kernels.hpp, Relaxation): the engine
// computes the next step with an event and jumps to it. The step after an event is an ordinary one.
//
// A stream is advanced by itself, on the calling thread, so that its result does not depend on the other streams.
#include <algorithm>
#include <cmath>

#include "engine/engine.hpp"

namespace egru::engine {

void Engine::skip(int stream, int64_t steps, float* out, Gap& gap) {
    Barrier barrier(1);
    const Team team{0, 1, &barrier};
    const Share share = alone(team, stream);
    const bool lazy = can_be_lazy_ && start_lazy(share);
    for (int jumps = 0; jumps < gap.capacity && gap.steps < steps && gap.finite; ++jumps) {
        bool sends = false;
        const int64_t left = steps - gap.steps;
        gap.steps += lazy ? leap_lazy(share, left, out, &sends) : leap(share, left, out, &sends);
        gap.finite = collect_counters();
        if (!sends) continue;
        const size_t width = static_cast<size_t>(outputs());
        gap.step[gap.count] = gap.steps - 1;
        std::copy_n(out + static_cast<size_t>(stream) * width, width,
                    gap.outputs + static_cast<size_t>(gap.count) * width);
        ++gap.count;
    }
    counters_.steps += gap.steps;
    if (stream == options_.streams - 1) time_ += gap.steps;
}

// Advance the stream to its next step with an event, by at most `limit` steps, and write the output. Sets `sends` if
// the last layer sends an event. Returns the number of steps.
int64_t Engine::leap(const Share& share, int64_t limit, float* out, bool* sends) {
    const int stream = share.first_stream;
    const size_t s = static_cast<size_t>(stream);
    const int64_t silent = silent_steps(share, limit);
    const int64_t steps = std::max<int64_t>(silent, 1);
    decay_trace(stream, steps - 1);
    trace_steps_[s] += steps - 1;
    age_[s] += steps - 1;

    // All but the last step have no events. At the last step, the layers above one that sends events have an input.
    const SparseVector empty{nullptr, nullptr, 0};
    Input input;
    input.sparse = &empty;
    bool ordinary = silent == 0, changed = false;
    for (Layer& layer : layers_) {
        if (ordinary && steps > 1)
            table_->relax(0, layer.units, layer.relaxation(), steps - 1, layer.c.data() + s * layer.units);
        const int events = ordinary ? advance_stream(share, layer, input) : advance_silent(share, layer, steps);
        ordinary = ordinary || events != 0;
        changed = changed || (layer.delta() && events != 0);
        *sends = events != 0;
        input = Input{};
        input.x = layer.chunk_y.data();
        input.stride = static_cast<size_t>(layer.units);
        input.changes = layer.delta() ? layer.chunk_sent.data() : nullptr;
    }
    sums_fresh_[s] = !changed && (sums_fresh_[s] || (silent == 0 && refreshes(stream, 0)));
    write_output(share, out);
    return steps;
}

// Write the output of one stream at one step, and count the step.
void Engine::write_output(const Share& share, float* out) {
    const size_t s = static_cast<size_t>(share.first_stream);
    if (readout_.outputs != 0)
        write_readout(share, layers_.back(), 1, false, out);
    else
        write_events(share, layers_.back(), 1, false, out);
    readout_stale_[s] = 0;
    ++trace_steps_[s];
    ++age_[s];
}

// The share of a single thread that advances one stream.
Engine::Share Engine::alone(const Team& team, int stream) {
    return {team, scratch_.front(), column_block(options_.weights), true, stream, stream + 1, nullptr};
}

// The number of steps, at most `limit`, of which all but the last have no events; 0 if the next step is an ordinary
// one.
int64_t Engine::silent_steps(const Share& share, int64_t limit) {
    const int stream = share.first_stream;
    const size_t s = static_cast<size_t>(stream);
    const bool accumulates = std::any_of(layers_.begin(), layers_.end(), [](const Layer& l) { return l.delta(); });
    if (accumulates && !sums_fresh_[s]) {  // the next computation of accumulated sums changes them by rounding
        if (refreshes(stream, 0)) return 0;
        limit = std::min(limit, options_.refresh - age_[s] % options_.refresh);
    }
    if (!is_quiet(stream)) return 0;
    for (Layer& layer : layers_) {
        settle(share, layer);
        const size_t row = s * static_cast<size_t>(layer.units);
        const int64_t first = table_->first_event(layer.cell, layer.units, layer.relaxation(), layer.c.data() + row,
                                                  layer.y[layer.current].data() + row, limit, layer.relaxed.data());
        layer.relaxed_steps = first > limit ? limit : 0;
        limit = std::min(limit, first);
    }
    return limit;
}

// Whether no unit sent an event at the last step.
bool Engine::is_quiet(int stream) {
    SparseVector& active = scratch_.front().active_units.front();
    return std::all_of(layers_.begin(), layers_.end(), [&](const Layer& layer) {
        const Buffer<float>& last = layer.delta() ? layer.sent[layer.current] : layer.y[layer.current];
        const float* row = last.data() + static_cast<size_t>(stream) * static_cast<size_t>(layer.units);
        return table_->find_nonzero(row, layer.units, active.index, active.value) == 0;
    });
}

// Compute the relaxation of a layer. It depends on the stream only if sums are accumulated.
void Engine::settle(const Share& share, Layer& layer) {
    const size_t units = static_cast<size_t>(layer.units), s = static_cast<size_t>(share.first_stream);
    const bool has_input = layer.received.size() != 0;
    if (layer.relaxation_rates.size() != 0 && !has_input && !layer.delta()) return;
    if (layer.relaxation_rates.size() == 0) {
        layer.relaxation_rates = Buffer<double>(3 * units);
        layer.relaxation_gate = Buffer<float>(units);
        layer.relaxed = Buffer<float>(units);
    }
    float* sum = share.scratch.sum.data();
    std::copy_n(has_input ? layer.received.data() + s * layer.sums() : layer.bias.data(), layer.sums(),
                sum + static_cast<size_t>(layer.first_sum) * units);
    if (layer.cell.after) std::copy_n(layer.bias_q.data(), units, sum);
    if (layer.delta()) add_changes(share, layer, share.first_stream, SparseVector{nullptr, nullptr, 0}, false, sum);
    table_->settle(layer.cell, layer.units, sum, layer.relaxation());
}

// Advance a layer by `steps` steps in closed form; events are sent at the last one. Returns their number.
int Engine::advance_silent(const Share& share, Layer& layer, int64_t steps) {
    const size_t units = static_cast<size_t>(layer.units), row = static_cast<size_t>(share.first_stream) * units;
    float *c = layer.c.data() + row, *y = layer.y[layer.current].data() + row;
    float* sent = layer.delta() ? layer.sent[layer.current].data() + row : nullptr;
    if (layer.relaxed_steps == steps)
        std::copy_n(layer.relaxed.data(), units, c);
    else
        table_->relax(0, layer.units, layer.relaxation(), steps, c);
    const int events = table_->emit_relaxed(layer.cell, 0, layer.units, layer.relaxation(), c, y, sent);
    Scratch& scratch = share.scratch;
    scratch.finite = scratch.finite && events >= 0;
    scratch.events[static_cast<size_t>(&layer - layers_.data())] += std::max(events, 0);
    scratch.macs += static_cast<int64_t>(layer.gates) * layer.hidden;
    std::copy_n(y, units, layer.chunk_y.data() + row);
    if (sent != nullptr) std::copy_n(sent, units, layer.chunk_sent.data() + row);
    return std::max(events, 0);
}

// Compute one ordinary step of a layer. Returns the number of events.
int Engine::advance_stream(const Share& share, Layer& layer, const Input& input) {
    int64_t& events = share.scratch.events[static_cast<size_t>(&layer - layers_.data())];
    const int64_t before = events;
    advance(share, layer, 0, project(share, layer, input, 1));
    // `current` is the same for all streams, and only this one has advanced.
    const size_t units = static_cast<size_t>(layer.units), row = static_cast<size_t>(share.first_stream) * units;
    const int current = layer.current;
    std::copy_n(layer.y[1 - current].data() + row, units, layer.y[current].data() + row);
    if (layer.delta()) std::copy_n(layer.sent[1 - current].data() + row, units, layer.sent[current].data() + row);
    return static_cast<int>(events - before);
}

// Advance the trace by steps at which the output of the last layer does not change.
void Engine::decay_trace(int stream, int64_t steps) {
    if (!options_.has_trace || steps == 0) return;
    const Layer& layer = layers_.back();
    const size_t s = static_cast<size_t>(stream), width = trace_.size() / static_cast<size_t>(options_.streams);
    const double a = options_.trace, n = static_cast<double>(steps), kept = std::pow(a, n);
    double* trace = trace_.data() + s * width;
    for (int j = 0; j < outputs(); ++j) trace[j] *= kept;
    if (!layer.delta()) return;
    const float* held = readout_.outputs != 0 ? readout_sum_.data() + s * width
                                              : layer.y[layer.current].data() + s * width;
    const double total = a == 1.0 ? n : -std::expm1(n * std::log(a)) / (1.0 - a);
    for (int j = 0; j < outputs(); ++j) trace[j] += total * held[j];
}

}  // namespace egru::engine
