"""NaN compares false: unchecked, a broken unit would look silent. On the CPU only: elsewhere a check would stall."""

import numpy as np
import torch
from torch import Tensor

from egru.kernels.problem import is_plain


def check_finite(input: Tensor, c0: Tensor, y0: Tensor, theta: Tensor) -> None:
    """Refuse NaN and infinity in what a call is given."""
    if input.device.type != "cpu":
        return
    for name, value in (("input", input), ("state.c", c0), ("state.y", y0), ("the threshold", theta)):
        if not _all_finite(value):
            bad = value[~torch.isfinite(value)][0].item()
            raise ValueError(f"{name} holds {bad}; expected finite values")


def check_result(c_last: Tensor) -> None:
    """A NaN never leaves a state once it is in, so the last one tells of NaN weights anywhere in the sequence."""
    if c_last.device.type == "cpu" and not _all_finite(c_last):
        raise ValueError("the state became NaN or infinite: the weights or biases of this layer are not finite")


def _all_finite(value: Tensor) -> bool:
    """By NumPy where it can be: threads that torch wakes here would spin on, for longer than a short sequence takes."""
    if value.dtype in (torch.float32, torch.float64) and is_plain(value):
        return bool(np.isfinite(value.detach().numpy()).all())
    return bool(torch.isfinite(value).all())
