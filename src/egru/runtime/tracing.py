"""Find the parts of a model that the engine runs, by tracing its ``forward`` method with ``torch.fx``.

The graph is evaluated with descriptions of values instead of tensors. Each description says what a tensor is: the
input, the output of the layers so far, or its last value or mean, followed by an affine map. Affine maps are folded
into the weights of the next layer or into the readout.
"""

import copy
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from egru.layers import EventRNN
from egru.layers.introspect import is_cell
from egru.runtime.graph import trace
from egru.runtime.network import EventModule
from egru.runtime.traced_values import (
    FUNCTIONS,
    Opaque,
    Packed,
    State,
    UnsupportedModelError,
    Value,
    Zeros,
    describe,
    last_step,
)

_ADVICE = "apply it outside the engine, or pass the parts: EventEngine(layer, embedding=..., readout=..., trace=...)"
_PASS_PARTS = "; pass the parts instead: EventEngine(layer, embedding=..., readout=..., trace=...)"
_ZERO_PRESERVING = {
    "clone", "contiguous", "cpu", "cuda", "detach", "div", "double", "expand", "expand_as", "flatten", "float",
    "getitem", "half", "mul", "neg", "permute", "repeat", "reshape", "squeeze", "tile", "to", "transpose", "truediv",
    "type", "type_as", "unsqueeze", "view", "view_as", "zero_",
}  # fmt: skip
_NO_OPS = {"dropout", "contiguous", "clone", "detach", "float", "to", "dropout1d", "alpha_dropout", "feature_dropout"}


class Parts(dict[str, Any]):
    """Keyword arguments of :class:`egru.EventEngine`: ``module``, ``embedding``, ``readout`` and ``trace``."""


def find_parts(model: nn.Module) -> Parts:
    """Return the parts of a model for :class:`egru.EventEngine`.

    Args:
        model: Any model with event layers. One with a method ``streaming`` describes its parts with it.

    Raises:
        UnsupportedModelError: If the engine cannot express what the model computes.
    """
    if isinstance(model, EventModule):
        return Parts(module=model)
    streaming: Any = getattr(model, "streaming", None)
    if streaming is not None:
        return Parts(streaming())
    if not any(isinstance(module, EventRNN) for module in model.modules()):
        raise UnsupportedModelError(
            f"EventEngine: {type(model).__name__} has no event layer; egru.convert(model) replaces dense layers"
        )
    graph = trace(model, "EventEngine", _PASS_PARTS)
    refusal: UnsupportedModelError | None = None
    for layout in _layouts(model):
        try:
            return _Interpreter(model, graph, layout).run()
        except UnsupportedModelError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _layouts(model: nn.Module) -> tuple[str, str]:
    """Return the dimensions of the input, the most likely first."""
    first = next(layer for layer in model.modules() if isinstance(layer, EventRNN))
    return ("BT", "TB") if getattr(first, "batch_first", False) else ("TB", "BT")


def _is_state(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_state, value))
    return value is None or isinstance(value, State | Opaque)


def _find_start(state: Any) -> Any:
    """Return the first part of an initial state that is not zero, or None."""
    parts = state if isinstance(state, tuple | list) else [state]
    return next((part for part in parts if not isinstance(part, Zeros | None)), None)


