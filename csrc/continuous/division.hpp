// How the interval between two updates of a unit is divided into panels, and the panels of a block of units into
// portions of bounded size.
#pragma once

#include "continuous/panel.hpp"

extern "C" {
double exp(double);
double log(double);
double tanh(double);
}

namespace egru::EGRU_LEVEL {
namespace {
namespace continuous {

// How fast the gates change, in units of 1 / tau_s, at a distance max |a_x - b_x| from rest. The longest panel is
// inversely proportional to it. Far from rest the activations may pass zero, where the gates bend, at full speed.
template <class T>
inline T gate_speed(T distance) {
    const T beyond = distance - 10.0;
    return 1.0 + 0.5 * distance + (beyond > 0.0 ? beyond : beyond * 0.0);
}

// Up to this many panels have the same length, which is that of the start of the interval. Otherwise the length follows
// the unit.
constexpr int max_equal_panels = 1000;

// At |a| above this, sigmoid and tanh are constant to rounding.
constexpr double saturation = 38;

inline double gate_u(double a) { return 1 / (1 + exp(-a)); }

inline double larger(double a, double b) { return a > b ? a : b; }
inline double smaller(double a, double b) { return a < b ? a : b; }
inline double magnitude(double a) { return a < 0 ? -a : a; }

// After this time without a touch, the activations equal their biases to rounding. From then on everything has a closed
// form, so long inactivity costs nothing.
inline double time_to_rest(double tau_s, double d_u, double d_z) {
    const double distance = larger(magnitude(d_u), magnitude(d_z));
    return (45 + (distance > 1e3 ? log(distance / 1e3) : 0)) * tau_s;
}

// How long a gate with activation `a` and bias `b` stays saturated; 0 if it is not.
inline double time_saturated(double tau_s, double a, double b) {
    if (!(magnitude(a) > saturation)) return 0;
    const double edge = a > 0 ? saturation : -saturation;
    if (a > 0 ? b >= edge : b <= edge) return __builtin_inf();
    return tau_s * log((a - b) / (edge - b));
}

// The interval of one unit. d_x is a_x - b_x at its start.
struct Division {
    double d_u, b_u, d_z, b_z, span, tau_s, tau_m, rate_s, rate_m;
    int32_t count;  // of panels, if they have the same length, else 0
    double h;       // that length

    Division() = default;
    Division(const Model& m, double tau_s, double tau_m, double d_u, double b_u, double d_z, double b_z, double span)
        : d_u(d_u), b_u(b_u), d_z(d_z), b_z(b_z), span(span), tau_s(tau_s), tau_m(tau_m),
          rate_s(m.shared_tau ? m.rate_s : 1.0 / tau_s), rate_m(m.shared_tau ? m.rate_m : 1.0 / tau_m) {
        const double distance = larger(magnitude(d_u), magnitude(d_z));
        const double load = span * (gate_speed(distance) * rate_s + rate_m) / m.panel;
        const int32_t whole = load <= max_equal_panels ? (int32_t)load : 0;
        count = load <= max_equal_panels ? whole + (load > whole || whole == 0) : 0;
        h = count > 0 ? span / count : 0;
    }

    // The length of the panel that starts at `from`. Saturated gates do not limit it until they leave saturation.
    double length(const Model& m, double from) const {
        if (count > 0) return h;
        const double past = exp(-from / tau_s), far_u = d_u * past, far_z = d_z * past;
        const double held_u = time_saturated(tau_s, b_u + far_u, b_u);
        const double held_z = time_saturated(tau_s, b_z + far_z, b_z);
        const double distance = larger(held_u > 0 ? 0 : magnitude(far_u), held_z > 0 ? 0 : magnitude(far_z));
        const bool constant = held_u > 0 && held_z > 0;
        double longest = m.panel / ((constant ? 0 : gate_speed(distance) / tau_s) + 1.0 / tau_m);
        if (held_u > 0) longest = smaller(longest, held_u);
        if (held_z > 0) longest = smaller(longest, held_z);
        return smaller(larger(longest, 0x1p-48 * (tau_s + from)), span - from);
    }
};

// A position in the panels of an interval.
struct Position {
    int32_t panel = 0;
    double from = 0;  // the time since the start of the interval

