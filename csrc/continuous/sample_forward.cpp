// The forward pass of one sample, from event to event. A unit is advanced only when an event or a readout reaches it.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "continuous/batch.hpp"
#include "continuous/event_queue.hpp"

namespace egru::continuous {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr int linear_search_units = 256;  // up to this size a linear search is faster than a heap

double sigmoid(double a) { return 1 / (1 + std::exp(-a)); }
double relaxed(const double* b, const double* a, int n, double decay) { return b[n] + (a[n] - b[n]) * decay; }

class ForwardSample {
public:
    ForwardSample(const ContinuousCall& call, const Network& network, int sample, SampleTape* tape, StopFlag* stop,
                  bool may_poll)
        : call_(call), network_(network), model_(network.model()), table_(EGRU_PICK(continuous_table)), tape_(*tape),
          sample_(sample), horizon_(at<double>(call.horizons)[sample]), H_(static_cast<size_t>(call.units)), memory_(9 * H_), exact_(H_),
          gate_(model_.receiver_reset ? H_ : 0),
          queue_(memory_.data() + 5 * H_, call.units,
                 call.units > linear_search_units && network.recurrent().mean_count() < call.units / 16.0,
                 table_.argmin),
          scratch_(stop, may_poll) {
        if (network.recurrent().mean_count() < call.units / 4.0)
            min_lookahead_ = 0.1 / (1 / model_.tau_s + 1 / model_.tau_m);
        double* at = memory_.data();
        state_ = State{at, at + H_, at + 2 * H_, at + 3 * H_, at + 4 * H_, at + 5 * H_};
        o_ = at + 6 * H_;
        o_last_ = at + 7 * H_;
        emitted_ = at + 8 * H_;
        std::fill_n(emitted_, H_, -1.0);
        tape_.min_slope = infinity;
    }

    void run() {
        for (bool goes_on = true; goes_on;) {
            if (call_.checkpoint_every > 0) {  // the steps before a checkpoint are repeated in the backward pass
                tape_.checkpoints.push_back({position_, memory_, exact_, queue_.order(), deliveries_});
                tape_.steps.clear();
                tape_.records.clear();
            }
            goes_on = run_part();
        }
        finish();
    }

    void repeat(const Checkpoint& from) {
        repeats_ = true;
        position_ = from.position;
        std::copy(from.memory.begin(), from.memory.end(), memory_.begin());
        exact_ = from.exact;
        queue_.restore(from.order);
        deliveries_ = from.deliveries;
        tape_.events = position_.events;
        run_part();
    }

private:
    // Runs to the next checkpoint. Returns false at the horizon.
    bool run_part() {
        if (!position_.begun) begin();
        while (tape_.steps.size() < size_t(call_.checkpoint_every) || call_.checkpoint_every == 0)
            if (!advance()) return false;
        return true;
    }

    // Processes the next group of internal events, delivery, input event or readout. At the same time they are in this
    // order.
    // Returns false at the horizon.
    bool advance() {
        const double* inputs = at<double>(call_.input_times);
        const double* readouts = at<double>(call_.readout_times) + int64_t(sample_) * call_.readouts;
        int64_t &input = position_.input, &readout = position_.readout;
        const double input_time =
            input < at<int64_t>(call_.input_offsets)[sample_ + 1] ? inputs[input] : infinity;
        const double readout_time = readout < call_.readouts ? readouts[readout] : infinity;
        const double delivery_time = deliveries_.empty() ? infinity : deliveries_.front().time;
        const double time = std::min({delivery_time, input_time, readout_time, horizon_});
        if (position_.now < time) {
            if (emit_before(time)) return true;
            visit_nodes(time);
            position_.now = time;
        }
        if (delivery_time <= time)
            deliver();
        else if (input_time <= time)
            apply_input(input++);
        else if (readout_time <= time)
            read(readout++);
        else
            return false;
        return true;
    }

    void begin() {
        position_.begun = true;
        position_.input = at<int64_t>(call_.input_offsets)[sample_];
        const double *a0 = at<double>(call_.a0) + 3 * H_ * static_cast<size_t>(sample_);
        const double *c0 = at<double>(call_.c0) + H_ * static_cast<size_t>(sample_);
        std::copy_n(a0, 3 * H_, state_.a_u);  // a_u, a_r, a_z are adjacent
        std::copy_n(c0, H_, state_.c);
        Touch touch = touch_all();
        touch.keep_keys = false;
        apply(touch, Step{StepKind::start, true, false, -1, 0, 0, 0, 0, 0, 0, nullptr}, 0);
        group_.clear();
        for (size_t n = 0; n < H_; ++n)
            if (state_.c[n] >= model_.theta[n] && z_of(state_.a_u[n], state_.a_z[n]) > model_.theta[n])
                group_.push_back(static_cast<int32_t>(n));
        if (!group_.empty()) emit(StepKind::forced);
    }

