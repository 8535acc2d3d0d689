#include "continuous/batch.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>

#include "common/threads.hpp"

namespace egru::continuous {
namespace {

constexpr int64_t poll_interval = 20'000'000;             // nanoseconds
constexpr size_t max_gradient_bytes = size_t(256) << 20;  // for all partial sums of a backward pass but the first
constexpr int max_partial_sums = 16;

int64_t nanoseconds() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// Runs work(i, may_poll) for i in [0, count) on up to `threads` threads. If several items throw, the exception of the
// smallest i is rethrown: items after a failed one may be skipped, items before it never are.
template <class Work>
void parallel_for(int count, int threads, StopFlag* stop, Work work) {
    std::atomic<int> next{0}, done{0}, failed{count};
    std::mutex guard;
    std::exception_ptr error;
    run_team(std::min(threads, count), [&](const Team& team) {
        const bool may_poll = team.index == 0;
        for (int i; (i = next.fetch_add(1)) < count; done.fetch_add(1)) {
            if (stop->requested() || i > failed.load()) continue;
            try {
                work(i, may_poll);
            } catch (...) {
                const std::lock_guard<std::mutex> lock(guard);
                if (i < failed.load()) {
                    failed.store(i);
                    error = std::current_exception();
                }
            }
        }
        while (may_poll && done.load() < count) {
            try {
                stop->check(true);
            } catch (const Interrupted&) {
            }
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
    });
    if (stop->requested()) throw Interrupted();
    if (error) std::rethrow_exception(error);
}

void add_to(std::vector<double>& sum, const std::vector<double>& other) {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += other[i];
}

}  // namespace

void StopFlag::check(bool may_poll) {
    if (may_poll && poll_ != nullptr && ++checks_ % 8 == 0) {
        const int64_t now = nanoseconds();
        if (now - last_poll_ > poll_interval) {
            last_poll_ = now;
            if (poll_()) request();
        }
    }
    if (requested()) throw Interrupted();
}

int64_t Tape::event_count() const {
    int64_t sum = 0;
    for (const SampleTape& sample : samples) sum += sample.events;
    return sum;
}

void Tape::copy_events(double* times, int64_t* units, int64_t* offsets) const {
    *offsets = 0;
    for (const SampleTape& sample : samples) {
        times = std::copy(sample.event_times.begin(), sample.event_times.end(), times);
        units = std::copy(sample.event_units.begin(), sample.event_units.end(), units);
        offsets[1] = offsets[0] + sample.events;
        ++offsets;
    }
}

int64_t Tape::node_count() const {
    int64_t sum = 0;
    for (const SampleTape& sample : samples) sum += static_cast<int64_t>(sample.node_times.size());
    return sum;
}

void Tape::copy_nodes(double* times, double* weights, int64_t* which, double* c, double* event_c) const {
    for (size_t s = 0; s < samples.size(); ++s) {
        const SampleTape& sample = samples[s];
        times = std::copy(sample.node_times.begin(), sample.node_times.end(), times);
        weights = std::copy(sample.node_weights.begin(), sample.node_weights.end(), weights);
        which = std::fill_n(which, sample.node_times.size(), static_cast<int64_t>(s));
        c = std::copy(sample.node_c.begin(), sample.node_c.end(), c);
        event_c = std::copy(sample.event_c.begin(), sample.event_c.end(), event_c);
    }
}

size_t Tape::record_bytes() const {
    size_t sum = 0;
    for (const SampleTape& sample : samples) {
        sum += sample.records.bytes() + sample.steps.capacity() * sizeof(Step);
        for (const Checkpoint& point : sample.checkpoints)
            sum += sizeof(Checkpoint) + point.memory.size() * sizeof(double) + point.exact.size() +
                   point.order.positions.size() * (sizeof(size_t) + 16);
    }
    return sum;
}

std::unique_ptr<Tape> forward(const ContinuousCall& call, Poll poll) {
    auto tape = std::make_unique<Tape>(call);
    StopFlag stop(poll);
    parallel_for(call.batch, call.threads, &stop, [&](int i, bool may_poll) {
        forward_sample(call, tape->network, i, &tape->samples[static_cast<size_t>(i)], &stop, may_poll);
    });
    return tape;
}

Gradients::Gradients(const Network& network) : theta(static_cast<size_t>(network.model().units)), delays(static_cast<size_t>(network.lines())) {
    for (auto& g : V) g.resize(static_cast<size_t>(network.recurrent().size()));
    for (auto& g : U) g.resize(static_cast<size_t>(network.input().size()));
    for (auto& g : b) g.resize(theta.size());
    tau_s.resize(network.model().shared_tau ? 1 : theta.size());
    tau_m.resize(tau_s.size());
    tau_o.resize(theta.size());
    beta.resize(network.model().adaptive ? theta.size() : 0);
    tau_a.resize(beta.size());
}

void Gradients::add(const Gradients& other) {
    for (int g = 0; g < 3; ++g) {
        add_to(V[g], other.V[g]);
        add_to(U[g], other.U[g]);
        add_to(b[g], other.b[g]);
    }
    add_to(theta, other.theta);
    add_to(delays, other.delays);
    add_to(tau_s, other.tau_s);
    add_to(tau_m, other.tau_m);
    add_to(tau_o, other.tau_o);
    add_to(beta, other.beta);
    add_to(tau_a, other.tau_a);
}

void backward(const ContinuousCall& call, const Tape& tape, Poll poll) {
    const Network& network = tape.network;
    // Each partial sum covers consecutive samples. Their number depends only on the problem, so that the result does
    // not depend on the number of threads.
    const size_t weights = 3 * static_cast<size_t>(network.recurrent().size() + network.input().size());
    const int fitting = static_cast<int>(1 + max_gradient_bytes / (sizeof(double) * weights + 1));
    const int sums = std::max(1, std::min({call.batch, max_partial_sums, fitting}));
    std::vector<std::unique_ptr<Gradients>> partial(static_cast<size_t>(sums));
    std::vector<int64_t> first_event{0}, first_node{0};
    for (const SampleTape& sample : tape.samples) {
        first_event.push_back(first_event.back() + sample.events);
        first_node.push_back(first_node.back() + static_cast<int64_t>(sample.node_times.size()));
    }
    StopFlag stop(poll);
    parallel_for(sums, call.threads, &stop, [&](int i, bool may_poll) {
        auto gradients = std::make_unique<Gradients>(network);
        const auto first_sample = [&](int k) { return static_cast<int>(int64_t(call.batch) * k / sums); };
        for (int s = first_sample(i); s < first_sample(i + 1); ++s)
            backward_sample(call, tape, s, first_event[static_cast<size_t>(s)], first_node[static_cast<size_t>(s)],
                            gradients.get(), &stop, may_poll);
        partial[static_cast<size_t>(i)] = std::move(gradients);
    });
    Gradients& all = *partial[0];
    for (size_t i = 1; i < partial.size(); ++i) all.add(*partial[i]);
    const double* const V[3] = {all.V[0].data(), all.V[1].data(), all.V[2].data()};
    const double* const U[3] = {all.U[0].data(), all.U[1].data(), all.U[2].data()};
    network.scatter(network.recurrent(), V, at<double>(call.grad_V));
    network.scatter(network.input(), U, at<double>(call.grad_U));
    for (size_t g = 0; g < 3; ++g)
        std::copy(all.b[g].begin(), all.b[g].end(), at<double>(call.grad_b) + g * all.theta.size());
    std::copy(all.theta.begin(), all.theta.end(), at<double>(call.grad_theta));
    std::copy(all.delays.begin(), all.delays.end(), at<double>(call.grad_delays));
    std::copy(all.tau_s.begin(), all.tau_s.end(), at<double>(call.grad_tau_s));
    std::copy(all.tau_m.begin(), all.tau_m.end(), at<double>(call.grad_tau_m));
    std::copy(all.beta.begin(), all.beta.end(), at<double>(call.grad_beta));
    std::copy(all.tau_a.begin(), all.tau_a.end(), at<double>(call.grad_tau_a));
    if (network.model().shared_tau)
        *at<double>(call.grad_tau_o) = std::accumulate(all.tau_o.begin(), all.tau_o.end(), 0.0);
    else
        std::copy(all.tau_o.begin(), all.tau_o.end(), at<double>(call.grad_tau_o));
}

}  // namespace egru::continuous
