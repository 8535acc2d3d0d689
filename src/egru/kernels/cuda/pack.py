"""Weights in the order in which a block's tensor cores read them.

An operand tile without swizzle is ``[k / 8][column][8]``. Each block gets one contiguous piece: its own columns, all k.
Gates keep torch's block order r, u (torch's z), z (torch's n).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from egru.kernels.cuda.plan import Plan


def _whole_pieces(w: Tensor, piece: int) -> Tensor:
    """Pads (block, k8, column, 8) with zeros to whole pieces of the ring, and flattens a block's share."""
    return F.pad(w, (0, 0, 0, 0, 0, -w.shape[1] % (2 * piece))).flatten(1)


def pack_forward(weight_hh: Tensor, plan: Plan, reset_gate: str, low: torch.dtype) -> Tensor:
    """Columns are (tile, gate, unit), so that one thread's accumulators hold all gates of its units.

    "before" has two products: r and u against ``y``, then z against ``r*y``, one behind the other.
    """
    H, K, piece = plan.units, plan.k_tiles * 16, plan.forward.piece
    units = plan.blocks * plan.tiles * 8
    w = F.pad(weight_hh.to(low).view(3, H, H), (0, K - H, 0, units - H))  # (gate, unit, k)
    w = w.view(3, plan.blocks, plan.tiles, 8, K // 8, 8).permute(1, 4, 2, 0, 3, 5)  # (block, k8, tile, gate, unit, k)
    products = [w] if reset_gate == "after" else [w[:, :, :, :2], w[:, :, :, 2:]]
    parts = [_whole_pieces(part.reshape(plan.blocks, K // 8, -1, 8), piece) for part in products]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def pack_backward(weight_hh: Tensor, plan: Plan, reset_gate: str, low: torch.dtype) -> Tensor:
    """Columns are the units whose ``dy`` the block computes; k runs over (gate, unit).

    "before" has two products: over z, then over r and u.
    """
    H, K, piece = plan.units, plan.k_tiles * 16, plan.backward.piece
    units = plan.blocks * plan.tiles * 8
    w = F.pad(weight_hh.to(low).view(3, H, H), (0, units - H, 0, K - H))  # (gate, k, unit)
    w = w.view(3, K // 8, 8, plan.blocks, plan.tiles * 8).permute(3, 0, 1, 4, 2)  # (block, gate, k8, unit, k)
    products = [w] if reset_gate == "after" else [w[:, 2:], w[:, :2]]
    parts = [_whole_pieces(part.reshape(plan.blocks, -1, plan.tiles * 8, 8), piece) for part in products]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def pad_gates(weight: Tensor, padded: int, inputs: int, low: torch.dtype) -> Tensor:
    """``(3H, I)`` to ``(3*padded, inputs)`` in the type of the products: whole tiles and aligned rows."""
    H, inputs_now = weight.shape[0] // 3, weight.shape[1]
    w = F.pad(weight.to(low).view(3, H, inputs_now), (0, inputs - inputs_now, 0, padded - H))
    return w.view(3 * padded, inputs)


def pad_input(input: Tensor, inputs: int, low: torch.dtype) -> Tensor:
    """``(T, B, I)`` to ``(T*B, inputs)``: products of unaligned rows are several times slower."""
    flat = input.reshape(-1, input.shape[-1])
    if flat.shape[1] == inputs:
        return flat.to(low)
    out = torch.zeros(flat.shape[0], inputs, dtype=low, device=input.device)
    out[:, : flat.shape[1]] = flat
    return out
