"""Load the model of a trained run, and the pretrained models that ship with the package."""

import dataclasses
import difflib
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from egru.data import Classification, Text
from egru.experiments.build import Shape, build, build_classifier, load_data
from egru.experiments.config import ClassifierConfig, Config, read_config
from egru.models import SequenceClassifier
from egru.runtime.shards import find_shards, load_shards
from egru.training import EpochMetrics, Run, RunError, RunExistsError, RunNotFoundError, Task, checkpoint
from egru.training.run import CONFIG

PRETRAINED = {"smnist": Shape(frame=(1,), steps=784, classes=10)}
"""The pretrained models, which are exported runs in the folder ``pretrained``, and the shape of their data."""


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """The best epoch of a run.

    Attributes:
        config: The config of the run, with the device that the model is on.
        model: The model in evaluation mode.
        task: Scores the model on the splits of ``data``.
        data: The data set that the run was trained on.
        epoch: The best epoch, or None if the folder holds weights but no result.
    """

    config: Config
    model: nn.Module
    task: Task
    data: Classification | Text
    epoch: int | None


def load(folder: Path, device: str | None = None, log: Callable[[str], None] = print) -> TrainedRun:
    """Load the best epoch of a run, with its data.

    Args:
        folder: The folder of a run or an export, or the name of a pretrained model.
        device: Device to load the model to, in float32. If None, the device and precision of the run.
        log: Called with messages for the user, such as a damaged checkpoint.

    Returns:
        The model with its config, data and task.

    Raises:
        RunError: If ``folder`` is not a run, or has no intact checkpoint.
        FileNotFoundError: If the data set is not available.

    Example:
        >>> run = egru.runs.load(Path("runs/digits"))
        >>> engine = egru.EventEngine(**run.model.streaming())
        >>> scores = engine.run(run.data.test.x[0], last=True)
    """
    folder, device = find_run(folder, device)
    run = Run.open(folder, log)
    _, config = read_run_config(run)
    if device is not None and device != config.device:
        config = dataclasses.replace(config, device=device, precision="float32", graph=False)
    model, task, data = build_run(run, config)
    weights, epoch = best_weights(run)
    try:
        checkpoint.set_weights(model, weights)
    except RuntimeError as error:
        raise RunError(f"the weights of {folder} do not fit its {CONFIG}: {_first_reason(error)}") from error
    return TrainedRun(config, model.eval(), task, data, epoch)


def pretrained(name: str) -> SequenceClassifier:
    """Load a pretrained model that ships with the package. Requires no data set.

    ``"smnist"`` is an EGRU with 590 units, trained with the recipe of the same name. It reads images of shape
    ``(B, 784, 1)`` in row order, with grey values in [0, 1], and returns scores for the ten digits.

    Args:
        name: The name of the model: ``"smnist"``.

    Returns:
        The model in evaluation mode, on the CPU.

    Raises:
        ValueError: If there is no such model.
        ImportError: If safetensors is not installed.

    Example:
        >>> model = egru.pretrained("smnist")
        >>> engine = egru.EventEngine(**model.streaming())  # reads one pixel at a time
    """
    if name not in PRETRAINED:
        raise ValueError(f"pretrained: name must be one of {', '.join(PRETRAINED)}; got {name!r}")
    folder = _pretrained_folder(name)
    _, config = read_run_config(Run.open(folder))
    assert isinstance(config, ClassifierConfig)
    model = build_classifier(config, PRETRAINED[name])
    checkpoint.set_weights(model, load_shards(folder))
    return model.eval()


def initialise_from(model: nn.Module, source: str, log: Callable[[str], None] = print) -> None:
    """Copy the best weights of another run into ``model``.

    Args:
        model: A model of the same architecture as that of ``source``.
        source: The folder of a run or an export, or the name of a pretrained model.
        log: Called with messages for the user, such as a damaged checkpoint.

    Raises:
        ValueError: If the weights do not fit ``model``.
    """
    folder, _ = find_run(Path(source))
    weights, _ = best_weights(Run.open(folder, log))
    try:
        checkpoint.set_weights(model, weights)
    except RuntimeError as error:
        reason = _first_reason(error)
        raise ValueError(f"start_from: the weights of {source} do not fit this network: {reason}") from error


def _first_reason(error: RuntimeError) -> str:
    """Return the first reason why ``load_state_dict`` failed; its first line names the class."""
    return " ".join(str(error).splitlines()[1:2]).strip() or str(error)


def build_run(run: Run, config: Config) -> tuple[nn.Module, Task, Classification | Text]:
    """Load the data of a run and build its model and task.

    Raises:
        RunError: If the values in ``config.json`` do not describe a model that can be built.
        FileNotFoundError: If the data set is not available.
    """
    data = load_data(config)
    try:
        return *build(config, data), data
    except (RuntimeError, TypeError, ValueError) as error:
        raise RunError(f"{run.folder / CONFIG}: {' '.join(str(error).split())}") from error


def read_run_config(run: Run) -> tuple[str, Config]:
    """Return the name of the recipe and the config of a run.

    Raises:
        ValueError: If ``config.json`` is damaged, or was not written by :func:`egru.runs.train`.
    """
    return read_config(run.config(), run.folder / CONFIG)


def resolve_source(source: str) -> str:
    """Return ``source`` as an absolute path if it is a folder, and unchanged if it is a pretrained model's name."""
    return os.path.abspath(source) if os.path.isdir(source) else source


def require_new_folder(out: Path) -> Path:
    """Return ``out``, or raise RunExistsError if something is there already."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunExistsError(f"{out} exists and is not an empty folder; choose another one")
    return out


def find_run(run: Path, device: str | None = None) -> tuple[Path, str | None]:
    """Return the folder of a run, given as a path or as the name of a pretrained model, and the device to use.

    Pretrained models run on the CPU if there is no GPU and ``device`` is None.
    """
    run = Path(run)
    if run.is_dir():
        return run, device
    name = str(run)
    if name not in PRETRAINED:
        folders = [str(path) for path in run.parent.iterdir() if path.is_dir()] if run.parent.is_dir() else []
        similar = difflib.get_close_matches(name, [*PRETRAINED, *folders], 1)
        hint = f"; did you mean {similar[0]}?" if similar else ""
        raise RunNotFoundError(
            f"{name} is neither the folder of a run nor a pretrained model ({', '.join(PRETRAINED)}){hint}"
        )
    return _pretrained_folder(name), device or (None if torch.cuda.is_available() else "cpu")


def training_metrics(run: Run) -> list[EpochMetrics]:
    """Return the metrics of the training of a run.

    A run that was derived from another one, by `egru quieten`, has no metrics: those of its source are returned.

    Raises:
        RunError: If the source is not found.
    """
    result, metrics = run.result(), run.metrics()
    if metrics or result is None or result.derivation is None:
        return metrics
    source = result.derivation.source
    folder = _pretrained_folder(source) if source in PRETRAINED else run.folder.parent / source
    if not folder.is_dir():
        raise RunError(f"{run.folder} was derived from {source}, which was not found; place that run next to it")
    return training_metrics(Run.open(folder, run.log))


def best_weights(run: Run) -> tuple[dict[str, torch.Tensor], int | None]:
    """Return the weights of the best epoch, and the epoch."""
    if find_shards(run.folder):
        result = run.result()
        return load_shards(run.folder), None if result is None else result.best_epoch
    epoch = run.best_epoch()
    return checkpoint.read_weights(run.checkpoint_path(epoch)), epoch


def _pretrained_folder(name: str) -> Path:
    return Path(__file__).with_name("pretrained") / name
