r"""The event mechanism: cross a threshold, emit a value, clear the state.

All event-based layers are built from these parts, independently of the cell:

* :func:`emit` turns a state into events, ``y = v * [c > theta]``, with a surrogate gradient;
* :data:`egru.types.Events` lists the kinds of events: one-sided, two-sided, or changes of the state;
* :class:`Surrogate` describes that gradient, ``dH/dc = height * shape((c - theta) / width)``;
* :data:`egru.types.Reset` lists the ways in which a state is cleared after an event.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree  # pyright: ignore[reportPrivateUsage]

from egru._autograd import SECOND_DERIVATIVES, in_forward_mode
from egru.types import EVENTS, Events, Reset, ResetGate


class EventState(NamedTuple):
    """The state that a layer carries from one call to the next.

    Attributes:
        c: Internal state after the reset.
        y: Output of the last step; zero for inactive units, or the last value sent with ``events="delta"``.

    Example:
        >>> layer = egru.EGRU(4, 8)
        >>> first, second = torch.randn(20, 4).split(10)
        >>> events, state = layer(first)
        >>> events, state = layer(second, state.detach())  # continues the sequence
        >>> state.c.shape
        torch.Size([1, 8])
    """

    c: Tensor
    y: Tensor

    def detach(self) -> "EventState":
        """Return the state detached from the graph, for truncated back-propagation through time."""
        return EventState(self.c.detach(), self.y.detach())


# So that torch.export.save and torch.load(weights_only=True) accept states.
_pytree._register_namedtuple(EventState, serialized_type_name="egru.EventState")  # pyright: ignore[reportPrivateUsage]
torch.serialization.add_safe_globals([EventState])

Shape = Callable[[Tensor], Tensor]


class _RegisteredShape(NamedTuple):
    function: Shape
    compact: bool


_SHAPES: dict[str, _RegisteredShape] = {}


def register_surrogate(name: str, shape: Shape, *, compact: bool) -> None:
    """Register a surrogate shape, for use as ``Surrogate(shape=name)``.

    The compiled kernels support only the built-in triangle. Layers with other shapes run on the reference backend.

    Args:
        name: A Python identifier that is not registered yet.
        shape: A function from ``x = (c - theta) / width`` to the slope; by convention 1 at ``x = 0``.
        compact: Whether the slope is exactly zero for ``|x| >= 1``. Only then is the backward pass sparse.

    Raises:
        ValueError: If ``name`` is not an identifier or is already registered.
        TypeError: If ``shape`` is not callable.

    Example:
        >>> egru.register_surrogate("parabola", lambda x: (1 - x**2).clamp_min(0), compact=True)
        >>> layer = egru.EGRU(2, 8, surrogate=egru.Surrogate(shape="parabola"))
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
    r"""The surrogate gradient of the step function.

    The slope is ``s = height * shape((c - theta) / width)``. For the default triangle, which the paper uses with
    epsilon = ``width``, this is ``s = height * max(0, 1 - |c - theta| / width)``.

    Args:
        width: Half-width of the window, in units of the state. A smaller width makes the backward pass sparser.
        height: Slope at the threshold; 1 in the paper. With a reset, long sequences need 0.3 or less, or ``bounded``.
        bounded: Clamp the slope of the output, ``k = e + c*s``, to [0, 1]. This prevents the factor ``1 - u - k`` of
            the reset from growing over long sequences. The gradient is then that of a bounded surrogate.
        shape: ``"triangle"``, ``"rectangle"``, ``"fast_sigmoid"``, or a shape added with ``register_surrogate``.

    Raises:
        ValueError: If an argument is out of range or ``shape`` is not registered.

    Example:
        >>> surrogate = egru.Surrogate(width=0.5, height=0.3)
        >>> layer = egru.EGRU(4, 8, surrogate=surrogate)
        >>> surrogate.slope(torch.tensor([0.1, 0.5, 0.75]), torch.tensor(0.5))
        tensor([0.0600, 0.3000, 0.1500])
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
        """Whether the slope is exactly zero outside the window, so that the backward pass is sparse."""
        return _SHAPES[self.shape].compact

    def slope(self, c: Tensor, theta: Tensor) -> Tensor:
        """Return ``dH/dc``, the surrogate derivative of the step function at ``c``."""
        return self.height * _SHAPES[self.shape].function((c - theta) / self.width)

    def output_slope(self, value: Tensor, events: Tensor, slope: Tensor) -> Tensor:
        """Return ``k = dy/dc = e + v*s``, which is zero for inactive units outside the window."""
        k = events + value * slope
        return k.clamp(0, 1) if self.bounded else k


class _Slopes(torch.autograd.Function):
    """Map ``(v, c, theta, e)`` to the slopes ``s`` and ``k - e``, whose derivatives raise."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        value: Tensor, c: Tensor, theta: Tensor, events: Tensor, surrogate: Surrogate, signed: bool
    ) -> tuple[Tensor, Tensor]:
        slope = surrogate.slope(c, theta)
        if not signed:
            return slope, surrogate.output_slope(value, events, slope) - events
        return slope, value.sign() * (surrogate.output_slope(value.abs(), events, slope) - events)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(SECOND_DERIVATIVES)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(SECOND_DERIVATIVES)


