"""Arranging sequences in time: packed input, reversal, stacked states."""

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from egru.events import EventState


def pack_like(y: Tensor, packed: PackedSequence, lengths: Tensor) -> PackedSequence:
    """Pack ``y``, ``(T, B, features)``, in the arrangement of the sequence ``packed`` with these lengths."""
    if packed.sorted_indices is not None:
        y, lengths = y[:, packed.sorted_indices], lengths[packed.sorted_indices.cpu()]
    data = pack_padded_sequence(y, lengths).data
    return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)


def reverse_time(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverse ``x``, ``(T, B, features)``, in time, each sequence within its length; padding stays at the end."""
    if lengths is None:
        return x.flip(0)
    steps = torch.arange(x.shape[0], device=x.device)[:, None]
    index = torch.where(steps < lengths, lengths - 1 - steps, steps)
    return x.gather(0, index[..., None].expand_as(x))


def stack_states(states: list[EventState]) -> EventState:
    """Stack states along a new first dimension; a single state becomes a view, without a copy."""
    if len(states) == 1:
        c, y = states[0]
        return EventState(c.unsqueeze(0), y.unsqueeze(0))
    return EventState(torch.stack([state.c for state in states]), torch.stack([state.y for state in states]))
