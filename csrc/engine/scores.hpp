// The largest scores of a readout, and the normaliser of their softmax.
//
// Included by kernels.cpp, which is compiled once per dispatch level.
#pragma once

#include <cmath>

#include "common/floats.hpp"
#include "engine/kernels.hpp"

namespace egru::EGRU_LEVEL {
namespace {

double log_sum_exp(const float* scores, int n) {
    float largest = scores[0];
    int j = 0;
    if (n >= width) {
        Floats high = loadf(scores);
        for (j = width; j + width <= n; j += width) {
            const Floats v = loadf(scores + j);
            high = v > high ? v : high;
        }
        for (int i = 0; i < width; ++i) largest = high[i] > largest ? high[i] : largest;
    }
    for (; j < n; ++j) largest = scores[j] > largest ? scores[j] : largest;
    const Floats shift = all(largest);
    // Sums of 64 vectors in float32 are added in float64, so that the error does not grow with n.
    double total = 0;
    for (j = 0; j + width <= n;) {
        Floats part{};
        for (const int end = j + 64 * width; j + width <= n && j < end; j += width)
            part = part + simd::exp(loadf(scores + j) - shift);
        for (int i = 0; i < width; ++i) total += static_cast<double>(part[i]);
    }
    for (; j < n; ++j) total += std::exp(static_cast<double>(scores[j]) - static_cast<double>(largest));
    return static_cast<double>(largest) + std::log(total);
}

// Insert a score into the sorted list of the largest ones. Of equal scores, the one with the lower index comes first.
inline void insert(float score, int64_t at, int k, int& count, int64_t* index, float* value) {
    if (count == k && !(score > value[k - 1])) return;
    int place = count < k ? count++ : k - 1;
    for (; place > 0 && value[place - 1] < score; --place) {
        value[place] = value[place - 1];
        index[place] = index[place - 1];
    }
    value[place] = score;
    index[place] = at;
}

// For small k; Engine::top sorts for larger ones.
void top(const float* scores, int n, int k, int64_t* index, float* value) {
    int count = 0, j = 0;
    for (; j < n && count < k; ++j) insert(scores[j], j, k, count, index, value);
    for (; j + width <= n; j += width) {
        uint32_t larger = static_cast<uint32_t>(simd::bits(loadf(scores + j) > all(value[k - 1])));
        for (; larger != 0; larger &= larger - 1) {
            const int at = j + __builtin_ctz(larger);
            insert(scores[at], at, k, count, index, value);
        }
    }
    for (; j < n; ++j) insert(scores[j], j, k, count, index, value);
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
