"""One step of an event-based cell as nodes of ONNX: what :func:`egru.functional.event_step` computes."""

from collections.abc import Callable
from typing import Any, NamedTuple

from egru.kernels.problem import Problem


class NodeRecorder:
    """Records nodes: ``recorder.Add(a, b, axis=1)`` adds a node with two inputs and an attribute.

    ``_outputs`` is the number of outputs. A single output is returned as a value, several as a sequence.
    """

    def __init__(self) -> None:
        self.nodes: list[Any] = []

    def __getattr__(self, operator: str) -> Callable[..., Any]:
        import onnx_ir as ir  # pyright: ignore[reportMissingImports]

        def add(*inputs: Any, _outputs: int = 1, **attributes: Any) -> Any:
            node: Any = ir.node(operator, inputs, attributes, num_outputs=_outputs)
            self.nodes.append(node)
            return node.outputs[0] if _outputs == 1 else node.outputs

        return add


class StepOutput(NamedTuple):
    """Carried state, output, and the state that was compared with the threshold."""

    carried: Any
    y: Any
    seen: Any


class Update(NamedTuple):
    """Proposed state of a cell. ``value`` is what an event emits, ``seen`` what the threshold is compared with."""

    c: Any
    gate: Any | None = None
    compares_output: bool = False


class StepBuilder:
    """Adds the nodes of a step to a graph.

    Args:
        op: Records nodes: ``op.Add(a, b)`` returns the sum.
        problem: Options of the layer, with values of the graph in place of tensors.
        constant: Returns a constant of the graph, in the type of the state.
        weights: Transposed recurrent weights: of all gates, or of r and u, and of z.
    """

    def __init__(self, op: Any, problem: Problem, constant: Any, weights: tuple[Any, ...]) -> None:
        self.op, self.problem, self.constant, self.weights = op, problem, constant, weights

    def step(self, p: Any, c_prev: Any, y_prev: Any, biases: tuple[Any, ...], keep: Any | None) -> StepOutput:
        """Add one step from the projected input ``p`` and the previous state."""
        op, problem = self.op, self.problem
        theta, scale, zero, one = problem.theta, problem.reset_scale, self.constant(0.0), self.constant(1.0)
        memory = c_prev
        if problem.reset == "hard":
            was_event = op.Where(op.Equal(y_prev, zero), zero, one)
            memory = op.Mul(c_prev, op.Sub(one, op.Mul(scale, was_event)))
        update = (self._lstm if problem.cell == "lstm" else self._gru)(p, y_prev, memory, biases)
        c = update.c
        if problem.reset == "output":
            c = op.Sub(c, op.Mul(scale, y_prev))
        if keep is not None:
            c = op.Add(op.Mul(keep, c_prev), op.Mul(op.Sub(one, keep), c))
        value = c if update.gate is None else op.Mul(update.gate, op.Tanh(c))
        seen = value if update.compares_output else c
        compared = op.Sub(seen, y_prev) if problem.events == "delta" else seen
        is_event = op.Greater(compared if problem.events == "positive" else op.Abs(compared), theta)
        y = op.Where(is_event, value, y_prev if problem.events == "delta" else zero)
        carried = c
        if problem.reset == "threshold":
            cleared = op.Mul(scale, theta)
            if problem.events == "signed":
                cleared = op.Mul(cleared, op.Sign(seen))
            carried = op.Where(is_event, op.Sub(c, cleared), c)
        return StepOutput(carried, y, seen)

    def _gru(self, p: Any, y: Any, memory: Any, biases: tuple[Any, ...]) -> Update:
        op = self.op
        p_r, p_u, p_z = op.Split(p, num_outputs=3, axis=-1, _outputs=3)
        if self.problem.reset_gate == "after":
            v_r, v_u, q = op.Split(self._linear(y, 0, biases), num_outputs=3, axis=-1, _outputs=3)
            r = op.Sigmoid(op.Add(p_r, v_r))
            z = op.Tanh(op.Add(p_z, op.Mul(r, q)))
        else:
            v_r, v_u = op.Split(self._linear(y, 0, biases), num_outputs=2, axis=-1, _outputs=2)
            r = op.Sigmoid(op.Add(p_r, v_r))
            z = op.Tanh(op.Add(p_z, self._linear(op.Mul(r, y), 1, biases)))
        u = op.Sigmoid(op.Neg(op.Add(p_u, v_u)))
        return Update(op.Add(op.Mul(u, z), op.Mul(op.Sub(self.constant(1.0), u), memory)))

    def _lstm(self, p: Any, y: Any, memory: Any, biases: tuple[Any, ...]) -> Update:
        op = self.op
        i, f, g, o = op.Split(op.Add(p, self._linear(y, 0, biases)), num_outputs=4, axis=-1, _outputs=4)
        c = op.Add(op.Mul(op.Sigmoid(f), memory), op.Mul(op.Sigmoid(i), op.Tanh(g)))
        return Update(c, op.Sigmoid(o), self.problem.compare == "output")

    def _linear(self, x: Any, index: int, biases: tuple[Any, ...]) -> Any:
        product = self.op.MatMul(x, self.weights[index])
        return product if not biases else self.op.Add(product, biases[index])
