"""Deep copies of models, with errors that name the attribute that cannot be copied."""

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils import _pytree

Model = TypeVar("Model", bound=nn.Module)


def copy_model(
    model: Model, owner: str, advice: str = "", *, shared: Iterable[Any] = (), detach: bool = False
) -> Model:
    """Return a deep copy of a model.

    Args:
        model: Any module.
        owner: Name of the calling function, for the message.
        advice: What else the user can do if the model cannot be copied.
        shared: Objects that the copy shares with the model.
        detach: Whether tensors in attributes that are part of an autograd graph are detached in the copy. Otherwise,
            they cannot be copied.

    Raises:
        TypeError: If the model cannot be copied. The message names the attribute.
    """
    memo: dict[int, Any] = {id(value): value for value in shared}
    for module in model.modules():
        # torch's layers keep weights that a parametrisation computes, and compute them again in the next call.
        values = vars(module) if detach else vars(module).get("_flat_weights")
        for value in _pytree.tree_leaves(values):
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception as error:  # deepcopy of arbitrary attributes
        name = _find_obstacle(model, memo)
        because = f" because of {name}" if name else ""
        raise TypeError(
            f"{owner}: {type(model).__name__} cannot be copied{because} ({error}); detach it or set it to None{advice}"
        ) from error


def _find_obstacle(model: nn.Module, memo: dict[int, Any]) -> str | None:
    """Return the name of an attribute that cannot be copied."""
    for name, module in model.named_modules():
        for attribute, value in (vars(module) | module._buffers).items():
            if attribute in ("_modules", "_buffers", "_parameters"):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:  # deepcopy of arbitrary attributes
                return f"{name}.{attribute}" if name else attribute
    return None
