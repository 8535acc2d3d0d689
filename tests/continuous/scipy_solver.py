"""The model solved by SciPy: DOP853 on the full state, restarted at every event."""

import numpy as np
from scipy.integrate import solve_ivp

from egru.continuous.problem import Problem

TIGHT = {"method": "DOP853", "rtol": 1e-13, "atol": 1e-14}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def vector_field(b: np.ndarray, tau_s: float, tau_m: float):
    """Return the right-hand side for the state ``a_u, a_r, a_z, c``, each with ``H`` entries."""
    H = b.shape[1]

    def field(t, state):
        a, c = state[: 3 * H].reshape(3, H), state[3 * H :]
        return np.concatenate([((b - a) / tau_s).ravel(), sigmoid(a[0]) * (np.tanh(a[2]) - c) / tau_m])

    return field


def simulate(problem: Problem, sample: int) -> tuple[list[float], list[int], np.ndarray]:
    """Return the event times, units and final ``c`` of one sample. Supports only the default options."""
    V, U, b = problem.V.numpy(), problem.U.numpy(), problem.b.numpy()
    theta, tau_s, tau_m = problem.theta.numpy(), float(problem.tau_s), float(problem.tau_m)
    H = len(theta)
    field = vector_field(b, tau_s, tau_m)
    crossings = []
    for n in range(H):

        def event(t, state, n=n):
            return state[3 * H + n] - theta[n]

        event.terminal, event.direction = True, 1.0  # pyright: ignore[reportFunctionMemberAccess]
        crossings.append(event)
    start, stop = problem.input_offsets[sample : sample + 2].tolist()
    stops = [(float(problem.input_times[k]), k) for k in range(start, stop)] + [(problem.horizon, -1)]
    state, t = np.concatenate([problem.a0[sample].numpy().ravel(), problem.c0[sample].numpy()]), 0.0
    times, units = [], []

    def advance(state, t, s):
        return state if s <= t else solve_ivp(field, (t, s), state, **TIGHT).y[:, -1]

    for stop_time, k in stops:
        while t < stop_time:
            solution = solve_ivp(field, (t, stop_time), state, events=crossings, max_step=0.1, **TIGHT)
            if solution.status != 1:
                state, t = advance(state, t, stop_time), stop_time
                break
            n = next(n for n in range(H) if len(solution.t_events[n]))
            s = float(solution.t_events[n][0])
            for _ in range(3):  # the interpolant is less accurate than the steps, so refine by Newton on the solution
                at = advance(state, t, s)
                s -= (at[3 * H + n] - theta[n]) / field(s, at)[3 * H + n]
            state, t = advance(state, t, s), s
            r = sigmoid(state[H + n])
            for gate, rho in enumerate((1.0, 1.0, r)):
                jump = V[gate, :, n] * rho * theta[n]
                jump[n] = 0
                state[gate * H : (gate + 1) * H] += jump
            state[3 * H + n] = 0
            times.append(s)
            units.append(n)
        if k >= 0:
            channel, value = int(problem.input_channels[k]), float(problem.input_values[k])
            state[: 3 * H] += (U[:, :, channel] * value).ravel()
    return times, units, state[3 * H :]
