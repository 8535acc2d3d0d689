"""Dropout and zoneout for recurrent layers."""

import torch
import torch.nn.functional as F
from torch import Tensor

from egru.types import DropoutMode


def sequence_dropout(x: Tensor, p: float, mode: DropoutMode, training: bool) -> Tensor:
    """Apply dropout to a sequence.

    Args:
        x: Sequence, ``(T, B, features)``.
        p: Probability that an element is set to zero.
        mode: ``"variational"`` draws one mask per sequence and applies it at every step; ``"plain"`` draws a mask per
            step, as ``torch.nn.GRU`` does.
        training: If False, ``x`` is returned unchanged.

    Returns:
        The sequence with dropped elements, the others scaled by ``1 / (1 - p)``.
    """
    if not training or p == 0:
        return x
    if mode == "plain":
        return F.dropout(x, p)
    return x * F.dropout(torch.ones_like(x[:1]), p)


def zoneout_keep(c: Tensor, steps: int, p: float, training: bool) -> Tensor | None:
    """Return the fraction of its previous state that each unit keeps under zoneout.

    Args:
        c: A state, ``(B, H)``, for shape, dtype and device.
        steps: Number of steps ``T``.
        p: Probability that a unit keeps its state.
        training: Whether to draw masks.

    Returns:
        In training a mask of zeros and ones, ``(T, B, H)``; in evaluation the expected value ``p``, ``(1, 1, 1)``;
        None if ``p`` is 0.
    """
    if p == 0:
        return None
    if training:
        return torch.rand(steps, *c.shape, dtype=c.dtype, device=c.device).lt(p).to(c.dtype)
    return torch.full((1, 1, 1), p, dtype=c.dtype, device=c.device)
