"""Extract what the engine runs from a module: an optional embedding, event layers, an optional readout."""

import dataclasses
import itertools
import math
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from egru.events import check_events
from egru.layers import EGRU, ELSTM, EGRUCell, checks
from egru.layers.introspect import is_cell
from egru.types import COMPARES, RESET_GATES, RESETS, SEQUENCE_CELLS, Compare, Events, Reset, ResetGate, SequenceCell

Trace: TypeAlias = float | Literal["mean"]
"""Summary of the outputs over time: a decay per step, or their mean."""
EventModule: TypeAlias = EGRU | EGRUCell | ELSTM
"""The layers that the engine runs."""
NO_OPS = (nn.Dropout, nn.Identity)
"""Children that do nothing at inference."""
_ACCEPTED = (
    "egru.EGRU, egru.EGRUCell, egru.ELSTM, or a module whose children are [nn.Embedding,] these layers [, nn.Linear], "
    "in this order"
)


@dataclasses.dataclass(frozen=True)
class Layer:
    """Parameters of one layer: float32 CPU tensors in the layout of torch (blocks r, u, z or i, f, g, o).

    Attributes:
        weight_ih: Input weights, ``(gates * H, I)``.
        weight_hh: Recurrent weights, ``(gates * H, H)``.
        bias_ih: Input bias, ``(gates * H,)``, or None.
        bias_hh: Recurrent bias, ``(gates * H,)``, or None.
        theta: Constrained thresholds, ``(H,)``.
        reset: How a unit is cleared after an event.
        reset_gate: Whether the reset gate acts before or after the recurrent product.
        reset_scale: Scale of the reset, ``(H,)``.
        keep: Zoneout probability: the fraction of the old state that is kept.
        cell: The recurrent cell.
        compare: What an LSTM compares with the threshold.
        events: When a unit emits an event, and what the output is.
    """

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    theta: Tensor
    reset: Reset
    reset_gate: ResetGate
    reset_scale: Tensor
    keep: float
    cell: SequenceCell = "gru"
    compare: Compare = "cell"
    events: Events = "positive"

    @property
    def gates(self) -> int:
        return 4 if self.cell == "lstm" else 3

    @property
    def inputs(self) -> int:
        return self.weight_ih.shape[1]

    @property
    def hidden(self) -> int:
        return self.theta.shape[0]


@dataclasses.dataclass(frozen=True)
class Group:
    """The layers of one event module, whose states are stored together.

    Attributes:
        name: Name of the module, or "" if the engine was created from the event module itself.
        layers: Number of layers.
        hidden: Number of units per layer.
        is_cell: Whether the module is a cell, whose state has no dimension of layers.
    """

    name: str
    layers: int
    hidden: int
    is_cell: bool

    def key(self, part: str) -> str:
        """Return the name of a part of the state, ``"c"`` or ``"y"``."""
        return f"{self.name}.{part}" if self.name else part


@dataclasses.dataclass(frozen=True)
class Network:
    """A copy of the parameters of embedding, layers and readout, with the summary of the outputs over time."""

    layers: tuple[Layer, ...]
    groups: tuple[Group, ...]
    embedding: Tensor | None
    readout: Tensor | None
    readout_bias: Tensor | None
    trace: Trace | None

    @property
    def decay(self) -> float | None:
        """Decay of the output trace per step. A mean is a trace without decay, divided by the number of steps."""
        return 1.0 if self.trace == "mean" else self.trace

    @property
    def inputs(self) -> int:
        return self.layers[0].inputs

    @property
    def outputs(self) -> int:
        return self.layers[-1].hidden if self.readout is None else self.readout.shape[0]

    @property
    def tokens(self) -> int:
        return 0 if self.embedding is None else self.embedding.shape[0]


