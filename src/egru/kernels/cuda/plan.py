"""Partition of a persistent kernel over the multiprocessors: plain arithmetic, no device needed.

A *group* of blocks (one per multiprocessor) holds one copy of the recurrent weights and processes ``rows`` rows of the
batch. The batch is split over as many groups as fit, and runs in several *waves* if that is not enough.
"""

import dataclasses
import functools
from typing import Literal

from egru.types import ResetGate

Direction = Literal["forward", "backward"]

ROWS = (8, 16, 32, 48, 64)  # allowed rows per group; each compiles a kernel; 64 is one warpgroup product
MAX_TILES = 5  # tiles per block, limited by the registers for accumulators and state


@dataclasses.dataclass(frozen=True)
class Chip:
    """Device properties that a plan depends on."""

    multiprocessors: int
    shared_bytes: int  # the most that one block can use


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shared memory of one block: resident weights, and the ring that the exchange streams through."""

    slot_tiles: int  # k16-tiles per slot
    slots: int
    alias: bool  # the scratch for adding the warpgroups' partial products shares memory with the ring
    bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """A partition of ``units`` and batch rows over blocks."""

    units: int
    groups: int
    rows: int  # of the batch, per group; one of ROWS
    tiles: int  # tiles of 8 units, per block
    blocks: int  # per group
    waves: int
    forward: Layout
    backward: Layout

    @property
    def padded(self) -> int:
        """Number of units, rounded up to whole tiles."""
        return ceil_to(self.units, 8)

    @property
    def k_tiles(self) -> int:
        """Number of k16-tiles of one gate."""
        return -(-self.units // 16)

    @property
    def grid(self) -> int:
        """Number of blocks per launch."""
        return self.groups * self.blocks

    @property
    def microseconds(self) -> float:
        """Estimated time of one step, forward and backward. Plans are ranked by it."""
        return self.waves * _microseconds_per_step(self.units, self.rows, self.tiles, self.grid)


def ceil_to(value: int, multiple: int) -> int:
    """Round ``value`` up to a multiple of ``multiple``."""
    return -(-value // multiple) * multiple


def layout(rows: int, phases: list[tuple[int, int]], constants: int, chip: Chip) -> Layout | None:
    """Return the best ring that fits next to the resident weights, or None if none fits.

    Small slots cost producers and consumers time. A few large ones leave little in flight, and products are padded to
    whole slots. The number of slots is even: each slot must always be read by the same of the two warpgroups.

    Args:
        rows: Rows of the batch per group.
        phases: The products of a step, as (k16-tiles, columns).
        constants: float32 values in shared memory.
        chip: The device.
    """
    scratch = max(columns for _, columns in phases) // 8 * 2048
    fixed = constants * 4 + 1024  # barriers, and space behind the ring, which products with fewer than 64 rows read
    best: tuple[float, Layout] | None = None
    for slot_tiles in range(1, 17):
        slot = slot_tiles * rows * 32
        weights = sum(ceil_to(tiles, slot_tiles) * 32 * columns for tiles, columns in phases)
        for alias in (False, True):
            free = chip.shared_bytes - weights - fixed - (0 if alias else scratch)
            slots = min(16, free // slot // 2 * 2)
            if slots < 4 or (alias and slots * slot < scratch):
                continue
            cycles = 100.0 if alias else 0.0
            for tiles, columns in phases:
                slices = -(-tiles // slot_tiles)
                producing = slices * 200 / (4 if slots % 4 == 0 else 2)
                copying = slices * slot / min(60, (slots - 2) * slot / 500)  # a copy takes about 500 cycles
                multiplying = slices / 2 * (350 + slot_tiles * max(columns / 2, 16 + columns / 4))
                cycles += max(producing, copying, multiplying) + slot / 30
            used = weights + fixed + slots * slot + (0 if alias else scratch)
            if best is None or cycles < best[0]:
                best = cycles, Layout(slot_tiles, slots, alias, used)
    return best[1] if best else None


def _microseconds_per_step(units: int, rows: int, tiles: int, grid: int) -> float:
    """Estimate the time per step, fitted by eye to an H200; docs/results/gpu-notes.md explains the limits."""
    k = -(-units // 16)
    kilobytes = k * rows * 32 * 4 / 1000  # forward reads one gate block, backward three
    ingress = kilobytes / 60  # a multiprocessor reads about 60 KB per microsecond
    l2_read = kilobytes * grid / 1000 / 6.5  # L2 delivers about 6.5 MB per microsecond
    product = k * (max(12 * tiles, 16 + 6 * tiles) + 3 * max(4 * tiles, 16 + 2 * tiles)) / 1800
    return 5.0 + max(ingress, l2_read, product) + 0.7 * tiles


def candidates(units: int, batch: int, chip: Chip, reset_gate: ResetGate = "after") -> list[Plan]:
    """Return all feasible plans, cheapest first."""
    unit_tiles = -(-units // 8)
    plans: list[Plan] = []
    for groups in range(1, chip.multiprocessors + 1):
        rows = next((rows for rows in ROWS if rows * groups >= batch), ROWS[-1])
        if groups > 1 and (groups - 1) * rows >= batch:
            continue  # the last group would be empty
        tiles = -(-unit_tiles // (chip.multiprocessors // groups))
        if tiles > MAX_TILES:
            break
        blocks = -(-unit_tiles // tiles)
        k, columns = -(-units // 16), tiles * 8
        after = reset_gate == "after"
        forward_phases = [(k, 3 * columns)] if after else [(k, 2 * columns), (k, columns)]
        backward_phases = [(3 * k, columns)] if after else [(k, columns), (2 * k, columns)]
        forward = layout(rows, forward_phases, 8 * columns, chip)
        backward = layout(rows, backward_phases, columns, chip)
        if forward is None or backward is None:
            continue
        waves = -(-batch // (groups * rows))
        plans.append(Plan(units, groups, rows, tiles, blocks, waves, forward, backward))
    return sorted(plans, key=lambda plan: plan.microseconds)


@functools.lru_cache(maxsize=256)
def choose_plan(units: int, batch: int, chip: Chip, reset_gate: ResetGate = "after") -> Plan | None:
    """Return the cheapest plan, or None if the weights do not fit into shared memory."""
    plans = candidates(units, batch, chip, reset_gate)
    return plans[0] if plans else None
