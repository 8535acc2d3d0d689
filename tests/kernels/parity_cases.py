"""Random problems with every option, and the comparison of their results."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from egru.events import Surrogate, has_event
from egru.kernels import Problem, get
from egru.types import Compare, Events, Reset, ResetGate, SequenceCell


class Case(NamedTuple):
    """Parameters of a random problem."""

    T: int = 9
    B: int = 3
    I: int = 5
    H: int = 33
    reset: Reset = "output"
    reset_gate: ResetGate = "after"
    cell: SequenceCell = "gru"
    compare: Compare = "cell"
    events: Events = "positive"
    bias: bool = True
    keep: str = ""
    lengths: bool = False
    bounded: bool = False
    density: float = 1.0
    reset_scale: float = 0.7
    width: float = 0.4
    height: float = 0.7
    theta: float = 0.1
    lean: bool = False
    scale_per_unit: bool = False
    zero_blocks: float = 0.0
    """Share of blocks of 16 outputs and one source whose weights are zero; also some outputs and one source."""

    def problem(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> Problem:
        """Draw a problem. Its numbers are representable in float32 and the same for both types."""
        g = torch.Generator().manual_seed(seed)
        T, B, I, H = self.T, self.B, self.I, self.H
        rows = (3 if self.cell == "gru" else 4) * H

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=g) * scale).to(dtype)

        def chance(*shape: int, p: float) -> Tensor:
            return (torch.rand(*shape, generator=g) < p).to(dtype)

        x = normal(T, B, I) * chance(T, B, I, p=self.density)
        theta = self.theta + normal(H, scale=0.1).abs()
        c0 = normal(B, H, scale=0.5)
        keep = {"": None, "mask": chance(T, B, H, p=0.3), "share": torch.tensor(0.3).to(dtype)}[self.keep]
        lengths = torch.randint(1, T + 1, (B,), generator=g) if self.lengths else None
        reset_scale = torch.tensor(self.reset_scale).to(dtype)
        if self.scale_per_unit:
            reset_scale = reset_scale * torch.rand(H, generator=g).to(dtype)
        y0 = c0 * has_event(c0, theta, self.events)
        weight_ih, weight_hh = normal(rows, I, scale=I**-0.5), normal(rows, H, scale=H**-0.5)
        bias_ih, bias_hh = (normal(rows, scale=0.3) if self.bias else None for _ in range(2))
        for weight in (weight_ih, weight_hh) if self.zero_blocks else ():
            gates = weight.unflatten(0, (-1, H))  # views
            for unit in range(0, H, 16):
                gates[:, unit : unit + 16] *= chance(len(gates), 1, weight.shape[1], p=1 - self.zero_blocks)
            gates[0, :16] = gates[-1, :, -1] = 0
        return Problem(
            x, c0, y0, weight_ih, weight_hh, bias_ih, bias_hh, theta, reset_scale, keep, lengths, self.reset,
            self.reset_gate, Surrogate(self.width, self.height, self.bounded), "", self.lean, cell=self.cell,
            compare=self.compare, events=self.events,
        )  # fmt: skip


FORMS: dict[str, dict[str, Any]] = {
    "before": {"reset_gate": "before"},
    "after": {"reset_gate": "after"},
    "lstm": {"cell": "lstm"},
    "lstm-output": {"cell": "lstm", "compare": "output"},
}
"""The cells and their variants."""


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-bias": {"bias": False},
    "zoneout-mask": {"keep": "mask"},
    "zoneout-share": {"keep": "share"},
    "lengths": {"lengths": True},
    "bounded": {"bounded": True, "theta": -0.6},
    "sparse-input": {"density": 0.2, "I": 64},
    "no-window": {"height": 0.0},
    "all-fire": {"theta": -5.0, "reset_scale": 1.0},
    "none-fire": {"theta": 5.0, "width": 10.0},
    "zero-blocks": {"zero_blocks": 0.7, "H": 70, "I": 40, "B": 19, "T": 5},
    "lean": {"lean": True, "B": 17},
    "lean-lengths-zoneout": {"lean": True, "lengths": True, "keep": "mask", "B": 17, "T": 40},
}


EVENT_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zoneout-lengths": {"keep": "mask", "lengths": True},
    "bounded": {"bounded": True},
    "no-bias-sparse-input": {"bias": False, "density": 0.2, "I": 64},
    "zero-blocks-zoneout-lengths": {"zero_blocks": 0.6, "H": 70, "keep": "mask", "lengths": True},
    "lean-lengths-zoneout": {"lean": True, "lengths": True, "keep": "mask", "B": 17, "T": 40},
}
"""Options that are combined with signed and delta events; the others do not depend on the kind of events."""


Result = dict[str, Tensor]


def run(kernel: Any, problem: Problem, seed: int = 1) -> Result:
    """Return all outputs and all gradients, for random gradients of the outputs."""
    T, shape = problem.input.shape[0], problem.c0.shape
    forward = kernel.forward(problem, True)
    assert tuple(forward.reserve.shape) == kernel.reserve_shape(problem)
    g = torch.Generator().manual_seed(seed)
    grads = [torch.randn(T, *shape, generator=g), torch.randn(T, *shape, generator=g)]
    grads += [torch.randn(shape, generator=g), torch.randn(shape, generator=g)]
    grads = [x.to(problem.c0) for x in grads]
    backward = kernel.backward(problem, forward.y, forward.c, forward.reserve, *grads, True)
    return {
        **{name: x for name, x in forward._asdict().items() if name not in ("reserve", "input")},
        **{f"grad_{name}": x for name, x in backward._asdict().items()},
    }


@functools.cache
def reference(case: Case, seed: int = 0) -> Result:
    """Return the reference result for ``case.problem(seed)``."""
    return run(get("reference"), case.problem(seed))


def error(result: Result, expected: Result) -> dict[str, float]:
    """Return, per tensor, the largest difference relative to the largest entry; NaN if either contains NaN."""
    assert result.keys() == expected.keys()
    errors = {}
    for name, x in expected.items():
        assert result[name].shape == x.shape, name
        difference = (result[name].to(x) - x).abs().max().item()
        errors[name] = difference / (x.abs().max().item() or 1.0)
    return errors
