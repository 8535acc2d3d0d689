"""Deep copies of models, with errors that name the attribute that cannot be copied."""

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def copy_model(model: Model, owner: str, advice: str = "", shared: Iterable[Any] = ()) -> Model:
    """Return a deep copy of a model.

    Args:
        model: Any module.
        owner: Name of the calling function, for the message.
        advice: What else the user can do if the model cannot be copied.
        shared: Objects that the copy shares with the model.

    Raises:
        TypeError: If the model cannot be copied. The message names the attribute.
    """
    # torch's layers keep weights that a parametrisation computes, and compute them again in the next call.
    weights = [w for layer in model.modules() if isinstance(layer, nn.RNNBase) for w in layer._flat_weights]
    memo: dict[int, Any] = {id(w): w.detach() for w in weights if isinstance(w, Tensor) and not w.is_leaf}
    memo |= {id(value): value for value in shared}
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
