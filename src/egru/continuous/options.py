"""Options of the continuous-time model, of its numerical integration, and the names they accept."""

import dataclasses
from typing import Literal, get_args

ResetSide = Literal["pre", "post"]
"""Whose reset gate scales ``V_z``: that of the emitting unit ("pre") or of each receiving unit ("post")."""
Amplitude = Literal["theta", "one"]
"""The value that an event carries: the emitter's threshold or 1."""
AboveThreshold = Literal["raise", "fire"]
"""What happens to a state that starts at or above its threshold."""
BiasSign = Literal["+", "-"]
"""The sign of the bias in the dynamics of ``a``."""
Start = Literal["zero", "rest"]
"""Where the activations ``a`` start: at 0, or at rest at their biases."""
Cell = Literal["gru", "lif", "alif"]
"""The gates: those of the event-based GRU, or constant ones, ``u = r = 1``, which give integrate-and-fire neurons.

With "lif", ``z = a_z``. With "alif", ``z = a_z - a_u``, and ``a_u`` is an adaptation current.
"""
EngineName = Literal["auto", "compiled", "lockstep", "reference"]
"""An engine; "auto" selects the fastest one that supports the call."""

RESET_SIDES: tuple[ResetSide, ...] = get_args(ResetSide)
AMPLITUDES: tuple[Amplitude, ...] = get_args(Amplitude)
ABOVE_THRESHOLD: tuple[AboveThreshold, ...] = get_args(AboveThreshold)
BIAS_SIGNS: tuple[BiasSign, ...] = get_args(BiasSign)
STARTS: tuple[Start, ...] = get_args(Start)
CELLS: tuple[Cell, ...] = get_args(Cell)
ENGINE_NAMES: tuple[EngineName, ...] = get_args(EngineName)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options that every engine implements.

    Args:
        cell: The gates of the units, "gru", "lif" or "alif".
        self_connections: Whether an event of unit ``n`` also reaches ``n``, through the diagonal of ``V``.
        reset_side: Whose reset gate ``rho_z`` is: the emitter's ("pre") or each receiver's ("post").
        amplitude: The value an event carries, "theta" or "one".
        above_threshold: What happens to a state that starts at or above its threshold. "raise" raises an error. With
            "fire" the unit emits an event at time 0 if ``z > theta``, and otherwise decays without an event. The time
            of such a forced event is fixed, so no gradient flows through it.
        max_events: The maximum number of events per sample. If None, the bound that no network can exceed.
        grazing_floor: The smallest ``z - theta`` that the backward pass divides by; 0 gives the exact gradient.
        nodes: The number of Gauss-Legendre nodes per panel.
        panel: The longest panel, in units of the fastest rate of the unit.
        checkpoint_every: The number of steps (events, input events and readouts) between two checkpoints, from which
            the backward pass repeats the run. If None, every step is recorded.
    """

    cell: Cell = "gru"
    self_connections: bool = False
    reset_side: ResetSide = "pre"
    amplitude: Amplitude = "theta"
    above_threshold: AboveThreshold = "raise"
    max_events: int | None = None
    grazing_floor: float = 1e-3
    nodes: int = 6
    panel: float = 0.5
    checkpoint_every: int | None = None

    @property
    def linear(self) -> bool:
        """Whether units are leaky integrate-and-fire neurons, with or without adaptation."""
        return self.cell != "gru"

    @property
    def adaptive(self) -> bool:
        """Whether units have an adaptation current."""
        return self.cell == "alif"