class _Interpreter:
    """Evaluates the graph of a model with :class:`Value` in place of tensors."""

    def __init__(self, model: nn.Module, graph: fx.Graph, layout: str) -> None:
        self.model, self.graph, self.layout = model, graph, layout
        self.embedding: nn.Embedding | None = None
        self.layers: list[EventRNN] = []
        self.values: dict[fx.Node, Any] = {}

    def run(self) -> Parts:
        for node in self.graph.nodes:
            arguments = fx.map_arg(node.args, self.values.__getitem__)
            options = fx.map_arg(node.kwargs, self.values.__getitem__)
            match node.op:
                case "placeholder":
                    first = not self.values
                    self.values[node] = Value("input", self.layout + "F") if first else None
                case "get_attr":
                    constant = str(node.target).startswith("_tensor_constant")
                    self.values[node] = Opaque("a constant tensor" if constant else node.target)
                case "call_module":
                    self.values[node] = self._call_module(node.target, arguments, options)
                case "output":
                    return self._build(arguments[0])
                case _:
                    self.values[node] = self._call(node, arguments, options)
        raise AssertionError("a graph ends with an output")

    # ---- modules ----------------------------------------------------------------------------------------------------

    def _call_module(self, name: str, arguments: Any, options: Any) -> Any:
        module = self.model.get_submodule(name)
        value = arguments[0] if arguments else next(iter(options.values()), None)
        label = f"{name} ({type(module).__name__})"
        if isinstance(module, EventRNN):
            state = arguments[1] if len(arguments) > 1 else options.get("hx")
            return self._call_layer(label, module, value, state)
        if isinstance(module, nn.Identity | nn.modules.dropout._DropoutNd):
            return value
        if not isinstance(value, Value):
            raise self._refuse(f"{label} reads {describe(value)}")
        if isinstance(module, nn.Embedding):
            if self.embedding is not None or value != Value("input", self.layout + "F"):
                raise self._refuse(f"{label} is not the first module; the engine has one embedding, for its input")
            self.embedding = module
            return value
        if isinstance(module, nn.Linear):
            self._require_featureslast_step(label, value)
            return value.map(module.weight, module.bias)
        if isinstance(module, nn.BatchNorm1d):
            return self._call_batch_norm(label, module, value)
        if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | nn.InstanceNorm1d):
            raise self._refuse(
                f"{label} normalises each step by its own statistics, which is not a fixed linear map; use "
                "BatchNorm1d, or run it outside the engine"
            )
        raise self._refuse(f"{label} {self._position(value)} is not supported; {_ADVICE}")

    def _call_layer(self, label: str, layer: EventRNN, value: Any, state: Any) -> Any:
        if is_cell(layer):
            raise self._refuse(f"{label} is called step by step; replace the loop by a layer, or pass the cell itself")
        expected = "BTF" if layer.batch_first else "TBF"
        if isinstance(value, Packed):
            output, *rest = self._call_layer(label, layer, dataclasses.replace(value.sequence, dims=expected), state)
            return (Packed(output), *rest)
        if not isinstance(value, Value) or value.summary != "all" or "T" not in value.dims:
            raise self._refuse(f"{label} reads {describe(value)}, not a sequence")
        if (start := _find_start(state)) is not None:
            raise self._refuse(f"{label} starts from {describe(start)}; the engine starts from zeros")
        if value.source == "input" and self.layers:
            raise self._refuse(f"{label} reads the input of the model, and so does the layer before it")
        if value.dims != expected:
            raise self._refuse(
                f"{label} has batch_first={layer.batch_first} and reads dimensions {value.dims}, expected {expected}"
            )
        if layer in self.layers:
            raise self._refuse(f"{label} is called twice")
        self.layers.append(layer if value.weight is None else layer.fold_input(value.weight, value.bias))
        output = Value("layers", expected)
        last = Value("layers", "LBF", "last")
        state = State(last, layer.num_layers)
        return (output, (state, Opaque("c_n"))) if layer.gates == 4 else (output, state)

    def _call_batch_norm(self, label: str, norm: nn.BatchNorm1d, value: Value) -> Value:
        if value.dims not in ("BF", "BFT"):
            raise self._refuse(f"{label} reads dimensions {value.dims}, expected BF or BFT")
        if norm.running_mean is None or norm.running_var is None:
            raise self._refuse(f"{label} has no running statistics, so it depends on the whole batch")
        slope = (norm.running_var.double() + norm.eps).rsqrt()
        if norm.weight is not None:
            slope = slope * norm.weight.detach().double()
        shift = -slope * norm.running_mean.double()
        if norm.bias is not None:
            shift = shift + norm.bias.detach().double()
        return value.map(torch.diag(slope), shift)

    # ---- functions and methods --------------------------------------------------------------------------------------

    def _call(self, node: fx.Node, arguments: Any, options: Any) -> Any:
        target: Any = node.target
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        operands = [*arguments, *options.values()]
        first = operands[0] if operands else None
        value = next((operand for operand in operands if isinstance(operand, Value | State | Packed)), first)
        if name.startswith("_assert"):
            return None
        if name in ("zeros", "new_zeros", "zeros_like") or (isinstance(value, Zeros) and name in _ZERO_PRESERVING):
            return Zeros()
        if isinstance(value, Opaque):
            return value
        if name in ("getattr", "size", "dim", "is_floating_point") or isinstance(value, Zeros | int | float | None):
            if name == "getattr" and isinstance(value, State) and arguments[1] == "y":
                return value
            return Opaque(f"the result of {name}")
        if target is operator.getitem:
            return self._getitem(value, arguments[1])
        if name in _NO_OPS:
            return value
        function: Callable[..., Any] | None = FUNCTIONS.get(name)
        expected = {"squeeze": Value | State, "pad_packed_sequence": Packed}.get(name, Value)
        if function is None or not isinstance(first, expected):
            raise self._refuse(f"{name} {self._position(value)} is not supported; {_ADVICE}")
        try:
            return function(value, *arguments[1:], **options)
        except UnsupportedModelError as error:
            raise self._refuse(f"{name}: {error}") from None

    def _getitem(self, value: Any, index: Any) -> Any:
        if isinstance(value, tuple) and isinstance(index, int):
            return value[index]
        if isinstance(value, State) and isinstance(index, int):
            if index not in (-1, value.layers - 1):
                raise self._refuse(f"the state of layer {index} is used; the engine returns the output of the last one")
            return dataclasses.replace(value.last, dims="BF")
        if isinstance(value, Value):
            keys = index if isinstance(index, tuple) else (index,)
            keys = (*keys, *[slice(None)] * (len(value.dims) - len(keys)))
            full = slice(None)
            if "T" in value.dims and keys[value.dims.index("T")] == -1:
                others = [key for key, dim in zip(keys, value.dims, strict=True) if dim != "T"]
                if all(key == full for key in others):
                    return last_step(value)
        raise self._refuse(f"the index {index!r} of {describe(value)} is not supported; the engine returns every step")

    # ---- result -----------------------------------------------------------------------------------------------------

    def _build(self, result: Any) -> Parts:
        if isinstance(result, tuple | list) and result:
            result, *others = result
            if not all(map(_is_state, others)):
                raise self._refuse("forward returns several outputs; return one, or one and the states")
        if isinstance(result, State) and result.layers == 1:
            result = result.last
        if not isinstance(result, Value) or result.source != "layers":
            raise self._refuse(f"forward returns {describe(result)}, expected the output of the layers or a readout")
        if result.dims[-1] != "F":
            raise self._refuse(f"forward returns dimensions {result.dims}; the engine returns features last")
        readout = None
        if result.weight is not None:
            rows, columns = result.weight.shape
            readout = nn.Linear(columns, rows, bias=result.bias is not None, device="cpu", dtype=torch.float32)
            with torch.no_grad():
                readout.weight.copy_(result.weight)
                if result.bias is not None:
                    readout.bias.copy_(result.bias)
        trace = None if result.summary in ("all", "last") else result.summary
        module = copy.deepcopy(nn.Sequential(*self.layers))
        return Parts(module=module, embedding=self.embedding, readout=readout, trace=trace)

    def _require_featureslast_step(self, label: str, value: Value) -> None:
        if value.dims[-1] != "F":
            raise self._refuse(f"{label} reads dimensions {value.dims}, expected the features last")

    def _position(self, value: Any) -> str:
        if isinstance(value, Value):
            return "in front of the layers" if value.source == "input" else "behind the layers"
        return f"of {describe(value)}"

    def _refuse(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"EventEngine: {type(self.model).__name__}.forward cannot be expressed: {reason}")
