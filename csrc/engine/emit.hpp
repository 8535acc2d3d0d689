// The event mechanism of the streaming engine, which all cells share.
//
// Included by kernels.cpp, which is compiled once per dispatch level.
#pragma once

#include "common/floats.hpp"
#include "engine/kernels.hpp"

namespace egru::EGRU_LEVEL {
namespace {

// Whether the magnitude of `compared`, or with delta events of its change from `y`, exceeds the threshold.
template <Events events>
inline simd::Ints is_event(simd::Floats compared, simd::Floats y, simd::Floats theta) {
    if (events == Events::delta) compared = compared - y;
    return (events == Events::positive ? compared : compared < simd::all(0.0f) ? -compared : compared) > theta;
}

// Compare `compared` with the threshold and write y_new: `value` at an event. With delta events `sent` receives the
// change. Clears `next`, the state, if the reset does so at once. Returns the number of events.
template <Events events, Reset reset>
inline int emit(simd::Floats value, simd::Floats compared, simd::Floats y, simd::Floats theta, simd::Floats rho, int j,
                float* y_new, float* sent, simd::Floats& next, simd::Ints& nonfinite) {
    using simd::all, simd::Floats, simd::Ints, simd::store;
    const Floats zero = all(0.0f);
    const Ints event = is_event<events>(compared, y, theta);
    if (events == Events::delta) compared = compared - y;
    nonfinite |= (Ints)(next - next != zero);
    store(y_new + j, event ? value : events == Events::delta ? y : zero);
    if (events == Events::delta) store(sent + j, event ? compared : zero);
    if (reset == Reset::threshold) {
        const Floats amount = event ? theta : zero;
        next = simd::fma(-rho, events == Events::positive ? amount : compared < zero ? -amount : amount, next);
    }
    return simd::count(event);
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
