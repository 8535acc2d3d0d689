"""Training: one loop for every model, and runs that survive what happens to them.

Needs safetensors (``pip install 'egru[train]'``), imported when a checkpoint is asked for, and likes to have rich.
"""

from egru.training import checkpoint
from egru.training.checkpoint import Damaged
from egru.training.config import ClassifierTraining, LanguageTraining, Training, from_plain, to_plain
from egru.training.loop import Result, score, train
from egru.training.optimise import AveragedSGD, learning_rate_factor, make_optimiser
from egru.training.progress import Silent, bar, tensorboard
from egru.training.run import Paused, Run, RunError
from egru.training.tasks import ClassifierTask, LanguageTask, Scores, Task

__all__ = [
    "AveragedSGD",
    "ClassifierTask",
    "ClassifierTraining",
    "Damaged",
    "LanguageTask",
    "LanguageTraining",
    "Paused",
    "Result",
    "Run",
    "RunError",
    "Scores",
    "Silent",
    "Task",
    "Training",
    "bar",
    "checkpoint",
    "from_plain",
    "learning_rate_factor",
    "make_optimiser",
    "score",
    "tensorboard",
    "to_plain",
    "train",
]
