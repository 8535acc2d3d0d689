"""Small random networks for the tests, and helpers to run an engine on them and compare gradients."""

import dataclasses

import torch
from torch import Tensor

from egru.continuous.options import Options
from egru.continuous.problem import DIFFERENTIABLE, Cotangents, Engine, Events, Gradients, Problem, RunningLoss

EXACT = Options(nodes=12, panel=1.0, grazing_floor=0.0)


def network(
    seed: int,
    options: Options = EXACT,
    *,
    batch: int = 2,
    hidden: int = 5,
    inputs: int = 9,
    horizon: float = 12.0,
    drive: float = 0.0,
) -> Problem:
    """Return a problem with three channels and random parameters, inputs and readouts. More ``drive``, more events."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=g, dtype=torch.float64)

    theta = uniform(0.15, 0.6, hidden)
    times = uniform(0.0, 0.9 * horizon, batch, inputs).sort(1).values
    return Problem(
        V=normal(3, hidden, hidden) * 2.0 / hidden**0.5,
        U=normal(3, hidden, 3),
        b=normal(3, hidden) * 0.5 + torch.tensor([[0.5], [0.0], [0.6 + drive]]),
        theta=theta,
        tau_s=uniform(0.5, 2.0),
        tau_m=uniform(0.5, 2.0),
        tau_o=uniform(0.5, 2.0),
        a0=normal(batch, 3, hidden),
        c0=theta - uniform(0.05, 1.0, batch, hidden),
        input_times=times.flatten(),
        input_channels=torch.randint(3, (batch * inputs,), generator=g),
        input_values=normal(batch * inputs),
        input_offsets=torch.arange(batch + 1) * inputs,
        readout_times=torch.cat([uniform(0.0, horizon, 2).sort().values, torch.tensor([horizon])]),
        horizon=horizon,
        options=options,
    )


def density(c: Tensor, t: Tensor, sample: Tensor) -> Tensor:
    """A running loss that couples units and depends on time and sample."""
    return (c.sin().sum(-1) ** 2 + c[:, 0] * torch.cos(t)) * (1 + 0.5 * sample) / 4


def cotangents(events: Events, seed: int = 3, *, integral: bool = True, only: str | None = None) -> Cotangents:
    """Return random cotangents of every output, or of one output only."""
    g = torch.Generator().manual_seed(seed)
    outputs = outputs_of(events)
    weights = {k: torch.randn(v.shape, generator=g, dtype=torch.float64).to(v) for k, v in outputs.items()}
    if only is not None:
        weights = {k: v if k == only else torch.zeros_like(v) for k, v in weights.items()}
    if not integral:
        weights.pop("integral", None)
    return Cotangents(**weights)


def outputs_of(events: Events) -> dict[str, Tensor]:
    outputs = {"times": events.times, "amplitudes": torch.zeros_like(events.times), "c_read": events.c_read}
    outputs |= {"o_read": events.o_read, "a_last": events.a_last}
    if events.integral is not None:
        outputs["integral"] = events.integral
    return outputs


def amplitudes(problem: Problem, events: Events) -> Tensor:
    return problem.theta[events.units] if problem.options.amplitude == "theta" else torch.ones_like(events.times)


def loss(problem: Problem, events: Events, weights: Cotangents) -> float:
    """Return the scalar loss whose derivatives by the outputs are ``weights``."""
    total = (weights.times * events.times).sum() + (weights.amplitudes * amplitudes(problem, events)).sum()
    total = total + (weights.c_read * events.c_read).sum() + (weights.o_read * events.o_read).sum()
    if weights.a_last is not None:
        total = total + (weights.a_last * events.a_last).sum()
    if weights.integral is not None and events.integral is not None:
        total = total + (weights.integral * events.integral).sum()
    return float(total)


def run(engine: Engine, problem: Problem, running_loss: RunningLoss | None = None) -> tuple[Events, Gradients]:
    """Run forward and backward, with random cotangents of all outputs."""
    events = engine.forward(problem, running_loss)
    return events, engine.backward(problem, events, cotangents(events), running_loss)


def changed(problem: Problem, name: str, index: int, amount: float) -> Problem:
    """Return ``problem`` with ``amount`` added to one entry of one tensor."""
    value = getattr(problem, name).clone()
    value.reshape(-1)[index] += amount
    return dataclasses.replace(problem, **{name: value})


def worst_gradient(left: Gradients, right: Gradients | dict[str, Tensor]) -> dict[str, float]:
    """Return the largest error of each gradient, relative to its largest entry or to 1, whichever is larger."""
    other = right if isinstance(right, dict) else right._asdict()
    result = {}
    for name in DIFFERENTIABLE:
        a, b = getattr(left, name), other[name]
        assert a.shape == b.shape, name
        assert torch.isfinite(a).all(), name
        scale = max(1.0, float(a.abs().max())) if a.numel() else 1.0
        result[name] = float((a - b).abs().max()) / scale if a.numel() else 0.0
    return result
