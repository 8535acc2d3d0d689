// Leaky integrate-and-fire units between touches, in closed form.
//
// With the rates m = 1 / tau_m, s = 1 / tau_s and a = 1 / tau_a, and d_x = a_x - b_x at the start of an interval:
//
//   z(t) = z_rest + d_z exp(-s t) - d_u exp(-a t)             z_rest = b_z - b_u
//   c(t) = z_rest + (c - z_rest) exp(-m t) + d_z F_s - d_u F_a
//   F_r  = m times the integral over v from 0 to t of exp(-m (t - v)) exp(-r v)
//        = m t exp(-m t) g((m - r) t)                         g(x) = (exp(x) - 1) / x
//
// g has no singularity at 0, so equal time constants are not special. Units without adaptation have no terms of gate u:
// their a_u has no effect and relaxes with tau_s.
#pragma once

#include "continuous/vector_math.hpp"
#include "continuous/kernels.hpp"

extern "C" {
double exp(double);
double expm1(double);
double log(double);
}

namespace egru::EGRU_LEVEL {
namespace {
namespace continuous {

using egru::continuous::block;
using egru::continuous::Model;

inline Doubles decay_of(Doubles rate, Doubles time) { return exponential(max_of(-rate * time, splat(-700.0))); }

// Rates of a block of units.
struct Rates {
    alignas(64) double tau_s[block], tau_m[block], tau_a[block];
    Doubles shared_s, shared_m;

    template <class Index>
    void load(const Model& m, Index unit, int count, int padded_count) {
        shared_s = splat(m.rate_s);
        shared_m = splat(m.rate_m);
        for (int k = 0; k < count && !m.shared_tau; ++k) {
            tau_s[k] = m.tau_s_of[unit(k)];
            tau_m[k] = m.tau_m_of[unit(k)];
        }
        for (int k = 0; k < count && m.adaptive; ++k) tau_a[k] = m.tau_a_of[unit(k)];
        for (int k = count; k < padded_count; ++k) tau_s[k] = tau_m[k] = tau_a[k] = 1;
    }
    Doubles s(const Model& m, int k) const { return m.shared_tau ? shared_s : 1.0 / get(tau_s + k); }
    Doubles m(const Model& m, int k) const { return m.shared_tau ? shared_m : 1.0 / get(tau_m + k); }
    Doubles a(const Model& m, int k) const { return m.adaptive ? 1.0 / get(tau_a + k) : s(m, k); }
};

// The integrals over v from 0 to 1 of exp(-m t (1 - v)) exp(-r t v), and of v times the same: t times the first and t^2
// times the second are the integrals over time. `kept` is exp(-m t), `decayed` exp(-r t) and x is (m - r) t.
struct Means {
    Doubles one, v;
};

// Taylor series of the integral of v exp(x v), for |x| <= 1.
inline Doubles series(Doubles x) {
    constexpr double c[] = {1. / 2, 1. / 3, 1. / 8, 1. / 30, 1. / 144, 1. / 840, 1. / 5760, 1. / 45360, 1. / 403200,
                            1. / 3991680, 1. / 43545600, 1. / 518918400, 1. / 6706022400., 1. / 93405312000.,
                            1. / 1394852659200., 1. / 22230464256000., 1. / 376610217984000.,
                            1. / 6758061133824000., 1. / 128047474114560000.};
    constexpr int terms = sizeof c / sizeof *c;
    Doubles even = splat(c[terms - 1]), odd = splat(c[terms - 2]);
    const Doubles x2 = x * x;
    for (int k = terms - 3; k >= 2; k -= 2) {
        even = even * x2 + c[k];
        odd = odd * x2 + c[k - 1];
    }
    even = even * x2 + c[0];
    return odd * x + even;
}

inline Means means_of(Doubles kept, Doubles decayed, Doubles x) {
    const Longs small = abs_of(x) <= 1.0;
    const Doubles safe = small ? splat(1.0) : x;
    const Doubles v = small ? kept * series(x) : (decayed * (safe - 1.0) + kept) / (safe * safe);
    return {small ? decayed - x * v : (decayed - kept) / safe, v};
}

// What the flow over a time `t` needs, for a vector of units.
struct Flow {
    Doubles t, m, s, a, kept, q_s, q_a;
    Means mean_s, mean_a;

    Doubles f_s() const { return m * t * mean_s.one; }
    Doubles f_a() const { return m * t * mean_a.one; }
    Doubles end(const Model& model, Doubles c, Doubles d_u, Doubles d_z, Doubles z_rest) const {
        const Doubles end = z_rest + (c - z_rest) * kept + d_z * f_s();
        return model.adaptive ? end - d_u * f_a() : end;
    }
};

inline Flow flow_of(const Model& model, Doubles m, Doubles s, Doubles a, Doubles t) {
    Flow f;
    f.t = t;
    f.m = m;
    f.s = s;
    f.a = a;
    f.kept = decay_of(m, t);
    f.q_s = decay_of(s, t);
    f.mean_s = means_of(f.kept, f.q_s, (m - s) * t);
    f.q_a = model.adaptive ? decay_of(a, t) : f.q_s;
    f.mean_a = model.adaptive ? means_of(f.kept, f.q_a, (m - a) * t) : Means{};
    return f;
}

// Whether all units of a block have the same flow.
inline bool have_common_flow(const Model& m, const Rates& rates, const double* span, int count) {
    if (!m.shared_tau) return false;
    for (int k = 1; k < count; ++k)
        if (span[k] != span[0] || (m.adaptive && rates.tau_a[k] != rates.tau_a[0])) return false;
    return true;
}

}  // namespace continuous
}  // namespace
}  // namespace egru::EGRU_LEVEL
