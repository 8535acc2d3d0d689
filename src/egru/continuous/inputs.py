"""Input events of a batch, and constructors from lists, padded tensors and sampled series."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class InputEvents(NamedTuple):
    """Input events of a batch: the events of all samples, concatenated and sorted in time within each sample.

    Use one of the constructors, which sort and concatenate. Gradients flow to times and values through all of them.

    Args:
        times: Event times ``(K,)``, floating point.
        channels: Input channels ``(K,)``, int64.
        values: Event values ``(K,)``, with the dtype of ``times``.
        offsets: ``(B + 1,)``, int64. Sample ``s`` has the events ``offsets[s]:offsets[s + 1]``.

    Example:
        >>> events = InputEvents.from_lists(
        ...     times=[torch.tensor([0.3, 1.7]), torch.tensor([0.8])],
        ...     channels=[torch.tensor([0, 2]), torch.tensor([1])],
        ... )
        >>> events.offsets
        tensor([0, 2, 3])
    """

    times: Tensor
    channels: Tensor
    values: Tensor
    offsets: Tensor

    @property
    def batch(self) -> int:
        """The number of samples."""
        return len(self.offsets) - 1

    @classmethod
    def from_lists(
        cls, times: Sequence[Tensor], channels: Sequence[Tensor], values: Sequence[Tensor] | None = None
    ) -> "InputEvents":
        """Create input events from one tensor per sample, of any length and in any order.

        Args:
            times: Event times, one tensor ``(events,)`` per sample.
            channels: Input channels, one tensor per sample.
            values: Event values, one tensor per sample. If None, all values are 1.

        Returns:
            The events, sorted in time within each sample.

        Raises:
            ValueError: If there are no samples or the shapes do not match.
        """
        if values is None:
            values = [torch.ones_like(t) for t in times]
        if not len(times) == len(channels) == len(values):
            raise ValueError(
                "InputEvents.from_lists: times, channels and values must have one tensor per sample, "
                f"got {len(times)}, {len(channels)} and {len(values)}"
            )
        if len(times) == 0:
            raise ValueError("InputEvents.from_lists: at least one sample is required, got none")
        samples = []
        for s, (t, c, v) in enumerate(zip(times, channels, values, strict=True)):
            if t.dim() != 1 or t.shape != c.shape or t.shape != v.shape:
                raise ValueError(
                    "InputEvents.from_lists: times, channels and values of a sample must all have shape (events,), "
                    f"got {tuple(t.shape)}, {tuple(c.shape)} and {tuple(v.shape)} in sample {s}"
                )
            order = t.detach().argsort(stable=True)
            samples.append((t[order], c[order].to(torch.int64), v[order]))
        offsets = torch.tensor([0, *(len(t) for t in times)], device=times[0].device).cumsum(0)
        t, c, v = (torch.cat(tensors) for tensors in zip(*samples, strict=True))
        return cls(t, c, v, offsets)

    @classmethod
    def from_padded(
        cls, times: Tensor, channels: Tensor, values: Tensor | None = None, lengths: Tensor | None = None
    ) -> "InputEvents":
        """Create input events from padded tensors.

        Args:
            times: Event times ``(B, L)``.
            channels: Input channels ``(B, L)``.
            values: Event values ``(B, L)``. If None, all values are 1.
            lengths: The number of events of each sample ``(B,)``; the rest of its row is padding. If None, all rows
                are full.

        Returns:
            The events, sorted in time within each sample.

        Raises:
            ValueError: If the shapes do not match or a length is not between 0 and ``L``.
        """
        if times.dim() != 2 or channels.shape != times.shape or (values is not None and values.shape != times.shape):
            shapes = [tuple(x.shape) for x in (times, channels, values) if x is not None]
            raise ValueError(
                f"InputEvents.from_padded: times, channels and values must all have shape (batch, events), got {shapes}"
            )
        B, L = times.shape
        if lengths is None:
            lengths = torch.full((B,), L, device=times.device)
        if lengths.shape != (B,) or bool((lengths < 0).any()) or bool((lengths > L).any()):
            raise ValueError(
                f"InputEvents.from_padded: lengths must have shape ({B},) and values from 0 to {L}, "
                f"got {lengths.tolist()}"
            )
        sizes = [int(n) for n in lengths]
        return cls.from_lists(
            [t[:n] for t, n in zip(times, sizes, strict=True)],
            [c[:n] for c, n in zip(channels, sizes, strict=True)],
            None if values is None else [v[:n] for v, n in zip(values, sizes, strict=True)],
        )

    @classmethod
    def from_series(cls, x: Tensor, step: float, *, start: float = 0.0, drop_zeros: bool = False) -> "InputEvents":
        """Create input events from a regularly sampled series.

        At time ``start + k * step`` every channel receives an event with its value in ``x[:, k]``.

        Args:
            x: The series ``(B, T, D)``.
            step: The time between two samples of the series.
            start: The time of the first sample of the series.
            drop_zeros: Whether to omit entries that are exactly 0. They have no effect, but omitted ones have no
                gradient either.

        Returns:
            The events, sorted in time within each sample.

        Raises:
            ValueError: If ``x`` is not 3-dimensional or ``step`` is not positive.
        """
        if x.dim() != 3:
            raise ValueError(
                f"InputEvents.from_series: x must have shape (batch, time, channels), got {tuple(x.shape)}"
            )
        if not step > 0:
            raise ValueError(f"InputEvents.from_series: step must be positive, got {step!r}")
        times = start + step * torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        return cls.from_irregular(times.expand(x.shape[:2]), x, drop_zeros=drop_zeros)

    @classmethod
    def from_irregular(
        cls, times: Tensor, x: Tensor, observed: Tensor | None = None, *, drop_zeros: bool = False
    ) -> "InputEvents":
        """Create input events from an irregularly sampled series, optionally with missing values.

        Args:
            times: The times of the samples of the series ``(B, T)``.
            x: The series ``(B, T, D)``. Entries that are not observed may have any value.
            observed: Which entries of ``x`` exist, ``(B, T)`` or ``(B, T, D)`` bool. If None, all of them.
            drop_zeros: Whether to omit entries that are exactly 0.

        Returns:
            The events, sorted in time within each sample.

        Raises:
            ValueError: If the shapes do not match or ``observed`` is not bool.
        """
        if x.dim() != 3 or times.shape != x.shape[:2]:
            raise ValueError(
                "InputEvents.from_irregular: x must have shape (batch, time, channels) and times (batch, time), "
                f"got {tuple(x.shape)} and {tuple(times.shape)}"
            )
        keep = torch.ones_like(x, dtype=torch.bool)
        if observed is not None:
            if observed.dtype != torch.bool or observed.shape not in (x.shape, x.shape[:2]):
                raise ValueError(
                    "InputEvents.from_irregular: observed must be a bool tensor of shape "
                    f"{tuple(x.shape)} or {tuple(x.shape[:2])}, got {observed.dtype} of shape {tuple(observed.shape)}"
                )
            keep = keep & (observed if observed.dim() == 3 else observed[..., None])
        if drop_zeros:
            keep = keep & (x != 0)
        entry_times = times[..., None].expand_as(x)
        channels = torch.arange(x.shape[2], device=x.device).expand_as(x)
        samples = range(len(x))
        return cls.from_lists(
            [entry_times[s][keep[s]] for s in samples],
            [channels[s][keep[s]] for s in samples],
            [x[s][keep[s]] for s in samples],
        )
