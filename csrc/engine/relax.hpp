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
// Several vectors at once, because each multiplication waits for the previous one.
template <int N>
inline void power(Doubles (&base)[N], int64_t n, Doubles (&result)[N]) {
    const Doubles zero{}, tiny = zero + 1e-150;
    for (int i = 0; i < N; ++i) result[i] = zero + 1.0;
    for (;; n >>= 1) {
        if (n & 1)
#pragma GCC unroll 8
            for (int i = 0; i < N; ++i) {
                result[i] = result[i] * base[i];
                result[i] = result[i] < tiny ? zero : result[i];
            }
        if (n <= 1) return;
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) {
            base[i] = base[i] * base[i];
            base[i] = base[i] < tiny ? zero : base[i];
        }
    }
}

// Write the states of units [j, j + vectors * width) after `steps` steps to next[j].
template <int vectors>
inline void relax_units(const Relaxation& relaxation, int j, int64_t steps, const float* c, float* next) {
    Doubles decay[2 * vectors], power_of[2 * vectors];
    for (int i = 0; i < 2 * vectors; ++i) decay[i] = simd::load<Doubles>(relaxation.decay + j + i * half_width);
    power(decay, steps, power_of);
    for (int i = 0; i < 2 * vectors; ++i) {
        const int at = j + i * half_width;
        const Doubles target = simd::load<Doubles>(relaxation.target + at);
        const Doubles distance = __builtin_convertvector(simd::load<HalfFloats>(c + at), Doubles) - target;
        const Doubles drift = static_cast<double>(steps) * simd::load<Doubles>(relaxation.slope + at);
        simd::store(next + at, __builtin_convertvector(target + power_of[i] * distance + drift, HalfFloats));
    }
}

constexpr int vectors_at_once = 2;

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

// The same as first_event for units [j, j + width), whose states after `limit` steps are in next[j].
template <Events events>
int64_t first_event_at(const Cell& cell, int j, const Relaxation& relaxation, const float* c, const float* y,
                       int64_t limit, float* next) {
    const simd::Floats held = simd::loadf(y + j), theta = simd::loadf(cell.theta + j);
    const auto exceeds = [&](const float* states) {
        const simd::Floats state = simd::loadf(states + j);
        const simd::Floats compared = cell.compare_output ? output_of(cell, relaxation, j, state) : state;
        return simd::bits(is_event<events>(compared, held, theta)) != 0;
    };
    const auto fires = [&](int64_t step) {
        relax_units<1>(relaxation, j, step, c, next);
        return exceeds(next);
    };
    // States are monotone in time. If neither the current nor the last one exceeds the threshold, none does. If the
    // last one does and that of the first step does not, there is a single first step in between.
    const bool last = exceeds(next);
    if (!last && !exceeds(c)) return limit + 1;
    if (fires(1)) return 1;
    if (!last) {
        relax_units<1>(relaxation, j, limit, c, next);
        return limit + 1;
    }
    int64_t before = 1, at = limit;
    while (at - before > 1) {
        const int64_t middle = before + (at - before) / 2;
        (fires(middle) ? at : before) = middle;
    }
    return at;
}

