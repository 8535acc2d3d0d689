"""Measure test accuracy against time per pixel on sequential MNIST, and draw the README's figure.

    EGRU_DATA=... python benchmarks/tradeoff.py --out benchmarks/results/tradeoff.json     # about five minutes
    python benchmarks/tradeoff.py --draw                                                   # only draw, from the record

Every contestant reads one pixel per call on one thread, as in a streaming application. They take turns within one
process; the time is the median over turns.

The EGRU is the network that ships with the package. Its accuracy is measured here, on the whole test split, with each
format of weights. The dense networks' accuracies are those of the recorded runs; their time does not depend on the
values of their weights, so they are timed with random ones. Requires the extras ``bench`` and ``train``.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import egru
from egru.bench.dense_rivals import rivals, versions
from egru.environment import cpu_name
from egru.models.baselines import CoRNN, CoRNNState
from egru.report.theme import DARK, LIGHT, Theme

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks" / "results" / "tradeoff.json"
RUNS = ROOT / "benchmarks" / "results" / "runs"
IMAGES = ROOT / "docs" / "results" / "images"
FORMATS = ("float32", "int8")
DENSE_RUNS = {"GRU 590": "smnist-gru-seed0-20261116-0002", "coRNN 256": "smnist-cornn-256-*"}
"""Recorded runs whose test accuracy is shown."""

LABELS = {
    "EGRU 590, engine float32": (9, -4, "left", "top"),
    "EGRU 590, engine int8": (9, 4, "left", "bottom"),
    "GRU 590, torch": (0, 9, "center", "bottom"),
    "GRU 590, ONNX Runtime": (-9, 2, "right", "center"),
    "coRNN 256, torch": (0, -9, "center", "top"),
}
"""Offset of each label from its point, and its alignment."""
Reader = Callable[[int], object]
"""Reads pixel ``i``; starts a new sequence at pixel 0."""


def recorded_accuracy(pattern: str) -> tuple[float, str]:
    """Return the mean test accuracy of the finished runs that match ``pattern``, and the first run's name."""
    finished = sorted(folder for folder in RUNS.glob(pattern) if (folder / "result.json").exists())
    scores = [json.loads((folder / "result.json").read_text())["test"]["accuracy"] for folder in finished]
    return statistics.mean(scores), finished[0].name


def engine_reader(weights: str, image: Tensor) -> Reader:
    engine = egru.EventEngine(**egru.pretrained("smnist").streaming(), weights=weights)
    pixels, out = list(image), torch.empty(engine.output_size)

    def read(i: int) -> object:
        if i == 0:
            engine.reset()
        return engine.step(pixels[i], out=out)

    return read


def cornn_reader(image: Tensor) -> Reader:
    layer, pixels = CoRNN(1, 256), [pixel.view(1, 1, 1) for pixel in image]
    state: list[CoRNNState | None] = [None]

    def read(i: int) -> object:
        _, state[0] = layer(pixels[i], None if i == 0 else state[0])
        return state[0]

    return read


def contestants(image: Tensor) -> dict[str, Reader]:
    """Return the readers of ``image`` by name. The outputs of the dense GRUs are checked against float64."""
    readers = {f"EGRU 590, engine {weights}": engine_reader(weights, image) for weights in FORMATS}
    for rival in rivals(nn.GRU(1, 590), image):
        assert not rival.wrong, f"{rival.name}: {rival.wrong}"
        if rival.step is not None and rival.name in ("torch.nn.GRU", "ONNX Runtime float32"):
            readers[f"GRU 590, {'torch' if 'torch' in rival.name else 'ONNX Runtime'}"] = rival.step
    return readers | {"coRNN 256, torch": cornn_reader(image)}


@torch.inference_mode()
def microseconds_per_pixel(image: Tensor, turns: int) -> dict[str, float]:
    readers = contestants(image)
    times: dict[str, list[float]] = {name: [] for name in readers}
    for turn in range(turns + 1):  # the first turn warms up
        for name, read in readers.items():
            start = time.perf_counter()
            for i in range(len(image)):
                read(i)
            if turn > 0:
                times[name].append(1e6 * (time.perf_counter() - start) / len(image))
    return {name: statistics.median(values) for name, values in times.items()}


@torch.inference_mode()
def engine_accuracy(weights: str, x: Tensor, y: Tensor) -> float:
    engine = egru.EventEngine(**egru.pretrained("smnist").streaming(), weights=weights)
    correct = 0
    for image, digit in zip(x, y, strict=True):
        engine.reset()
        correct += int(engine.run(image, last=True).argmax() == digit)
    return correct / len(x)


def measure(turns: int) -> dict[str, Any]:
    x, y = egru.data.sequential_mnist().test
    times = microseconds_per_pixel(x[0], turns)
    points: dict[str, dict[str, Any]] = {}
    for name, value in times.items():
        network, _, runtime = name.partition(", ")
        if network == "EGRU 590":
            accuracy, source = engine_accuracy(runtime.split()[-1], x, y), 'egru.pretrained("smnist")'
        else:
            accuracy, source = recorded_accuracy(DENSE_RUNS[network])
        points[name] = {"microseconds_per_pixel": value, "test_accuracy": accuracy, "accuracy_from": source}
        print(f"{name:28} {value:8.2f} µs per pixel  {100 * accuracy:.2f} %")
    return {
        "command": "python benchmarks/tradeoff.py",
        "date": datetime.date.today().isoformat(),
        "machine": f"{cpu_name()}, {os.cpu_count()} cores, one thread, {platform.machine()}",
        "versions": versions(),
        "turns": turns,
        "points": points,
    }


def draw(record: dict[str, Any], theme: Theme, path: Path) -> None:
    """Draw the points of ``record`` to an SVG file."""
    import matplotlib.pyplot as plt

    with theme.context(), plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "egru"}):
        figure, axes = plt.subplots(figsize=(7.2, 3.1), layout="constrained")
        figure.patch.set_alpha(0)
        for name, point in record["points"].items():
            time_per_pixel, accuracy = point["microseconds_per_pixel"], 100 * point["test_accuracy"]
            event_based = name.startswith("EGRU")
            colour = theme.event[0] if event_based else theme.dense
            axes.plot(time_per_pixel, accuracy, "o", color=colour, markersize=9 if event_based else 8)
            x, y, horizontal, vertical = LABELS[name]
            axes.annotate(
                f"{name}\n{time_per_pixel:.1f} µs, {accuracy:.2f} %",
                (time_per_pixel, accuracy),
                xytext=(x, y),
                textcoords="offset points",
                ha=horizontal,
                va=vertical,
                fontsize=9,
                color=colour if event_based else theme.muted,
            )
        axes.set_xscale("log")
        axes.set_xlim(1.5, 300)
        axes.set_ylim(97.8, 99.6)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("measured time per pixel, µs (one pixel per call, one CPU thread)")
        axes.set_ylabel("test accuracy, %")
        theme.grid(axes, "both")
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30, help="timed readings of the image per contestant (30)")
    parser.add_argument("--out", type=Path, default=Path("tradeoff.json"), help="record file (tradeoff.json)")
    parser.add_argument(
        "--draw", action="store_true", help=f"only draw {RECORD.relative_to(ROOT)} to docs/results/images"
    )
    options = parser.parse_args(arguments)
    if options.draw:
        record = json.loads(RECORD.read_text())
        for theme in (LIGHT, DARK):
            draw(record, theme, IMAGES / f"tradeoff-{theme.name}.svg")
        return
    torch.set_num_threads(1)
    options.out.write_text(json.dumps(measure(options.turns), indent=1) + "\n")


if __name__ == "__main__":
    main()
