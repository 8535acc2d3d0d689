"""Figures of docs/results/gpu-notes.md and docs/results/digits.md, drawn from stored records and from the page's table.

python benchmarks/notes_figures.py [--out docs/results/images]
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from egru.report import LIGHT

ROOT = Path(__file__).parent.parent
PRECISIONS = {"float32": "float32", "tf32": "TF32", "float16": "float16", "bfloat16": "bfloat16"}


def fastest(milliseconds: dict[str, float], layer: str, precision: str) -> float:
    """Return the shorter time of the exact and the aligned size."""
    return min(time for name, time in milliseconds.items() if name.startswith(f"{layer} {precision} "))


def gpu_figure(record: dict[str, Any]) -> Any:
    """Plot the time of cuDNN's GRU divided by that of our layer, one group of bars per problem."""
    with LIGHT.context():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.8, 3.4), layout="constrained")
        axes = figure.subplots()
        for i, (precision, label) in enumerate(PRECISIONS.items()):
            ratios = [
                fastest(row["milliseconds"], "cudnn gru", precision) / row["milliseconds"][f"egru {precision} after"]
                for row in record["rows"]
            ]
            places, heights = [x + 0.2 * i for x in range(len(ratios))], [ratio - 1 for ratio in ratios]
            axes.bar(places, heights, 0.18, bottom=1, color=LIGHT.event[i], label=label)
        names = [
            f"T {row['T']}, B {row['B']}\nI {row['inputs']}, H {row['H']}" + ("" if row["train"] else "\nforward")
            for row in (result["row"] for result in record["rows"])
        ]
        axes.axhline(1, color=LIGHT.muted, linewidth=0.8, linestyle="--")
        axes.set(
            xticks=[x + 0.3 for x in range(len(names))],
            xticklabels=names,
            ylabel="time of cuDNN's GRU / time of EGRU",
            yscale="log",
            ylim=(0.4, 10),
            title=f"{record['device']}, {record['date']}; above 1, EGRU is faster",
        )
        axes.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
        axes.minorticks_off()
        axes.legend(frameon=False, ncols=2)
    return figure


def digits_figure(page: str) -> Any:
    """Plot the accuracies of the table in ``page``, and the activity sparsity of the EGRU."""
    rows = re.findall(r"^\| (\d) \| ([\d.]+) % \| ([\d.]+) % \| [-\d.]+ \| ([\d.]+) %", page, re.MULTILINE)
    seeds, gru, egru, sparsity = ([float(value) for value in column] for column in zip(*rows, strict=True))
    with LIGHT.context():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 2.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.plot(seeds, gru, "s", color=LIGHT.dense, label="GRU")
        left.plot(seeds, egru, "o", color=LIGHT.event[0], label="EGRU")
        left.set(title="test accuracy, %", xlabel="seed", xticks=seeds, ylim=(98, 100))
        left.legend(frameon=False)
        right.bar(seeds, sparsity, 0.5, color=LIGHT.event[0])
        right.set(title="activity sparsity of the EGRU, %", xlabel="seed", xticks=seeds, ylim=(0, 100))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "images")
    folder: Path = parser.parse_args().out
    record = json.loads((ROOT / "benchmarks" / "results" / "h200_train.json").read_text())
    gpu_figure(record).savefig(folder / "gpu-speed.png", dpi=150)
    digits_figure((ROOT / "docs" / "results" / "digits.md").read_text()).savefig(folder / "digits.png", dpi=150)


if __name__ == "__main__":
    main()
