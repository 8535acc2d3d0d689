// The record of one sample's forward pass that its backward pass needs.
#pragma once

#include <cstdint>
#include <vector>

#include "common/memory.hpp"
#include "continuous/event_queue.hpp"

namespace egru::continuous {

// Memory that grows without moving what it already holds.
class Arena {
public:
    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() { clear(); }

    void clear() {
        for (const Block& block : blocks_) return_block(block);
        blocks_.clear();
        used_ = 0;
    }

    size_t bytes() const {
        size_t sum = 0;
        for (const Block& block : blocks_) sum += block.size;
        return sum;
    }

    double* take(int64_t count) {
        const size_t bytes = static_cast<size_t>(count) * sizeof(double);
        if (blocks_.empty() || blocks_.back().size - used_ < bytes) {
            blocks_.reserve(blocks_.size() + 1);
            blocks_.push_back(acquire_block(bytes > next_size_ ? bytes : next_size_));
            next_size_ = next_size_ < largest_block ? 2 * next_size_ : largest_block;
            used_ = 0;
        }
        double* result = reinterpret_cast<double*>(static_cast<char*>(blocks_.back().address) + used_);
        used_ += bytes;
        return result;
    }

private:
    static constexpr size_t largest_block = size_t(1) << 22;
    std::vector<Block> blocks_;
    size_t used_ = 0, next_size_ = size_t(1) << 16;
};

// `forced`: an event at time 0 of a unit that started above its threshold.
// `delivery`: a delayed event reaches the receivers of one line.
// `node`: a node of an integral over time.
enum class StepKind : uint8_t { start, internal, forced, delivery, input, readout, node };

struct Step {
    StepKind kind;
    bool first;    // of its group of simultaneous events
    bool grouped;  // the group has more than one member
    int32_t source;  // the unit of an internal event, the line of a delivery, or the channel of an input event
    int64_t index;   // which event of the sample (also for deliveries), input event of the batch, readout, or node (-1: not a node)
    double time;
    double a_u, a_r, a_z;  // of the emitter, before the group; deliveries have only a_r
    double o;              // the trace of the emitter after the event
    const double* record;  // of the touch; for readouts followed by the trace of every unit
};

// An event on its way to the receivers of one line.
struct Delivery {
    double time;
    int64_t event;
    int32_t line;
    double a_r;  // of the emitter, at the event

    bool operator>(const Delivery& other) const {
        if (time != other.time) return time > other.time;
        return event != other.event ? event > other.event : line > other.line;
    }
};

// Where a run stands between two steps: with the state of all units, everything that its continuation depends on.
struct Position {
    bool begun = false;
    double now = 0;
    int64_t input = 0, readout = 0;  // the next ones
    int64_t events = 0, nodes = 0;   // so far
    int earliest = -1;               // the unit with the smallest exact key, unless it has been touched since
    double earliest_bound = 0, earliest_horizon = 0;  // its key before the search, and the horizon of the search
};

// The state from which a part of the run can be repeated, with the same results to the last bit.
struct Checkpoint {
    Position position;
    std::vector<double> memory;
    std::vector<uint8_t> exact;
    EventQueue::Order order;
    std::vector<Delivery> deliveries;
};

struct SampleTape {
    std::vector<Step> steps;  // with checkpoints, those after the last one
    Arena records;
    std::vector<Checkpoint> checkpoints;  // in order of time
    std::vector<double> event_times;
    std::vector<int32_t> event_units;
    // For an integral over time: the nodes, their weights and the states there (H per node), and the states just before
    // each event (H per event).
    std::vector<double> node_times, node_weights, node_c, event_c;
    int64_t events = 0, root_solves = 0, flow_evaluations = 0;
    double min_slope = 0;
};

}  // namespace egru::continuous
