"""Small batches: a forward kernel that reads only the weights of units that emitted an event.

Contains the partition (plain arithmetic, no device needed) and the host side; the kernel is ``source/small_batch.cu``.
float32 is supported too: the weights of 1350 units fit into shared memory.
"""

import dataclasses
import functools
import itertools

import torch
from torch import Tensor

from egru.kernels.cuda import driver, products, sources
from egru.kernels.cuda.arguments import SMALL_BATCH
from egru.kernels.cuda.device import architecture, chip, error_address, raise_if_stalled
from egru.kernels.cuda.plan import Chip, ceil_to
from egru.kernels.cuda.prepare import PendingForward, Preparer, view_unpadded
from egru.kernels.cuda.tensors import address, aligned, keep_argument, reserve_shape, start_state
from egru.kernels.problem import Forward, Problem
from egru.types import Reset, ResetGate

MAX_BATCH = 8
_ACTIVITY = 0.3  # assumed fraction of active units, for choosing a partition


@dataclasses.dataclass(frozen=True)
class SmallBatchPlan:
    """A partition of units and batch rows over blocks."""

    units: int
    groups: int  # copies of the weights
    rows: int  # of the batch, per group
    block_units: int  # units per block
    blocks: int  # per group
    words: int  # 64-bit words that exchange one unit's rows
    warps: int  # per block
    bytes: int  # of shared memory, per block

    @property
    def grid(self) -> int:
        """Number of blocks per launch."""
        return self.groups * self.blocks

    @property
    def workspace(self) -> int:
        """Bytes of the exchange: two buffers, with a word for every unit and for every thread that may read one."""
        return 2 * self.groups * self.words * ceil_to(self.units, 32 * self.warps) * 8


def _columns(units: int, reset_gate: ResetGate) -> tuple[int, int]:
    """Return the columns of a step's first product, and of one row of weights, for a block of ``units``."""
    if reset_gate == "after":
        return ceil_to(3 * units, 4), ceil_to(3 * units, 4)
    return ceil_to(2 * units, 4), ceil_to(2 * units, 4) + ceil_to(units, 4)


