"""Convert the GRU or LSTM of a trained run to event layers, and choose thresholds or fine-tune."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from egru.compress import calibrate, sparsify
from egru.compress import convert as convert_model
from egru.compress.negate import negate_positive_units
from egru.experiments.config import ClassifierConfig, LanguageConfig, config_record
from egru.files import new_folder
from egru.layers import ELSTM, EventRNN, event_directions
from egru.models.stack import RecurrentStack
from egru.runs.load import TrainedRun, find_run, load, read_run_config, require_new_folder, resolve_source
from egru.runtime.shards import save_shards
from egru.training import ClassifierTask, Result, Run, Task, checkpoint, score
from egru.training.records import Derivation, ThresholdTrial
from egru.training.run import CONFIG
from egru.types import Cell, Events, WeightFormat

EVENT_CELL: dict[Cell, Cell] = {"gru": "egru", "lstm": "elstm"}
"""The event cell that replaces each dense cell."""
CALIBRATION_SEQUENCES = 500
"""Sequences of the training split on which thresholds are chosen; of a text, words per column."""


def convert(
    folder: Path,
    out: Path,
    events: Events = "delta",
    *,
    within: float = 0.01,
    activity: float | None = None,
    epochs: int = 20,
    weights: WeightFormat = "bfloat16",
    device: str | None = None,
    log: Callable[[str], None] = print,
) -> Result:
    """Convert the best epoch of a run to event layers and export the network, as :func:`egru.runs.export` does.

    Without ``activity``, nothing is trained: thresholds are chosen by :func:`egru.calibrate` on training sequences.
    With ``activity``, the network is fine-tuned to it by :func:`egru.sparsify`, with the run as the teacher. The test
    split is scored once, at the end, with the exported network.

    With positive events, units with mostly positive states are negated first. This does not change the outputs, and
    thresholds near zero then leave fewer events.

    Args:
        folder: The folder of a run or an export with cell ``gru`` or ``lstm``.
        out: The folder to write. It must be empty or not exist yet. It appears when it is complete.
        events: Kind of events, see :func:`egru.convert`. Default: ``"delta"``.
        within: Accepted increase of the loss on the training sequences, without ``activity``. Default: 0.01.
        activity: Fraction of units and steps with an event after fine-tuning. If None, no fine-tuning.
        epochs: Number of epochs of fine-tuning. Default: 20.
        weights: Number format of the weights: ``"float32"``, ``"bfloat16"`` or ``"int8"``.
        device: Device to run on, in float32. If None, the device and precision of the run.
        log: Called with messages for the user and one line per trial or epoch.

    Returns:
        The test scores and the activity of the exported network.

    Raises:
        ValueError: If the run is not a GRU or LSTM, or an argument is out of range.
        RunError: If ``folder`` is not a run, or ``out`` is not empty.

    Example:
        >>> result = egru.runs.convert(Path("runs/gru"), Path("events"), within=0.02)
        >>> sparsity = result.activity.activity_sparsity
    """
    start_time, out = time.monotonic(), require_new_folder(out)
    source, device = find_run(Path(folder), device)
    trained = load(source, device, log)
    config = trained.config
    if not isinstance(config, ClassifierConfig | LanguageConfig) or config.cell not in EVENT_CELL:
        raise ValueError(f"convert: the run must have the cell gru or lstm, got {config.label}")
    model = convert_model(trained.model, events)
    trials = [_trial(model, trained.task)]
    loss = _make_loss(trained.task)
    if events == "positive":
        assert isinstance(model, RecurrentStack)
        batches = list(_calibration_batches(trained))
        count = negate_positive_units(model, lambda: [loss(model, batch) for batch in batches])
        log(f"{count} units with mostly positive states are negated, which does not change the outputs")
    if activity is None:
        log(str(calibrate(model, list(_calibration_batches(trained)), within, loss=loss, log=log)))
        option = f"--within {within:g}"
    else:
        log(str(sparsify(model, _Epochs(trained.task), loss, activity, teacher=trained.model, epochs=epochs, log=log)))
        option = f"--activity {activity:g} --epochs {epochs}"
    trials.append(_trial(model, trained.task))

    recipe, _ = read_run_config(Run.open(source))
    origin = resolve_source(str(folder))
    converted = dataclasses.replace(
        config,
        **_layer_settings(model),
        cell=EVENT_CELL[config.cell],
        threshold_floor=trials[-1].floor,
        start_from=origin,
    )
    options = [f"--events {events}", option, *[f"--weights {weights}"] * (weights != "bfloat16")]
    options += [f"--device {device}"] * bool(device)
    with new_folder(out, last=CONFIG) as temporary:
        run = Run.create(temporary, config_record(recipe, converted, trained.data), log)
        save_shards(checkpoint.get_weights(model), temporary, weights)
        exported = load(temporary, log=log)
        scores, measured = score(exported.model, exported.task, "test")
        validation = exported.task.evaluate(exported.model, "validation")
        command = f"egru convert {Path(origin).name} OUT {' '.join(options)}"
        derivation = Derivation(origin, command, validation, tuple(trials))
        result = Result(trained.epoch or 0, scores, measured, time.monotonic() - start_time, derivation)
        run.write_result(result)
    return result


def _layer_settings(model: nn.Module) -> dict[str, Any]:
    """Return the settings of a config with which converted layers are built again."""
    layer = next(module for module in model.modules() if isinstance(module, EventRNN))
    settings = {"events": layer.events, "reset": layer.reset, "surrogate": layer.surrogate}
    settings |= {"compare": layer.compare} if isinstance(layer, ELSTM) else {"reset_gate": "after"}
    return settings | {"threshold": dataclasses.replace(layer.threshold_config, trainable=True)}


def _trial(model: nn.Module, task: Task) -> ThresholdTrial:
    """Score a model on the validation split."""
    floors = tuple(layer.weights(direction).theta.min().item() for _, layer, direction in event_directions(model))
    scores, activity = score(model, task, "validation")
    return ThresholdTrial(floors, scores, activity.activity_sparsity, activity.forward_macs)


def _make_loss(task: Task) -> Callable[[nn.Module, Any], Tensor]:
    """Return the loss of a training batch, from a state of zeros."""
    if isinstance(task, ClassifierTask):
        return lambda model, batch: task.loss(model, batch, None)[0]
    return lambda model, batch: F.cross_entropy(model(batch.x)[0].flatten(0, 1), batch.y.flatten())


def _calibration_batches(trained: TrainedRun) -> Iterator[Any]:
    """Yield training batches with at least :data:`CALIBRATION_SEQUENCES` sequences or words per column."""
    count = 0
    for batch in trained.task.batches():
        yield batch
        count += len(batch.x)
        if count >= CALIBRATION_SEQUENCES:
            return


class _Epochs:
    """The training batches of a task, drawn again in every epoch."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.count = sum(1 for _ in task.batches())

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.task.batches(), self.count)
