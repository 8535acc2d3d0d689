"""Few rows: a forward kernel that reads only the weights of units that fired; see ``source/few.cu``.

Its partition (plain arithmetic, no device needed) and its host side. It takes float32 too: the weights of 1350 units
fit the chip even so.
"""

import dataclasses
import functools
import itertools

import torch
from torch import Tensor

from egru.kernels.cuda import arrange, driver, products
from egru.kernels.cuda.device import architecture, chip, error_address, raise_if_stalled
from egru.kernels.cuda.persistent import FORWARD_ARGS
from egru.kernels.cuda.plan import Chip, ceil_to
from egru.kernels.cuda.stepwise import (
    PRECISIONS,
    SHARED_SOURCE,
    address,
    aligned,
    keep_argument,
    reserve_shape,
    start_state,
)
from egru.kernels.problem import Forward, Problem
from egru.types import RESETS

MOST_ROWS = 8
_ACTIVE = 0.3  # share of units that fire, for choosing a partition


@dataclasses.dataclass(frozen=True)
class FewPlan:
    """A partition of units and rows over blocks: ``groups`` copies of the weights, ``rows`` of the batch each."""

    units: int
    groups: int
    rows: int
    own: int  # units of a block
    blocks: int  # of a group
    words: int  # 64-bit words in which one unit's rows travel
    warps: int  # of a block
    bytes: int  # of shared memory

    @property
    def grid(self) -> int:
        return self.groups * self.blocks

    @property
    def workspace(self) -> int:
        """Bytes of the exchange: two buffers, a word for every unit and every thread that may look for one."""
        return 2 * self.groups * self.words * ceil_to(self.units, 32 * self.warps) * 8


def _columns(own: int, reset_gate: str) -> tuple[int, int]:
    """Columns of the first product of a step, and of the weights' rows."""
    if reset_gate == "after":
        return ceil_to(3 * own, 4), ceil_to(3 * own, 4)
    return ceil_to(2 * own, 4), ceil_to(2 * own, 4) + ceil_to(own, 4)


