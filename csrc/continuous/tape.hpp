// The record of one sample's forward pass that its backward pass needs.
#pragma once

#include <cstdint>
#include <vector>

#include "common/memory.hpp"

namespace egru::continuous {

// Memory that grows without moving what it already holds.
class Arena {
public:
    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() {
        for (const Block& block : blocks_) return_block(block);
    }

    double* take(int64_t count) {
        const size_t bytes = static_cast<size_t>(count) * sizeof(double);
        if (blocks_.empty() || blocks_.back().size - used_ < bytes) {
            blocks_.reserve(blocks_.size() + 1);
            blocks_.push_back(acquire_block(bytes > largest_block ? bytes : next_size_));
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
enum class StepKind : uint8_t { start, internal, forced, input, readout };

struct Step {
    StepKind kind;
    bool first;    // of its group of simultaneous events
    bool grouped;  // the group has more than one member
    int32_t source;  // the unit of an internal event, or the channel of an input event
    int64_t index;   // which event of the sample, input event of the batch, or readout
    double time;
    double a_u, a_r, a_z;  // of the emitter, before the group
    double o;              // the trace of the emitter after the event
    const double* record;  // of the touch; for readouts followed by the trace of every unit
};

struct SampleTape {
    std::vector<Step> steps;
    Arena records;
    int64_t events = 0, root_solves = 0, flow_evaluations = 0;
    double min_slope = 0;
};

}  // namespace egru::continuous
