"""How a persistent kernel is laid over the chip: plain arithmetic, no device needed.

A *group* of blocks (one per multiprocessor) holds one copy of the recurrent weights and works on ``rows`` rows of the
batch; the batch is split over as many groups as fit, and run in several *waves* where even that is too few.
"""

import dataclasses
import functools

MAX_ROWS = 64  # rows of one warpgroup product
MAX_TILES = 5  # unit tiles of a block whose accumulators and state still fit the registers


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

    @property
    def eager(self) -> bool:
        """Give slots back at once: a short ring gains more from copies in flight than from products queued up."""
        return self.slots <= 10


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


def pieces(k_tiles: int, rows: int, whole: bool) -> list[int]:
    """Sizes of a ring slot worth trying, in k16-tiles, largest first: some 8 KB, and at least four pieces.

    ``whole`` prefers sizes that leave no shorter last piece: in the backward kernel the compiler pays for one with
    synchronous products.
    """
    most = max(1, min(8192 // (rows * 32), -(-k_tiles // 4)))
    exact = [size for size in range(most, 0, -1) if k_tiles % size == 0]
    return exact if whole and 2 * exact[0] >= most else [most, *[size for size in (4, 2, 1) if size < most]]


def layout(
    units: int, rows: int, tiles: int, columns: int, constants: int, chip: Chip, blocks: int = 1
) -> Layout | None:
    """Shared memory for products ``columns`` wide over ``blocks`` gate blocks, or None where a ring does not fit.

    The number of slots is even: a slot must always meet the same of the two warpgroups.
    """
    k_tiles = -(-units // 16)
    weights = k_tiles * 32 * 3 * tiles * 8
    scratch = columns // 8 * 2048
    fixed = weights + constants * tiles * 8 * 4 + 1024  # barriers, and the slack behind the ring that products read
    free = chip.shared_bytes - fixed
    for piece in pieces(blocks * k_tiles, rows, blocks > 1):
        slot = piece * rows * 32
        apart, shared = (min(16, room // slot // 2 * 2) for room in (free - scratch, free))
        if apart >= 12 or apart == shared >= 8:
            return Layout(piece, apart, False, fixed + scratch + apart * slot)
        if shared >= (8 if piece > 2 else 4) and shared * slot >= scratch:
            return Layout(piece, shared, True, fixed + shared * slot)
    return None


def _price(units: int, rows: int, tiles: int, cluster: int, grid: int) -> float:
    """Fitted by eye to an H200: see docs/gpu-notes.md for what each term stands for."""
    k = -(-units // 16)
    kilobytes = k * rows * 32 * 4 / 1000  # forward one gate block, backward three
    ingress = kilobytes / 60  # a multiprocessor takes in some 60 KB a microsecond
    shared_read = kilobytes * grid / 1000 / 6.5  # and L2 hands out some 6.5 MB
    product = k * (max(12 * tiles, 16 + 6 * tiles) + 3 * max(4 * tiles, 16 + 2 * tiles)) / 1800
    sharing = 0.5 if cluster > 1 else 0.0  # waiting for the neighbours costs more than their copies save
    return 5.0 + max(ingress, shared_read, product) + 0.7 * tiles + sharing


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
            backward = layout(units, rows, tiles, tiles * 8, 1, chip, 3 if reset_gate == "after" else 1)
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
