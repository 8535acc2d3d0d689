// One sample forward: from event to event, units brought up to date only when something reaches them.
#include <algorithm>
#include <cmath>
#include <limits>

#include "continuous/event_queue.hpp"
#include "continuous/batch.hpp"

namespace egru::continuous {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr int few_units = 256;  // a search through this many keys is cheaper than a heap

double sigmoid(double a) { return 1 / (1 + std::exp(-a)); }
double relaxed(const double* b, const double* a, int n, double decay) { return b[n] + (a[n] - b[n]) * decay; }

class Simulation {
public:
    Simulation(const ContinuousCall& call, const Network& network, int number, Sample* sample)
        : call_(call), network_(network), model_(network.model()), table_(EGRU_PICK(continuous_table)), sample_(*sample),
          number_(number), H_(static_cast<size_t>(call.units)), memory_(8 * H_), exact_(H_), gate_(call.receiver ? H_ : 0),
          queue_(memory_.data() + 5 * H_, call.units,
                 call.units > few_units && network.recurrent().mean() < call.units / 16.0, table_.lowest) {
        if (network.recurrent().mean() < call.units / 4.0) ahead_ = 0.1 / (1 / call.tau_s + 1 / call.tau_m);
        double* at = memory_.data();
        state_ = State{at, at + H_, at + 2 * H_, at + 3 * H_, at + 4 * H_, at + 5 * H_};
        o_ = at + 6 * H_;
        o_last_ = at + 7 * H_;
        sample_.min_slope = infinity;
    }

    void run(Stop* stop, bool caller) {
        stop_ = stop;
        caller_ = caller;
        begin();
        const int64_t* offsets = at<int64_t>(call_.input_offsets);
        const double *inputs = at<double>(call_.input_times), *readouts = at<double>(call_.readout_times);
        int64_t input = offsets[number_], readout = 0;
        for (;;) {  // at one instant: internal events, inputs, readouts
            const double in = input < offsets[number_ + 1] ? inputs[input] : infinity;
            const double out = readout < call_.readouts ? readouts[readout] : infinity;
            const double time = std::min(std::min(in, out), call_.horizon);
            emit_until(time);
            if (in <= time)
                receive(input++);
            else if (out <= time)
                read(readout++);
            else
                break;
        }
        finish();
    }

private:
    void begin() {
        const double *a0 = at<double>(call_.a0) + 3 * H_ * static_cast<size_t>(number_);
        const double *c0 = at<double>(call_.c0) + H_ * static_cast<size_t>(number_);
        std::copy_n(a0, 3 * H_, state_.a_u);  // a_u, a_r, a_z are adjacent
        std::copy_n(c0, H_, state_.c);
        Touch touch = everyone();
        touch.keep_keys = false;
        touch_units(touch, Step{Kind::start, true, false, -1, 0, 0, 0, 0, 0, 0, nullptr}, 0);
        group_.clear();
        for (size_t n = 0; n < H_; ++n)
            if (state_.c[n] >= model_.theta[n] && std::tanh(state_.a_z[n]) > model_.theta[n])
                group_.push_back(static_cast<int32_t>(n));
        if (!group_.empty()) fire(Kind::forced);
    }

    // All internal events up to `time`.
    void emit_until(double time) {
        while (now_ < time) {
            stop_->check(caller_);
            const int first = next(time + call_.tie);
            if (first < 0) break;
            const double crossed = state_.key[first];
            group_.clear();
            for (int n = first; n >= 0; n = next(crossed + call_.tie)) {
                group_.push_back(n);
                set_key(n, infinity, false);
            }
            std::sort(group_.begin(), group_.end());
            now_ = std::min(crossed, time);
            fire(Kind::internal);
        }
        now_ = time;
    }

    // The unit that fires next if that is no later than `limit`, else -1.
    int next(double limit) {
        for (;;) {
            const int n = queue_.top();
            if (state_.key[n] > limit) return -1;
            if (exact_[static_cast<size_t>(n)]) return n;
            const double best = best_ >= 0 && exact_[static_cast<size_t>(best_)] ? state_.key[best_] : infinity;
            const double horizon = std::max(std::min(limit, best + call_.tie), state_.key[n] + ahead_);
            const Crossing found =
                table_.crossing(model_, n, state_.a_u[n], state_.a_z[n], state_.c[n], horizon - state_.last[n]);
            sample_.evaluations += found.evaluations;
            if (found.outcome == Outcome::found) {
                ++sample_.solves;
                const double time = std::max(state_.last[n] + found.time, now_);
                if (time < best) best_ = n;
                set_key(n, time, true);
            } else {
                set_key(n, found.outcome == Outcome::never ? infinity : std::nextafter(horizon, infinity), false);
            }
        }
    }

    void set_key(int n, double key, bool exact) {
        state_.key[n] = key;
        exact_[static_cast<size_t>(n)] = exact;
        queue_.changed(n);
    }

