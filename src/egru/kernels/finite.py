"""NaN compares false: unchecked, a broken unit would look silent. On the CPU only: elsewhere a check would stall."""

import torch
from torch import Tensor


def check_finite(input: Tensor, c0: Tensor, y0: Tensor, theta: Tensor) -> None:
    """Refuse NaN and infinity in what a call is given."""
    if input.device.type != "cpu":
        return
    for name, value in (("input", input), ("state.c", c0), ("state.y", y0), ("the threshold", theta)):
        if not torch.isfinite(value).all():
            bad = value[~torch.isfinite(value)][0].item()
            raise ValueError(f"{name} holds {bad}; expected finite values")


def check_result(c_last: Tensor) -> None:
    """A NaN never leaves a state once it is in, so the last one tells of NaN weights anywhere in the sequence."""
    if c_last.device.type == "cpu" and not torch.isfinite(c_last).all():
        raise ValueError("the state became NaN or infinite: the weights or biases of this layer are not finite")
