// The crossing search: when a unit next reaches its threshold from below.
//
// Between touches z is monotone, so z > theta holds in one time window, known in closed form. A unit can cross only
// inside the window and at most once. So c at the end of the window decides whether there is a crossing.
#include "continuous/kernel_entries.hpp"
#include "continuous/panel.hpp"

extern "C" {
double exp(double);
double log(double);
double tanh(double);
}

namespace egru::EGRU_LEVEL {
namespace {
namespace continuous {

using namespace egru::continuous;

// The state of one unit at the start of a panel. d_x is a_x - b_x.
struct Start {
    double d_u, b_u, d_z, b_z, c, z;
};

struct Value {
    double c, slope, curvature;
};

// Computes c and its derivatives at time `t` after the start by one panel, vectorised over its nodes and its end.
Value evaluate(const Model& m, const Start& s, double t) {
    alignas(64) double u[max_points], z[max_points], du[max_points], dz[max_points], q[max_points];
    const double decay = -t / m.tau_s, pace = t / m.tau_m;
    for (int i = 0; i < m.stride; i += width) {
        const Doubles qi = exponential(decay * get(m.points + i));
        const Gates g = gates(s.b_u + s.d_u * qi, s.b_z + s.d_z * qi);
        put(u + i, g.u);
        put(z + i, g.z);
        put(du + i, g.du);
        put(dz + i, g.dz);
        put(q + i, qi);
    }
    const int n = m.nodes;
    Doubles sum{};
    double end = 0;
    for (int i = 0; i < m.stride; i += width) {
        Doubles even{}, odd{};
        int j = 0;
        for (; j + 1 < n; j += 2) {
            even += u[j] * get(m.columns + j * m.stride + i);
            odd += u[j + 1] * get(m.columns + (j + 1) * m.stride + i);
        }
        if (j < n) even += u[j] * get(m.columns + j * m.stride + i);
        const Doubles e = exponential(pace * (even + odd));
        sum += get(m.weights + i) * e * get(dz + i) * get(q + i);
        if (n >= i && n < i + width) end = e[n - i];
    }
    Value v;
    v.c = z[n] + (s.c - s.z - decay * s.d_z * sum_of(sum)) / end;
    const double gap = z[n] - v.c, fade = -q[n] / m.tau_s;
    v.slope = u[n] * gap / m.tau_m;
    v.curvature = (du[n] * s.d_u * fade * gap + u[n] * (dz[n] * s.d_z * fade - v.slope)) / m.tau_m;
    return v;
}

// Solves c(t) = theta in (low, high], where c(high) >= theta, by Newton steps safeguarded by bisection.
double refine(const Model& m, const Start& s, double theta, double low, double high, const Value& at_high,
              int* evaluations) {
    // Initial guess: the root of the cubic interpolant if the interval starts at 0, else a Newton step from its end.
    double t = high - (at_high.c - theta) / at_high.slope;
    if (low == 0) {
        const double u = 1 / (1 + exp(-(s.b_u + s.d_u)));
        const double h = high, from = s.c - theta, to = at_high.c - theta;
        const double m0 = h * u * (s.z - s.c) / m.tau_m, m1 = h * at_high.slope;
        const double k2 = 3 * (to - from) - 2 * m0 - m1, k3 = 2 * (from - to) + m0 + m1;
        double x = from < to ? -from / (to - from) : 0.5;
        for (int i = 0; i < 4; ++i) {
            const double slope = m0 + x * (2 * k2 + 3 * x * k3);
            if (!(slope > 0)) break;
            x -= (from + x * (m0 + x * (k2 + x * k3))) / slope;
        }
        if (x > 0 && x < 1) t = x * h;
    }
    if (!(t > low && t < high)) t = 0.5 * (low + high);
    double last = __builtin_inf();
    int stalled = 0;
    for (int i = 0; i < 200; ++i) {
        const Value v = evaluate(m, s, t);
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
            if (length <= 2e-15 * m.tau_m || bend * length * length <= 2e-17 * v.slope * m.tau_m) return next;
        }
        t = next;
    }
    return t;
}

constexpr int panels_at_once = 8;  // computed before it is checked whether c has crossed

// An interval of one unit's trajectory, split into panels of length h.
struct Interval {
    double d_u, b_u, d_z, b_z, h;
    int32_t panels;

