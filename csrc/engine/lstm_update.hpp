// The element-wise update of an LSTM.
//
// Included by kernels.cpp, which is compiled once per dispatch level.
#pragma once

#include "common/floats.hpp"
#include "engine/kernels.hpp"

namespace egru::EGRU_LEVEL {
namespace {

using namespace egru::engine;

template <Reset reset>
int update_lstm_with(const Cell& cell, int from, int to, int units, const float* sum, float* c, const float* y_old,
                     float* y_new) {
    using simd::all, simd::Floats, simd::Ints, simd::loadf, simd::store;
    const float *in = sum, *forget = sum + units, *candidate = sum + 2 * units, *out = sum + 3 * units;
    const Floats keep = all(cell.keep);
    Ints nonfinite{};
    int events = 0;
    for (int j = from; j < to; j += simd::width) {
        const Floats theta = loadf(cell.theta + j), rho = loadf(cell.rho + j);
        const Floats c_old = loadf(c + j), y = loadf(y_old + j);
        Floats memory = c_old;
        if (reset == Reset::hard) memory = simd::fma(-rho, y != 0.0f ? c_old : all(0.0f), c_old);
        const Floats added = simd::sigmoid(loadf(in + j)) * simd::tanh(loadf(candidate + j));
        Floats next = simd::fma(simd::sigmoid(loadf(forget + j)), memory, added);
        if (reset == Reset::output) next = simd::fma(-rho, y, next);
        if (cell.keep != 0.0f) next = simd::fma(keep, c_old - next, next);
        const Floats value = simd::sigmoid(loadf(out + j)) * simd::tanh(next);
        const Ints event = (cell.compare_output ? value : next) > theta;
        events += __builtin_popcount(simd::bits(event));
        nonfinite |= (Ints)(next - next != 0.0f);
        store(y_new + j, event ? value : all(0.0f));
        if (reset == Reset::threshold) next = simd::fma(-rho, event ? theta : all(0.0f), next);
        store(c + j, next);
    }
    return simd::bits(nonfinite) == 0 ? events : -1;
}

int update_lstm(const Cell& cell, int from, int to, int units, const float* sum, float* c, const float* y_old,
                float* y_new) {
    switch (cell.reset) {
        case Reset::output: return update_lstm_with<Reset::output>(cell, from, to, units, sum, c, y_old, y_new);
        case Reset::threshold: return update_lstm_with<Reset::threshold>(cell, from, to, units, sum, c, y_old, y_new);
        case Reset::hard: return update_lstm_with<Reset::hard>(cell, from, to, units, sum, c, y_old, y_new);
        case Reset::none: break;
    }
    return update_lstm_with<Reset::none>(cell, from, to, units, sum, c, y_old, y_new);
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
