"""Tables and figures of studies on small images: initial thresholds, width of the surrogate, and pruned weights.

    egru train smnist14-threshold-4-1 --seed 1    # one run of a study; `egru list` names the others
    egru reproduce --keep RUN
    python benchmarks/studies.py                  # print the tables, write the figures under docs/results/images

The results are those that ship with the package (``egru.experiments.results``).
"""

import argparse
import pathlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from egru.experiments import RECIPES
from egru.experiments.images import MEANS, STDS, WIDTHS, ZEROS
from egru.experiments.results import KeptResult, read_results, spread
from egru.format import count, percent
from egru.report import LIGHT

IMAGES = pathlib.Path(__file__).parents[1] / "docs" / "results" / "images"
Cell = tuple[float, float, bool]
"""A point of the grid: mean, standard deviation, and whether the thresholds are trained."""


def threshold_cells(results: Iterable[KeptResult]) -> dict[Cell, list[KeptResult]]:
    """Return the runs of each point of the grid over initial thresholds."""
    cells: dict[Cell, list[KeptResult]] = {}
    for result in results:
        if result.recipe.startswith("smnist14-threshold"):
            config: Any = RECIPES[result.recipe].make()
            cell = config.threshold.mean, config.threshold.std, not config.freeze_thresholds
            cells.setdefault(cell, []).append(result)
    return cells


def width_runs(results: Iterable[KeptResult]) -> dict[float, list[KeptResult]]:
    """Return the runs of each width of the surrogate."""
    runs: dict[float, list[KeptResult]] = {}
    for result in results:
        if result.recipe.startswith("smnist14-epsilon-"):
            config: Any = RECIPES[result.recipe].make()
            runs.setdefault(config.surrogate.width, []).append(result)
    return runs


def zeros_runs(results: Iterable[KeptResult]) -> dict[int, dict[float, list[KeptResult]]]:
    """Return the runs with pruned weights, by size of the blocks and weight sparsity. Both have the dense network."""
    runs: dict[int, dict[float, list[KeptResult]]] = {1: {}, 16: {}}
    for result in results:
        if result.recipe.startswith("smnist14-zeros-"):
            config: Any = RECIPES[result.recipe].make()
            runs[config.block].setdefault(config.weight_sparsity, []).append(result)
        elif result.recipe == "smnist14-ablation-none":
            for by_zeros in runs.values():
                by_zeros.setdefault(0.0, []).append(result)
    return runs


def mean(runs: Iterable[KeptResult], name: str) -> float:
    """Return the mean of a field over the seeds. NaN without runs."""
    values = [getattr(run, name) for run in runs]
    return statistics.mean(values) if values else float("nan")


def threshold_table(cells: dict[Cell, list[KeptResult]]) -> str:
    """Return test accuracy and activity sparsity by initial thresholds, as Markdown."""
    lines = [f"| mean | thresholds | {' | '.join(f'std {std:g}' for std in STDS)} |", "|---|---" + "|---" * 3 + "|"]
    for average in MEANS:
        for trained in (False, True):
            texts = []
            for std in STDS:
                runs = cells.get((average, std, trained), [])
                accuracy, sparsity = (
                    spread((getattr(run, name) for run in runs), percent) for name in ("accuracy", "activity_sparsity")
                )
                texts.append(f"{accuracy}, {sparsity}")
            lines.append(f"| {average:g} | {'trained' if trained else 'fixed'} | {' | '.join(texts)} |")
    return "\n".join(lines)


def width_table(runs: dict[float, list[KeptResult]]) -> str:
    """Return accuracy and sparsity by width of the surrogate, as Markdown."""
    names = {
        "accuracy": "test accuracy",
        "activity_sparsity": "activity sparsity",
        "backward_sparsity": "backward sparsity",
    }
    lines = [f"| half-width ε | {' | '.join(names.values())} |", "|---" * 4 + "|"]
    for width in WIDTHS:
        texts = (spread((getattr(run, name) for run in runs.get(width, [])), percent) for name in names)
        lines.append(f"| {width:g} | {' | '.join(texts)} |")
    return "\n".join(lines)


def zeros_table(runs: dict[int, dict[float, list[KeptResult]]]) -> str:
    """Return accuracy, activity sparsity and MACs by weight sparsity, as Markdown."""
    lines = [
        "| weights that are zero | granularity | test accuracy | activity sparsity | MACs per step |",
        "|---" * 5 + "|",
    ]
    for block, by_zeros in runs.items():
        for zeros in (0.0, *ZEROS) if block == 1 else ZEROS:
            values = by_zeros.get(zeros, [])
            texts = [
                spread((getattr(run, name) for run in values), percent) for name in ("accuracy", "activity_sparsity")
            ]
            texts.append(spread((run.forward_macs for run in values), count))
            how = "-" if not zeros else "single weights" if block == 1 else f"blocks of {block}"
            lines.append(f"| {percent(zeros, 0)} | {how} | {' | '.join(texts)} |")
    return "\n".join(lines)


