"""What every kernel receives and returns: one sequence of one layer in one direction."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from egru.events import Surrogate
from egru.kernels.fields import BackwardOnly, Differentiable, EagerOnly, attribute_getter, describe_fields
from egru.types import Compare, Events, Reset, ResetGate, SequenceCell


@dataclasses.dataclass(slots=True, eq=False)  # not frozen: frozen dataclasses are several times slower to construct
class Problem:
    """Arguments of the sequence operation, in torch's layouts. :mod:`egru.functional` has the equations.

    To add an option, add a field with a default before ``started``. The operator's schema, the eager call and the
    refusal by kernels that do not list the option follow from the field. :mod:`egru.kernels.fields` explains the
    annotations.

    Args:
        input: Inputs of shape ``(T, B, I)``.
        c0: Initial state, ``(B, H)``.
        y0: Output of the step before the first, ``(B, H)``.
        weight_ih: Input weights, ``(3H, I)``.
        weight_hh: Recurrent weights, ``(3H, H)``.
        bias_ih: Input biases, ``(3H,)``, or None.
        bias_hh: Recurrent biases, ``(3H,)``, or None.
        theta: Thresholds after the constraint was applied, ``(H,)``.
        reset_scale: Multiplies the cleared amount. Shape ``()`` or ``(H,)``; a tensor, so that scheduling it needs no
            synchronisation.
        keep: Zoneout: the share of the previous state that is kept, broadcastable to ``(T, B, H)``, or None.
        lengths: Number of steps per sequence, ``(B,)``, int64, or None if all have ``T``.
        reset: How a unit is cleared after an event.
        reset_gate: Whether the reset gate acts before or after the recurrent product.
        surrogate: Gradient of the step function.
        precision: Type that the operands of products are rounded to under autocast, ``"bfloat16"`` or ``"float16"``;
            empty for no rounding. The state always keeps the type of the parameters.
        lean: Recompute the gates in the backward pass instead of saving them: less memory, more time, the same numbers
            up to rounding.
        recurrent_clip: Bound on the gradient from step to step (:func:`egru.functional.event_sequence`); 0 for none.
        events: When a unit emits an event, and what the output is.
        cell: The recurrent cell. Weights of an LSTM have ``4H`` rows instead of ``3H``; ``reset_gate`` has no meaning.
        compare: LSTM: whether the threshold is compared with the memory cell or with the value of an event.
        started: Result of :func:`egru.kernels.begin_sequence` for the same tensors, used by one forward pass.

    Example:
        >>> zeros = torch.zeros(2, 8)
        >>> problem = egru.kernels.Problem(
        ...     input=torch.randn(20, 2, 4), c0=zeros, y0=zeros, weight_ih=torch.randn(24, 4),
        ...     weight_hh=torch.randn(24, 8), bias_ih=None, bias_hh=None, theta=torch.full((8,), 0.1),
        ...     reset_scale=torch.tensor(1.0), keep=None, lengths=None, reset="output", reset_gate="before",
        ...     surrogate=egru.Surrogate(), precision="",
        ... )
        >>> y, c, state = egru.kernels.run_sequence(problem)
    """

    input: Differentiable[Tensor]
    c0: Differentiable[Tensor]
    y0: Differentiable[Tensor]
    weight_ih: Differentiable[Tensor]
    weight_hh: Differentiable[Tensor]
    bias_ih: Differentiable[Tensor | None]
    bias_hh: Differentiable[Tensor | None]
    theta: Differentiable[Tensor]
    reset_scale: Tensor
    keep: Tensor | None
    lengths: Tensor | None
    reset: Reset
    reset_gate: ResetGate
    surrogate: Surrogate
    precision: str
    lean: bool = False
    recurrent_clip: BackwardOnly[float] = 0.0
    events: Events = "positive"
    cell: SequenceCell = "gru"
    compare: Compare = "cell"
    started: EagerOnly[object] = None

    def rounded(self) -> "Problem":
        """Return the problem with the operands of products rounded to ``precision``. Sums are not rounded."""
        if not self.precision:
            return self
        low: torch.dtype = getattr(torch, self.precision)
        input, weight_ih, weight_hh = (x.to(low).to(x.dtype) for x in (self.input, self.weight_ih, self.weight_hh))
        return dataclasses.replace(self, input=input, weight_ih=weight_ih, weight_hh=weight_hh, precision="")

    def needs_gradient(self) -> bool:
        """Return whether autograd will ask for a gradient of this problem."""
        if torch.is_grad_enabled():
            for tensor in _get_differentiable(self):
                if tensor is not None and tensor.requires_grad:
                    return True
        return False

    def without_backward_options(self) -> "Problem":
        """Return the problem with its backward-only options at their defaults, for calls without a backward pass."""
        for name in FIELDS.backward_only:
            if getattr(self, name) != FIELDS.defaults[name]:
                return dataclasses.replace(self, **{name: FIELDS.defaults[name] for name in FIELDS.backward_only})
        return self

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensor arguments, the differentiable ones first."""
        return _get_tensors(self)

    def options(self) -> tuple[Any, ...]:
        """Return the options. ``Problem(*tensors, *options)`` restores the problem."""
        return _get_options(self)

    def flatten(self) -> tuple[Any, ...]:
        """Return the arguments of the operator ``egru::sequence``: tensors, then plain values."""
        return _get_arguments(self)

    @staticmethod
    def unflatten(values: Sequence[Any]) -> "Problem":
        """Return the problem that :meth:`flatten` was called on."""
        return Problem(*FIELDS.unflatten(values))


