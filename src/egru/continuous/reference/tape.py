"""What the two passes of the reference engine share: the network as numpy arrays, and the record of what happened."""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from egru.continuous.problem import Problem, RunningLoss
from egru.continuous.quadrature import gauss_legendre
from egru.continuous.reference.flow import Clock, R, sigmoid


@dataclasses.dataclass
class Step:
    """One thing that happened: state before and after; the flow since the last step led to ``a_minus, c_minus``."""

    kind: str
    """ "internal", "input", "readout" or "end"."""
    index: int
    """The unit, the input event (in the batch), or the readout."""
    time: float
    a_minus: np.ndarray
    c_minus: np.ndarray
    o_minus: np.ndarray
    a_plus: np.ndarray
    c_plus: np.ndarray
    o_plus: np.ndarray
    a_group: np.ndarray | None = None
    """``a`` before the group of simultaneous events this one belongs to."""
    first: bool = True
    """Whether it is the first of its group."""
    forced: bool = False


@dataclasses.dataclass
class Network:
    """The parameters of a problem as numpy arrays."""

    V: np.ndarray
    U: np.ndarray
    b: np.ndarray
    theta: np.ndarray
    tau_o: float
    clock: Clock
    problem: Problem

    @classmethod
    def of(cls, problem: Problem) -> "Network":
        problem, options = problem.connected(), problem.options
        clock = Clock(float(problem.tau_s), float(problem.tau_m), gauss_legendre(options.nodes), float(options.panel))
        V = array(problem.V)
        if not options.self_connections:
            V = V * (1 - np.eye(V.shape[1]))
        return cls(V, array(problem.U), array(problem.b), array(problem.theta), float(problem.tau_o), clock, problem)

    def amplitude(self, n: int) -> float:
        return float(self.theta[n]) if self.problem.options.amplitude == "theta" else 1.0

    def rho(self, n: int, a_group: np.ndarray) -> np.ndarray | float:
        """What ``V_z`` is scaled with when ``n`` emits: one number, or one per receiver."""
        return sigmoid(a_group[R] if self.problem.options.reset_side == "post" else a_group[R, n])


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def evaluate(running_loss: RunningLoss, c: np.ndarray, t: np.ndarray, sample: int) -> np.ndarray:
    """The density at ``c``, ``(N, H)``, and ``t``, ``(N,)``."""
    with torch.no_grad():
        value = running_loss(torch.as_tensor(c), torch.as_tensor(t), torch.full((len(c),), sample))
    return value.double().numpy()


def derivative(running_loss: RunningLoss, c: np.ndarray, t: np.ndarray, sample: int) -> np.ndarray:
    """Its derivative by ``c``, ``(N, H)``."""
    with torch.enable_grad():
        state = torch.as_tensor(c).requires_grad_()
        value = running_loss(state, torch.as_tensor(t), torch.full((len(c),), sample))
        (gradient,) = torch.autograd.grad(value.sum(), state)
    return gradient.numpy()
