"""The sequence operation on the compiled core. The amount of work is proportional to the number of events."""

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from egru import compiled
from egru.kernels.finite import check_finite
from egru.kernels.problem import Backward, Forward, Problem

if TYPE_CHECKING:
    from egru._core import TrainCall

_CHUNK_WORK = {"plain": 2e9, "avx2": 1e10, "avx512": 2e10, "avx512_bf16": 2e10}
"""Multiplications of a dense product over one chunk of steps: a few tenths of a second on one core."""
_FORWARD_ROWS = 256
"""Batch rows per forward chunk: enough to reuse a tile of weights, few enough to keep the products in cache."""
_BACKWARD_ROWS = 1024
"""Batch rows per backward chunk: every chunk passes over all weight gradients once."""
_LEAN_ROWS = (128, 512)
"""Bounds on the batch rows per backward chunk with ``lean=True``, which takes a sixteenth of all rows."""
_SLOW_CHUNK = 0.2
"""Seconds that a forward chunk should not exceed, because interrupts are handled between chunks."""
_SMALL = 1 << 20
"""Arrays below this number of bytes are allocated by torch."""


class CPUKernel:
    """Compiled, event-driven kernel for float32 and float64 on the CPU."""

    name = "cpu"
    device: str | None = "cpu"
    options = frozenset({"lean"})
    reads_y = True

    def unsupported(self, problem: Problem) -> str | None:
        dtype = problem.weight_hh.dtype
        same_type = True
        for x in (problem.input, problem.c0, problem.y0, problem.weight_ih, problem.weight_hh, problem.theta):
            if not x.is_cpu:
                return f"it requires CPU tensors, got one on {x.device}"
            same_type = same_type and x.dtype is dtype
        if compiled.core is None:
            compiled.warn_missing()
            return compiled.missing
        if dtype not in (torch.float32, torch.float64):
            return f"it requires float32 or float64, got {dtype}"
        if not same_type:
            return "it requires input, state, weights and thresholds of one type"
        if problem.surrogate.shape != "triangle":
            return f"it supports the triangle surrogate only, got {problem.surrogate.shape!r}"
        if 0 in problem.input.shape:
            return f"it requires at least one step, row and feature, got an input of shape {tuple(problem.input.shape)}"
        return None

    def describe(self) -> str:
        if compiled.core is None:
            return f"not available: {compiled.missing}"
        core = compiled.core
        return (
            f"compiled, event-driven, float32 and float64 on the CPU; SIMD level {core.level()} (available: "
            f"{', '.join(core.levels())}); {torch.get_num_threads()} threads; compiler version {core.compiler()}"
        )

    def reserve_shape(self, problem: Problem) -> tuple[int, ...]:
        if problem.lean:
            return (0,)
        T, B, _ = problem.input.shape
        H = problem.c0.shape[-1]
        return (T, -(-H // 32), 4 if problem.reset_gate == "after" else 3, B, 32)

    def forward(self, problem: Problem, save: bool) -> Forward:
        core = compiled.require()
        T, B, _ = problem.input.shape
        H = problem.c0.shape[-1]
        problem = problem.rounded()
        call = _Call(problem, _FORWARD_ROWS)
        dtype = problem.c0.dtype
        y, c = _empty((T, B, H), dtype), _empty((T, B, H), dtype)
        c_last, y_last = _copy(problem.c0), _copy(problem.y0)  # the final state of a sequence of length zero
        reserve = _empty(self.reserve_shape(problem) if save else (0,), dtype)
        call.set(y=y, c=c, c_last=c_last, y_last=y_last, gates=reserve)
        call.allocate_workspace(core.train_forward_workspace)
        if not core.train_forward_begin(call.raw):
            check_finite({"weight_ih": problem.weight_ih, "weight_hh": problem.weight_hh})
        first, steps = 0, max(1, call.raw.chunk // 4)
        while first < T:
            start = time.perf_counter()
            call.set_steps(first, steps)
            core.train_forward_chunk(call.raw)
            first += steps
            # Results do not depend on the length of the chunks. On a busy machine they become shorter.
            slow = time.perf_counter() - start > _SLOW_CHUNK
            steps = max(1, steps // 2) if slow else min(call.raw.chunk, 2 * steps)
        if problem.lean:
            del call
            core.release_memory()
        return Forward(y, c, c_last, y_last, reserve)

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
        core = compiled.require()
        T, B, _ = problem.input.shape
        problem = problem.rounded()
        fewest, most = _LEAN_ROWS
        call = _Call(problem, min(most, max(fewest, T * B // 16)) if problem.lean else _BACKWARD_ROWS)
        theta = problem.theta
        dtype, gates = theta.dtype, problem.weight_hh.shape[0]
        # The core reads the gradients of the final state from c0 and y0 and overwrites them.
        gradients = Backward(
            input=_empty(tuple(problem.input.shape), dtype) if input_gradient else None,
            c0=_zeros(problem.c0) if grad_c_last is None else _copy(grad_c_last),
            y0=_zeros(problem.y0) if grad_y_last is None else _copy(grad_y_last),
            weight_ih=_empty(tuple(problem.weight_ih.shape), dtype),
            weight_hh=_empty(tuple(problem.weight_hh.shape), dtype),
            bias_ih=theta.new_empty(gates),
            bias_hh=theta.new_empty(gates),
            theta=theta.new_empty(theta.shape),
        )
        call.set(y=y, c=c, gates=reserve)
        call.set_strided(grad_y=grad_y, grad_c=grad_c)
        call.set(**{f"grad_{name}": gradient for name, gradient in gradients._asdict().items()})
        call.allocate_workspace(core.train_backward_workspace)
        core.train_backward_begin(call.raw)
        for first in reversed(range(0, T, call.raw.chunk)):
            call.set_steps(first, call.raw.chunk)
            core.train_backward_chunk(call.raw)
        core.train_backward_finish(call.raw)
        if problem.lean:
            del call
            core.release_memory()
        return gradients


# NumPy copies and clears states: threads that torch would start for this keep spinning and compete with the core's.


def _from_numpy(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def _copy(state: Tensor) -> Tensor:
    return _from_numpy(state.detach().numpy().copy(order="C"))


def _zeros(state: Tensor) -> Tensor:
    return _from_numpy(np.zeros_like(state.detach().numpy(), order="C"))


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return ``torch.empty`` in memory that the core caches between calls, which avoids mapping and clearing pages."""
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALL:
        return torch.empty(shape, dtype=dtype)
    memory = _from_numpy(compiled.require().allocate(size))
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # pyright: ignore
        memory.fill_(255)  # NaN, which torch.empty is filled with too
    return memory.view(dtype).view(shape)


class _Call:
    """Builds a ``TrainCall`` of the core and keeps the tensors alive whose addresses it contains.

    A call runs in chunks of steps: interrupts are handled between chunks, and buffers are sized for one chunk.
    """

    def __init__(self, problem: Problem, rows: int) -> None:
        core = compiled.require()
        T, B, features = problem.input.shape
        H = problem.c0.shape[-1]
        self._alive: list[Tensor] = []
        self.raw: TrainCall = core.TrainCall()
        raw = self.raw
        raw.T, raw.B, raw.I, raw.H = T, B, features, H
        rows = min(rows, int(_CHUNK_WORK[core.level()] / (3 * H * (H + features))))
        raw.chunk = min(T, max(1, rows // max(B, 1)))
        raw.threads = min(torch.get_num_threads(), -(-H // 32), 64)
        raw.float64 = problem.c0.dtype == torch.float64
        raw.after = problem.reset_gate == "after"
        raw.reset = problem.reset
        raw.bounded = problem.surrogate.bounded
        raw.width, raw.height = problem.surrogate.width, problem.surrogate.height
        if problem.reset_scale.dim():
            self.set(rho_units=problem.reset_scale.to(problem.c0.dtype).expand(H).contiguous())
        else:
            raw.rho = float(problem.reset_scale)
        for name in ("c0", "y0"):
            state: Tensor = getattr(problem, name)
            self.set(**{name: state if state.is_contiguous() else _copy(state)})
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "theta", "lengths"):
            value: Tensor | None = getattr(problem, name)
            self.set(**{name: None if value is None else value.contiguous()})
        self.set_strided(input=problem.input)
        if problem.keep is not None:
            keep = problem.keep.to(problem.c0.dtype).expand(T, B, H)
            if keep.stride(2) not in (0, 1):
                keep = keep.contiguous()
            self.set(keep=keep)
            raw.keep_t, raw.keep_b, raw.keep_h = keep.stride()

    def set(self, **tensors: Tensor | None) -> None:
        """Set the addresses of tensors; the address of an absent or empty one is 0."""
        for name, value in tensors.items():
            if value is not None:
                self._alive.append(value)
            setattr(self.raw, name, 0 if value is None or value.numel() == 0 else value.data_ptr())

    def set_strided(self, **tensors: Tensor | None) -> None:
        """Set the addresses and strides of ``(T, B, width)`` tensors. Only the last dimension must be contiguous."""
        for name, value in tensors.items():
            if value is None:
                continue
            if value.stride(2) != 1:
                value = value.contiguous()
            self.set(**{name: value})
            setattr(self.raw, name + "_t", value.stride(0))
            setattr(self.raw, name + "_b", value.stride(1))

    def allocate_workspace(self, size: "Callable[[TrainCall], int]") -> None:
        self.set(workspace=_empty((size(self.raw),), torch.uint8))

    def set_steps(self, first: int, count: int) -> None:
        self.raw.first, self.raw.last = first, min(first + count, self.raw.T)
