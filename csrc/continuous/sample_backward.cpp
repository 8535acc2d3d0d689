// One sample backward: the adjoint of every step, last to first. p_x is the derivative of the loss by what lies later.
#include <algorithm>
#include <cmath>

#include "continuous/batch.hpp"

namespace egru::continuous {
namespace {

double sigmoid(double a) { return 1 / (1 + std::exp(-a)); }

class PullBack {
public:
    PullBack(const ContinuousCall& call, const Tape& tape, int number, int64_t first_event, Gradients* gradients)
        : call_(call), network_(tape.network), model_(network_.model()), table_(EGRU_PICK(continuous_table)),
          sample_(tape.samples[static_cast<size_t>(number)]), number_(static_cast<size_t>(number)),
          first_event_(first_event), H_(static_cast<size_t>(call.units)), memory_(8 * H_), gradients_(*gradients) {
        double* at = memory_.data();
        p_ = Adjoint{at, at + H_, at + 2 * H_, at + 3 * H_, at + 4 * H_, gradients_.b[0].data(), gradients_.b[1].data(),
                     gradients_.b[2].data(), 0, 0};
        p_o_ = at + 5 * H_;
        o_back_ = at + 6 * H_;
        waiting_ = at + 7 * H_;
        std::fill_n(p_.back, H_, call.horizon);
        std::fill_n(o_back_, H_, call.horizon);
        if (call.by_a_last != 0)  // u, r, z are adjacent
            std::copy_n(egru::continuous::at<double>(call.by_a_last) + 3 * H_ * number_, 3 * H_, p_.u);
    }

    void run(Stop* stop, bool caller) {
        for (size_t k = sample_.steps.size(); k-- > 0;) {
            stop->check(caller);
            const Step& step = sample_.steps[k];
            switch (step.kind) {
                case Kind::internal:
                case Kind::forced: internal(step); break;
                case Kind::input: input(step); break;
                case Kind::readout: readout(step); break;
                case Kind::start: start(step); break;
            }
        }
        gradients_.tau_s += p_.tau_s;
        gradients_.tau_m += p_.tau_m;
        gradients_.tau_o += tau_o_;
        at<int64_t>(call_.floored)[number_] = floored_;
    }

private:
    void internal(const Step& step) {
        const int n = step.unit;
        const Fan& fan = network_.recurrent();
        const double y = network_.amplitude(n), r = sigmoid(step.a_r);
        Pull pull = jump_of(fan, n, y, step, gradients_.V);
        pull.emitter = fan.itself[static_cast<size_t>(n)];
        pull.gated = model_.receiver;
        pull.waiting = step.grouped ? waiting_ : nullptr;
        if (!model_.receiver) pull.scale_z = y * r;
        for (Passed& later : passed_) {  // their times are that of the group: none of them moves by this jump
            later.p = p_.c[later.unit];
            p_.c[later.unit] = 0;
        }
        Sums sums = table_.pull(model_, &p_, pull, &room_);
        for (const Passed& later : passed_) p_.c[later.unit] = later.p;
        const double dr = r * (1 - r), received = sums.z;
        if (!model_.receiver) {
            sums.z_rate = dr * (model_.b_r[n] - step.a_r) / model_.tau_s * received;
            sums.z = r * received;
        }
        pull_trace(n, step.time, step.o);

        const double* own = step.tape + pull.emitter;  // just after the event, when c is 0
        const double after = sigmoid(own[0]) * std::tanh(own[2 * pull.count]) / model_.tau_m;
        const double carried = sums.u + sums.r + sums.z;
        const int64_t event = first_event_ + step.item;
        const double by_event_time = -p_.c[n] * after + sums.slope + y * (carried / model_.tau_s + sums.z_rate) +
                                     y / model_.tau_o * p_o_[n] + at<double>(call_.by_time)[event];
        double before = 0;
        double& theta = gradients_.theta[static_cast<size_t>(n)];
        if (step.kind == Kind::internal) {
            const double rise = std::tanh(step.a_z) - model_.theta[n];
            floored_ += rise < call_.floor;
            before = -by_event_time * model_.tau_m / (sigmoid(step.a_u) * std::max(rise, call_.floor));
            theta -= before;
        }
        if (!call_.unit_amplitude) theta += carried + p_o_[n] + at<double>(call_.by_amplitude)[event];
        p_.c[n] = before;

        if (!step.grouped) {
            if (!model_.receiver) p_.r[n] += y * dr * received;
            return;
        }
        if (!model_.receiver) waiting_[n] += y * dr * received;
        passed_.push_back({n, 0});
        if (!step.first) return;
        for (size_t m = 0; m < H_; ++m) {
            p_.r[m] += waiting_[m];
            waiting_[m] = 0;
        }
        passed_.clear();
    }

