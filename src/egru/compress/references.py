"""What the copy of a model would still run from the original, or lose."""

import inspect
import types
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from egru.compress.dense_layers import Dense


def check_references(model: nn.Module) -> None:
    """Check the functions, methods and layers that a model stores as attributes, and hooks of parameters.

    Raises:
        TypeError: For methods of dense layers, and functions that refer to a module of the model: a copy of the model
            would run the original. Dense layers that torch has not registered cause a warning, and so do hooks of
            parameters, which torch does not copy.
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
    hooked = [name for name, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        warnings.warn(f"convert: hooks of parameters are not copied: {', '.join(hooked)}", stacklevel=3)


def _referenced(value: Any) -> Iterator[nn.Module]:
    """Yield the modules in the closure, the defaults and the globals of a stored function."""
    functions, position = [value], 0
    while position < len(functions):
        function, position = functions[position], position + 1
        if not isinstance(function, types.FunctionType):
            continue
        variables = inspect.getclosurevars(function)
        yield from (target for target in variables.globals.values() if isinstance(target, nn.Module))
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for target in [*variables.nonlocals.values(), *defaults]:
            target = getattr(target, "__self__", target)  # of a method
            if isinstance(target, nn.Module):
                yield target
            elif not any(target is known for known in functions):
                functions.append(target)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module, and the entries of its lists, tuples and dictionaries."""
    for name, value in vars(module).items():
        if isinstance(value, dict) and not name.startswith("_"):
            value = list(value.values())
        for entry in value if isinstance(value, list | tuple) else [value]:
            yield name, entry
