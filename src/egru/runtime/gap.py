"""The result of steps without input."""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class Gap(NamedTuple):
    """Outputs over a number of steps: the last one, and those at steps at which the last layer sent events.

    Attributes:
        output: Output of the last step, ``([N,] O)``.
        steps: Steps at which the last layer of a stream sent events, ``(K,)``, ascending, as values of
            :attr:`EventEngine.time`.
        streams: Stream of each of these steps, ``(K,)``.
        outputs: Output of this stream at this step, ``(K, O)``.
    """

    output: Tensor
    steps: Tensor
    streams: Tensor
    outputs: Tensor


_NO_STEPS = torch.empty(0, dtype=torch.int64, device="cpu")

Rows: TypeAlias = tuple[Tensor, int, Tensor]
"""Steps with events, the stream, and its outputs at these steps."""


def join_rows(output: Tensor, parts: list[Rows]) -> Gap:
    """Return the result of skipped steps from the rows of all streams."""
    if not parts:
        return Gap(output, _NO_STEPS, _NO_STEPS, output.new_empty(0, output.shape[-1]))
    if len(parts) == 1:  # the common case, without sorting
        steps, stream, outputs = parts[0]
        return Gap(output, steps, torch.full_like(steps, stream), outputs)
    steps = torch.cat([part for part, _, _ in parts])
    streams = torch.cat([torch.full_like(part, stream) for part, stream, _ in parts])
    outputs = torch.cat([rows for _, _, rows in parts])
    order = steps.argsort(stable=True)
    return Gap(output, steps[order], streams[order], outputs[order])
