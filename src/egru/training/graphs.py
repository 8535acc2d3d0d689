"""Forward and backward pass of a batch: asked for step by step, or recorded once for every shape and replayed.

A short sequence takes a GPU less time than Python needs to ask for it. A replayed CUDA graph asks once.
"""

# pyright: reportPrivateImportUsage=false
# torch._foreach_*: one launch for a list of tensors, as in torch.optim; there is no public name for them.

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from egru.models.stack import map_state
from egru.training.tasks import Batch


class Found(NamedTuple):
    """Loss, objective (what was differentiated) and the state for the next batch; gradients are in the parameters."""

    loss: Tensor
    objective: Tensor
    state: Any


Step = Callable[[Batch, Any], Found]
Capture = Callable[[Callable[[], Found]], tuple[Found, Callable[[], None]]]


class _Recorded(NamedTuple):
    batch: Batch
    before: Any
    found: Found
    replay: Callable[[], None]


class Graphs:
    """``step`` recorded as a CUDA graph for every shape of batch that comes a second time; the first is run as it is.

    Gradients stay where they are from now on: they are set to zero before ``step``, which adds to them. The state
    that a call returns is overwritten when its shape comes again: it is for the next call to read.
    """

    def __init__(self, step: Step, parameters: list[nn.Parameter], capture: Capture | None = None) -> None:
        self.step, self.capture = step, capture or CUDACapture()
        self.gradients = [torch.zeros_like(parameter) for parameter in parameters]
        for parameter, gradient in zip(parameters, self.gradients, strict=True):
            parameter.grad = gradient
        self.recorded: dict[Any, _Recorded | None] = {}

    def __call__(self, batch: Batch, state: Any) -> Found:
        key = (batch.x.shape, batch.y.shape, state is None)
        if key not in self.recorded:
            self.recorded[key] = None
            return self.eager(batch, state)
        graph = self.recorded[key]
        if graph is None:
            graph = self.recorded[key] = self._record(batch, state)
        pairs = [(graph.batch.x, batch.x), (graph.batch.y, batch.y)]
        pairs += zip(leaves(graph.before), leaves(state), strict=True)
        for kind in {to.dtype for to, _ in pairs}:
            to, given = zip(*(pair for pair in pairs if pair[0].dtype == kind), strict=True)
            torch._foreach_copy_(list(to), list(given))
        graph.replay()
        return Found(graph.found.loss.clone(), graph.found.objective.clone(), graph.found.state)

    def eager(self, batch: Batch, state: Any) -> Found:
        """The same, not recorded and not replayed: Python sees what happens."""
        torch._foreach_zero_(self.gradients)
        return self.step(batch, state)

    def _record(self, batch: Batch, state: Any) -> _Recorded:
        own = batch._replace(x=batch.x.clone(), y=batch.y.clone())
        before = map_state(Tensor.clone, state)
        found, replay = self.capture(lambda: self.eager(own, before))
        return _Recorded(own, before, found, replay)


class CUDACapture:
    """Records on a stream of its own; all graphs share one pool of memory, since only one runs at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Found]) -> tuple[Found, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            found = run()
        return found, graph.replay


def leaves(state: Any) -> list[Tensor]:
    """The tensors of a state of whatever nesting, in order."""
    if isinstance(state, Tensor):
        return [state]
    return [leaf for part in state for leaf in leaves(part)] if isinstance(state, tuple | list) else []
