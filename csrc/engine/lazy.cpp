// Lazy updates of a pruned network. An input or an event reaches only the units it has non-zero weights to. All others
// relax as if nothing had happened (kernels.hpp, Relaxation), so their states are not computed until something reaches
// them or they are due to send an event. The cost of a step is proportional to the number of units it reaches.
//
// Units are updated in groups of `sparse_block`. skip() starts lazy updates of a stream; any step other than one with
// sparse input ends them, and so does reading the state. Streams whose steps update most units are advanced as usual.
#include <algorithm>

#include "engine/engine.hpp"

namespace egru::engine {
namespace {

constexpr double most_updated = 0.4;  // fraction of units above which ordinary updates are faster
constexpr double weight_of_step = 1.0 / 16, weight_of_gap = 1.0 / 512;  // in the running mean of this fraction
constexpr int64_t unknown = -1;  // the group was updated at the last step, and may be due at any later one

// Call `work(first, last)` for every run of consecutive groups that are set, in ascending order.
template <class Work>
void for_each_run(const std::vector<uint64_t>& set, int groups, Work work) {
    const auto is_set = [&](int g) { return (set[static_cast<size_t>(g) / 64] >> (g % 64) & 1) != 0; };
    for (int g = 0; g < groups; ++g) {
        if (set[static_cast<size_t>(g) / 64] >> (g % 64) == 0) {
            g |= 63;  // the rest of the word is not set
            continue;
        }
        if (!is_set(g)) continue;
        const int first = g;
        while (g < groups && is_set(g)) ++g;
        work(first, g);
    }
}

}  // namespace

// Switch a stream to lazy updates, or back if they are slower. Returns whether they are on. As ordinary updates do not
// count the units that a step reaches, lazy ones are tried again after some time.
bool Engine::start_lazy(const Share& share) {
    const size_t s = static_cast<size_t>(share.first_stream);
    Lazy& lazy = lazy_[s];
    if (lazy.updated > most_updated) {
        end_lazy(share.first_stream);
        lazy.updated *= 1 - weight_of_gap;
        return false;
    }
    if (lazy.on) return true;
    lazy = Lazy{true, !is_quiet(share.first_stream), 0, lazy.updated};
    for (Layer& layer : layers_) {
        settle(share, layer);
        const size_t groups = static_cast<size_t>(layer.groups()), row = s * static_cast<size_t>(layer.units);
        if (layer.computed.size() == 0) {
            layer.computed = Buffer<int64_t>(groups * static_cast<size_t>(options_.streams));
            layer.due = Buffer<int64_t>(groups * static_cast<size_t>(options_.streams));
        }
        std::fill_n(layer.computed.data() + s * groups, groups, 0);
        std::fill_n(layer.due.data() + s * groups, groups, unknown);
        std::copy_n(layer.y[layer.current].data() + row, layer.units, layer.chunk_y.data() + row);
    }
    return true;
}

// Compute the states of a stream and switch back to ordinary updates.
void Engine::end_lazy(int stream) {
    const size_t s = static_cast<size_t>(stream);
    Lazy& lazy = lazy_[s];
    if (!lazy.on) return;
    lazy.on = false;
    for (Layer& layer : layers_) {
        const int64_t* computed = layer.computed.data() + s * static_cast<size_t>(layer.groups());
        for (int g = 0; g < layer.groups(); ++g)
            relax_group(layer, s, g, lazy.now - computed[g]);
    }
}

void Engine::end_lazy() {
    for (int s = 0; can_be_lazy_ && s < options_.streams; ++s) end_lazy(s);
}

// Advance the states of a group of units by `steps` steps that have not reached it.
void Engine::relax_group(Layer& layer, size_t stream, int group, int64_t steps) {
    const int first = group * sparse_block;
    float* c = layer.c.data() + stream * static_cast<size_t>(layer.units);
    if (steps != 0) table_->relax(first, first + sparse_block, layer.relaxation(), steps, c);
}

// The next step at which a unit sends an event if there is no input.
int64_t Engine::next_due(int stream) {
    const Lazy& lazy = lazy_[static_cast<size_t>(stream)];
    if (lazy.sends) return lazy.now + 1;
    int64_t next = never;
    for (Layer& layer : layers_) {
        const size_t s = static_cast<size_t>(stream);
        const float* c = layer.c.data() + s * static_cast<size_t>(layer.units);
        int64_t* due = layer.due.data() + s * static_cast<size_t>(layer.groups());
        for (int g = 0; g < layer.groups(); ++g) {
            const int from = g * sparse_block;
            if (due[g] == unknown)
                table_->find_due(layer.cell, from, from + sparse_block, layer.relaxation(), c, lazy.now,
                                 layer.relaxed.data(), due);
            next = std::min(next, due[g]);
        }
    }
    return next;
}

// The same as leap(), with lazy updates.
int64_t Engine::leap_lazy(const Share& share, int64_t limit, float* out, bool* sends) {
    const int stream = share.first_stream;
    const size_t s = static_cast<size_t>(stream);
    Lazy& lazy = lazy_[s];
    const int64_t wait = next_due(stream) - lazy.now, steps = std::min(wait, limit);
    decay_trace(stream, steps - 1);
    trace_steps_[s] += steps - 1;
    age_[s] += steps - 1;
    lazy.now += steps;
    if (wait <= limit) *sends = advance_all_lazy(share, SparseVector{nullptr, nullptr, 0}) != 0;
    write_output(share, out);
    return steps;
}

// The same as step_sparse(), with lazy updates.
bool Engine::step_lazy(const SparseVector& x, float* out) {
    Barrier barrier(1);
    const Team team{0, 1, &barrier};
    const Share share = alone(team, 0);
    ++lazy_.front().now;
    advance_all_lazy(share, x);
    write_output(share, out);
    if (lazy_.front().updated > most_updated) end_lazy(0);
    ++counters_.steps;
    ++time_;
    return collect_counters();
}

// Compute the step `now` of all layers. Returns the number of events of the last one.
int Engine::advance_all_lazy(const Share& share, const SparseVector& x) {
    SparseVector& below = share.scratch.active_inputs.front();
    SparseVector input = x;
    bool sends = false;
    int events = 0;
    for (Layer& layer : layers_) {
        events = advance_lazy(share, layer, input);
        sends = sends || events != 0;
        if (&layer == &layers_.back()) break;
        const float* y = layer.chunk_y.data() + static_cast<size_t>(share.first_stream) * layer.units;
        below.count = events == 0 ? 0 : table_->find_nonzero(y, layer.units, below.index, below.value);
        input = below;
    }
    lazy_[static_cast<size_t>(share.first_stream)].sends = sends;
    return events;
}

// Compute the step `now` of a layer, for the units that its input or its last events reach, that sent an event at the
// last step, or that are due to send one. Returns the number of events.
int Engine::advance_lazy(const Share& share, Layer& layer, const SparseVector& x) {
    const size_t s = static_cast<size_t>(share.first_stream);
    const int U = layer.units, groups = layer.groups();
    const int64_t now = lazy_[s].now;
    float *c = layer.c.data() + s * U, *y = layer.y[layer.current].data() + s * U;
    int64_t *computed = layer.computed.data() + s * groups, *due = layer.due.data() + s * groups;

    SparseVector& active = share.scratch.active_units.front();
    active.count = lazy_[s].sends ? table_->find_nonzero(y, U, active.index, active.value) : 0;
    find_reached(layer, x, active);

    int events = 0, updated = 0;
    const auto finish = [&](int first, int last, int count) {
        const int from = first * sparse_block, to = last * sparse_block;
        share.scratch.finite = share.scratch.finite && count >= 0;
        events += std::max(count, 0);
        updated += std::min(to, layer.hidden) - std::min(from, layer.hidden);
        std::copy(y + from, y + to, layer.chunk_y.data() + s * U + from);
        std::fill(computed + first, computed + last, now);
        std::fill(due + first, due + last, unknown);
    };
    for (int g = 0; g < groups; ++g) {
        if (due[g] > now || (reached_[static_cast<size_t>(g) / 64] >> (g % 64) & 1) != 0) continue;
        relax_group(layer, s, g, now - computed[g]);
        const int from = g * sparse_block;
        finish(g, g + 1,
               table_->emit_relaxed(layer.cell, from, from + sparse_block, layer.relaxation(), c, y, nullptr));
    }
    if (x.count + active.count != 0) {
        for_each_run(reached_, groups, [&](int first, int last) {
            for (int g = first; g < last; ++g) relax_group(layer, s, g, now - 1 - computed[g]);
        });
        const float* sum = sum_reached(share, layer, x, active);
        const auto update = layer.cell.lstm ? table_->update_lstm : table_->update_units;
        for_each_run(reached_, groups, [&](int first, int last) {
            finish(first, last, update(layer.cell, first * sparse_block, last * sparse_block, U, sum, c, y, y, nullptr));
        });
    }
    lazy_[s].updated += weight_of_step * (static_cast<double>(updated) / layer.hidden - lazy_[s].updated);
    share.scratch.macs += layer.w.macs(x) + layer.v.macs(active) + layer.gates * updated;
    share.scratch.events[static_cast<size_t>(&layer - layers_.data())] += events;
    return events;
}

// Find the groups of units that an input or an event reaches, or that sent an event.
void Engine::find_reached(const Layer& layer, const SparseVector& x, const SparseVector& active) {
    const size_t words = (static_cast<size_t>(layer.groups()) + 63) / 64;
    std::fill_n(reached_.data(), words, 0);
    const auto add = [&](const WeightMatrix& weights, const SparseVector& vector) {
        for (int k = 0; k < vector.count; ++k) {
            const uint64_t* row = weights.reach(vector.index[k]);
            for (size_t i = 0; i < words; ++i) reached_[i] |= row == nullptr ? ~uint64_t(0) : row[i];
        }
    };
    add(layer.w, x);
    add(layer.v, active);
    for (int k = 0; k < active.count; ++k) {
        const int g = active.index[k] / sparse_block;
        reached_[static_cast<size_t>(g) / 64] |= uint64_t(1) << (g % 64);
    }
}

// The sums of the reached units. Those of other units are not defined.
const float* Engine::sum_reached(const Share& share, Layer& layer, const SparseVector& x, const SparseVector& active) {
    Scratch& scratch = share.scratch;
    const int U = layer.units, gates = layer.gates, first_sum = layer.first_sum;
    const bool after = layer.cell.after, before = !after && !layer.cell.lstm;
    float* sum = scratch.sum.data();
    for_each_run(reached_, layer.groups(), [&](int first, int last) {
        const int from = first * sparse_block, width = (last - first) * sparse_block;
        for (int b = 0; b < gates; ++b)
            std::copy_n(layer.bias.data() + b * U + from, width, sum + (b + first_sum) * U + from);
        if (after) std::copy_n(layer.bias_q.data() + from, width, sum + from);
    });
    add_product(layer.w.view(), 0, gates * U, x, scratch, sum + first_sum * U);
    const int first_column = before ? U : 0;
    add_product(layer.v.view(), first_column, gates * U - first_column, active, scratch, sum + first_column);
    if (before && active.count != 0) {
        table_->apply_reset_gate(active, 0, active.count, sum + U, layer.gated.data());
        const SparseVector gated{active.index, layer.gated.data(), active.count};
        add_product(layer.v.view(), 0, U, gated, scratch, sum + 3 * U);
    }
    return sum;
}

}  // namespace egru::engine
