"""Cluster kernels: small layers in float32, one launch per sequence and direction.

Contains the partition (plain arithmetic, no device needed) and the host side; the kernels are
``source/cluster_forward.cu`` and ``source/cluster_backward.cu``.
"""

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from egru.kernels.cuda import driver, products, sources
from egru.kernels.cuda.arguments import KEEP, SURROGATE
from egru.kernels.cuda.device import architecture, chip, is_hopper
from egru.kernels.cuda.gather import gather_gradients
from egru.kernels.cuda.plan import Chip, Direction, ceil_to
from egru.kernels.cuda.prepare import PendingForward
from egru.kernels.cuda.structs import ArgumentStruct
from egru.kernels.cuda.tensors import address, keep_argument, reserve_shape, start_state
from egru.kernels.problem import Backward, Forward, Problem
from egru.types import Reset, ResetGate

BLOCK_UNITS = 32
BLOCKS = (1, 2, 4, 8, 16)
"""Allowed numbers of blocks per cluster."""
MAX_INPUTS = 64
"""Largest number of input features for which the kernel computes x W itself."""
ROWS = (1, 2, 4, 8)
LANES = 4
"""Threads per unit if the recurrent weights are in registers."""
REGISTER_UNITS = 128
"""Largest layer whose recurrent weights fit into the registers of one block."""
STEP_OVERHEAD = 1.3
"""Microseconds per step for the barriers of a cluster and the element-wise part."""
BLOCK_STEP_OVERHEAD = 0.4
"""The same for a block without a cluster."""
WAVE = 15.0
"""Microseconds to load the weights into shared memory, each time the device is filled."""
HOST = 140.0
"""Microseconds that the host needs for a call that computes x W beforehand. A kernel that takes less is not noticed."""
LONG = 64
"""Plans of longer sequences do not depend on their length."""
FUSED_STEP = 40.0
"""Microseconds that fused steps take per step, limited by the host. Slower plans are not used."""

FORWARD = ArgumentStruct(
    "ClusterForward",
    [
        ("projected", "const float*"),  # (T, B, 3, H): x W without bias; null if the kernel computes it
        ("input", "const float*"),  # (T, B, I), if the kernel computes x W
        ("weight_ih", "const float*"),  # (3 H, I), if the kernel computes x W
        ("weights", "const float*"),  # (3 H, H), recurrent, as in torch
        ("bias_ih", "const float*"),
        ("bias_hh", "const float*"),
        ("theta", "const float*"),
        ("rho", "const float*"),
        ("c0", "const float*"),
        ("y0", "const float*"),
        ("keep", KEEP),
        ("lengths", "const i64*"),
        ("y", "float*"),
        ("c", "float*"),
        ("c_last", "float*"),
        ("y_last", "float*"),
        ("reserve", "Reserve*"),  # see reserve.cuh; null if nothing is saved
        ("T", "int"),
        ("B", "int"),
        ("state_stride", "int"),  # between rows of c0 and y0: H, or 0 if all rows share one
    ],
)

BACKWARD = ArgumentStruct(
    "ClusterBackward",
    [
        ("c", "const float*"),
        ("c0", "const float*"),
        ("y0", "const float*"),
        ("reserve", "const Reserve*"),
        ("grad_y", "const float*"),
        ("grad_c", "const float*"),
        ("grad_c_last", "const float*"),
        ("grad_y_last", "const float*"),
        ("input", "const float*"),  # (T, B, I), if the forward kernel computed x W
        ("weights", "const float*"),  # (3 H, H), recurrent, as in torch
        ("theta", "const float*"),
        ("rho", "const float*"),
        ("keep", KEEP),
        ("lengths", "const i64*"),
        ("gates", "float*"),  # (T, B, 4, H): the gradient that multiplies V_z ("after" only), then a_r, a_u, a_z
        ("source", "float*"),  # (T, B, source_width): y of the previous step, 1, the input; see cluster_backward.cu
        ("source_z", "float*"),  # (T, B, H): r times y of the previous step, "before" only
        ("dc0", "float*"),
        ("dy0", "float*"),
        ("sums", "float*"),  # (clusters, 2, H): theta, a_z
        ("surrogate", SURROGATE),
        ("T", "int"),
        ("B", "int"),
        ("source_width", "int"),
        ("state_stride", "int"),  # between rows of c0 and y0: H, or 0 if all rows share one
    ],
)


