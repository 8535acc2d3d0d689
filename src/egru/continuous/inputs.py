"""Input events of a batch, and constructors from recordings, lists, padded tensors and sampled series."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
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

    def until(self, horizon: float | Tensor) -> "InputEvents":
        """Return the events at times up to ``horizon``, and drop later ones.

        Args:
            horizon: One number, or one per sample, ``(B,)``.

        Raises:
            ValueError: If ``horizon`` is a tensor of another shape.

        Example:
            >>> output = layer(events.until(1.0), horizon=1.0)
        """
        limit = torch.as_tensor(horizon).to(self.times)
        if limit.shape not in ((), (self.batch,)):
            raise ValueError(
                f"InputEvents.until: horizon must be a number or have shape ({self.batch},), got {tuple(limit.shape)}"
            )
        return self._select(self.times.detach() <= limit.expand(self.batch)[self._samples()])

    def window(self, start: float, stop: float) -> "InputEvents":
        """Return the events after ``start`` and up to ``stop``, with times counted from ``start``.

        Events at time 0 belong to the window that starts there. Use it to run a layer in chunks of time, with the state
        passed on from chunk to chunk.

        Raises:
            ValueError: If ``start`` is negative or not below ``stop``.

        Example:
            >>> first = layer(events.window(0.0, 2.0), 2.0)
            >>> second = layer(events.window(2.0, 4.0), 2.0, state=first.state)
        """
        if not 0 <= start < stop:
            raise ValueError(f"InputEvents.window: times must satisfy 0 <= start < stop, got {start!r} and {stop!r}")
        times = self.times.detach()
        selected = self._select((times <= stop) & ((times > start) | ((times == 0) & (start == 0))))
        return selected._replace(times=selected.times - start)

    def _samples(self) -> Tensor:
        """Return the sample that each event belongs to ``(K,)``."""
        return torch.repeat_interleave(torch.arange(self.batch, device=self.offsets.device), self.offsets.diff())

    def _select(self, keep: Tensor) -> "InputEvents":
        """Return the events at which ``keep``, ``(K,)``, is True."""
        offsets = torch.zeros_like(self.offsets)
        offsets[1:] = torch.bincount(self._samples()[keep], minlength=self.batch).cumsum(0)
        return InputEvents(self.times[keep], self.channels[keep], self.values[keep], offsets)

    @classmethod
    def from_lists(
        cls,
        times: Sequence[Tensor],
        channels: Sequence[Tensor],
        values: Sequence[Tensor] | None = None,
        *,
        unit: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> "InputEvents":
        """Create input events from one tensor per sample, of any length and in any order.

        Args:
            times: Event times, one tensor ``(events,)`` per sample: floating point, or integers such as microseconds.
            channels: Input channels, one tensor per sample.
            values: Event values, one tensor per sample. If None, all values are 1.
            unit: The unit of ``times``, in units of the layer's time constants: 1e-3 for times in microseconds and
                time constants in milliseconds.
            dtype: The dtype of times and values. If None, that of ``times``, or torch's default for integers. Integers
                are multiplied by ``unit`` in float64.

        Returns:
            The events, sorted in time within each sample.

        Raises:
            ValueError: If there are no samples, the shapes do not match, or ``unit`` is not positive.
        """
        if isinstance(unit, bool) or not isinstance(unit, int | float) or not 0 < unit < float("inf"):
            raise ValueError(f"InputEvents.from_lists: unit must be a positive number, got {unit!r}")
        times = [_scaled(t, unit, dtype) for t in times]
        if values is None:
            values = [torch.ones_like(t) for t in times]
        elif dtype is not None:
            values = [v.to(dtype) for v in values]
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
    def from_numpy(
        cls,
        times: Sequence[np.ndarray],
        channels: Sequence[np.ndarray],
        values: Sequence[np.ndarray] | None = None,
        *,
        unit: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> "InputEvents":
        """Create input events from one NumPy array per sample; the arguments are those of :meth:`from_lists`.

        Unsigned integers are accepted. If ``dtype`` is None, it is torch's default dtype.

        Example:
            >>> events = InputEvents.from_numpy([t_us], [channel], unit=1e-3)  # microseconds to milliseconds
        """
        return cls.from_lists(
            [_tensor(t) for t in times],
            [_tensor(c) for c in channels],
            None if values is None else [_tensor(v) for v in values],
            unit=unit,
            dtype=dtype or torch.get_default_dtype(),
        )

    @classmethod
    def from_tonic(
        cls,
        recordings: Sequence[Any],
        sensor_size: tuple[int, int, int],
        *,
        unit: float = 1e-3,
        dtype: torch.dtype | None = None,
    ) -> "InputEvents":
        """Create input events from recordings of the library tonic.

        Args:
            recordings: One structured NumPy array per sample, with the fields ``t`` (microseconds), ``x``, and ``p``
                and ``y`` if the sensor has more than one polarity or row.
            sensor_size: Width, height and polarities of the sensor: the attribute ``sensor_size`` of tonic's data sets.
                The channel of an event is ``(p * height + y) * width + x``.
            unit: The length of a microsecond in units of the layer's time constants. The default is for milliseconds.
            dtype: The dtype of times and values. If None, torch's default dtype.

        Returns:
            The events of value 1, sorted in time within each sample. The time of the first event is kept: subtract it
            from ``t`` if recordings do not start at 0.

        Raises:
            ValueError: If a field is missing or outside the sensor.

        Example:
            >>> events = InputEvents.from_tonic([data[i][0] for i in rows], data.sensor_size)  # doctest: +SKIP
        """
        sizes: dict[str, int] = dict(zip(("x", "y", "p"), sensor_size, strict=True))
        channels = []
        for s, recording in enumerate(recordings):
            names = getattr(recording.dtype, "names", None) or ()
            missing = [n for n in ("t", *sizes) if n not in names and sizes.get(n, 2) > 1]
            if missing:
                raise ValueError(
                    f"InputEvents.from_tonic: recordings must have the fields t, x, y and p, sample {s} has no "
                    f"{', '.join(missing)}; got the fields {', '.join(names) or 'none'}"
                )
            places = {n: _tensor(recording[n]).to(torch.int64) if sizes[n] > 1 else 0 for n in sizes}
            for name, place in places.items():
                if isinstance(place, Tensor) and bool(((place < 0) | (place >= sizes[name])).any()):
                    raise ValueError(
                        f"InputEvents.from_tonic: {name} must be from 0 to {sizes[name] - 1}, "
                        f"got {place.min()} to {place.max()} in sample {s}"
                    )
            channel = (places["p"] * sizes["y"] + places["y"]) * sizes["x"] + places["x"]
            channels.append(torch.as_tensor(channel).expand(len(recording)))
        times = [_tensor(recording["t"]) for recording in recordings]
        return cls.from_lists(times, channels, unit=unit, dtype=dtype or torch.get_default_dtype())

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
        kept = torch.arange(L, device=times.device) < lengths[:, None]
        order = times.detach().argsort(dim=1, stable=True)  # by time, then padding to the end, also behind NaN
        order = order.gather(1, kept.gather(1, order).to(torch.int8).argsort(dim=1, stable=True, descending=True))
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int64)
        if values is None:
            values = torch.ones_like(times)
        t, c, v = (x.gather(1, order)[kept] for x in (times, channels.to(torch.int64), values))
        return cls(t, c, v, offsets)

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


def _scaled(times: Tensor, unit: float, dtype: torch.dtype | None) -> Tensor:
    """Return ``times`` in units of the time constants, computed in float64 if they are integers."""
    if times.is_floating_point():
        return (times if unit == 1 else times * unit).to(dtype or times.dtype)
    return (times.double() * unit).to(dtype or torch.get_default_dtype())


def _tensor(array: np.ndarray) -> Tensor:
    """Return a copy of an array as a tensor. Unsigned integers become int64, which torch can sort."""
    array = np.asarray(array)
    return torch.from_numpy(array.astype(np.int64 if array.dtype.kind == "u" else array.dtype))
