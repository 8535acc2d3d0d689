"""The available engines, and the choice of one for a call."""

from egru.continuous.compiled import CompiledEngine
from egru.continuous.lockstep import LockstepEngine
from egru.continuous.options import EngineName
from egru.continuous.problem import Engine, Problem, RunningLoss
from egru.continuous.reference import ReferenceEngine

_ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (CompiledEngine(), LockstepEngine(), ReferenceEngine())
}
"""Engines by name, fastest first. The last one supports every problem without checkpoints."""


def names() -> tuple[str, ...]:
    """Return the names of all engines, fastest first."""
    return tuple(_ENGINES)


def get(name: str) -> Engine:
    """Return the engine with this name."""
    return _ENGINES[name]


def choose(name: EngineName, problem: Problem, running_loss: RunningLoss | None = None) -> Engine:
    """Return the engine that runs ``problem``.

    Args:
        name: The name of an engine, or "auto" for the fastest one that supports the problem.
        problem: The problem to run.
        running_loss: The running loss of the call, if any.

    Raises:
        ValueError: If the named engine does not support the problem, or no engine does.
    """
    if name == "auto":
        reasons = {}
        for engine in _ENGINES.values():
            reasons[engine.name] = engine.unsupported(problem, running_loss)
            if reasons[engine.name] is None:
                return engine
        details = "; ".join(f"{engine}: {reason}" for engine, reason in reasons.items())
        raise ValueError(f"no engine can run this call ({details})")
    reason = get(name).unsupported(problem, running_loss)
    if reason is not None:
        raise ValueError(f"engine={name!r} cannot run this call: {reason}; use engine='auto'")
    return get(name)
