"""What a run learnt, from its folder; and the runs that ship with the package."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from egru.data import Classification, Text
from egru.experiments.build import Shape, build, classifier, load
from egru.experiments.config import ClassifierConfig, Config, read
from egru.models import SequenceClassifier
from egru.runtime.export import has_parts, load_parts
from egru.training import Run, RunError, Task, checkpoint

PRETRAINED = {"smnist": Shape(frame=(1,), steps=784, classes=10)}
"""Exported runs in the folder ``pretrained``, and the data they read."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """The best epoch of a run: a model in evaluation mode, on the device of its config."""

    config: Config
    model: nn.Module
    task: Task
    data: Classification | Text
    epoch: int | None
    """None where only the weights are left of the run, and not its result."""


def trained(folder: Path, device: str | None = None, say: Callable[[str], None] = print) -> Trained:
    """What a run learnt, from its folder or from what :func:`export` made of it; on another ``device`` in float32."""
    run = Run.open(folder, say)
    _, config = read(run.config())
    if device is not None and device != config.device:
        config = dataclasses.replace(config, device=device, precision="float32", graph=False)
    data_set = load(config)
    model, task = build(config, data_set)
    weights, epoch = _learnt(run)
    checkpoint.put(model, weights)
    return Trained(config, model.eval(), task, data_set, epoch)


def start_with(model: nn.Module, source: str, say: Callable[[str], None] = print) -> None:
    """Put what another run learnt into ``model``; ``source`` is its folder, an export's, or a pretrained name."""
    folder, _ = run_or_pretrained(Path(source), None)
    weights, _ = _learnt(Run.open(folder, say))
    try:
        checkpoint.put(model, weights)
    except RuntimeError as error:
        why = str(error).splitlines()[1].strip()
        raise ValueError(f"start_from: the weights of {source} do not fit this network: {why}") from error


def anywhere(source: str) -> str:
    """``source`` as it is understood in every folder: a run's path whole, a pretrained model's name as it is."""
    return os.path.abspath(source) if os.path.isdir(source) else source


def _learnt(run: Run) -> tuple[dict[str, torch.Tensor], int | None]:
    """Weights of the best epoch, and which it was."""
    if has_parts(run.folder):
        return load_parts(run.folder), (run.result() or {}).get("best_epoch")
    epoch = run.best()
    return checkpoint.read_weights(run.at(epoch)), epoch


def pretrained(name: str) -> SequenceClassifier:
    """A model that ships with the package, in evaluation mode on the CPU; it needs no data.

    "smnist": EGRU 590, recipe ``smnist-stable``. Reads images ``(B, 784, 1)`` row by row, grey values in [0, 1], and
    gives scores of the ten digits. ``egru.EventEngine(**egru.pretrained("smnist").streaming())`` reads pixel by pixel.
    """
    if name not in PRETRAINED:
        raise ValueError(f"pretrained: name must be one of {', '.join(PRETRAINED)}; got {name!r}")
    folder = _shipped(name)
    _, config = read(Run.open(folder).config())
    assert isinstance(config, ClassifierConfig)
    model = classifier(config, PRETRAINED[name])
    checkpoint.put(model, load_parts(folder))
    return model.eval()


def new_folder(out: Path) -> Path:
    """``out``, where nothing is yet."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} exists and is not an empty folder; name another one")
    return out


def run_or_pretrained(run: Path, device: str | None) -> tuple[Path, str | None]:
    """The folder of a run, or of a pretrained model by its name; the latter on the CPU where its device is not here."""
    if run.is_dir():
        return run, device
    name = str(run)
    if name not in PRETRAINED:
        raise RunError(f"{name} is not a run's folder, nor a pretrained model; there is {', '.join(PRETRAINED)}")
    return _shipped(name), device or (None if torch.cuda.is_available() else "cpu")


def _shipped(name: str) -> Path:
    return Path(__file__).with_name("pretrained") / name
