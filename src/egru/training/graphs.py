"""Training steps as CUDA graphs: the forward and backward pass of each batch shape is recorded once and replayed.

For short sequences a GPU finishes faster than Python launches the kernels. Replaying a graph is a single launch.
"""

# pyright: reportPrivateImportUsage=false
# torch._foreach_*: one launch for a list of tensors, as in torch.optim; they have no public name.

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from egru.models.stack import map_state
from egru.training.tasks import Batch


class StepOutput(NamedTuple):
    """Output of a training step; the gradients are in the parameters.

    Attributes:
        loss: Loss without regularisers.
        objective: The value that was differentiated.
        state: Recurrent state for the next batch.
    """

    loss: Tensor
    objective: Tensor
    state: Any


Step = Callable[[Batch, Any], StepOutput]
"""Forward and backward pass of a batch, given the recurrent state."""
Capture = Callable[[Callable[[], StepOutput]], tuple[StepOutput, Callable[[], None]]]
"""Records a function; returns its output and a function that replays it into the same tensors."""


class _Recording(NamedTuple):
    batch: Batch
    state: Any
    output: StepOutput
    replay: Callable[[], None]


class GraphedStep:
    """A training step that is replayed as a CUDA graph.

    The first batch of each shape runs eagerly and the second is recorded. Gradients keep their memory: they are set to
    zero before each step, and ``step`` adds to them. The returned state is overwritten by the next call with the same
    shape.

    Args:
        step: Forward and backward pass that accumulates gradients.
        parameters: Parameters that receive gradients.
        capture: Records a function as a graph. If None, a CUDA graph.
    """

    def __init__(self, step: Step, parameters: list[nn.Parameter], capture: Capture | None = None) -> None:
        self.step, self.capture = step, capture or CUDACapture()
        self.gradients = [torch.zeros_like(parameter) for parameter in parameters]
        for parameter, gradient in zip(parameters, self.gradients, strict=True):
            parameter.grad = gradient
        self.recordings: dict[Any, _Recording | None] = {}

    def __call__(self, batch: Batch, state: Any) -> StepOutput:
        key = (batch.x.shape, batch.y.shape, state is None)
        if key not in self.recordings:
            self.recordings[key] = None
            return self.eager(batch, state)
        recording = self.recordings[key]
        if recording is None:
            recording = self.recordings[key] = self._record(batch, state)
        copies = [(recording.batch.x, batch.x), (recording.batch.y, batch.y)]
        copies += zip(state_tensors(recording.state), state_tensors(state), strict=True)
        for dtype in {target.dtype for target, _ in copies}:
            targets, sources = zip(*(pair for pair in copies if pair[0].dtype == dtype), strict=True)
            torch._foreach_copy_(list(targets), list(sources))
        recording.replay()
        output = recording.output
        return StepOutput(output.loss.clone(), output.objective.clone(), output.state)

    def eager(self, batch: Batch, state: Any) -> StepOutput:
        """Run the step without a graph, so that hooks and monitors see it."""
        torch._foreach_zero_(self.gradients)
        return self.step(batch, state)

    def _record(self, batch: Batch, state: Any) -> _Recording:
        batch = batch._replace(x=batch.x.clone(), y=batch.y.clone())
        state = map_state(Tensor.clone, state)
        output, replay = self.capture(lambda: self.eager(batch, state))
        return _Recording(batch, state, output, replay)


class CUDACapture:
    """Records functions as CUDA graphs. All graphs share one memory pool because only one runs at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], StepOutput]) -> tuple[StepOutput, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            output = run()
        return output, graph.replay


def state_tensors(state: Any) -> list[Tensor]:
    """Return the tensors of a nested state, in order."""
    if isinstance(state, Tensor):
        return [state]
    return [tensor for part in state for tensor in state_tensors(part)] if isinstance(state, tuple | list) else []
