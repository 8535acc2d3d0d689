r"""How far gradients get through time: the diagonal of a step's Jacobian, and the growth of the adjoint.

An event layer's gradient explodes or vanishes along two paths: the element-wise one from ``c_t`` to ``c_{t-1}``, whose
factor is ``1 - u - k`` where events clear the state by their output, and the one through ``V``. The first is read off
the states; both together are measured by sending a random gradient from the last state of a batch back to the first.
"""

import copy
import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egru.events import EventState
from egru.layers import EGRU, Record, Weights, record
from egru.layers.dropout import zoneout_keep

PIECE = 16
"""Steps between two rescalings of the gradient: what grows by e^5 a step still fits into float32."""


@dataclasses.dataclass(frozen=True)
class Stability:
    """Of one layer and direction, on one batch."""

    name: str
    steps: int
    diagonal_above_one: float
    """Share of the factors from ``c_{t-1}`` to ``c_t``, element by element, that are larger than 1 in size."""
    adjoint_growth: float
    """``log(|g_0| / |g_T|) / T``: above zero gradients grow on their way back, below they fade."""
    adjoint_peak: float
    """The largest ``log(|g_s| / |g_t|)`` over any stretch from ``t`` back to ``s``, in pieces of 16 steps: a gradient
    may explode in the middle of a sequence and fade again before it reaches the start."""

    @property
    def explodes(self) -> bool:
        """Whether a gradient grows more than ten-thousandfold over some stretch."""
        return self.adjoint_peak > math.log(1e4)


def stability(model: nn.Module, run: Callable[[], object], seed: int = 0) -> list[Stability]:
    """Of every :class:`egru.EGRU` in ``model``, on what ``run()`` shows it; calls with padded rows are left out.

    Costs a forward and a backward pass of the layers. In float32, without dropout, zoneout as in evaluation and
    without ``recurrent_clip``; torch's generator is left as it was.
    """
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad(), record(model) as records:
            run()
    finally:
        for module in training:
            module.training = True
    measured: list[Stability] = []
    for call in records:
        layer = call.layer
        if not isinstance(layer, EGRU) or call.lengths is not None:
            continue
        if call.direction.reverse:
            call = call._replace(input=call.input.flip(0), y=call.y.flip(0), c=call.c.flip(0))
        share = (jacobian_diagonal(layer, call).abs() > 1).double().mean().item()
        measured.append(Stability(call.label, len(call.y), share, *adjoint_growth(layer, call, seed)))
    return measured


@torch.no_grad()
def jacobian_diagonal(layer: EGRU, record: Record) -> Tensor:
    """The factor from every carried ``c_{t-1}`` to ``c_t`` by the unit's own path, ``(T - 1, B, H)``.

    ``output``: ``1 - u - rho*k``; ``threshold``: ``(1 - u)(1 - rho*theta*s)``; ``hard``:
    ``(1 - u)(1 - rho*(e + c*s))``; ``none``: ``1 - u``.
    """
    weights = layer.weights(record.direction)
    rho, rows = weights.reset_scale, slice(layer.hidden_size, 2 * layer.hidden_size)
    bias_ih = None if weights.bias_ih is None else weights.bias_ih[rows]
    bias_hh = None if weights.bias_hh is None else weights.bias_hh[rows]
    p = F.linear(record.input[1:].to(record.y.dtype), weights.ih[rows], bias_ih)
    u = torch.sigmoid(-(p + F.linear(record.y[:-1], weights.hh[rows], bias_hh)))
    c, theta = record.c[:-1], record.theta
    slope = record.surrogate.slope(c, theta)
    e = (c > theta).to(c.dtype)
    match layer.reset:
        case "output":
            diagonal = 1 - u - rho * record.surrogate.output_slope(c, e, slope)
        case "hard":
            diagonal = (1 - u) * (1 - rho * (e + c * slope))
        case _:
            diagonal = 1 - u
    if layer.zoneout:
        diagonal = layer.zoneout + (1 - layer.zoneout) * diagonal
    return diagonal * (1 - rho * theta * slope) if layer.reset == "threshold" else diagonal  # what was carried on


@torch.enable_grad()
def adjoint_growth(layer: EGRU, record: Record, seed: int = 0) -> tuple[float, float]:
    """Growth a step and peak, as in :class:`Stability`, of a random gradient of the last state, all rows together."""
    layer = copy.copy(layer).eval()  # the parameters are shared
    layer.recurrent_clip = None
    weights = Weights(*(None if part is None else part.detach() for part in layer.weights(record.direction)))  # pyright: ignore[reportArgumentType]
    x = record.input.detach().to(weights.hh.dtype)
    device = x.device.type
    with torch.autocast(device, enabled=False):
        rest = x.new_zeros(x.shape[1], layer.hidden_size)
        state, pieces = EventState(rest, rest), []
        # An event of "hard" reaches over a seam by a path of its own, so there the sequence stays in one piece.
        for part in x.split(len(x) if layer.reset == "hard" else PIECE):
            start = EventState(*(half.detach().clone().requires_grad_() for half in state))
            keep = zoneout_keep(start.c, len(part), layer.zoneout, False)
            _, _, state = layer.run_direction(part, start, weights, keep)
            pieces.append((start, state))
        g = torch.randn(rest.shape, generator=torch.Generator().manual_seed(seed)).to(x)
        gradients: tuple[Tensor, ...] = (g / g.norm(), torch.zeros_like(g))
        total = stretch = peak = 0.0
        for start, end in reversed(pieces):
            gradients = torch.autograd.grad(end, start, gradients)
            norm = torch.cat(gradients).norm()
            if not norm.isfinite():
                return math.inf, math.inf
            if norm == 0:
                return -math.inf, peak
            step = norm.log().item()
            total += step
            stretch = max(stretch + step, 0.0)
            peak = max(peak, stretch)
            gradients = tuple(gradient / norm for gradient in gradients)
    return total / len(x), peak
