"""Check that the engine computes what ``forward`` of a module computes, on short random sequences.

:class:`egru.EventEngine` reads the parameters of a module, not its code. Therefore a copy of the module runs a few
steps and is compared with the reference runner, which computes what the engine computes. The event layers of the copy
get random weights and low thresholds: many units are then active, regardless of the trained weights.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from egru.copies import copy_model
from egru.layers import EGRU, ELSTM, EGRUCell
from egru.runtime.alterations import find_hook, has_own_forward
from egru.runtime.diagnosis import agrees, call_module, describe_difference
from egru.runtime.network import NO_OPS, EventModule, Network, Trace, extract_network
from egru.runtime.reference import ReferenceRunner
from egru.runtime.tracing import find_parts

STEPS, SEQUENCES = 4, 3
TOLERANCE = 1e-5
"""Accepted difference, relative to the sum of magnitudes in the largest output. Two float32 implementations differ by
about 1e-7 per state and step, so by less than 1e-6 after four steps, and a readout averages these errors."""
ATTEMPTS = 5
"""Sequences tried before a module is refused. Two correct implementations differ by a complete event if a state is
within 1e-7 of its threshold. In a network of 4,000 units this happens in about one of 20 sequences."""


def check_forward(
    module: nn.Module, embedding: nn.Embedding | None, readout: nn.Linear | None, trace: Trace | None
) -> None:
    """Check a module and the parts that are passed with it; the arguments are those of :class:`egru.EventEngine`.

    A module without ``forward`` and an ``nn.Sequential`` are containers: the engine runs their children in order. Their
    children are checked one by one, except for plain layers of known classes.

    Raises:
        TypeError: If ``forward`` computes something else or cannot be run, or if there are hooks. The message names the
            difference.
    """
    for part in (module, embedding, readout):
        if part is not None and (hooked := find_hook(part)):
            raise TypeError(f"EventEngine: {hooked} has a forward hook, which the engine would not run; remove it")
    parts: list[nn.Module] = [part for part in (embedding, readout) if part is not None]
    if isinstance(module, EventModule) or _is_container(module):
        modules = [module] if isinstance(module, EventModule) else list(module.children())
        parts += modules
    elif readout is None and trace is not None and not any(isinstance(part, nn.Linear) for part in module.children()):
        _compare_either(module, trace)
    else:
        _compare_network(module, trace if readout is None else None)
    for part in parts:
        if isinstance(part, (nn.Linear, nn.Embedding, *NO_OPS)):
            if has_own_forward(part):
                base = next(base for base in type(part).__mro__ if base.__module__.startswith("torch."))
                raise TypeError(
                    f"EventEngine: {type(part).__name__} has its own forward method, which the engine would not run; "
                    f"pass a torch.nn.{base.__name__}"
                )
        elif type(part) not in (EGRU, EGRUCell, ELSTM):
            _compare_network(part, None)


def _is_container(module: nn.Module) -> bool:
    return type(module) is nn.Sequential or type(module).forward is nn.Module.forward


def _compare_either(module: nn.Module, trace: Trace) -> None:
    """Check a module that returns events: ``trace`` may be part of it, or act on its output."""
    try:
        _compare_network(module, None)
    except TypeError:
        _compare_network(module, trace)


def check_model(model: nn.Module) -> None:
    """Check a model whose parts were found by :func:`egru.runtime.tracing.find_parts`.

    Raises:
        TypeError: If ``forward`` computes something else or cannot be run. The message names the difference.
    """
    _compare(model, lambda probe: extract_network(**find_parts(probe)))


def _compare_network(module: nn.Module, trace: Trace | None) -> None:
    _compare(module, lambda probe: extract_network(probe, trace=trace))


def _compare(module: nn.Module, extract: Callable[[nn.Module], Network]) -> None:
    """Compare ``forward`` of a module with the network that ``extract`` returns for a copy of it."""
    name, probe = type(module).__name__, _copy_module(module)
    layouts, error = _layouts(probe), None
    differences: list[str] = []
    for attempt in range(ATTEMPTS):
        network, x, expected, scale = _prepare(probe, attempt, extract)
        if expected is None:
            continue
        comparable = False  # whether the output for the most likely layout has the right shape
        for layout in layouts:
            if layout == "unbatched" and comparable:
                break  # the module reads batches and computes something else from them
            target = expected[:, 0] if layout == "unbatched" else expected
            try:
                result = call_module(probe, x, layout)
            except Exception as raised:  # forward is arbitrary code
                error = raised if error is None else error
                continue
            if agrees(result, target, TOLERANCE * scale):
                return
            if layout == layouts[0]:
                comparable = agrees(result, target, math.inf)
            if len(differences) < 3:
                differences.append(describe_difference(probe, network, x, layout, result, scale))
    differences.sort(key=lambda difference: not difference.startswith("forward uses"))  # the most helpful first
    advice = "pass the parts of the network instead: EventEngine(layer, embedding=..., readout=..., trace=...)"
    if differences:
        raise TypeError(
            f"EventEngine: {name}.forward and the engine compute different outputs: {differences[0]}; or {advice}"
        )
    if error is not None:
        raise TypeError(
            f"EventEngine: {name}.forward cannot be compared with the engine because it raises "
            f"{type(error).__name__} for a random sequence ({error}); {advice}"
        ) from error
    raise TypeError(
        f"EventEngine: {name}.forward cannot be compared with the engine because its units stay inactive; {advice}"
    )


def _copy_module(module: nn.Module) -> Any:
    """Return a float32 copy on the CPU, in evaluation mode."""
    advice = "; or pass the parts of the network: EventEngine(layer, embedding=..., readout=..., trace=...)"
    return copy_model(module, "EventEngine", advice, detach=True).to("cpu", torch.float32).eval()


@torch.no_grad()
def _prepare(
    probe: nn.Module, seed: int, extract: Callable[[nn.Module], Network]
) -> tuple[Network, Tensor, Tensor | None, float]:
    """Set new weights and return the network, an input, the engine's outputs and their scale.

    Outputs are None if no unit of the last layer was active, or none before the last step.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed GPUs
        for layer in probe.modules():
            if isinstance(layer, EventModule):
                layer.reset_parameters()
                layer.backend = "auto"  # the copy is on the CPU
                for parameter in layer.threshold_parameters().values():
                    parameter.fill_(-6.0 if layer.threshold_config.kind == "sigmoid" else 0.0025)
        network = extract(probe)
        if network.embedding is None:
            x = 3 * torch.randn(STEPS, SEQUENCES, network.inputs, dtype=torch.float32, device="cpu")
        else:
            x = torch.randint(network.tokens, (STEPS, SEQUENCES), device="cpu")
    runner = ReferenceRunner(network, "float32", SEQUENCES)
    expected = np.empty((STEPS, SEQUENCES, network.outputs), np.float32)
    active: list[bool] = []
    array = x.numpy()
    for t in range(STEPS):
        row = array[t : t + 1]
        runner.run(*((row, None) if network.embedding is None else (None, row)), False, expected[t : t + 1])
        active.append(bool(runner.get_state(len(network.layers) - 1).y.any()))
    largest = 1.0 if network.readout is None else float(network.readout.abs().sum(1).max())  # states are below 1
    informative = active[-1] and any(active[:-1])
    scale = max(largest, float(np.abs(expected).max()))
    return network, x, torch.from_numpy(expected) if informative else None, scale


def _layouts(probe: nn.Module) -> tuple[str, str, str]:
    """Return arrangements of the input, the most likely first."""
    layers = [layer for layer in probe.modules() if isinstance(layer, EGRU | ELSTM)]
    if layers and layers[0].batch_first:
        return "batch first", "time first", "unbatched"
    return "time first", "batch first", "unbatched"
