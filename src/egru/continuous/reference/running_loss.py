"""Evaluate a running loss, which is written in torch, on NumPy arrays of one sample."""

import numpy as np
import torch
from torch import Tensor

from egru.continuous.problem import RunningLoss


def evaluate(running_loss: RunningLoss, c: np.ndarray, t: np.ndarray, sample: int) -> Tensor:
    """Return the running loss ``(N,)`` at states ``c``, ``(N, H)``, and times ``t``, ``(N,)``."""
    return running_loss(torch.as_tensor(c), torch.as_tensor(t), torch.full((len(c),), sample)).double()


def state_gradient(running_loss: RunningLoss, c: np.ndarray, t: np.ndarray, sample: int) -> np.ndarray:
    """Return the derivative of the running loss with respect to ``c``, ``(N, H)``."""
    with torch.enable_grad():
        state = torch.as_tensor(c).requires_grad_()
        value = running_loss(state, torch.as_tensor(t), torch.full((len(c),), sample))
        total = value.sum() + 0 * state.sum()  # a running loss need not depend on c
        (gradient,) = torch.autograd.grad(total, state)
    return gradient.numpy()
