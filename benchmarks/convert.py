"""Convert trained GRUs and LSTMs to event layers and record accuracy and sparsity before and after.

    python benchmarks/convert.py digits                       # GRU 128 on digits, three seeds, fine-tuned
    python benchmarks/convert.py digits --dense-epochs 0      # the same for a GRU that was not trained before
    python benchmarks/convert.py lstm                         # LSTM 512 on digits, 16 steps of 4 pixels
    python benchmarks/convert.py engine                       # time per step of the first network of `digits`
    python benchmarks/convert.py calibrate RUN                # a trained run, thresholds chosen without training
    python benchmarks/convert.py finetune RUN --epochs 2      # a trained run, fine-tuned
    python benchmarks/convert.py trained RUN                  # record a converted run that `egru train` has fine-tuned
    python benchmarks/convert.py engine RUN CONVERTED         # time per step of RUN and its `egru convert`

RUN is the folder of a run with cell gru or lstm: a classifier, such as `egru train smnist --cell gru`, or a language
model. Every command adds one row to benchmarks/results/convert.json. Settings of `egru.sparsify` are its defaults. The
validation split of `digits` and `lstm` is not used, and the test split is scored once, at the end. With --prepare,
these commands only train the dense networks and store them in runs/convert; a second call times the conversion alone.

`engine` compares the converted network in egru.EventEngine with dense GRUs in torch and ONNX Runtime, on one thread and
with the same input, one step at a time. The engine also computes the readout, the dense GRUs do not.
"""

import argparse
import dataclasses
import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import egru
from egru import runs
from egru.bench import dense_rivals
from egru.bench.event_networks import Contestant
from egru.bench.infer_cpu import measure
from egru.data import Classification, Split, digits
from egru.environment import cpu_name
from egru.experiments.config import ClassifierConfig, LanguageConfig
from egru.files import replace_file
from egru.runs.command import recorded_command
from egru.runs.load import read_run_config
from egru.training import Run, score
from egru.types import EVENTS, WeightFormat

RESULTS = Path(__file__).parent / "results" / "convert.json"
MODELS = Path("runs") / "convert"
ENGINE_STEPS = 192
ACTIVITY = 0.1


class Reader(nn.Module):
    """A recurrent layer and a linear readout of its last output."""

    def __init__(self, rnn: nn.Module, hidden: int) -> None:
        super().__init__()
        self.rnn, self.readout = rnn, nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.rnn(x)[0][:, -1])


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def evaluate(model: nn.Module, split: Split) -> tuple[float, float]:
    """Return accuracy in percent and activity sparsity on a split."""
    model.eval()
    with egru.ActivityMonitor(model) as monitor:
        correct = [model(x).argmax(1) == y for x, y in zip(split.x.split(500), split.y.split(500), strict=True)]
    return 100 * torch.cat(correct).double().mean().item(), monitor.summary().activity_sparsity


