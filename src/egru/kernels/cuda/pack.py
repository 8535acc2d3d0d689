"""Weight layouts of the persistent kernels, in plain torch: the reference for ``source/prepare.cu``.

An operand tile without swizzle is ``[k / 8][column][8]``. Each block reads one contiguous span: its columns, for all k.
Gates are in torch's order: r, u (torch's z), z (torch's n).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from egru.kernels.cuda.plan import Plan
from egru.types import ResetGate


def _pad_to_slots(w: Tensor, slot_tiles: int) -> Tensor:
    """Pad ``(block, k8, column, 8)`` with zeros to whole slots of the ring, and flatten each block."""
    return F.pad(w, (0, 0, 0, 0, 0, -w.shape[1] % (2 * slot_tiles))).flatten(1)


def pack_forward(weight_hh: Tensor, plan: Plan, reset_gate: ResetGate, low: torch.dtype) -> Tensor:
    """Pack for the forward pass. Columns are (tile, gate, unit): a thread accumulates all gates of its units.

    "before" has two operands, one behind the other: r and u, multiplied with ``y``, then z, multiplied with ``r*y``.
    """
    H, K, slot_tiles = plan.units, plan.k_tiles * 16, plan.forward.slot_tiles
    units = plan.blocks * plan.tiles * 8
    w = F.pad(weight_hh.to(low).view(3, H, H), (0, K - H, 0, units - H))  # (gate, unit, k)
    w = w.view(3, plan.blocks, plan.tiles, 8, K // 8, 8).permute(1, 4, 2, 0, 3, 5)  # (block, k8, tile, gate, unit, k)
    products = [w] if reset_gate == "after" else [w[:, :, :, :2], w[:, :, :, 2:]]
    parts = [_pad_to_slots(part.reshape(plan.blocks, K // 8, -1, 8), slot_tiles) for part in products]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def pack_backward(weight_hh: Tensor, plan: Plan, reset_gate: ResetGate, low: torch.dtype) -> Tensor:
    """Pack for the backward pass. Columns are the units whose ``dy`` the block computes; k runs over (gate, unit).

    "before" has two operands, one behind the other: z, then r and u.
    """
    H, K, slot_tiles = plan.units, plan.k_tiles * 16, plan.backward.slot_tiles
    units = plan.blocks * plan.tiles * 8
    w = F.pad(weight_hh.to(low).view(3, H, H), (0, units - H, 0, K - H))  # (gate, k, unit)
    w = w.view(3, K // 8, 8, plan.blocks, plan.tiles * 8).permute(3, 0, 1, 4, 2)  # (block, gate, k8, unit, k)
    products = [w] if reset_gate == "after" else [w[:, 2:], w[:, :2]]
    parts = [_pad_to_slots(part.reshape(plan.blocks, -1, plan.tiles * 8, 8), slot_tiles) for part in products]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def pad_gates(weight: Tensor, padded: int, inputs: int, low: torch.dtype, gates: int = 3) -> Tensor:
    """Pad ``(gates*H, I)`` to ``(gates*padded, inputs)`` and convert to ``low``: whole tiles and aligned rows."""
    H, inputs_now = weight.shape[0] // gates, weight.shape[1]
    w = F.pad(weight.to(low).view(gates, H, inputs_now), (0, inputs - inputs_now, 0, padded - H))
    return w.view(gates * padded, inputs)


def pad_input(input: Tensor, inputs: int, low: torch.dtype) -> Tensor:
    """Pad ``(T, B, I)`` to ``(T*B, inputs)``: products of unaligned rows are several times slower."""
    flat = input.reshape(-1, input.shape[-1])
    if flat.shape[1] == inputs:
        return flat.to(low)
    out = torch.zeros(flat.shape[0], inputs, dtype=low, device=input.device)
    out[:, : flat.shape[1]] = flat
    return out
