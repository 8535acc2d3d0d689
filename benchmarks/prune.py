"""Activity pruning (the paper's supplement): what is left of a trained network without its least active units.

    python benchmarks/prune.py RUN                      # a run's folder, or what `egru export` made of it
    python benchmarks/prune.py smnist --out benchmarks/results/prune_smnist.json   # the model that ships with us
    python benchmarks/prune.py --table                  # what was found, as Markdown

Units are ranked by their activity on training data (the first --seen sequences or words), left out with
`egru.compress.prune`, and the network is scored on validation, with nothing trained again. Then every network reads the
same beginning of the validation data in egru.EventEngine (one thread), step by step, in turns; medians over turns.
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
from egru.compress import prune
from egru.data import Split, Text
from egru.models import LanguageModel
from egru.report.format import count, percent
from egru.runs.load import find_run
from egru.training.loop import score

RESULTS = pathlib.Path(__file__).parent / "results"
SHARES: tuple[Any, ...] = (0.0, None, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Of every layer, but for the last of a language model; None: the units that never spoke."""
BY_LAYER = ((0.3, 0.0, 0.0), (0.0, 0.3, 0.0), (0.0, 0.0, 0.3))
"""Where there are three."""
TURN = 98
"""Steps a network reads in the engine before the next one's turn: an eighth of an image."""


def beginning(data: Any, seen: int) -> Any:
    """Training data in the place of validation."""
    if isinstance(data, Text):
        return data._replace(validation=data.train[:seen])
    return dataclasses.replace(data, validation=Split(*(part[:seen] for part in data.train)))


def microseconds(models: list[Any], data: Any, turns: int) -> list[float]:
    """Of a step in the engine, of every model."""
    engines = [
        egru.EventEngine(m) if isinstance(m, LanguageModel) else egru.EventEngine(**m.streaming()) for m in models
    ]
    text = isinstance(data, Text)
    steps = data.validation.tolist() if text else list(data.validation.x.flatten(0, 1)[: turns * TURN])
    spent: list[list[float]] = [[] for _ in engines]
    for start in range(0, turns * TURN, TURN):
        for engine, times in zip(engines, spent, strict=True):
            begin = time.perf_counter()
            for x in steps[start : start + TURN]:
                engine.step(x)
            times.append((time.perf_counter() - begin) / TURN)
    return [1e6 * statistics.median(times) for times in spent]


def measure(name: str, seen: int | None, turns: int) -> dict[str, Any]:
    folder, _ = find_run(pathlib.Path(name), "cpu")
    trained = runs.load(folder, device="cpu")
    model: Any = trained.model.float()
    seen = seen or (50_000 if isinstance(trained.data, Text) else 5000)
    _, task = experiments.build(trained.config, beginning(trained.data, seen))
    _, activity = score(model, task, "validation")
    shares = SHARES + (BY_LAYER if len(activity.layers) == 3 else ())
    models = [prune(model, activity, share) for share in shares]
    rows = []
    for share, small in zip(shares, models, strict=True):
        scores, after = score(small, trained.task, "validation")
        rows.append(
            {
                "share": share,
                "units": [layer.cost.hidden_size for layer in after.layers],
                "parameters": after.parameters,
                "accuracy": scores.accuracy,
                "perplexity": scores.perplexity,
                "activity_sparsity": after.activity_sparsity,
                "forward_macs": after.forward_macs,
            }
        )
        print(line(rows[-1], rows[0]), flush=True)
    for row, each in zip(rows, microseconds(models, trained.data, turns), strict=True):
        row["microseconds"] = each
    recipe = json.loads((folder / "config.json").read_text())["recipe"]
    machine = {"torch": torch.__version__, "machine": platform.machine(), "date": datetime.date.today().isoformat()}
    return {"recipe": recipe, "seen": seen, "rows": rows, **machine}


def line(row: dict[str, Any], whole: dict[str, Any]) -> str:
    """A row of the table; times as shares of the whole network's."""
    share = row["share"]
    shares = share if isinstance(share, list | tuple) else [share]
    gone = "never spoke" if share is None else " / ".join(percent(each, 0) for each in shares)
    quality = percent(row["accuracy"], 2) if row["perplexity"] is None else f"{row['perplexity']:.2f}"
    spent = percent(row["microseconds"] / whole["microseconds"], 0) if "microseconds" in row else ""
    units, counts = ", ".join(map(str, row["units"])), [count(row[name]) for name in ("parameters", "forward_macs")]
    return (
        f"| {gone} | {units} | {counts[0]} | {quality} | {percent(row['activity_sparsity'])} | {counts[1]} | {spent} |"
    )


def table(found: dict[str, Any]) -> str:
    quality = "accuracy" if found["rows"][0]["perplexity"] is None else "perplexity"
    head = f"| left out | units | parameters | validation {quality} | silent | MACs a step | time of a step |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *(line(row, found["rows"][0]) for row in found["rows"])])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", metavar="RUN")
    parser.add_argument("--seen", type=int, help="sequences or words to rank units by (5000, or 50000 words)")
    parser.add_argument(
        "--turns", type=int, default=16, help="in the engine, of 98 steps each: more where a step is short"
    )
    parser.add_argument("--out", type=pathlib.Path, help="write what was found here, as JSON")
    parser.add_argument("--table", action="store_true", help="print what is kept, and measure nothing")
    options = parser.parse_args(arguments)
    if options.table:
        for path in sorted(RESULTS.glob("prune_*.json")):
            found = json.loads(path.read_text())
            print(f"{found['recipe']}:\n\n{table(found)}\n")
        return
    if options.run is None:
        parser.error("name a run's folder, or smnist")
    found = measure(options.run, options.seen, options.turns)
    print(table(found))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
