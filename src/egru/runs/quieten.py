"""Raise the thresholds of a trained run for fewer events, as far as the validation loss allows. Nothing is trained."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from egru.compress import raise_thresholds
from egru.compress.quieten import current_floors, search
from egru.data import Text
from egru.experiments.config import config_record
from egru.files import new_folder
from egru.runs.load import TrainedRun, find_run, load, read_run_config, require_new_folder, resolve_source
from egru.runtime.shards import save_shards
from egru.training import LanguageTask, LanguageTraining, Result, Run, RunError, checkpoint, score
from egru.training.records import Derivation, ThresholdTrial
from egru.training.run import CONFIG
from egru.types import WeightFormat


def quieten(
    folder: Path,
    out: Path,
    floor: Sequence[float] = (),
    within: float = 1e-3,
    weights: WeightFormat = "bfloat16",
    device: str | None = None,
    log: Callable[[str], None] = print,
) -> Result:
    """Raise the thresholds of the best epoch of a run and export the network, as :func:`egru.runs.export` does.

    Thresholds below a floor are raised to it. Without ``floor``, a search on the validation split chooses one floor
    per layer, below 1. It goes from the last layer to the first and raises a floor while the validation loss is at most
    ``within`` above the lowest loss so far. The test split is scored once, at the end, with the exported network.

    Args:
        folder: The folder of a run or an export, or the name of a pretrained model.
        out: The folder to write. It must be empty or not exist yet. It appears when it is complete.
        floor: One floor for all layers, or one per layer. If empty, search.
        within: Accepted increase of the validation loss, in nats per sequence or word.
        weights: Number format of the weights: ``"float32"``, ``"bfloat16"`` or ``"int8"``.
        device: Device to run on, in float32. If None, the device and precision of the run.
        log: Called with one line per trial.

    Returns:
        The test scores and the activity of the exported network.

    Raises:
        ValueError: If ``within`` is negative, ``floor`` does not fit the layers, or there are no event layers.
        RunError: If ``folder`` is not a run, ``out`` is not empty, or the search finds nothing to save.

    Example:
        >>> result = egru.runs.quieten(Path("runs/digits"), Path("sparser"), floor=(0.1,))
    """
    start_time, out = time.monotonic(), require_new_folder(out)
    if not within >= 0:
        raise ValueError(f"quieten: within must be non-negative, got {within!r}")
    source, device = find_run(Path(folder), device)
    trained = load(source, device, log)
    trials, chosen = _raise(trained, str(folder), floor, within, log)

    recipe, _ = read_run_config(Run.open(source))
    origin = resolve_source(str(folder))
    config = replace(trained.config, threshold_floor=chosen, start_from=origin)
    with new_folder(out, last=CONFIG) as temporary:
        run = Run.create(temporary, config_record(recipe, config, trained.data), log)
        save_shards(checkpoint.get_weights(trained.model), temporary, weights)
        exported = load(temporary, log=log)
        scores, activity = score(exported.model, exported.task, "test")
        options = [f"--floor {_join(floor)}" if floor else f"--within {within:g}"]
        options += [f"--weights {weights}"] * (weights != "bfloat16")
        options += [f"--device {device}"] * bool(device)
        derivation = Derivation(
            origin,
            f"egru quieten {Path(origin).name} OUT {' '.join(options)}",
            exported.task.evaluate(exported.model, "validation"),
            tuple(trials),
        )
        result = Result(trained.epoch or 0, scores, activity, time.monotonic() - start_time, derivation)
        run.write_result(result)
    return result


def _raise(
    trained: TrainedRun, name: str, floor: Sequence[float], within: float, log: Callable[[str], None]
) -> tuple[list[ThresholdTrial], tuple[float, ...]]:
    """Raise the thresholds of the model to ``floor``, or to what a search finds. Return all trials and the floors."""
    model, task, original = trained.model, trained.task, checkpoint.get_weights(trained.model)
    if isinstance(trained.config, LanguageTraining) and isinstance(trained.data, Text):
        # Read the validation text in as many columns as the test text.
        task = LanguageTask(trained.data, replace(trained.config, evaluation_batch=trained.config.test_batch))
    start = current_floors(model)
    if not start:
        raise ValueError(f"quieten: the run must have event layers, got {trained.config.label}")
    trials: list[ThresholdTrial] = []

    def apply(floor: Sequence[float]) -> None:
        checkpoint.set_weights(model, original)
        raise_thresholds(model, floor)

    def measure(floor: Sequence[float]) -> ThresholdTrial:
        scores, activity = score(model, task, "validation")
        trials.append(ThresholdTrial(tuple(floor), scores, activity.activity_sparsity, activity.forward_macs))
        log(str(trials[-1]))
        return trials[-1]

    def attempt(floor: Sequence[float]) -> ThresholdTrial:
        apply(floor)
        return measure(floor)

    if floor:
        apply(floor)  # raises if the floor does not fit, before anything is measured
        checkpoint.set_weights(model, original)
    log(f"{name} before, on validation:")
    before = measure(start)  # these floors change nothing
    if floor:
        return trials, attempt(floor).floor
    after = search(attempt, before, within)
    if after.forward_macs >= before.forward_macs:
        raise RunError(f"no floor saves MACs within {within:g} nats of the lowest validation loss; raise --within")
    log(f"chosen: {after}")
    apply(after.floor)
    return trials, after.floor


def _join(floor: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in floor)
