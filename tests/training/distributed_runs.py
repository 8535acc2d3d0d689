"""Runs for one process, or for two started by `torchrun`. Without dropout, so that both compute the same."""

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path

import torch

import egru
from egru.data import Split
from egru.models import LanguageModel, SequenceClassifier
from egru.training import (
    ClassifierTask,
    ClassifierTraining,
    LanguageTask,
    LanguageTraining,
    NoProgress,
    Run,
    distributed,
    loop,
    train,
)
from tests.training.tiny import sequences, text


class RecordedStatistics(loop.EpochStatistics):
    """Stores the loss of every step, averaged over all processes."""

    curve: list[float] = []  # noqa: RUF012

    def summary(self):
        counts = torch.tensor(self.targets, dtype=torch.float64)
        sums = distributed.all_sum(torch.stack(self.losses).double() * counts)
        RecordedStatistics.curve += (sums / distributed.all_sum(counts)).tolist()
        return super().summary()


def classifier(processes: int, **changes):
    """43 rows in batches of 14. The last batch has one row, so that the second process has none."""
    data = sequences()
    data = dataclasses.replace(data, train=Split(*(part[:43] for part in data.train)))
    training = ClassifierTraining(epochs=5, batch=14 // processes, learning_rate=1e-2, clip=1.0, **changes)
    threshold, surrogate = egru.Threshold(mean=-3.0), egru.Surrogate(width=0.3)
    return (
        lambda: SequenceClassifier(1, 12, 2, threshold=threshold, surrogate=surrogate, normalise=False),
        lambda: ClassifierTask(data, training),
        training,
    )


def language(processes: int, **changes):
    training = LanguageTraining(
        epochs=4, batch=8 // processes, evaluation_batch=3, learning_rate=0.5, optimiser="ntavsgd", bptt=20, **changes
    )
    threshold = egru.Threshold(mean=-3.0)
    return (
        lambda: LanguageModel(7, 12, 16, num_layers=2, threshold=threshold),
        lambda: LanguageTask(text(), training),
        training,
    )


CASES = {
    "classifier": (classifier, {}),
    "language": (language, {}),
    "pruned": (language, {"weight_sparsity": 0.5}),
    "bfloat16": (classifier, {"exchange": "bfloat16"}),
}


def run(name: str, folder: Path, processes: int) -> None:
    """Train. Rank 0 writes the loss of every step into the run folder."""
    make, changes = CASES[name]
    make_model, make_task, training = make(processes, **changes)
    torch.manual_seed(0 if distributed.rank() == 0 else 1)  # the weights of rank 0 are used
    model, task = make_model(), make_task()
    with distributed.rank_zero_first():
        run = Run.create(folder, {}) if distributed.rank() == 0 else Run.open(folder)
    RecordedStatistics.curve = []
    train(model, task, training, run, NoProgress())
    if distributed.rank() == 0:
        (folder / "curve.json").write_text(json.dumps(RecordedStatistics.curve))


def main(folder: Path, processes: int) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    loop.EpochStatistics = RecordedStatistics
    with distributed.process_group("cpu") if processes > 1 else contextlib.nullcontext():
        for name in CASES:
            run(name, folder / name, processes)
    assert processes == 1 or "pt_gloo_runloop" not in threads()


def threads() -> list[str]:
    """Return the names of this process's threads. A remaining thread of a group may abort the process at exit."""
    tasks = Path("/proc/self/task")
    return [(task / "comm").read_text().strip() for task in tasks.iterdir()] if tasks.exists() else []


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["WORLD_SIZE"]))
