// The backward pass of one sample: the adjoint of every step, from the last to the first. p_x is the derivative, with
// respect to x, of the part of the loss that lies later in time; the jumps at events are those of docs/concepts/continuous.md.
#include <algorithm>
#include <cmath>

#include "continuous/batch.hpp"

namespace egru::continuous {
namespace {

double sigmoid(double a) { return 1 / (1 + std::exp(-a)); }

class BackwardSample {
public:
    BackwardSample(const ContinuousCall& call, const Tape& tape, int sample, int64_t first_event, int64_t first_node,
                   Gradients* gradients, StopFlag* stop, bool may_poll)
        : call_(call), network_(tape.network), model_(network_.model()), table_(EGRU_PICK(continuous_table)),
          tape_(tape.samples[static_cast<size_t>(sample)]), sample_(static_cast<size_t>(sample)),
          first_event_(first_event), first_node_(first_node), H_(static_cast<size_t>(call.units)), memory_(8 * H_), gradients_(*gradients),
          stop_(stop), may_poll_(may_poll), scratch_(stop, may_poll),
          delivered_(network_.lines() > 0 ? static_cast<size_t>(tape_.events) : 0) {
        double* at = memory_.data();
        adjoint_ = Adjoint{at, at + H_, at + 2 * H_, at + 3 * H_, at + 4 * H_, gradients_.b[0].data(),
                           gradients_.b[1].data(), gradients_.b[2].data(), gradients_.tau_s.data(),
                           gradients_.tau_m.data(), gradients_.tau_a.data()};
        p_o_ = at + 5 * H_;
        o_time_ = at + 6 * H_;
        pending_p_r_ = at + 7 * H_;
        const double horizon = egru::continuous::at<double>(call.horizons)[sample];
        std::fill_n(adjoint_.time, H_, horizon);
        std::fill_n(o_time_, H_, horizon);
        if (call.cotangent_a_last != 0)  // p_u, p_r, p_z are adjacent
            std::copy_n(egru::continuous::at<double>(call.cotangent_a_last) + 3 * H_ * sample_, 3 * H_, adjoint_.p_u);
    }

    void run() {
        pull_back(tape_.steps);
        for (size_t k = tape_.checkpoints.size(); k-- > 1;) {  // the steps from the last one on are on the tape
            SampleTape part;
            repeat_part(call_, network_, static_cast<int>(sample_), tape_.checkpoints[k - 1], &part, stop_, may_poll_);
            pull_back(part.steps);
        }
        at<int64_t>(call_.floored)[sample_] = floored_;
    }

private:
    void pull_back(const std::vector<Step>& steps) {
        for (size_t k = steps.size(); k-- > 0;) {
            scratch_.check(&scratch_);
            const Step& step = steps[k];
            switch (step.kind) {
                case StepKind::internal:
                case StepKind::forced: network_.lines() > 0 ? emission(step) : internal(step); break;
                case StepKind::delivery: delivery(step); break;
                case StepKind::input: input(step); break;
                case StepKind::readout: readout(step); break;
                case StepKind::node: node(step); break;
                case StepKind::start: start(step); break;
            }
        }
    }

    void internal(const Step& step) {
        const int n = step.source;
        const FanOut& fan = network_.recurrent();
        const double y = network_.amplitude(n), r = model_.linear ? 1 : sigmoid(step.a_r);
        TouchAdjoint touch = touch_receivers(fan, n, y, step, gradients_.V);
        touch.emitter = fan.self_position[static_cast<size_t>(n)];
        touch.gated = model_.receiver_reset;
        touch.pending_p_r = step.grouped ? pending_p_r_ : nullptr;
        if (!model_.receiver_reset) touch.scale_z = y * r;
        // Processed members of the group emit at the time of the group, so this jump does not move them.
        for (ProcessedMember& member : processed_) {
            member.p_c = adjoint_.p_c[member.unit];
            adjoint_.p_c[member.unit] = 0;
        }
        ReceiverSums sums = table_.pull_back(model_, &adjoint_, touch, &scratch_);
        for (const ProcessedMember& member : processed_) adjoint_.p_c[member.unit] = member.p_c;
        const double dr = r * (1 - r), ungated_z = sums.z;
        if (!model_.receiver_reset) {
            sums.z_rate = dr * (model_.b_r[n] - step.a_r) / model_.tau_s_of[n] * ungated_z;
            sums.z = r * ungated_z;
            sums.rate_z *= r;
        }
        pull_back_trace(n, step.time, step.o);

        const double slope_after = sums.emitter_u * sums.emitter_z / model_.tau_m_of[n];  // c is 0
        const double sum = sums.u + sums.r + sums.z;
        reset(step, slope_after, sums.slope + y * (sums.rate + sums.rate_z + sums.z_rate), sum);

        if (!step.grouped) {
            if (!model_.receiver_reset) adjoint_.p_r[n] += y * dr * ungated_z;
            return;
        }
        if (!model_.receiver_reset) pending_p_r_[n] += y * dr * ungated_z;
        processed_.push_back({n, 0});
        if (!step.first) return;
        for (size_t m = 0; m < H_; ++m) {
            adjoint_.p_r[m] += pending_p_r_[m];
            pending_p_r_[m] = 0;
        }
        processed_.clear();
    }

