"""Recurrent cells: the state update before the event mechanism, in plain torch.

A cell maps ``(p, y, memory)`` to a :class:`CellUpdate`: ``p`` is the projected input ``x W + b``, ``y`` the events and
``memory`` the state of the previous step. :func:`egru.functional.event_step` adds thresholds, events and resets.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from egru.types import Compare, ResetGate


class CellUpdate(NamedTuple):
    """The proposed state of a step.

    Attributes:
        c: New state, before the event mechanism.
        output_gate: Gate ``o`` of an LSTM, which emits ``o * tanh(c)``; None for cells that emit ``c``.
        compare_output: Whether the emitted value is compared with the threshold, instead of ``c``.
        gates: Activations that :func:`egru.functional.egru_backward` needs; empty for cells without an explicit
            backward pass.
    """

    c: Tensor
    output_gate: Tensor | None
    gates: tuple[Tensor, ...]
    compare_output: bool = False


def gru_update(
    p: Tensor, y: Tensor, memory: Tensor, weight_hh: Tensor, bias_hh: Tensor | None, reset_gate: ResetGate = "before"
) -> CellUpdate:
    """Compute the GRU's proposed state ``u*z + (1-u)*memory`` (paper, Eq. 1).

    With ``reset_gate="before"``, as in the paper, ``z = tanh(p_z + (r*y) V_z)``. With ``"after"``, as in torch and
    cuDNN, ``z = tanh(p_z + r*(y V_z + b))``.

    Args:
        p: Projected input ``x W + b``, ``(B, 3H)``.
        y: Events of the previous step, ``(B, H)``.
        memory: State of the previous step, ``(B, H)``.
        weight_hh: Recurrent weights, ``(3H, H)``.
        bias_hh: Recurrent biases, ``(3H,)``, or None.
        reset_gate: Whether the reset gate acts before or after the recurrent product.

    Returns:
        The update with the gates ``(u, r, z)``, followed by ``q = y V_z + b`` for ``"after"``.

    Example:
        >>> y = memory = torch.zeros(2, 8)
        >>> update = egru.functional.gru_update(torch.randn(2, 24), y, memory, torch.randn(24, 8), None)
        >>> update.c.shape
        torch.Size([2, 8])
    """
    H = y.shape[-1]
    p_r, p_u, p_z = p.split(H, -1)
    if reset_gate == "after":
        v_r, v_u, q = F.linear(y, weight_hh, bias_hh).split(H, -1)
        u, r = torch.sigmoid(-(p_u + v_u)), torch.sigmoid(p_r + v_r)
        z = torch.tanh(p_z + r * q)
    else:
        q = None
        bias_ru, bias_z = (None, None) if bias_hh is None else bias_hh.split([2 * H, H])
        v_r, v_u = F.linear(y, weight_hh[: 2 * H], bias_ru).split(H, -1)
        u, r = torch.sigmoid(-(p_u + v_u)), torch.sigmoid(p_r + v_r)
        z = torch.tanh(p_z + F.linear(r * y, weight_hh[2 * H :], bias_z))
    gates = (u, r, z) if q is None else (u, r, z, q)
    return CellUpdate(u * z + (1 - u) * memory, None, gates)


def lstm_update(
    p: Tensor, y: Tensor, memory: Tensor, weight_hh: Tensor, bias_hh: Tensor | None, compare: Compare = "cell"
) -> CellUpdate:
    """Compute the LSTM's proposed state ``f*memory + i*g``. An event emits ``o*tanh(c)``.

    Args:
        p: Projected input ``x W + b``, ``(B, 4H)``, in the blocks i, f, g, o of ``torch.nn.LSTM``.
        y: Events of the previous step, ``(B, H)``.
        memory: State of the previous step, ``(B, H)``.
        weight_hh: Recurrent weights, ``(4H, H)``.
        bias_hh: Recurrent biases, ``(4H,)``, or None.
        compare: What the threshold is compared with: ``c`` (``"cell"``) or ``o*tanh(c)`` (``"output"``).

    Returns:
        The update with the output gate ``o``.

    Example:
        >>> y = memory = torch.zeros(2, 8)
        >>> update = egru.functional.lstm_update(torch.randn(2, 32), y, memory, torch.randn(32, 8), None)
        >>> update.c.shape
        torch.Size([2, 8])
    """
    i, f, g, o = (p + F.linear(y, weight_hh, bias_hh)).chunk(4, -1)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    return CellUpdate(f * memory + i * g, o, (), compare == "output")


def elman_update(p: Tensor, y: Tensor, memory: Tensor, weight_hh: Tensor, bias_hh: Tensor | None) -> CellUpdate:
    """Compute the Elman cell's proposed state ``tanh(p + y V + b)``.

    Args:
        p: Projected input ``x W + b``, ``(B, H)``.
        y: Events of the previous step, ``(B, H)``.
        memory: State of the previous step, ``(B, H)``. Not used.
        weight_hh: Recurrent weights, ``(H, H)``.
        bias_hh: Recurrent biases, ``(H,)``, or None.

    Returns:
        The update.

    Example:
        >>> y = memory = torch.zeros(2, 8)
        >>> update = egru.functional.elman_update(torch.randn(2, 8), y, memory, torch.randn(8, 8), None)
        >>> update.c.shape
        torch.Size([2, 8])
    """
    return CellUpdate(torch.tanh(p + F.linear(y, weight_hh, bias_hh)), None, ())
