"""What the engine takes from a module: an optional embedding, event-based GRU layers, an optional readout."""

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from egru.events import EventState
from egru.layers import EGRU, EGRUCell

_ME = "EventEngine"
_SILENT = (nn.Dropout, nn.Identity)
"""Children that do nothing at inference."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer, float32 on the CPU, in torch's layout (blocks r, u, z), thresholds constrained."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    theta: Tensor
    reset: str
    reset_gate: str
    reset_scale: Tensor
    """One a unit."""
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
    cell: bool

    def shape(self, streams: int) -> tuple[int, ...]:
        rows = () if streams == 1 else (streams,)
        return (*rows, self.hidden) if self.cell else (self.layers, *rows, self.hidden)


@dataclasses.dataclass(frozen=True)
class Network:
    """embedding → layers → readout, by value: a copy that later training does not change."""

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


def describe(module: nn.Module, embedding: Any, readout: Any, trace: Any) -> Network:
    """Read ``module`` (and what is given beside it) into a :class:`Network`, or say why it is none."""
    found_embedding, events, found_readout = _discover(module)
    embedding = _one("embedding", embedding, found_embedding, nn.Embedding)
    readout = _one("readout", readout, found_readout, nn.Linear)
    if embedding is not None and embedding.max_norm is not None:
        raise ValueError(f"{_ME}: an embedding with max_norm={embedding.max_norm} changes its rows as it is used")
    layers: list[Layer] = []
    for part in events:
        layers.extend(_layers(part))
    for below, above in itertools.pairwise(layers):
        _fits("a layer", above.inputs, "the layer below it", below.hidden)
    if embedding is not None:
        _fits("the first layer", layers[0].inputs, "the embedding", embedding.embedding_dim)
    if readout is not None:
        _fits("the readout", readout.in_features, "the last layer", layers[-1].hidden)
    bias = None if readout is None or readout.bias is None else _values("readout.bias", readout.bias)
    return Network(
        tuple(layers),
        tuple(Group(part.num_layers, part.hidden_size, isinstance(part, EGRUCell)) for part in events),
        None if embedding is None else _values("embedding.weight", embedding.weight),
        None if readout is None else _values("readout.weight", readout.weight),
        bias,
        _decay(trace),
    )


def _discover(module: Any) -> tuple[nn.Embedding | None, list[EGRU | EGRUCell], nn.Linear | None]:
    """The parts of ``module`` in the order it holds them: [nn.Embedding], one or more event layers, [nn.Linear]."""
    if isinstance(module, EGRU | EGRUCell):
        return None, [module], None
    accepted = "egru.EGRU, egru.EGRUCell, or a module holding [nn.Embedding,] egru.EGRU layers [, nn.Linear] in order"
    if not isinstance(module, nn.Module):
        raise TypeError(f"{_ME}: module must be a torch module, got {type(module).__name__}; accepted: {accepted}")
    if callable(getattr(module, "streaming", None)):
        raise TypeError(
            f"{_ME}: {type(module).__name__} does more than its layers and its readout do by themselves; "
            "build the engine with EventEngine(**model.streaming())"
        )
    own = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
    if own:
        raise TypeError(
            f"{_ME}: {type(module).__name__} has parameters or buffers of its own ({', '.join(own)}); "
            f"accepted: {accepted}"
        )
    embedding: nn.Embedding | None = None
    events: list[EGRU | EGRUCell] = []
    readout: nn.Linear | None = None
    for name, child in module._modules.items():  # named_children() leaves out a layer that is there twice
        if child is None or isinstance(child, _SILENT):
            continue
        if isinstance(child, nn.Embedding) and embedding is None and not events and readout is None:
            embedding = child
        elif isinstance(child, EGRU | EGRUCell) and readout is None:
            events.append(child)
        elif isinstance(child, nn.Linear) and events and readout is None:
            readout = child
        else:
            raise TypeError(
                f"{_ME}: cannot run {type(module).__name__}.{name}, a {type(child).__name__}, at this place; "
                f"accepted: {accepted}. Or name the parts: EventEngine(layer, embedding=..., readout=...)"
            )
    if not events:
        raise TypeError(f"{_ME}: {type(module).__name__} holds no event layer; accepted: {accepted}")
    return embedding, events, readout


def _one(name: str, given: Any, found: nn.Module | None, kind: type[nn.Module]) -> Any:
    if given is None:
        return found
    if not isinstance(given, kind):
        raise TypeError(f"{_ME}: {name} must be a torch.nn.{kind.__name__}, got {type(given).__name__}")
    if found is not None and found is not given:
        raise ValueError(f"{_ME}: {name} is given, and the module holds one too; leave one out")
    return given


def _layers(part: EGRU | EGRUCell) -> list[Layer]:
    if part.bidirectional:
        raise ValueError(
            f"{_ME}: bidirectional=True needs the whole sequence at every step; only one direction streams"
        )
    result: list[Layer] = []
    for direction in part.directions():
        weights, suffix = part.weights(direction), direction.suffix
        scale = _values("reset_scale", weights.reset_scale.expand(part.hidden_size))
        if scale.min() < 0:
            raise ValueError(f"{_ME}: reset_scale must not be negative, got {scale.min().item()!r}")
        result.append(
            Layer(
                _values("weight_ih" + suffix, weights.ih),
                _values("weight_hh" + suffix, weights.hh),
                None if weights.bias_ih is None else _values("bias_ih" + suffix, weights.bias_ih),
                None if weights.bias_hh is None else _values("bias_hh" + suffix, weights.bias_hh),
                _values("threshold" + suffix, weights.theta),
                part.reset,
                part.reset_gate,
                scale,
                part.zoneout,
            )
        )
    return result


def _values(name: str, tensor: Tensor) -> Tensor:
    """A float32 copy on the CPU, contiguous and finite."""
    copy = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
    if not torch.isfinite(copy).all():
        raise ValueError(f"{_ME}: {name} holds {copy[~torch.isfinite(copy)][0].item()}; expected finite values")
    return copy


def _fits(above: str, wanted: int, below: str, given: int) -> None:
    if wanted != given:
        raise ValueError(f"{_ME}: {above} takes {wanted} inputs and {below} has {given} outputs")


def _decay(trace: Any) -> float | None:
    if trace is None:
        return None
    if isinstance(trace, bool) or not isinstance(trace, int | float) or not 0 <= trace < 1:
        raise ValueError(f"{_ME}: trace must be None or a decay per step, 0 <= trace < 1; got {trace!r}")
    return float(trace)


def check_state(group: Group, streams: int, state: Any) -> EventState:
    """Both halves, float32, contiguous, finite and of the group's shape."""
    if not isinstance(state, tuple) or len(state) != 2:
        raise TypeError(f"{_ME}: state must be egru.EventState(c, y), always both; got {type(state).__name__}")
    halves: list[Tensor] = []
    for name, half in zip(("state.c", "state.y"), state, strict=True):
        if not isinstance(half, Tensor):
            raise TypeError(f"{_ME}: {name} must be a Tensor, got {type(half).__name__}")
        if tuple(half.shape) != group.shape(streams):
            raise ValueError(f"{_ME}: {name} has shape {tuple(half.shape)}, expected {group.shape(streams)}")
        halves.append(_values(name, half))
    return EventState(*halves)
