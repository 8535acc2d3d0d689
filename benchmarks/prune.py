"""Prune the least active units of a trained network, as in the supplement of the paper, and measure what is left.

    python benchmarks/prune.py RUN                      # the folder of a run or of an export (`egru export`)
    python benchmarks/prune.py smnist --out benchmarks/results/prune_smnist.json   # the pretrained model
    python benchmarks/prune.py smnist --units 384 --write small   # keep 384 units, for `egru train --start-from small`
    python benchmarks/prune.py --table                  # print the stored results as Markdown
    python benchmarks/prune.py --figure RECORD IMAGE    # plot a record

Units are ranked by their activity on training data (the first --ranked-on sequences or words) and removed with
`egru.compress.prune`. The smaller network is scored on the validation split without further training. Then all networks
read the beginning of the validation data in egru.EventEngine, step by step on one thread, interleaved in turns. Medians
over turns are reported.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import platform
import statistics
import time
from typing import Any

import torch

import egru
from egru import experiments, runs
from egru.activity import ActivitySummary
from egru.compress import prune
from egru.data import Split, Text
from egru.experiments.config import config_record
from egru.files import new_folder
from egru.format import count, percent
from egru.models import LanguageModel
from egru.report import LIGHT
from egru.runs.load import find_run, read_run_config
from egru.runtime.shards import save_shards
from egru.training import Run, checkpoint
from egru.training.loop import score
from egru.training.run import CONFIG

RESULTS = pathlib.Path(__file__).parent / "results"
FRACTIONS: tuple[Any, ...] = (0.0, None, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Fractions of units to remove from every layer except the last of a language model; None: units without events."""
BY_LAYER = ((0.3, 0.0, 0.0), (0.0, 0.3, 0.0), (0.0, 0.0, 0.3))
"""Fractions to remove per layer, for networks with three layers."""
TURN = 98
"""Steps per turn in the engine: an eighth of an image."""


def training_as_validation(data: Any, count: int) -> Any:
    """Return the data set with the first training sequences or words as its validation split."""
    if isinstance(data, Text):
        return data._replace(validation=data.train[:count])
    return dataclasses.replace(data, validation=Split(*(tensor[:count] for tensor in data.train)))


def step_times(models: list[Any], data: Any, turns: int) -> list[float]:
    """Return the median microseconds per step in the engine, one per model."""
    engines = [
        egru.EventEngine(m) if isinstance(m, LanguageModel) else egru.EventEngine(**m.streaming()) for m in models
    ]
    text = isinstance(data, Text)
    steps = data.validation.tolist() if text else list(data.validation.x.flatten(0, 1)[: turns * TURN])
    seconds: list[list[float]] = [[] for _ in engines]
    buffers = [torch.empty(engine.output_size) for engine in engines]
    for start in range(0, turns * TURN, TURN):
        for engine, out, times in zip(engines, buffers, seconds, strict=True):
            begin = time.perf_counter()
            for x in steps[start : start + TURN]:
                engine.step(x, out=out)
            times.append((time.perf_counter() - begin) / TURN)
    return [1e6 * statistics.median(times) for times in seconds]


def rank(name: str, ranked_on: int | None) -> tuple[Any, ActivitySummary, int]:
    """Return a run, the activity of its network on training data, and the number of sequences or words."""
    trained = runs.load(find_run(pathlib.Path(name), "cpu")[0], device="cpu")
    ranked_on = ranked_on or (50_000 if isinstance(trained.data, Text) else 5000)
    _, task = experiments.build(trained.config, training_as_validation(trained.data, ranked_on))
    return trained, score(trained.model.float(), task, "validation")[1], ranked_on


def write(name: str, ranked_on: int | None, units: int, out: pathlib.Path) -> None:
    """Keep the most active units of a classifier with one layer. Write config and weights, for ``--start-from``."""
    trained, activity, _ = rank(name, ranked_on)
    if len(activity.layers) != 1 or not 1 <= units <= trained.config.hidden:
        raise SystemExit(f"prune: --units {units} requires one layer with more units, got {trained.config.label}")
    smaller = prune(trained.model, activity, 1 - units / trained.config.hidden)
    recipe, _ = read_run_config(Run.open(find_run(pathlib.Path(name), "cpu")[0]))
    config = dataclasses.replace(trained.config, hidden=units, start_from=None)
    with new_folder(out, last=CONFIG) as temporary:
        Run.create(temporary, config_record(recipe, config, trained.data), print)
        save_shards(checkpoint.get_weights(smaller), temporary, "float32")
    print(f"written: {out}, {units} units")


