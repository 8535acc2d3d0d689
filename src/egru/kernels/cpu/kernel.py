"""The sequence operation on the compiled core. The amount of work is proportional to the number of events."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from egru import compiled
from egru.kernels.finite import check_arguments, check_result, check_thresholds
from egru.kernels.problem import Backward, Forward, Problem

if TYPE_CHECKING:
    from egru._core import TrainCall

_core: Any = compiled.core

_CHUNK_WORK = {"plain": 2e9, "neon": 5e9, "neon_dot": 5e9, "avx2": 1e10, "avx512": 2e10, "avx512_bf16": 2e10}
"""Multiplications of a dense product over one chunk of steps: a few tenths of a second on one core."""
FORWARD_ROWS = 256
"""Batch rows per forward chunk: enough to reuse a tile of weights, few enough to keep the products in cache."""
BACKWARD_ROWS = 1024
"""Batch rows per backward chunk: every chunk passes over all weight gradients once."""
_LEAN_ROWS = (128, 512)
"""Bounds on the batch rows per backward chunk with ``lean=True``, which takes a sixteenth of all rows."""
_SMALL = 1 << 20
"""Arrays below this number of bytes are allocated by torch."""
_ONE_THREAD = 32768
"""Elements below which torch uses one thread. Threads that torch starts keep spinning and compete with the core's."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes up to which a simpler method is faster, measured with `egru bench cpu small`."""

    direct_forward: int = 16
    """Rows (steps times batch) up to which the forward pass multiplies the weights as torch stores them, densely.
    Above, it packs them first and skips zeros."""
    direct_backward: int = 48
    """The same for the backward pass, which would also have to unpack the weight gradients."""
    one_thread: int = 800_000
    """Multiplications of dense products per call up to which one thread is faster than several."""
    one_thread_weights: int = 150_000
    """The same for the number of weights. More of them do not fit into the cache of one core, together with their
    gradients, and two cores read and write them faster than one."""
    per_thread: int = 120_000
    """Multiplications per step and thread. With fewer, threads wait longer for each other's events than they gain."""
    own_threads: int = 200_000_000
    """The value of ``one_thread`` if the core cannot use torch's threads. After a parallel operation those keep
    spinning for milliseconds, and the core's threads compete with them."""

    zero_blocks: float = 0.65
    """Share of zero blocks (16 outputs of one source) in a weight from which products skip them. 2: never."""

    def one_thread_work(self, weights: int) -> int:
        """Return the number of multiplications up to which one thread is faster, given the number of weights."""
        return self.one_thread if weights <= self.one_thread_weights else 0

    def threads(self, steps: int, batch: int, features: int, hidden: int, gates: int = 3) -> int:
        """Return the number of threads for a call."""
        weights = gates * hidden * (hidden + features)
        work = batch * weights
        if steps * work <= (self.one_thread_work(weights) if _core.shares_threads() else self.own_threads):
            return 1
        return max(1, min(torch.get_num_threads(), -(-hidden // 32), work // self.per_thread, 64))


limits = Limits()


class CPUKernel:
    """Compiled, event-driven kernel for float32 and float64 on the CPU."""

    name = "cpu"
    device: str | None = "cpu"
    options = frozenset({"lean", "cell", "compare", "events"})
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
        core, threads = compiled.core, torch.get_num_threads()
        return (
            f"compiled, event-driven, float32 and float64 on the CPU; SIMD level {core.level()} (available: "
            f"{', '.join(core.levels())}); {threads} {'thread' if threads == 1 else 'threads'}; compiler version "
            f"{core.compiler()}"
        )

    def reserve_shape(self, problem: Problem) -> tuple[int, ...]:
        T, B, _ = problem.input.shape
        H = problem.c0.shape[-1]
        gates = 0 if problem.lean else 3 if problem.cell == "gru" and problem.reset_gate == "before" else 4
        cells = 1 if problem.compare == "output" else 0  # gates of all steps, then memory cells of all steps
        return (gates + cells, T, -(-H // 32), B, 32) if gates + cells else (0,)

    def forward(self, problem: Problem, save: bool) -> Forward:
        problem = problem.rounded()
        T, B, _ = problem.input.shape
        c0, y0 = problem.c0, problem.y0
        shape, dtype = (T, B, c0.shape[1]), c0.dtype
        call = _Call(problem, FORWARD_ROWS, limits.direct_forward)
        # The final state of a sequence of length zero is the initial one.
        c_last = torch.empty(B, c0.shape[1], dtype=dtype) if problem.lengths is None else _copy(c0)
        y_last = torch.empty_like(c_last) if problem.lengths is None else _copy(y0)
        y, c = empty(shape, dtype), empty(shape, dtype)
        reserve = empty(self.reserve_shape(problem), dtype) if save else torch.empty(0, dtype=dtype)
        result = Forward(y, c, c_last, y_last, reserve)
        raw = call.raw
        raw.y, raw.c, raw.c_last, raw.y_last = y.data_ptr(), c.data_ptr(), c_last.data_ptr(), y_last.data_ptr()
        call.set_reserve(problem, reserve)
        check_thresholds(problem.theta, problem.events)
        if _core.train_forward(raw):  # something is not finite
            check_arguments(problem)
            check_result(result.c_last)
        if problem.lean:
            _core.release_memory()
        return result

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
        problem = problem.rounded()
        T, B, _ = problem.input.shape
        fewest, most = _LEAN_ROWS
        rows = min(most, max(fewest, T * B // 16)) if problem.lean else BACKWARD_ROWS
        call = _Call(problem, rows, limits.direct_backward)
        theta = problem.theta
        dtype, gates = theta.dtype, problem.weight_hh.shape[0]
        gradients = Backward(
            input=empty(tuple(problem.input.shape), dtype) if input_gradient else None,
            c0=torch.empty(problem.c0.shape, dtype=dtype) if state_gradient else None,
            y0=torch.empty(problem.y0.shape, dtype=dtype) if state_gradient else None,
            weight_ih=empty(tuple(problem.weight_ih.shape), dtype),
            weight_hh=empty(tuple(problem.weight_hh.shape), dtype),
            bias_ih=torch.empty(gates, dtype=dtype),
            bias_hh=torch.empty(gates, dtype=dtype),
            theta=torch.empty(theta.shape, dtype=dtype),
        )
        raw = call.raw
        raw.y, raw.c = 0 if y is None else y.data_ptr(), c.data_ptr()
        call.set_reserve(problem, reserve)
        raw.grad_c_last, raw.grad_y_last = call.address(grad_c_last), call.address(grad_y_last)
        if grad_y is not None:
            raw.grad_y, raw.grad_y_t, raw.grad_y_b = call.address_and_strides(grad_y)
        if grad_c is not None:
            raw.grad_c, raw.grad_c_t, raw.grad_c_b = call.address_and_strides(grad_c)
        for name, gradient in zip(_GRADIENTS, gradients, strict=True):
            if gradient is not None:
                setattr(raw, name, gradient.data_ptr())
        _core.train_backward(raw)
        if problem.lean:
            _core.release_memory()
        return gradients


_GRADIENTS = tuple(f"grad_{name}" for name in Backward._fields)


def _copy(state: Tensor) -> Tensor:
    return (
        state.detach().clone(memory_format=torch.contiguous_format)
        if state.numel() < _ONE_THREAD
        else _as_tensor(state.detach().numpy().copy(order="C"))
    )


def _as_tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return ``torch.empty`` in memory that the core caches between calls, which avoids mapping and clearing pages."""
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALL:
        return torch.empty(*shape, dtype=dtype)  # faster than with a tuple
    memory = _as_tensor(_core.allocate(size))
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # pyright: ignore
        memory.fill_(255)  # NaN, which torch.empty is filled with too
    return memory.view(dtype).view(shape)


def set_work(call: "TrainCall", rows: int, direct_rows: int) -> None:
    """Choose the chunks, the products and the threads of a call whose sizes are set."""
    T, B, features, H = call.T, call.B, call.I, call.H
    gates = 4 if call.lstm else 3
    weights = gates * H * (H + features)
    one_thread = limits.one_thread_work(weights)
    threads = 1 if T * B * weights <= one_thread else limits.threads(T, B, features, H, gates)
    work = _CHUNK_WORK[_core.level()]
    call.set_work(rows, work, direct_rows, limits.direct_forward, one_thread, threads)
    call.zero_blocks = limits.zero_blocks


class _Call:
    """Builds a ``TrainCall`` of the core and keeps the tensors alive whose addresses it contains.

    A call runs in chunks of steps: interrupts are handled between chunks, and buffers are sized for one chunk.
    """

    def __init__(self, problem: Problem, rows: int, direct_rows: int) -> None:
        T, B, features = problem.input.shape
        H = problem.c0.shape[1]
        self._alive: list[Tensor] = []
        self.raw: TrainCall = _core.TrainCall()
        raw = self.raw
        raw.T, raw.B, raw.I, raw.H = T, B, features, H
        raw.float64 = problem.c0.dtype == torch.float64
        raw.lstm, raw.compare_output = problem.cell == "lstm", problem.compare == "output"
        set_work(raw, rows, direct_rows)
        raw.after = not raw.lstm and problem.reset_gate == "after"
        raw.events, raw.reset = problem.events, problem.reset
        raw.bounded = problem.surrogate.bounded
        raw.width, raw.height = problem.surrogate.width, problem.surrogate.height
        if problem.reset_scale.dim():
            scale = problem.reset_scale.to(problem.c0.dtype).expand(H)
            self._alive.append(scale)
            raw.rho_units = self.address(scale)
        else:
            raw.rho = float(problem.reset_scale)
        arguments = problem.tensors()[: len(_GRADIENTS)]
        if not raw.set_arguments(*arguments):
            self._set_copies(problem)
        raw.lengths = self.address(problem.lengths)
        if problem.keep is not None:
            keep = problem.keep.to(problem.c0.dtype).expand(T, B, H)
            if keep.stride(2) not in (0, 1):
                keep = keep.contiguous()
            self._alive.append(keep)
            raw.keep = keep.data_ptr()
            raw.keep_t, raw.keep_b, raw.keep_h = keep.stride()

    def _set_copies(self, problem: Problem) -> None:
        """Set the addresses of the arguments, of copies where one is not contiguous."""
        raw = self.raw
        raw.c0, raw.y0 = self.address(problem.c0), self.address(problem.y0)
        raw.c0_b = raw.y0_b = raw.H
        raw.weight_ih, raw.weight_hh = self.address(problem.weight_ih), self.address(problem.weight_hh)
        raw.bias_ih, raw.bias_hh = self.address(problem.bias_ih), self.address(problem.bias_hh)
        raw.theta = self.address(problem.theta)
        raw.input, raw.input_t, raw.input_b = self.address_and_strides(problem.input)

    def set_reserve(self, problem: Problem, reserve: Tensor) -> None:
        """Set the addresses of what the forward pass saves."""
        if not reserve.numel():
            return
        if problem.compare == "output":
            self.raw.cells = reserve[-1].data_ptr()
        if not problem.lean:
            self.raw.gates = reserve.data_ptr()

    def address(self, x: Tensor | None) -> int:
        """Return the address of the values in row-major order, or 0 for None."""
        if x is None:
            return 0
        if not x.is_contiguous():
            x = _copy(x)
            self._alive.append(x)
        return x.data_ptr()

    def address_and_strides(self, x: Tensor) -> tuple[int, int, int]:
        """Return the address of a ``(T, B, width)`` tensor and its first two strides; the last one becomes 1."""
        if x.stride(2) != 1:
            x = x.contiguous()
            self._alive.append(x)
        return x.data_ptr(), x.stride(0), x.stride(1)
