"""Steps without input, in closed form."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from egru.runtime import inputs
from egru.runtime.engine_state import StatefulEngine
from egru.runtime.gap import Gap
from egru.runtime.inputs import Indices, Values
from egru.runtime.runners import CompiledRunner

_empty_like = torch.empty_like  # a global is faster than an attribute of a module
MAX_STEPS = 2**53
"""Powers of the decay are computed for at most this many steps."""


class GapEngine(StatefulEngine):
    """The part of :class:`egru.EventEngine` that computes steps without input."""

    @property
    def time(self) -> int:
        """Number of steps since the last reset, which is the index of the next step. Steps of masked streams count.

        Assign to it to continue counting from another step, for example after assigning :attr:`state`.
        """
        return self._runner.time

    @time.setter
    def time(self, time: int) -> None:
        self._runner.time = _integer("time", time, 0)

    def skip(self, n: int) -> Gap:
        """Compute ``n`` steps without input, at a cost that depends on the number of events and not on ``n``.

        The result is that of ``run`` with zeros, up to rounding. Without input and events the gates are constant, and
        the state after ``k`` steps is ``z + (1 - u)**k * (c - z)`` (an LSTM: the same with its own constants). The
        engine finds the next step at which a unit exceeds its threshold, jumps to it, sends its events, and computes
        ordinary steps as long as there are events. Delta events hold the output between events; their receivers are
        constant then, too.

        "Up to rounding" means: the closed form is evaluated in float64 from the float32 gates of an ordinary step, and
        the state is rounded to float32 once per jump. Ordinary steps round the state at every step. The two differ by
        at most ``min(k, 1 / u)`` times half a unit in the last place of the largest state in between. The rounded state
        is compared with the threshold as in an ordinary step. So an event can come at another step, or be missing, only
        if a state is that close to its threshold. A state equal to its threshold sends no event.

        Each stream is computed by itself on one thread. :attr:`activity` counts ``n`` steps, and the multiply-adds of
        a single step for each jump; in a pruned network, only those of the units that are updated. After Ctrl-C,
        several streams may have advanced by different numbers of steps.

        Args:
            n: Number of steps, 1 to 2**53.

        Returns:
            The output of the last step, and the outputs at the steps at which the last layer sent events.

        Raises:
            TypeError: If the engine has an embedding: it has no step without input.
            ValueError: If ``n`` is out of range or the state overflows.
            RuntimeError: If another thread uses the engine.

        Example:
            >>> engine = egru.EventEngine(egru.EGRU(4, 32))
            >>> gap = engine.skip(1_000_000)
            >>> gap.output.shape, engine.time
            (torch.Size([32]), 1000000)
        """
        self._require_values("skip")
        return self._runner.skip(_integer("n", n, 1))

    def step_at(self, t: int, indices: Indices, values: Values, out: Tensor | None = None) -> Gap:
        """Skip to step ``t`` and compute it with an input. Steps in between have no input.

        Args:
            t: Index of the step, not less than :attr:`time`. The first step after a reset has index 0.
            indices: Indices of the active entries of the input: a tensor, an array or a list.
            values: Their values.
            out: Where to write the output of step ``t``: a contiguous float32 CPU tensor ``(O,)``. If None, the output
                is a new tensor.

        Returns:
            The output of step ``t``, and those at the skipped steps at which the last layer sent events.

        Raises:
            TypeError: If the engine has an embedding, or the input or ``out`` has the wrong type.
            ValueError: If step ``t`` has been computed already, the engine has several streams, the input or ``out``
                does not fit, or the state overflows.
            RuntimeError: If another thread uses the engine.

        Example:
            >>> engine = egru.EventEngine(egru.EGRU(4, 32))
            >>> for t, channel in [(3, 0), (1_000, 2), (50_000, 1)]:  # events of a sensor
            ...     gap = engine.step_at(t, [channel], [1.0])
            >>> engine.time
            50001
        """
        core = self._core
        if core is not None:  # the common cases, with as few Python operations as possible
            result = _empty_like(self._out_like) if out is None else out
            gap = core.step_at(t, indices, values, result, out is None)
            if type(gap) is Gap:
                return gap
            if gap != -1:
                assert isinstance(self._runner, CompiledRunner)
                return self._runner.finish_step_at(gap, t, indices, values, result)
        caller = "EventEngine.step_at"
        self._require_values("step_at")
        if self.streams != 1:
            raise ValueError(f"{caller}: requires an engine with one stream, got {self.streams}; use skip() and step()")
        now = self._runner.time
        if _integer("t", t, 0) < now:
            raise ValueError(f"{caller}: t must not be less than the next step, {now}, got {t}; see EventEngine.time")
        if out is None:
            out = torch.empty_like(self._out_like)
        elif not isinstance(out, Tensor):
            raise TypeError(f"{caller}: out must be a tensor, got {type(out).__name__}")
        else:
            inputs.output_buffer(caller, out, self._out_shape)
        index, value = inputs.sparse_vector(caller, (indices, values), self.input_size)
        return self._runner.step_at(int(t), index, value, out)

    def _require_values(self, method: str) -> None:
        if self._network.embedding is not None:
            raise TypeError(
                f"EventEngine.{method}: an engine with an embedding has no step without input; pass every token to step"
            )


def _integer(name: str, value: Any, low: int) -> int:
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, np.integer)):
        raise TypeError(f"EventEngine: {name} must be an int, got {value!r}")
    if not low <= value <= MAX_STEPS:
        raise ValueError(f"EventEngine: {name} must be an int, {low} to 2**53, got {value!r}")
    return int(value)
