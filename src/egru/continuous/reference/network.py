"""The parameters of a problem as NumPy arrays."""

import dataclasses

import numpy as np
from torch import Tensor

from egru.continuous.problem import Problem, R
from egru.continuous.quadrature import gauss_legendre
from egru.continuous.reference.flow import FlowSettings, sigmoid


@dataclasses.dataclass
class Network:
    """Weights with zeros where there is no connection, and the other parameters, in float64."""

    V: np.ndarray
    U: np.ndarray
    b: np.ndarray
    theta: np.ndarray
    tau_o: np.ndarray
    tau_s: np.ndarray
    tau_m: np.ndarray
    settings: FlowSettings
    problem: Problem
    delays: np.ndarray
    beta: np.ndarray
    tau_a: np.ndarray
    """Strength and time constant of the adaptation currents; 0 and ``tau_s`` without adaptation."""
    lines: np.ndarray | None = None
    """The first line of each unit, with delays; see :attr:`Problem.line_offsets`."""
    line_units: np.ndarray | None = None

    @classmethod
    def from_problem(cls, problem: Problem) -> "Network":
        problem, options = problem.with_dense_weights(), problem.options
        H = problem.c0.shape[1]
        tau_s, tau_m, tau_o = (to_array(tau.expand(H)) for tau in (problem.tau_s, problem.tau_m, problem.tau_o))
        beta, tau_a = np.zeros(H), tau_s
        if options.adaptive:
            beta, tau_a = to_array(problem.beta), to_array(problem.tau_a.expand(H))
        settings = FlowSettings(
            tau_s,
            tau_m,
            gauss_legendre(options.nodes),
            float(options.panel),
            options.linear,
            tau_a if options.adaptive else None,
        )
        V = to_array(problem.V)
        if not options.self_connections and problem.line_offsets is None:
            V = V * (1 - np.eye(V.shape[1]))
        return cls(
            V,
            to_array(problem.U),
            to_array(problem.b),
            to_array(problem.theta),
            tau_o,
            tau_s,
            tau_m,
            settings,
            problem,
            to_array(problem.delays),
            beta,
            tau_a,
            None if problem.line_offsets is None else problem.line_offsets.cpu().numpy(),
            None if problem.line_offsets is None else problem.line_units.cpu().numpy(),
        )

    def amplitude(self, n: int) -> float:
        """Return the value ``y`` that an event of unit ``n`` carries."""
        return float(self.theta[n]) if self.problem.options.amplitude == "theta" else 1.0

    def rho_z(self, n: int, a_group: np.ndarray) -> np.ndarray | float:
        """Return the factor of ``V_z`` at an event of ``n``: a number, or one per receiver.

        ``a_group`` is ``a`` before the group of simultaneous events.
        """
        if self.settings.linear:
            return 1.0
        return sigmoid(a_group[R] if self.problem.options.reset_side == "post" else a_group[R, n])


def to_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor as a float64 array."""
    return tensor.detach().cpu().double().numpy()