@functools.lru_cache(maxsize=256)
def choose_plan(units: int, batch: int, chip: Chip, reset_gate: ResetGate, precision: str) -> SmallBatchPlan | None:
    """Return the cheapest partition, or None if the weights do not fit or the batch is too large."""
    if batch > MAX_BATCH:
        return None
    size = 2 if precision else 4
    best: tuple[float, SmallBatchPlan] | None = None
    for warps, groups in itertools.product((8, 16), range(1, min(batch, chip.multiprocessors) + 1)):
        rows = -(-batch // groups)
        if (groups - 1) * rows >= batch:
            continue  # the last group would be empty
        if precision and batch > 4 and rows > 2:
            continue  # most units are active in some row: the tensor cores of the persistent kernel are faster
        block_units = -(-units // (chip.multiprocessors // groups))
        first, row = _columns(block_units, reset_gate)
        words = -(-rows // 3) if precision else rows
        share = ceil_to(units, 32 * warps)
        used = ceil_to(units * row * size, 16) + 2 * warps * rows * first * 4 + share * 4 * (1 + rows)
        if used > chip.shared_bytes or block_units * words > 32 * warps or first > 128:
            continue
        active = units * (1 - (1 - _ACTIVITY) ** rows)  # units with an event in at least one row
        concurrent = 4 * (32 // (first // 4))  # rows of weights that the four schedulers work on
        cycles = active * (12 + 8 * rows) / concurrent + share * words * 8 / 32
        cycles += 15 * warps + 100 * share / (32 * warps)  # adding up the warps' sums, and finding events
        if best is None or cycles < best[0]:
            blocks = -(-units // block_units)
            best = cycles, SmallBatchPlan(units, groups, rows, block_units, blocks, words, warps, used)
    return best[1] if best else None


def find_plan(input: Tensor, units: int, reset_gate: ResetGate, precision: str) -> SmallBatchPlan | None:
    """Return the partition for a sequence on its device, or None if this kernel cannot run it."""
    batch = input.shape[1]
    return None if batch > MAX_BATCH else _plan(units, batch, reset_gate, precision, input.device.index)


@functools.cache
def _plan(units: int, batch: int, reset_gate: ResetGate, precision: str, device: int) -> SmallBatchPlan | None:
    return choose_plan(units, batch, chip(device), reset_gate, precision)


def kernel_source(
    plan: SmallBatchPlan, reset: Reset, reset_gate: ResetGate, precision: str, inline: bool, keep: bool, ragged: bool
) -> str:
    """Return the CUDA C++ of one kernel, with sizes and options compiled in."""
    constants = {
        "H": plan.units, "STRIDE": ceil_to(plan.units, 8) if precision else plan.units, "UNITS": plan.block_units,
        "BLOCKS": plan.blocks, "R": plan.rows, "WARPS": plan.warps,
        "INLINE": int(inline), "KEEP": int(keep), "RAGGED": int(ragged),
        "ACCURATE": int(not precision), **sources.option_constants(reset, reset_gate, precision),
    }  # fmt: skip
    return sources.assemble(constants, [SMALL_BATCH], [*sources.RECURSION, "small_batch.cu"])


@functools.cache
def _function(
    units: int,
    batch: int,
    reset_gate: ResetGate,
    precision: str,
    device: int,
    reset: Reset,
    inline: bool,
    keep: bool,
    ragged: bool,
) -> driver.Function:
    plan = _plan(units, batch, reset_gate, precision, device)
    assert plan is not None
    source = kernel_source(plan, reset, reset_gate, precision, inline, keep, ragged)
    code = driver.compile_source(source, [architecture(device), "--std=c++17"])
    return driver.Function(code, "small_batch", block=32 * plan.warps, shared=plan.bytes, cooperative=True)


@functools.cache
def _preparer(units: int, inputs: int, workspace: int, precision: str, device: int) -> Preparer:
    return Preparer(products.OPERANDS[precision], device, units, inputs, workspace)


def begin(plan: SmallBatchPlan, input: Tensor, weight_ih: Tensor, weight_hh: Tensor, precision: str) -> PendingForward:
    """Enqueue the work that precedes the forward kernel."""
    raise_if_stalled()
    inputs, device = input.shape[2], input.device
    projected = None
    if not precision:
        buffer = torch.zeros(plan.workspace, dtype=torch.uint8, device=device)
        if inputs > 1:
            projected = products.product(input.detach().reshape(-1, inputs), weight_ih.detach().T)
        return PendingForward(plan, buffer, buffer.data_ptr(), None, projected)
    operands = (None, None) if inputs == 1 else (aligned(input), aligned(weight_ih))
    prepare = _preparer(plan.units, inputs, plan.workspace, precision, device.index)
    buffer, workspace, operand, weight = prepare(weight_hh, *operands)
    if operand is not None and weight is not None:
        projected = products.product(operand, weight)
    return PendingForward(plan, buffer, workspace, operand, projected)


def forward(problem: Problem, plan: SmallBatchPlan, pending: PendingForward, save: bool) -> Forward:
    """Run the sequence. ``pending`` comes from :func:`begin`; ``save`` fills the reserve."""
    T, B, inputs = problem.input.shape
    H, device = plan.units, problem.input.device.index
    function = _function(
        H, B, problem.reset_gate, problem.precision, device, problem.reset, inputs == 1, problem.keep is not None,
        problem.lengths is not None,
    )  # fmt: skip
    temporaries: list[Tensor] = []
    c0, y0, stride = start_state(problem)
    y = problem.input.new_empty((T, B, H))
    c, c_last = torch.empty_like(y), y.new_empty((B, H))
    y_last = torch.empty_like(c_last)
    reserve = y.new_empty(reserve_shape(problem) if save else (0,))
    projected = pending.projected
    args = SMALL_BATCH.pack(  # in the order of its table
        0 if projected is None else projected.data_ptr(),
        address(problem.input, temporaries),
        address(problem.weight_ih, temporaries),
        address(problem.weight_hh, temporaries),
        address(problem.bias_ih, temporaries),
        address(problem.bias_hh, temporaries),
        address(problem.theta, temporaries),
        address(problem.reset_scale, temporaries),
        c0.data_ptr(),
        y0.data_ptr(),
        *keep_argument(problem, temporaries),
        address(problem.lengths, temporaries),
        pending.workspace,
        y.data_ptr(),
        c.data_ptr(),
        c_last.data_ptr(),
        y_last.data_ptr(),
        reserve.data_ptr() if save else 0,
        error_address(),
        T,
        B,
        0,
        stride,
    )
    function(plan.grid, args)
    rounded_input = view_unpadded(pending.input, problem.input.shape) if save and pending.input is not None else None
    return Forward(y, c, c_last, y_last, reserve, rounded_input)
