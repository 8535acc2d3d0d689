"""What a continuous-time layer returns."""

from typing import NamedTuple

import torch
from torch import Tensor

from egru.continuous.inputs import InputEvents
from egru.continuous.problem import Counters


class ContinuousState(NamedTuple):
    """The state of a layer at one time. Pass it to the next call to continue from there.

    Args:
        a: Activations of the gates u, r, z, ``(B, 3, H)``.
        c: Internal states ``(B, H)``.
        trace: Output traces ``(B, H)``.
    """

    a: Tensor
    c: Tensor
    trace: Tensor


class PaddedEvents(NamedTuple):
    """Events of a batch, one row per sample. ``L`` is the largest number of events of a sample.

    Args:
        times: Event times ``(B, L)``.
        units: The unit that emitted each event ``(B, L)``, -1 in the padding.
        amplitudes: The value that each event carries ``(B, L)``, 0 in the padding.
        lengths: The number of events of each sample ``(B,)``.
    """

    times: Tensor
    units: Tensor
    amplitudes: Tensor
    lengths: Tensor


class ContinuousOutput(NamedTuple):
    """The result of running a layer. All floating-point tensors are differentiable.

    ``N`` is the total number of events that the batch emitted, and ``R`` the number of readout times.

    Args:
        times: Event times ``(N,)`` of all samples, concatenated.
        units: The unit that emitted each event ``(N,)``.
        amplitudes: The value that each event carries ``(N,)``.
        offsets: ``(B + 1,)``. Sample ``s`` has the events ``offsets[s]:offsets[s + 1]``.
        c: Internal states at the readout times ``(B, R, H)``.
        trace: Output traces at the readout times ``(B, R, H)``.
        state: The state at the horizon.
        horizon: The end of the run of each sample ``(B,)``.
        counters: Statistics of the run, one entry per sample.
        integral: The integral of the running loss ``(B,)``, or None without a running loss.

    Example:
        >>> output = layer(events, horizon=4.0, readout_times=[4.0])
        >>> loss = F.cross_entropy(readout(output.trace[:, -1]), labels)
        >>> first_sample = output.times[output.samples == 0]
    """

    times: Tensor
    units: Tensor
    amplitudes: Tensor
    offsets: Tensor
    c: Tensor
    trace: Tensor
    state: ContinuousState
    horizon: Tensor
    counters: Counters
    integral: Tensor | None = None

    def as_input(self) -> InputEvents:
        """Return the events as the input of another layer; units become channels and amplitudes values."""
        return InputEvents(self.times, self.units, self.amplitudes, self.offsets)

    @property
    def samples(self) -> Tensor:
        """The sample that each event belongs to ``(N,)``."""
        batch = torch.arange(len(self.offsets) - 1, device=self.offsets.device)
        return torch.repeat_interleave(batch, self.offsets.diff())

    def padded(self, fill: float = torch.inf) -> PaddedEvents:
        """Return the events as one row per sample. Gradients flow to times and amplitudes.

        Args:
            fill: The time in the padding.
        """
        lengths, samples = self.offsets.diff(), self.samples
        shape = len(lengths), int(lengths.max()) if len(lengths) else 0
        place = samples, torch.arange(len(samples), device=samples.device) - self.offsets[samples]
        return PaddedEvents(
            self.times.new_full(shape, fill).index_put(place, self.times),
            self.units.new_full(shape, -1).index_put(place, self.units),
            self.amplitudes.new_zeros(shape).index_put(place, self.amplitudes),
            lengths,
        )

    def counts(self) -> Tensor:
        """Return the number of events of each unit ``(B, H)``, int64. It has no gradient; see :meth:`rates`."""
        B, H = self.state.c.shape
        return torch.bincount(self._slots(), minlength=B * H).view(B, H)

    def first_times(self, default: float | Tensor | None = None) -> Tensor:
        """Return the time of the first event of each unit ``(B, H)``.

        Args:
            default: The value for units without events: a number, or a tensor that broadcasts to ``(B, H)``. If None,
                the horizon of each sample. It has no gradient with respect to the layer: see
                :func:`egru.continuous.silence_penalty`.

        Example:
            >>> scores = -output.first_times(default=10.0)
        """
        B, H = self.state.c.shape
        N, slots = len(self.times), self._slots()
        # Events ascend in time within a sample, so the first event of a unit is the one with the smallest position.
        first = slots.new_full((B * H,), N).scatter_reduce_(0, slots, torch.arange(N, device=slots.device), "amin")
        value = self.horizon[:, None] if default is None else torch.as_tensor(default).to(self.state.c)
        times = torch.cat([self.times, self.times.new_zeros(1)])[first].view(B, H)
        return torch.where((first < N).view(B, H), times, value)

    def rates(self) -> Tensor:
        """Return differentiable event rates ``(B, H)``, in events per unit of time.

        An event at time ``s`` counts ``2 (1 - s / T) / T``, where ``T`` is the horizon. Events that are evenly
        distributed over time have this rate on average. Unlike a count, it is continuous where an event moves past the
        horizon, and its gradient moves events later to lower the rate, or earlier to raise it.
        """
        B, H = self.state.c.shape
        horizon = self.horizon[self.samples]
        weights = 2 * (1 - self.times / horizon) / horizon
        return self.times.new_zeros(B * H).index_add(0, self._slots(), weights).view(B, H)

    def _slots(self) -> Tensor:
        """Return the position of each event's sample and unit in a flattened ``(B, H)`` tensor."""
        return self.samples * self.state.c.shape[1] + self.units
