"""What one does with a run folder: train, resume, evaluate, export, report, raise thresholds."""

from egru.runs.quieten import quieten
from egru.runs.report import report
from egru.runs.train import evaluate, export, resume, start
from egru.runs.trained import Trained, pretrained, trained

__all__ = ["Trained", "evaluate", "export", "pretrained", "quieten", "report", "resume", "start", "trained"]
