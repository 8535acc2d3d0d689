// The kernels of leaky integrate-and-fire units, in closed form: the forward kernel, which advances units and applies a
// jump, and its adjoint. They do what kernel_advance.cpp and kernel_adjoint.cpp do for the event-based GRU, without
// panels.
#include "continuous/kernel_entries.hpp"
#include "continuous/linear.hpp"

namespace egru::EGRU_LEVEL {
namespace {
namespace continuous {

using namespace egru::continuous;

struct Units {
    alignas(64) double d_u[block], d_r[block], d_z[block], b_u[block], b_r[block], b_z[block];
    alignas(64) double c[block], span[block], theta[block], key[block];
    alignas(64) double p_c[block], p_u[block], p_r[block], p_z[block];  // the adjoint
    Rates rates;
    int count, padded;

    template <class Index>
    void load(const Model& m, Index unit, int units) {
        count = units;
        padded = (units + width - 1) / width * width;
        for (int k = 0; k < count; ++k) {
            const int i = unit(k);
            b_u[k] = m.b_u[i];
            b_r[k] = m.b_r[i];
            b_z[k] = m.b_z[i];
            theta[k] = m.theta[i];
        }
        for (int k = count; k < padded; ++k) {
            d_u[k] = d_r[k] = d_z[k] = b_u[k] = b_r[k] = b_z[k] = c[k] = span[k] = 0;
            p_c[k] = p_u[k] = p_r[k] = p_z[k] = 0;
            theta[k] = 1;
        }
        rates.load(m, unit, count, padded);
    }
    Doubles z_rest(const Model& m, int k) const { return m.adaptive ? get(b_z + k) - get(b_u + k) : get(b_z + k); }

    // Adds the jump of a touch, or of its adjoint.
    template <class T>
    void add_jump(const T& touch, int first) {
        for (int k = 0; k < count; k += width) {
            const auto add = [&](double* d, const double* w) {
                put(d + k, get(d + k) + touch.scale * load_part<double>(w + first + k, count - k));
            };
            add(d_u, touch.w_u);
            add(d_r, touch.w_r);
            add(d_z, touch.w_z);
        }
    }