    void advance(const Division& d, double h) {
        ++panel;
        from = d.count > 0 ? panel * d.h : from + h;
    }
    bool at_end(const Division& d) const { return d.count > 0 ? panel >= d.count : !(from < d.span); }
};

inline int64_t padded(int64_t count) { return (count + width - 1) / width * width; }

constexpr int portion = 1024;  // panels that are computed together, a multiple of every vector width
constexpr int row_stride = portion + 8;  // rows a power of two apart would share the same sets of the cache
constexpr int panel_rows = 8;  // rows of scratch memory for the panels of a portion; results follow

// The next panels of a block of units, one entry per panel.
struct Portion {
    double *d_u, *b_u, *d_z, *b_z, *h, *from, *rate_s, *rate_m, *results;
    int32_t unit[portion];
    bool last[portion];  // the last panel of its unit
    int count;

    void place(double* memory) {
        double** const rows[] = {&d_u, &b_u, &d_z, &b_z, &h, &from, &rate_s, &rate_m, &results};
        for (int i = 0; i <= panel_rows; ++i) *rows[i] = memory + i * row_stride;
    }

    Panel panel(int i) const {
        const Doubles past = exponential(max_of(get(from + i) * -get(rate_s + i), splat(-700.0)));
        return {get(d_u + i) * past, get(b_u + i), get(d_z + i) * past, get(b_z + i), get(h + i), get(rate_s + i),
                get(rate_m + i), nullptr};
    }
};

// A position in the panels of a block of units.
struct BlockPosition {
    int32_t unit = 0;
    Position position;
};

// Fills `p` with the panels from `at` on, and moves `at` behind them. `result_rows` is the number of rows of results.
inline void fill(const Model& m, Scratch* scratch, int result_rows, const Division* units, int count,
                 BlockPosition* at, Portion* p) {
    scratch->check(scratch);
    const int64_t needed = int64_t(row_stride) * (panel_rows + result_rows);
    if (scratch->capacity < needed) scratch->grow(scratch, needed);
    p->place(scratch->data);
    int i = 0;
    for (; i < portion && at->unit < count; ++i) {
        const Division& d = units[at->unit];
        const double h = d.length(m, at->position.from);
        p->d_u[i] = d.d_u;
        p->b_u[i] = d.b_u;
        p->d_z[i] = d.d_z;
        p->b_z[i] = d.b_z;
        p->h[i] = h;
        p->from[i] = at->position.from;
        p->rate_s[i] = d.rate_s;
        p->rate_m[i] = d.rate_m;
        p->unit[i] = at->unit;
        at->position.advance(d, h);
        p->last[i] = at->position.at_end(d);
        if (p->last[i]) *at = {at->unit + 1, {}};
    }
    p->count = i;
    for (; i % width != 0; ++i) {
        p->d_u[i] = p->b_u[i] = p->d_z[i] = p->b_z[i] = p->h[i] = p->from[i] = 0;
        p->rate_s[i] = p->rate_m[i] = 1;
    }
}

// Computes c at the end of each panel as an affine function of c at its start: a row of scales, then a row of shifts.
inline void flow_portion(const Model& m, const Portion& p) {
    with_nodes(m, [&](auto n) {
        for (int i = 0; i < p.count; i += width) {
            const Affine map = flow<n.nodes>(m, p.panel(i));
            put(p.results + i, map.scale);
            put(p.results + row_stride + i, map.shift);
        }
    });
}

// Whether the interval of every unit of a block is a single panel.
inline bool single_panels(const Model& m, const Constants& tau, const double* d_u, const double* d_z,
                          const double* span, int count) {
    const double by_panel = 1.0 / m.panel;
    Longs several{};
    for (int k = 0; k < count; k += width) {
        const Doubles distance = max_of(abs_of(get(d_u + k)), abs_of(get(d_z + k)));
        several |= get(span + k) * (gate_speed(distance) * tau.rate_s(m, k) + tau.rate_m(m, k)) * by_panel > 1.0;
    }
    return !any(several);
}

}  // namespace continuous
}  // namespace
}  // namespace egru::EGRU_LEVEL