template <Events events>
int64_t first_event_of(const Cell& cell, int units, const Relaxation& relaxation, const float* c, const float* y,
                       int64_t limit, float* next) {
    for (int j = 0; j < units && limit > 0;) {
        const int vectors = units - j < vectors_at_once * simd::width ? 1 : vectors_at_once;
        const int64_t steps = limit;
        (vectors == 1 ? relax_units<1> : relax_units<vectors_at_once>)(relaxation, j, steps, c, next);
        for (int i = 0; i < vectors && limit > 0; ++i, j += simd::width) {
            if (limit < steps) relax_units<1>(relaxation, j, limit, c, next);
            limit = first_event_at<events>(cell, j, relaxation, c, y, limit, next) - 1;
        }
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

// The number of steps until one of units [j, j + width) sends an event, or `never`. `next` is scratch memory.
template <Events events>
int64_t steps_to_event(const Cell& cell, int j, const Relaxation& relaxation, const float* c, float* next) {
    const simd::Floats theta = simd::loadf(cell.theta + j), zero = simd::all(0.0f);
    const auto exceeds = [&](const float* states) {
        const simd::Floats state = simd::loadf(states + j);
        const simd::Floats compared = cell.compare_output ? output_of(cell, relaxation, j, state) : state;
        return simd::bits(is_event<events>(compared, zero, theta)) != 0;
    };
    const auto fires = [&](int64_t step) {
        relax_units<1>(relaxation, j, step, c, next);
        return exceeds(next);
    };
    bool drifts = false;
    for (int i = 0; i < simd::width; ++i) {
        next[j + i] = static_cast<float>(relaxation.target[j + i]);
        drifts |= relaxation.slope[j + i] != 0.0;
    }
    // A state is between its current value and its target. After the first step, a unit above its threshold stays there.
    const bool last = drifts || exceeds(next);
    if (!last && !exceeds(c)) return never;
    if (fires(1)) return 1;
    if (!last) return never;
    constexpr int64_t growth = 64, longest = int64_t(1) << 54;
    int64_t before = 1, at = growth;
    while (!fires(at)) {
        before = at;
        at *= growth;
        if (at > longest) return never;
    }
    while (at - before > 1) {
        const int64_t middle = before + (at - before) / 2;
        (fires(middle) ? at : before) = middle;
    }
    return at;
}

template <Events events>
void find_due_of(const Cell& cell, int from, int to, const Relaxation& relaxation, const float* c, int64_t now,
                 float* next, int64_t* due) {
    for (int j = from; j < to; j += sparse_block) {
        int64_t first = never;
        for (int i = 0; i < sparse_block; i += simd::width) {
            const int64_t steps = steps_to_event<events>(cell, j + i, relaxation, c, next);
            first = steps < first ? steps : first;
        }
        due[j / sparse_block] = first == never ? never : now + first;
    }
}

void find_due(const Cell& cell, int from, int to, const Relaxation& relaxation, const float* c, int64_t now,
              float* next, int64_t* due) {
    (cell.events == Events::positive ? find_due_of<Events::positive> : find_due_of<Events::two_sided>)(
        cell, from, to, relaxation, c, now, next, due);
}

void relax(int from, int to, const Relaxation& relaxation, int64_t steps, float* c) {
    int j = from;
    for (; j + vectors_at_once * simd::width <= to; j += vectors_at_once * simd::width)
        relax_units<vectors_at_once>(relaxation, j, steps, c, c);
    for (; j < to; j += simd::width) relax_units<1>(relaxation, j, steps, c, c);
}

template <Events events, Reset reset>
int emit_units(const Cell& cell, int from, int to, const Relaxation& relaxation, float* c, float* y, float* sent) {
    simd::Ints nonfinite{};
    int count = 0;
    for (int j = from; j < to; j += simd::width) {
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
int emit_with(const Cell& cell, int from, int to, const Relaxation& relaxation, float* c, float* y, float* sent) {
    // Other resets clear a unit at the step after its event.
    return cell.reset == Reset::threshold
               ? emit_units<events, Reset::threshold>(cell, from, to, relaxation, c, y, sent)
               : emit_units<events, Reset::none>(cell, from, to, relaxation, c, y, sent);
}

int emit_relaxed(const Cell& cell, int from, int to, const Relaxation& relaxation, float* c, float* y, float* sent) {
    switch (cell.events) {
        case Events::two_sided: return emit_with<Events::two_sided>(cell, from, to, relaxation, c, y, sent);
        case Events::delta: return emit_with<Events::delta>(cell, from, to, relaxation, c, y, sent);
        case Events::positive: break;
    }
    return emit_with<Events::positive>(cell, from, to, relaxation, c, y, sent);
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
