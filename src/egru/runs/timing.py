"""The time per step of a run: measured on one sequence, or read from the record of an earlier measurement."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from egru.data import Text
from egru.environment import cpu_name
from egru.models import LanguageModel, SequenceClassifier
from egru.report import StepTime
from egru.runs.load import TrainedRun
from egru.runtime import EventEngine

STEP_TIME = "step-time.json"
"""Name of the record in the folder of a run."""
ENGINE = "engine.json"
"""Name of the record of ``benchmarks/language_engine.py``, which is read if there is no other."""
ROUNDS = 9
"""Number of measurements per run. The median is recorded."""
WORDS = 160
"""Number of words that a language model reads."""


def recorded_step_time(folder: Path) -> StepTime | None:
    """Return the recorded time per step of a run, or None if there is no record."""
    if (path := folder / STEP_TIME).exists():
        return StepTime.read(path)
    if not (path := folder / ENGINE).exists():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    seconds = 1e-6 * record["contestants"]["engine float32"]["microseconds_per_word"]
    return StepTime(seconds, "EventEngine, float32, one word per call, 1 thread", record["machine"])


def measure_step_times(trained: Sequence[TrainedRun]) -> list[StepTime]:
    """Time runs in turns on the CPU, with one thread and one sequence.

    Event-based models run in :class:`egru.EventEngine` if it supports them, other models in PyTorch. Both read the
    sequence in one call. A GPU is not used.

    Args:
        trained: The runs, on the CPU.

    Returns:
        The median time per step of each run, after one call that is not timed.
    """
    readers = [_make_reader(run) for run in trained]
    samples: list[list[float]] = [[] for _ in readers]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            for i in range(ROUNDS + 1):
                for (read, _, steps), measured in zip(readers, samples, strict=True):
                    start = time.perf_counter()
                    read()
                    if i:
                        measured.append((time.perf_counter() - start) / steps)
    finally:
        torch.set_num_threads(threads)
    machine = cpu_name()
    return [
        StepTime(statistics.median(measured), f"{method}, float32, one sequence per call, 1 thread", machine)
        for (_, method, _), measured in zip(readers, samples, strict=True)
    ]


def _make_reader(run: TrainedRun) -> tuple[Callable[[], object], str, int]:
    """Return a function that reads one validation sequence, the method, and the number of steps."""
    model = run.model.float().eval()
    if isinstance(run.data, Text):
        words = run.data.validation[:WORDS]
        engine, x = _make_engine(model), words
        batch = words[:, None]
    else:
        batch = run.data.validation.x[:1]
        batch = (batch if run.data.decode is None else run.data.decode(batch)).float()
        engine, x = _make_engine(model), batch[0].flatten(1)
    if engine is None:
        return lambda: model(batch), "PyTorch", len(x)
    return lambda: _read(engine, x), "EventEngine", len(x)


def _read(engine: EventEngine, x: Tensor) -> None:
    engine.reset()
    engine.run(x)


def _make_engine(model: torch.nn.Module) -> EventEngine | None:
    """Return an engine that runs ``model``, or None if the engine does not support it."""
    try:
        if isinstance(model, SequenceClassifier):
            return EventEngine(**model.streaming())
        return EventEngine(model) if isinstance(model, LanguageModel) else None
    except (TypeError, ValueError):
        return None
