"""Export a model as an ONNX graph that computes every unit at every step: portable, not fast."""

import inspect
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from egru.files import replace_file
from egru.kernels.problem import FIELDS, Problem
from egru.runtime.onnx_steps import NodeRecorder, StepBuilder

OPSET = 18


def export_onnx(model: nn.Module, path: str | os.PathLike[str], example: Tensor) -> Path:
    """Write a model as an ONNX file.

    The recurrent layers become ``Scan`` nodes, with one step as their body; events are ``Where`` nodes. The graph is
    the dense equivalent of the network: ONNX has no operator that skips inactive units. Use
    :func:`egru.runtime.export_c` or :class:`egru.EventEngine` where speed matters.

    The graph has one input, ``input``, and one output, ``output``: the first output of the model, which starts from a
    zero state. Batch size and number of steps are dynamic where the model allows it.

    Args:
        model: A model in evaluation mode with event layers on the CPU.
        path: File to write, such as ``model.onnx``.
        example: An input of the model. Its values do not matter.

    Returns:
        The path.

    Raises:
        ImportError: If onnx or onnxscript is not installed.
        ValueError: If the model is in training mode, or a layer has an option that the graph does not support.

    Example:
        >>> model = egru.pretrained("smnist").eval()
        >>> path = egru.runtime.export_onnx(model, "model.onnx", torch.zeros(1, 784, 1))
    """
    try:
        import onnx  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
        import onnxscript  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError as error:
        raise ImportError("export_onnx requires onnx and onnxscript: pip install 'egru[onnx]'") from error
    if model.training:
        raise ValueError("export_onnx: the model is in training mode; call model.eval() first")
    _check_arguments(model)
    dynamic = torch.export.Dim.AUTO
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch.onnx uses deprecated functions of torch
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            program: Any = torch.onnx.export(
                _FirstOutput(model).eval(),
                (example,),
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=["input"],
                output_names=["output"],
                dynamic_shapes=({0: dynamic, 1: dynamic},),
                custom_translation_table={torch.ops.egru.sequence.default: translate_sequence},
            )
        except torch.onnx.OnnxExporterError as error:
            _raise_refusal(error)
            raise
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, program.model_proto.SerializeToString())
    return path


def _check_arguments(model: nn.Module) -> None:
    """Refuse models whose ``forward`` requires more than the input, such as the lengths of packed sequences."""
    parameters = list(inspect.signature(model.forward).parameters.values())[1:]
    required = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if required:
        raise ValueError(
            f"export_onnx: {type(model).__name__}.forward must have one input, but requires {', '.join(required)} too; "
            "export a module that calls the layers without it"
        )


class _FirstOutput(nn.Module):
    """Returns the first output of a model: scores, or the outputs of a layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input: Tensor) -> Tensor:
        output: Any = self.model(input)
        return output if isinstance(output, Tensor) else output[0]


def translate_sequence(*arguments: Any) -> Sequence[Any]:
    """Translate the operator ``egru::sequence`` for ``torch.onnx``. Tensors are values of the graph."""
    *values, _, _ = arguments
    problem = Problem.unflatten(values[: _argument_count()])
    _check(problem)
    import onnx_ir as ir  # pyright: ignore[reportMissingImports]
    from onnxscript import evaluator  # pyright: ignore[reportMissingImports]

    outer, body = NodeRecorder(), NodeRecorder()
    state: Any = problem.c0
    dtype = state.dtype

    def constant(op: Any, value: float) -> Any:
        return op.Constant(value=ir.tensor(value, dtype=dtype))

    def integers(*numbers: int) -> Any:
        return outer.Constant(value=ir.tensor(list(numbers), dtype=ir.DataType.INT64))

    def rows(value: Any, first: int, last: int) -> Any:
        return outer.Slice(value, integers(first), integers(last), integers(0))

    p = outer.MatMul(problem.input, outer.Transpose(problem.weight_ih, perm=[1, 0]))
    if problem.bias_ih is not None:
        p = outer.Add(p, problem.bias_ih)
    hidden = int(problem.c0.shape[-1])
    blocks = [(0, int(problem.weight_hh.shape[0]))]
    if problem.cell == "gru" and problem.reset_gate == "before":
        blocks = [(0, 2 * hidden), (2 * hidden, 3 * hidden)]
    weights = tuple(outer.Transpose(rows(problem.weight_hh, *block), perm=[1, 0]) for block in blocks)
    biases = () if problem.bias_hh is None else tuple(rows(problem.bias_hh, *block) for block in blocks)
    keep = None
    if problem.keep is not None:
        keep = outer.Reshape(problem.keep, integers(*[int(n) for n in problem.keep.shape][-2:]))

    kind, shape = ir.TensorType(dtype), state.shape
    c, y = (ir.Value(name=name, type=kind, shape=shape) for name in ("c_previous", "y_previous"))
    p_step = ir.Value(name="p_step", type=kind)
    builder = StepBuilder(body, problem, lambda value: constant(body, value), weights)
    step = builder.step(p_step, c, y, biases, keep)
    results = [step.carried, step.y, *(body.Identity(value) for value in (step.y, step.seen))]
    if results[0] in (c, y):  # a graph cannot return its input
        results[0] = body.Identity(results[0])
    graph = ir.Graph([c, y, p_step], results, nodes=body.nodes, name="event_step")
    c_last, y_last, ys, cs = outer.Scan(problem.c0, problem.y0, p, _outputs=4, body=graph, num_scan_inputs=1)
    reserve = outer.Identity(problem.c0)  # for the backward pass, not used
    recorder: Any = evaluator.default()
    recorder.nodes.extend(outer.nodes)
    return ys, cs, c_last, y_last, reserve


class _Refusal(ValueError):
    """An option that the graph does not support."""


def _raise_refusal(error: BaseException | None) -> None:
    """Raise the refusal that caused an error of ``torch.onnx``, if there is one, as a ValueError of its own."""
    while error is not None:
        if isinstance(error, _Refusal):
            raise ValueError(str(error)) from None
        error = error.__cause__ or error.__context__


def _argument_count() -> int:
    return len(FIELDS.tensors) + sum(len(option.paths) for option in FIELDS.options)


def _check(problem: Problem) -> None:
    """Raise _Refusal if the graph does not support the problem."""
    if problem.lengths is not None:
        raise _Refusal("export_onnx: packed sequences are not supported; export the model for padded sequences")
    if problem.precision:
        raise _Refusal(f"export_onnx: autocast to {problem.precision} is not supported; export outside of autocast")
    if problem.keep is not None and len(problem.keep.shape) == 3 and problem.keep.shape[0] != 1:
        raise _Refusal("export_onnx: zoneout that changes with time is not supported; call model.eval() first")
