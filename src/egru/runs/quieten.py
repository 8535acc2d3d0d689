"""Fewer events from a trained run: higher thresholds, as far as validation lets them go. Nothing is trained again."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from egru.compress import raise_thresholds
from egru.data import Text
from egru.experiments.config import LanguageConfig, config_record, read_config
from egru.layers import event_layers
from egru.runs.load import TrainedRun, find_run, load, require_new_folder, resolve_source
from egru.runtime.shards import save_shards
from egru.training import LanguageTask, Result, Run, RunError, checkpoint, score
from egru.training.records import Derivation, ThresholdTrial
from egru.types import WeightFormat

STEP = 0.05
"""Between two floors that are tried."""


def quieten(
    folder: Path,
    out: Path,
    floor: Sequence[float] = (),
    within: float = 1e-3,
    weights: WeightFormat = "bfloat16",
    device: str | None = None,
    log: Callable[[str], None] = print,
) -> Result:
    """Raise the thresholds of a run's best epoch, and write it like :func:`egru.recipes.export` does.

    The result is that of the network as written, on the test split, which is read once, at the end.

    Args:
        folder: a run, an export, or a pretrained model's name.
        out: a new folder.
        floor: below which no threshold stays, one for all layers or one a layer; none: searched on validation, below 1,
            layer by layer from the last to the first, while the loss is at most ``within`` above the lowest so far.
        within: nats a sequence or a word.
        weights: of the files: float32, bfloat16 or int8.
        device: another one than the run's, in float32.
    """
    begun, out = time.monotonic(), require_new_folder(out)
    if not within >= 0:
        raise ValueError(f"quieten: within must not be negative, got {within!r}")
    source, device = find_run(Path(folder), device)
    found = load(source, device, log)
    log(f"{folder} as trained, on validation:")
    trials, chosen = _raise(found, floor, within, log)

    recipe, _ = read_config(Run.open(source).config())
    origin = resolve_source(str(folder))
    run = Run.create(out, config_record(recipe, replace(found.config, threshold_floor=chosen, start_from=origin)), log)
    save_shards(checkpoint.get_weights(found.model), out, weights)
    written = load(out, log=log)
    scores, activity = score(written.model, written.task, "test")
    options = [f"--floor {_words(floor)}" if floor else f"--within {within:g}"]
    options += [f"--weights {weights}"] * (weights != "bfloat16")
    options += [f"--device {device}"] * bool(device)
    derivation = Derivation(
        origin,
        f"egru quieten {Path(origin).name} OUT {' '.join(options)}",
        written.task.evaluate(written.model, "validation"),
        tuple(trials),
    )
    result = Result(found.epoch or 0, scores, activity, time.monotonic() - begun, derivation)
    run.write_result(result)
    return result


def _raise(
    found: TrainedRun, floor: Sequence[float], within: float, log: Callable[[str], None]
) -> tuple[list[ThresholdTrial], tuple[float, ...]]:
    """Lift the thresholds of ``found.model`` to ``floor``, or to what a search finds: all trials, and the floors."""
    model, task, original = found.model, found.task, checkpoint.get_weights(found.model)
    if isinstance(found.config, LanguageConfig) and isinstance(found.data, Text):  # in columns as the test split
        task = LanguageTask(found.data, replace(found.config, evaluation_batch=found.config.test_batch))
    thresholds = [theta for _, layer in event_layers(model) for theta in layer.thresholds().values()]
    if not thresholds:
        raise ValueError(f"quieten: this run has no event layers, its cell is {found.config.cell}")
    trials: list[ThresholdTrial] = []

    def lift(floor: Sequence[float]) -> None:
        checkpoint.set_weights(model, original)
        raise_thresholds(model, floor)

    def measure(floor: Sequence[float]) -> ThresholdTrial:
        scores, activity = score(model, task, "validation")
        trials.append(ThresholdTrial(tuple(floor), scores, activity.activity_sparsity, activity.forward_macs))
        log(str(trials[-1]))
        return trials[-1]

    def attempt(floor: Sequence[float]) -> ThresholdTrial:
        lift(floor)
        return measure(floor)

    if floor:
        lift(floor)  # refused here, if it is
        checkpoint.set_weights(model, original)
    before = measure([round(STEP * int(max(0.0, t.min().item()) / STEP), 6) for t in thresholds])  # nothing lies below
    if floor:
        return trials, attempt(floor).floor
    after = search(attempt, before, within)
    if after.forward_macs >= before.forward_macs:
        raise RunError(f"nothing is saved within {within:g} nats of the lowest validation loss; raise --within")
    log(f"chosen: {after}")
    lift(after.floor)
    return trials, after.floor


def search(
    attempt: Callable[[Sequence[float]], ThresholdTrial], start: ThresholdTrial, within: float
) -> ThresholdTrial:
    """Floors from ``start`` up, one layer at a time, the last one first, until nothing saves more.

    A step up is taken while the loss is at most ``within`` above the lowest so far: higher thresholds may lower it.
    """
    tried = {start.floor: start}
    best, last, lowest = start, None, start.validation.loss
    while best is not last:
        last = best
        for layer in reversed(range(len(start.floor))):
            while (higher := round(best.floor[layer] + STEP, 6)) < 1:
                floor = (*best.floor[:layer], higher, *best.floor[layer + 1 :])
                new = tried[floor] = tried.get(floor) or attempt(floor)
                if not (new.validation.loss <= lowest + within and new.forward_macs <= best.forward_macs):
                    break
                best, lowest = new, min(lowest, new.validation.loss)
    return best


def _words(floor: Sequence[float]) -> str:
    return " ".join(f"{each:g}" for each in floor)