    Interval(const Model& m, int unit, double a_u, double a_z, double span)
        : d_u(a_u - m.b_u[unit]), b_u(m.b_u[unit]), d_z(a_z - m.b_z[unit]), b_z(m.b_z[unit]) {
        alignas(64) const double d_us[width] = {d_u}, d_zs[width] = {d_z}, spans[width] = {span};
        count_panels(m, d_us, d_zs, spans, 1, &panels);
        h = span / panels;
    }

    Start start(const Model& m, int32_t panel, double c) const {
        const double past = exp(-panel * h / m.tau_s);
        return {d_u * past, b_u, d_z * past, b_z, c, tanh(b_z + d_z * past)};
    }

    // Returns the first panel at whose end c >= limit, else `panels`. Sets c to the state at its start.
    int32_t first_above(const Model& m, double limit, double* c) const {
        for (int32_t p = 0; p < panels; p += panels_at_once) {
            alignas(64) double scale[panels_at_once], shift[panels_at_once];
            for (int i = 0; i < panels_at_once; i += width) {
                Doubles from;
                for (int j = 0; j < width; ++j) from[j] = (p + i + j) * h;
                const Doubles past = exponential(max_of(from * (-1.0 / m.tau_s), splat(-700.0)));
                const Panel panel{d_u * past, splat(b_u), d_z * past, splat(b_z), splat(h), nullptr};
                with_nodes(m, [&](auto n) {
                    const Affine map = flow<n.nodes>(m, panel);
                    put(scale + i, map.scale);
                    put(shift + i, map.shift);
                });
            }
            for (int i = 0; i < panels_at_once && p + i < panels; ++i) {
                const double next = scale[i] * *c + shift[i];
                if (next >= limit) return p + i;
                *c = next;
            }
        }
        return panels;
    }
};

// `span` is the search horizon, relative to the last touch.
Crossing find_crossing(const Model& m, int unit, double a_u, double a_z, double c, double span) {
    const double b_z = m.b_z[unit], onset = m.onset[unit], theta = m.theta[unit];
    const bool now = a_z > onset, later = b_z > onset;
    if (!now && !later) return {Outcome::never, 0, 0};
    double opens = 0, closes = __builtin_inf();
    if (now != later) {
        const double turn = m.tau_s * log((a_z - b_z) / (onset - b_z));
        (later ? opens : closes) = turn > 0 ? turn : 0;
    }
    if (span < opens) return {Outcome::none_yet, 0, 0};
    if (c >= theta) {  // c must first fall below theta, which is possible only before the window opens
        if (now) return {Outcome::never, 0, 0};
        const Interval interval(m, unit, a_u, a_z, opens);
        interval.first_above(m, __builtin_inf(), &c);
        if (c >= theta) return {Outcome::never, 0, 1};
        const double past = exp(-opens / m.tau_s);
        const double b_u = m.b_u[unit];
        Crossing after = find_crossing(m, unit, b_u + (a_u - b_u) * past, b_z + (a_z - b_z) * past, c, span - opens);
        after.time += opens;
        ++after.evaluations;
        return after;
    }
    const double longest = rest_after * m.tau_s;
    const double end = closes < span ? closes : span > longest ? longest : span;
    const Interval interval(m, unit, a_u, a_z, end);
    const int32_t p = interval.panels == 1 ? 0 : interval.first_above(m, theta, &c);
    const Crossing missed{closes <= span ? Outcome::never : Outcome::none_yet, 0, 1};
    if (p == interval.panels && end < span && end < closes) {  // at rest: u and z are constant
        const double u = 1 / (1 + exp(-m.b_u[unit])), z = tanh(b_z);
        const double time = end + m.tau_m / u * log((z - c) / (z - theta));
        return {time <= span ? Outcome::found : Outcome::none_yet, time, 1};
    }
    if (p == interval.panels) return missed;
    const Start start = interval.start(m, p, c);
    const Value last = evaluate(m, start, interval.h);
    const double from = p * interval.h, low = opens > from ? opens - from : 0;
    Crossing result{Outcome::found, from + interval.h, 1};
    if (last.c < theta) return interval.panels == 1 ? missed : result;  // at the end of the panel, up to rounding
    if (low < interval.h) result.time = from + refine(m, start, theta, low, interval.h, last, &result.evaluations);
    return result;
}

}  // namespace continuous
}  // namespace

egru::continuous::Crossing continuous_find_crossing(const egru::continuous::Model& m, int unit, double a_u, double a_z,
                                               double c, double span) {
    return continuous::find_crossing(m, unit, a_u, a_z, c, span);
}

}  // namespace egru::EGRU_LEVEL
