"""Which engines exist, and which one a call gets."""

from egru.continuous.compiled.engine import CompiledEngine
from egru.continuous.lockstep.engine import LockstepEngine
from egru.continuous.problem import Engine, Problem, RunningLoss
from egru.continuous.reference.engine import ReferenceEngine

_ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (CompiledEngine(), LockstepEngine(), ReferenceEngine())
}
"""Fastest first; the last takes everything."""


def names() -> tuple[str, ...]:
    """The accepted values of ``engine=``."""
    return ("auto", *_ENGINES)


def get(name: str) -> Engine:
    """The engine of that name."""
    return _ENGINES[name]


def choose(name: str, problem: Problem, running_loss: RunningLoss | None = None) -> Engine:
    """The engine that runs ``problem``: the fastest that can, or the one asked for, or an error."""
    if name == "auto":
        return next(engine for engine in _ENGINES.values() if engine.unsupported(problem, running_loss) is None)
    reason = get(name).unsupported(problem, running_loss)
    if reason is not None:
        raise ValueError(f"engine={name!r} cannot run this: {reason}; engine='auto' picks one that can")
    return get(name)
