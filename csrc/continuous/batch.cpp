#include "continuous/batch.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>

#include "common/threads.hpp"

namespace egru::continuous {
namespace {

constexpr int64_t poll_every = 20'000'000;           // nanoseconds
constexpr size_t gradient_bytes = size_t(256) << 20;  // for the sums of a backward pass, beyond the first
constexpr int most_sums = 16;

int64_t nanoseconds() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// Runs work(i, caller) for i in [0, count) on up to `threads` threads. Of several exceptions that of the least i is
// thrown: work with a greater i may be left out, never one with a lesser.
template <class Work>
void share(int count, int threads, Stop* stop, Work work) {
    std::atomic<int> next{0}, done{0}, failed{count};
    std::mutex guard;
    std::exception_ptr error;
    run_team(std::min(threads, count), [&](const Team& team) {
        const bool caller = team.index == 0;
        for (int i; (i = next.fetch_add(1)) < count; done.fetch_add(1)) {
            if (stop->wanted() || i > failed.load()) continue;
            try {
                work(i, caller);
            } catch (...) {
                const std::lock_guard<std::mutex> lock(guard);
                if (i < failed.load()) {
                    failed.store(i);
                    error = std::current_exception();
                }
            }
        }
        while (caller && done.load() < count) {
            try {
                stop->check(true);
            } catch (const Interrupted&) {
            }
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
    });
    if (stop->wanted()) throw Interrupted();
    if (error) std::rethrow_exception(error);
}

void add_to(std::vector<double>& sum, const std::vector<double>& other) {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += other[i];
}

}  // namespace

void Stop::check(bool caller) {
    if (caller && poll_ != nullptr && ++asked_ % 8 == 0) {
        const int64_t now = nanoseconds();
        if (now - polled_ > poll_every) {
            polled_ = now;
            if (poll_()) want();
        }
    }
    if (wanted()) throw Interrupted();
}

int64_t Tape::events() const {
    int64_t sum = 0;
    for (const Sample& sample : samples) sum += sample.events;
    return sum;
}

void Tape::events_to(double* times, int64_t* units) const {
    for (const Sample& sample : samples)
        for (const Step& step : sample.steps)
            if (step.kind == Kind::internal || step.kind == Kind::forced) {
                *times++ = step.time;
                *units++ = step.unit;
            }
}

std::unique_ptr<Tape> forward(const ContinuousCall& call, Poll poll) {
    auto tape = std::make_unique<Tape>(call);
    Stop stop(poll);
    share(call.batch, call.threads, &stop, [&](int i, bool caller) {
        simulate(call, tape->network, i, &tape->samples[static_cast<size_t>(i)], &stop, caller);
    });
    return tape;
}

Gradients::Gradients(const Network& network) : theta(static_cast<size_t>(network.model().units)) {
    for (auto& g : V) g.resize(static_cast<size_t>(network.recurrent().size()));
    for (auto& g : U) g.resize(static_cast<size_t>(network.input().size()));
    for (auto& g : b) g.resize(theta.size());
}

void Gradients::add(const Gradients& other) {
    for (int g = 0; g < 3; ++g) {
        add_to(V[g], other.V[g]);
        add_to(U[g], other.U[g]);
        add_to(b[g], other.b[g]);
    }
    add_to(theta, other.theta);
    tau_s += other.tau_s;
    tau_m += other.tau_m;
    tau_o += other.tau_o;
}

void backward(const ContinuousCall& call, const Tape& tape, Poll poll) {
    const Network& network = tape.network;
    // Sums of several neighbouring samples each, as many as the problem alone decides: the result knows no threads.
    const size_t bytes = sizeof(double) * 3 * static_cast<size_t>(network.recurrent().size() + network.input().size()) + 1;
    const int sums = std::max(1, std::min({call.batch, most_sums, static_cast<int>(1 + gradient_bytes / bytes)}));
    std::vector<std::unique_ptr<Gradients>> partial(static_cast<size_t>(sums));
    std::vector<int64_t> first_event{0};
    for (const Sample& sample : tape.samples) first_event.push_back(first_event.back() + sample.events);
    Stop stop(poll);
    share(sums, call.threads, &stop, [&](int i, bool caller) {
        auto gradients = std::make_unique<Gradients>(network);
        const auto share_begins = [&](int k) { return static_cast<int>(int64_t(call.batch) * k / sums); };
        for (int s = share_begins(i); s < share_begins(i + 1); ++s)
            pull_back(call, tape, s, first_event[static_cast<size_t>(s)], gradients.get(), &stop, caller);
        partial[static_cast<size_t>(i)] = std::move(gradients);
    });
    Gradients& all = *partial[0];
    for (size_t i = 1; i < partial.size(); ++i) all.add(*partial[i]);
    const double* const V[3] = {all.V[0].data(), all.V[1].data(), all.V[2].data()};
    const double* const U[3] = {all.U[0].data(), all.U[1].data(), all.U[2].data()};
    network.spread(network.recurrent(), V, at<double>(call.grad_V));
    network.spread(network.input(), U, at<double>(call.grad_U));
    for (size_t g = 0; g < 3; ++g)
        std::copy(all.b[g].begin(), all.b[g].end(), at<double>(call.grad_b) + g * all.theta.size());
    std::copy(all.theta.begin(), all.theta.end(), at<double>(call.grad_theta));
    const double tau[3] = {all.tau_s, all.tau_m, all.tau_o};
    std::copy_n(tau, 3, at<double>(call.grad_tau));
}

}  // namespace egru::continuous
