// The forward kernel: advance units to the current time, apply a jump, and compute new lower bounds of their events.
// Also the table of kernels of this dispatch level.
#include "continuous/kernel_entries.hpp"
#include "continuous/division.hpp"

namespace egru::EGRU_LEVEL {
namespace {
namespace continuous {

using namespace egru::continuous;

struct Units {
    alignas(64) double d_u[block], d_r[block], d_z[block], b_u[block], b_r[block], b_z[block];
    alignas(64) double c[block], span[block], theta[block], onset[block], gate[block], key[block];
    Constants tau;
    int count;
};

inline void flow_panels(const Model& m, Units& s, const double* span, Scratch* scratch) {
    if (single_panels(m, s.tau, s.d_u, s.d_z, span, s.count)) {
        alignas(64) double memory[max_points];
        const double* decays = common_decays(m, span, s.count, memory);
        with_nodes(m, [&](auto n) {
            for (int k = 0; k < s.count; k += width) {
                const Affine map = flow<n.nodes>(
                    m, {get(s.d_u + k), get(s.b_u + k), get(s.d_z + k), get(s.b_z + k), get(span + k), s.tau.rate_s(m, k),
                        s.tau.rate_m(m, k), decays});
                put(s.c + k, map.scale * get(s.c + k) + map.shift);
            }
        });
        return;
    }
    Division units[block];
    for (int k = 0; k < s.count; ++k)
        units[k] = Division(m, s.tau.one_s(m, k), s.tau.one_m(m, k), s.d_u[k], s.b_u[k], s.d_z[k], s.b_z[k], span[k]);
    Portion p;
    for (BlockPosition at; at.unit < s.count;) {
        fill(m, scratch, 2, units, s.count, &at, &p);
        flow_portion(m, p);
        for (int i = 0; i < p.count; ++i) {
            double& c = s.c[p.unit[i]];
            c = p.results[i] * c + p.results[row_stride + i];
        }
    }
}

inline void flow_all(const Model& m, Units& s, Scratch* scratch) {
    alignas(64) double span[block];
    const double shortest = time_to_rest(m.tau_s, 0, 0);
    Longs may_rest{};
    for (int k = 0; k < s.count; k += width) {
        may_rest |= get(s.span + k) > shortest;
        put(span + k, get(s.span + k));
    }
    if (any(may_rest))
        for (int k = 0; k < s.count; ++k)
            span[k] = smaller(span[k], time_to_rest(s.tau.one_s(m, k), s.d_u[k], s.d_z[k]));
    flow_panels(m, s, span, scratch);
    if (!any(may_rest)) return;
    for (int k = 0; k < s.count; k += width) {
        const Gates g = gates(get(s.b_u + k), get(s.b_z + k));
        const Doubles at_rest = get(s.span + k) - get(span + k), pace = at_rest * g.u * s.tau.rate_m(m, k);
        const Doubles c = get(s.c + k);
        put(s.c + k, at_rest > 0.0 ? g.z + (c - g.z) * exponential(max_of(-pace, splat(-700.0))) : c);
    }
}

// Computes a time before which each unit emits no event. dc/dt is at most u (z - c) / tau_m with the largest u and z to
// come, and z must exceed theta, which it does in a time window known in closed form. The bound is lowered by a few
// rounding errors.
inline void lower_bounds(const Model& m, Units& s, double time) {
    const Doubles never = splat(__builtin_inf());
    for (int k = 0; k < s.count; k += width) {
        const Doubles b_z = get(s.b_z + k), d_z = get(s.d_z + k), a_z = b_z + d_z, onset = get(s.onset + k);
        const Longs now = a_z > onset, later = b_z > onset, ever = now | later;
        if (!any(ever)) {
            put(s.key + k, never);
            continue;
        }
        const Doubles b_u = get(s.b_u + k), c = get(s.c + k), theta = get(s.theta + k);
        const Gates g = gates(max_of(b_u + get(s.d_u + k), b_u), max_of(a_z, b_z));
        const Doubles ratio = d_z / (onset - b_z);
        const Longs turns = (now ^ later) & (ratio < 1e300) & (ratio > 1.0);
        const Doubles turn = s.tau.s(m, k) * logarithm(turns ? ratio : splat(1.0));
        const Longs rises = (c < theta) & (g.z > theta);
        const Doubles log_ratio = logarithm(rises ? (g.z - c) / (g.z - theta) : splat(1.0)) - 2e-15;
        Doubles bound = s.tau.m(m, k) / g.u * log_ratio;
        bound = max_of(bound, now ? splat(0.0) : turn);
        bound = max_of(bound * (1 - 4e-15), splat(0.0));
        // The window closes at `turn`. If rounding makes that time 0 or infinite, keep the unit as a candidate.
        const Longs over = now & ~later & turns & (bound > turn * (1 + 4e-15));
        put(s.key + k, ever & ~over ? time + bound : never);
    }
}

void advance_block(const Model& m, const State& state, const Touch& t, int first, Scratch* scratch) {
    Units s;
    s.count = t.count - first < block ? t.count - first : block;
    const auto unit = [&](int k) { return t.index != nullptr ? t.index[first + k] : first + k; };
    for (int k = 0; k < s.count; ++k) {
        const int i = unit(k);
        s.b_u[k] = m.b_u[i];
        s.b_r[k] = m.b_r[i];
        s.b_z[k] = m.b_z[i];
        s.theta[k] = m.theta[i];
        s.onset[k] = m.onset[i];
        s.d_u[k] = state.a_u[i] - s.b_u[k];
        s.d_r[k] = state.a_r[i] - s.b_r[k];
        s.d_z[k] = state.a_z[i] - s.b_z[k];
        s.c[k] = state.c[i];
        s.span[k] = t.time - state.last[i];
        state.last[i] = t.time;
    }
    for (int k = s.count; k < (int)padded(s.count); ++k) {
        s.d_u[k] = s.d_r[k] = s.d_z[k] = s.b_u[k] = s.b_r[k] = s.b_z[k] = s.c[k] = s.span[k] = s.gate[k] = 0;
        s.theta[k] = 1;
        s.onset[k] = __builtin_inf();
    }
    s.tau.load(m, unit, s.count, (int)padded(s.count));
    alignas(64) double before[block];
    for (int k = 0; k < s.count; k += width) put(before + k, get(s.c + k));
    flow_all(m, s, scratch);

    const bool has_emitter = t.emitter >= first && t.emitter < first + s.count;
    for (int k = 0; k < s.count; k += width) {
        // Crossings are found by the search. A state that reaches its threshold here did so by rounding.
        const Doubles theta = get(s.theta + k), below = theta * (1 - 0x1p-52), c = get(s.c + k);
        put(s.c + k, get(before + k) < theta ? min_of(c, below) : c);
        const Doubles q = exponential(max_of(get(s.span + k) * -s.tau.rate_s(m, k), splat(-700.0)));
        put(s.d_u + k, get(s.d_u + k) * q);
        put(s.d_r + k, get(s.d_r + k) * q);
        put(s.d_z + k, get(s.d_z + k) * q);
    }
    if (has_emitter) s.c[t.emitter - first] = 0;
    double* record = t.record + first;
    const int64_t row = t.count;
    for (int k = 0; k < s.count; ++k) {
        record[k] = s.d_u[k];
        record[k + row] = s.d_r[k];
        record[k + 2 * row] = s.d_z[k];
        record[k + 3 * row] = s.c[k];
    }
    if (t.gated)
        for (int k = 0; k < s.count; ++k)
            s.gate[k] = t.gate != nullptr ? t.gate[unit(k)] : s.b_r[k] + s.d_r[k];
    if (t.w_u != nullptr)
        for (int k = 0; k < s.count; k += width) {
            const int lanes_left = s.count - k;
            Doubles w_z = load_part<double>(t.w_z + first + k, lanes_left);
            if (t.gated) w_z *= sigmoid_of(get(s.gate + k));
            put(s.d_u + k, get(s.d_u + k) + t.scale * load_part<double>(t.w_u + first + k, lanes_left));
            put(s.d_r + k, get(s.d_r + k) + t.scale * load_part<double>(t.w_r + first + k, lanes_left));
            put(s.d_z + k, get(s.d_z + k) + t.scale_z * w_z);
        }
    if (!t.keep_keys) lower_bounds(m, s, t.time);

    for (int k = 0; k < s.count; ++k) {
        const int i = unit(k);
        state.a_u[i] = s.b_u[k] + s.d_u[k];
        state.a_r[i] = s.b_r[k] + s.d_r[k];
        state.a_z[i] = s.b_z[k] + s.d_z[k];
        state.c[i] = s.c[k];
    }
    if (m.receiver_reset)
        for (int k = 0; k < s.count; ++k) record[k + 4 * row] = t.gated ? s.gate[k] : 0;
    if (!t.keep_keys)
        for (int k = 0; k < s.count; ++k) state.key[unit(k)] = s.key[k];
}

void advance(const Model& m, const State& state, const Touch& t, Scratch* scratch) {
    if (m.linear) return continuous_advance_linear(m, state, t);
    for (int first = 0; first < t.count; first += block) advance_block(m, state, t, first, scratch);
}

// Units that have relaxed do not limit the panel: their gates are constant to rounding.
double longest_panel(const Model& m, const State& state, double time) {
    double longest = m.panel * m.tau_m;  // of the fastest unit
    for (int i = 0; i < m.units; ++i) {
        const double decay = exp((state.last[i] - time) / m.tau_s_of[i]);
        if (m.linear) {
            const double decay_u = m.adaptive ? exp((state.last[i] - time) / m.tau_a_of[i]) : 0;
            const bool rests_u = magnitude(state.a_u[i] - m.b_u[i]) * decay_u < 1e-13;
            const bool rests_z = magnitude(state.a_z[i] - m.b_z[i]) * decay < 1e-13;
            const double rate = larger(rests_u ? 0 : 1 / m.tau_a_of[i], rests_z ? 0 : 1 / m.tau_s_of[i]);
            longest = smaller(longest, m.panel / (rate + 1 / m.tau_m_of[i]));
            continue;
        }
        Division d;
        d.d_u = (state.a_u[i] - m.b_u[i]) * decay;
        d.d_z = (state.a_z[i] - m.b_z[i]) * decay;
        if (larger(magnitude(d.d_u), magnitude(d.d_z)) < 1e-13) continue;
        d.b_u = m.b_u[i];
        d.b_z = m.b_z[i];
        d.span = longest;
        d.tau_s = m.tau_s_of[i];
        d.tau_m = m.tau_m_of[i];
        d.count = 0;
        longest = d.length(m, 0);
    }
    return longest;
}

int argmin(const double* keys, int count) {
    int k = 0;
    double least = keys[0];
    if (count >= width) {
        Doubles v = get(keys);
        for (k = width; k + width <= count; k += width) v = min_of(v, get(keys + k));
        for (int i = 0; i < width; ++i) least = v[i] < least ? v[i] : least;
    }
    for (; k < count; ++k) least = keys[k] < least ? keys[k] : least;
    for (k = 0; k < count - 1 && keys[k] != least;) ++k;
    return k;
}

}  // namespace continuous
}  // namespace

extern const egru::continuous::ContinuousTable continuous_table;
const egru::continuous::ContinuousTable continuous_table{continuous::advance, continuous_find_crossing,
                                                         continuous::argmin, continuous::longest_panel,
                                                         continuous_pull_back};

}  // namespace egru::EGRU_LEVEL
