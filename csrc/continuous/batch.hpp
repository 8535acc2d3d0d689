// A batch through the engine: samples divided among threads, forward and back.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "continuous/network.hpp"
#include "continuous/tape.hpp"

namespace egru::continuous {

// Asked now and then by the calling thread; true ends the run.
using Poll = bool (*)();

struct Interrupted : std::runtime_error {
    Interrupted() : std::runtime_error("interrupted") {}
};

// A sample emitted more events than allowed.
struct TooManyEvents {
    int sample;
    double time;
};

// Ends a run early, for whoever asks.
class Stop {
public:
    explicit Stop(Poll poll) : poll_(poll) {}
    // Called often by every thread; `caller`: this is the thread that may poll.
    void check(bool caller);
    bool wanted() const { return wanted_.load(std::memory_order_relaxed); }
    void want() { wanted_.store(true, std::memory_order_relaxed); }

private:
    Poll poll_;
    unsigned asked_ = 0;   // since the run began, by the caller
    int64_t polled_ = 0;  // nanoseconds
    std::atomic<bool> wanted_{false};
};

// The outcome of a forward pass, which the backward pass needs.
struct Tape {
    explicit Tape(const ContinuousCall& call) : network(call), samples(static_cast<size_t>(call.batch)) {}
    Network network;
    std::vector<Sample> samples;
    int64_t events() const;
    void events_to(double* times, int64_t* units) const;
};

// Throw Interrupted or TooManyEvents (the first such sample).
std::unique_ptr<Tape> forward(const ContinuousCall& call, Poll poll);
void backward(const ContinuousCall& call, const Tape& tape, Poll poll);

// One sample. `stop` is asked at every step.
void simulate(const ContinuousCall& call, const Network& network, int number, Sample* sample, Stop* stop, bool caller);

// Gradients of parameters, added up over samples in a fixed order.
struct Gradients {
    explicit Gradients(const Network& network);
    std::vector<double> V[3], U[3], b[3], theta;
    double tau_s = 0, tau_m = 0, tau_o = 0;
    void add(const Gradients& other);
};

void pull_back(const ContinuousCall& call, const Tape& tape, int number, int64_t first_event, Gradients* gradients,
               Stop* stop, bool caller);

// Room for the kernels' panels.
class Room : public Scratch {
public:
    Room() : Scratch{nullptr, 0, nullptr} {
        grow = [](Scratch* scratch, int64_t wanted) {
            Room* room = static_cast<Room*>(scratch);
            room->memory_.resize(static_cast<size_t>(wanted + wanted / 2));
            room->data = room->memory_.data();
            room->capacity = static_cast<int64_t>(room->memory_.size());
        };
    }

private:
    std::vector<double> memory_;
};

}  // namespace egru::continuous
