"""How a persistent kernel is laid over the chip: plain arithmetic, no device needed.

A *group* of blocks (one per multiprocessor) holds one copy of the recurrent weights and works on ``rows`` rows of the
batch; the batch is split over as many groups as fit, and run in several *waves* where even that is too few.
"""

import dataclasses
import functools
from typing import Literal

Direction = Literal["forward", "backward"]

ROWS = (8, 16, 32, 48, 64)  # of a group; few, since each compiles its own kernel; 64 is one warpgroup product
MAX_TILES = 5  # unit tiles of a block whose accumulators and state still fit the registers


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a plan needs to know of a device."""

    multiprocessors: int
    shared_bytes: int  # that one block can ask for


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shared memory of one block: the ring through which the exchange streams past the resident weights."""

    slot_tiles: int  # k16-tiles per slot
    slots: int
    alias: bool  # the scratch for adding the warpgroups' halves lies on the ring
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
        """Units rounded up to whole tiles."""
        return ceil_to(self.units, 8)

    @property
    def k_tiles(self) -> int:
        """k16-tiles of one gate's worth of units."""
        return -(-self.units // 16)

    @property
    def grid(self) -> int:
        return self.groups * self.blocks

    @property
    def microseconds(self) -> float:
        """A rough price of one step, forward and backward: what plans are ranked by."""
        return self.waves * _price(self.units, self.rows, self.tiles, self.grid)


def ceil_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def layout(rows: int, phases: list[tuple[int, int]], constants: int, chip: Chip) -> Layout | None:
    """The best ring beside the resident weights, or None where none fits.

    ``phases`` are the products of a step, (k16-tiles, columns). Short pieces cost the feeding and the multiplying
    threads time; long ones, and few of them, leave little in flight; all are padded to whole pieces. The number of
    slots is even: a slot must always meet the same of the two warpgroups.
    """
    scratch = max(columns for _, columns in phases) // 8 * 2048
    fixed = constants * 4 + 1024  # barriers, and the slack behind the ring that products read
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
                feeding = slices * 200 / (4 if slots % 4 == 0 else 2)
                flowing = slices * slot / min(60, (slots - 2) * slot / 500)  # copies take some 500 cycles
                multiplying = slices / 2 * (350 + slot_tiles * max(columns / 2, 16 + columns / 4))
                cycles += max(feeding, flowing, multiplying) + slot / 30
            used = weights + fixed + slots * slot + (0 if alias else scratch)
            if best is None or cycles < best[0]:
                best = cycles, Layout(slot_tiles, slots, alias, used)
    return best[1] if best else None


def _price(units: int, rows: int, tiles: int, grid: int) -> float:
    """Fitted by eye to an H200: see docs/gpu-notes.md for what each term stands for."""
    k = -(-units // 16)
    kilobytes = k * rows * 32 * 4 / 1000  # forward one gate block, backward three
    ingress = kilobytes / 60  # a multiprocessor takes in some 60 KB a microsecond
    shared_read = kilobytes * grid / 1000 / 6.5  # and L2 hands out some 6.5 MB
    product = k * (max(12 * tiles, 16 + 6 * tiles) + 3 * max(4 * tiles, 16 + 2 * tiles)) / 1800
    return 5.0 + max(ingress, shared_read, product) + 0.7 * tiles


def candidates(units: int, batch: int, chip: Chip, reset_gate: str = "after") -> list[Plan]:
    """Every sensible plan, cheapest first."""
    unit_tiles = -(-units // 8)
    found: list[Plan] = []
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
        found.append(Plan(units, groups, rows, tiles, blocks, waves, forward, backward))
    return sorted(found, key=lambda plan: plan.microseconds)


@functools.lru_cache(maxsize=256)
def choose_plan(units: int, batch: int, chip: Chip, reset_gate: str = "after") -> Plan | None:
    """The cheapest plan, or None where the weights do not fit the chip."""
    plans = candidates(units, batch, chip, reset_gate)
    return plans[0] if plans else None
