"""Host side of the persistent kernels: build one for a plan, hand it its tensors, do the large products around it."""

import dataclasses
import functools
import struct

import torch
from torch import Tensor

from egru.kernels.cuda import arrange, driver, products
from egru.kernels.cuda.device import chip, error_address, is_hopper, raise_if_stalled
from egru.kernels.cuda.plan import Layout, Plan, ceil_to, choose_plan
from egru.kernels.cuda.stepwise import (
    PRECISIONS,
    SHARED_SOURCE,
    address,
    aligned,
    keep_argument,
    reserve_shape,
    start_state,
)
from egru.kernels.problem import Backward, Forward, Problem
from egru.types import RESETS

THREADS = 384

FORWARD_ARGS = struct.Struct("10P P3q 9P 4i")  # struct Args of forward.cu and of few.cu
_BACKWARD_ARGS = struct.Struct("12P P3q 10P 2f 6i")  # struct Args of backward.cu


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
        "KS": shape.piece, "RING": shape.slots, "ALIAS": int(shape.alias),
        "SCRATCH": max(widths) // 8 * 2048, "RESET": RESETS.index(variant.reset), "AFTER": int(after),
        "LOW": PRECISIONS.index(variant.precision), "INLINE": int(variant.inline),
        **{n.upper(): int(getattr(variant, n)) for n in ("keep", "ragged", "grad_y", "grad_c", "grad_input")},
    }  # fmt: skip
    texts = [f"#define {name} {value}\n" for name, value in sizes.items()]
    texts += [(driver.SOURCE / name).read_text() for name in (*SHARED_SOURCE, "sm90.cuh")]
    texts += [wgmma_overload(width, variant.precision) for width in widths]
    texts += [(driver.SOURCE / name).read_text() for name in ("group.cuh", f"{variant.direction}.cu")]
    return "".join(texts)


@functools.cache
def _function(plan: Plan, variant: Variant, device: int) -> driver.Function:
    code = driver.compile_source(kernel_source(plan, variant), ["--gpu-architecture=sm_90a", "--std=c++17"])
    shape = plan.forward if variant.direction == "forward" else plan.backward
    return driver.Function(code, variant.direction, block=THREADS, shared=shape.bytes, cooperative=True)


@functools.cache
def _plan(units: int, batch: int, reset_gate: str, device: int) -> Plan | None:
    return choose_plan(units, batch, chip(device), reset_gate) if is_hopper(device) else None


def find_plan(input: Tensor, units: int, reset_gate: str, precision: str) -> Plan | None:
    """The plan for a sequence on its device, or None where no persistent kernel can run it."""
    return _plan(units, input.shape[1], reset_gate, input.device.index) if precision else None


@dataclasses.dataclass(frozen=True)
class _Call:
    """All of a call that its tensors' values and the number of steps do not change, found in one look-up."""

    function: driver.Function
    space: "_Space"


@dataclasses.dataclass(frozen=True)
class _Space:
    """The memory that a kernel finds arranged, and how it is divided."""

    prepare: arrange.Prepare
    exchange: int  # bytes of the exchange of one wave
    wave: int  # and of its exchange and barrier counters together
    sums: int  # offset, from the workspace, of what the backward recursion sums up


@functools.cache
def _space(units: int, batch: int, inputs: int, reset_gate: str, precision: str, direction: str, device: int) -> _Space:
    plan = _plan(units, batch, reset_gate, device)
    assert plan is not None
    forward = direction == "forward"
    tiles = plan.k_tiles * (1 if forward else 3 if reset_gate == "after" else 2)
    piece = plan.forward.piece if forward else plan.backward.piece
    exchange = 2 * plan.groups * ceil_to(tiles, piece) * 32 * plan.rows
    wave = exchange + plan.groups * 128
    sums = 0 if forward else plan.waves * plan.groups * 8 * (3 if inputs == 1 else 2) * plan.padded * 4
    prepare = arrange.Prepare(
        products.OPERANDS[precision], device, units, inputs, plan.waves * wave, sums, plan, reset_gate, direction
    )
    return _Space(prepare, exchange, wave, plan.waves * wave)


@functools.cache
def _call(
    direction: str,
    units: int,
    batch: int,
    inputs: int,
    reset: str,
    reset_gate: str,
    precision: str,
    keep: bool,
    ragged: bool,
    device: int,
    grad_y: bool = False,
    grad_c: bool = False,
    grad_input: bool = False,
) -> _Call:
    plan = _plan(units, batch, reset_gate, device)
    assert plan is not None
    variant = Variant(direction, reset, reset_gate, precision, inputs == 1, keep, ragged, grad_y, grad_c, grad_input)
    space = _space(units, batch, inputs, reset_gate, precision, direction, device)
    return _Call(_function(plan, variant, device), space)


def _key(problem: Problem) -> tuple[int, int, int, str, str, str, bool, bool, int]:
    _, batch, inputs = problem.input.shape
    return (
        problem.theta.shape[0], batch, inputs, problem.reset, problem.reset_gate, problem.precision,
        problem.keep is not None, problem.lengths is not None, problem.input.device.index,
    )  # fmt: skip


