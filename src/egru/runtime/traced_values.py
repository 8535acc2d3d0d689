"""Descriptions of the tensors in a traced model, and the functions that arrange, reduce and map them."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from egru.runtime.network import Trace
from egru.trace import exponential_trace

Summary = Trace | Literal["all", "last"]


class UnsupportedModelError(TypeError):
    """The engine cannot express what a model computes. The message gives the reason."""


@dataclasses.dataclass(frozen=True)
class Value:
    """Description of a tensor in the graph.

    Attributes:
        source: What the tensor is computed from: the input, or the event layers so far.
        dims: Meaning of the dimensions: ``B`` batch, ``T`` time, ``F`` features, ``L`` layers.
        summary: Which steps of the source it contains.
        weight: Matrix of the affine map that follows, in float64, or None for the identity.
        bias: Offset of the affine map, in float64, or None.
    """

    source: Literal["input", "layers"]
    dims: str
    summary: Summary = "all"
    weight: Tensor | None = None
    bias: Tensor | None = None

    def map(self, weight: Tensor, bias: Tensor | None) -> "Value":
        """Return the value after a further affine map."""
        weight, bias = weight.detach().double().cpu(), None if bias is None else bias.detach().double().cpu()
        if self.bias is not None:
            bias = weight @ self.bias if bias is None else weight @ self.bias + bias
        weight = weight if self.weight is None else weight @ self.weight
        return dataclasses.replace(self, weight=weight, bias=bias)


@dataclasses.dataclass(frozen=True)
class State:
    """State ``h_n`` of a layer: the last output of each of its layers."""

    last: Value
    layers: int


@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed sequence."""

    sequence: Value


class Zeros:
    """A tensor of zeros."""


@dataclasses.dataclass(frozen=True)
class Opaque:
    """A value that does not depend on the data, such as a size or a parameter.

    Attributes:
        origin: What it is or is computed from, in words.
    """

    origin: str


def describe(value: Any) -> str:
    match value:
        case Value(source="input"):
            return "the input"
        case Value(summary="all"):
            return "the outputs of the layers"
        case Value():
            return f"the {value.summary} output of the layers"
        case State():
            return "the state of a layer"
        case Packed():
            return "a packed sequence"
        case Zeros():
            return "zeros"
        case None:
            return "nothing"
        case Opaque():
            return value.origin
        case tuple() | list():
            return "several tensors"
        case _:
            return f"a value of type {type(value).__name__}"


def last_step(value: Value) -> Value:
    if value.source == "input":
        raise UnsupportedModelError("only the last step of the input is used")
    return dataclasses.replace(value, dims=value.dims.replace("T", ""), summary="last")


def _transpose(value: Value, first: int, second: int) -> Value:
    dims = list(value.dims)
    dims[first], dims[second] = dims[second], dims[first]
    return dataclasses.replace(value, dims="".join(dims))


def _permute(value: Value, *order: Any) -> Value:
    order = order[0] if len(order) == 1 else order
    return dataclasses.replace(value, dims="".join(value.dims[i] for i in order))


def _squeeze(value: Any, dim: int | None = None) -> Value:
    if isinstance(value, State) and value.layers == 1 and dim == 0:
        return dataclasses.replace(value.last, dims="BF")
    raise UnsupportedModelError("only the dimension of layers of a state can be removed")


def _reduce(value: Value, dim: Any, summary: Trace) -> Value:
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    if not isinstance(dim, int) or not isinstance(value, Value) or value.dims[dim] != "T" or value.source != "layers":
        raise UnsupportedModelError("only outputs of the layers can be reduced, over time")
    if summary != "mean" and value.bias is not None:
        raise UnsupportedModelError("the sum of a readout with a bias grows with the number of steps; sum first")
    dims = value.dims.replace("T", "")
    return dataclasses.replace(value, dims=dims, summary=summary)


def _mean(value: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return _reduce(value, None if keepdim else dim, "mean")


def _sum(value: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return _reduce(value, None if keepdim else dim, 1.0)


def _exponential_trace(value: Value, *args: Any, **kwargs: Any) -> Value:
    bound = inspect.signature(exponential_trace).bind(value, *args, **kwargs)
    bound.apply_defaults()
    options = bound.arguments
    if options["initial"] is not None or options["lengths"] is not None:
        raise UnsupportedModelError("initial and lengths are not supported")
    dim = value.dims.index("T")
    if value.source != "layers" or value.bias is not None or dim != (1 if options["batch_first"] else 0):
        raise UnsupportedModelError("a trace must read the outputs of the layers, in the order of batch_first")
    if options["gain"] != 1:
        raise UnsupportedModelError("a gain is not supported; multiply the weights of the readout by it")
    dims = value.dims.replace("T", "") if options["last"] else value.dims
    return dataclasses.replace(value, dims=dims, summary=float(options["decay"]))


def _pack(value: Value, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Packed:
    expected = "BTF" if batch_first else "TBF"
    if not isinstance(value, Value) or value.dims != expected:
        raise UnsupportedModelError(f"batch_first={batch_first} requires a sequence with the dimensions {expected}")
    return Packed(value)


def _pad(
    value: Packed, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Value, Opaque]:
    if not isinstance(value, Packed):
        raise UnsupportedModelError("expected a packed sequence")
    return dataclasses.replace(value.sequence, dims="BTF" if batch_first else "TBF"), Opaque("lengths")


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "transpose": _transpose,
    "swapaxes": _transpose,
    "permute": _permute,
    "squeeze": _squeeze,
    "mean": _mean,
    "sum": _sum,
    "exponential_trace": _exponential_trace,
    "pack_padded_sequence": _pack,
    "pad_packed_sequence": _pad,
}
