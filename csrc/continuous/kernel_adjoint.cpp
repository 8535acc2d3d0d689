// The adjoint of a touch: jump back, and before it the pullback over the stretch that began there.
#include "continuous/kernel_entries.hpp"
#include "continuous/panel.hpp"

extern "C" {
double exp(double);
double expm1(double);
double tanh(double);
}

namespace egru::EGRU_LEVEL {
namespace {
namespace continuous {

using namespace egru::continuous;

struct Units {
    alignas(64) double d_u[block], d_r[block], d_z[block], b_u[block], b_r[block], b_z[block];
    alignas(64) double c[block], gate[block], span[block];
    alignas(64) double run[block];  // the part of the span before rest
    alignas(64) double p_c[block], p_u[block], p_r[block], p_z[block];  // adjoint, at the end and then at the start
    alignas(64) double g_u[block], g_r[block], g_z[block];              // gradients of the biases
    alignas(64) double share[block];                                    // of p_r, by way of the gates
    int count;
};

// What one panel does to the adjoint of c, u and z of a unit, or of a vector of units.
template <class T>
struct Slice {
    T scale, q, x[3], y[3], v[3], rate, lag;  // see Bilinear
    T d_u, d_z, h, c;                         // at the start of the panel
};

template <class T>
struct Gathered {
    T p_c, p_u, p_z, g_u, g_z, tau_s, tau_m;
};

template <class T>
[[gnu::always_inline]] inline void pull_panel(const Slice<T>& s, Gathered<T>& a) {
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

// Every unit one panel: all in vectors.
inline void pull_single(const Model& m, Units& s, Doubles* tau_s, Doubles* tau_m) {
    alignas(64) double memory[max_points];
    const double* decays = common_decays(m, s.run, s.count, memory);
    with_nodes(m, [&](auto n) {
        for (int k = 0; k < s.count; k += width) {
            const Panel panel{get(s.d_u + k), get(s.b_u + k), get(s.d_z + k), get(s.b_z + k), get(s.run + k), decays};
            const Bilinear b = bilinear<n.nodes>(m, panel);
            const Slice<Doubles> slice{b.scale, b.q, {b.x[0], b.x[1], b.x[2]}, {b.y[0], b.y[1], b.y[2]},
                                       {b.v[0], b.v[1], b.v[2]}, b.rate, b.lag, panel.d_u, panel.d_z, panel.h,
                                       get(s.c + k)};
            Gathered<Doubles> a{get(s.p_c + k), get(s.p_u + k), get(s.p_z + k), Doubles{}, Doubles{}, Doubles{}, Doubles{}};
            pull_panel(slice, a);
            put(s.p_c + k, a.p_c);
            put(s.p_u + k, a.p_u);
            put(s.p_z + k, a.p_z);
            put(s.g_u + k, a.g_u);
            put(s.g_z + k, a.g_z);
            *tau_s += a.tau_s;
            *tau_m += a.tau_m;
        }
    });
}

// Over `quiet`, at rest since before: u and z stand still, so that all integrals have closed forms. `c` is at its start.
inline void pull_rest(const Model& m, double quiet, double b_u, double b_z, double c, Gathered<double>* a) {
    const double u = 1 / (1 + exp(-b_u)), z = tanh(b_z), k = u / m.tau_m, s = 1 / m.tau_s;
    const double kept = exp(-k * quiet), q = exp(-s * quiet);
    const double held = (z - c) * kept * a->p_c;  // (z - c) p_c stands still
    const double u_rate = u * (1 - u) / m.tau_m * held, z_rate = k * (1 - z * z) * a->p_c;
    const double near = (s - k) * quiet;  // where the two rates are all but equal, their difference has no digits
    const double late = near == 0                   ? kept * quiet
                        : near < 1 && near > -1.0 ? kept * quiet * -expm1(-near) / near
                                                    : (kept - q) / (s - k);
    const double u_late = u_rate * (1 - q) * m.tau_s, z_late = z_rate * late;
    a->g_u += u_rate * quiet - u_late + (1 - q) * a->p_u;
    a->g_z += z_rate * (1 - kept) / k - z_late + (1 - q) * a->p_z;
    a->tau_m -= held * k * quiet;
    a->p_c *= kept;
    a->p_u = q * a->p_u + u_late;
    a->p_z = q * a->p_z + z_late;
}

constexpr int slice_rows = 17;  // of a Slice, and the shift of c

inline void pull_several(const Model& m, Units& s, Scratch* scratch, int64_t items, const int32_t* panels, double* tau_s,
                         double* tau_m) {
    const Expanded e = expand(scratch, slice_rows, items, s.d_u, s.b_u, s.d_z, s.b_z, s.run, panels, s.count);
    double* rows = e.from + e.stride;
    with_nodes(m, [&](auto n) {
        for (int64_t i = 0; i < items; i += width) {
            const Panel panel = panel_of(m, e, i);
            const Bilinear b = bilinear<n.nodes>(m, panel);
            const Doubles outputs[slice_rows] = {b.scale, b.q,    b.x[0], b.x[1], b.x[2], b.y[0],    b.y[1],    b.y[2],
                                                 b.v[0],  b.v[1], b.v[2], b.rate, b.lag,  panel.d_u, panel.d_z, b.shift,
                                                 Doubles{}};
            for (int k = 0; k < slice_rows; ++k) put(rows + k * e.stride + i, outputs[k]);
        }
    });
    double* c_start = rows + (slice_rows - 1) * e.stride;
    const double* shift = rows + (slice_rows - 2) * e.stride;
    int64_t i = 0;
    for (int k = 0; k < s.count; ++k) {
        double c = s.c[k];
        const int64_t first = i;
        for (int32_t p = 0; p < panels[k]; ++p, ++i) {
            c_start[i] = c;
            c = rows[i] * c + shift[i];
        }
        Gathered<double> a{s.p_c[k], s.p_u[k], s.p_z[k], 0, 0, 0, 0};
        if (s.span[k] > s.run[k]) pull_rest(m, s.span[k] - s.run[k], s.b_u[k], s.b_z[k], c, &a);
        for (int64_t j = i - 1; j >= first; --j) {
            const auto at = [&](int row) { return rows[row * e.stride + j]; };
            pull_panel(Slice<double>{at(0), at(1), {at(2), at(3), at(4)}, {at(5), at(6), at(7)}, {at(8), at(9), at(10)},
                                     at(11), at(12), at(13), at(14), e.h[j], c_start[j]},
                       a);
        }
        s.p_c[k] = a.p_c;
        s.p_u[k] = a.p_u;
        s.p_z[k] = a.p_z;
        s.g_u[k] = a.g_u;
        s.g_z[k] = a.g_z;
        *tau_s += a.tau_s;
        *tau_m += a.tau_m;
    }
}

// The jump: sums over the receivers, gradients of the weights.
inline void jump(const Model& m, const Pull& t, int first, Units& s, Sums* sums) {
    Doubles sum_u{}, sum_r{}, sum_z{}, rate{}, slope{};
    const bool fires = t.emitter >= first && t.emitter < first + s.count;
    const double p_emitter = fires ? s.p_c[t.emitter - first] : 0;
    if (fires) s.p_c[t.emitter - first] = 0;
    for (int k = 0; k < s.count; k += width) {
        const int here = s.count - k;
        const Doubles w_u = load_part<double>(t.w_u + first + k, here), w_r = load_part<double>(t.w_r + first + k, here);
        const Doubles w_z = load_part<double>(t.w_z + first + k, here);
        const Doubles p_u = get(s.p_u + k), p_r = get(s.p_r + k), p_z = get(s.p_z + k);
        Doubles moved = t.scale_z * w_z, carried = t.scale_z * p_z, push = w_z * p_z;
        sum_u += w_u * p_u;
        sum_r += w_r * p_r;
        if (t.gated) {
            const Doubles gate = get(s.gate + k), r = sigmoid_of(gate), dr = r * (1.0 - r);
            moved *= r;
            carried *= r;
            rate += push * dr * (get(s.b_r + k) - gate) * (1.0 / m.tau_s);
            put(s.share + k, t.scale_z * push * dr);
            push *= r;
        }
        sum_z += push;
        const auto add = [&](double* gradient, Doubles v) {
            double* at = gradient + first + k;
            store_part<double>(at, load_part<double>(at, here) + v, here);
        };
        add(t.g_u, t.scale * p_u);
        add(t.g_r, t.scale * p_r);
        add(t.g_z, carried);
        const Doubles a_u = get(s.b_u + k) + get(s.d_u + k), a_z = get(s.b_z + k) + get(s.d_z + k), c = get(s.c + k);
        const Gates after = gates(a_u, a_z), before = gates(a_u - t.scale * w_u, a_z - moved);
        // u (z - c) before minus after
        slope += get(s.p_c + k) * ((before.u - after.u) * (before.z - c) + after.u * (before.z - after.z));
    }
    if (fires) s.p_c[t.emitter - first] = p_emitter;
    sums->u += total(sum_u);
    sums->r += total(sum_r);
    sums->z += total(sum_z);
    sums->z_rate += total(rate);
    if (t.scale != 0) sums->slope += total(slope) / m.tau_m;  // what jumps by 0 shall not jump by rounding
}

void pull_block(const Model& m, Adjoint* adjoint, const Pull& t, int first, Scratch* scratch, Sums* sums) {
    Units s;
    s.count = t.count - first < block ? t.count - first : block;
    const auto unit = [&](int k) { return t.index != nullptr ? t.index[first + k] : first + k; };
    const double* tape = t.tape + first;
    const int64_t row = t.count;
    for (int k = 0; k < s.count; ++k) {
        const int i = unit(k);
        s.b_u[k] = m.b_u[i];
        s.b_r[k] = m.b_r[i];
        s.b_z[k] = m.b_z[i];
        s.d_u[k] = tape[k] - s.b_u[k];
        s.d_r[k] = tape[k + row] - s.b_r[k];
        s.d_z[k] = tape[k + 2 * row] - s.b_z[k];
        s.c[k] = tape[k + 3 * row];
        s.span[k] = adjoint->back[i] - t.time;
        adjoint->back[i] = t.time;
        s.p_c[k] = adjoint->c[i];
        s.p_u[k] = adjoint->u[i];
        s.p_r[k] = adjoint->r[i];
        s.p_z[k] = adjoint->z[i];
    }
    if (t.gated)
        for (int k = 0; k < s.count; ++k) s.gate[k] = tape[k + 4 * row];
    for (int k = s.count; k < (int)padded(s.count); ++k) {
        s.d_u[k] = s.d_r[k] = s.d_z[k] = s.b_u[k] = s.b_r[k] = s.b_z[k] = s.c[k] = s.gate[k] = s.span[k] = 0;
        s.p_c[k] = s.p_u[k] = s.p_r[k] = s.p_z[k] = 0;
    }

    Longs beyond{};
    for (int k = 0; k < s.count; k += width) {
        put(s.run + k, smaller(get(s.span + k), all(rest * m.tau_s)));
        beyond |= get(s.run + k) < get(s.span + k);
    }
    int32_t panels[block];
    const int64_t items = count_panels(m, s.d_u, s.d_z, s.run, s.count, panels);
    double tau_s = 0, tau_m = 0;
    Doubles tau_ss{}, tau_ms{};
    if (items == s.count && !any(beyond))
        pull_single(m, s, &tau_ss, &tau_ms);
    else
        pull_several(m, s, scratch, items, panels, &tau_s, &tau_m);
    for (int k = 0; k < s.count; k += width) {
        const Doubles span = get(s.span + k), p_r = get(s.p_r + k);
        const Doubles kept = exponential(larger(span * (-1.0 / m.tau_s), all(-700.0))) * p_r;
        put(s.g_r + k, p_r - kept);
        put(s.p_r + k, kept);
        tau_ss += get(s.d_r + k) * span * kept;
    }
    adjoint->tau_s += (tau_s + total(tau_ss)) / (m.tau_s * m.tau_s);
    adjoint->tau_m += (tau_m + total(tau_ms)) / m.tau_m;

    if (t.w_u != nullptr) jump(m, t, first, s, sums);
    if (t.gated)
        for (int k = 0; k < s.count; ++k) (t.waiting != nullptr ? t.waiting[unit(k)] : s.p_r[k]) += s.share[k];
    for (int k = 0; k < s.count; ++k) {
        const int i = unit(k);
        adjoint->c[i] = s.p_c[k];
        adjoint->u[i] = s.p_u[k];
        adjoint->r[i] = s.p_r[k];
        adjoint->z[i] = s.p_z[k];
        adjoint->b_u[i] += s.g_u[k];
        adjoint->b_r[i] += s.g_r[k];
        adjoint->b_z[i] += s.g_z[k];
    }
}

}  // namespace continuous
}  // namespace

egru::continuous::Sums continuous_pull(const egru::continuous::Model& m, egru::continuous::Adjoint* adjoint,
                                       const egru::continuous::Pull& pull, egru::continuous::Scratch* scratch) {
    egru::continuous::Sums sums{};
    for (int first = 0; first < pull.count; first += egru::continuous::block)
        continuous::pull_block(m, adjoint, pull, first, scratch, &sums);
    return sums;
}

}  // namespace egru::EGRU_LEVEL