    // Pulls back across the threshold and the reset of an emitter, given its slope after the reset, the derivative of
    // the loss by the times of the jumps of the receivers, and that by the amplitude, times 1 / y.
    void reset(const Step& step, double slope_after, double by_jumps, double sum) {
        const int n = step.source;
        const int64_t event = first_event_ + step.index;
        double by_own_jump = 0;  // of the adaptation current
        if (model_.adaptive) {
            by_own_jump = model_.beta[n] / model_.tau_a_of[n] * adjoint_.p_u[n];
            gradients_.beta[static_cast<size_t>(n)] += adjoint_.p_u[n];
        }
        const double by_event_time = -adjoint_.p_c[n] * slope_after + by_jumps +
                                     network_.amplitude(n) / model_.tau_o_of[n] * p_o_[n] +
                                     at<double>(call_.cotangent_times)[event] + by_own_jump;
        double p_c_before = 0;
        double& theta = gradients_.theta[static_cast<size_t>(n)];
        if (step.kind == StepKind::internal) {
            const double rise = z_before(step) - model_.theta[n];
            const double u = model_.linear ? 1 : sigmoid(step.a_u);
            floored_ += rise < call_.grazing_floor;
            p_c_before = -by_event_time * model_.tau_m_of[n] / (u * std::max(rise, call_.grazing_floor));
            theta -= p_c_before;
        }
        if (!call_.unit_amplitude) theta += sum + p_o_[n] + at<double>(call_.cotangent_amplitudes)[event];
        adjoint_.p_c[n] = p_c_before;
    }

    // An event whose receivers are reached later, by deliveries: only the emitter jumps.
    void emission(const Step& step) {
        const int n = step.source;
        const TouchAdjoint touch{&step.source, 1, 0, step.time, step.record, nullptr, nullptr, nullptr, 0, 0, false,
                                 nullptr, nullptr, nullptr, nullptr};
        table_.pull_back(model_, &adjoint_, touch, &scratch_);
        pull_back_trace(n, step.time, step.o);
        const Delivered& sent = delivered_[static_cast<size_t>(step.index)];
        const double u = model_.linear ? 1 : sigmoid(step.a_u), jump = model_.adaptive ? model_.beta[n] : 0;
        double by_jumps = sent.by_time;
        if (!model_.receiver_reset && !model_.linear) {  // the reset gate is that of the time of the event
            const double r = sigmoid(step.a_r), through_gate = network_.amplitude(n) * r * (1 - r) * sent.z;
            by_jumps += through_gate * (model_.b_r[n] - step.a_r) / model_.tau_s_of[n];
            adjoint_.p_r[n] += through_gate;
        }
        reset(step, u * (z_before(step) - jump) / model_.tau_m_of[n], by_jumps, sent.sum);
    }

    void delivery(const Step& step) {
        const double y = network_.amplitude(static_cast<int>(at<int64_t>(call_.line_units)[step.source]));
        const double r = model_.linear ? 1 : sigmoid(step.a_r);
        TouchAdjoint touch = touch_receivers(network_.recurrent(), step.source, y, step, gradients_.V);
        touch.gated = model_.receiver_reset;
        if (!model_.receiver_reset) touch.scale_z = y * r;
        const ReceiverSums sums = table_.pull_back(model_, &adjoint_, touch, &scratch_);
        const double gate = model_.receiver_reset ? 1 : r, sum = sums.u + sums.r + gate * sums.z;
        const double by_time = sums.slope + y * (sums.rate + gate * sums.rate_z + sums.z_rate);
        Delivered& sent = delivered_[static_cast<size_t>(step.index)];
        sent.by_time += by_time;
        sent.sum += sum;
        sent.z += sums.z;
        gradients_.delays[static_cast<size_t>(step.source)] += by_time;
    }

    void input(const Step& step) {
        const double x = at<double>(call_.input_values)[step.index];
        const TouchAdjoint touch = touch_receivers(network_.input(), step.source, x, step, gradients_.U);
        const ReceiverSums sums = table_.pull_back(model_, &adjoint_, touch, &scratch_);
        at<double>(call_.grad_input_values)[step.index] = sums.u + sums.r + sums.z;
        at<double>(call_.grad_input_times)[step.index] = sums.slope + x * (sums.rate + sums.rate_z);
    }

