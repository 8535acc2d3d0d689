"""Other solvers on the continuous-time model, for benchmarks/continuous.py. Solvers that are not installed are skipped.

Each solver runs one sample of a :class:`~egru.continuous.problem.Problem` and returns the event times in order. With
``gradient=True`` it also returns the gradient of their sum with respect to ``V``. The comparison uses the options
of eventax: receiver-side reset gates (also for inputs, so ``U_z`` must be zero), unit amplitudes, self connections.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egru.continuous.options import Options
from egru.continuous.problem import Problem

OPTIONS = Options(self_connections=True, reset_side="post", amplitude="one")
"""Options of the model that all solvers share."""


@dataclasses.dataclass
class Rival:
    """A solver. ``run(gradient)`` returns the event times ``(N,)`` and the gradient of their sum for ``V``, or None."""

    name: str
    run: Callable[[bool], tuple[np.ndarray, np.ndarray | None]]


def missing() -> list[str]:
    """Return the names of solvers that are not installed."""
    return [name for name in ("torchdiffeq", "eventax") if importlib.util.find_spec(name) is None]


def all_rivals(problem: Problem, events: int) -> list[Rival]:
    """Return all installed solvers at several accuracies. eventax requires the number of events, ``events``."""
    assert problem.options.self_connections
    assert (problem.options.reset_side, problem.options.amplitude) == ("post", "one")
    assert not problem.U[2].any()
    absent = missing()
    rivals = []
    if "torchdiffeq" not in absent:
        rivals += [torchdiffeq(problem, tolerance) for tolerance in (1e-6, 1e-9, 1e-12)]
    if "eventax" not in absent:
        import diffrax

        settings = [("Euler", 0.01, 1e-2), ("Tsit5", 0.1, 1e-10), ("Tsit5", 0.02, 1e-10)]
        rivals += [eventax(problem, events, getattr(diffrax, s)(), step, tol, s) for s, step, tol in settings]
    return rivals


def torchdiffeq(problem: Problem, tolerance: float) -> Rival:
    """Return torchdiffeq's ``odeint_event``, restarted with the whole state after every event."""
    from torchdiffeq import odeint, odeint_event  # pyright: ignore[reportMissingImports]

    b, theta, tau_s, tau_m = problem.b, problem.theta, problem.tau_s, problem.tau_m
    inputs = list(zip(problem.input_times.tolist(), problem.input_channels.tolist(), strict=True))

    def derivative(_: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, c = state
        return (b - a) / tau_s, torch.sigmoid(a[0]) * (torch.tanh(a[2]) - c) / tau_m

    def run(gradient: bool) -> tuple[np.ndarray, np.ndarray | None]:
        V = problem.V.clone().requires_grad_(gradient)
        with torch.set_grad_enabled(gradient):
            times = simulate(V)
            if not gradient:
                return torch.stack(times).numpy(), None
            total = torch.stack(times).sum()
            (by_V,) = torch.autograd.grad(total, V)
        return torch.stack(times).detach().numpy(), by_V.numpy()

    def simulate(V: Tensor) -> list[Tensor]:
        a, c, t = problem.a0[0], problem.c0[0], torch.zeros((), dtype=V.dtype)
        times: list[Tensor] = []
        upcoming = [*inputs, (problem.horizon, -1)]
        while upcoming:
            until, channel = upcoming[0]

            def margin(at: Tensor, state: tuple[Tensor, Tensor], until: float = until) -> Tensor:
                return torch.minimum((theta - state[1]).min(), until - at)

            if t.item() < until:
                t, states = odeint_event(
                    derivative, (a, c), t, event_fn=margin, odeint_interface=odeint, rtol=tolerance, atol=tolerance
                )
                a, c = (x[-1] for x in states)
                gap = theta - c
                if float(gap.detach().min()) < until - t.item():
                    n = int(gap.detach().argmin())
                    times.append(t)
                    jump = V[:, :, n] * torch.stack([torch.ones_like(c), torch.ones_like(c), torch.sigmoid(a[1])])
                    a, c = a + jump, torch.where(torch.arange(len(c)) == n, 0.0, c)
                    continue
            upcoming.pop(0)
            t = torch.tensor(until, dtype=V.dtype)
            if channel >= 0:
                a = a + problem.U[:, :, channel]
        return times

    return Rival(f"torchdiffeq dopri5 {tolerance:g}", run)


def eventax(problem: Problem, events: int, solver: Any, step: float, tolerance: float, name: str) -> Rival:
    """Return eventax, compiled by JAX."""
    import equinox
    import jax
    import optimistix
    from eventax.evnn import EvNN  # pyright: ignore[reportMissingImports]
    from eventax.neuron_models import EGRU  # pyright: ignore[reportMissingImports]

    jax.config.update("jax_enable_x64", True)
    numpy = jax.numpy
    H, D = problem.U.shape[1:]
    network = EvNN(
        EGRU, H, problem.horizon, D, key=jax.random.PRNGKey(0), wmask=numpy.ones((H + D, H)),
        max_event_steps=events + len(problem.input_times) + 8, solver_stepsize=step, solver=solver,
        root_finder=optimistix.Newton(tolerance, tolerance, optimistix.rms_norm), dtype=numpy.float64,
        tsyn=float(problem.tau_s), tmem=float(problem.tau_m), thresh=numpy.asarray(problem.theta.numpy()),
    )  # fmt: skip
    weights = [numpy.asarray(torch.cat([problem.V[g].T, problem.U[g].T]).numpy()) for g in range(3)]
    biases = [numpy.asarray(problem.b[g].numpy()) for g in range(3)]

    def parameters(net: Any) -> tuple[Any, ...]:
        m = net.neuron_model
        return m.W_u, m.W_r, m.W_z, m.b_u, m.b_r, m.b_z

    network = equinox.tree_at(parameters, network, (*weights, *biases))
    per_channel = [problem.input_times[problem.input_channels == i].numpy() for i in range(D)]
    inputs = np.full((D, max(map(len, per_channel))), np.inf)
    for row, times in zip(inputs, per_channel, strict=True):
        row[: len(times)] = times
    inputs = numpy.asarray(inputs)

    def spikes(net: Any) -> Any:
        return net.spikes_until_t(inputs, problem.horizon, events + 1)

    forward = equinox.filter_jit(spikes)

    @equinox.filter_jit
    def backward(net: Any) -> Any:
        def total(net: Any) -> Any:
            spike_times = spikes(net)
            return numpy.where(numpy.isfinite(spike_times), spike_times, 0).sum(), spike_times

        return equinox.filter_value_and_grad(total, has_aux=True)(net)

    def run(gradient: bool) -> tuple[np.ndarray, np.ndarray | None]:
        if not gradient:
            spike_times, by_V = np.asarray(forward(network)), None
        else:
            (_, spike_times), by = backward(network)
            by_V = np.stack([np.asarray(w)[:H].T for w in parameters(by)[:3]])
            spike_times = np.asarray(spike_times)
        return np.sort(spike_times[np.isfinite(spike_times)]), by_V

    return Rival(f"eventax {name} {step:g}, root {tolerance:g}", run)
