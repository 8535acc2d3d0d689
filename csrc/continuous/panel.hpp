// One panel of the quadrature, vectorised over panels: each lane is a panel of some unit.
//
// Over a panel, c at the end is an affine function of c at the start. The adjoint is bilinear in c at the start and p_c
// at the end. So all panels are computed independently and then combined in order.
#pragma once

#include "continuous/vector_math.hpp"
#include "continuous/kernels.hpp"

namespace egru::EGRU_LEVEL {
namespace {
namespace continuous {

using egru::continuous::block;
using egru::continuous::max_nodes;
using egru::continuous::Model;
using egru::continuous::Scratch;

// A panel of length h. d_x is a_x - b_x at its start. `decays` is exp(-t / tau_s) at the nodes and the end if it is the
// same in all lanes, else null. rate_s and rate_m are 1 / tau_s and 1 / tau_m.
struct Panel {
    Doubles d_u, b_u, d_z, b_z, h, rate_s, rate_m;
    const double* decays;
};

// The time constants of a block of units. The arrays are used only if units have different ones.
struct Constants {
    alignas(64) double tau_s[block], tau_m[block];

    template <class Index>
    void load(const Model& m, Index unit, int count, int padded_count) {
        if (m.shared_tau) return;
        for (int k = 0; k < count; ++k) {
            tau_s[k] = m.tau_s_of[unit(k)];
            tau_m[k] = m.tau_m_of[unit(k)];
        }
        for (int k = count; k < padded_count; ++k) tau_s[k] = tau_m[k] = 1;
    }
    Doubles s(const Model& m, int k) const { return m.shared_tau ? splat(m.tau_s) : get(tau_s + k); }
    Doubles m(const Model& m, int k) const { return m.shared_tau ? splat(m.tau_m) : get(tau_m + k); }
    Doubles rate_s(const Model& m, int k) const { return m.shared_tau ? splat(m.rate_s) : 1.0 / get(tau_s + k); }
    Doubles rate_m(const Model& m, int k) const { return m.shared_tau ? splat(m.rate_m) : 1.0 / get(tau_m + k); }
    double one_s(const Model& m, int k) const { return m.shared_tau ? m.tau_s : tau_s[k]; }
    double one_m(const Model& m, int k) const { return m.shared_tau ? m.tau_m : tau_m[k]; }
};

// exp(-t / tau_s) at node i, or at the end of the panel for i = nodes.
inline Doubles decay_at(const Model& m, const Panel& p, Doubles rate, int i) {
    return p.decays != nullptr ? splat(p.decays[i]) : exponential(rate * m.points[i]);
}

// Computes the decays of a block if all its units have the same span and time constants, else returns null.
inline const double* common_decays(const Model& m, const double* span, int count, double* decays) {
    if (!m.shared_tau) return nullptr;
    for (int k = 1; k < count; ++k)
        if (span[k] != span[0]) return nullptr;
    for (int i = 0; i < m.stride; i += width) put(decays + i, exponential(get(m.points + i) * (-span[0] / m.tau_s)));
    return decays;
}

// c at the end of the panel is scale * c + shift.
struct Affine {
    Doubles scale, shift;
};

template <int N>
inline Affine flow(const Model& m, const Panel& p) {
    const int n = N != 0 ? N : m.nodes;
    constexpr int room = N != 0 ? N : max_nodes;
    Doubles u[room], f[room];
    const Doubles decay = p.h * -p.rate_s, pace = p.h * p.rate_m;
#pragma GCC unroll 2
    for (int i = 0; i < n; ++i) {
        const Doubles q = decay_at(m, p, decay, i), far = p.d_z * q;
        const Gates g = gates(p.b_u + p.d_u * q, p.b_z + far);
        u[i] = g.u;
        f[i] = g.dz * far;
    }
    Doubles sum{}, end{};
#pragma GCC unroll 2
    for (int i = 0; i < n; ++i) {
        Doubles e = m.A[i * n] * u[0];
        for (int j = 1; j < n; ++j) e += m.A[i * n + j] * u[j];
        sum += m.w[i] * exponential(pace * e) * f[i];
        end += m.w[i] * u[i];
    }
    Doubles z_start, z_end;
    tanh_of(p.b_z + p.d_z, p.b_z + p.d_z * decay_at(m, p, decay, n), &z_start, &z_end);
    const Doubles scale = exponential(-pace * end);
    return {scale, z_end - scale * (z_start + decay * sum)};
}

// What the adjoint needs of a panel. With c at the start and a = scale * p_c(end), which is p_c(start):
//   integrals of gamma_u, q gamma_u, q t gamma_u   -a (c x[0..2] + y[0..2])
//   integrals of gamma_z, q gamma_z, q t gamma_z    a v[0..2]
//   integral of p_c dc/dt                          -a (c rate + lag)
struct Bilinear {
    Doubles scale, shift, q;
    Doubles x[3], y[3], v[3];
    Doubles rate, lag;
};

template <int N>
inline Bilinear bilinear(const Model& m, const Panel& p) {
    const int n = N != 0 ? N : m.nodes;
    constexpr int room = N != 0 ? N : max_nodes;
    Doubles u[room], q[room], f[room], mu[room], nu[room];
    const Doubles decay = p.h * -p.rate_s, pace = p.h * p.rate_m;
#pragma GCC unroll 2
    for (int i = 0; i < n; ++i) {
        q[i] = decay_at(m, p, decay, i);
        const Doubles far = p.d_z * q[i];
        const Gates g = gates(p.b_u + p.d_u * q[i], p.b_z + far);
        u[i] = g.u;
        f[i] = g.dz * far;
        mu[i] = m.w[i] * g.du;
        nu[i] = m.w[i] * g.u * g.dz;
    }
    Bilinear r;
    for (int k = 0; k < 3; ++k) r.x[k] = r.y[k] = r.v[k] = Doubles{};
#pragma GCC unroll 2
    for (int i = 0; i < n; ++i) {
        Doubles e = m.A[i * n] * u[0];
        for (int j = 1; j < n; ++j) e += m.A[i * n + j] * u[j];
        const Doubles grown = exponential(pace * e);
        f[i] *= grown;
        const Doubles v = nu[i] * grown, vq = v * q[i];
        r.v[0] += v;
        r.v[1] += vq;
        r.v[2] += vq * m.x[i];
    }
    r.q = decay_at(m, p, decay, n);
    Doubles z_start, z_end, sum{}, end{}, lag{};
    tanh_of(p.b_z + p.d_z, p.b_z + p.d_z * r.q, &z_start, &z_end);
#pragma GCC unroll 2
    for (int i = 0; i < n; ++i) {
        Doubles k = m.A[i * n] * f[0];
        for (int j = 1; j < n; ++j) k += m.A[i * n + j] * f[j];
        k = -(z_start + decay * k);
        const Doubles x = mu[i], xq = x * q[i], xt = xq * m.x[i], wu = m.w[i] * u[i];
        r.x[0] += x;
        r.x[1] += xq;
        r.x[2] += xt;
        r.y[0] += x * k;
        r.y[1] += xq * k;
        r.y[2] += xt * k;
        sum += m.w[i] * f[i];
        end += wu;
        lag += wu * k;
    }
    r.rate = pace * end;
    r.lag = pace * lag;
    r.scale = exponential(-r.rate);
    r.shift = z_end - r.scale * (z_start + decay * sum);
    const Doubles factor[3] = {pace, pace, pace * p.h};
    for (int k = 0; k < 3; ++k) {
        r.x[k] *= factor[k];
        r.y[k] *= factor[k];
        r.v[k] *= factor[k];
    }
    return r;
}

template <int N>
struct Kind {
    static constexpr int nodes = N;
};

// Calls `work` with the number of nodes as a compile-time constant, or 0 if there is no special version.
template <class Work>
[[gnu::always_inline]] inline void with_nodes(const Model& m, Work work) {
    if (m.nodes == 6) return work(Kind<6>{});
    if (m.nodes == 4) return work(Kind<4>{});
    work(Kind<0>{});
}

}  // namespace continuous
}  // namespace
}  // namespace egru::EGRU_LEVEL