def draw_thresholds(cells: dict[Cell, list[KeptResult]]) -> Any:
    """Draw test accuracy by initial thresholds as two heat maps, for fixed and for trained thresholds."""
    with LIGHT.context():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.8, 2.9), layout="constrained")
        panels: Any = figure.subplots(1, 2)
        grids = {
            trained: [[mean(cells.get((average, std, trained), []), "accuracy") for std in STDS] for average in MEANS]
            for trained in (False, True)
        }
        known = [value for grid in grids.values() for row in grid for value in row if value == value]
        low, high = min(known, default=0.0), max(known, default=1.0)
        for axes, (trained, grid) in zip(panels, grids.items(), strict=True):
            axes.imshow(grid, cmap="Blues", vmin=low - 0.1 * (high - low), vmax=high, aspect="auto")
            for row, average in enumerate(MEANS):
                for column, std in enumerate(STDS):
                    accuracy = grid[row][column]
                    sparsity = mean(cells.get((average, std, trained), []), "activity_sparsity")
                    text = f"{percent(accuracy)}\n{percent(sparsity, 0)} inactive" if accuracy == accuracy else "-"
                    colour = "white" if accuracy > (low + high) / 2 else LIGHT.ink
                    axes.text(column, row, text, ha="center", va="center", fontsize=8.5, color=colour)
            axes.set_title("trained thresholds" if trained else "fixed thresholds")
            axes.set_xticks(range(len(STDS)), [f"{std:g}" for std in STDS])
            axes.set_yticks(range(len(MEANS)), [f"{average:g}" for average in MEANS])
            axes.set_xlabel("standard deviation")
        panels[0].set_ylabel("mean")
    return figure


def draw_widths(runs: dict[float, list[KeptResult]]) -> Any:
    """Plot test accuracy and both sparsities against the width of the surrogate. Dots are single seeds."""
    widths = [width for width in WIDTHS if width in runs]
    labels = {"activity_sparsity": "activity sparsity (test)", "backward_sparsity": "backward sparsity (training)"}
    with LIGHT.context():
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter

        figure = Figure(figsize=(6.8, 2.9), layout="constrained")
        accuracy, sparsity = panels = figure.subplots(1, 2)
        draw_line(accuracy, runs, widths, "accuracy", LIGHT.event[0], "")
        for colour, (name, label) in zip(LIGHT.event, labels.items(), strict=False):
            draw_line(sparsity, runs, widths, name, colour, label)
        accuracy.set_title("Test accuracy")
        sparsity.set_title("Sparsity")
        sparsity.legend(fontsize=8)
        for axes in panels:
            axes.set_xlabel("half-width ε of the surrogate")
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            LIGHT.grid(axes)
    return figure


def draw_zeros(runs: dict[int, dict[float, list[KeptResult]]]) -> Any:
    """Plot test accuracy and activity sparsity against weight sparsity. Dots are single seeds."""
    with LIGHT.context():
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter

        figure = Figure(figsize=(6.8, 2.9), layout="constrained")
        panels: Any = figure.subplots(1, 2)
        names = {"accuracy": "Test accuracy", "activity_sparsity": "Activity sparsity"}
        for axes, (name, title) in zip(panels, names.items(), strict=True):
            for colour, (block, by_zeros) in zip(LIGHT.event, runs.items(), strict=False):
                label = "single weights" if block == 1 else f"blocks of {block}"
                draw_line(axes, by_zeros, sorted(by_zeros), name, colour, label)
            axes.set_title(title)
            axes.set_xlabel("weights that are zero")
            axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            LIGHT.grid(axes)
        panels[0].legend(fontsize=8)
    return figure


def draw_line(
    axes: Any, runs: dict[float, list[KeptResult]], widths: Sequence[float], name: str, colour: str, label: str
) -> None:
    """Draw the means of a field as a line, and single runs as dots."""
    axes.plot(widths, [mean(runs[width], name) for width in widths], color=colour, label=label)
    for width in widths:
        values = [getattr(run, name) for run in runs[width]]
        axes.plot([width] * len(values), values, "o", color=colour, markersize=3.5)


def main(arguments: Sequence[str] | None = None, results: Callable[[], Iterable[KeptResult]] = read_results) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=pathlib.Path, default=IMAGES, help="folder of the figures")
    options = parser.parse_args(arguments)
    kept = list(results())
    cells, widths = threshold_cells(kept), width_runs(kept)
    zeros = zeros_runs(kept)
    print(threshold_table(cells), width_table(widths), zeros_table(zeros), sep="\n\n")
    options.images.mkdir(parents=True, exist_ok=True)
    draw_thresholds(cells).savefig(options.images / "study-thresholds.png", dpi=150)
    draw_widths(widths).savefig(options.images / "study-widths.png", dpi=150)
    draw_zeros(zeros).savefig(options.images / "study-zeros.png", dpi=150)


if __name__ == "__main__":
    main()
