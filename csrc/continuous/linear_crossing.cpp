// The crossing search of leaky integrate-and-fire units: when a unit next reaches its threshold from below.
//
// Where c = theta, c rises exactly if z > theta. z - theta is a constant and at most two exponentials, so that it has at
// most one extremum, known in closed form, and is positive in at most two windows. In each of them c crosses at most
// once, and c at its start and at its end decides whether it does. Between windows c cannot rise to theta.
#include "continuous/kernel_entries.hpp"
#include "continuous/linear.hpp"
#include "continuous/refine.hpp"

namespace egru::EGRU_LEVEL {
namespace {
namespace continuous {

using namespace egru::continuous;

// One unit at its last touch, as in linear.hpp. d_u is 0 without adaptation.
struct Unit {
    double z_rest, d_u, d_z, c, m, s, a;

    double z(double t) const {
        const double z = z_rest + d_z * exp(-s * t);
        return d_u != 0 ? z - d_u * exp(-a * t) : z;
    }

    // F_r, given the decays.
    double filtered(double t, double rate, double kept, double decayed) const {
        const double x = (m - rate) * t;
        const double mean = x == 0 ? kept : x < 1 && x > -1 ? kept * expm1(x) / x : (decayed - kept) / x;
        return m * t * mean;
    }

    Value at(double t) const {
        const double kept = exp(-m * t), q_s = exp(-s * t);
        double z = z_rest + d_z * q_s, change = -s * d_z * q_s;
        double c_t = z_rest + (c - z_rest) * kept + d_z * filtered(t, s, kept, q_s);
        if (d_u != 0) {
            const double q_a = exp(-a * t);
            z -= d_u * q_a;
            change += a * d_u * q_a;
            c_t -= d_u * filtered(t, a, kept, q_a);
        }
        const double slope = m * (z - c_t);
        return {c_t, slope, m * (change - slope)};
    }

    // The time at which dz/dt changes its sign, or 0.
    double turn() const {
        if (d_u == 0 || d_z == 0 || (d_u > 0) != (d_z > 0) || a == s) return 0;
        const double t = log(s * d_z / (a * d_u)) / (s - a);
        return t > 0 ? t : 0;
    }

    // When z reaches theta, in [low, high], where it is monotone and does.
    double z_root(double theta, double low, double high) const {
        if (d_u == 0) {
            const double t = log(d_z / (theta - z_rest)) / s;
            return t > low ? (t < high ? t : high) : low;
        }
        const bool starts_above = z(low) > theta;
        double t = 0.5 * (low + high);
        for (int i = 0; i < 200 && high - low > 4.5e-16 * high; ++i) {
            const double near = d_z * exp(-s * t), far = d_u * exp(-a * t), miss = z_rest + near - far - theta;
            ((miss > 0) == starts_above ? low : high) = t;
            const double step = -miss / (a * far - s * near), next = t + step;
            if (!(next > low && next < high)) {
                t = 0.5 * (low + high);
                continue;
            }
            if (step <= 4.5e-16 * t && step >= -4.5e-16 * t) return next;
            t = next;
        }
        return t;
    }
};

// `span` is the search horizon, relative to the last touch.
Crossing find_linear_crossing(const Model& m, int i, double a_u, double a_z, double c, double span) {
    const double theta = m.theta[i], tau_m = m.tau_m_of[i], b_u = m.adaptive ? m.b_u[i] : 0;
    const Unit unit{m.b_z[i] - b_u, m.adaptive ? a_u - b_u : 0, a_z - m.b_z[i], c, 1 / tau_m, 1 / m.tau_s_of[i],
                    1 / m.tau_a_of[i]};
    const double turn = unit.turn(), middle = turn < span ? turn : span;
    const bool now = unit.z(0) > theta, between = unit.z(middle) > theta, then = unit.z(span) > theta;
    const bool later = unit.z_rest > theta || (turn > span && unit.z(turn) > theta);
    Crossing result{then || later ? Outcome::none_yet : Outcome::never, 0, 0};
    const auto try_window = [&](double opens, double closes) {
        ++result.evaluations;
        const Value last = unit.at(closes);
        if (last.c < theta) return false;
        if (c >= theta && (opens == 0 || unit.at(opens).c >= theta)) return false;  // it must fall below first
        const Value first = unit.at(opens);
        double guess = cubic_root(first.c - theta, first.slope, last.c - theta, last.slope, closes - opens, -1) + opens;
        if ((closes - opens) * (unit.m + unit.s) > 1 && first.slope > 0) {  // too long for a cubic: as if z were constant
            const double z = first.c + first.slope * tau_m;
            if (z > theta) guess = opens + tau_m * log((z - first.c) / (z - theta));
        }
        result.outcome = Outcome::found;
        result.time = refine([&](double t) { return unit.at(t); }, theta, tau_m, opens, closes, guess,
                             &result.evaluations);
        return true;
    };
    const bool turns = now != between || between != then;
    if (!turns) {
        if (now) try_window(0, span);
        return result;
    }
    const double before = now != between ? unit.z_root(theta, 0, middle) : 0;
    const double after = between != then ? unit.z_root(theta, middle, span) : span;
    if (now) {
        if (!try_window(0, between ? after : before) && !between && then) try_window(after, span);
    } else {
        try_window(between ? before : after, between ? after : span);
    }
    return result;
}

}  // namespace continuous
}  // namespace

egru::continuous::Crossing continuous_find_linear_crossing(const egru::continuous::Model& m, int unit, double a_u,
                                                           double a_z, double c, double span) {
    return continuous::find_linear_crossing(m, unit, a_u, a_z, c, span);
}

}  // namespace egru::EGRU_LEVEL