    // Calls work(k, flow) for each vector of units, with their flow over the span.
    template <class Work>
    [[gnu::always_inline]] inline void with_flow(const Model& m, Work work) const {
        const bool common = have_common_flow(m, rates, span, count);
        Flow flow{};
        for (int k = 0; k < count; k += width) {
            if (common && k > 0) {
                work(k, flow);
                continue;
            }
            flow = flow_of(m, rates.m(m, k), rates.s(m, k), rates.a(m, k), common ? splat(span[0]) : get(span + k));
            work(k, flow);
        }
    }
};

// Computes a time before which each unit emits no event. dc/dt is at most (z - c) / tau_m with the largest z to come,
// and z must exceed theta. The bound is lowered by a few rounding errors.
inline void lower_bounds(const Model& m, Units& u, double time) {
    const Doubles never = splat(__builtin_inf()), zero{};
    for (int k = 0; k < u.count; k += width) {
        const Doubles rest = u.z_rest(m, k), d_z = get(u.d_z + k), d_u = m.adaptive ? get(u.d_u + k) : zero;
        const Doubles c = get(u.c + k), theta = get(u.theta + k), s = u.rates.s(m, k), a = u.rates.a(m, k);
        const Doubles start = rest + d_z - d_u;
        Doubles top = max_of(start, rest), opens = zero;
        const Longs now = start > theta;
        if (m.adaptive) {
            // z may have a maximum, and cannot exceed theta before d_u, if it is positive, has decayed enough.
            const Doubles ratio = s * d_z / (a * d_u), rates = s - a;
            const Longs turns = (ratio > 1e-300) & (ratio < 1e300) & (rates != 0.0);
            const Doubles turn = logarithm(turns ? ratio : splat(1.0)) / (turns ? rates : splat(1.0));
            const Doubles at = turns & (turn > 0.0) ? turn : zero;
            top = max_of(top, rest + d_z * decay_of(s, at) - d_u * decay_of(a, at));
            top += 4e-16 * (abs_of(rest) + abs_of(d_z) + abs_of(d_u));
            const Doubles room = rest + max_of(d_z, zero) - theta, far = d_u / room;
            const Longs later = ~now & (room > 0.0) & (far > 1.0) & (far < 1e300);
            opens = logarithm(later ? far : splat(1.0)) / a;
        } else {
            const Doubles far = d_z / (theta - rest);
            opens = logarithm(~now & (far > 1.0) & (far < 1e300) ? far : splat(1.0)) / s;
        }
        const Longs ever = top > theta, rises = ever & (c < theta);
        const Doubles log_ratio = logarithm(rises ? (top - c) / (top - theta) : splat(1.0)) - 2e-15;
        const Doubles bound = max_of(max_of(log_ratio / u.rates.m(m, k), opens) * (1 - 4e-15), zero);
        put(u.key + k, ever ? time + bound : never);
    }
}

void advance_block(const Model& m, const State& state, const Touch& t, int first) {
    const auto unit = [&](int k) { return t.index != nullptr ? t.index[first + k] : first + k; };
    Units u;
    u.load(m, unit, t.count - first < block ? t.count - first : block);
    for (int k = 0; k < u.count; ++k) {
        const int i = unit(k);
        u.d_u[k] = state.a_u[i] - u.b_u[k];
        u.d_r[k] = state.a_r[i] - u.b_r[k];
        u.d_z[k] = state.a_z[i] - u.b_z[k];
        u.c[k] = state.c[i];
        u.span[k] = t.time - state.last[i];
        state.last[i] = t.time;
    }
    u.with_flow(m, [&](int k, const Flow& flow) {
        const Doubles c = get(u.c + k), d_u = get(u.d_u + k), d_z = get(u.d_z + k), theta = get(u.theta + k);
        const Doubles end = flow.end(m, c, d_u, d_z, u.z_rest(m, k));
        // Crossings are found by the search. A state that reaches its threshold here did so by rounding.
        put(u.c + k, c < theta ? min_of(end, theta * (1 - 0x1p-52)) : end);
        put(u.d_u + k, d_u * flow.q_a);
        put(u.d_r + k, get(u.d_r + k) * flow.q_s);
        put(u.d_z + k, d_z * flow.q_s);
    });
    const int emitter = t.emitter - first;
    const bool has_emitter = t.emitter >= first && emitter < u.count;
    if (has_emitter) u.c[emitter] = 0;
    double* record = t.record + first;
    const int64_t row = t.count;
    for (int k = 0; k < u.count; ++k) {
        record[k] = u.d_u[k];
        record[k + row] = u.d_r[k];
        record[k + 2 * row] = u.d_z[k];
        record[k + 3 * row] = u.c[k];
    }
    if (t.w_u != nullptr) u.add_jump(t, first);
    if (has_emitter && m.adaptive) u.d_u[emitter] += m.beta[unit(emitter)];
    if (!t.keep_keys) lower_bounds(m, u, t.time);
    for (int k = 0; k < u.count; ++k) {
        const int i = unit(k);
        state.a_u[i] = u.b_u[k] + u.d_u[k];
        state.a_r[i] = u.b_r[k] + u.d_r[k];
        state.a_z[i] = u.b_z[k] + u.d_z[k];
        state.c[i] = u.c[k];
        if (!t.keep_keys) state.key[i] = u.key[k];
    }
}

// Pulls back across the jump: sums over the receivers and gradients of the weights.
inline void pull_back_jump(const Model& m, const TouchAdjoint& t, int first, int emitter, const Units& u,
                           ReceiverSums* sums) {
    Doubles sum_u{}, sum_r{}, sum_z{}, rate{}, rate_z{}, slope{};
    for (int k = 0; k < u.count; k += width) {
        const int lanes_left = u.count - k;
        const auto part = [&](const double* w) { return load_part<double>(w + first + k, lanes_left); };
        const Doubles p_u = get(u.p_u + k), p_r = get(u.p_r + k), p_z = get(u.p_z + k), s = u.rates.s(m, k);
        const Doubles w_u = part(t.w_u), w_z = part(t.w_z);
        const Doubles by_u = w_u * p_u, by_r = part(t.w_r) * p_r, by_z = w_z * p_z;
        sum_u += by_u;
        sum_r += by_r;
        sum_z += by_z;
        rate += by_u * u.rates.a(m, k) + by_r * s;
        rate_z += by_z * s;
        const auto add = [&](double* gradient, Doubles v) {
            double* at = gradient + first + k;
            store_part<double>(at, load_part<double>(at, lanes_left) + v, lanes_left);
        };
        add(t.grad_u, t.scale * p_u);
        add(t.grad_r, t.scale * p_r);
        add(t.grad_z, t.scale * p_z);
        Doubles p_c = get(u.p_c + k);
        if (emitter >= k && emitter < k + width) p_c[emitter - k] = 0;
        slope += p_c * (m.adaptive ? w_u - w_z : -w_z) * u.rates.m(m, k);
    }
    sums->u += sum_of(sum_u);
    sums->r += sum_of(sum_r);
    sums->z += sum_of(sum_z);
    sums->rate += sum_of(rate);
    sums->rate_z += sum_of(rate_z);
    sums->slope += t.scale * sum_of(slope);
}

void pull_back_block(const Model& m, Adjoint* adjoint, const TouchAdjoint& t, int first, ReceiverSums* sums) {
    const auto unit = [&](int k) { return t.index != nullptr ? t.index[first + k] : first + k; };
    Units u;
    u.load(m, unit, t.count - first < block ? t.count - first : block);
    const double* record = t.record + first;
    const int64_t row = t.count;
    for (int k = 0; k < u.count; ++k) {
        const int i = unit(k);
        u.d_u[k] = record[k];
        u.d_r[k] = record[k + row];
        u.d_z[k] = record[k + 2 * row];
        u.c[k] = record[k + 3 * row];
        u.span[k] = adjoint->time[i] - t.time;
        adjoint->time[i] = t.time;
        u.p_c[k] = adjoint->p_c[i];
        u.p_u[k] = adjoint->p_u[i];
        u.p_r[k] = adjoint->p_r[i];
        u.p_z[k] = adjoint->p_z[i];
    }
    const int emitter = t.emitter >= first && t.emitter < first + u.count ? t.emitter - first : -1;
    // d after the jump, rounded as in the forward pass.
    if (t.w_u != nullptr) u.add_jump(t, first);
    if (emitter >= 0 && m.adaptive) u.d_u[emitter] += m.beta[unit(emitter)];
    for (int k = 0; k < u.count; k += width) {
        const auto round = [&](double* d, const double* b) { put(d + k, (get(b + k) + get(d + k)) - get(b + k)); };
        round(u.d_u, u.b_u);
        round(u.d_r, u.b_r);
        round(u.d_z, u.b_z);
    }
    if (emitter >= 0) {
        sums->emitter_u = 1;
        sums->emitter_z = u.b_z[emitter] + u.d_z[emitter];
        if (m.adaptive) sums->emitter_z -= u.b_u[emitter] + u.d_u[emitter];
    }

    alignas(64) double g_u[block], g_r[block], g_z[block], g_tau_s[block], g_tau_m[block], g_tau_a[block];
    Doubles tau_s{}, tau_m{};
    u.with_flow(m, [&](int k, const Flow& f) {
        const Doubles p_c = get(u.p_c + k), p_u = get(u.p_u + k), p_r = get(u.p_r + k), p_z = get(u.p_z + k);
        const Doubles d_u = get(u.d_u + k), d_r = get(u.d_r + k), d_z = get(u.d_z + k);
        const Doubles f_s = f.f_s(), lost = 1.0 - f.kept, t2 = f.t * f.t;
        // Derivatives of c at the end by the rates; those of F are in linear.hpp, by parts.
        Doubles by_m = d_z * (f.t * f.mean_s.one - f.m * t2 * (f.mean_s.one - f.mean_s.v));
        by_m -= f.t * f.kept * (get(u.c + k) - u.z_rest(m, k));
        Doubles by_s = d_z * (f.m * t2 * f.mean_s.v * p_c + f.t * f.q_s * p_z) + d_r * f.t * f.q_s * p_r;
        const Doubles by_a = d_u * f.t * f.q_a * p_u;
        Doubles new_u = f.q_a * p_u, bias_u = p_u - new_u;
        if (m.adaptive) {
            const Doubles f_a = f.f_a();
            by_m -= d_u * (f.t * f.mean_a.one - f.m * t2 * (f.mean_a.one - f.mean_a.v));
            new_u -= f_a * p_c;
            bias_u -= (lost - f_a) * p_c;
            put(g_tau_a + k, (by_a - d_u * f.m * t2 * f.mean_a.v * p_c) * f.a * f.a);
        } else {
            by_s += by_a;
        }
        const Doubles new_r = f.q_s * p_r, new_z = f.q_s * p_z;
        put(g_u + k, bias_u);
        put(g_r + k, p_r - new_r);
        put(g_z + k, p_z - new_z + (lost - f_s) * p_c);
        by_s *= f.s * f.s;
        by_m *= -f.m * f.m * p_c;
        put(g_tau_s + k, by_s);
        put(g_tau_m + k, by_m);
        tau_s += by_s;
        tau_m += by_m;
        put(u.p_c + k, f.kept * p_c);
        put(u.p_u + k, new_u);
        put(u.p_r + k, new_r);
        put(u.p_z + k, new_z + f_s * p_c);
    });
    if (m.shared_tau) {
        *adjoint->grad_tau_s += sum_of(tau_s);
        *adjoint->grad_tau_m += sum_of(tau_m);
    }
    if (t.w_u != nullptr) pull_back_jump(m, t, first, emitter, u, sums);
    for (int k = 0; k < u.count; ++k) {
        const int i = unit(k);
        if (!m.shared_tau) {
            adjoint->grad_tau_s[i] += g_tau_s[k];
            adjoint->grad_tau_m[i] += g_tau_m[k];
        }
        if (m.adaptive) adjoint->grad_tau_a[i] += g_tau_a[k];
        adjoint->p_c[i] = u.p_c[k];
        adjoint->p_u[i] = u.p_u[k];
        adjoint->p_r[i] = u.p_r[k];
        adjoint->p_z[i] = u.p_z[k];
        adjoint->grad_b_u[i] += g_u[k];
        adjoint->grad_b_r[i] += g_r[k];
        adjoint->grad_b_z[i] += g_z[k];
    }
}

}  // namespace continuous
}  // namespace

void continuous_advance_linear(const egru::continuous::Model& m, const egru::continuous::State& state,
                               const egru::continuous::Touch& touch) {
    for (int first = 0; first < touch.count; first += egru::continuous::block)
        continuous::advance_block(m, state, touch, first);
}

egru::continuous::ReceiverSums continuous_pull_back_linear(const egru::continuous::Model& m,
                                                           egru::continuous::Adjoint* adjoint,
                                                           const egru::continuous::TouchAdjoint& touch) {
    egru::continuous::ReceiverSums sums{};
    for (int first = 0; first < touch.count; first += egru::continuous::block)
        continuous::pull_back_block(m, adjoint, touch, first, &sums);
    return sums;
}

}  // namespace egru::EGRU_LEVEL