    // The group of simultaneous events, in the order of their units; gates are those before the whole group.
    void fire(Kind kind) {
        const size_t size = group_.size();
        before_.resize(size);
        for (size_t k = 0; k < size; ++k) {
            const int n = group_[k];
            const double q = std::exp((state_.last[n] - now_) / model_.tau_s);
            before_[k] = {relaxed(model_.b_u, state_.a_u, n, q), relaxed(model_.b_r, state_.a_r, n, q),
                          relaxed(model_.b_z, state_.a_z, n, q)};
        }
        if (model_.receiver && size > 1)
            for (int m = 0; m < model_.units; ++m)
                gate_[static_cast<size_t>(m)] =
                    relaxed(model_.b_r, state_.a_r, m, std::exp((state_.last[m] - now_) / model_.tau_s));
        const Fan& fan = network_.recurrent();
        for (size_t k = 0; k < size; ++k) {
            const int n = group_[k];
            if (sample_.events >= call_.limit) throw TooManyEvents{number_, now_};
            const auto [a_u, a_r, a_z] = before_[k];
            if (kind == Kind::internal)
                sample_.min_slope = std::min(sample_.min_slope, std::tanh(a_z) - model_.theta[n]);
            const double y = network_.amplitude(n);
            o_[n] = o_[n] * std::exp((o_last_[n] - now_) / model_.tau_o) + y;
            o_last_[n] = now_;
            Touch touch = jump_of(fan, n, y);
            touch.emitter = fan.itself[static_cast<size_t>(n)];
            touch.gated = model_.receiver;
            if (!model_.receiver) touch.scale_z = y * sigmoid(a_r);
            if (model_.receiver && size > 1) touch.gate = gate_.data();
            touch_units(touch, Step{kind, k == 0, size > 1, n, sample_.events, now_, a_u, a_r, a_z, o_[n], nullptr}, 0);
            ++sample_.events;
        }
    }

    void receive(int64_t k) {
        const int channel = static_cast<int>(at<int64_t>(call_.input_channels)[k]);
        const Touch touch = jump_of(network_.input(), channel, at<double>(call_.input_values)[k]);
        touch_units(touch, Step{Kind::input, true, false, channel, k, now_, 0, 0, 0, 0, nullptr}, 0);
    }

    void read(int64_t k) {
        const Step step{Kind::readout, true, false, -1, k, now_, 0, 0, 0, 0, nullptr};
        double* o = touch_units(everyone(), step, model_.units) + rows() * model_.units;
        for (size_t n = 0; n < H_; ++n) {
            if (o_[n] != 0) o_[n] *= std::exp((o_last_[n] - now_) / model_.tau_o);
            o_last_[n] = now_;
            o[n] = o_[n];
        }
        const int64_t to = (int64_t(number_) * call_.readouts + k) * model_.units;
        std::copy_n(state_.c, H_, at<double>(call_.c_read) + to);
        std::copy_n(o, H_, at<double>(call_.o_read) + to);
    }

    void finish() {
        double* to = at<double>(call_.a_last) + 3 * H_ * static_cast<size_t>(number_);
        for (int n = 0; n < model_.units; ++n) {
            const double q = std::exp((state_.last[n] - call_.horizon) / model_.tau_s);
            to[n] = relaxed(model_.b_u, state_.a_u, n, q);
            to[n + model_.units] = relaxed(model_.b_r, state_.a_r, n, q);
            to[n + 2 * model_.units] = relaxed(model_.b_z, state_.a_z, n, q);
        }
    }

    int64_t rows() const { return model_.receiver ? tape_rows_receiver : tape_rows; }

    Touch everyone() const {
        return Touch{nullptr, model_.units, -1, now_, nullptr, nullptr, nullptr, 0, 0, false, nullptr, true, nullptr};
    }
    Touch jump_of(const Fan& fan, int source, double scale) const {
        const int64_t from = fan.start[static_cast<size_t>(source)];
        return Touch{fan.list(source), fan.count(source), -1, now_, fan.w[0].data() + from, fan.w[1].data() + from,
                     fan.w[2].data() + from, scale, scale, false, nullptr, false, nullptr};
    }

    double* touch_units(Touch touch, Step step, int more) {
        touch.tape = sample_.tape.take(rows() * touch.count + more);
        step.tape = touch.tape;
        table_.advance(model_, state_, touch, &room_);
        sample_.evaluations += touch.count;
        if (!touch.keep_keys) {
            for (int k = 0; k < touch.count; ++k) {
                const int m = touch.index != nullptr ? touch.index[k] : k;
                exact_[static_cast<size_t>(m)] = 0;
                queue_.changed(m);
            }
        }
        sample_.steps.push_back(step);
        return touch.tape;
    }

    struct Before {
        double a_u, a_r, a_z;
    };

    const ContinuousCall& call_;
    const Network& network_;
    const Model& model_;
    const ContinuousTable& table_;
    Sample& sample_;
    const int number_;
    const size_t H_;
    std::vector<double> memory_;
    State state_;
    double *o_, *o_last_;
    std::vector<uint8_t> exact_;  // whether the key is the time of the crossing
    std::vector<double> gate_;
    Queue queue_;
    Room room_;
    double now_ = 0;
    double ahead_ = 0;  // how far to look at least: what an event does not reach need not be searched again after it
    int best_ = -1;  // a unit with the least exact key, unless it has been touched since
    std::vector<int32_t> group_;
    std::vector<Before> before_;
    Stop* stop_ = nullptr;
    bool caller_ = false;
};

}  // namespace

void simulate(const ContinuousCall& call, const Network& network, int number, Sample* sample, Stop* stop, bool caller) {
    Simulation(call, network, number, sample).run(stop, caller);
}

}  // namespace egru::continuous
