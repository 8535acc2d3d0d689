"""Dropout that fits recurrent layers."""

import torch
import torch.nn.functional as F
from torch import Tensor

MODES = ("variational", "plain")


def sequence_dropout(x: Tensor, p: float, mode: str, training: bool) -> Tensor:
    """Dropout on ``x`` of shape ``(T, B, features)``.

    ``"variational"``: one mask per batch row and feature, shared over time. ``"plain"``: independent at every step, as
    in ``torch.nn.GRU``.
    """
    if not training or p == 0:
        return x
    if mode == "plain":
        return F.dropout(x, p)
    return x * F.dropout(torch.ones_like(x[:1]), p)


def zoneout_keep(c: Tensor, steps: int, p: float, training: bool) -> Tensor | None:
    """The share of the old state each unit keeps: a 0/1 mask per step in training, ``p`` itself in evaluation."""
    if p == 0:
        return None
    if training:
        return torch.rand(steps, *c.shape, dtype=c.dtype, device=c.device).lt(p).to(c.dtype)
    return torch.full((1, 1, 1), p, dtype=c.dtype, device=c.device)
