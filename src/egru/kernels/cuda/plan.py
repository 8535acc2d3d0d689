"""How a persistent kernel is laid over the chip: plain arithmetic, no device needed.

A *group* of blocks (one per multiprocessor) holds one copy of the recurrent weights and works on ``rows`` rows of the
batch; the batch is split over as many groups as fit, and run in several *waves* where even that is too few.
"""

import dataclasses
import functools

MAX_ROWS = 64  # rows of one warpgroup product
MAX_TILES = 6  # unit tiles of a block whose accumulators and state still fit the registers


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a plan needs to know of a device."""

    multiprocessors: int
    shared_bytes: int  # that one block can ask for


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shared memory of one block: the ring through which the exchange streams past the resident weights."""

    piece: int  # k16-tiles of one slot
    slots: int
    alias: bool  # the scratch for adding the warpgroups' halves lies on the ring
    bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """A partition of ``units`` and batch rows over blocks."""

    units: int
    groups: int
    rows: int  # of the batch, per group; a multiple of 8
    tiles: int  # tiles of 8 units, per block
    blocks: int  # per group
    cluster: int  # neighbouring blocks that share their reads of the exchange
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
        return self.waves * _price(self.units, self.rows, self.tiles, self.cluster, self.grid)


def ceil_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def pieces(k_tiles: int, blocks: int, rows: int) -> list[int]:
    """Sizes of a ring slot worth trying, in k16-tiles, largest first.

    A copy should be some kilobytes, so slots of few rows are longer. Over three gate blocks ("after", backward) a
    multiple of three leaves no shorter last piece, which the compiler would pay for with synchronous products.
    """
    if blocks == 3:
        return [3 * next(d for d in (5, 4, 3, 2, 1) if k_tiles % d == 0)] if rows <= 16 else [3]
    return [min(16, k_tiles)] if rows <= 16 else [min(4, k_tiles), 2, 1]


def layout(
    units: int, rows: int, tiles: int, columns: int, constants: int, chip: Chip, blocks: int = 1
) -> Layout | None:
    """Shared memory for products ``columns`` wide over ``blocks`` gate blocks, or None where it does not fit."""
    weights = -(-units // 16) * 32 * 3 * tiles * 8
    scratch = columns // 8 * 2048
    fixed = weights + constants * tiles * 8 * 4 + 1024  # barriers, and the slack behind the ring that products read
    k16 = rows * 32
    for piece in pieces(-(-units // 16), blocks, rows):
        slot = piece * k16
        free = chip.shared_bytes - fixed
        if free - scratch >= 8 * slot:
            slots = min(16, (free - scratch) // slot)
            return Layout(piece, slots, False, fixed + scratch + slots * slot)
        slots = min(16, free // slot)
        if slots >= 4 and slots * slot >= scratch:
            return Layout(piece, slots, True, fixed + slots * slot)
    return None


def _price(units: int, rows: int, tiles: int, cluster: int, grid: int) -> float:
    k = -(-units // 16)
    kilobytes = k * rows * 32 * 4 / 1000  # forward one gate block, backward three
    ingress = kilobytes / 90  # a multiprocessor takes in some 90 KB a microsecond
    shared_read = kilobytes * grid / cluster / 1000 / 5.0  # and L2 hands out some 5 MB
    product = k * (max(12 * tiles, 16 + 6 * tiles) + 3 * max(4 * tiles, 16 + 2 * tiles)) / 1800
    pointwise = 0.25 * tiles
    return 4.0 + max(ingress, shared_read, product) + pointwise


def candidates(units: int, batch: int, chip: Chip, reset_gate: str = "after") -> list[Plan]:
    """Every sensible plan, cheapest first."""
    unit_tiles = -(-units // 8)
    found: list[Plan] = []
    for cluster in (1, 2, 4):
        usable = chip.multiprocessors // cluster * cluster
        if cluster == 4:
            usable = usable // 16 * 16  # clusters of four do not reach every multiprocessor of a GPC
        for groups in range(1, usable + 1):
            rows = min(MAX_ROWS, ceil_to(-(-batch // groups), 8))
            if groups > 1 and (groups - 1) * rows >= batch:
                break  # the last group would be empty
            most = usable // groups // cluster * cluster
            if most == 0:
                break
            tiles = -(-unit_tiles // most)
            if tiles > MAX_TILES:
                break
            blocks = ceil_to(-(-unit_tiles // tiles), cluster)
            width = 3 if reset_gate == "after" else 2
            forward = layout(units, rows, tiles, width * tiles * 8, 8, chip)
            backward = layout(units, rows, tiles, tiles * 8, 1, chip, width if width == 3 else 1)
            if forward is None or backward is None:
                continue
            waves = -(-batch // (groups * rows))
            found.append(Plan(units, groups, rows, tiles, blocks, cluster, waves, forward, backward))
    return sorted(found, key=lambda plan: plan.microseconds)


@functools.lru_cache(maxsize=256)
def choose_plan(units: int, batch: int, chip: Chip, reset_gate: str = "after") -> Plan | None:
    """The cheapest plan, or None where the weights do not fit the chip."""
    plans = candidates(units, batch, chip, reset_gate)
    return plans[0] if plans else None
