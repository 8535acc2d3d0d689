"""Modules that may compute something else than their class does: with hooks, or with a ``forward`` of the user."""

from typing import Any

from torch import nn

_OWN_HOOKS = ("egru.", "torch.nn.utils.")
"""Where hooks come from that change no outputs, such as those of monitors, or only weights (weight normalisation)."""


def find_hook(model: nn.Module) -> str | None:
    """Return the name of a module of ``model`` with a forward hook of the user, or None.

    A hook can return other outputs, on any input. Comparing a few outputs does not show that it changes none.
    """
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if not all(_module_of(hook).startswith(_OWN_HOOKS) for hook in hooks):
            return f"{name} ({type(module).__name__})" if name else type(module).__name__
    return None


def has_own_forward(module: nn.Module) -> bool:
    """Return whether ``forward`` is defined neither by torch nor by egru."""
    return "forward" in vars(module) or not _module_of(type(module).forward).startswith(("egru.", "torch."))


def _module_of(function: Any) -> str:
    return str(getattr(function, "__module__", ""))