    // Processes the next group of internal events up to `time`. Returns false if there are none.
    bool emit_before(double time) {
        const int first = next_unit(time + call_.tie);
        if (first < 0) return false;
        const double crossing_time = state_.key[first];
        group_.clear();
        for (int n = first; n >= 0; n = next_unit(crossing_time + call_.tie)) {
            group_.push_back(n);
            set_key(n, infinity, false);
        }
        std::sort(group_.begin(), group_.end());
        const double emission_time = std::min(crossing_time, time);
        visit_nodes(emission_time);
        position_.now = emission_time;
        if (call_.integrate) visit(emission_time, -1);  // the states of all units just before the events
        emit(StepKind::internal);
        return true;
    }

    // Visits the quadrature nodes of an integral from now to `end`, in panels in which all states are smooth.
    void visit_nodes(double end) {
        if (!call_.integrate) return;
        for (double start = position_.now; start < end;) {
            const double longest = table_.longest_panel(model_, state_, start), left = end - start;
            const bool is_last = left <= longest;
            const double h = is_last ? left : left < 2 * longest ? left / 2 : longest;
            for (int i = 0; i < model_.nodes; ++i) {
                visit(start + model_.x[i] * h, position_.nodes++);
                if (repeats_) continue;
                tape_.node_times.push_back(start + model_.x[i] * h);
                tape_.node_weights.push_back(model_.w[i] * h);
                tape_.node_c.insert(tape_.node_c.end(), state_.c, state_.c + H_);
            }
            start = is_last ? end : start + h;
        }
    }

    // Advances all units to `time`, which does not change their trajectories.
    void visit(double time, int64_t node) {
        Touch touch = touch_all();
        touch.time = time;
        apply(touch, Step{StepKind::node, true, false, -1, node, time, 0, 0, 0, 0, nullptr}, 0);
    }

    // Returns the unit that emits next if that is no later than `limit`, else -1.
    int next_unit(double limit) {
        for (;;) {
            scratch_.check(&scratch_);
            const int n = queue_.top();
            if (state_.key[n] > limit) return -1;
            if (exact_[static_cast<size_t>(n)]) return n;
            // The key is a lower bound: search for the crossing, up to the earliest known one.
            const bool known = position_.earliest >= 0 && exact_[static_cast<size_t>(position_.earliest)];
            const double earliest = known ? state_.key[position_.earliest] : infinity, bound = state_.key[n];
            // The horizon affects the crossing by rounding. Units with the same state must have the same crossing.
            const double horizon = known && bound == position_.earliest_bound
                                       ? position_.earliest_horizon
                                       : std::max(std::min(limit, earliest + call_.tie), bound + min_lookahead_);
            const Crossing crossing = table_.find_crossing(model_, n, state_.a_u[n], state_.a_z[n], state_.c[n],
                                                           horizon - state_.last[n], &scratch_);
            tape_.flow_evaluations += crossing.evaluations;
            if (crossing.outcome == Outcome::found) {
                ++tape_.root_solves;
                const double time = std::max(state_.last[n] + crossing.time, position_.now);
                if (time < earliest) {
                    position_.earliest = n;
                    position_.earliest_bound = bound;
                    position_.earliest_horizon = horizon;
                }
                set_key(n, time, true);
            } else {
                set_key(n, crossing.outcome == Outcome::never ? infinity : std::nextafter(horizon, infinity), false);
            }
        }
    }

    void set_key(int n, double key, bool exact) {
        state_.key[n] = key;
        exact_[static_cast<size_t>(n)] = exact;
        queue_.update(n);
    }