def begin(
    plan: Plan, input: Tensor, weight_ih: Tensor, weight_hh: Tensor, reset_gate: str, precision: str
) -> arrange.Started:
    """What a forward pass does before its kernel."""
    raise_if_stalled()
    _, batch, inputs = input.shape
    prepare = _space(plan.units, batch, inputs, reset_gate, precision, "forward", input.device.index).prepare
    operands = (None, None) if inputs == 1 else (aligned(input), aligned(weight_ih))
    buffer, workspace, operand, weight = prepare(aligned(weight_hh), *operands)
    projected = None if operand is None or weight is None else products.product(operand, weight)
    return arrange.Started(plan, buffer, workspace, operand, projected)


def forward(problem: Problem, plan: Plan, started: arrange.Started, save: bool) -> Forward:
    # Until the launch, as little as possible: the device may be waiting.
    T, B, _ = problem.input.shape
    call = _call("forward", *_key(problem))
    held: list[Tensor] = []
    c0, y0, stride = start_state(problem)
    y = problem.input.new_empty((T, B, plan.units))
    c, c_last = torch.empty_like(y), y.new_empty((B, plan.units))
    y_last = torch.empty_like(c_last)
    reserve = y.new_empty(reserve_shape(problem) if save else (0,))
    projected = started.projected
    if projected is None:
        inputs = 0, address(problem.input, held), address(problem.weight_ih, held)
    else:
        inputs = projected.data_ptr(), 0, 0
    head = (
        *inputs, started.buffer.data_ptr(), address(problem.bias_ih, held), address(problem.bias_hh, held),
        address(problem.theta, held), address(problem.reset_scale, held), c0.data_ptr(), y0.data_ptr(),
        *keep_argument(problem, held), address(problem.lengths, held),
    )  # fmt: skip
    tail = (
        y.data_ptr(), c.data_ptr(), c_last.data_ptr(), y_last.data_ptr(), reserve.data_ptr() if save else 0,
        error_address(), T, B,
    )  # fmt: skip
    for wave in range(plan.waves):
        start = started.workspace + wave * call.space.wave
        first = wave * plan.groups * plan.rows
        call.function(plan.grid, FORWARD_ARGS.pack(*head, start, start + call.space.exchange, *tail, first, stride))
    kept = arrange.unpadded(started.input, problem.input.shape) if save and started.input is not None else None
    return Forward(y, c, c_last, y_last, reserve, kept)


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
    HP, low = plan.padded, products.OPERANDS[problem.precision]
    inline, after = inputs == 1, problem.reset_gate == "after"
    call = _call(
        "backward", *_key(problem), grad_y is not None, grad_c is not None, grad_input=input_gradient or not inline
    )
    operand = arrange.repadded(problem.input, low)  # what the forward pass left, or None
    buffer, workspace, padded, weight_ih = call.space.prepare(
        aligned(problem.weight_hh), None if inline or operand is not None else aligned(problem.input),
        aligned(problem.weight_ih) if input_gradient else None,
    )  # fmt: skip
    operand = padded if operand is None else operand
    held: list[Tensor] = []
    c0, y0, stride = start_state(problem)
    # One allocation, cut up once the kernel is on its way: gates, what multiplied V_r and V_u, what multiplied V_z.
    rows = T * B
    at_source, at_source_z = rows * 4 * HP, rows * (5 * HP + 8)
    wide = c.new_empty((at_source_z + (0 if after else rows * HP),), dtype=low)
    gates, dc0 = wide.data_ptr(), c.new_empty((B, plan.units))
    dy0 = torch.empty_like(dc0)
    sums = workspace + call.space.sums
    surrogate = problem.surrogate
    head = (
        address(c, held), c0.data_ptr(), y0.data_ptr(), address(reserve, held), address(grad_y, held),
        address(grad_c, held), address(grad_c_last, held), address(grad_y_last, held),
        address(problem.input, held) if inline else 0, buffer.data_ptr(), address(problem.theta, held),
        address(problem.reset_scale, held), *keep_argument(problem, held), address(problem.lengths, held),
    )  # fmt: skip
    tail = (
        gates, gates + 2 * at_source, gates + 2 * at_source_z, dc0.data_ptr(), dy0.data_ptr(), sums, error_address(),
        1 / surrogate.width, surrogate.height, surrogate.bounded, T, B,
    )  # fmt: skip
    for wave in range(plan.waves):
        start, group = workspace + wave * call.space.wave, wave * plan.groups
        place = group * plan.rows, group, stride
        call.function(plan.grid, _BACKWARD_ARGS.pack(*head, start, start + call.space.exchange, *tail, *place))

    def transposed(first: int, last: int) -> Tensor:
        """Blocks of the gates' gradients, ``(units, steps and rows)``."""
        return wide.as_strided(((last - first) * HP, rows), (1, 4 * HP), first * HP)

    source = wide.as_strided((rows, HP + 8), (HP + 8, 1), at_source)
    hh_z = None
    if after:
        hh = products.product(transposed(0, 3), source)
    else:
        hh = products.product(transposed(1, 3), source)
        hh_z = products.product(transposed(0, 1), wide.as_strided((rows, HP), (HP, 1), at_source_z))
    ih = grad_input = None
    if operand is not None:
        ih = products.product(transposed(1, 4), operand)
    if weight_ih is not None:
        grad_input = products.product(wide.as_strided((rows, 3 * HP), (4 * HP, 1), HP), weight_ih)
        grad_input = grad_input[:, :inputs].reshape(T, B, inputs)
    parts = plan.waves * plan.groups * 8
    return Backward(grad_input, dc0, dy0, *arrange.gather(problem, low, hh, hh_z, ih, sums, parts))
