"""F: the adjoint in the paper's own scaling, integrated by Runge and Kutta's method, gives the same gradient.

With ``lambda_c = -p_c / tau_m`` and ``lambda_a = -p_a / tau_s``, backward in time::

    tau_m dlambda_c/dt = l_c + u lambda_c          tau_s dlambda_a/dt = lambda_a - (dF/da) lambda_c,   F = u (z - c)

with jumps at events, and ``dL/dV = -tau_s sum of rho theta lambda_a``, ``dL/dU = -tau_s sum of x lambda_a``,
``dL/db = -integral of lambda_a``.
"""

import numpy as np
import pytest

from egru.continuous import engines
from egru.continuous.flow import Clock, flow, relax, sigmoid, slope
from egru.continuous.problem import Problem
from egru.continuous.rule import gauss_legendre
from tests.continuous.nets import cotangents, network

CLOCK_NODES = 12


def lambda_form(problem: Problem, events, weights) -> dict[str, np.ndarray]:
    """Of one sample, with the reference engine's record of what happened."""
    V, U, b = problem.V.numpy() * (1 - np.eye(len(problem.theta))), problem.U.numpy(), problem.b.numpy()
    theta, tau_s, tau_m = problem.theta.numpy(), float(problem.tau_s), float(problem.tau_m)
    clock = Clock(tau_s, tau_m, gauss_legendre(CLOCK_NODES), 1.0)
    H = len(theta)
    lam_c, lam_a = np.zeros(H), np.zeros((3, H))
    gV, gU, gb = np.zeros_like(V), np.zeros_like(U), np.zeros_like(b)

    def states(a, c, times):
        """The forward trajectory at several times, all units."""
        k = len(times)
        wide_a, wide_b = np.repeat(a[:, None], k, 1).reshape(3, -1), np.repeat(b[:, None], k, 1).reshape(3, -1)
        when = np.repeat(times, H)
        late = relax(wide_a, wide_b, when, clock)
        return late.reshape(3, k, H), flow(wide_a, wide_b, np.tile(c, k), when, clock).reshape(k, H)

    def field(lam, a, c):
        u, z = sigmoid(a[0]), np.tanh(a[2])
        F_a = np.stack([u * (1 - u) * (z - c), np.zeros(H), u * (1 - z * z)])
        d_c = u * lam[3] / tau_m
        d_a = (lam[:3] - F_a * lam[3]) / tau_s
        return np.concatenate([d_a, d_c[None], -lam[:3]])  # the last rows gather the integral of lambda_a

    steps, event = events.tape[0], int(events.offsets[-1])
    for k in reversed(range(len(steps))):
        step = steps[k]
        if step.kind == "readout":
            lam_c = lam_c - weights.c_read[0, step.index].numpy() / tau_m
        elif step.kind == "input":
            i, x = int(problem.input_channels[step.index]), float(problem.input_values[step.index])
            gU[:, :, i] -= tau_s * x * lam_a
        elif step.kind == "internal":
            n, event = step.index, event - 1
            r = sigmoid(step.a_minus[1, n])
            rdot = r * (1 - r) * (b[1, n] - step.a_minus[1, n]) / tau_s
            rho, rhodot = np.array([1.0, 1.0, r]), np.array([0.0, 0.0, rdot])
            gV[:, :, n] -= tau_s * rho[:, None] * theta[n] * lam_a * (np.arange(H) != n)
            minus, plus = slope(step.a_minus, step.c_minus, clock), slope(step.a_plus, step.c_plus, clock)
            others = np.arange(H) != n
            sums = (V[:, :, n] * lam_a).sum(1)
            right = (
                tau_m * plus[n] * lam_c[n]
                - tau_m * (lam_c * (minus - plus))[others].sum()
                - tau_s * theta[n] * ((rhodot + rho / tau_s) * sums).sum()
                + float(weights.times[event])
            )
            lam_a[1, n] += theta[n] * r * (1 - r) * sums[2]
            lam_c[n] = right / (tau_m * minus[n])
        start = steps[k - 1] if k else None
        a, c = (start.a_plus, start.c_plus) if start else (problem.a0[0].numpy(), problem.c0[0].numpy())
        dt = step.time - (start.time if start else 0.0)
        if dt <= 0:
            continue
        count = int(np.ceil(dt / 2e-3))
        h = dt / count
        at, ct = states(a, c, np.linspace(0, dt, 2 * count + 1))
        lam = np.concatenate([lam_a, lam_c[None], np.zeros((3, H))])
        for j in reversed(range(count)):
            first, middle, last = ((at[:, i], ct[i]) for i in (2 * j + 2, 2 * j + 1, 2 * j))
            k1 = field(lam, *first)
            k2 = field(lam - h / 2 * k1, *middle)
            k3 = field(lam - h / 2 * k2, *middle)
            k4 = field(lam - h * k3, *last)
            lam = lam - h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        lam_a, lam_c = lam[:3], lam[3]
        gb -= lam[4:]
    return {"V": gV, "U": gU, "b": gb}


@pytest.mark.parametrize("seed", [30, 31])
def test_paper_scaling_gives_the_same_gradient(seed):
    problem = network(seed, batch=1, hidden=4, horizon=4.0, inputs=5, drive=0.8)
    engine = engines.get("reference")
    events = engine.forward(problem)
    assert len(events.times) > 3
    weights = cotangents(events)
    weights.o_read.zero_()
    weights.amplitudes.zero_()
    weights.a_last = None
    found = engine.backward(problem, events, weights)
    for name, value in lambda_form(problem, events, weights).items():
        exact = getattr(found, name).numpy()
        assert abs(value - exact).max() < 1e-10 * max(1, abs(exact).max()), name
