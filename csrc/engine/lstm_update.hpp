// The element-wise update of an LSTM.
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

template <Events events, Reset reset>
int update_lstm_cell(const Cell& cell, int from, int to, int units, const float* sum, float* c, const float* y_old,
                     float* y_new, float* sent) {
    using simd::all, simd::Floats, simd::Ints, simd::loadf, simd::store;
    const float *forget = sum + units, *out = sum + 3 * units;
    const Floats keep = all(cell.keep);
    Ints nonfinite{};
    int count = 0;
    for (int j = from; j < to; j += simd::width) {
        const Floats theta = loadf(cell.theta + j), rho = loadf(cell.rho + j);
        const Floats c_old = loadf(c + j), y = loadf(y_old + j);
        Floats memory = c_old;
        if (reset == Reset::hard) memory = simd::fma(-rho, y != 0.0f ? c_old : all(0.0f), c_old);
        Floats next = simd::fma(simd::sigmoid(loadf(forget + j)), memory, lstm_input(sum, units, j));
        if (reset == Reset::output) next = simd::fma(-rho, y, next);
        if (cell.keep != 0.0f) next = simd::fma(keep, c_old - next, next);
        const Floats value = simd::sigmoid(loadf(out + j)) * simd::tanh(next);
        count += emit<events, reset>(value, cell.compare_output ? value : next, y, theta, rho, j, y_new, sent, next,
                                     nonfinite);
        store(c + j, next);
    }
    return simd::bits(nonfinite) == 0 ? count : -1;
}

template <Events events>
int update_lstm_with(const Cell& cell, int from, int to, int units, const float* sum, float* c, const float* y_old,
                     float* y_new, float* sent) {
    const auto run = [&](auto function) { return function(cell, from, to, units, sum, c, y_old, y_new, sent); };
    switch (cell.reset) {
        case Reset::output: return run(update_lstm_cell<events, Reset::output>);
        case Reset::threshold: return run(update_lstm_cell<events, Reset::threshold>);
        case Reset::hard: return run(update_lstm_cell<events, Reset::hard>);
        case Reset::none: break;
    }
    return run(update_lstm_cell<events, Reset::none>);
}

int update_lstm(const Cell& cell, int from, int to, int units, const float* sum, float* c, const float* y_old,
                float* y_new, float* sent) {
    const auto run = [&](auto function) { return function(cell, from, to, units, sum, c, y_old, y_new, sent); };
    if (cell.events == Events::delta) return run(update_lstm_cell<Events::delta, Reset::none>);
    return run(cell.events == Events::two_sided ? update_lstm_with<Events::two_sided>
                                                : update_lstm_with<Events::positive>);
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
