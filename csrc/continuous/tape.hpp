// What happened to one sample, for the way back.
#pragma once

#include <cstdint>
#include <vector>

#include "common/memory.hpp"

namespace egru::continuous {

// Memory that grows without moving.
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
            blocks_.push_back(acquire_block(bytes > piece ? bytes : next_));
            next_ = next_ < piece ? 2 * next_ : piece;
            used_ = 0;
        }
        double* result = reinterpret_cast<double*>(static_cast<char*>(blocks_.back().address) + used_);
        used_ += bytes;
        return result;
    }

private:
    static constexpr size_t piece = size_t(1) << 22;
    std::vector<Block> blocks_;
    size_t used_ = 0, next_ = size_t(1) << 16;
};

enum class Kind : uint8_t { start, internal, forced, input, readout };

struct Step {
    Kind kind;
    bool first;    // of its group of simultaneous events
    bool grouped;  // such a group has more than one member
    int32_t unit;
    int64_t item;  // which event, input event or readout
    double time;
    double a_u, a_r, a_z;  // of the emitter, before the group
    double o;              // trace of the emitter after the event
    const double* tape;    // the touch; readouts: then the trace of every unit
};

struct Sample {
    std::vector<Step> steps;
    Arena tape;
    int64_t events = 0, solves = 0, evaluations = 0;
    double min_slope = 0;
};

}  // namespace egru::continuous