def measure(name: str, ranked_on: int | None, turns: int) -> dict[str, Any]:
    """Prune the network of a run by all fractions and return the record."""
    trained, activity, ranked_on = rank(name, ranked_on)
    model: Any = trained.model
    fractions = FRACTIONS + (BY_LAYER if len(activity.layers) == 3 else ())
    models = [prune(model, activity, fraction) for fraction in fractions]
    rows = []
    for fraction, small in zip(fractions, models, strict=True):
        scores, after = score(small, trained.task, "validation")
        rows.append(
            {
                "fraction": fraction,
                "units": [layer.cost.hidden_size for layer in after.layers],
                "parameters": after.parameters,
                "accuracy": scores.accuracy,
                "perplexity": scores.perplexity,
                "activity_sparsity": after.activity_sparsity,
                "backward_sparsity": after.backward_sparsity,
                "forward_macs": after.forward_macs,
            }
        )
        print(table_row(rows[-1], rows[0]), flush=True)
    for row, microseconds in zip(rows, step_times(models, trained.data, turns), strict=True):
        row["microseconds"] = microseconds
    recipe, _ = read_run_config(Run.open(find_run(pathlib.Path(name), "cpu")[0]))
    machine = {"torch": torch.__version__, "machine": platform.machine(), "date": datetime.date.today().isoformat()}
    return {"recipe": recipe, "ranked_on": ranked_on, "rows": rows, **machine}


def table_row(row: dict[str, Any], original: dict[str, Any]) -> str:
    """Return a row of the table, with the time relative to that of the original network."""
    fraction = row["fraction"]
    fractions = fraction if isinstance(fraction, list | tuple) else [fraction]
    removed = "never active" if fraction is None else " / ".join(percent(value, 0) for value in fractions)
    quality = percent(row["accuracy"], 2) if row["perplexity"] is None else f"{row['perplexity']:.2f}"
    step_time = percent(row["microseconds"] / original["microseconds"], 0) if "microseconds" in row else ""
    units, sparsity = ", ".join(map(str, row["units"])), percent(row["activity_sparsity"])
    cells = (removed, units, count(row["parameters"]), quality, sparsity, count(row["forward_macs"]), step_time)
    return f"| {' | '.join(cells)} |"


def table(record: dict[str, Any]) -> str:
    """Return a record as a Markdown table."""
    rows = record["rows"]
    quality = "accuracy" if rows[0]["perplexity"] is None else "perplexity"
    head = (
        f"| removed | units | parameters | validation {quality} | activity sparsity | MACs per step | time per step |"
    )
    return "\n".join([head, "|---|---|---|---|---|---|---|", *(table_row(row, rows[0]) for row in rows)])


def figure(record: dict[str, Any]) -> Any:
    """Plot quality and sparsity of a record against the fraction of removed units."""
    rows = [row for row in record["rows"] if isinstance(row["fraction"], float)]
    removed = [row["fraction"] for row in rows]
    quality = "accuracy" if rows[0]["perplexity"] is None else "perplexity"
    with LIGHT.context():
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter

        drawn = Figure(figsize=(6.4, 4.6), layout="constrained")
        above, below = drawn.subplots(2, 1, sharex=True)
        above.plot(removed, [row[quality] for row in rows], color=LIGHT.event[0], marker="o")
        above.set_title(f"Validation {quality}, {record['recipe']}", loc="left")
        for name, label, colour in (
            ("activity_sparsity", "activity sparsity", LIGHT.event[0]),
            ("backward_sparsity", "backward sparsity, as counted in the paper", LIGHT.event[1]),
        ):
            if all(row.get(name) is not None for row in rows):
                below.plot(removed, [row[name] for row in rows], color=colour, marker="o", label=label)
        below.set_title("Sparsity on the validation split", loc="left")
        below.legend(fontsize=8)
        below.set_xlabel("fraction of units removed from every layer")
        for axes in (above, below) if quality == "accuracy" else (below,):
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        below.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return drawn


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", metavar="RUN", help="folder of a run or an export, or smnist")
    parser.add_argument(
        "--ranked-on", type=int, help="training sequences or words to rank units by; default: 5000, or 50000 words"
    )
    parser.add_argument(
        "--turns", type=int, default=16, help=f"turns of {TURN} steps in the engine; default: %(default)s"
    )
    parser.add_argument("--out", type=pathlib.Path, help="write the record to this JSON file")
    parser.add_argument("--units", type=int, help="number of units to keep in the network that --write writes")
    parser.add_argument("--write", type=pathlib.Path, metavar="FOLDER", help="write the smaller network")
    parser.add_argument("--table", action="store_true", help="print the stored results and measure nothing")
    parser.add_argument(
        "--figure", nargs=2, type=pathlib.Path, metavar=("RECORD", "IMAGE"), help="plot a record and measure nothing"
    )
    options = parser.parse_args(arguments)
    if options.figure:
        record, image = options.figure
        figure(json.loads(record.read_text())).savefig(image, dpi=150)
        return
    if options.table:
        for path in sorted(RESULTS.glob("prune_*.json")):
            record = json.loads(path.read_text())
            print(f"{record['recipe']}:\n\n{table(record)}\n")
        return
    if options.run is None:
        parser.error("RUN must be the folder of a run or an export, or smnist")
    if (options.units is None) != (options.write is None):
        parser.error("--units and --write belong together")
    if options.write:
        write(options.run, options.ranked_on, options.units, options.write)
        return
    record = measure(options.run, options.ranked_on, options.turns)
    print(table(record))
    if options.out:
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
