// Silent steps in closed form: while input and output of a layer do not change, its gates are constant and its state
// approaches a fixed point geometrically.
//
// Powers are products of doubles without fma, so that every dispatch level computes the same bits.
//
// Included by kernels.cpp, which is compiled once per dispatch level.
#pragma once

#include "common/floats.hpp"
#include "engine/emit.hpp"
#include "engine/gates.hpp"
#include "engine/kernels.hpp"

namespace egru::EGRU_LEVEL {
namespace {

using namespace egru::engine;

typedef double Doubles __attribute__((vector_size(simd::width * 4)));
typedef float HalfFloats __attribute__((vector_size(simd::width * 2)));
constexpr int half_width = simd::width / 2;

// base^n for 0 <= base <= 1 by repeated squaring. Values below 1e-150 become zero: subnormal numbers are slow.
inline Doubles power(Doubles base, int64_t n) {
    const Doubles zero{}, tiny = zero + 1e-150;
    Doubles result = zero + 1.0;
    for (;; n >>= 1) {
        if (n & 1) {
            result = result * base;
            result = result < tiny ? zero : result;
        }
        if (n <= 1) return result;
        base = base * base;
        base = base < tiny ? zero : base;
    }
}

// The states of units [j, j + width) after `steps` steps.
inline simd::Floats relaxed(const Relaxation& relaxation, int j, int64_t steps, simd::Floats c) {
    simd::Floats result;
    for (int half = 0; half < 2; ++half) {
        const int at = j + half * half_width;
        HalfFloats part;
        std::memcpy(&part, reinterpret_cast<const char*>(&c) + half * sizeof part, sizeof part);
        const Doubles target = simd::load<Doubles>(relaxation.target + at);
        const Doubles distance = __builtin_convertvector(part, Doubles) - target;
        const Doubles decay = power(simd::load<Doubles>(relaxation.decay + at), steps);
        const Doubles drift = static_cast<double>(steps) * simd::load<Doubles>(relaxation.slope + at);
        part = __builtin_convertvector(target + decay * distance + drift, HalfFloats);
        std::memcpy(reinterpret_cast<char*>(&result) + half * sizeof part, &part, sizeof part);
    }
    return result;
}

// The output of units [j, j + width) at an event, from their states.
inline simd::Floats output_of(const Cell& cell, const Relaxation& relaxation, int j, simd::Floats c) {
    return cell.lstm ? simd::loadf(relaxation.out_gate + j) * simd::tanh(c) : c;
}

void settle(const Cell& cell, int units, const float* sum, const Relaxation& relaxation) {
    const double moves = 1.0 - static_cast<double>(cell.keep);
    for (int j = 0; j < units; j += simd::width) {
        float decay[simd::width], added[simd::width];
        if (cell.lstm) {
            simd::store(decay, simd::sigmoid(simd::loadf(sum + units + j)));
            simd::store(added, lstm_input(sum, units, j));
            simd::store(relaxation.out_gate + j, simd::sigmoid(simd::loadf(sum + 3 * units + j)));
        } else {
            const Gates gates = cell.after ? gru_gates<true>(sum, units, j) : gru_gates<false>(sum, units, j);
            simd::store(decay, gates.update);
            simd::store(added, gates.candidate);
        }
        for (int i = 0; i < simd::width; ++i) {
            const double rate = cell.lstm ? 1.0 - static_cast<double>(decay[i]) : static_cast<double>(decay[i]);
            const double change = rate < 1.0 ? moves * rate : moves;  // rounding may make a gate exceed one
            relaxation.decay[j + i] = 1.0 - change;
            relaxation.slope[j + i] = cell.lstm && change == 0.0 ? moves * static_cast<double>(added[i]) : 0.0;
            relaxation.target[j + i] = !cell.lstm       ? static_cast<double>(added[i])
                                       : change == 0.0 ? 0.0
                                                       : static_cast<double>(added[i]) / rate;
        }
    }
}

template <Events events>
int64_t first_event_of(const Cell& cell, int units, const Relaxation& relaxation, const float* c, const float* y,
                       int64_t limit, float* next) {
    for (int j = 0; j < units && limit > 0; j += simd::width) {
        const simd::Floats state = simd::loadf(c + j), held = simd::loadf(y + j), theta = simd::loadf(cell.theta + j);
        const auto exceeds = [&](simd::Floats states) {
            const simd::Floats compared = cell.compare_output ? output_of(cell, relaxation, j, states) : states;
            return simd::bits(is_event<events>(compared, held, theta)) != 0;
        };
        const auto fires = [&](int64_t step) { return exceeds(relaxed(relaxation, j, step, state)); };
        // States are monotone in time. If neither the current nor the last one exceeds the threshold, none does. If the
        // last one does and that of the first step does not, there is a single first step in between.
        const simd::Floats end = relaxed(relaxation, j, limit, state);
        simd::store(next + j, end);
        const bool last = exceeds(end);
        if (!last && !exceeds(state)) continue;
        if (fires(1)) return 1;
        if (!last) continue;
        int64_t before = 1, at = limit;
        while (at - before > 1) {
            const int64_t middle = before + (at - before) / 2;
            (fires(middle) ? at : before) = middle;
        }
        limit = at - 1;
    }
    return limit + 1;
}

int64_t first_event(const Cell& cell, int units, const Relaxation& relaxation, const float* c, const float* y,
                    int64_t limit, float* next) {
    switch (cell.events) {
        case Events::two_sided: return first_event_of<Events::two_sided>(cell, units, relaxation, c, y, limit, next);
        case Events::delta: return first_event_of<Events::delta>(cell, units, relaxation, c, y, limit, next);
        case Events::positive: break;
    }
    return first_event_of<Events::positive>(cell, units, relaxation, c, y, limit, next);
}

void relax(int units, const Relaxation& relaxation, int64_t steps, float* c) {
    for (int j = 0; j < units; j += simd::width)
        simd::store(c + j, relaxed(relaxation, j, steps, simd::loadf(c + j)));
}

template <Events events, Reset reset>
int emit_units(const Cell& cell, int units, const Relaxation& relaxation, float* c, float* y, float* sent) {
    simd::Ints nonfinite{};
    int count = 0;
    for (int j = 0; j < units; j += simd::width) {
        simd::Floats next = simd::loadf(c + j);
        const simd::Floats value = output_of(cell, relaxation, j, next);
        count += emit<events, reset>(value, cell.compare_output ? value : next, simd::loadf(y + j),
                                     simd::loadf(cell.theta + j), simd::loadf(cell.rho + j), j, y, sent, next,
                                     nonfinite);
        simd::store(c + j, next);
    }
    return simd::bits(nonfinite) == 0 ? count : -1;
}

template <Events events>
int emit_with(const Cell& cell, int units, const Relaxation& relaxation, float* c, float* y, float* sent) {
    // Other resets clear a unit at the step after its event.
    return cell.reset == Reset::threshold
               ? emit_units<events, Reset::threshold>(cell, units, relaxation, c, y, sent)
               : emit_units<events, Reset::none>(cell, units, relaxation, c, y, sent);
}

int emit_relaxed(const Cell& cell, int units, const Relaxation& relaxation, float* c, float* y, float* sent) {
    switch (cell.events) {
        case Events::two_sided: return emit_with<Events::two_sided>(cell, units, relaxation, c, y, sent);
        case Events::delta: return emit_with<Events::delta>(cell, units, relaxation, c, y, sent);
        case Events::positive: break;
    }
    return emit_with<Events::positive>(cell, units, relaxation, c, y, sent);
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
