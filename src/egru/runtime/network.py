"""Extract what the engine runs from a module: an optional embedding, event-based GRU layers, an optional readout."""

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from egru.events import EventState
from egru.layers import EGRU, EGRUCell
from egru.types import Reset, ResetGate

_NO_OPS = (nn.Dropout, nn.Identity)
"""Children that do nothing at inference."""
_ACCEPTED = (
    "egru.EGRU, egru.EGRUCell, or a module whose children are [nn.Embedding,] egru.EGRU layers [, nn.Linear], "
    "in this order"
)


@dataclasses.dataclass(frozen=True)
class Layer:
    """Parameters of one layer: float32 CPU tensors in the layout of torch (blocks r, u, z).

    Attributes:
        weight_ih: Input weights, ``(3 H, I)``.
        weight_hh: Recurrent weights, ``(3 H, H)``.
        bias_ih: Input bias, ``(3 H,)``, or None.
        bias_hh: Recurrent bias, ``(3 H,)``, or None.
        theta: Constrained thresholds, ``(H,)``.
        reset: How a unit is cleared after an event.
        reset_gate: Whether the reset gate acts before or after the recurrent product.
        reset_scale: Scale of the reset, ``(H,)``.
        keep: Zoneout probability: the fraction of the old state that is kept.
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

    @property
    def inputs(self) -> int:
        return self.weight_ih.shape[1]

    @property
    def hidden(self) -> int:
        return self.theta.shape[0]


@dataclasses.dataclass(frozen=True)
class Group:
    """The layers of one module, which share one :class:`~egru.EventState`."""

    layers: int
    hidden: int
    is_cell: bool

    def state_shape(self, streams: int) -> tuple[int, ...]:
        rows = () if streams == 1 else (streams,)
        return (*rows, self.hidden) if self.is_cell else (self.layers, *rows, self.hidden)


@dataclasses.dataclass(frozen=True)
class Network:
    """A copy of the parameters of embedding, layers and readout, with the decay of the output trace."""

    layers: tuple[Layer, ...]
    groups: tuple[Group, ...]
    embedding: Tensor | None
    readout: Tensor | None
    readout_bias: Tensor | None
    trace: float | None

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
    trace: float | None = None,
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
    layers = [layer for event_module in event_modules for layer in _extract_layers(event_module)]
    for below, above in itertools.pairwise(layers):
        _check_sizes("a layer", above.inputs, "the layer below it", below.hidden)
    if embedding is not None:
        _check_sizes("the first layer", layers[0].inputs, "the embedding", embedding.embedding_dim)
    if readout is not None:
        _check_sizes("the readout", readout.in_features, "the last layer", layers[-1].hidden)
    bias = None if readout is None or readout.bias is None else _copy("readout.bias", readout.bias)
    return Network(
        tuple(layers),
        tuple(Group(m.num_layers, m.hidden_size, isinstance(m, EGRUCell)) for m in event_modules),
        None if embedding is None else _copy("embedding.weight", embedding.weight),
        None if readout is None else _copy("readout.weight", readout.weight),
        bias,
        _check_decay(trace),
    )


def _split_children(module: Any) -> tuple[nn.Embedding | None, list[EGRU | EGRUCell], nn.Linear | None]:
    """Return the embedding, the event layers and the readout of ``module``."""
    if isinstance(module, EGRU | EGRUCell):
        return None, [module], None
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
    event_modules: list[EGRU | EGRUCell] = []
    readout: nn.Linear | None = None
    # named_children() would omit the second use of a layer.
    children = {key: child for key, child in module.named_modules(remove_duplicate=False) if key and "." not in key}
    for key, child in children.items():
        if isinstance(child, _NO_OPS):
            continue
        if isinstance(child, nn.Embedding) and embedding is None and not event_modules and readout is None:
            embedding = child
        elif isinstance(child, EGRU | EGRUCell) and readout is None:
            event_modules.append(child)
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


def _extract_layers(module: EGRU | EGRUCell) -> list[Layer]:
    if module.bidirectional:
        raise ValueError("EventEngine: bidirectional layers are not supported: they need the complete sequence")
    layers: list[Layer] = []
    for direction in module.directions():
        weights, suffix = module.weights(direction), direction.suffix
        scale = _copy("reset_scale", weights.reset_scale.expand(module.hidden_size))
        if scale.min() < 0:
            raise ValueError(f"EventEngine: reset_scale must not be negative, got {scale.min().item()!r}")
        layers.append(
            Layer(
                _copy("weight_ih" + suffix, weights.ih),
                _copy("weight_hh" + suffix, weights.hh),
                None if weights.bias_ih is None else _copy("bias_ih" + suffix, weights.bias_ih),
                None if weights.bias_hh is None else _copy("bias_hh" + suffix, weights.bias_hh),
                _copy("threshold" + suffix, weights.theta),
                module.reset,
                module.reset_gate,
                scale,
                module.zoneout,
            )
        )
    return layers


def _copy(name: str, tensor: Tensor) -> Tensor:
    """Return a contiguous float32 copy on the CPU, and check that it is finite."""
    copy = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
    if not torch.isfinite(copy).all():
        raise ValueError(
            f"EventEngine: {name} contains {copy[~torch.isfinite(copy)][0].item()}; expected finite values"
        )
    return copy


def _check_sizes(above: str, inputs: int, below: str, outputs: int) -> None:
    if inputs != outputs:
        raise ValueError(f"EventEngine: {above} takes {inputs} inputs and {below} has {outputs} outputs")


def _check_decay(trace: Any) -> float | None:
    if trace is None:
        return None
    if isinstance(trace, bool) or not isinstance(trace, int | float) or not 0 <= trace < 1:
        raise ValueError(f"EventEngine: trace must be None or a decay per step, 0 <= trace < 1; got {trace!r}")
    return float(trace)


def check_state(group: Group, streams: int, state: Any) -> EventState:
    """Return contiguous float32 copies of both tensors of a state after checking their shapes."""
    if not isinstance(state, tuple) or len(state) != 2:
        raise TypeError(f"EventEngine: state must be an egru.EventState(c, y), got {type(state).__name__}")
    halves: list[Tensor] = []
    for name, half in zip(("state.c", "state.y"), state, strict=True):
        if not isinstance(half, Tensor):
            raise TypeError(f"EventEngine: {name} must be a Tensor, got {type(half).__name__}")
        shape = group.state_shape(streams)
        if tuple(half.shape) != shape:
            raise ValueError(f"EventEngine: {name} has shape {tuple(half.shape)}, expected {shape}")
        halves.append(_copy(name, half))
    return EventState(*halves)
