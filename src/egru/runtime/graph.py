"""Trace the ``forward`` method of a model with ``torch.fx``, without a change of the model."""

import inspect
import math
import operator
from collections.abc import Iterator
from typing import Any

from torch import fx, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import egru
from egru.copies import copy_model
from egru.layers import EventRNN
from egru.runtime.alterations import find_hook, has_own_forward
from egru.runtime.traced_values import UnsupportedModelError
from egru.trace import exponential_trace

_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)


def trace(model: nn.Module, owner: str, advice: str = "") -> fx.Graph:
    """Return the graph of a model's ``forward`` method in evaluation mode. Event layers are nodes.

    Args:
        model: Any model. The first argument of ``forward`` is the input, the others have their defaults.
        owner: Name of the calling function, for the message.
        advice: What to do if the model cannot be traced.

    Raises:
        UnsupportedModelError: If it cannot be traced, has hooks, or reads what it stored in an earlier call.
    """
    _check_wrappers(model, owner)
    if hooked := find_hook(model):
        raise UnsupportedModelError(
            f"{owner}: {hooked} has a forward hook, which could change its outputs; remove it{advice}"
        )
    probe = _copy(model, owner, advice)
    try:
        graph = _trace(probe)
    except Exception as error:  # forward is arbitrary code
        name = type(model).__name__
        if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(model.forward).parameters.values()):
            raise UnsupportedModelError(
                f"{owner}: {name}.forward takes *args, which torch.fx cannot trace; pass the module that it calls"
            ) from error
        raise UnsupportedModelError(
            f"{owner}: {name}.forward cannot be traced by torch.fx ({_first_line(error)}){advice}"
        ) from error
    for module, attribute, value in _stored_values(probe):
        if _reads(_copy(model, owner, advice), module, attribute, value):
            label = f"{module}.{attribute}" if module else attribute
            raise UnsupportedModelError(
                f"{owner}: {type(model).__name__}.forward reads {label}, which it stored in an earlier call; pass the "
                "state as an argument and return it"
            )
    return graph


def _check_wrappers(model: nn.Module, owner: str) -> None:
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise UnsupportedModelError(f"{owner}: the model is wrapped in {type(model).__name__}; pass model.module")
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule":
            compiled = name or "the model"
            raise UnsupportedModelError(f"{owner}: {compiled} is compiled; pass the original module")


def _copy(model: nn.Module, owner: str, advice: str) -> nn.Module:
    """Return a copy in evaluation mode: ``forward`` may assign attributes and change buffers."""
    try:
        return copy_model(model, owner, advice, shared=model.parameters(), detach=True).eval()
    except TypeError as error:
        raise UnsupportedModelError(str(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _trace(probe: nn.Module) -> fx.Graph:
    parameters = list(inspect.signature(probe.forward).parameters.values())
    defaults = {p.name: p.default for p in parameters[1:] if p.default is not inspect.Parameter.empty}
    reads_tokens = any(isinstance(module, nn.Embedding) for module in probe.modules())
    return _Tracer(reads_tokens).trace(probe, concrete_args=defaults)


# ---- values that forward stores --------------------------------------------------------------------------------------


def _stored_values(probe: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield the module, name and value of attributes that contain traced values after a call."""
    for name, module in probe.named_modules():
        for attribute, value in vars(module).items():
            if _contains_proxy(value):
                yield name, attribute, value


def _contains_proxy(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(map(_contains_proxy, value))
    return isinstance(value, fx.Proxy)


def _reads(probe: nn.Module, module: str, attribute: str, value: Any) -> bool:
    """Return whether ``forward`` reads a value that an earlier call has stored in an attribute."""
    vars(probe.get_submodule(module))[attribute] = value
    try:
        graph = _trace(probe)
    except Exception:  # such as control flow that depends on the value
        return True
    return any(source.graph is not graph for node in graph.nodes for source in node.all_input_nodes)


# ---- tracer ----------------------------------------------------------------------------------------------------------


class _Tracer(fx.Tracer):
    """Keeps event layers, modules of torch, :func:`egru.exponential_trace` and packing of sequences as nodes."""

    def __init__(self, reads_tokens: bool) -> None:
        super().__init__((math,), (exponential_trace, pack_padded_sequence, pad_packed_sequence))
        # Find them as attributes of their modules, too. Wrapping the modules would also wrap their classes.
        self._autowrap_search += [egru, nn.utils.rnn]
        self._answers = {"dim": 2 if reads_tokens else 3, "is_floating_point": not reads_tokens}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if has_own_forward(m):
            return False
        leaf = isinstance(m, EventRNN | nn.Linear | nn.Embedding | nn.BatchNorm1d)
        return leaf or super().is_leaf_module(m, module_qualified_name)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Answer questions about the number of dimensions and the dtype of the input; others raise an error."""
        value = self._evaluate(obj.node)
        return super().to_bool(obj) if value is None else bool(value)

    def _evaluate(self, node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        target: Any = node.target
        about_input = bool(node.args) and isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder"
        if about_input and node.op == "call_method":
            return self._answers.get(target)
        if about_input and target is getattr and node.args[1] == "ndim":
            return self._answers["dim"]
        operands = [self._evaluate(argument) for argument in node.args]
        return target(*operands) if target in _COMPARISONS and None not in operands else None
