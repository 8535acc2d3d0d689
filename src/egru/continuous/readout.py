"""A linear readout of the states or traces of a layer."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from egru.continuous.outputs import ContinuousOutput
from egru.layers.checks import choice, positive_int

ReadoutTime = Literal["last", "max", "mean"]
"""Scores at the last readout, or their maximum or mean over the readouts."""
ReadoutSource = Literal["c", "trace"]
"""What is read: internal states or output traces."""


class ContinuousReadout(nn.Module):
    """Class scores from the readouts of a layer: a linear map, then the last value or the maximum over time.

    The maximum is over the readout times and the horizon, not over all times: choose them as densely as needed. The
    last value is that at the horizon, which may differ between samples.

    Args:
        hidden_size: The number of units of the layer.
        classes: The number of scores.
        time: "last", "max" or "mean" over the readout times and the horizon.
        source: Whether states ``"c"`` or traces ``"trace"`` are read.
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Raises:
        ValueError: If an argument has an invalid value.

    Example:
        >>> readout = ContinuousReadout(32, 10, time="max")
        >>> scores = readout(layer(events, horizon=4.0, readout_times=[1.0, 2.0, 3.0]))
    """

    def __init__(
        self,
        hidden_size: int,
        classes: int,
        *,
        time: ReadoutTime = "last",
        source: ReadoutSource = "c",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        hidden_size = positive_int(owner, "hidden_size", hidden_size)
        classes = positive_int(owner, "classes", classes)
        self.time: ReadoutTime = choice(owner, "time", time, get_args(ReadoutTime))
        self.source: ReadoutSource = choice(owner, "source", source, get_args(ReadoutSource))
        self.linear = nn.Linear(hidden_size, classes, device=device, dtype=dtype)

    def forward(self, output: ContinuousOutput) -> Tensor:
        """Return the scores ``(B, classes)``."""
        last = getattr(output.state, self.source)
        if self.time == "last":
            return self.linear(last)
        scores = self.linear(torch.cat([getattr(output, self.source), last[:, None]], 1))
        return scores.amax(1) if self.time == "max" else scores.mean(1)