FIELDS = describe_fields(Problem)
"""The names of :class:`Problem`'s fields by role, and the operator's schema."""
_get_tensors = attribute_getter(FIELDS.tensors)
_get_differentiable = attribute_getter(FIELDS.differentiable)
_get_options = attribute_getter(FIELDS.option_names)
_get_arguments = FIELDS.argument_getter()


class Forward(NamedTuple):
    """Result of a forward pass.

    Attributes:
        y: Outputs, ``(T, B, H)``.
        c: State before the reset "threshold", ``(T, B, H)``.
        c_last: Final carried state, ``(B, H)``.
        y_last: Output of the last step, ``(B, H)``.
        reserve: What the kernel saves for its backward pass.
        input: Rounded input to save for the backward pass in place of the problem's input, or None.
    """

    y: Tensor
    c: Tensor
    c_last: Tensor
    y_last: Tensor
    reserve: Tensor
    input: Tensor | None = None


class Backward(NamedTuple):
    """Gradients of the differentiable fields of a :class:`Problem`, in the shapes of these fields.

    Attributes:
        input: None unless it was requested.
        c0, y0: May be None unless one of them was requested.
        weight_ih, weight_hh, bias_ih, bias_hh, theta: Gradients of the parameters.
    """

    input: Tensor | None
    c0: Tensor | None
    y0: Tensor | None
    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor
    bias_hh: Tensor
    theta: Tensor


assert Backward._fields == FIELDS.differentiable, "gradients are matched with the differentiable fields by position"


class Kernel(Protocol):
    """An implementation of the sequence operation."""

    name: str
    device: str | None
    """Type of the device whose tensors this kernel takes; None for any."""
    options: frozenset[str]
    """Options with a default that this kernel implements. The registry refuses problems that set any other."""
    reads_y: bool
    """Whether :meth:`backward` reads ``y``. If False, the graph does not keep it."""

    def unsupported(self, problem: Problem) -> str | None:
        """Return why this kernel cannot run ``problem``, or None if it can.

        Must not read tensor values. The registry has checked :attr:`device` and :attr:`options`.
        """
        ...

    def describe(self) -> str:
        """Return one line on what the kernel runs on here, for :func:`egru.kernels.info`."""
        ...

    def reserve_shape(self, problem: Problem) -> tuple[int, ...]:
        """Return the shape of :attr:`Forward.reserve` for ``save=True``."""
        ...

    def forward(self, problem: Problem, save: bool) -> Forward:
        """Run the sequence. Unless ``save`` is True, the reserve is empty."""
        ...

    def backward(
        self,
        problem: Problem,
        y: Tensor | None,
        c: Tensor,
        reserve: Tensor,
        grad_y: Tensor | None,
        grad_c: Tensor | None,
        grad_c_last: Tensor | None,
        grad_y_last: Tensor | None,
        input_gradient: bool,
        state_gradient: bool = True,
    ) -> Backward:
        """Return the gradients, given those of the four differentiable outputs; None means zero.

        ``input_gradient`` and ``state_gradient`` request those of ``input`` and of ``c0`` and ``y0``.
        """
        ...
