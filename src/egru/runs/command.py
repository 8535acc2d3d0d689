"""The command line that reproduces a run."""

from typing import Any

from egru.experiments.config import Config
from egru.experiments.registry import RECIPES
from egru.training import Result, to_plain


def recorded_command(recipe: str, config: Config, result: Result | None) -> str:
    """Return the command that produced a run: `egru quieten …` if it was derived from another, else `egru train …`."""
    if result is not None and result.derivation is not None:
        return result.derivation.command
    return train_command(recipe, config)


def train_command(recipe: str, config: Config) -> str:
    """Return the `egru train` command for ``config``: the recipe and every field that differs from it."""
    options = (_option(name, value) for name, value in changed_settings(recipe, config).items())
    return " ".join([f"egru train {recipe}", *options])


def changed_settings(recipe: str, config: Config) -> dict[str, Any]:
    """Return the fields that differ from the recipe, by the names of their options. Empty for an unknown recipe."""
    if recipe not in RECIPES:
        return {}
    defaults = flatten(to_plain(RECIPES[recipe].make()))
    fields = flatten(to_plain(config))
    return {name: value for name, value in fields.items() if value != defaults.get(name) and name != "root"}


def flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested fields to the names of their options: ``threshold.mean``."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _option(name: str, value: Any) -> str:
    name = name.replace("_", "-")
    if isinstance(value, bool):
        head, _, last = name.rpartition(".")
        return f"--{name}" if value else f"--{head}{'.' if head else ''}no-{last}"
    return f"--{name} {' '.join(map(str, value)) if isinstance(value, list | tuple) else value}"
