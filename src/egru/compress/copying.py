"""Copies of models for conversion: what a copy would still run from the original, lose, or fail on."""

import copy
import inspect
import types
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from egru.compress.dense_layers import Dense

Model = TypeVar("Model", bound=nn.Module)


def check_references(model: nn.Module) -> None:
    """Check the functions, methods and layers that a model stores as attributes.

    Raises:
        TypeError: For methods of dense layers, and functions that refer to a module of the model: a copy of the model
            would run the original. Dense layers that torch has not registered cause a warning.
    """
    modules = set(model.modules())
    for name, module in model.named_modules():
        for attribute, value in _attributes(module):
            owner = f"{name}.{attribute}" if name else attribute
            if isinstance(value, types.MethodType) and isinstance(value.__self__, Dense):
                raise TypeError(
                    f"convert: {owner} is a method of a {type(value.__self__).__name__}, which would still run the "
                    "dense layer; store the layer and call it"
                )
            if target := next((target for target in _referenced(value) if target in modules), None):
                raise TypeError(
                    f"convert: {owner} is a function that refers to {type(target).__name__}, so the copy would run the "
                    "original; define it as a method of the class"
                )
            if isinstance(value, Dense) and value not in modules:
                warnings.warn(
                    f"convert: {owner} contains a layer ({type(value).__name__}) that is not a submodule and stays "
                    "dense; use nn.ModuleList or nn.ModuleDict",
                    stacklevel=3,
                )


def copy_model(model: Model) -> Model:
    """Return a deep copy of a model, with a warning if parameters have hooks, which torch does not copy.

    Raises:
        TypeError: If the model cannot be copied. The message names the attribute.
    """
    hooked = [name for name, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        warnings.warn(f"convert: hooks of parameters are not copied: {', '.join(hooked)}", stacklevel=3)
    # torch's layers keep weights that a parametrisation computes, and compute them again in the next call.
    weights = [w for layer in model.modules() if isinstance(layer, nn.RNNBase) for w in layer._flat_weights]
    memo: dict[int, Any] = {id(w): w.detach() for w in weights if isinstance(w, Tensor) and not w.is_leaf}
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception as error:  # deepcopy of arbitrary attributes
        name = _find_attribute_without_copy(model, memo)
        because = f" because of {name}" if name else ""
        raise TypeError(
            f"convert: {type(model).__name__} cannot be copied{because} ({error}); detach it or set it to None"
        ) from error


def _referenced(value: Any) -> Iterator[nn.Module]:
    """Yield the modules that a stored function refers to: in its closure, globals and defaults."""
    if not isinstance(value, types.FunctionType):
        return
    variables = inspect.getclosurevars(value)
    defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    for target in [*variables.nonlocals.values(), *variables.globals.values(), *defaults]:
        target = getattr(target, "__self__", target)  # of a method
        if isinstance(target, nn.Module):
            yield target
        elif target is not value:
            yield from _referenced(target)


def _find_attribute_without_copy(model: nn.Module, memo: dict[int, Any]) -> str | None:
    for name, module in model.named_modules():
        attributes = vars(module) | module._buffers
        for attribute, value in attributes.items():
            if attribute in ("_modules", "_buffers", "_parameters"):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:  # deepcopy of arbitrary attributes
                return f"{name}.{attribute}" if name else attribute
    return None


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module, and the entries of its lists, tuples and dictionaries."""
    for name, value in vars(module).items():
        if isinstance(value, dict) and not name.startswith("_"):
            value = list(value.values())
        for entry in value if isinstance(value, list | tuple) else [value]:
            yield name, entry
