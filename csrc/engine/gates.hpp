// Gates of GRU and LSTM units from their sums, as vectors.
//
// Included by kernels.cpp, which is compiled once per dispatch level.
#pragma once

#include "common/floats.hpp"

namespace egru::EGRU_LEVEL {
namespace {

struct Gates {
    simd::Floats update, candidate;
};

// Gates of GRU units [j, j + width). `sum` has the blocks q, r, u, z.
template <bool after>
inline Gates gru_gates(const float* sum, int units, int j) {
    using simd::Floats, simd::loadf;
    const float *q = sum, *r = sum + units, *u = sum + 2 * units, *z = sum + 3 * units;
    Floats a = loadf(z + j);
    if (after) a = simd::fma(simd::sigmoid(loadf(r + j)), loadf(q + j), a);
    // update = 1 / (1 + exp(pre)) and candidate = tanh(a) share one division.
    const Floats eu = 1.0f + simd::exp(loadf(u + j)), ez = simd::exp(-2.0f * a);
    const Floats both = 1.0f / (eu * (1.0f + ez));
    return {(1.0f + ez) * both, (1.0f - ez) * eu * both};
}

// What LSTM units [j, j + width) add to their state. `sum` has the blocks i, f, g, o.
inline simd::Floats lstm_input(const float* sum, int units, int j) {
    return simd::sigmoid(simd::loadf(sum + j)) * simd::tanh(simd::loadf(sum + 2 * units + j));
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
