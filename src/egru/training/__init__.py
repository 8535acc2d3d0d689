"""Training: one loop for all models, with checkpoints, resuming and data-parallel processes.

The progress bar uses rich if it is installed.

Example:
    >>> data, training = egru.data.digits(), egru.training.ClassifierTraining(epochs=2, learning_rate=1e-3)
    >>> model = egru.models.SequenceClassifier(1, 64, data.classes)
    >>> task = egru.training.ClassifierTask(data, training)
    >>> result = egru.training.train(model, task, training, egru.training.Run.create("runs/first", {}))
    >>> print(f"accuracy {result.test.accuracy:.1%}, activity sparsity {result.activity.activity_sparsity:.1%}")

For runs that can also be evaluated, exported and reported, see :func:`egru.runs.train`.
"""

from egru.records import FormatError, from_plain, to_plain
from egru.training import checkpoint, distributed
from egru.training.checkpoint import DamagedCheckpointError
from egru.training.config import ClassifierTraining, LanguageTraining, Training
from egru.training.loop import score, train
from egru.training.metrics import DamagedMetricsError
from egru.training.optimise import AveragedSGD, learning_rate_factor, make_optimiser
from egru.training.progress import NoProgress, Progress, progress_bar, tensorboard
from egru.training.records import EpochMetrics, Result, Scores
from egru.training.run import Paused, Run, RunError, RunExistsError, RunNotFoundError
from egru.training.tasks import Batch, ClassifierTask, LanguageTask, Task

__all__ = [
    "AveragedSGD",
    "Batch",
    "ClassifierTask",
    "ClassifierTraining",
    "DamagedCheckpointError",
    "DamagedMetricsError",
    "EpochMetrics",
    "FormatError",
    "LanguageTask",
    "LanguageTraining",
    "NoProgress",
    "Paused",
    "Progress",
    "Result",
    "Run",
    "RunError",
    "RunExistsError",
    "RunNotFoundError",
    "Scores",
    "Task",
    "Training",
    "checkpoint",
    "distributed",
    "from_plain",
    "learning_rate_factor",
    "make_optimiser",
    "progress_bar",
    "score",
    "tensorboard",
    "to_plain",
    "train",
]
