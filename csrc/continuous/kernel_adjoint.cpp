// The backward kernel: the adjoint of a touch. First the adjoint is pulled back over the interval that starts with the
// touch, then across the jump.
#include "continuous/kernel_entries.hpp"
#include "continuous/division.hpp"

extern "C" {
double expm1(double);
}

namespace egru::EGRU_LEVEL {
namespace {
namespace continuous {

using namespace egru::continuous;

struct Units {
    alignas(64) double before_u[block], before_z[block];  // d before the jump
    alignas(64) double d_u[block], d_r[block], d_z[block], b_u[block], b_r[block], b_z[block];
    alignas(64) double c[block], gate[block], span[block];
    alignas(64) double active[block];  // the part of the span before rest
    // The adjoint, at the end of the interval and later at its start.
    alignas(64) double p_c[block], p_u[block], p_r[block], p_z[block];
    alignas(64) double g_u[block], g_r[block], g_z[block];  // gradients of the biases
    alignas(64) double g_tau_s[block], g_tau_m[block];      // gradients of the time constants, up to a factor
    alignas(64) double gate_share[block];                   // what the receivers' reset gates add to p_r
    Constants tau;
    int count;
};

// The coefficients of one panel's adjoint, for one unit or a vector of units; see Bilinear.
template <class T>
struct Slice {
    T scale, q, x[3], y[3], v[3], rate, lag;
    T d_u, d_z, h, c;  // d_x and c at the start of the panel
};

template <class T>
struct Accumulated {
    T p_c, p_u, p_z, g_u, g_z, tau_s, tau_m;
};

template <class T>
[[gnu::always_inline]] inline void pull_back_panel(const Slice<T>& s, Accumulated<T>& a) {
    const T p = s.scale * a.p_c;
    T u[3], z[3];
    for (int k = 0; k < 3; ++k) {
        u[k] = -p * (s.c * s.x[k] + s.y[k]);
        z[k] = p * s.v[k];
    }
    a.g_u += u[0] - u[1] + (1.0 - s.q) * a.p_u;
    a.g_z += z[0] - z[1] + (1.0 - s.q) * a.p_z;
    a.tau_s += s.d_u * (u[2] + s.q * s.h * a.p_u) + s.d_z * (z[2] + s.q * s.h * a.p_z);
    a.tau_m += p * (s.c * s.rate + s.lag);
    a.p_c = p;
    a.p_u = s.q * a.p_u + u[1];
    a.p_z = s.q * a.p_z + z[1];
}

// Units with one panel each, fully vectorised.
inline void pull_back_single(const Model& m, Units& s) {
    alignas(64) double memory[max_points];
    const double* decays = common_decays(m, s.active, s.count, memory);
    with_nodes(m, [&](auto n) {
        for (int k = 0; k < s.count; k += width) {
            const Panel panel{get(s.d_u + k), get(s.b_u + k),    get(s.d_z + k),
                              get(s.b_z + k), get(s.active + k), s.tau.rate_s(m, k), s.tau.rate_m(m, k),
                              decays};
            const Bilinear b = bilinear<n.nodes>(m, panel);
            const Slice<Doubles> slice{b.scale, b.q, {b.x[0], b.x[1], b.x[2]}, {b.y[0], b.y[1], b.y[2]},
                                       {b.v[0], b.v[1], b.v[2]}, b.rate, b.lag, panel.d_u, panel.d_z, panel.h,
                                       get(s.c + k)};
            Accumulated<Doubles> a{get(s.p_c + k), get(s.p_u + k), get(s.p_z + k), Doubles{}, Doubles{}, Doubles{},
                                   Doubles{}};
            pull_back_panel(slice, a);
            put(s.p_c + k, a.p_c);
            put(s.p_u + k, a.p_u);
            put(s.p_z + k, a.p_z);
            put(s.g_u + k, a.g_u);
            put(s.g_z + k, a.g_z);
            put(s.g_tau_s + k, a.tau_s);
            put(s.g_tau_m + k, a.tau_m);
        }
    });
}

// Pulls back over the time `at_rest`, in which u and z are constant, in closed form. `c` is the state at its start.
inline void pull_back_rest(double tau_s, double tau_m, double at_rest, double b_u, double b_z, double c,
                           Accumulated<double>* a) {
    const double u = gate_u(b_u), z = tanh(b_z), dz = 1 - z * z, k = u / tau_m, s = 1 / tau_s;
    const double kept = exp(-k * at_rest), q = exp(-s * at_rest);
    const double held = (z - c) * kept * a->p_c;  // (z - c) p_c is constant
    const double u_rate = u * (1 - u) / tau_m * held, z_rate = k * dz * a->p_c;
    const double near = (s - k) * at_rest;  // nearly equal rates cancel: use expm1
    const double late = near == 0                   ? kept * at_rest
                        : near < 1 && near > -1.0 ? kept * at_rest * -expm1(-near) / near
                                                    : (kept - q) / (s - k);
    const double u_late = u_rate * (1 - q) * tau_s, z_late = z_rate * late;
    a->g_u += u_rate * at_rest - u_late + (1 - q) * a->p_u;
    a->g_z += z_rate * (1 - kept) / k - z_late + (1 - q) * a->p_z;
    a->tau_m -= held * k * at_rest;
    a->p_c *= kept;
    a->p_u = q * a->p_u + u_late;
    a->p_z = q * a->p_z + z_late;
}

// Rows of results with one entry per panel: the fields of Slice except h, and the shift of c.
enum SliceRow {
    row_scale,
    row_q,
    row_x,
    row_y = row_x + 3,
    row_v = row_y + 3,
    row_rate = row_v + 3,
    row_lag,
    row_d_u,
    row_d_z,
    row_shift,
    row_c,
    slice_rows,
};

inline void slice_portion(const Model& m, const Portion& p) {
    with_nodes(m, [&](auto n) {
        for (int i = 0; i < p.count; i += width) {
            const Panel panel = p.panel(i);
            const Bilinear b = bilinear<n.nodes>(m, panel);
            // In the order of SliceRow.
            const Doubles outputs[slice_rows] = {b.scale, b.q,    b.x[0], b.x[1], b.x[2], b.y[0],    b.y[1],    b.y[2],
                                                 b.v[0],  b.v[1], b.v[2], b.rate, b.lag,  panel.d_u, panel.d_z, b.shift,
                                                 Doubles{}};
            for (int k = 0; k < slice_rows; ++k) put(p.results + k * row_stride + i, outputs[k]);
        }
    });
}

// Pulls back over the panels of one portion, in reverse order. `c` is the state at the start of its first panel.
inline void pull_back_portion(const Model& m, const Units& s, const Portion& p, double c, Accumulated<double>* sums) {
    double* c_start = p.results + row_c * row_stride;
    const double* shift = p.results + row_shift * row_stride;
    alignas(64) double c_end[block];  // of the units whose last panel is in this portion
    for (int i = 0; i < p.count; ++i) {
        c_start[i] = c;
        c = p.results[i] * c + shift[i];
        if (!p.last[i]) continue;
        c_end[p.unit[i]] = c;
        if (p.unit[i] + 1 < s.count) c = s.c[p.unit[i] + 1];
    }
    for (int i = p.count - 1; i >= 0; --i) {
        const int k = p.unit[i];
        if (p.last[i] && s.span[k] > s.active[k])
            pull_back_rest(s.tau.one_s(m, k), s.tau.one_m(m, k), s.span[k] - s.active[k], s.b_u[k], s.b_z[k], c_end[k], &sums[k]);
        const auto at = [&](int row) { return p.results[row * row_stride + i]; };
        pull_back_panel(Slice<double>{at(row_scale), at(row_q),
                                      {at(row_x), at(row_x + 1), at(row_x + 2)},
                                      {at(row_y), at(row_y + 1), at(row_y + 2)},
                                      {at(row_v), at(row_v + 1), at(row_v + 2)},
                                      at(row_rate), at(row_lag), at(row_d_u), at(row_d_z), p.h[i], c_start[i]},
                        sums[k]);
    }
}

// Where a portion starts, stored in scratch memory behind the current portion.
struct Checkpoint {
    BlockPosition at;
    double c;
};

// Units with several panels. Portions are pulled back in reverse order, so a forward sweep first finds where they start.
inline void pull_back_several(const Model& m, Units& s, Scratch* scratch) {
    Division units[block];
    Accumulated<double> sums[block];
    for (int k = 0; k < s.count; ++k) {
        units[k] = Division(m, s.tau.one_s(m, k), s.tau.one_m(m, k), s.d_u[k], s.b_u[k], s.d_z[k], s.b_z[k], s.active[k]);
        sums[k] = {s.p_c[k], s.p_u[k], s.p_z[k], 0, 0, 0, 0};
    }
    constexpr int64_t first_checkpoint = int64_t(row_stride) * (panel_rows + slice_rows);
    constexpr int64_t doubles = sizeof(Checkpoint) / sizeof(double);
    const auto checkpoint = [&](int64_t i) {
        return reinterpret_cast<Checkpoint*>(scratch->data + first_checkpoint + i * doubles);
    };
    Portion p;
    BlockPosition at;
    Checkpoint start{at, s.c[0]};
    int64_t stored = 0;
    for (;;) {
        fill(m, scratch, slice_rows, units, s.count, &at, &p);
        if (at.unit == s.count) break;
        const int64_t needed = first_checkpoint + (stored + 1) * doubles;
        if (scratch->capacity < needed) {
            scratch->grow(scratch, needed);
            p.place(scratch->data);
        }
        *checkpoint(stored++) = start;
        flow_portion(m, p);
        double c = start.c;
        for (int i = 0; i < p.count; ++i) {
            c = p.results[i] * c + p.results[row_stride + i];
            if (p.last[i]) c = s.c[p.unit[i] + 1];
        }
        start = {at, c};
    }
    for (;;) {
        slice_portion(m, p);
        pull_back_portion(m, s, p, start.c, sums);
        if (stored == 0) break;
        start = *checkpoint(--stored);
        at = start.at;
        fill(m, scratch, slice_rows, units, s.count, &at, &p);
    }
    for (int k = 0; k < s.count; ++k) {
        s.p_c[k] = sums[k].p_c;
        s.p_u[k] = sums[k].p_u;
        s.p_z[k] = sums[k].p_z;
        s.g_u[k] = sums[k].g_u;
        s.g_z[k] = sums[k].g_z;
        s.g_tau_s[k] = sums[k].tau_s;
        s.g_tau_m[k] = sums[k].tau_m;
    }
}

// Pulls back across the jump: sums over the receivers and gradients of the weights.
inline void pull_back_jump(const Model& m, const TouchAdjoint& t, int first, Units& s, ReceiverSums* sums) {
    Doubles sum_u{}, sum_r{}, sum_z{}, rate{}, slope{}, paced{}, paced_z{};
    const bool has_emitter = t.emitter >= first && t.emitter < first + s.count;
    const int emitter = t.emitter - first;
    const double p_emitter = has_emitter ? s.p_c[emitter] : 0;
    if (has_emitter) s.p_c[emitter] = 0;
    for (int k = 0; k < s.count; k += width) {
        const int lanes_left = s.count - k;
        const Doubles w_u = load_part<double>(t.w_u + first + k, lanes_left);
        const Doubles w_r = load_part<double>(t.w_r + first + k, lanes_left);
        const Doubles w_z = load_part<double>(t.w_z + first + k, lanes_left);
        const Doubles p_u = get(s.p_u + k), p_r = get(s.p_r + k), p_z = get(s.p_z + k);
        Doubles carried = t.scale_z * p_z, push = w_z * p_z;
        sum_u += w_u * p_u;
        sum_r += w_r * p_r;
        if (t.gated) {
            const Doubles gate = get(s.gate + k), r = sigmoid_of(gate), dr = r * (1.0 - r);
            carried *= r;
            rate += push * dr * (get(s.b_r + k) - gate) * s.tau.rate_s(m, k);
            put(s.gate_share + k, t.scale_z * push * dr);
            push *= r;
        }
        sum_z += push;
        if (!m.shared_tau) {
            const Doubles rate_s = s.tau.rate_s(m, k);
            paced += (w_u * p_u + w_r * p_r) * rate_s;
            paced_z += push * rate_s;
        }
        const auto add = [&](double* gradient, Doubles v) {
            double* at = gradient + first + k;
            store_part<double>(at, load_part<double>(at, lanes_left) + v, lanes_left);
        };
        add(t.grad_u, t.scale * p_u);
        add(t.grad_r, t.scale * p_r);
        add(t.grad_z, carried);
        const Doubles a_u = get(s.b_u + k) + get(s.d_u + k), a_z = get(s.b_z + k) + get(s.d_z + k), c = get(s.c + k);
        const Gates after = gates(a_u, a_z);
        const Gates before = gates(get(s.b_u + k) + get(s.before_u + k), get(s.b_z + k) + get(s.before_z + k));
        if (has_emitter && emitter >= k && emitter < k + width) {
            sums->emitter_u = after.u[emitter - k];
            sums->emitter_z = after.z[emitter - k];
        }
        // u (z - c) before minus after
        slope += get(s.p_c + k) * ((before.u - after.u) * (before.z - c) + after.u * (before.z - after.z)) *
                 s.tau.rate_m(m, k);
    }
    if (has_emitter) s.p_c[emitter] = p_emitter;
    sums->u += sum_of(sum_u);
    sums->r += sum_of(sum_r);
    sums->z += sum_of(sum_z);
    if (!m.shared_tau) {
        sums->rate += sum_of(paced);
        sums->rate_z += sum_of(paced_z);
    }
    sums->z_rate += sum_of(rate);
    // A jump of size 0 must have no effect, not even by rounding.
    if (t.scale != 0) sums->slope += sum_of(slope);
}

// Computes d after the jump, rounded as in the forward pass.
inline void add_jump(const TouchAdjoint& t, int first, Units& s) {
    const auto rounded = [](Doubles b, Doubles d) { return (b + d) - b; };
    for (int k = 0; k < s.count; k += width) {
        Doubles d_u = get(s.before_u + k), d_r = get(s.d_r + k), d_z = get(s.before_z + k);
        if (t.w_u != nullptr) {
            const int lanes_left = s.count - k;
            Doubles w_z = load_part<double>(t.w_z + first + k, lanes_left);
            if (t.gated) w_z *= sigmoid_of(get(s.gate + k));
            d_u += t.scale * load_part<double>(t.w_u + first + k, lanes_left);
            d_r += t.scale * load_part<double>(t.w_r + first + k, lanes_left);
            d_z += t.scale_z * w_z;
        }
        put(s.d_u + k, rounded(get(s.b_u + k), d_u));
        put(s.d_r + k, rounded(get(s.b_r + k), d_r));
        put(s.d_z + k, rounded(get(s.b_z + k), d_z));
    }
}

void pull_back_block(const Model& m, Adjoint* adjoint, const TouchAdjoint& t, int first, Scratch* scratch,
                     ReceiverSums* sums) {
    Units s;
    s.count = t.count - first < block ? t.count - first : block;
    const auto unit = [&](int k) { return t.index != nullptr ? t.index[first + k] : first + k; };
    const double* record = t.record + first;
    const int64_t row = t.count;
    for (int k = 0; k < s.count; ++k) {
        const int i = unit(k);
        s.b_u[k] = m.b_u[i];
        s.b_r[k] = m.b_r[i];
        s.b_z[k] = m.b_z[i];
        s.before_u[k] = record[k];
        s.before_z[k] = record[k + 2 * row];
        s.d_r[k] = record[k + row];
        s.c[k] = record[k + 3 * row];
        s.span[k] = adjoint->time[i] - t.time;
        adjoint->time[i] = t.time;
        s.p_c[k] = adjoint->p_c[i];
        s.p_u[k] = adjoint->p_u[i];
        s.p_r[k] = adjoint->p_r[i];
        s.p_z[k] = adjoint->p_z[i];
    }
    if (t.gated)
        for (int k = 0; k < s.count; ++k) s.gate[k] = record[k + 4 * row];
    for (int k = s.count; k < (int)padded(s.count); ++k) {
        s.before_u[k] = s.d_r[k] = s.before_z[k] = s.b_u[k] = s.b_r[k] = s.b_z[k] = 0;
        s.c[k] = s.gate[k] = s.span[k] = 0;
        s.p_c[k] = s.p_u[k] = s.p_r[k] = s.p_z[k] = s.g_tau_s[k] = s.g_tau_m[k] = 0;
    }
    s.tau.load(m, unit, s.count, (int)padded(s.count));

    add_jump(t, first, s);
    const double shortest = time_to_rest(m.tau_s, 0, 0);
    Longs may_rest{};
    for (int k = 0; k < s.count; k += width) {
        put(s.active + k, get(s.span + k));
        may_rest |= get(s.span + k) > shortest;
    }
    if (any(may_rest))
        for (int k = 0; k < s.count; ++k)
            s.active[k] = smaller(s.span[k], time_to_rest(s.tau.one_s(m, k), s.d_u[k], s.d_z[k]));
    if (!any(may_rest) && single_panels(m, s.tau, s.d_u, s.d_z, s.active, s.count))
        pull_back_single(m, s);
    else
        pull_back_several(m, s, scratch);
    Doubles tau_s{}, tau_m{};
    for (int k = 0; k < s.count; k += width) {
        const Doubles span = get(s.span + k), p_r = get(s.p_r + k);
        const Doubles kept = exponential(max_of(span * -s.tau.rate_s(m, k), splat(-700.0))) * p_r;
        put(s.g_r + k, p_r - kept);
        put(s.p_r + k, kept);
        const Doubles by_tau_s = get(s.g_tau_s + k) + get(s.d_r + k) * span * kept;
        put(s.g_tau_s + k, by_tau_s);
        tau_s += by_tau_s;
        tau_m += get(s.g_tau_m + k);
    }
    if (m.shared_tau) {
        *adjoint->grad_tau_s += sum_of(tau_s) / (m.tau_s * m.tau_s);
        *adjoint->grad_tau_m += sum_of(tau_m) / m.tau_m;
    } else {
        for (int k = 0; k < s.count; ++k) {
            adjoint->grad_tau_s[unit(k)] += s.g_tau_s[k] / (s.tau.tau_s[k] * s.tau.tau_s[k]);
            adjoint->grad_tau_m[unit(k)] += s.g_tau_m[k] / s.tau.tau_m[k];
        }
    }

    if (t.w_u != nullptr) pull_back_jump(m, t, first, s, sums);
    if (t.gated)
        for (int k = 0; k < s.count; ++k)
            (t.pending_p_r != nullptr ? t.pending_p_r[unit(k)] : s.p_r[k]) += s.gate_share[k];
    for (int k = 0; k < s.count; ++k) {
        const int i = unit(k);
        adjoint->p_c[i] = s.p_c[k];
        adjoint->p_u[i] = s.p_u[k];
        adjoint->p_r[i] = s.p_r[k];
        adjoint->p_z[i] = s.p_z[k];
        adjoint->grad_b_u[i] += s.g_u[k];
        adjoint->grad_b_r[i] += s.g_r[k];
        adjoint->grad_b_z[i] += s.g_z[k];
    }
}

}  // namespace continuous
}  // namespace

egru::continuous::ReceiverSums continuous_pull_back(const egru::continuous::Model& m,
                                                    egru::continuous::Adjoint* adjoint,
                                                    const egru::continuous::TouchAdjoint& touch,
                                                    egru::continuous::Scratch* scratch) {
    if (m.linear) return continuous_pull_back_linear(m, adjoint, touch);
    egru::continuous::ReceiverSums sums{};
    for (int first = 0; first < touch.count; first += egru::continuous::block)
        continuous::pull_back_block(m, adjoint, touch, first, scratch, &sums);
    if (m.shared_tau) {
        sums.rate = (sums.u + sums.r) * m.rate_s;
        sums.rate_z = sums.z * m.rate_s;
    }
    return sums;
}

}  // namespace egru::EGRU_LEVEL