def train_dense(model: nn.Module, loader: Any, epochs: int, rate: float) -> float:
    """Train with Adam, a one-cycle learning rate and clipped gradients. Return the seconds."""
    start = time.perf_counter()
    optimiser = torch.optim.Adam(model.parameters(), rate)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=epochs * len(loader))
    model.train()
    for _ in range(epochs):
        for batch in loader:
            optimiser.zero_grad()
            loss(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            rates.step()
    return time.perf_counter() - start


def prepare(seed: int, options: argparse.Namespace) -> tuple[Reader, Classification, Any]:
    """Return a dense network trained on digits, the data, and a loader of training batches.

    The network is read from the folder of models, or trained and stored there.
    """
    make, pixels = TASKS[options.command]
    data = _in_steps(digits(seed=seed), pixels)
    torch.manual_seed(seed)
    dense = Reader(make(pixels, options.hidden, batch_first=True), options.hidden)
    loader = DataLoader(TensorDataset(*data.train), 32, shuffle=True)
    path = options.models / f"{options.command}-{seed}-dense.pt"
    if path.exists() and options.dense_epochs:
        dense.load_state_dict(torch.load(path))
    elif options.dense_epochs:
        train_dense(dense, loader, options.dense_epochs, options.rate)
        options.models.mkdir(parents=True, exist_ok=True)
        torch.save(dense.state_dict(), path)
    return dense, data, loader


def convert_digits(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Convert a network trained on digits, and return the test scores of both."""
    dense, data, loader = prepare(seed, options)
    torch.manual_seed(seed)
    start, cpu_start = time.perf_counter(), time.process_time()
    model = egru.convert(dense, options.events)
    teacher = dense if options.dense_epochs else None
    result = egru.sparsify(model, loader, loss, options.activity, teacher=teacher)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    if teacher is not None:
        torch.save({"dense": dense, "events": model}, options.models / f"{options.command}-{seed}.pt")
    before, after = evaluate(dense, data.test), evaluate(model, data.test)
    return {
        "seed": seed,
        "dense": before[0],
        "events": after[0],
        "activity_sparsity": after[1],
        "macs_of_dense": result.after.macs,
        "epochs": result.epochs,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
    }


def _in_steps(data: Classification, pixels: int) -> Classification:
    """Return the data with several pixels per step."""
    splits = (Split(s.x.reshape(len(s.x), -1, pixels), s.y) for s in (data.train, data.validation, data.test))
    return Classification(data.name, data.classes, *splits)


def run_digits(options: argparse.Namespace) -> dict[str, Any] | None:
    """Convert one network per seed. Seeds that are recorded with the same settings are kept."""
    if options.prepare:
        for seed in options.seeds:
            prepare(seed, options)
        return None
    settings = {key: getattr(options, key) for key in ("hidden", "events", "activity", "dense_epochs")}
    settings["threads"] = torch.get_num_threads()
    earlier = read_record(options.results).get(record_key(options), {})
    same = all(earlier.get(key) == value for key, value in settings.items())
    rows = {row["seed"]: row for row in earlier.get("seeds", ())} if same else {}
    rows |= {seed: convert_digits(seed, options) for seed in options.seeds}
    keys = ("dense", "events", "activity_sparsity", "cpu_seconds")
    mean = {key: sum(row[key] for row in rows.values()) / len(rows) for key in keys}
    return {**settings, "seeds": [rows[seed] for seed in sorted(rows)], "mean": mean}


TASKS: dict[str, tuple[Callable[..., nn.Module], int]] = {"digits": (nn.GRU, 1), "lstm": (nn.LSTM, 4)}
"""Dense layer and pixels per step of the commands that train on digits."""


# ---- runs ------------------------------------------------------------------------------------------------------------


def run_calibrate(options: argparse.Namespace) -> dict[str, Any]:
    return _convert_run(options, within=options.within)


def run_finetune(options: argparse.Namespace) -> dict[str, Any]:
    return _convert_run(options, activity=options.activity, epochs=options.epochs)


def _convert_run(options: argparse.Namespace, **arguments: Any) -> dict[str, Any]:
    """Convert a run with :func:`egru.runs.convert` and return the test scores before and after."""
    dense = runs.load(options.run, options.device)
    before, _ = score(dense.model, dense.task, "test")
    out = options.out or options.run.with_name(f"{options.run.name}-{options.command}")
    result = runs.convert(options.run, out, options.events, weights="float32", device=options.device, **arguments)
    unit = "accuracy" if result.test.perplexity is None else "perplexity"
    return {
        "run": options.run.name,
        "events": options.events,
        **arguments,
        f"{unit}_dense": getattr(before, unit),
        f"{unit}_events": getattr(result.test, unit),
        "activity_sparsity": result.activity.activity_sparsity,
        "macs_of_dense": result.activity.forward_macs / result.activity.dense_forward_macs,
        "seconds": result.seconds,
    }


def run_trained(options: argparse.Namespace) -> dict[str, Any]:
    """Return the test scores of a finished run that started from a converted network, and its command."""
    run = Run.open(options.run)
    recipe, config = read_run_config(run)
    result = run.result()
    if result is None:
        raise SystemExit(f"convert: {options.run} is not finished")
    if not isinstance(config, ClassifierConfig | LanguageConfig) or config.start_from is None:
        raise SystemExit(f"convert: {options.run} did not start from another network")
    config = dataclasses.replace(config, start_from=Path(config.start_from).name, root=None)
    unit = "accuracy" if result.test.perplexity is None else "perplexity"
    return {
        "command": recorded_command(recipe, config, result),
        "events": config.events,
        "epochs": config.epochs,
        "limit": config.limit,
        f"{unit}_events": getattr(result.test, unit),
        "activity_sparsity": result.activity.activity_sparsity,
        "macs_of_dense": result.activity.forward_macs / result.activity.dense_forward_macs,
        "seconds": result.seconds,
        "machine": run.environment().cuda or cpu_name(),
        "torch": run.environment().versions["torch"],
        "egru": run.environment().versions["egru"],
    }


# ---- engine ----------------------------------------------------------------------------------------------------------


def run_engine(options: argparse.Namespace) -> dict[str, Any]:
    """Time one step of the converted network in the engine and of the dense GRU elsewhere."""
    torch.set_num_threads(1)
    if options.run is None:
        path = next(iter(sorted(options.models.glob("digits-*[0-9].pt"))), None)
        if path is None:
            raise SystemExit(
                f"convert: {options.models} has no network; run `python benchmarks/convert.py digits` first"
            )
        saved = torch.load(path, weights_only=False)
        model, source, dense = saved["events"], path.stem, saved["dense"].rnn
        x = digits(seed=int(path.stem.partition("-")[2])).test.x.flatten(0, 1)
    else:
        if options.converted is None:
            raise SystemExit("convert: engine RUN requires CONVERTED, the folder that `egru convert RUN` wrote")
        original, converted = runs.load(options.run, "cpu"), runs.load(options.converted, "cpu")
        if not isinstance(original.data, Classification) or not hasattr(original.model, "layer0"):
            raise SystemExit("convert: engine requires a classifier with one GRU layer")
        model, source, dense = converted.model, options.run.name, original.model.get_submodule("layer0")
        x = original.data.test.x.flatten(0, 1)
    x = x[: options.steps].float()
    gru = nn.GRU(dense.input_size, dense.hidden_size)
    gru.load_state_dict(dense.state_dict())
    rivals = [Contestant(r.name, r.step, r.sequence, r.wrong) for r in dense_rivals.rivals(gru.eval(), x)]
    engines = [_engine(model.eval(), weights, x) for weights in ("float32", "int8")]
    rows = measure([*rivals, *engines], len(x), options.rounds)
    ours = {weights: rows[f"EventEngine {weights}"] for weights in ("float32", "int8")}
    pairs = {"torch.nn.GRU": "float32", "ONNX Runtime float32": "float32", "ONNX Runtime int8": "int8"}
    ratios = {
        rival: rows[rival]["step"] / ours[weights]["step"]
        for rival, weights in pairs.items()
        if rival in rows and not rows[rival]["wrong"] and not ours[weights]["wrong"]
    }
    return {"network": source, "hidden": gru.hidden_size, "steps": len(x), "contestants": rows, "times_faster": ratios}


def _engine(model: nn.Module, weights: WeightFormat, x: Tensor) -> Contestant:
    """Return an engine for a converted model; its agreement with the model is checked when it is built."""
    engine = egru.EventEngine.from_model(model, weights=weights)

    def step(i: int) -> Any:
        if i == 0:
            engine.reset()
        return engine.step(x[i])

    def facts() -> dict[str, Any]:
        activity = engine.activity
        return {"sparsity": 1 - sum(activity.events) / (activity.steps * sum(activity.hidden))}

    return Contestant(f"EventEngine {weights}", step, None, facts=facts)


# ---- command line ----------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON file to add the row to")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    trained = {
        "digits": {"hidden": 128, "dense_epochs": 60, "rate": 5e-3, "seeds": [21, 22, 23]},
        "lstm": {"hidden": 512, "dense_epochs": 30, "rate": 2e-3, "seeds": [21]},
    }
    for name, defaults in trained.items():
        command = commands.add_parser(name)
        command.add_argument("--seeds", type=int, nargs="+", help="seeds of splits and weights")
        command.add_argument("--hidden", type=int)
        command.add_argument("--prepare", action="store_true", help="only train the dense networks and store them")
        command.add_argument("--dense-epochs", type=int, help="epochs of the dense network")
        command.add_argument("--rate", type=float, help="learning rate of the dense network")
        command.add_argument("--activity", type=float, default=ACTIVITY, help="target of the fine-tuning")
        command.add_argument("--models", type=Path, default=MODELS, help="folder for the networks")
        command.set_defaults(run_command=run_digits, **defaults)
    for name, run in (("calibrate", run_calibrate), ("finetune", run_finetune)):
        command = commands.add_parser(name)
        command.add_argument("run", type=Path, metavar="RUN")
        command.add_argument("--out", type=Path, help="folder of the converted run; default: next to RUN")
        command.add_argument("--device", help="default: that of the run")
        if name == "calibrate":
            command.add_argument("--within", type=float, default=0.01, help="accepted increase of the loss")
        else:
            command.add_argument("--activity", type=float, default=ACTIVITY, help="target of the fine-tuning")
            command.add_argument("--epochs", type=int, default=2)
        command.set_defaults(run_command=run)
    for command in commands.choices.values():
        command.add_argument("--events", choices=EVENTS, default="delta")
    command = commands.add_parser("trained")
    command.add_argument("run", type=Path, metavar="RUN")
    command.set_defaults(run_command=run_trained)
    command = commands.add_parser("engine")
    command.add_argument("run", type=Path, nargs="?", metavar="RUN")
    command.add_argument("converted", type=Path, nargs="?", metavar="CONVERTED")
    command.add_argument("--models", type=Path, default=MODELS, help="folder of the networks of `digits`")
    command.add_argument("--steps", type=int, default=ENGINE_STEPS)
    command.add_argument("--rounds", type=int, default=15)
    command.set_defaults(run_command=run_engine)
    return parser.parse_args(arguments)


def read_record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def record_key(options: argparse.Namespace) -> str:
    """Return the name of the row: the command, its run or its target if that is not the default, and "untrained"."""
    if getattr(options, "run", None) is not None:
        return f"{options.command} {options.run.name}"
    activity = getattr(options, "activity", ACTIVITY)
    name = options.command if activity == ACTIVITY else f"{options.command} {activity:g}"
    return name if getattr(options, "dense_epochs", None) != 0 else f"{name} untrained"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    row = options.run_command(options)
    if row is None:
        return 0
    row = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "egru": egru.__version__,
    } | row
    record = read_record(options.results) | {record_key(options): row}
    replace_file(options.results, (json.dumps(record, indent=2) + "\n").encode())
    print(json.dumps(row, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
