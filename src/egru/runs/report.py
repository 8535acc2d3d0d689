"""The page of one run or several, from what is in their folders."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from egru.activity import ActivitySummary
from egru.experiments.config import Config, read
from egru.experiments.registry import RECIPES
from egru.report import Epoch, Raster, RunReport, write_report
from egru.runs.raster import rasters
from egru.runs.trained import trained
from egru.runtime.export import has_parts
from egru.training import Damaged, Run, RunError, to_plain


def report(folders: Sequence[Path], out: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Write the page of the finished runs in ``folders``; return its path.

    ``out`` is the page's folder: by default the run's own ``report``, of several runs ``report`` where we are. Events
    are drawn where the run's checkpoints and data are at hand; elsewhere the page says what was missing.
    """
    if not folders:
        raise ValueError("report: name at least one run")
    runs = [Run.open(folder, say) for folder in folders]
    configs = [read(run.config()) for run in runs]
    names = _names([config for _, config in configs], [recipe for recipe, _ in configs], folders)
    reports = [_read(name, run, *config) for name, run, config in zip(names, runs, configs, strict=True)]
    drawn: list[Raster] = []
    notes: list[str] = []
    for name, run, one in zip(names, runs, reports, strict=True):
        if not one.event_layers:
            continue
        try:
            found = _rasters(run)
        except (FileNotFoundError, ImportError, RunError, Damaged) as error:
            notes.append(f"No events of {name} are drawn: {' '.join(str(error).split())}.")
            continue
        found = found[: 1 if len(runs) > 2 else 2]
        prefix = "" if sum(bool(r.event_layers) for r in reports) == 1 else f"{name}: "
        drawn += [dataclasses.replace(raster, title=f"{prefix}{raster.title}") for raster in found]
    title = f"{configs[0][0]}, {names[0]}" if len(runs) == 1 else f"{len(runs)} runs: {', '.join(names)}"
    if out is None:
        out = Path(folders[0]) / "report" if len(runs) == 1 else Path("report")
    command = "" if len(runs) == 1 else f"egru report {' '.join(map(str, folders))}"
    return write_report(out, title, reports, drawn, command=command, config={}, notes=notes)


def made_by(recipe: str, config: Config, result: dict[str, Any] | None) -> str:
    """What to type for a run: what its result says, if it was not trained but made of another one."""
    return (result or {}).get("made_by") or command(recipe, config)


def command(recipe: str, config: Config) -> str:
    """What to type for a run of ``config``: the recipe, and every field that is not as it makes it."""
    words = [f"egru train {recipe}"]
    if recipe in RECIPES:
        before, after = (flat(to_plain(each)) for each in (RECIPES[recipe].make(), config))
        for name, value in after.items():
            if value != before.get(name) and name != "root":
                words.append(_option(name, value))
    return " ".join(words)


def flat(plain: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by the names their options have."""
    found: dict[str, Any] = {}
    for name, value in plain.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _option(name: str, value: Any) -> str:
    name = name.replace("_", "-")
    if isinstance(value, bool):
        head, _, last = name.rpartition(".")
        return f"--{name}" if value else f"--{head}{'.' if head else ''}no-{last}"
    return f"--{name} {' '.join(map(str, value)) if isinstance(value, list | tuple) else value}"


def _names(configs: Sequence[Config], recipes: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """As short as tells the runs apart: where two have one name, more words."""
    short = [f"{config.cell.upper()} {config.hidden}" for config in configs]
    for more in (recipes, [f"seed {config.seed}" for config in configs], [Path(f).name for f in folders]):
        names = [name if short.count(name) == 1 else f"{name} ({word})" for name, word in zip(short, more, strict=True)]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({i})" for i, name in enumerate(short, 1)]


def _read(name: str, run: Run, recipe: str, config: Config) -> RunReport:
    """A run's numbers from its files."""
    result = run.result()
    if result is None:
        done = len(run.metrics())
        raise RunError(
            f"{run.folder} has no result yet ({done} of {config.epochs} epochs): `egru train --resume {run.folder}`"
        )
    settings = flat(to_plain(config))
    del settings["root"]
    return RunReport(
        name,
        tuple(map(_epoch, run.metrics())),
        result["test"]["accuracy"],
        ActivitySummary.from_dict(result["activity"]),
        result["seconds"],
        config.seed,
        result["test"]["perplexity"],
        config=settings,
        environment=run.environment(),
        command=made_by(recipe, config, result),
    )


def _epoch(line: dict[str, Any]) -> Epoch:
    activity, validation = line["activity"], line["validation"]
    events = activity["backward_sparsity"] is not None
    layers = line.get("layers", {})  # runs of older versions have none
    return Epoch(
        line["epoch"],
        line["train"]["loss"],
        validation["accuracy"],
        activity["activity_sparsity"] if events else None,
        line["seconds"],
        validation["perplexity"],
        {name: layer["activity_sparsity"] for name, layer in layers.items()} if events else {},
    )


def _rasters(run: Run) -> list[Raster]:
    if not run.epochs() and not has_parts(run.folder):
        raise FileNotFoundError("the run's checkpoints are not here")
    found = trained(run.folder, "cpu", run.say)
    return rasters(found.model, found.config, found.data)
