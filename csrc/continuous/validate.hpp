// Validation of the arguments of a run. Python repeats a check that fails, to name what is wrong.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace egru::continuous {

// Returns the largest magnitude, or infinity if a value is not finite.
template <class T, class Bits>
double largest_magnitude(const T* values, int64_t count) {
    constexpr Bits sign = Bits(1) << (8 * sizeof(Bits) - 1);
    Bits largest = 0;  // magnitudes are ordered as their bits are; those of infinity and NaN are the largest
    for (int64_t i = 0; i < count; ++i) {
        Bits bits;
        std::memcpy(&bits, values + i, sizeof bits);
        bits &= ~sign;
        largest = bits > largest ? bits : largest;
    }
    T result;
    std::memcpy(&result, &largest, sizeof result);
    return result <= std::numeric_limits<T>::max() ? double(result) : std::numeric_limits<double>::infinity();
}

// Whether thresholds are positive and states (batch, units) are below them.
template <class T>
bool are_below(const T* c, const T* theta, int64_t batch, int64_t units) {
    bool valid = true;
    for (int64_t n = 0; n < units; ++n) valid &= theta[n] > 0;
    for (int64_t s = 0; s < batch; ++s)
        for (int64_t n = 0; n < units; ++n) valid &= c[s * units + n] < theta[n];
    return valid;
}

// Whether times ascend within each sample, from 0 to its horizon. Sample s has the times offsets[s] to offsets[s + 1].
template <class T>
bool times_ascend(const T* times, const int64_t* offsets, const T* horizons, int64_t batch) {
    bool valid = true;
    for (int64_t s = 0; s < batch; ++s) {
        T last = 0;
        for (int64_t k = offsets[s]; k < offsets[s + 1]; ++k) {
            valid &= times[k] >= last && times[k] <= horizons[s];  // false for NaN
            last = times[k];
        }
    }
    return valid;
}

// Whether offsets ascend from 0 to count, and channels exist.
inline bool events_exist(const int64_t* offsets, const int64_t* channels, int64_t batch, int64_t count,
                         int64_t channel_count) {
    if (offsets[0] != 0 || offsets[batch] != count) return false;
    for (int64_t s = 0; s < batch; ++s)
        if (offsets[s] > offsets[s + 1]) return false;
    bool valid = true;
    for (int64_t k = 0; k < count; ++k) valid &= channels[k] >= 0 && channels[k] < channel_count;
    return valid;
}

}  // namespace egru::continuous
