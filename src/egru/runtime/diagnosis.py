"""Compare the outputs of a module and an engine, and describe in words how they differ."""

import inspect
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egru.events import EventState
from egru.layers import EventRNN
from egru.layers.introspect import is_cell
from egru.runtime.network import NO_OPS, Network
from egru.runtime.reference import ReferenceRunner
from egru.trace import PAPER_DECAY


@torch.no_grad()
@torch.autocast("cpu", enabled=False)
def call_module(module: Any, x: Tensor, layout: str) -> Any:
    """Return the output of a module for sequences ``(T, B, ...)``, arranged as ``layout``, without its state.

    Further arguments without a default are passed the lengths of the sequences, for modules that pack them.
    """
    lengths = torch.full((x.shape[1],), x.shape[0], device="cpu")
    x = arrange(x, layout)
    if isinstance(module, EventRNN) and is_cell(module):
        state, outputs = None, []
        for row in x:
            state = module(row, state)
            outputs.append(_first(state))
        return torch.stack(outputs)
    parameters = list(inspect.signature(module.forward).parameters.values())[1:]
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return _first(module(x, *[lengths] * len(required)))


def agrees(result: Any, expected: Tensor, tolerance: float) -> bool:
    """Return whether ``result`` holds the expected outputs: all steps, time or batch first, or the last step."""
    if not isinstance(result, Tensor) or not result.is_floating_point():
        return False
    result = result.detach().float().squeeze()
    for candidate in (expected, expected.transpose(0, 1), expected[-1]):
        candidate = candidate.squeeze()
        if candidate.shape == result.shape and bool(((candidate - result).abs() <= tolerance).all()):
            return True
    return False


def describe_difference(module: nn.Module, network: Network, x: Tensor, layout: str, result: Any, scale: float) -> str:
    """Return what ``module`` computes from ``x`` that ``network`` does not, as part of an error message.

    Args:
        module: The module, in evaluation mode.
        network: What the engine would run.
        x: An input, ``(T, B, ...)``.
        layout: Arrangement of the input of ``module``; see :func:`arrange`.
        result: Output of ``module`` for this input.
        scale: Largest magnitude that an output of the engine can have.
    """
    if not isinstance(result, Tensor):
        return f"forward returns {type(result).__name__} instead of a tensor"
    summary = _describe_summary(module, network, x, layout, scale)
    return summary or _describe_chain(module, x, layout, result)


def arrange(x: Tensor, layout: str) -> Tensor:
    """Arrange ``x``, ``(T, B, ...)``, as ``"time first"``, ``"batch first"`` or ``"unbatched"``."""
    if layout == "unbatched":
        return x[:, 0].contiguous()
    return x if layout == "time first" else x.transpose(0, 1).contiguous()


def _describe_summary(module: nn.Module, network: Network, x: Tensor, layout: str, scale: float) -> str:
    """Describe the summary over time that ``module`` reads, if it is a trace or a mean, or return ""."""
    y = _events(network, x)
    if layout == "unbatched":
        y = y[:, :1]
    bias: Tensor | float = 0.0
    if network.readout is not None:
        y = F.linear(y, network.readout)
        bias = 0.0 if network.readout_bias is None else network.readout_bias
    tolerance = 1e-4 * scale
    # After two steps, a trace is gain * (y_2 + decay * y_1).
    try:
        short = call_module(module, x[:2], layout)
    except Exception:  # forward is arbitrary code
        return ""
    if not isinstance(short, Tensor) or not short.is_floating_point():
        return ""
    target = _last_step(short.float(), 2, y[0].shape, layout)
    if target is None:
        return ""
    basis = torch.stack([y[1].flatten(), y[0].flatten()], 1).double()
    gain, product = torch.linalg.lstsq(basis, (target - bias).double().flatten()[:, None]).solution[:, 0].tolist()
    decay = product / gain if abs(gain) > 1e-3 else math.nan
    full = call_module(module, x, layout)
    mean = y.cumsum(0) / torch.arange(1, len(y) + 1).reshape(-1, 1, 1)
    trace = [gain * y[0]]
    for row in y[1:]:
        trace.append(decay * trace[-1] + gain * row)
    if agrees(full, y + bias, tolerance):
        return "forward uses the events of one step; pass trace=None"
    if agrees(full, mean + bias, tolerance):
        return "forward uses the mean of the events over time; pass trace='mean'"
    if 0 <= decay <= 1 + 1e-5 and agrees(full, torch.stack(trace) + bias, tolerance):
        text = "math.exp(-1 / 10)" if abs(decay - PAPER_DECAY) < 1e-5 else str(min(round(decay, 5), 1.0))
        if abs(gain - 1) < 1e-4:
            return f"forward uses a trace of the events with decay {text}; pass trace={text}"
        return (
            f"forward uses a trace of the events with decay {text} and gain {gain:.4g}; multiply the weights of the "
            f"readout by {gain:.4g} and pass trace={text}"
        )
    return ""


