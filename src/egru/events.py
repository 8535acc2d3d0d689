r"""The event mechanism: cross a threshold, emit a value, clear the state.

Everything event-based in this library is built from the three pieces of this file, whatever the cell around them:

* :func:`emit` turns a state into events, ``y = v * [c > theta]``, with a surrogate gradient;
* :class:`Surrogate` describes that gradient: ``dH/dc = height * shape((c - theta) / width)``;
* :data:`egru.types.Reset` names the ways in which a state is cleared after an event.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class EventState(NamedTuple):
    """What a layer carries from one call to the next: always both halves.

    ``c`` is the internal state after clearing, ``y`` the events of the last step (zero where a unit was silent).
    """

    c: Tensor
    y: Tensor

    def detach(self) -> "EventState":
        """The same values without history: the seam of truncated back-propagation."""
        return EventState(self.c.detach(), self.y.detach())


Shape = Callable[[Tensor], Tensor]


class _RegisteredShape(NamedTuple):
    function: Shape
    compact: bool


_SHAPES: dict[str, _RegisteredShape] = {}


def register_surrogate(name: str, shape: Shape, *, compact: bool) -> None:
    """Add a surrogate shape under ``name``, for use as ``Surrogate(shape=name)``.

    ``shape`` maps ``x = (c - theta) / width`` to a slope (1 at ``x = 0`` by convention). ``compact`` says that it is
    exactly zero for ``|x| >= 1``; only then is the backward pass sparse. Registered shapes run on the reference
    backend; compiled kernels know the built-in triangle.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"register_surrogate: name must be an identifier, got {name!r}")
    if name in _SHAPES:
        raise ValueError(f"register_surrogate: {name!r} is already registered; registered: {', '.join(_SHAPES)}")
    if not callable(shape):
        raise TypeError(f"register_surrogate: shape must be callable, got {type(shape).__name__}")
    _SHAPES[name] = _RegisteredShape(shape, compact)


register_surrogate("triangle", lambda x: (1 - x.abs()).clamp_min(0), compact=True)
register_surrogate("rectangle", lambda x: (x.abs() < 1).to(x.dtype), compact=True)
register_surrogate("fast_sigmoid", lambda x: (1 + x.abs()).pow(-2), compact=False)


@dataclasses.dataclass(frozen=True)
class Surrogate:
    r"""The slope given to the step function in the backward pass.

    ``s = height * shape((c - theta) / width)``; for the default triangle
    ``s = height * max(0, 1 - |c - theta| / width)``, the paper's, with its epsilon = ``width``.

    Args:
        width: half-width of the window, in units of the state. Smaller is sparser in the backward pass.
        height: slope at the threshold. The paper's 1; with clearing, long sequences need 0.3 or less (see ``bounded``).
        bounded: clamp the slope of the output, ``k = e + c*s``, to [0, 1]. Keeps the clearing diagonal
            ``1 - u - k`` from growing over long sequences. The gradient is then no longer the exact gradient of the
            surrogate, only of a bounded version of it.
        shape: a registered name; see :func:`register_surrogate`.
    """

    width: float = 1.0
    height: float = 1.0
    bounded: bool = False
    shape: str = "triangle"

    def __post_init__(self) -> None:
        for field in ("width", "height"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"Surrogate: {field} must be a finite number, got {value!r}")
        if self.width <= 0:
            raise ValueError(f"Surrogate: width must be positive, got {self.width!r}")
        if self.height < 0:
            raise ValueError(f"Surrogate: height must not be negative, got {self.height!r}")
        if self.shape not in _SHAPES:
            raise ValueError(
                f"Surrogate: unknown shape {self.shape!r}; registered: {', '.join(_SHAPES)} "
                "(egru.register_surrogate adds one)"
            )

    @property
    def compact(self) -> bool:
        """Whether the slope is exactly zero outside the window, which is what makes the backward pass sparse."""
        return _SHAPES[self.shape].compact

    def slope(self, c: Tensor, theta: Tensor) -> Tensor:
        """``dH/dc``, the surrogate derivative of the step function at ``c``."""
        return self.height * _SHAPES[self.shape].function((c - theta) / self.width)

    def output_slope(self, value: Tensor, events: Tensor, slope: Tensor) -> Tensor:
        """``k = dy/dc = e + v*s``: zero for a unit that neither fired nor stands inside the window."""
        k = events + value * slope
        return k.clamp(0, 1) if self.bounded else k


class _Emit(torch.autograd.Function):
    """``(v, c, theta) -> (v * e, e)`` with ``e = [c > theta]``; see :func:`emit`."""

    @staticmethod
    def forward(value: Tensor, c: Tensor, theta: Tensor, surrogate: Surrogate) -> tuple[Tensor, Tensor]:
        fired = c > theta
        return torch.where(fired, value, 0), fired.to(c.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        value, c, theta, ctx.surrogate = inputs
        ctx.save_for_backward(value, c, theta, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        grad_y, grad_e = grads
        value, c, theta, events = ctx.saved_tensors
        slope = ctx.surrogate.slope(c, theta)
        through_c = ctx.surrogate.output_slope(value, events, slope) - events
        grad_theta = -(grad_y * value * slope + grad_e * slope)
        return (
            grad_y * events,
            grad_y * through_c + grad_e * slope,
            grad_theta.sum_to_size(theta.shape),
            None,
        )


def emit(value: Tensor, c: Tensor, theta: Tensor, surrogate: Surrogate) -> tuple[Tensor, Tensor]:
    """Emit ``value`` where ``c > theta``: returns ``(y, e)``, both differentiable through the surrogate.

    The comparison is strict: a state exactly at its threshold is silent. For cells that emit their own state,
    ``value is c`` and ``dy/dc = k = e + c*s``.
    """
    y, e = _Emit.apply(value, c, theta, surrogate)  # pyright: ignore[reportGeneralTypeIssues]
    return y, e
