"""Host side of the persistent kernels: build one for a plan, hand it its tensors, do the large products around it."""

import ctypes
import dataclasses
import functools

import torch
from torch import Tensor

from egru.events import RESETS
from egru.kernels.cuda import arrange, driver, products
from egru.kernels.cuda.plan import Chip, Layout, Plan, candidates, ceil_to
from egru.kernels.cuda.stepwise import Keep, keep_argument, on_device, pointer, ready, reserve_shape
from egru.kernels.problem import Backward, Forward, Problem

THREADS = 384

_P, _I = ctypes.c_void_p, ctypes.c_int


class _ForwardArgs(ctypes.Structure):  # struct Args of forward.cu
    _fields_ = [
        *[(n, _P) for n in ("projected", "input", "weight_ih", "weights", "bias_ih", "bias_hh", "theta", "rho")],
        *[(n, _P) for n in ("c0", "y0")],
        ("keep", Keep),
        *[(n, _P) for n in ("lengths", "exchange", "counter", "y", "c", "c_last", "y_last", "reserve", "error")],
        *[(n, _I) for n in ("T", "B", "b0")],
    ]  # fmt: skip


class _BackwardArgs(ctypes.Structure):  # struct Args of backward.cu
    _fields_ = [
        *[(n, _P) for n in ("c", "c0", "y0", "reserve", "grad_y", "grad_c", "grad_c_last", "grad_y_last", "input")],
        *[(n, _P) for n in ("weights", "theta", "rho")],
        ("keep", Keep),
        *[(n, _P) for n in ("lengths", "exchange", "counter", "gates", "source", "source_z", "dc0", "dy0")],
        *[(n, _P) for n in ("sums", "error")],
        *[(n, ctypes.c_float) for n in ("inverse_width", "height")],
        *[(n, _I) for n in ("bounded", "T", "B", "b0", "group0")],
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for, besides its plan."""

    direction: str  # "forward" or "backward"
    reset: str
    reset_gate: str
    precision: str
    inline: bool  # the input has one feature: no projected input, p = x*w in the kernel
    keep: bool = False
    ragged: bool = False
    grad_y: bool = False
    grad_c: bool = False
    grad_input: bool = False  # a_z itself will be read


def wgmma_overload(columns: int, low: str) -> str:
    """``wgmma(acc, a, b)`` for a 64 x ``columns`` product: inline assembly needs every register by name."""
    n = columns // 2
    kind = "f16" if low == "float16" else "bf16"
    registers = ", ".join(f"%{i}" for i in range(n))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(n))
    return (
        f"__device__ __forceinline__ void wgmma(float (&d)[{n}], u64 a, u64 b) {{\n"
        f'  asm volatile("{{.reg .pred p; setp.eq.u32 p, 1, 1; "\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "\n'
        f'    "{{{registers}}}, %{n}, %{n + 1}, p, 1, 1, 0, 0;}}" : {outputs} : "l"(a), "l"(b));\n}}\n'
    )


def kernel_source(plan: Plan, variant: Variant) -> str:
    """CUDA C++ of one kernel: sizes as constants, then the source files."""
    after = variant.reset_gate == "after"
    shape: Layout = plan.forward if variant.direction == "forward" else plan.backward
    columns = plan.tiles * 8
    if variant.direction == "backward":
        widths = [columns]
    else:
        widths = [3 * columns] if after else [2 * columns, columns]
    sizes = {
        "H": plan.units, "HP": plan.padded, "KT": plan.k_tiles, "UT": plan.tiles, "CPG": plan.blocks, "R": plan.rows,
        "CL": plan.cluster, "KS": shape.piece, "RING": shape.slots, "ALIAS": int(shape.alias),
        "SCRATCH": max(widths) // 8 * 2048, "RESET": RESETS.index(variant.reset), "AFTER": int(after),
        "LOW_F16": int(variant.precision == "float16"), "INLINE": int(variant.inline),
        **{n.upper(): int(getattr(variant, n)) for n in ("keep", "ragged", "grad_y", "grad_c", "grad_input")},
    }  # fmt: skip
    texts = [f"#define {name} {value}\n" for name, value in sizes.items()]
    texts += [(driver.SOURCE / name).read_text() for name in ("element.cuh", "sm90.cuh")]
    texts += [wgmma_overload(width, variant.precision) for width in widths]
    texts += [(driver.SOURCE / name).read_text() for name in ("group.cuh", f"{variant.direction}.cu")]
    return "".join(texts)


@functools.cache
def _function(plan: Plan, variant: Variant, device: int) -> driver.Function:
    code = driver.compile_source(kernel_source(plan, variant), ["--gpu-architecture=sm_90a", "--std=c++17"])
    shape = plan.forward if variant.direction == "forward" else plan.backward
    return driver.Function(
        code, variant.direction, block=THREADS, shared=shape.bytes, cluster=plan.cluster, cooperative=True
    )


@functools.cache
def _chip(device: int) -> Chip:
    properties = torch.cuda.get_device_properties(device)
    return Chip(properties.multi_processor_count, properties.shared_memory_per_block_optin)


@functools.cache
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def _plan(units: int, batch: int, reset_gate: str, device: int) -> Plan | None:
    """The cheapest plan whose blocks the device really takes at once."""
    for plan in candidates(units, batch, _chip(device), reset_gate):
        if plan.cluster == 1:  # a block a multiprocessor
            return plan
        probe = _function(plan, Variant("forward", "output", reset_gate, "bfloat16", False), device)
        if probe.resident_blocks() >= plan.grid:
            return plan
    return None


def find_plan(problem: Problem) -> Plan | None:
    """The plan for ``problem`` on its device, or None where no persistent kernel can run it."""
    index = problem.input.device.index
    if problem.precision == "" or not _is_hopper(index):
        return None
    return _plan(problem.theta.shape[0], problem.input.shape[1], problem.reset_gate, index)


# ---- a bounded wait that ran out ----------------------------------------------------------------------------------


@functools.cache
def _error_flag() -> Tensor:
    # Pinned host memory: the kernel writes to it only in failure, the host reads it without synchronising.
    return torch.zeros(1, dtype=torch.int32, pin_memory=True)


@functools.cache
def _error_word() -> ctypes.c_int:
    return ctypes.c_int.from_address(_error_flag().data_ptr())  # a tensor would take microseconds to read


def raise_if_stalled() -> None:
    """Report a kernel that gave up waiting for its group: at the next call, since launches do not synchronise."""
    if _error_word().value != 0:
        _error_word().value = 0
        raise RuntimeError(
            "an earlier egru CUDA kernel stopped: its blocks waited more than two seconds for each other. "
            "Its results are invalid. backend='reference' avoids these kernels."
        )


# ---- forward and backward -----------------------------------------------------------------------------------------


def _workspace(plan: Plan, k_tiles: int, shape: Layout) -> tuple[int, int]:
    """Bytes of the exchange of one wave, and of exchange and barrier counters together."""
    exchange = 2 * plan.groups * ceil_to(k_tiles, shape.piece) * 32 * plan.rows
    return exchange, exchange + plan.groups * 128


def _inline(problem: Problem) -> bool:
    return problem.input.shape[2] == 1


def _variant(direction: str, problem: Problem, **options: bool) -> Variant:
    kind = (problem.reset, problem.reset_gate, problem.precision, _inline(problem))
    return Variant(direction, *kind, problem.keep is not None, problem.lengths is not None, **options)


def forward(problem: Problem, plan: Plan, save: bool) -> Forward:
    raise_if_stalled()
    T, B, _ = problem.input.shape
    H, low = plan.units, products.operand_type(problem)
    device = problem.input.device
    with on_device(device.index):
        inline = _inline(problem)
        input, weight_ih, weight_hh = ready(problem.input, problem.weight_ih, problem.weight_hh)
        assert input is not None
        assert weight_ih is not None
        assert weight_hh is not None
        exchange, wave_bytes = _workspace(plan, plan.k_tiles, plan.forward)
        prepared = arrange.prepare(
            plan, problem.reset_gate, "forward", low, weight_hh, None if inline else input,
            None if inline else weight_ih, plan.waves * wave_bytes,
        )  # fmt: skip
        projected = None
        if prepared.input is not None and prepared.weight_ih is not None:
            projected = products.product(prepared.input, prepared.weight_ih.T)
        y, c = input.new_empty((T, B, H)), input.new_empty((T, B, H))
        c_last, y_last = input.new_empty((B, H)), input.new_empty((B, H))
        reserve = input.new_empty(reserve_shape(problem) if save else (0,))
        keep, keep_alive = keep_argument(problem)
        held = ready(weight_ih, problem.bias_ih, problem.bias_hh, problem.theta, problem.reset_scale)
        held += ready(problem.c0, problem.y0)
        (lengths,) = ready(problem.lengths)
        function = _function(plan, _variant("forward", problem), device.index)
        for wave in range(plan.waves):
            start = prepared.workspace + wave * wave_bytes
            args = _ForwardArgs(
                pointer(projected), input.data_ptr(), pointer(held[0]), prepared.weights.data_ptr(),
                *[pointer(t) for t in held[1:]], keep, pointer(lengths), start, start + exchange,
                y.data_ptr(), c.data_ptr(), c_last.data_ptr(), y_last.data_ptr(), reserve.data_ptr() if save else None,
                _error_flag().data_ptr(), T, B, wave * plan.groups * plan.rows,
            )  # fmt: skip
            function(plan.grid, args)
        del keep_alive
    return Forward(y, c, c_last, y_last, reserve)


def backward(
    problem: Problem,
    plan: Plan,
    c: Tensor,
    reserve: Tensor,
    grad_y: Tensor | None,
    grad_c: Tensor | None,
    grad_c_last: Tensor | None,
    grad_y_last: Tensor | None,
    input_gradient: bool,
) -> Backward:
    raise_if_stalled()
    T, B, inputs = problem.input.shape
    H, HP, low = plan.units, plan.padded, products.operand_type(problem)
    device = problem.input.device
    after = problem.reset_gate == "after"
    with on_device(device.index):
        inline = _inline(problem)
        input, weight_ih, weight_hh = ready(problem.input, problem.weight_ih, problem.weight_hh)
        assert input is not None
        assert weight_ih is not None
        assert weight_hh is not None
        exchange, wave_bytes = _workspace(plan, (3 if after else 2) * plan.k_tiles, plan.backward)
        prepared = arrange.prepare(
            plan, problem.reset_gate, "backward", low, weight_hh, None if inline else input,
            weight_ih if input_gradient else None, plan.waves * wave_bytes,
        )  # fmt: skip
        gates = torch.empty(T * B, 4 * HP, dtype=low, device=device)
        source = torch.empty(T * B, HP + 8, dtype=low, device=device)
        source_z = source if after else torch.empty(T * B, HP, dtype=low, device=device)
        dc0, dy0 = input.new_empty((B, H)), input.new_empty((B, H))
        sums = input.new_empty((plan.waves * plan.groups * 8, 3 if inline else 2, HP))
        keep, keep_alive = keep_argument(problem)
        held = ready(c, problem.c0, problem.y0, reserve, grad_y, grad_c, grad_c_last, grad_y_last, input)
        constants = ready(problem.theta, problem.reset_scale)
        (lengths,) = ready(problem.lengths)
        surrogate = problem.surrogate
        grads = {"grad_y": grad_y is not None, "grad_c": grad_c is not None}
        variant = _variant("backward", problem, **grads, grad_input=input_gradient or not inline)
        function = _function(plan, variant, device.index)
        for wave in range(plan.waves):
            start = prepared.workspace + wave * wave_bytes
            args = _BackwardArgs(
                *[pointer(t) for t in held], prepared.weights.data_ptr(), *[pointer(t) for t in constants],
                keep, pointer(lengths), start, start + exchange,
                gates.data_ptr(), source.data_ptr(), source_z.data_ptr(), dc0.data_ptr(), dy0.data_ptr(),
                sums.data_ptr(), _error_flag().data_ptr(),
                1 / surrogate.width, surrogate.height, int(surrogate.bounded),
                T, B, wave * plan.groups * plan.rows, wave * plan.groups,
            )  # fmt: skip
            function(plan.grid, args)
        del keep_alive

        hh_z = None
        if after:
            hh = products.product(gates[:, : 3 * HP].T, source)
        else:
            hh = products.product(gates[:, HP : 3 * HP].T, source)
            hh_z = products.product(gates[:, :HP].T, source_z)
        ih = grad_input = None
        if prepared.input is not None:
            ih = products.product(gates[:, HP:].T, prepared.input)
        if prepared.weight_ih is not None:
            grad_input = products.product(gates[:, HP:], prepared.weight_ih)
            grad_input = grad_input[:, :inputs].reshape(T, B, inputs)
        return Backward(grad_input, dc0, dy0, *arrange.gather(problem, low, hh, hh_z, ih, sums))
