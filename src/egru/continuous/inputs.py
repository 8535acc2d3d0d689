"""Input events of a batch, and how to get them from lists, padded tensors and sampled series."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ME = "InputEvents"


class InputEvents(NamedTuple):
    """Events of all samples, concatenated and sorted in time within each: sample ``s`` has
    ``offsets[s]:offsets[s + 1]``.

    ``times`` and ``values`` are ``(K,)``, of one floating type; ``channels`` is ``(K,)`` and ``offsets`` ``(B + 1,)``,
    int64. Gradients flow to times and values through every constructor here.
    """

    times: Tensor
    channels: Tensor
    values: Tensor
    offsets: Tensor

    @property
    def batch(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def from_lists(
        cls, times: Sequence[Tensor], channels: Sequence[Tensor], values: Sequence[Tensor] | None = None
    ) -> "InputEvents":
        """One tensor per sample, of any length and order; values of 1 where none are given."""
        if values is None:
            values = [torch.ones_like(t) for t in times]
        if not len(times) == len(channels) == len(values):
            raise ValueError(
                f"{_ME}.from_lists: times, channels and values must have one tensor per sample, "
                f"got {len(times)}, {len(channels)} and {len(values)}"
            )
        if len(times) == 0:
            raise ValueError(f"{_ME}.from_lists: at least one sample is needed, got none")
        parts = []
        for s, (t, c, v) in enumerate(zip(times, channels, values, strict=True)):
            if t.dim() != 1 or t.shape != c.shape or t.shape != v.shape:
                raise ValueError(
                    f"{_ME}.from_lists: sample {s} has times of shape {tuple(t.shape)}, channels {tuple(c.shape)} and "
                    f"values {tuple(v.shape)}; all three must be (events,)"
                )
            order = t.detach().argsort(stable=True)
            parts.append((t[order], c[order].to(torch.int64), v[order]))
        offsets = torch.tensor([0, *(len(t) for t in times)], device=times[0].device).cumsum(0)
        t, c, v = (torch.cat(part) for part in zip(*parts, strict=True))
        return cls(t, c, v, offsets)

    @classmethod
    def from_padded(
        cls, times: Tensor, channels: Tensor, values: Tensor | None = None, lengths: Tensor | None = None
    ) -> "InputEvents":
        """From ``(B, L)`` tensors, of which sample ``s`` fills the first ``lengths[s]``, or all."""
        if times.dim() != 2 or channels.shape != times.shape or (values is not None and values.shape != times.shape):
            shapes = [tuple(x.shape) for x in (times, channels, values) if x is not None]
            raise ValueError(f"{_ME}.from_padded: times, channels and values must all be (batch, events), got {shapes}")
        B, L = times.shape
        if lengths is None:
            lengths = torch.full((B,), L, device=times.device)
        if lengths.shape != (B,) or bool((lengths < 0).any()) or bool((lengths > L).any()):
            raise ValueError(f"{_ME}.from_padded: lengths must be ({B},), each from 0 to {L}; got {lengths.tolist()}")
        keep = [int(n) for n in lengths]
        return cls.from_lists(
            [t[:n] for t, n in zip(times, keep, strict=True)],
            [c[:n] for c, n in zip(channels, keep, strict=True)],
            None if values is None else [v[:n] for v, n in zip(values, keep, strict=True)],
        )

    @classmethod
    def from_series(cls, x: Tensor, step: float, *, start: float = 0.0, drop_zeros: bool = False) -> "InputEvents":
        """A regularly sampled series ``(B, T, D)``: at ``start + k * step`` every channel gets ``x[:, k]``.

        ``drop_zeros`` leaves out entries that are exactly 0: they do nothing, and have no gradient then.
        """
        if x.dim() != 3:
            raise ValueError(f"{_ME}.from_series: x must be (batch, time, channels), got {tuple(x.shape)}")
        if not step > 0:
            raise ValueError(f"{_ME}.from_series: step must be positive, got {step!r}")
        times = start + step * torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        return cls.from_irregular(times.expand(x.shape[:2]), x, drop_zeros=drop_zeros)

    @classmethod
    def from_irregular(
        cls, times: Tensor, x: Tensor, observed: Tensor | None = None, *, drop_zeros: bool = False
    ) -> "InputEvents":
        """A series ``(B, T, D)`` sampled at its own times ``(B, T)``; ``observed`` marks the entries there are.

        ``observed`` is ``(B, T)`` or ``(B, T, D)``, bool, and absent entries may hold anything.
        """
        if x.dim() != 3 or times.shape != x.shape[:2]:
            raise ValueError(
                f"{_ME}.from_irregular: x must be (batch, time, channels) and times (batch, time), "
                f"got {tuple(x.shape)} and {tuple(times.shape)}"
            )
        keep = torch.ones_like(x, dtype=torch.bool)
        if observed is not None:
            if observed.dtype != torch.bool or observed.shape not in (x.shape, x.shape[:2]):
                raise ValueError(
                    f"{_ME}.from_irregular: observed must be bool of shape {tuple(x.shape)} or {tuple(x.shape[:2])}, "
                    f"got {observed.dtype} of {tuple(observed.shape)}"
                )
            keep = keep & (observed if observed.dim() == 3 else observed[..., None])
        if drop_zeros:
            keep = keep & (x != 0)
        every = times[..., None].expand_as(x)
        channels = torch.arange(x.shape[2], device=x.device).expand_as(x)
        rows = range(len(x))
        return cls.from_lists(
            [every[s][keep[s]] for s in rows], [channels[s][keep[s]] for s in rows], [x[s][keep[s]] for s in rows]
        )