def _describe_chain(module: nn.Module, x: Tensor, layout: str, result: Tensor) -> str:
    """Name the first child of ``module`` that does not read the output of the child before it."""
    children = {name: child for name, child in module.named_children() if not isinstance(child, NO_OPS)}
    calls: list[tuple[str, Any, Any]] = []
    hooks = [
        child.register_forward_hook(
            lambda _, args, output, name=name: calls.append((name, args[0] if args else None, _first(output)))
        )
        for name, child in children.items()
    ]
    call_module(module, x, layout)
    for hook in hooks:
        hook.remove()
    names = [name for name, _, _ in calls]
    if names == list(children):
        source, value = "the input", arrange(x, layout)
        for name, received, output in calls:
            if not _same(received, value):
                return f"the input of {name} is not {source}"
            source, value = f"the output of {name}", output
        if not _same(result, value):
            return f"the result is not {source}"
    elif children and len(names) <= 2 * len(children):
        return f"forward calls {', '.join(names) or 'no layer'}, the engine runs {', '.join(children)}"
    return f"the outputs of shape {tuple(result.shape)} differ by more than float32 rounding"


def _same(received: Any, value: Any) -> bool:
    """Return whether a child reads ``value``, all of it or its last step, batch first or not."""
    if not isinstance(received, Tensor) or not isinstance(value, Tensor):
        return False
    candidates = [value]
    if value.dim() > 1:
        candidates += [value.transpose(0, 1), value[-1]]
    if value.dim() > 2:
        candidates.append(value[:, -1])
    return any(received.shape == c.shape and torch.allclose(received, c, atol=1e-6) for c in candidates)


def _first(output: Any) -> Any:
    """Return the output of a module without its state."""
    if isinstance(output, EventState):  # of a cell
        return output.y
    return output[0] if isinstance(output, tuple | list) and len(output) else output


def _last_step(result: Tensor, steps: int, shape: torch.Size, layout: str) -> Tensor | None:
    """Return the output at the last step, ``(B, O)``, from the output at all steps or at the last one."""
    if result.numel() == shape.numel():
        return result.reshape(shape)
    if result.numel() != steps * shape.numel():
        return None
    return result.reshape(shape[0], steps, -1)[:, -1] if layout == "batch first" else result.reshape(steps, *shape)[-1]


def _events(network: Network, x: Tensor) -> Tensor:
    """Return the events of the last layer, ``(T, B, H)``."""
    runner = ReferenceRunner(network, "float32", x.shape[1])
    out = np.empty((1, x.shape[1], network.outputs), np.float32)
    events: list[Tensor] = []
    for row in x:
        array = row.numpy()[None]
        runner.run(*((array, None) if network.embedding is None else (None, array)), False, out)
        events.append(runner.get_state(len(network.layers) - 1).y)
    return torch.stack(events)
