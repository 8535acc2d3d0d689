"""Random crops, translations and rotations of frames, one per recording, on the device of the frames."""

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
    """Rotate, translate and crop each row of a batch; all frames of a row move alike.

    Values are taken from the nearest pixel, and are zero outside the frame.

    Args:
        frames: Square frames, ``(B, ..., C, S, S)``, floating-point.
        rotate: Degrees, anticlockwise, ``(B,)``.
        translate: Pixels to the right and down, ``(B, 2)``.
        crop: Side of a square that is enlarged to the whole frame, as a fraction of ``S``, ``(B,)``.
        centre: Centre of that square: right and down from the middle of the frame, in units of ``S / 2``, ``(B, 2)``.

    Returns:
        Frames of the same shape and dtype.

    Raises:
        ValueError: If ``frames`` has another shape or dtype.

    Example:
        >>> frame = torch.zeros(1, 1, 4, 4)
        >>> frame[0, 0, 1, 1] = 1.0
        >>> egru.data.warp(frame, translate=torch.tensor([[1.0, 0.0]]))[0, 0, 1]
        tensor([0., 0., 1., 0.])
    """
    B, S = frames.shape[0], frames.shape[-1]
    if frames.dim() < 4 or frames.shape[-2] != S or not frames.is_floating_point():
        raise ValueError(
            f"warp: frames must be floating-point of shape (B, ..., C, S, S), got {frames.dtype} {tuple(frames.shape)}"
        )
    options = {"device": frames.device, "dtype": torch.float32}
    angle = torch.zeros(B, **options) if rotate is None else torch.deg2rad(rotate.to(**options))
    shift = torch.zeros(B, 2, **options) if translate is None else translate.to(**options) * (2 / S)
    scale = torch.ones(B, **options) if crop is None else crop.to(**options)
    middle = torch.zeros(B, 2, **options) if centre is None else centre.to(**options)
    # The pixel o of the result comes from scale * R (o - shift) + middle, in [-1, 1] with y pointing down.
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
    """Apply :func:`warp` with uniform random parameters, one draw per row.

    Args:
        frames: Square frames, ``(B, ..., C, S, S)``, floating-point.
        crop: Minimum side of the cropped square, as a fraction of ``S``. The square lies inside the frame.
        translate: Maximum translation in pixels, in each direction.
        rotate: Maximum rotation in degrees, in each direction.
        generator: Random generator on the device of ``frames``. If None, the default generator of torch.

    Returns:
        Frames of the same shape and dtype.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> frames = torch.rand(8, 32, 2, 32, 32)  # 8 recordings of 32 frames with 2 polarities
        >>> egru.data.augment(frames, rotate=10.0).shape
        torch.Size([8, 32, 2, 32, 32])
    """
    if not 0 < crop <= 1:
        raise ValueError(f"augment: crop must be a fraction, 0 < crop <= 1; got {crop!r}")
    for name, value in (("translate", translate), ("rotate", rotate)):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"augment: {name} must be finite and not negative, got {value!r}")
    B = frames.shape[0]
    draw = torch.rand(6, B, generator=generator, device=frames.device, dtype=torch.float32)
    side = 1 - (1 - crop) * draw[0]
    signed = 2 * draw[1:] - 1
    return warp(
        frames,
        rotate=rotate * signed[0],
        translate=translate * signed[1:3].t(),
        crop=side,
        centre=((1 - side) * signed[3:5]).t(),
    )
