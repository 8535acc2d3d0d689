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
