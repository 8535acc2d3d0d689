// The crossing search: when a unit next reaches its threshold from below.
//
// Between touches z is monotone, so z > theta holds in one time window, known in closed form. A unit can cross only
// inside the window and at most once. So c at the end of the window decides whether there is a crossing.
#include "continuous/kernel_entries.hpp"
#include "continuous/division.hpp"
#include "continuous/refine.hpp"

namespace egru::EGRU_LEVEL {
namespace {
namespace continuous {

using namespace egru::continuous;

// The state of one unit at the start of a panel. d_x is a_x - b_x.
struct Start {
    double d_u, b_u, d_z, b_z, c, z, tau_s, tau_m;
};

// Computes c and its derivatives at time `t` after the start by one panel, vectorised over its nodes and its end.
Value evaluate(const Model& m, const Start& s, double t) {
    alignas(64) double u[max_points], z[max_points], du[max_points], dz[max_points], q[max_points];
    const double decay = -t / s.tau_s, pace = t / s.tau_m;
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
    const double gap = z[n] - v.c, fade = -q[n] / s.tau_s;
    v.slope = u[n] * gap / s.tau_m;
    v.curvature = (du[n] * s.d_u * fade * gap + u[n] * (dz[n] * s.d_z * fade - v.slope)) / s.tau_m;
    return v;
}

// Solves c(t) = theta in (low, high], given the state at `high`.
double solve(const Model& m, const Start& s, double theta, double low, double high, const Value& at_high,
             int* evaluations) {
    // Initial guess: the root of the cubic interpolant if the interval starts at 0, else a Newton step from its end.
    double t = high - (at_high.c - theta) / at_high.slope;
    if (low == 0)
        t = cubic_root(s.c - theta, gate_u(s.b_u + s.d_u) * (s.z - s.c) / s.tau_m, at_high.c - theta, at_high.slope,
                       high, t);
    return refine([&](double time) { return evaluate(m, s, time); }, theta, s.tau_m, low, high, t, evaluations);
}

constexpr int panels_at_once = 8;       // computed before it is checked whether c has crossed
constexpr int panels_per_check = 1024;  // for interrupts

// The panel in which c reaches a limit, and c at its start.
struct Reached {
    bool found;
    double from, h, c;
};

// Returns the first panel at whose end c >= limit. If there is none, c is the state at the end of the interval.
Reached first_above(const Model& m, const Division& d, double limit, double c, Scratch* scratch) {
    for (Position at; !at.at_end(d);) {
        if (at.panel % panels_per_check == 0) scratch->check(scratch);
        alignas(64) double from[panels_at_once], h[panels_at_once], scale[panels_at_once], shift[panels_at_once];
        int count = 0;
        for (; count < panels_at_once && !at.at_end(d); ++count) {
            from[count] = at.from;
            h[count] = d.length(m, at.from);
            at.advance(d, h[count]);
        }
        for (int i = count; i < panels_at_once; ++i) from[i] = h[i] = 0;
        for (int i = 0; i < count; i += width) {
            const Doubles past = exponential(max_of(get(from + i) * -d.rate_s, splat(-700.0)));
            const Panel panel{d.d_u * past, splat(d.b_u), d.d_z * past, splat(d.b_z), get(h + i), splat(d.rate_s),
                              splat(d.rate_m), nullptr};
            with_nodes(m, [&](auto n) {
                const Affine map = flow<n.nodes>(m, panel);
                put(scale + i, map.scale);
                put(shift + i, map.shift);
            });
        }
        for (int i = 0; i < count; ++i) {
            const double next = scale[i] * c + shift[i];
            if (next >= limit) return {true, from[i], h[i], c};
            c = next;
        }
    }
    return {false, d.span, 0, c};
}

// `span` is the search horizon, relative to the last touch.
Crossing find_crossing(const Model& m, int unit, double a_u, double a_z, double c, double span, Scratch* scratch) {
    const double b_u = m.b_u[unit], b_z = m.b_z[unit], onset = m.onset[unit], theta = m.theta[unit];
    const double tau_s = m.tau_s_of[unit], tau_m = m.tau_m_of[unit];
    const bool now = a_z > onset, later = b_z > onset;
    if (!now && !later) return {Outcome::never, 0, 0};
    double opens = 0, closes = __builtin_inf();
    if (now != later) {
        const double turn = tau_s * log((a_z - b_z) / (onset - b_z));
        (later ? opens : closes) = turn > 0 ? turn : 0;
    }
    if (span < opens) return {Outcome::none_yet, 0, 0};
    const double d_u = a_u - b_u, d_z = a_z - b_z;
    if (c >= theta) {  // c must first fall below theta, which is possible only before the window opens
        if (now) return {Outcome::never, 0, 0};
        c = first_above(m, Division(m, tau_s, tau_m, d_u, b_u, d_z, b_z, opens), __builtin_inf(), c, scratch).c;
        if (c >= theta) return {Outcome::never, 0, 1};
        const double past = exp(-opens / tau_s);
        Crossing after = find_crossing(m, unit, b_u + d_u * past, b_z + d_z * past, c, span - opens, scratch);
        after.time += opens;
        ++after.evaluations;
        return after;
    }
    const double longest = time_to_rest(tau_s, d_u, d_z);
    const double end = closes < span ? closes : smaller(span, longest);
    const Division interval(m, tau_s, tau_m, d_u, b_u, d_z, b_z, end);
    const bool single = interval.count == 1;
    const Reached r = single ? Reached{true, 0, end, c} : first_above(m, interval, theta, c, scratch);
    const Crossing missed{closes <= span ? Outcome::never : Outcome::none_yet, 0, 1};
    if (!r.found && end < span && end < closes) {  // at rest: u and z are constant
        const double u = gate_u(b_u), z = tanh(b_z);
        const double time = end + tau_m / u * log((z - r.c) / (z - theta));
        return {time <= span ? Outcome::found : Outcome::none_yet, time, 1};
    }
    if (!r.found) return missed;
    const double past = exp(-r.from / tau_s);
    const Start start{d_u * past, b_u, d_z * past, b_z, r.c, tanh(b_z + d_z * past), tau_s, tau_m};
    const Value last = evaluate(m, start, r.h);
    const double low = opens > r.from ? opens - r.from : 0;
    Crossing result{Outcome::found, r.from + r.h, 1};
    if (last.c < theta) return single ? missed : result;  // at the end of the panel, up to rounding
    if (low < r.h) result.time = r.from + solve(m, start, theta, low, r.h, last, &result.evaluations);
    return result;
}

}  // namespace continuous
}  // namespace

egru::continuous::Crossing continuous_find_crossing(const egru::continuous::Model& m, int unit, double a_u, double a_z,
                                                    double c, double span, egru::continuous::Scratch* scratch) {
    if (m.linear) return continuous_find_linear_crossing(m, unit, a_u, a_z, c, span);
    return continuous::find_crossing(m, unit, a_u, a_z, c, span, scratch);
}

}  // namespace egru::EGRU_LEVEL
