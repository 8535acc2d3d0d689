"""Crop, translation and rotation of batches of frames, on their device, one draw per recording."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def warp(
    frames: Tensor,
    *,
    rotate: Tensor | None = None,
    translate: Tensor | None = None,
    crop: Tensor | None = None,
    centre: Tensor | None = None,
) -> Tensor:
    """Move every row of ``frames`` ``(B, ..., S, S)`` its own way, all its frames alike; nearest pixel, zeros outside.

    Args:
        rotate: degrees, anticlockwise as the image is seen, ``(B,)``.
        translate: pixels to the right and down, ``(B, 2)``.
        crop: side of the square that is cut out and stretched over the whole frame, as a share of it, ``(B,)``.
        centre: of that square, right and down of the middle, in halves of the frame, ``(B, 2)``.
    """
    B, S = frames.shape[0], frames.shape[-1]
    if frames.dim() < 4 or frames.shape[-2] != S or not frames.is_floating_point():
        raise ValueError(
            f"warp: frames must be floating (B, ..., S, S) with square frames, got {frames.dtype} {tuple(frames.shape)}"
        )
    kind = {"device": frames.device, "dtype": torch.float32}
    angle = torch.zeros(B, **kind) if rotate is None else torch.deg2rad(rotate.to(**kind))
    shift = torch.zeros(B, 2, **kind) if translate is None else translate.to(**kind) * (2 / S)
    scale = torch.ones(B, **kind) if crop is None else crop.to(**kind)
    middle = torch.zeros(B, 2, **kind) if centre is None else centre.to(**kind)
    # A pixel of the result at o is read at scale * R (o - shift) + middle, in [-1, 1] with y downwards.
    cos, sin = scale * torch.cos(angle), scale * torch.sin(angle)
    R = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
    offset = middle - (R @ shift[..., None])[..., 0]
    images = frames.reshape(B, -1, S, S)
    grid = F.affine_grid(torch.cat([R, offset[..., None]], -1), [B, 1, S, S], align_corners=False)
    return F.grid_sample(images, grid.to(images.dtype), mode="nearest", align_corners=False).reshape(frames.shape)


def augment(
    frames: Tensor,
    *,
    crop: float = 0.8,
    translate: float = 3.0,
    rotate: float = 15.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Random draws for :func:`warp`, uniform per row: a square of at least ``crop`` of the side anywhere in the frame,
    up to ``translate`` pixels each way, up to ``rotate`` degrees either way.
    """
    if not 0 < crop <= 1:
        raise ValueError(f"augment: crop must be a share of the side, 0 < crop <= 1; got {crop!r}")
    for name, value in (("translate", translate), ("rotate", rotate)):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"augment: {name} must be finite and not negative, got {value!r}")
    B = frames.shape[0]
    draw = torch.rand(6, B, generator=generator, device=frames.device, dtype=torch.float32)
    side = 1 - (1 - crop) * draw[0]
    both = 2 * draw[1:] - 1
    return warp(
        frames,
        rotate=rotate * both[0],
        translate=translate * both[1:3].t(),
        crop=side,
        centre=((1 - side) * both[3:5]).t(),
    )