    void input(const Step& step) {
        const double x = at<double>(call_.input_values)[step.item];
        const Sums sums = table_.pull(model_, &p_, jump_of(network_.input(), step.unit, x, step, gradients_.U), &room_);
        const double carried = sums.u + sums.r + sums.z;
        at<double>(call_.grad_input_values)[step.item] = carried;
        at<double>(call_.grad_input_times)[step.item] = sums.slope + x * carried / model_.tau_s;
    }

    void readout(const Step& step) {
        table_.pull(model_, &p_, everyone(step), &room_);
        const size_t from = (number_ * static_cast<size_t>(call_.readouts) + static_cast<size_t>(step.item)) * H_;
        const double *by_c = at<double>(call_.by_c_read) + from, *by_o = at<double>(call_.by_o_read) + from;
        const double* o = step.tape + static_cast<int64_t>(H_) * (model_.receiver ? tape_rows_receiver : tape_rows);
        for (size_t n = 0; n < H_; ++n) {
            p_.c[n] += by_c[n];
            pull_trace(static_cast<int>(n), step.time, o[n]);
            p_o_[n] += by_o[n];
        }
    }

    void start(const Step& step) {
        table_.pull(model_, &p_, everyone(step), &room_);
        std::copy_n(p_.u, 3 * H_, at<double>(call_.grad_a0) + 3 * H_ * number_);
        std::copy_n(p_.c, H_, at<double>(call_.grad_c0) + H_ * number_);
    }

    // The trace of unit n, back to `time`, when it was `o`.
    void pull_trace(int n, double time, double o) {
        const double span = o_back_[n] - time;
        o_back_[n] = time;
        if (p_o_[n] == 0 || span <= 0) return;
        p_o_[n] *= std::exp(-span / model_.tau_o);
        tau_o_ += p_o_[n] * o * span / (model_.tau_o * model_.tau_o);
    }

    Pull everyone(const Step& step) const {
        return Pull{nullptr, model_.units, -1, step.time, step.tape, nullptr, nullptr, nullptr, 0, 0, false, nullptr,
                    nullptr, nullptr, nullptr};
    }
    Pull jump_of(const Fan& fan, int source, double scale, const Step& step, std::vector<double>* gradient) const {
        const int64_t from = fan.start[static_cast<size_t>(source)];
        return Pull{fan.list(source), fan.count(source), -1, step.time, step.tape, fan.w[0].data() + from,
                    fan.w[1].data() + from, fan.w[2].data() + from, scale, scale, false, nullptr,
                    gradient[0].data() + from, gradient[1].data() + from, gradient[2].data() + from};
    }

    struct Passed {
        int unit;
        double p;
    };

    const ContinuousCall& call_;
    const Network& network_;
    const Model& model_;
    const ContinuousTable& table_;
    const Sample& sample_;
    const size_t number_;
    const int64_t first_event_;
    const size_t H_;
    std::vector<double> memory_;
    Adjoint p_;
    double *p_o_, *o_back_, *waiting_;
    Gradients& gradients_;
    Room room_;
    std::vector<Passed> passed_;  // members of the present group that have been passed, on the way back
    double tau_o_ = 0;
    int64_t floored_ = 0;
};

}  // namespace

void pull_back(const ContinuousCall& call, const Tape& tape, int number, int64_t first_event, Gradients* gradients,
               Stop* stop, bool caller) {
    PullBack(call, tape, number, first_event, gradients).run(stop, caller);
}

}  // namespace egru::continuous
