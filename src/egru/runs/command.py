"""The command line that reproduces a run."""

import dataclasses
from typing import Any

from egru.experiments.config import Config
from egru.experiments.custom import Custom, class_path
from egru.experiments.registry import RECIPES
from egru.training import Result, to_plain


def recorded_command(recipe: str, config: Config, result: Result | None) -> str:
    """Return the command that produced a run: `egru quieten …` if it was derived from another, else `egru train …`."""
    if result is not None and result.derivation is not None:
        return result.derivation.command
    return train_command(recipe, config)


def train_command(recipe: str, config: Config) -> str:
    """Return the `egru train` command for ``config``: the recipe and every field that differs from it.

    For a custom config it is a call in Python.
    """
    if isinstance(config, Custom):
        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        changed = {name.partition(".")[0] for name in changed_settings(recipe, config)}
        fields = ", ".join(f"{name}={value!r}" for name, value in values.items() if name in changed)
        return f"egru.runs.train({recipe!r}, {class_path(type(config)).replace(':', '.')}({fields}), FOLDER)"
    options = (_option(name, value) for name, value in changed_settings(recipe, config).items())
    return " ".join([f"egru train {recipe}", *options])


def changed_settings(recipe: str, config: Config) -> dict[str, Any]:
    """Return the fields that differ from the recipe, or from the defaults of a custom config.

    They have the names of their options. Empty for an unknown recipe.
    """
    if isinstance(config, Custom):
        defaults = flatten({f.name: _default(f) for f in dataclasses.fields(config)})
    elif recipe in RECIPES:
        defaults = flatten(to_plain(RECIPES[recipe].make()))
    else:
        return {}
    fields = flatten(to_plain(config))
    return {name: value for name, value in fields.items() if value != defaults.get(name) and name != "root"}


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field as a JSON value, or None if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return to_plain(field.default_factory())
    return None if field.default is dataclasses.MISSING else to_plain(field.default)


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
