"""Read and write the complete state of an engine as tensors by name."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from egru.runtime.inputs import describe
from egru.runtime.network import Network, finite_copy
from egru.runtime.runners import Runner


def state_shapes(network: Network, streams: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the state, in the order of the network."""
    rows = () if streams == 1 else (streams,)
    shapes: dict[str, tuple[int, ...]] = {}
    for group in network.groups:
        layers = () if group.is_cell else (group.layers,)
        for half in ("c", "y"):
            shapes[group.key(half)] = (*layers, *rows, group.hidden)
    if network.trace is not None:
        shapes["trace"] = (*rows, network.outputs)
    if network.trace == "mean":
        shapes["trace_steps"] = rows
    return shapes


def get_state(runner: Runner, network: Network, streams: int) -> dict[str, Tensor]:
    """Return a copy of the state; :attr:`egru.EventEngine.state` describes it."""
    values: list[Tensor] = []
    layer = 0
    for group in network.groups:
        parts = [runner.get_state(layer + i) for i in range(group.layers)]
        layer += group.layers
        values += [torch.stack(half) for half in zip(*parts, strict=True)]
    if network.trace is not None:
        values += runner.get_trace()
    shapes = state_shapes(network, streams)
    return {name: value.reshape(shape) for (name, shape), value in zip(shapes.items(), values, strict=False)}


def set_state(runner: Runner, network: Network, streams: int, state: Any) -> None:
    """Check a complete state, then replace that of the runner.

    Raises:
        TypeError: If ``state`` is not a mapping of tensors.
        ValueError: If a tensor is missing, unknown, not finite, or has the wrong shape.
    """
    shapes = state_shapes(network, streams)
    if not isinstance(state, Mapping):
        raise TypeError(f"EventEngine: state must be a dict with {', '.join(shapes)}; got {describe(state)}")
    for name in shapes:
        if name not in state:
            raise ValueError(f"EventEngine: state has no {name!r}; this engine requires {', '.join(shapes)}")
    if unknown := [name for name in state if name not in shapes]:
        raise ValueError(f"EventEngine: state has an unknown entry {unknown[0]!r}; expected {', '.join(shapes)}")
    values = {name: _check(name, state[name], shape) for name, shape in shapes.items()}
    layer = 0
    for group in network.groups:
        shape = (group.layers, streams, group.hidden)
        c, y = (values[group.key(half)].reshape(shape) for half in ("c", "y"))
        for c_l, y_l in zip(c, y, strict=True):
            runner.set_state(layer, c_l, y_l)
            layer += 1
    if network.trace is not None:
        steps = values.get("trace_steps", torch.zeros(streams, dtype=torch.int64))
        runner.set_trace(values["trace"].reshape(streams, -1), steps.reshape(streams))


def _check(name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    """Return a contiguous copy on the CPU in the dtype that the runner needs."""
    if not isinstance(value, Tensor):
        raise TypeError(f"EventEngine: state[{name!r}] must be a Tensor, got {type(value).__name__}")
    if tuple(value.shape) != shape:
        raise ValueError(f"EventEngine: state[{name!r}] has shape {tuple(value.shape)}, expected {shape}")
    if name == "trace_steps":
        if value.dtype != torch.int64 or bool((value < 0).any()):
            raise ValueError(f"EventEngine: state[{name!r}] must be int64 and not negative, got {value.dtype} {value}")
        return value.to("cpu", copy=True).contiguous()
    return finite_copy(f"state[{name!r}]", value, torch.float64 if name == "trace" else torch.float32)