@dataclasses.dataclass(frozen=True)
class ClusterPlan:
    """A partition of units and batch rows over clusters of blocks, for one direction."""

    units: int
    inputs: int  # features of the x W that the kernel computes; 0 if it is computed beforehand
    rows: int  # of the batch, per cluster; one of ROWS
    block_units: int
    blocks: int  # per cluster
    lanes: int  # threads per unit, with recurrent weights in registers; 1 if warps share them, in shared memory
    bytes: int  # of shared memory, per block
    microseconds: float = dataclasses.field(compare=False)  # estimated per step; batches share compiled kernels
    start: float = dataclasses.field(compare=False)  # estimated microseconds before the first step

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 256 if self.lanes == 1 else ceil_to(self.lanes * self.units, 32)

    def total(self, steps: int) -> float:
        """Return the estimated microseconds of a sequence."""
        return self.start + steps * self.microseconds

    def clusters(self, batch: int) -> int:
        """Return the number of clusters for a batch."""
        return -(-batch // self.rows)


def shared_bytes(
    units: int, inputs: int, rows: int, block_units: int, lanes: int, reset_gate: ResetGate, direction: Direction
) -> int:
    """Return the shared memory of one block."""
    padded, padded_inputs = ceil_to(units, 4 * lanes), ceil_to(inputs, 4 * lanes)
    if direction == "backward":
        exchanged = 6 if reset_gate == "after" else 3
        return 4 * (3 * padded * block_units + exchanged * rows * padded + 8 * rows * 32)
    in_registers = lanes > 1
    weights = 3 * ((0 if in_registers else padded) + padded_inputs) * block_units
    scratch = 0 if in_registers else 8 * (4 if inputs else 3) * rows * 32
    return 4 * (weights + 2 * rows * (padded + padded_inputs) + scratch)


@functools.lru_cache(maxsize=1024)
def choose_plan(
    units: int, batch: int, inputs: int, steps: int, chip: Chip, reset_gate: ResetGate, direction: Direction
) -> ClusterPlan | None:
    """Return the cheapest partition, or None if the weights do not fit or fused steps are faster.

    Args:
        units: Size of the layer.
        batch: Number of sequences.
        inputs: Number of input features.
        steps: Length of the sequences.
        chip: The device.
        reset_gate: "after" or "before".
        direction: Forward or backward.
    """
    computed = _best(units, batch, 0, steps, chip, reset_gate, direction)
    inline = _best(units, batch, inputs, steps, chip, reset_gate, direction) if inputs <= MAX_INPUTS else None
    if inline is None or computed is None:
        return inline or computed
    limit = max(1.5 * computed.total(steps), HOST)  # one launch less is worth up to this time on the device
    return inline if inline.total(steps) <= limit else computed


def _best(
    units: int, batch: int, inputs: int, steps: int, chip: Chip, reset_gate: ResetGate, direction: Direction
) -> ClusterPlan | None:
    """Return the fastest partition for a given number of features whose products the kernel computes."""
    plans = _shared_plans(units, batch, inputs, chip, reset_gate, direction)
    if direction == "forward" and units <= REGISTER_UNITS:
        plans += _register_plans(units, batch, inputs, chip, reset_gate)
    fast = [plan for plan in plans if plan.microseconds < FUSED_STEP]
    return min(fast, key=lambda plan: plan.total(steps), default=None)


def _shared_plans(
    units: int, batch: int, inputs: int, chip: Chip, reset_gate: ResetGate, direction: Direction
) -> list[ClusterPlan]:
    """Return the partitions that fit with the weights in shared memory, one per number of rows."""
    blocks = next((blocks for blocks in BLOCKS if blocks * BLOCK_UNITS >= units), None)
    if blocks is None or blocks > chip.multiprocessors:
        return []
    block_units = -(-units // blocks)
    terms = 3 * (units + (inputs if direction == "forward" else 0))
    plans: list[ClusterPlan] = []
    for rows in ROWS:
        used = shared_bytes(units, inputs, rows, block_units, 1, reset_gate, direction)
        cycles = max(terms * block_units / 32 + terms * rows / 12, terms * rows / 4)  # reading weights, multiplying
        per_multiprocessor, waves = _occupancy(-(-batch // rows), chip.multiprocessors // blocks, 4, used, chip)
        if per_multiprocessor:
            microseconds = waves * (STEP_OVERHEAD + per_multiprocessor * cycles / 1700)
            plans.append(ClusterPlan(units, inputs, rows, block_units, blocks, 1, used, microseconds, waves * WAVE))
    return plans


def _register_plans(units: int, batch: int, inputs: int, chip: Chip, reset_gate: ResetGate) -> list[ClusterPlan]:
    """Return the partitions into single blocks with the recurrent weights in registers, one per number of rows."""
    terms, input_terms = ceil_to(units, 4 * LANES), ceil_to(inputs, 4 * LANES)
    threads = ceil_to(LANES * units, 32)
    plans: list[ClusterPlan] = []
    for rows in (rows for rows in ROWS if rows <= LANES):
        used = shared_bytes(units, inputs, rows, units, LANES, reset_gate, "forward")
        instructions = 3 * (terms + input_terms) // LANES * rows + 20 * rows + 90  # products, sums and the rest
        cycles = max(threads * instructions / 128, 3 * input_terms * units / 32)  # the second: reading input weights
        at_most = min(4, max(1, 65536 // (threads * (3 * terms // LANES + 24 + 14 * rows))))  # registers, as compiled
        per_multiprocessor, waves = _occupancy(-(-batch // rows), chip.multiprocessors, at_most, used, chip)
        if per_multiprocessor:
            microseconds = waves * (BLOCK_STEP_OVERHEAD + per_multiprocessor * cycles / 1700)
            plans.append(ClusterPlan(units, inputs, rows, units, 1, LANES, used, microseconds, waves * WAVE))
    return plans


def _occupancy(clusters: int, at_once: int, at_most: int, used: int, chip: Chip) -> tuple[int, int]:
    """Return the number of blocks per multiprocessor, 0 if none fits, and how often the device is filled.

    Args:
        clusters: Number of clusters.
        at_once: Clusters that run at the same time with one block per multiprocessor.
        at_most: Largest number of blocks per multiprocessor.
        used: Shared memory of a block.
        chip: The device.
    """
    per_multiprocessor = min(at_most, chip.shared_bytes // used, -(-clusters // at_once))
    return per_multiprocessor, -(-clusters // max(1, at_once * per_multiprocessor))


class Variant(NamedTuple):
    """The options that a kernel is compiled for, in addition to its plan."""

    direction: Direction
    reset: Reset
    reset_gate: ResetGate
    keep: bool
    ragged: bool


def kernel_source(plan: ClusterPlan, variant: Variant) -> str:
    """Return the CUDA C++ of one kernel, with sizes and options compiled in."""
    constants = {
        "H": plan.units, "I": plan.inputs, "C": plan.blocks, "U": plan.block_units, "R": plan.rows,
        "LANES": plan.lanes, "THREADS": plan.threads,
        "KEEP": int(variant.keep), "RAGGED": int(variant.ragged), "ACCURATE": 1,
        **sources.option_constants(variant.reset, variant.reset_gate, ""),
    }  # fmt: skip
    struct = FORWARD if variant.direction == "forward" else BACKWARD
    division = "cluster_warps.cuh" if plan.lanes == 1 else "cluster_lanes.cuh"
    files = [*sources.RECURSION, "cluster.cuh", division, f"cluster_{variant.direction}.cu"]
    return sources.assemble(constants, [struct], files)


@functools.lru_cache(maxsize=1024)
def _plan(
    units: int, batch: int, inputs: int, steps: int, reset_gate: ResetGate, direction: Direction, device: int
) -> ClusterPlan | None:
    if not is_hopper(device):
        return None
    forward = choose_plan(units, batch, inputs, steps, chip(device), reset_gate, "forward")
    if forward is None or direction == "forward":
        return forward
    return choose_plan(units, batch, forward.inputs, steps, chip(device), reset_gate, "backward")


@functools.cache
def _function(plan: ClusterPlan, variant: Variant, device: int) -> driver.Function:
    code = driver.compile_source(kernel_source(plan, variant), [architecture(device), "--std=c++17"])
    name = f"cluster_{variant.direction}"
    return driver.Function(code, name, block=plan.threads, shared=plan.bytes, cluster=plan.blocks)


def find_plan(
    input: Tensor, units: int, reset_gate: ResetGate, precision: str, direction: Direction = "forward"
) -> ClusterPlan | None:
    """Return the partition for a sequence on its device, or None if these kernels cannot run it."""
    if precision:
        return None
    steps, batch, inputs = input.shape
    return _plan(units, batch, inputs, min(steps, LONG), reset_gate, direction, input.device.index)


def begin(plan: ClusterPlan, input: Tensor, weight_ih: Tensor) -> PendingForward:
    """Enqueue the product of inputs and weights, unless the kernel computes it."""
    if plan.inputs:
        return PendingForward(plan, None, 0, None, None)
    features = input.detach().reshape(-1, input.shape[2])
    return PendingForward(plan, None, 0, None, products.product(features, weight_ih.detach().T))


def _call(problem: Problem, plan: ClusterPlan, direction: Direction) -> driver.Function:
    variant = Variant(
        direction, problem.reset, problem.reset_gate, problem.keep is not None, problem.lengths is not None
    )
    return _function(plan, variant, problem.input.device.index)


def forward(problem: Problem, plan: ClusterPlan, pending: PendingForward, save: bool) -> Forward:
    """Run the sequence. ``pending`` comes from :func:`begin`; ``save`` fills the reserve."""
    T, B, _ = problem.input.shape
    temporaries: list[Tensor] = []
    c0, y0, stride = start_state(problem)
    y = problem.input.new_empty((T, B, plan.units))
    c, c_last = torch.empty_like(y), y.new_empty((B, plan.units))
    y_last = torch.empty_like(c_last)
    reserve = y.new_empty(reserve_shape(problem) if save else (0,))
    if pending.projected is None:
        inputs = 0, address(problem.input, temporaries), address(problem.weight_ih, temporaries)
    else:
        inputs = pending.projected.data_ptr(), 0, 0
    args = FORWARD.pack(  # in the order of its table
        *inputs,
        address(problem.weight_hh, temporaries),
        address(problem.bias_ih, temporaries),
        address(problem.bias_hh, temporaries),
        address(problem.theta, temporaries),
        address(problem.reset_scale, temporaries),
        c0.data_ptr(),
        y0.data_ptr(),
        *keep_argument(problem, temporaries),
        address(problem.lengths, temporaries),
        y.data_ptr(),
        c.data_ptr(),
        c_last.data_ptr(),
        y_last.data_ptr(),
        reserve.data_ptr() if save else 0,
        T,
        B,
        stride,
    )
    _call(problem, plan, "forward")(plan.clusters(B) * plan.blocks, args)
    return Forward(y, c, c_last, y_last, reserve)


def backward(
    problem: Problem,
    plan: ClusterPlan,
    c: Tensor,
    reserve: Tensor,
    grad_y: Tensor | None,
    grad_c: Tensor | None,
    grad_c_last: Tensor | None,
    grad_y_last: Tensor | None,
    input_gradient: bool,
) -> Backward:
    """Return the gradients, given those of the four outputs (None means zero)."""
    T, B, inputs = problem.input.shape
    H, rows, after = plan.units, T * B, problem.reset_gate == "after"
    width, clusters = ceil_to(H + 1 + plan.inputs, 4), plan.clusters(B)
    temporaries: list[Tensor] = []
    c0, y0, stride = start_state(problem)
    # One allocation for gates, source, source_z and sums.
    at_source, at_source_z = rows * 4 * H, rows * (4 * H + width)
    at_sums = at_source_z + (0 if after else rows * H)
    wide = c.new_empty((at_sums + clusters * 2 * H,))
    start = wide.data_ptr()
    dc0 = c.new_empty((B, H))
    dy0 = torch.empty_like(dc0)
    surrogate = problem.surrogate
    args = BACKWARD.pack(  # in the order of its table
        address(c, temporaries),
        c0.data_ptr(),
        y0.data_ptr(),
        address(reserve, temporaries),
        address(grad_y, temporaries),
        address(grad_c, temporaries),
        address(grad_c_last, temporaries),
        address(grad_y_last, temporaries),
        address(problem.input, temporaries) if plan.inputs else 0,
        address(problem.weight_hh, temporaries),
        address(problem.theta, temporaries),
        address(problem.reset_scale, temporaries),
        *keep_argument(problem, temporaries),
        address(problem.lengths, temporaries),
        start,
        start + 4 * at_source,
        start + 4 * at_source_z,
        dc0.data_ptr(),
        dy0.data_ptr(),
        start + 4 * at_sums,
        1 / surrogate.width,
        surrogate.height,
        surrogate.bounded,
        T,
        B,
        width,
        stride,
    )
    _call(problem, plan, "backward")(clusters * plan.blocks, args)

    def transposed(first: int, last: int) -> Tensor:
        """Return blocks ``first`` to ``last`` of the gates' gradients, ``(units, T*B)``."""
        return wide.as_strided(((last - first) * H, rows), (1, 4 * H), first * H)

    # Blocks of `hh`: V_z ("after" only), r, u, z; its columns: V, the sum over time, W.
    first = 0 if after else 1
    source = wide.as_strided((rows, width), (width, 1), at_source)
    hh = products.product(transposed(first, 4 if plan.inputs else 3), source)
    hh_z = None if after else products.product(transposed(3, 4), wide.as_strided((rows, H), (H, 1), at_source_z))
    if plan.inputs:
        ih = hh.as_strided((3 * H, inputs), (width, 1), (1 - first) * H * width + H + 1)
    else:
        ih = products.product(transposed(1, 4), problem.input.reshape(rows, inputs))
    grad_input = None
    if input_gradient:
        grad_input = products.input_gradient(problem, wide.as_strided((rows, 4 * H), (4 * H, 1)))
    return Backward(grad_input, dc0, dy0, *gather_gradients(problem, H, hh, hh_z, ih, start + 4 * at_sums, clusters))