    // Emits the simultaneous events of group_, in the order of the units, with the gates from before the whole group.
    void emit(StepKind kind) {
        const size_t size = group_.size();
        before_.resize(size);
        for (size_t k = 0; k < size; ++k) {
            const int n = group_[k];
            const double q = std::exp((state_.last[n] - position_.now) / model_.tau_s_of[n]);
            before_[k] = {relaxed(model_.b_u, state_.a_u, n, decay_u(n, position_.now, q)),
                          relaxed(model_.b_r, state_.a_r, n, q), relaxed(model_.b_z, state_.a_z, n, q)};
        }
        if (model_.receiver_reset && size > 1)
            for (int m = 0; m < model_.units; ++m)
                gate_[static_cast<size_t>(m)] =
                    relaxed(model_.b_r, state_.a_r, m, std::exp((state_.last[m] - position_.now) / model_.tau_s_of[m]));
        const FanOut& fan = network_.recurrent();
        for (size_t k = 0; k < size; ++k) {
            const int n = group_[k];
            if (tape_.events >= network_.max_events()) throw TooManyEvents{sample_, position_.now};
            if (emitted_[n] == position_.now) throw UnresolvedEvents{sample_, n, position_.now};
            emitted_[n] = position_.now;
            if (!repeats_) {
                tape_.event_times.push_back(position_.now);
                tape_.event_units.push_back(n);
            }
            if (call_.integrate && !repeats_) {
                tape_.event_c.insert(tape_.event_c.end(), state_.c, state_.c + H_);
                if (kind == StepKind::internal) tape_.event_c[tape_.event_c.size() - H_ + size_t(n)] = model_.theta[n];
            }
            const auto [a_u, a_r, a_z] = before_[k];
            if (kind == StepKind::internal)
                tape_.min_slope = std::min(tape_.min_slope, z_of(a_u, a_z) - model_.theta[n]);
            const double y = network_.amplitude(n);
            o_[n] = o_[n] * std::exp((o_last_[n] - position_.now) / model_.tau_o_of[n]) + y;
            o_last_[n] = position_.now;
            const Step step{kind, k == 0, size > 1, n, tape_.events, position_.now, a_u, a_r, a_z, o_[n], nullptr};
            if (network_.lines() > 0) {
                apply(touch_emitter(&group_[k]), step, 0);
                send(n, a_r);
                position_.events = ++tape_.events;
                continue;
            }
            Touch touch = touch_receivers(fan, n, y);
            touch.emitter = fan.self_position[static_cast<size_t>(n)];
            touch.gated = model_.receiver_reset;
            if (!model_.receiver_reset) touch.scale_z = model_.linear ? y : y * sigmoid(a_r);
            if (model_.receiver_reset && size > 1) touch.gate = gate_.data();
            apply(touch, step, 0);
            position_.events = ++tape_.events;
        }
    }

    // Puts the current event of unit n on its lines.
    void send(int n, double a_r) {
        const int64_t* offsets = at<int64_t>(call_.line_offsets);
        for (int64_t line = offsets[n]; line < offsets[n + 1]; ++line) {
            const double time = position_.now + at<double>(call_.delays)[line];
            if (time > horizon_) continue;
            deliveries_.push_back({time, tape_.events, static_cast<int32_t>(line), a_r});
            std::push_heap(deliveries_.begin(), deliveries_.end(), std::greater<>());
        }
    }

    void deliver() {
        std::pop_heap(deliveries_.begin(), deliveries_.end(), std::greater<>());
        const Delivery delivery = deliveries_.back();
        deliveries_.pop_back();
        const double y = network_.amplitude(static_cast<int>(at<int64_t>(call_.line_units)[delivery.line]));
        Touch touch = touch_receivers(network_.recurrent(), delivery.line, y);
        touch.gated = model_.receiver_reset;
        if (!model_.receiver_reset && !model_.linear) touch.scale_z = y * sigmoid(delivery.a_r);
        apply(touch, Step{StepKind::delivery, true, false, delivery.line, delivery.event, position_.now, 0,
                          delivery.a_r, 0, 0, nullptr}, 0);
    }

    void apply_input(int64_t k) {
        const int channel = static_cast<int>(at<int64_t>(call_.input_channels)[k]);
        const Touch touch = touch_receivers(network_.input(), channel, at<double>(call_.input_values)[k]);
        apply(touch, Step{StepKind::input, true, false, channel, k, position_.now, 0, 0, 0, 0, nullptr}, 0);
    }

    void read(int64_t k) {
        const Step step{StepKind::readout, true, false, -1, k, position_.now, 0, 0, 0, 0, nullptr};
        double* o = apply(touch_all(), step, model_.units) + rows() * model_.units;
        for (size_t n = 0; n < H_; ++n) {
            if (o_[n] != 0) o_[n] *= std::exp((o_last_[n] - position_.now) / model_.tau_o_of[n]);
            o_last_[n] = position_.now;
            o[n] = o_[n];
        }
        if (repeats_) return;
        const int64_t to = (int64_t(sample_) * call_.readouts + k) * model_.units;
        std::copy_n(state_.c, H_, at<double>(call_.c_read) + to);
        std::copy_n(o, H_, at<double>(call_.o_read) + to);
    }