class _Emit(torch.autograd.Function):
    """Map ``(v, c, theta, hold)`` to ``(where(e, v, hold), e)`` with ``e = [c > theta]``; see :func:`emit`.

    With ``signed``, ``c`` is a magnitude, and ``v - hold`` has the sign that it was taken from.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        value: Tensor, c: Tensor, theta: Tensor, hold: Tensor | None, surrogate: Surrogate, signed: bool
    ) -> tuple[Tensor, Tensor]:
        fired = c > theta
        return torch.where(fired, value, 0 if hold is None else hold), fired.to(c.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        value, c, theta, hold, ctx.surrogate, ctx.signed = inputs
        ctx.save_for_backward(value, c, theta, hold, output[1])
        ctx.save_for_forward(value, c, theta, hold, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_y, grad_e = grads
        value, c, theta, hold, events = ctx.saved_tensors
        jump = value if hold is None else value - hold  # how much an event changes the output
        slope, through_c = _Slopes.apply(jump, c, theta, events, ctx.surrogate, ctx.signed)  # pyright: ignore
        grad_theta = -(grad_y * jump * slope + grad_e * slope)
        return (
            grad_y * events,
            grad_y * through_c + grad_e * slope,
            grad_theta.sum_to_size(theta.shape),
            None if hold is None else grad_y * (1 - events),
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, Tensor]:
        value, c, theta, hold, events = ctx.saved_tensors
        d_value, d_c, d_theta, d_hold = (0 if tangent is None else tangent for tangent in tangents[:4])
        jump = value if hold is None else value - hold
        slope, through_c = _Slopes.apply(jump, c, theta, events, ctx.surrogate, ctx.signed)  # pyright: ignore
        zero = torch.zeros_like(c)
        return (
            zero + events * d_value + (1 - events) * d_hold + through_c * d_c - jump * slope * d_theta,
            zero + slope * (d_c - d_theta),
        )


def emit(
    value: Tensor,
    c: Tensor,
    theta: Tensor,
    surrogate: Surrogate,
    *,
    signed: bool = False,
    hold: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Emit ``value`` where ``c > theta``.

    The comparison is strict: a state that equals its threshold does not emit an event. For cells that emit their state,
    ``value is c`` and ``dy/dc = k = e + c*s``.

    Args:
        value: What an event emits.
        c: State that is compared with the threshold.
        theta: Thresholds.
        surrogate: Gradient of the comparison.
        signed: Compare ``|c|``, with the surrogate on both sides. ``c`` must have the sign of ``value - hold``.
        hold: Output of units without an event. If None, zero.

    Returns:
        ``(y, e)``: the outputs and the events as 0 and 1, both differentiable through the surrogate.

    Raises:
        RuntimeError: If forward-mode differentiation is compiled: ``torch.compile`` would return zeros.
    """
    if torch.compiler.is_compiling() and in_forward_mode():
        raise RuntimeError("egru: torch.compile does not support forward-mode differentiation of events")
    y, e = _Emit.apply(value, c.abs() if signed else c, theta, hold, surrogate, signed)  # pyright: ignore[reportGeneralTypeIssues]
    return y, e


def compared(c: Tensor, y_prev: Tensor, events: Events) -> Tensor:
    """Return the values of a cell that emits its state which are compared with the thresholds.

    Args:
        c: States.
        y_prev: Outputs of the previous step.
        events: Kind of events. ``"signed"`` and ``"delta"`` compare the magnitude of the result.
    """
    return c - y_prev if events == "delta" else c


def has_event(value: Tensor, theta: Tensor, events: Events) -> Tensor:
    """Return where there is an event, given the values that are compared with the thresholds."""
    return (value if events == "positive" else value.abs()) > theta


def check_events(events: Events, reset: Reset, reset_gate: ResetGate = "after", owner: str = "") -> None:
    """Check that a kind of events exists and fits the other options.

    Raises:
        ValueError: If it does not. The message starts with ``owner``.
    """
    prefix = f"{owner}: " if owner else ""
    if events not in EVENTS:
        raise ValueError(f"{prefix}events must be one of {', '.join(EVENTS)}; got {events!r}")
    if events == "delta" and (reset != "none" or reset_gate != "after"):
        raise ValueError(
            f"{prefix}events='delta' requires reset='none' and reset_gate='after', got reset={reset!r} and "
            f"reset_gate={reset_gate!r}"
        )
