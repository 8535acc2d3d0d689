"""Entry points of the sequence operation: choose a kernel and a route, and run."""

import torch
from torch import Tensor

from egru._autograd import in_transform, is_plain
from egru.events import EventState
from egru.kernels.call import NoAutocast, prepare
from egru.kernels.eager import run_eager
from egru.kernels.finite import check_arguments, check_result
from egru.kernels.op import sequence
from egru.kernels.problem import Problem
from egru.kernels.reference import run_torch
from egru.kernels.registry import begin, layer_name, warn_plain_torch
from egru.types import Backend, ResetGate

TRANSFORMS = "no kernel supports forward-mode differentiation or torch.func"


def begin_sequence(
    input: Tensor, weight_ih: Tensor, weight_hh: Tensor, reset_gate: ResetGate, precision: str, backend: Backend
) -> object:
    """Start the work that needs only the input and the weights, before the rest of a problem is assembled.

    On a GPU a short sequence takes less time than the host needs to launch it. Starting early keeps the device busy
    meanwhile.

    Args:
        input, weight_ih, weight_hh, reset_gate, precision: As in :class:`Problem`.
        backend: The kernel to use, as in :func:`run_sequence`.

    Returns:
        The value for :attr:`Problem.started`, or None if there is nothing to start.

    Example:
        >>> x, weight_ih, weight_hh = torch.randn(20, 2, 4), torch.randn(24, 4), torch.randn(24, 8)
        >>> started = egru.kernels.begin_sequence(x, weight_ih, weight_hh, "before", "", "auto")  # None on a CPU
    """
    if not input.is_cuda or backend not in ("auto", "cuda") or not is_plain(input):
        return None
    return begin(input, weight_ih, weight_hh, reset_gate, precision)


def run_sequence(problem: Problem, backend: Backend = "auto") -> tuple[Tensor, Tensor, EventState]:
    """Run the sequence operation; differentiable.

    The kernels have first derivatives in reverse mode. Under forward-mode differentiation and the transforms of
    ``torch.func`` the sequence runs in plain torch, and values are not checked.

    Args:
        problem: The arguments.
        backend: The kernel to use. ``"auto"`` takes the fastest one that supports the problem.

    Returns:
        ``(y, c, state)``: the events and the state that the threshold saw, both ``(T, B, H)``, and the carried state.

    Raises:
        ValueError: If ``backend`` does not support the problem or an active transform, or if a value on the CPU is not
            finite.

    Example:
        >>> y, c, state = egru.kernels.run_sequence(problem)  # problem: an egru.kernels.Problem
        >>> y.shape
        torch.Size([20, 2, 8])
    """
    if in_transform():
        return _transform(problem, backend)
    problem, kernel, save = prepare(problem, backend)
    if kernel == "reference" and problem.cell == "lstm":
        return _differentiable_steps(problem)
    if is_plain(problem.input):
        y, c, c_last, y_last = run_eager(problem, kernel, save)
    else:
        y, c, c_last, y_last, _ = sequence(*problem.flatten(), kernel, save)
    return y, c, EventState(c_last, y_last)


def _transform(problem: Problem, backend: Backend) -> tuple[Tensor, Tensor, EventState]:
    if backend not in ("auto", "reference"):
        raise ValueError(
            f"backend={backend!r} does not support forward-mode differentiation or torch.func; use backend='auto'"
        )
    if backend == "auto":
        warn_plain_torch(layer_name(problem), TRANSFORMS)
    with NoAutocast(problem.input.device.type):
        result = run_torch(problem)
    return result.y, result.c, result.state


def _differentiable_steps(problem: Problem) -> tuple[Tensor, Tensor, EventState]:
    """Run a cell without an explicit backward pass, step by step, differentiable by autograd."""
    check_values = is_plain(problem.input) and not torch.compiler.is_compiling()
    with NoAutocast(problem.input.device.type):
        if check_values:
            check_arguments(problem)
        result = run_torch(problem)
        if check_values:
            check_result(result.state.c)
    return result.y, result.c, result.state
