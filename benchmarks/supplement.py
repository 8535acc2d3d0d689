"""Two figures of the paper's supplement, from trained runs.

    python benchmarks/supplement.py tolerance RUN...     # near-zero outputs of dense and event layers, by tolerance
    python benchmarks/supplement.py thresholds RUN...    # thresholds before and after training
    python benchmarks/supplement.py figures              # draw the stored records again

A RUN is the folder of a run or an export, or the name of a pretrained model. ``tolerance`` reads the validation split;
``thresholds`` reads no data. Each writes ``benchmarks/results/supplement_NAME.json`` and a figure under
docs/results/images.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from egru import experiments, runs
from egru.layers import EventRNN, event_layers
from egru.report import LIGHT
from egru.runs.load import find_run
from egru.training.loop import score

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "results" / "images"
TOLERANCES = (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
BINS = 60


def run_record(name: str) -> dict[str, Any]:
    """Return what identifies a run in the record: its folder, recipe and seed."""
    folder, _ = find_run(pathlib.Path(name), "cpu")
    stored = json.loads((folder / "config.json").read_text())
    return {"run": folder.name, "recipe": stored["recipe"], "seed": stored["config"]["seed"]}


def count_near_zero(model: nn.Module, read: Callable[[], object]) -> dict[str, list[float]]:
    """Run ``read`` and return the fraction of outputs with ``|h| <= tolerance``, per recurrent layer and tolerance.

    Of a module with several dense layers, torch returns the outputs of the last one only.
    """
    totals: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}

    def hook_of(label: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            h = outputs[0].data if isinstance(outputs[0], PackedSequence) else outputs[0]
            magnitude = h.detach().abs()
            counts = torch.stack([(magnitude <= tolerance).sum() for tolerance in TOLERANCES]).cpu()
            totals[label] = totals.get(label, torch.zeros_like(counts)) + counts
            sizes[label] = sizes.get(label, 0) + magnitude.numel()

        return hook

    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.GRU | nn.LSTM | nn.RNN | EventRNN)]
    if not layers:
        raise ValueError("the model has no GRU, LSTM, RNN or event layer")
    hooks = [module.register_forward_hook(hook_of(name)) for name, module in layers]
    try:
        read()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: (totals[name].double() / sizes[name]).tolist() for name in totals}


def measure_tolerance(names: Sequence[str], device: str) -> dict[str, Any]:
    """Return the record of ``tolerance``."""
    rows: list[dict[str, Any]] = []
    for name in names:
        trained = runs.load(pathlib.Path(name), device=device)
        layers = count_near_zero(
            trained.model, lambda trained=trained: score(trained.model, trained.task, "validation")
        )
        rows.append({**run_record(name), "cell": getattr(trained.config, "cell", "egru"), "near_zero": layers})
        for label, fractions in layers.items():
            values = ", ".join(f"{100 * value:.2f} %" for value in fractions)
            print(f"{rows[-1]['cell'].upper()}, {rows[-1]['recipe']}, {label}: {values}", flush=True)
    return {"tolerances": TOLERANCES, "runs": rows}


def measure_thresholds(names: Sequence[str]) -> dict[str, Any]:
    """Return the record of ``thresholds``. The seed of a run recreates its initial thresholds."""
    rows: list[dict[str, Any]] = []
    for name in names:
        trained = runs.load(pathlib.Path(name), device="cpu")
        initial, _ = experiments.build(dataclasses.replace(trained.config, start_from=None), trained.data)
        before, after = (layer_thresholds(model) for model in (initial, trained.model))
        if not after:
            raise ValueError(f"{name} has no event layer")
        layers = {label: {"before": before[label].tolist(), "after": after[label].tolist()} for label in after}
        rows.append({**run_record(name), "layers": layers})
        for label in after:
            for state, values in (("before", before[label]), ("after", after[label])):
                quartiles = torch.quantile(values, torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]))
                print(f"{rows[-1]['recipe']}, {label}, {state}: " + ", ".join(f"{q:.4f}" for q in quartiles.tolist()))
    return {"runs": rows}


def layer_thresholds(model: nn.Module) -> dict[str, Tensor]:
    """Return the thresholds of every event layer and direction."""
    return {
        f"{name}.{direction}": theta.detach().float().cpu()
        for name, layer in event_layers(model)
        for direction, theta in layer.thresholds().items()
    }


def draw_tolerance(record: dict[str, Any]) -> Any:
    """Plot the fraction of near-zero outputs against the tolerance, one line per recurrent layer."""
    with LIGHT.context():
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter

        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        hues = iter(LIGHT.event * len(record["runs"]))
        styles = {"gru": "-", "lstm": (0, (4, 2)), "rnn": ":"}
        for run, marker in zip(record["runs"], itertools.cycle("os^Dv"), strict=False):
            is_dense = run["cell"] in styles
            colour = LIGHT.dense if is_dense else next(hues)
            for i, (label, fractions) in enumerate(run["near_zero"].items()):
                name = f"{run['cell'].upper()}, {run['recipe']}" + (f", {label}" if len(run["near_zero"]) > 1 else "")
                line = styles[run["cell"]] if is_dense else ("-", (0, (4, 2)), ":")[i % 3]
                axes.plot(
                    record["tolerances"][1:], fractions[1:], label=name, color=colour, linestyle=line, marker=marker
                )
        axes.set_xscale("log")
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("tolerance")
        axes.set_title("Outputs with a magnitude up to the tolerance, validation split", loc="left")
        axes.legend(fontsize=8)
    return figure


def draw_thresholds(record: dict[str, Any]) -> Any:
    """Plot histograms of the thresholds before and after training, one panel per layer."""
    panels = [(run["recipe"], label, values) for run in record["runs"] for label, values in run["layers"].items()]
    recipes = [recipe for recipe, *_ in panels]
    with LIGHT.context():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 0.6 + 1.9 * len(panels)), layout="constrained")
        rows: Any = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axes, (recipe, label, values) in zip(rows, panels, strict=True):
            both = torch.tensor([*values["before"], *values["after"]])
            edges = torch.linspace(float(both.min()), float(both.max()) + 1e-6, BINS + 1).tolist()
            axes.hist(values["before"], edges, color=LIGHT.dense, alpha=0.6, label="before training")
            axes.hist(values["after"], edges, histtype="step", color=LIGHT.event[0], linewidth=1.6, label="after")
            axes.set_title(recipe if recipes.count(recipe) == 1 else f"{recipe}, {label}", loc="left")
            axes.set_ylabel("units")
        rows[0].legend(fontsize=8)
        rows[-1].set_xlabel("threshold")
    return figure


DRAW = {"tolerance": draw_tolerance, "thresholds": draw_thresholds}


def save_figure(name: str, record: dict[str, Any], folder: pathlib.Path) -> None:
    """Draw the figure of a record."""
    folder.mkdir(parents=True, exist_ok=True)
    DRAW[name](record).savefig(folder / f"supplement-{name}.png", dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=(*DRAW, "figures"))
    parser.add_argument("runs", nargs="*", metavar="RUN")
    parser.add_argument("--device", default="cpu", help="device to score on (cpu)")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the records (benchmarks/results)")
    parser.add_argument("--images", type=pathlib.Path, default=IMAGES, help="folder of the figures")
    options = parser.parse_args(arguments)
    if options.action == "figures":
        for name in DRAW:
            path = options.out / f"supplement_{name}.json"
            if path.exists():
                save_figure(name, json.loads(path.read_text()), options.images)
        return
    if not options.runs:
        parser.error(f"{options.action} needs at least one RUN")
    is_tolerance = options.action == "tolerance"
    record = measure_tolerance(options.runs, options.device) if is_tolerance else measure_thresholds(options.runs)
    (options.out / f"supplement_{options.action}.json").write_text(json.dumps(record, indent=1) + "\n")
    save_figure(options.action, record, options.images)


if __name__ == "__main__":
    main()