def extract_network(
    module: nn.Module,
    embedding: nn.Embedding | None = None,
    readout: nn.Linear | None = None,
    trace: Trace | None = None,
) -> Network:
    """Copy the parameters of a module, with an embedding and a readout that are not part of it.

    Raises:
        TypeError: If ``module`` has children that the engine does not support.
        ValueError: If sizes do not fit, a parameter is not finite, or a layer is bidirectional.
    """
    child_embedding, event_modules, child_readout = _split_children(module)
    embedding = _argument_or_child("embedding", embedding, child_embedding, nn.Embedding)
    readout = _argument_or_child("readout", readout, child_readout, nn.Linear)
    if embedding is not None and embedding.max_norm is not None:
        raise ValueError(f"EventEngine: embedding.max_norm must be None, got {embedding.max_norm}")
    layers = [layer for event_module in event_modules.values() for layer in _extract_layers(event_module)]
    bias = None if readout is None or readout.bias is None else finite_copy("readout.bias", readout.bias)
    network = Network(
        tuple(layers),
        tuple(Group(name, m.num_layers, m.hidden_size, is_cell(m)) for name, m in event_modules.items()),
        None if embedding is None else finite_copy("embedding.weight", embedding.weight),
        None if readout is None else finite_copy("readout.weight", readout.weight),
        bias,
        _check_trace(trace),
    )
    check_network(network)
    return network


def check_network(network: Network) -> None:
    """Raise ValueError unless the shapes of all parameters fit together and the options are known."""
    for layer in network.layers:
        for name in ("weight_ih", "weight_hh", "theta", "reset_scale"):
            if getattr(layer, name) is None:  # possible in an engine file
                raise ValueError(f"EventEngine: {name} is missing")
        H, rows = layer.theta.shape[0], layer.gates * layer.theta.shape[0]
        shapes = {"weight_ih": (rows, layer.inputs), "weight_hh": (rows, H), "bias_ih": (rows,), "bias_hh": (rows,)}
        for name, shape in {**shapes, "theta": (H,), "reset_scale": (H,)}.items():
            tensor: Tensor | None = getattr(layer, name)
            if tensor is not None and (tuple(tensor.shape) != shape or 0 in shape):
                raise ValueError(f"EventEngine: {name} has shape {tuple(tensor.shape)}, expected {shape}")
        if layer.reset_scale.min() < 0:
            raise ValueError(f"EventEngine: reset_scale must not be negative, got {layer.reset_scale.min().item()!r}")
        checks.choice("EventEngine", "reset", layer.reset, RESETS)
        checks.choice("EventEngine", "reset_gate", layer.reset_gate, RESET_GATES)
        checks.choice("EventEngine", "cell", layer.cell, SEQUENCE_CELLS)
        checks.choice("EventEngine", "compare", layer.compare, COMPARES)
        check_events(layer.events, layer.reset, layer.reset_gate, "EventEngine")
        if layer.events != "positive" and layer.theta.min() < 0:
            raise ValueError(
                f"EventEngine: events={layer.events!r} requires thresholds of at least 0, got {layer.theta.min():g}"
            )
        checks.probability("EventEngine", "zoneout", layer.keep)
    hidden = [group.hidden for group in network.groups for _ in range(group.layers)]
    if not hidden or hidden != [layer.hidden for layer in network.layers]:
        raise ValueError(f"EventEngine: groups of {hidden} units do not fit the {len(network.layers)} layers")
    for below, above in itertools.pairwise(network.layers):
        _check_sizes("a layer", above.inputs, "the layer below it", below.hidden)
    if network.embedding is not None:
        _check_sizes("the first layer", network.inputs, "the embedding", network.embedding.shape[1])
    if network.readout is not None:
        _check_sizes("the readout", network.readout.shape[1], "the last layer", network.layers[-1].hidden)
    if network.readout_bias is not None and network.readout_bias.shape != (network.outputs,):
        raise ValueError(f"EventEngine: readout.bias has shape {tuple(network.readout_bias.shape)}")
    _check_trace(network.trace)