@functools.lru_cache(maxsize=256)
def choose_few(units: int, batch: int, chip: Chip, reset_gate: str, precision: str) -> FewPlan | None:
    """The cheapest partition, or None where the weights do not fit or the rows are too many."""
    if batch > MOST_ROWS:
        return None
    size = 2 if precision else 4
    best: tuple[float, FewPlan] | None = None
    for warps, groups in itertools.product((8, 16), range(1, min(batch, chip.multiprocessors) + 1)):
        rows = -(-batch // groups)
        if (groups - 1) * rows >= batch:
            continue  # the last group would be empty
        if precision and batch > 4 and rows > 2:
            continue  # most units fired in some row: the tensor cores of the persistent kernel are faster
        own = -(-units // (chip.multiprocessors // groups))
        first, row = _columns(own, reset_gate)
        words = -(-rows // 3) if precision else rows
        share = ceil_to(units, 32 * warps)
        used = ceil_to(units * row * size, 16) + 2 * warps * rows * first * 4 + share * 4 * (1 + rows)
        if used > chip.shared_bytes or own * words > 32 * warps or first > 128:
            continue
        active = units * (1 - (1 - _ACTIVE) ** rows)  # of which at least one row fired
        at_once = 4 * (32 // (first // 4))  # rows of weights that the four schedulers work on
        cycles = active * (12 + 8 * rows) / at_once + share * words * 8 / 32
        cycles += 15 * warps + 100 * share / (32 * warps)  # adding up what the warps found, and finding it
        if best is None or cycles < best[0]:
            best = cycles, FewPlan(units, groups, rows, own, -(-units // own), words, warps, used)
    return best[1] if best else None


def find_few(input: Tensor, units: int, reset_gate: str, precision: str) -> FewPlan | None:
    """The partition for a sequence on its device, or None where this kernel cannot run it."""
    batch = input.shape[1]
    return None if batch > MOST_ROWS else _plan(units, batch, reset_gate, precision, input.device.index)


@functools.cache
def _plan(units: int, batch: int, reset_gate: str, precision: str, device: int) -> FewPlan | None:
    return choose_few(units, batch, chip(device), reset_gate, precision)


def kernel_source(
    plan: FewPlan, reset: str, reset_gate: str, precision: str, inline: bool, keep: bool, ragged: bool
) -> str:
    """CUDA C++ of one kernel: sizes as constants, then the source files."""
    sizes = {
        "H": plan.units, "STRIDE": ceil_to(plan.units, 8) if precision else plan.units, "UNITS": plan.own,
        "BLOCKS": plan.blocks, "R": plan.rows, "WARPS": plan.warps, "LOW": PRECISIONS.index(precision),
        "RESET": RESETS.index(reset), "AFTER": int(reset_gate == "after"), "INLINE": int(inline), "KEEP": int(keep),
        "RAGGED": int(ragged),
    }  # fmt: skip
    texts = [f"#define {name} {value}\n" for name, value in sizes.items()]
    if not precision:
        texts.append("#define ACCURATE\n")
    texts += [(driver.SOURCE / name).read_text() for name in (*SHARED_SOURCE, "few.cu")]
    return "".join(texts)


@functools.cache
def _function(
    units: int,
    batch: int,
    reset_gate: str,
    precision: str,
    device: int,
    reset: str,
    inline: bool,
    keep: bool,
    ragged: bool,
) -> driver.Function:
    plan = _plan(units, batch, reset_gate, precision, device)
    assert plan is not None
    source = kernel_source(plan, reset, reset_gate, precision, inline, keep, ragged)
    code = driver.compile_source(source, [architecture(device), "--std=c++17"])
    return driver.Function(code, "few", block=32 * plan.warps, shared=plan.bytes, cooperative=True)


@functools.cache
def _prepare(units: int, inputs: int, workspace: int, precision: str, device: int) -> arrange.Prepare:
    return arrange.Prepare(products.OPERANDS[precision], device, units, inputs, workspace)


def begin(plan: FewPlan, input: Tensor, weight_ih: Tensor, weight_hh: Tensor, precision: str) -> arrange.Started:
    """What a forward pass does before its kernel."""
    raise_if_stalled()
    inputs, device = input.shape[2], input.device
    projected = None
    if not precision:
        buffer = torch.zeros(plan.workspace, dtype=torch.uint8, device=device)
        if inputs > 1:
            projected = products.product(input.detach().reshape(-1, inputs), weight_ih.detach().T)
        return arrange.Started(plan, buffer, buffer.data_ptr(), None, projected)
    operands = (None, None) if inputs == 1 else (aligned(input), aligned(weight_ih))
    prepare = _prepare(plan.units, inputs, plan.workspace, precision, device.index)
    buffer, workspace, operand, weight = prepare(weight_hh, *operands)
    if operand is not None and weight is not None:
        projected = products.product(operand, weight)
    return arrange.Started(plan, buffer, workspace, operand, projected)


def forward(problem: Problem, plan: FewPlan, started: arrange.Started, save: bool) -> Forward:
    T, B, inputs = problem.input.shape
    H, device = plan.units, problem.input.device.index
    function = _function(
        H, B, problem.reset_gate, problem.precision, device, problem.reset, inputs == 1, problem.keep is not None,
        problem.lengths is not None,
    )  # fmt: skip
    held: list[Tensor] = []
    c0, y0, stride = start_state(problem)
    y = problem.input.new_empty((T, B, H))
    c, c_last = torch.empty_like(y), y.new_empty((B, H))
    y_last = torch.empty_like(c_last)
    reserve = y.new_empty(reserve_shape(problem) if save else (0,))
    projected = started.projected
    args = FORWARD_ARGS.pack(
        0 if projected is None else projected.data_ptr(),
        *[address(t, held) for t in (problem.input, problem.weight_ih, problem.weight_hh)],
        *[address(t, held) for t in (problem.bias_ih, problem.bias_hh, problem.theta, problem.reset_scale)],
        c0.data_ptr(), y0.data_ptr(), *keep_argument(problem, held), address(problem.lengths, held),
        started.workspace, 0,
        y.data_ptr(), c.data_ptr(), c_last.data_ptr(), y_last.data_ptr(), reserve.data_ptr() if save else 0,
        error_address(), T, B, 0, stride,
    )  # fmt: skip
    function(plan.grid, args)
    kept = arrange.unpadded(started.input, problem.input.shape) if save and started.input is not None else None
    return Forward(y, c, c_last, y_last, reserve, kept)