    void readout(const Step& step) {
        table_.pull_back(model_, &adjoint_, touch_all(step), &scratch_);
        const size_t from = (sample_ * static_cast<size_t>(call_.readouts) + static_cast<size_t>(step.index)) * H_;
        const double* by_c = at<double>(call_.cotangent_c_read) + from;
        const double* by_o = at<double>(call_.cotangent_o_read) + from;
        const int64_t rows = model_.receiver_reset ? record_rows_receiver_reset : record_rows;
        const double* o = step.record + static_cast<int64_t>(H_) * rows;
        for (size_t n = 0; n < H_; ++n) {
            adjoint_.p_c[n] += by_c[n];
            pull_back_trace(static_cast<int>(n), step.time, o[n]);
            p_o_[n] += by_o[n];
        }
    }

    void node(const Step& step) {
        table_.pull_back(model_, &adjoint_, touch_all(step), &scratch_);
        if (step.index < 0 || call_.cotangent_nodes == 0) return;
        const double* by_c = at<double>(call_.cotangent_nodes) + static_cast<size_t>(first_node_ + step.index) * H_;
        for (size_t n = 0; n < H_; ++n) adjoint_.p_c[n] += by_c[n];
    }

    void start(const Step& step) {
        table_.pull_back(model_, &adjoint_, touch_all(step), &scratch_);
        std::copy_n(adjoint_.p_u, 3 * H_, at<double>(call_.grad_a0) + 3 * H_ * sample_);
        std::copy_n(adjoint_.p_c, H_, at<double>(call_.grad_c0) + H_ * sample_);
    }

    // z of the emitter before the event.
    double z_before(const Step& step) const {
        return model_.adaptive ? step.a_z - step.a_u : model_.linear ? step.a_z : std::tanh(step.a_z);
    }

    // Pulls the adjoint of the trace of unit n back to `time`, when the trace was `o`.
    void pull_back_trace(int n, double time, double o) {
        const double span = o_time_[n] - time;
        o_time_[n] = time;
        if (p_o_[n] == 0 || span <= 0) return;
        const double tau_o = model_.tau_o_of[n];
        p_o_[n] *= std::exp(-span / tau_o);
        gradients_.tau_o[static_cast<size_t>(n)] += p_o_[n] * o * span / (tau_o * tau_o);
    }

    TouchAdjoint touch_all(const Step& step) const {
        return TouchAdjoint{nullptr, model_.units, -1, step.time, step.record, nullptr, nullptr, nullptr, 0, 0, false,
                            nullptr, nullptr, nullptr, nullptr};
    }
    TouchAdjoint touch_receivers(const FanOut& fan, int source, double scale, const Step& step,
                                 std::vector<double>* gradient) const {
        const int64_t from = fan.start[static_cast<size_t>(source)];
        return TouchAdjoint{fan.receivers(source), fan.count(source), -1, step.time, step.record,
                            fan.w[0].data() + from, fan.w[1].data() + from, fan.w[2].data() + from, scale, scale, false,
                            nullptr, gradient[0].data() + from, gradient[1].data() + from, gradient[2].data() + from};
    }

    // What the deliveries of one event have summed: the derivative of the loss by their times, and the sums over their
    // receivers of w_x p_x: over the gates, and for gate z without the reset gate.
    struct Delivered {
        double by_time = 0, sum = 0, z = 0;
    };

    struct ProcessedMember {
        int unit;
        double p_c;
    };

    const ContinuousCall& call_;
    const Network& network_;
    const Model& model_;
    const ContinuousTable& table_;
    const SampleTape& tape_;
    const size_t sample_;
    const int64_t first_event_, first_node_;
    const size_t H_;
    std::vector<double> memory_;
    Adjoint adjoint_;
    double *p_o_, *o_time_;  // the adjoint of the traces, and the time it refers to
    double* pending_p_r_;    // what the reset gates of the current group add to p_r before the group
    Gradients& gradients_;
    StopFlag* stop_;
    bool may_poll_;
    SampleScratch scratch_;
    std::vector<Delivered> delivered_;        // by event
    std::vector<ProcessedMember> processed_;  // members of the current group of simultaneous events
    int64_t floored_ = 0;
};

}  // namespace

void backward_sample(const ContinuousCall& call, const Tape& tape, int sample, int64_t first_event, int64_t first_node,
                     Gradients* gradients, StopFlag* stop, bool may_poll) {
    BackwardSample(call, tape, sample, first_event, first_node, gradients, stop, may_poll).run();
}

}  // namespace egru::continuous
