"""Find the modules that read the outputs of each event layer, by tracing a model with ``torch.fx``."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.nn.utils import parametrize

from egru.layers import EventRNN
from egru.layers.introspect import is_cell
from egru.runtime.graph import trace

_ZERO_PRESERVING = (nn.Identity, nn.modules.dropout._DropoutNd, nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.LeakyReLU)
_UNCHANGED = {"dropout", "contiguous", "clone", "detach", "float", "double", "to", "relu", "tanh", "gelu", "silu"}
_REDUCTIONS = {"mean", "sum", "amax"}
_ARRANGEMENTS = {"transpose", "swapaxes"}


@dataclasses.dataclass
class Readers:
    """How the outputs of one event layer are used.

    Attributes:
        layer: Name of the event layer.
        source: Name of the event layer whose outputs it reads, or None if it reads something else.
        linears: Names of the linear layers that read its outputs, each with the names of the batch normalisations in
            between, in order.
        obstacle: Why units of the layer cannot be removed, or None.
    """

    layer: str
    source: str | None = None
    linears: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    obstacle: str | None = None


@dataclasses.dataclass(frozen=True)
class _Features:
    """A tensor whose last dimension has one entry per unit of an event layer."""

    layer: str
    dims: int
    norms: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _State:
    """The state of an event layer, which is not only its outputs."""

    layer: str


def find_readers(model: nn.Module, owner: str) -> dict[str, Readers]:
    """Return how the outputs of every event layer of a model are used, in the order of the calls.

    Args:
        model: Any model with event layers.
        owner: Name of the calling function, for messages.

    Raises:
        TypeError: If the model cannot be traced.
    """
    graph, readers, values = trace(model, owner), {}, {}
    for node in graph.nodes:
        arguments = fx.map_arg(node.args, values.__getitem__)
        options = fx.map_arg(node.kwargs, values.__getitem__)
        values[node] = _call(model, node, arguments, options, readers)
    return readers


def _call(model: nn.Module, node: fx.Node, arguments: Any, options: Any, readers: dict[str, Readers]) -> Any:
    if node.op == "call_module":
        name = str(node.target)
        has_state = any(argument is not None for argument in [*node.args[1:], node.kwargs.get("hx")])
        return _call_module(name, model.get_submodule(name), [*arguments, *options.values()], has_state, readers)
    inputs = [value for value in _flatten((arguments, options)) if isinstance(value, _Features | _State)]
    if not inputs:
        return None
    if node.op == "output":
        return _refuse(readers, inputs, "the model returns its outputs")
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    value = arguments[0] if arguments else None
    if target is operator.getitem and isinstance(value, tuple):
        return value[arguments[1]]
    if name == "getattr" and isinstance(value, _Features | _State) and arguments[1] in ("shape", "device", "dtype"):
        return None
    if isinstance(value, _Features) and len(inputs) == 1 and name not in ("size", "dim"):
        dims = _FUNCTIONS.get(name, _unknown)(value.dims, *arguments[1:], **options)
        if dims is not None:
            return dataclasses.replace(value, dims=dims)
    return None if name in ("size", "dim") else _refuse(readers, inputs, f"{name} reads its outputs or state")


def _call_module(
    name: str, module: nn.Module, arguments: list[Any], has_state: bool, readers: dict[str, Readers]
) -> Any:
    first = arguments[0] if arguments else None
    inputs = [value for value in _flatten(arguments) if isinstance(value, _Features | _State)]
    label = f"{name} ({type(module).__name__})"
    if isinstance(module, EventRNN):
        if name in readers:
            return _refuse(readers, [_State(name)], "it is called more than once")
        obstacle = None
        if is_cell(module):
            obstacle = "it is called step by step"
        elif module.num_layers * module.num_directions > 1:
            obstacle = "it has several layers or directions; use one module per layer"
        elif has_state:
            obstacle = "its initial state is given"
        source = first.layer if isinstance(first, _Features) and not first.norms and len(inputs) == 1 else None
        readers[name] = Readers(name, source, obstacle=obstacle)
        if inputs and source is None:
            _refuse(readers, inputs, f"{label} reads a normalised output or a state")
        return (_Features(name, 3), _State(name))
    if not inputs:
        return None
    if isinstance(first, _Features) and len(inputs) == 1:
        if isinstance(module, _ZERO_PRESERVING) and not first.norms:
            return first
        if isinstance(module, nn.Identity | nn.modules.dropout._DropoutNd):
            return first
        if isinstance(module, nn.BatchNorm1d) and first.dims == 2:
            return dataclasses.replace(first, norms=(*first.norms, name))
        if type(module) is nn.Linear and name not in readers[first.layer].linears:
            readers[first.layer].linears[name] = first.norms
            return None
    if parametrize.is_parametrized(module):
        reason = f"the weights of {name} are parametrised (WeightPruning.remove() removes masks)"
        return _refuse(readers, inputs, reason)
    return _refuse(readers, inputs, f"{label} reads its outputs or state")


def _refuse(readers: dict[str, Readers], inputs: list[Any], reason: str) -> None:
    for value in inputs:
        readers[value.layer].obstacle = readers[value.layer].obstacle or reason


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [part for item in value for part in _flatten(item)] if isinstance(value, tuple | list) else [value]


# ---- functions: the number of dimensions afterwards, or None if the last dimension is no longer that of the units ----


def _same(dims: int, *arguments: Any, **options: Any) -> int:
    return dims


def _unknown(dims: int, *arguments: Any, **options: Any) -> None:
    return None


def _arranged(dims: int, first: int, second: int) -> int | None:
    return None if dims - 1 in (first % dims, second % dims) else dims


def _reduced(dims: int, dim: Any = None, keepdim: bool = False) -> int | None:
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    if not isinstance(dim, int) or dim % dims == dims - 1:
        return None
    return dims if keepdim else dims - 1


def _indexed(dims: int, index: Any) -> int | None:
    keys = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(key, int | slice) for key in keys) or len(keys) > dims:
        return None
    if len(keys) == dims and keys[-1] != slice(None):
        return None
    return dims - sum(isinstance(key, int) for key in keys)


_FUNCTIONS: dict[str, Callable[..., int | None]] = {
    **dict.fromkeys(_UNCHANGED, _same),
    **dict.fromkeys(_ARRANGEMENTS, _arranged),
    **dict.fromkeys(_REDUCTIONS, _reduced),
    "getitem": _indexed,
}