    void finish() {
        double* to = at<double>(call_.a_last) + 3 * H_ * static_cast<size_t>(sample_);
        for (int n = 0; n < model_.units; ++n) {
            const double q = std::exp((state_.last[n] - horizon_) / model_.tau_s_of[n]);
            to[n] = relaxed(model_.b_u, state_.a_u, n, decay_u(n, horizon_, q));
            to[n + model_.units] = relaxed(model_.b_r, state_.a_r, n, q);
            to[n + 2 * model_.units] = relaxed(model_.b_z, state_.a_z, n, q);
        }
        at<int64_t>(call_.event_counts)[sample_] = tape_.events;
        at<int64_t>(call_.root_solves)[sample_] = tape_.root_solves;
        at<int64_t>(call_.flow_evaluations)[sample_] = tape_.flow_evaluations;
        at<double>(call_.min_slope)[sample_] = tape_.min_slope;
    }

    double z_of(double a_u, double a_z) const {
        return model_.adaptive ? a_z - a_u : model_.linear ? a_z : std::tanh(a_z);
    }
    // The decay of a_u of unit n until `time`; `otherwise` is that of the other activations.
    double decay_u(int n, double time, double otherwise) const {
        return model_.adaptive ? std::exp((state_.last[n] - time) / model_.tau_a_of[n]) : otherwise;
    }
    int64_t rows() const { return model_.receiver_reset ? record_rows_receiver_reset : record_rows; }

    Touch touch_all() const {
        return Touch{nullptr, model_.units, -1, position_.now, nullptr, nullptr, nullptr, 0, 0, false, nullptr, true, nullptr};
    }
    Touch touch_emitter(const int32_t* unit) const {
        return Touch{unit, 1, 0, position_.now, nullptr, nullptr, nullptr, 0, 0, false, nullptr, false, nullptr};
    }
    Touch touch_receivers(const FanOut& fan, int source, double scale) const {
        const int64_t from = fan.start[static_cast<size_t>(source)];
        return Touch{fan.receivers(source), fan.count(source), -1, position_.now, fan.w[0].data() + from, fan.w[1].data() + from,
                     fan.w[2].data() + from, scale, scale, false, nullptr, false, nullptr};
    }

    // Applies a touch and records it. Returns the record, which has `extra` more doubles at its end.
    double* apply(Touch touch, Step step, int extra) {
        touch.record = tape_.records.take(rows() * touch.count + extra);
        step.record = touch.record;
        table_.advance(model_, state_, touch, &scratch_);
        tape_.flow_evaluations += touch.count;
        if (!touch.keep_keys) {
            for (int k = 0; k < touch.count; ++k) {
                const int m = touch.index != nullptr ? touch.index[k] : k;
                exact_[static_cast<size_t>(m)] = 0;
                queue_.update(m);
            }
        }
        tape_.steps.push_back(step);
        return touch.record;
    }

    struct Activations {
        double a_u, a_r, a_z;
    };

    const ContinuousCall& call_;
    const Network& network_;
    const Model& model_;
    const ContinuousTable& table_;
    SampleTape& tape_;
    const int sample_;
    const double horizon_;
    const size_t H_;
    std::vector<double> memory_;
    State state_;
    double *o_, *o_last_;         // traces, and when they were last updated
    double* emitted_;             // the time of the last event of each unit, or -1
    std::vector<uint8_t> exact_;  // whether the key is the time of the crossing, not a lower bound
    std::vector<double> gate_;    // a_r of all units before the group
    EventQueue queue_;
    SampleScratch scratch_;
    Position position_;
    bool repeats_ = false;  // a part of an earlier run, whose results are known
    // The minimum length of a search. In sparse networks most units are not affected by the next event, so a longer
    // search saves repeated ones.
    double min_lookahead_ = 0;
    std::vector<Delivery> deliveries_;  // a heap: the next one is the first
    std::vector<int32_t> group_;
    std::vector<Activations> before_;  // of the emitters, before the group
};

}  // namespace

void forward_sample(const ContinuousCall& call, const Network& network, int sample, SampleTape* tape, StopFlag* stop,
                    bool may_poll) {
    ForwardSample(call, network, sample, tape, stop, may_poll).run();
}

void repeat_part(const ContinuousCall& call, const Network& network, int sample, const Checkpoint& from,
                 SampleTape* tape, StopFlag* stop, bool may_poll) {
    ForwardSample(call, network, sample, tape, stop, may_poll).repeat(from);
}

}  // namespace egru::continuous
