"""Training: one loop for every model, and runs that survive what happens to them.

Needs safetensors and rich (``pip install 'egru[train]'``), imported when a checkpoint or a bar is asked for.
"""

from egru.training import checkpoint, distributed
from egru.training.checkpoint import Damaged
from egru.training.config import ClassifierTraining, LanguageTraining, Training, from_plain, to_plain
from egru.training.loop import Result, score, train
from egru.training.optimise import AveragedSGD, learning_rate_factor, make_optimiser
from egru.training.progress import Silent, bar, tensorboard
from egru.training.run import Run, RunError
from egru.training.tasks import ClassifierTask, LanguageTask, Scores, Task

__all__ = [
    "AveragedSGD",
    "ClassifierTask",
    "ClassifierTraining",
    "Damaged",
    "LanguageTask",
    "LanguageTraining",
    "Result",
    "Run",
    "RunError",
    "Scores",
    "Silent",
    "Task",
    "Training",
    "bar",
    "checkpoint",
    "distributed",
    "from_plain",
    "learning_rate_factor",
    "make_optimiser",
    "score",
    "tensorboard",
    "to_plain",
    "train",
]
