// The forward and backward pass of a batch, with its samples divided among threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "continuous/network.hpp"
#include "continuous/tape.hpp"

namespace egru::continuous {

// Called from time to time by the calling thread; returns true to interrupt the run.
using Poll = bool (*)();

struct Interrupted : std::runtime_error {
    Interrupted() : std::runtime_error("interrupted") {}
};

// A sample emitted more than call.max_events events.
struct TooManyEvents {
    int sample;
    double time;
};

// Two events of a unit have the same time, because float64 cannot represent the time between them.
struct UnresolvedEvents {
    int sample, unit;
    double time;
};

// A request, shared by all threads, to interrupt the run.
class StopFlag {
public:
    explicit StopFlag(Poll poll) : poll_(poll) {}
    // Throws Interrupted if requested. Only the calling thread may poll.
    void check(bool may_poll);
    bool requested() const { return requested_.load(std::memory_order_relaxed); }
    void request() { requested_.store(true, std::memory_order_relaxed); }

private:
    Poll poll_;
    unsigned checks_ = 0;    // by the calling thread
    int64_t last_poll_ = 0;  // nanoseconds
    std::atomic<bool> requested_{false};
};

// The result of a forward pass that the backward pass needs.
struct Tape {
    explicit Tape(const ContinuousCall& call) : network(call), samples(static_cast<size_t>(call.batch)) {}
    Network network;
    std::vector<SampleTape> samples;
    int64_t event_count() const;
    void copy_events(double* times, int64_t* units, int64_t* offsets) const;  // offsets of the samples: (B + 1)
    // The nodes of an integral over time: (nodes) three times, (nodes, H), and the states before events (events, H).
    int64_t node_count() const;
    void copy_nodes(double* times, double* weights, int64_t* samples, double* c, double* event_c) const;
    size_t record_bytes() const;  // memory of the records and checkpoints
};

// Throws Interrupted, or TooManyEvents or UnresolvedEvents for the first sample that fails.
std::unique_ptr<Tape> forward(const ContinuousCall& call, Poll poll);
void backward(const ContinuousCall& call, const Tape& tape, Poll poll);

// Runs one sample. The stop flag is checked at every step and at intervals within long steps.
void forward_sample(const ContinuousCall& call, const Network& network, int sample, SampleTape* tape, StopFlag* stop,
                    bool may_poll);

// Runs one part of a sample again, from a checkpoint to the next one, and records it.
void repeat_part(const ContinuousCall& call, const Network& network, int sample, const Checkpoint& from,
                 SampleTape* tape, StopFlag* stop, bool may_poll);

// Gradients of the parameters, summed over samples in a fixed order.
struct Gradients {
    explicit Gradients(const Network& network);
    std::vector<double> V[3], U[3], b[3], theta, delays;
    std::vector<double> beta, tau_a;          // by unit, or empty without adaptation
    std::vector<double> tau_s, tau_m, tau_o;  // by unit; the first two are one number if the time constants are shared
    void add(const Gradients& other);
};

// Adds the gradients of one sample, whose first event and node are at these positions in the cotangents.
void backward_sample(const ContinuousCall& call, const Tape& tape, int sample, int64_t first_event, int64_t first_node,
                     Gradients* gradients, StopFlag* stop, bool may_poll);

// Scratch memory of one sample. It grows on demand.
class SampleScratch : public Scratch {
public:
    SampleScratch(StopFlag* stop, bool may_poll) : Scratch{nullptr, 0, grow_memory, check_stop}, stop_(stop),
                                                   may_poll_(may_poll) {}

private:
    static void grow_memory(Scratch* scratch, int64_t needed) {
        SampleScratch* self = static_cast<SampleScratch*>(scratch);
        self->memory_.resize(static_cast<size_t>(needed + needed / 2));
        self->data = self->memory_.data();
        self->capacity = static_cast<int64_t>(self->memory_.size());
    }
    static void check_stop(Scratch* scratch) {
        SampleScratch* self = static_cast<SampleScratch*>(scratch);
        self->stop_->check(self->may_poll_);
    }

    StopFlag* stop_;
    bool may_poll_;
    std::vector<double> memory_;
};

}  // namespace egru::continuous
