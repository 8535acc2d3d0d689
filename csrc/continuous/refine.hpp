// The solution of c(t) = theta in a bracket, for the crossing searches.
#pragma once

namespace egru::EGRU_LEVEL {
namespace {
namespace continuous {

struct Value {
    double c, slope, curvature;
};

// Returns the root of the cubic with these values and slopes at 0 and `h`, or `otherwise` if it is not inside.
inline double cubic_root(double from, double from_slope, double to, double to_slope, double h, double otherwise) {
    const double m0 = h * from_slope, m1 = h * to_slope;
    const double k2 = 3 * (to - from) - 2 * m0 - m1, k3 = 2 * (from - to) + m0 + m1;
    double x = from < to ? -from / (to - from) : 0.5;
    for (int i = 0; i < 4; ++i) {
        const double slope = m0 + x * (2 * k2 + 3 * x * k3);
        if (!(slope > 0)) break;
        x -= (from + x * (m0 + x * (k2 + x * k3))) / slope;
    }
    return x > 0 && x < 1 ? x * h : otherwise;
}

// Solves c(t) = theta in (low, high], where c(high) >= theta, by Newton steps safeguarded by bisection, from the guess
// `t`. evaluate(t) returns a Value.
template <class Evaluate>
[[gnu::always_inline]] inline double refine(Evaluate evaluate, double theta, double tau_m, double low, double high,
                                            double t, int* evaluations) {
    if (!(t > low && t < high)) t = 0.5 * (low + high);
    double last = __builtin_inf();
    int stalled = 0;
    for (int i = 0; i < 200; ++i) {
        const Value v = evaluate(t);
        ++*evaluations;
        const double miss = v.c - theta, size = miss < 0 ? -miss : miss;
        if (size <= 8e-16) return t;
        (miss < 0 ? low : high) = t;
        if (high - low <= 4.5e-16 * high) return high;
        stalled = size > 0.5 * last ? stalled + 1 : 0;
        last = size;
        if (stalled >= 2 && size <= 1e-12) return t;
        const double step = -miss / v.slope, length = step < 0 ? -step : step;
        double next = t + step;
        if (!(next > low && next < high) || stalled >= 2) {
            next = 0.5 * (low + high);
            stalled = 0;
        } else {
            const double bend = v.curvature < 0 ? -v.curvature : v.curvature;
            // After the step the error is half of curvature / slope times the square of its length.
            if (length <= 2e-15 * tau_m || bend * length * length <= 2e-17 * v.slope * tau_m) return next;
        }
        t = next;
    }
    return t;
}

}  // namespace continuous
}  // namespace
}  // namespace egru::EGRU_LEVEL
