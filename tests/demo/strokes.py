"""Pen strokes that draw stored digits: their lines, thinned to one pixel and followed from end to end."""

import numpy as np
import numpy.typing as npt
import torch

Stroke = list[tuple[float, float]]
_AROUND = ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1))


def thin(ink: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Thin lines to one pixel (Zhang and Suen, 1984)."""
    ink = np.pad(ink, 1)
    changed = True
    while changed:
        changed = False
        for first in (True, False):
            p = [np.roll(ink, (-dy, -dx), (0, 1)) for dy, dx in _AROUND]
            neighbours = sum(q.astype(int) for q in p)
            rises = sum((~p[i] & p[(i + 1) % 8]).astype(int) for i in range(8))
            north, east, south, west = p[0], p[2], p[4], p[6]
            open_ = ~(north & east & south) & ~(east & south & west)
            if not first:
                open_ = ~(north & east & west) & ~(north & south & west)
            remove = ink & (neighbours >= 2) & (neighbours <= 6) & (rises == 1) & open_
            ink = ink & ~remove
            changed |= bool(remove.any())
    return ink[1:-1, 1:-1]


def follow(line: npt.NDArray[np.bool_]) -> list[Stroke]:
    """Return strokes that pass through every pixel of thin lines, starting at their ends."""
    left = {(int(y), int(x)) for y, x in np.argwhere(line)}

    def neighbours(p: tuple[int, int], within: set[tuple[int, int]]) -> list[tuple[int, int]]:
        found = [(p[0] + dy, p[1] + dx) for dy, dx in (*_AROUND[::2], *_AROUND[1::2])]
        return [q for q in found if q in within]

    every, strokes = set(left), list[Stroke]()
    while left:
        point = min(left, key=lambda p: (len(neighbours(p, left)), p))
        joint = [q for q in neighbours(point, every) if q not in left]
        path = [*joint[:1], point]
        left.remove(point)
        while following := neighbours(path[-1], left):
            path.append(following[0])
            left.remove(following[0])
        path += [q for q in neighbours(path[-1], every) if q not in path][:1]
        strokes.append([(x + 0.5, y + 0.5) for y, x in path])
    return strokes


def strokes_of(image: npt.NDArray[np.float32], factor: int = 4) -> list[Stroke]:
    """Return strokes that draw an image of shape (28, 28), in units of its pixels."""
    fine = torch.nn.functional.interpolate(
        torch.from_numpy(image)[None, None], scale_factor=factor, mode="bilinear", align_corners=False
    )[0, 0]
    strokes = follow(thin((fine > 0.5).numpy()))
    longer = [stroke for stroke in strokes if len(stroke) > 2] or strokes
    return [[(x / factor, y / factor) for x, y in (*stroke[::2], stroke[-1])] for stroke in longer]
