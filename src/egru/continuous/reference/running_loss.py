"""Evaluate a running loss, which is written in torch, on NumPy arrays of one sample."""

import numpy as np
import torch

from egru.continuous.problem import RunningLoss


def evaluate(running_loss: RunningLoss, c: np.ndarray, t: np.ndarray, sample: int) -> np.ndarray:
    """Return the running loss ``(N,)`` at states ``c``, ``(N, H)``, and times ``t``, ``(N,)``."""
    with torch.no_grad():
        value = running_loss(torch.as_tensor(c), torch.as_tensor(t), torch.full((len(c),), sample))
    return value.double().numpy()


def state_gradient(running_loss: RunningLoss, c: np.ndarray, t: np.ndarray, sample: int) -> np.ndarray:
    """Return the derivative of the running loss with respect to ``c``, ``(N, H)``."""
    with torch.enable_grad():
        state = torch.as_tensor(c).requires_grad_()
        value = running_loss(state, torch.as_tensor(t), torch.full((len(c),), sample))
        (gradient,) = torch.autograd.grad(value.sum(), state)
    return gradient.numpy()
