r"""Growth of gradients through time: the diagonal of a step's Jacobian, and the norm of a back-propagated gradient.

The gradient of an event layer flows from step to step along two paths: element by element from ``c_t`` to ``c_{t-1}``,
and through the recurrent weights. With ``reset="output"`` the factor of the first path is ``1 - u - k``.
:func:`jacobian_diagonal` computes this factor from recorded states. :func:`adjoint_growth` measures both paths
together: it sends a random gradient from the last state of a batch back to the first.
"""

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egru.events import EventState
from egru.layers import EGRU, Record, Weights, record
from egru.layers.dropout import zoneout_keep

CHUNK_STEPS = 16
"""Number of steps between two rescalings of the gradient. Growth by e^5 per step still fits into float32."""


@dataclasses.dataclass(frozen=True)
class Stability:
    """Growth of gradients in one direction of one layer, on one batch.

    Attributes:
        name: Label of the direction; see :func:`egru.layers.event_directions`.
        steps: Number of steps ``T``.
        diagonal_above_one: Fraction of the element-wise factors from ``c_{t-1}`` to ``c_t`` with a magnitude above 1.
        adjoint_growth: ``log(|g_0| / |g_T|) / T``, the mean growth of a gradient per step. Positive values mean that
            gradients grow on their way back, negative values that they vanish.
        adjoint_peak: Largest ``log(|g_s| / |g_t|)`` over all intervals from ``t`` back to ``s``, in chunks of 16 steps.
            A gradient may explode within a sequence and vanish again before it reaches the start.
    """

    name: str
    steps: int
    diagonal_above_one: float
    adjoint_growth: float
    adjoint_peak: float

    @property
    def explodes(self) -> bool:
        """Whether the norm of a gradient grows by more than 10,000 over some interval."""
        return self.adjoint_peak > math.log(1e4)


def measure_stability(model: nn.Module, run: Callable[[], object], seed: int = 0) -> list[Stability]:
    """Measure the growth of gradients in every :class:`egru.EGRU` of a model.

    The cost is one forward and one backward pass of the layers. Layers run in evaluation mode and without autocast and
    ``recurrent_clip``. Calls with padded sequences are skipped. Torch's random state does not change.

    Args:
        model: Any module.
        run: Function that runs the model on a batch.
        seed: Seed of the random gradient. Default: 0.

    Returns:
        One entry per direction of each layer, in the order of execution.

    Example:
        >>> import torch, egru
        >>> model, x = egru.EGRU(3, 16, reset="none"), torch.randn(50, 4, 3)
        >>> [layer] = egru.activity.measure_stability(model, lambda: model(x))
        >>> layer.name, layer.steps, layer.explodes
        ('egru', 50, False)
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
            flipped = {name: getattr(call, name).flip(0) for name in ("input", "y", "c", "seen")}
            call = call._replace(**flipped)
        above_one = (jacobian_diagonal(layer, call).abs() > 1).double().mean().item()
        measured.append(Stability(call.label, len(call.y), above_one, *adjoint_growth(layer, call, seed)))
    return measured


@torch.no_grad()
def jacobian_diagonal(layer: EGRU, call: Record) -> Tensor:
    """Compute the element-wise factors from the carried ``c_{t-1}`` to ``c_t``.

    ============= ==================================
    reset         factor
    ============= ==================================
    ``output``    ``1 - u - rho*k``
    ``threshold`` ``(1 - u)(1 - rho*theta*s)``
    ``hard``      ``(1 - u)(1 - rho*(e + c*s))``
    ``none``      ``1 - u``
    ============= ==================================

    Signed events take ``|c|`` in place of ``c``.

    Args:
        layer: The layer.
        call: Record of one of its forward passes, in the order in which the direction reads its input.

    Returns:
        The factors, ``(T - 1, B, H)``.
    """
    weights = layer.weights(call.direction)
    rho, rows = weights.reset_scale, slice(layer.hidden_size, 2 * layer.hidden_size)
    bias_ih = None if weights.bias_ih is None else weights.bias_ih[rows]
    bias_hh = None if weights.bias_hh is None else weights.bias_hh[rows]
    p = F.linear(call.input[1:].to(call.y.dtype), weights.ih[rows], bias_ih)
    u = torch.sigmoid(-(p + F.linear(call.y[:-1], weights.hh[rows], bias_hh)))
    c, theta = call.magnitude()[:-1], call.theta
    slope = call.surrogate.slope(c, theta)
    e = (c > theta).to(c.dtype)
    match layer.reset:
        case "output":
            diagonal = 1 - u - rho * call.surrogate.output_slope(c, e, slope)
        case "hard":
            diagonal = (1 - u) * (1 - rho * (e + c * slope))
        case _:
            diagonal = 1 - u
    if layer.zoneout:
        diagonal = layer.zoneout + (1 - layer.zoneout) * diagonal
    # With this reset the carried state is c after clearing.
    return diagonal * (1 - rho * theta * slope) if layer.reset == "threshold" else diagonal


@torch.enable_grad()
def adjoint_growth(layer: EGRU, call: Record, seed: int = 0) -> tuple[float, float]:
    """Send a random gradient of the last state back to the first, all sequences together.

    Args:
        layer: The layer.
        call: Record of one of its forward passes, in the order in which the direction reads its input.
        seed: Seed of the random gradient.

    Returns:
        ``adjoint_growth`` and ``adjoint_peak``, as in :class:`Stability`.
    """
    original, layer = layer, type(layer).__new__(type(layer))  # copy.copy refuses layers with parametrisations
    layer.__dict__ = {**original.__dict__, "training": False, "recurrent_clip": None}  # shares the parameters
    weights = Weights(*(None if part is None else part.detach() for part in layer.weights(call.direction)))  # pyright: ignore[reportArgumentType]
    x = call.input.detach().to(weights.hh.dtype)
    with torch.autocast(x.device.type, enabled=False):
        rest = x.new_zeros(x.shape[1], layer.hidden_size)
        state = EventState(rest, rest)
        chunks: list[tuple[EventState, EventState]] = []
        # With "hard", an event also acts on the next step directly, which a cut would miss. Use a single chunk.
        for part in x.split(len(x) if layer.reset == "hard" else CHUNK_STEPS):
            start = EventState(*(half.detach().clone().requires_grad_() for half in state))
            keep = zoneout_keep(start.c, len(part), layer.zoneout, False)
            _, _, state = layer.run_direction(part, start, weights, keep)
            chunks.append((start, state))
        g = torch.randn(rest.shape, generator=torch.Generator().manual_seed(seed)).to(x)
        gradients: tuple[Tensor, ...] = (g / g.norm(), torch.zeros_like(g))
        total = interval = peak = 0.0
        for start, end in reversed(chunks):
            gradients = torch.autograd.grad(end, start, gradients)
            norm = torch.cat(gradients).norm()
            if not norm.isfinite():
                return math.inf, math.inf
            if norm == 0:
                return -math.inf, peak
            growth = norm.log().item()
            total += growth
            interval = max(interval + growth, 0.0)
            peak = max(peak, interval)
            gradients = tuple(gradient / norm for gradient in gradients)
    return total / len(x), peak
