"""The sections of a page on settings and environments: what differs first, what is shared folded away."""

from collections.abc import Mapping, Sequence
from typing import Any

from egru.environment import Environment
from egru.report.html import FOLD, definition_list, folded, format_value, json_value, small, table
from egru.report.run import RunReport


def differing_settings(runs: Sequence[RunReport]) -> str:
    """Return a table of the settings that have different values, folded if it is long. Empty if there are none."""
    rows = [(name, values) for name, values in _rows(runs) if len(set(values) - {"-"}) > 1]
    if not rows:
        return ""
    content = table([run.name for run in runs], rows, [bool(run.event_layers) for run in runs], "setting")
    note = small("A dash marks a setting that the model does not have.") if any("-" in row for _, row in rows) else ""
    body = content + note
    return f"<h2>Settings that differ</h2>{body if len(rows) <= FOLD else folded(f'{len(rows)} settings', body)}"


def shared_settings(runs: Sequence[RunReport], config: Mapping[str, Any]) -> str:
    """Return the settings with one value: those of ``config`` and those changed from the recipe, then all others."""
    shared = {name: (set(values) - {"-"}).pop() for name, values in _rows(runs) if len(set(values) - {"-"}) == 1}
    changed = {name for run in runs for name in run.changed}
    given = {name: format_value(value) for name, value in json_value(config).items()}
    first = {name: value for name, value in shared.items() if name in changed and name not in given}
    others = {name: value for name, value in shared.items() if name not in given and name not in first}
    if not given and not shared:
        return small("No settings were recorded.")
    parts = [definition_list(given)] if given else []
    if first:
        parts.append(f"<h3>Changed from the recipe</h3>{definition_list(first)}")
    if others:
        number = f"{len(others)} {'more ' if given or first else ''}settings"
        parts.append(definition_list(others) if len(others) <= FOLD else folded(number, definition_list(others)))
    return "".join(parts)


def _rows(runs: Sequence[RunReport]) -> list[tuple[str, list[str]]]:
    """Return name and values of every setting, with a dash for runs that do not have it."""
    settings = [{k: format_value(v) for k, v in json_value(run.config).items()} for run in runs]
    names = dict.fromkeys(name for values in settings for name in values)
    return [(name, [values.get(name, "-") for values in settings]) for name in names]


def environments(runs: Sequence[RunReport], current: Environment, date: str) -> str:
    """Return each environment once, with the names of its runs if there are several."""
    groups: list[tuple[Environment, list[str]]] = []
    for run in runs:
        environment = run.environment or current
        names = next((names for other, names in groups if other == environment), None)
        if names is None:
            groups.append((environment, [run.name]))
        else:
            names.append(run.name)
    written = {"page written": date}
    if len(groups) == 1:
        return definition_list(environment_entries(groups[0][0]) | written)
    parts = [folded(", ".join(names), definition_list(environment_entries(each))) for each, names in groups]
    return "".join(parts) + definition_list(written)


def environment_entries(environment: Environment) -> dict[str, str]:
    """Return the entries of an environment by name."""
    return {
        **environment.versions,
        "machine": environment.machine,
        "threads": str(environment.threads),
        "GPU": environment.cuda or "none",
        **{f"kernel {name}": status for name, status in environment.kernels.items()},
    }
