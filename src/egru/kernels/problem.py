"""What every kernel receives and returns: one sequence of one layer in one direction."""

import dataclasses
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from egru.events import Surrogate


@dataclasses.dataclass(slots=True, eq=False)  # not frozen: that makes it several times slower to build
class Problem:
    """The arguments of the sequence operation, in torch's layouts (see :mod:`egru.functional` for the meaning).

    ``input`` is ``(T, B, I)``; ``c0`` and ``y0`` are ``(B, H)``; ``theta`` is ``(H,)``, already constrained;
    ``reset_scale`` is a 0-dim tensor, so that scheduling it costs no synchronisation, or ``(H,)``; ``keep`` broadcasts
    to ``(T, B, H)``; ``lengths`` is ``(B,)``, int64. ``precision`` names the type that operands of products are rounded
    to under autocast ("bfloat16", "float16"), or is empty: the state always keeps the parameters' type. ``lean`` asks a
    kernel to save nothing it can compute again in the backward pass: less memory, more time, the same numbers.
    ``recurrent_clip`` bounds the gradient from step to step (:func:`egru.functional.event_sequence`); 0 leaves it.
    ``started`` is what :func:`egru.kernels.begin_sequence` gave for these very tensors, for one forward pass.
    """

    input: Tensor
    c0: Tensor
    y0: Tensor
    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    theta: Tensor
    reset_scale: Tensor
    keep: Tensor | None
    lengths: Tensor | None
    reset: str
    reset_gate: str
    surrogate: Surrogate
    precision: str
    lean: bool = False
    recurrent_clip: float = 0.0
    started: object = None

    def rounded(self) -> "Problem":
        """With the operands of products rounded as autocast asks; products accumulate unrounded."""
        if not self.precision:
            return self
        low: torch.dtype = getattr(torch, self.precision)
        names = ("input", "weight_ih", "weight_hh")
        rounded = {name: getattr(self, name).to(low).to(getattr(self, name).dtype) for name in names}
        return dataclasses.replace(self, **rounded, precision="")

    def tensors(self) -> "tuple[Tensor | None, ...]":
        """The fields that are tensors or None, in order."""
        return (
            self.input, self.c0, self.y0, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh, self.theta,
            self.reset_scale, self.keep, self.lengths,
        )  # fmt: skip

    def options(self) -> "tuple[str, str, Surrogate, str, bool, float]":
        """What the backward pass needs of the other fields."""
        return self.reset, self.reset_gate, self.surrogate, self.precision, self.lean, self.recurrent_clip


TENSOR_FIELDS = 11
"""Fields of a :class:`Problem` that are tensors or None; they come first."""


class Forward(NamedTuple):
    """``y`` and ``c`` (the state the threshold saw), the carried state, and whatever the kernel saves for backward.

    ``input``, where it is not None, stands for the problem's input in the backward pass: the same, rounded already.
    """

    y: Tensor
    c: Tensor
    c_last: Tensor
    y_last: Tensor
    reserve: Tensor
    input: Tensor | None = None


class Backward(NamedTuple):
    """Gradients of the tensors of a :class:`Problem`; ``input`` is None where it was not asked for."""

    input: Tensor | None
    c0: Tensor
    y0: Tensor
    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor
    bias_hh: Tensor
    theta: Tensor


class Kernel(Protocol):
    """One implementation of the sequence operation."""

    name: str
    reads_y: bool
    """Whether :meth:`backward` wants ``y``; a graph need not hold it otherwise."""

    def unsupported(self, problem: Problem) -> str | None:
        """Why this kernel cannot run ``problem``, or None if it can. Looks at options, types and devices only."""
        ...

    def describe(self) -> str:
        """Its standing on this machine in one line, for :func:`egru.kernels.info`."""
        ...

    def reserve_shape(self, problem: Problem) -> tuple[int, ...]:
        """Shape of :attr:`Forward.reserve` when it is saved."""
        ...

    def forward(self, problem: Problem, save: bool) -> Forward:
        """Run the sequence; ``save`` asks for the reserve, which is empty otherwise."""
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
    ) -> Backward:
        """Gradients, given those of the four differentiable outputs (None stands for zero)."""
        ...


def is_plain(x: Tensor) -> bool:
    """Whether nothing watches this call: no tracing, no transform, no tensor subclass."""
    return (
        type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )
