"""Persistent kernels: one launch per sequence and direction. Builds the kernels and runs the products around them."""

import dataclasses
import functools

import torch
from torch import Tensor

from egru.kernels.cuda import driver, products, sources
from egru.kernels.cuda.arguments import SEQUENCE_BACKWARD, SEQUENCE_FORWARD
from egru.kernels.cuda.device import chip, error_address, is_hopper, raise_if_stalled
from egru.kernels.cuda.gather import gather_gradients
from egru.kernels.cuda.plan import Direction, Plan, ceil_to, choose_plan
from egru.kernels.cuda.prepare import PendingForward, Preparer, recover_padded, view_unpadded
from egru.kernels.cuda.tensors import address, aligned, keep_argument, reserve_shape, start_state
from egru.kernels.problem import Backward, Forward, Problem
from egru.types import Reset, ResetGate

THREADS = 384


@dataclasses.dataclass(frozen=True)
class Variant:
    """The options that a kernel is compiled for, in addition to its plan."""

    direction: Direction
    reset: Reset
    reset_gate: ResetGate
    precision: str
    inline: bool  # the input has one feature, and the kernel computes x W itself
    keep: bool = False
    ragged: bool = False
    grad_y: bool = False
    grad_c: bool = False
    grad_input: bool = False  # a product over time reads a_z


def wgmma_overload(columns: int, low: str) -> str:
    """Return ``wgmma(acc, a, b)`` for a 64 x ``columns`` product: inline assembly names every register."""
    n = columns // 2
    dtype = "f16" if low == "float16" else "bf16"
    registers = ", ".join(f"%{i}" for i in range(n))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(n))
    return (
        f"__device__ __forceinline__ void wgmma(float (&d)[{n}], u64 a, u64 b) {{\n"
        f'  asm volatile("{{.reg .pred p; setp.eq.u32 p, 1, 1; "\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} "\n'
        f'    "{{{registers}}}, %{n}, %{n + 1}, p, 1, 1, 0, 0;}}" : {outputs} : "l"(a), "l"(b));\n}}\n'
    )


def kernel_source(plan: Plan, variant: Variant) -> str:
    """Return the CUDA C++ of one kernel, with sizes and options compiled in."""
    after = variant.reset_gate == "after"
    shape = plan.forward if variant.direction == "forward" else plan.backward
    columns = plan.tiles * 8
    if variant.direction == "backward":
        widths = [columns]
    else:
        widths = [3 * columns] if after else [2 * columns, columns]
    constants = {
        "H": plan.units, "HP": plan.padded, "KT": plan.k_tiles, "UT": plan.tiles, "CPG": plan.blocks, "R": plan.rows,
        "KS": shape.slot_tiles, "RING": shape.slots, "ALIAS": int(shape.alias),
        "SCRATCH": max(widths) // 8 * 2048, "ACCURATE": 0, "INLINE": int(variant.inline),
        **sources.option_constants(variant.reset, variant.reset_gate, variant.precision),
        **{n.upper(): int(getattr(variant, n)) for n in ("keep", "ragged", "grad_y", "grad_c", "grad_input")},
    }  # fmt: skip
    struct = SEQUENCE_FORWARD if variant.direction == "forward" else SEQUENCE_BACKWARD
    files = [*sources.RECURSION, "sm90.cuh", "group.cuh", f"{variant.direction}.cu"]
    overloads = "".join(wgmma_overload(width, variant.precision) for width in widths)
    return sources.assemble(constants, [struct], files, overloads)


@functools.cache
def _function(plan: Plan, variant: Variant, device: int) -> driver.Function:
    code = driver.compile_source(kernel_source(plan, variant), ["--gpu-architecture=sm_90a", "--std=c++17"])
    shape = plan.forward if variant.direction == "forward" else plan.backward
    return driver.Function(code, variant.direction, block=THREADS, shared=shape.bytes, cooperative=True)


@functools.cache
def _plan(units: int, batch: int, reset_gate: ResetGate, device: int) -> Plan | None:
    return choose_plan(units, batch, chip(device), reset_gate) if is_hopper(device) else None


def find_plan(input: Tensor, units: int, reset_gate: ResetGate, precision: str) -> Plan | None:
    """Return the plan for a sequence on its device, or None if no persistent kernel can run it."""
    return _plan(units, input.shape[1], reset_gate, input.device.index) if precision else None


@dataclasses.dataclass(frozen=True)
class _Call:
    """Everything about a call that depends neither on values nor on the number of steps, cached in one look-up."""

    function: driver.Function
    space: "_Space"


@dataclasses.dataclass(frozen=True)
class _Space:
    """The memory that is prepared for a kernel, and its division."""

    prepare: Preparer
    exchange: int  # bytes of one wave's exchange
    wave: int  # bytes of one wave's exchange and barrier counters
    sums: int  # offset in the workspace of the partial sums of the backward recursion


@functools.cache
def _space(
    units: int, batch: int, inputs: int, reset_gate: ResetGate, precision: str, direction: Direction, device: int
) -> _Space:
    plan = _plan(units, batch, reset_gate, device)
    assert plan is not None
    forward = direction == "forward"
    tiles = plan.k_tiles * (1 if forward else 3 if reset_gate == "after" else 2)
    slot_tiles = plan.forward.slot_tiles if forward else plan.backward.slot_tiles
    exchange = 2 * plan.groups * ceil_to(tiles, slot_tiles) * 32 * plan.rows
    wave = exchange + plan.groups * 128
    sums = 0 if forward else plan.waves * plan.groups * 8 * (3 if inputs == 1 else 2) * plan.padded * 4
    prepare = Preparer(
        products.OPERANDS[precision], device, units, inputs, plan.waves * wave, sums, plan, reset_gate, direction
    )
    return _Space(prepare, exchange, wave, plan.waves * wave)


@functools.cache
def _call(
    direction: Direction,
    units: int,
    batch: int,
    inputs: int,
    reset: Reset,
    reset_gate: ResetGate,
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


def _key(problem: Problem) -> tuple[int, int, int, Reset, ResetGate, str, bool, bool, int]:
    _, batch, inputs = problem.input.shape
    return (
        problem.theta.shape[0], batch, inputs, problem.reset, problem.reset_gate, problem.precision,
        problem.keep is not None, problem.lengths is not None, problem.input.device.index,
    )  # fmt: skip


def begin(
    plan: Plan, input: Tensor, weight_ih: Tensor, weight_hh: Tensor, reset_gate: ResetGate, precision: str
) -> PendingForward:
    """Enqueue the work that precedes the forward kernel."""
    raise_if_stalled()
    _, batch, inputs = input.shape
    prepare = _space(plan.units, batch, inputs, reset_gate, precision, "forward", input.device.index).prepare
    operands = (None, None) if inputs == 1 else (aligned(input), aligned(weight_ih))
    buffer, workspace, operand, weight = prepare(aligned(weight_hh), *operands)
    projected = None if operand is None or weight is None else products.product(operand, weight)
    return PendingForward(plan, buffer, workspace, operand, projected)


def forward(problem: Problem, plan: Plan, pending: PendingForward, save: bool) -> Forward:
    """Run the sequence. ``pending`` comes from :func:`begin`; ``save`` fills the reserve."""
    # Little work before the launch: the device may be idle until then.
    assert pending.buffer is not None
    T, B, _ = problem.input.shape
    call = _call("forward", *_key(problem))
    temporaries: list[Tensor] = []
    c0, y0, stride = start_state(problem)
    y = problem.input.new_empty((T, B, plan.units))
    c, c_last = torch.empty_like(y), y.new_empty((B, plan.units))
    y_last = torch.empty_like(c_last)
    reserve = y.new_empty(reserve_shape(problem) if save else (0,))
    projected = pending.projected
    if projected is None:
        inputs = 0, address(problem.input, temporaries), address(problem.weight_ih, temporaries)
    else:
        inputs = projected.data_ptr(), 0, 0
    head = (  # in the order of SEQUENCE_FORWARD
        *inputs,
        pending.buffer.data_ptr(),
        address(problem.bias_ih, temporaries),
        address(problem.bias_hh, temporaries),
        address(problem.theta, temporaries),
        address(problem.reset_scale, temporaries),
        c0.data_ptr(),
        y0.data_ptr(),
        *keep_argument(problem, temporaries),
        address(problem.lengths, temporaries),
    )
    tail = (
        y.data_ptr(), c.data_ptr(), c_last.data_ptr(), y_last.data_ptr(), reserve.data_ptr() if save else 0,
        error_address(), T, B,
    )  # fmt: skip
    for wave in range(plan.waves):
        exchange = pending.workspace + wave * call.space.wave
        b0 = wave * plan.groups * plan.rows
        args = SEQUENCE_FORWARD.pack(*head, exchange, exchange + call.space.exchange, *tail, b0, stride)
        call.function(plan.grid, args)
    rounded_input = view_unpadded(pending.input, problem.input.shape) if save and pending.input is not None else None
    return Forward(y, c, c_last, y_last, reserve, rounded_input)


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
    """Return the gradients, given those of the four outputs (None means zero)."""
    raise_if_stalled()
    T, B, inputs = problem.input.shape
    HP, low = plan.padded, products.OPERANDS[problem.precision]
    inline, after = inputs == 1, problem.reset_gate == "after"
    call = _call(
        "backward", *_key(problem), grad_y is not None, grad_c is not None, grad_input=input_gradient or not inline
    )
    operand = recover_padded(problem.input, low)  # saved by the forward pass, unless None
    buffer, workspace, padded, weight_ih = call.space.prepare(
        aligned(problem.weight_hh), None if inline or operand is not None else aligned(problem.input),
        aligned(problem.weight_ih) if input_gradient else None,
    )  # fmt: skip
    operand = padded if operand is None else operand
    temporaries: list[Tensor] = []
    c0, y0, stride = start_state(problem)
    # One allocation for gates, source and source_z, divided into tensors after the launch.
    rows = T * B
    at_source, at_source_z = rows * 4 * HP, rows * (5 * HP + 8)
    wide = c.new_empty((at_source_z + (0 if after else rows * HP),), dtype=low)
    gates, dc0 = wide.data_ptr(), c.new_empty((B, plan.units))
    dy0 = torch.empty_like(dc0)
    sums = workspace + call.space.sums
    surrogate = problem.surrogate
    head = (  # in the order of SEQUENCE_BACKWARD
        address(c, temporaries),
        c0.data_ptr(),
        y0.data_ptr(),
        address(reserve, temporaries),
        address(grad_y, temporaries),
        address(grad_c, temporaries),
        address(grad_c_last, temporaries),
        address(grad_y_last, temporaries),
        address(problem.input, temporaries) if inline else 0,
        buffer.data_ptr(),
        address(problem.theta, temporaries),
        address(problem.reset_scale, temporaries),
        *keep_argument(problem, temporaries),
        address(problem.lengths, temporaries),
    )
    tail = (
        gates, gates + 2 * at_source, gates + 2 * at_source_z, dc0.data_ptr(), dy0.data_ptr(), sums, error_address(),
        1 / surrogate.width, surrogate.height, surrogate.bounded, T, B,
    )  # fmt: skip
    for wave in range(plan.waves):
        exchange, group0 = workspace + wave * call.space.wave, wave * plan.groups
        b0 = group0 * plan.rows
        args = SEQUENCE_BACKWARD.pack(*head, exchange, exchange + call.space.exchange, *tail, b0, group0, stride)
        call.function(plan.grid, args)

    def transposed(first: int, last: int) -> Tensor:
        """Return blocks ``first`` to ``last`` of the gates' gradients, ``(units, T*B)``."""
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
    return Backward(grad_input, dc0, dy0, *gather_gradients(problem, HP, hh, hh_z, ih, sums, parts))
