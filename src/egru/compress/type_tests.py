"""Find code that tests whether a layer is one of torch's, which it no longer is after conversion."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn

_DENSE = {"GRU", "LSTM", "GRUCell", "LSTMCell", "RNNBase", "RNNCellBase"}
_NOT_IN_FORWARD = {"__init__", "__repr__", "extra_repr", "reset_parameters", "init_weights", "_init_weights"}


def find_type_tests(model: nn.Module) -> Iterator[str]:
    """Yield the methods of a model's classes that test for the types of dense layers, each with the test.

    Examples are ``isinstance(self.rnn, nn.LSTM)``, ``type(self.rnn) is nn.GRU`` and ``case nn.GRU():``.
    """
    for module_type in sorted({type(module) for module in model.modules()}, key=lambda kind: kind.__qualname__):
        for name, function in _methods(module_type):
            if test := _find_test(function):
                yield f"{module_type.__name__}.{name} contains {test}"


def _methods(module_type: type[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield the methods of a class that belong neither to torch nor to egru and may run after conversion."""
    names = set(_NOT_IN_FORWARD)
    for parent in module_type.__mro__:
        if parent.__module__.startswith(("torch.", "egru.")) or parent is object:
            continue
        for name, value in vars(parent).items():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if name not in names and inspect.isfunction(function):
                yield name, function
        names |= vars(parent).keys()


def _find_test(function: Any) -> str | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # defined in an interactive session, or a part of an expression
        return None
    return next((ast.unparse(node) for node in ast.walk(tree) if _is_type_test(node)), None)


def _is_type_test(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[_, accepted]):
            return _names_dense_layer(accepted)
        case ast.Compare(left=ast.Constant(), ops=[ast.In() | ast.NotIn()]):
            return False  # "GRU" in the name of the class, which still holds
        case ast.Compare():
            operands = [node.left, *node.comparators]
            return any(map(_asks_for_type, operands)) and any(map(_names_dense_layer, operands))
        case ast.MatchClass():
            return _names_dense_layer(node.cls)
    return False


def _asks_for_type(node: ast.AST) -> bool:
    for part in ast.walk(node):
        match part:
            case ast.Call(func=ast.Name("type") | ast.Attribute(attr="_get_name")) | ast.Attribute(attr="__class__"):
                return True
    return False


def _names_dense_layer(node: ast.AST) -> bool:
    names = (
        getattr(part, "id", None) or getattr(part, "attr", None) or getattr(part, "value", None)
        for part in ast.walk(node)
    )
    return any(isinstance(name, str) and name in _DENSE for name in names)