def _split_children(module: Any) -> tuple[nn.Embedding | None, dict[str, EventModule], nn.Linear | None]:
    """Return the embedding, the event layers by name, and the readout of ``module``."""
    if isinstance(module, EventModule):
        return None, {"": module}, None
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"EventEngine: module must be a torch module, got {type(module).__name__}; accepted: {_ACCEPTED}"
        )
    name = type(module).__name__
    if callable(getattr(module, "streaming", None)):
        raise TypeError(
            f"EventEngine: {name} computes more than its layers and readout; use EventEngine(**model.streaming())"
        )
    tensors = [key for key, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
    if tensors:
        raise TypeError(
            f"EventEngine: {name} has parameters or buffers outside its children ({', '.join(tensors)}); "
            f"accepted: {_ACCEPTED}"
        )
    embedding: nn.Embedding | None = None
    event_modules: dict[str, EventModule] = {}
    readout: nn.Linear | None = None
    # named_children() would omit the second use of a layer.
    children = {key: child for key, child in module.named_modules(remove_duplicate=False) if key and "." not in key}
    for key, child in children.items():
        if isinstance(child, NO_OPS):
            continue
        if isinstance(child, nn.Embedding) and embedding is None and not event_modules and readout is None:
            embedding = child
        elif isinstance(child, EventModule) and readout is None:
            event_modules[key] = child
        elif isinstance(child, nn.Linear) and event_modules and readout is None:
            readout = child
        else:
            raise TypeError(
                f"EventEngine: {name}.{key}, a {type(child).__name__}, is not supported in this position; "
                f"accepted: {_ACCEPTED}. Or pass the parts: EventEngine(layer, embedding=..., readout=...)"
            )
    if not event_modules:
        raise TypeError(f"EventEngine: {name} has no event layer; accepted: {_ACCEPTED}")
    return embedding, event_modules, readout


def _argument_or_child(name: str, argument: Any, child: nn.Module | None, expected: type[nn.Module]) -> Any:
    if argument is None:
        return child
    if not isinstance(argument, expected):
        raise TypeError(f"EventEngine: {name} must be a torch.nn.{expected.__name__}, got {type(argument).__name__}")
    if child is not None and child is not argument:
        raise ValueError(f"EventEngine: {name} must be None because the module contains one already")
    return argument


def _extract_layers(module: EventModule) -> list[Layer]:
    if module.bidirectional:
        raise ValueError("EventEngine: bidirectional layers are not supported: they need the complete sequence")
    layers: list[Layer] = []
    for direction in module.directions():
        weights, suffix = module.weights(direction), direction.suffix
        scale = finite_copy("reset_scale", weights.reset_scale.expand(module.hidden_size))
        layers.append(
            Layer(
                finite_copy("weight_ih" + suffix, weights.ih),
                finite_copy("weight_hh" + suffix, weights.hh),
                None if weights.bias_ih is None else finite_copy("bias_ih" + suffix, weights.bias_ih),
                None if weights.bias_hh is None else finite_copy("bias_hh" + suffix, weights.bias_hh),
                finite_copy("threshold" + suffix, weights.theta),
                module.reset,
                "after" if isinstance(module, ELSTM) else module.reset_gate,
                scale,
                module.zoneout,
                "lstm" if isinstance(module, ELSTM) else "gru",
                module.compare if isinstance(module, ELSTM) else "cell",
                module.events,
            )
        )
    return layers


def finite_copy(name: str, tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a contiguous copy on the CPU, and check that it is finite."""
    copy = tensor.detach().resolve_neg().to("cpu", dtype, copy=True).contiguous()
    low, high = copy.aminmax()  # NaN if there is one; without the memory that isfinite takes
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(
            f"EventEngine: {name} contains {copy[~torch.isfinite(copy)][0].item()}; expected finite values"
        )
    return copy


def _check_sizes(above: str, inputs: int, below: str, outputs: int) -> None:
    if inputs != outputs:
        raise ValueError(f"EventEngine: {above} takes {inputs} inputs and {below} has {outputs} outputs")


def _check_trace(trace: Any) -> Trace | None:
    if trace is None or (isinstance(trace, str) and trace == "mean"):
        return trace
    if isinstance(trace, bool) or not isinstance(trace, int | float) or not 0 <= trace <= 1:
        raise ValueError(f"EventEngine: trace must be None, 'mean' or a decay per step, 0 <= trace <= 1; got {trace!r}")
    return float(trace)
