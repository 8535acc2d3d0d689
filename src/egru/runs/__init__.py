"""Work with runs of recipes: train, resume, evaluate, export, report, raise thresholds, convert.

A run is a folder that contains a config, metrics, checkpoints, a result and a report page.
"""

from egru.runs.convert import convert
from egru.runs.evaluate import evaluate
from egru.runs.export import export, export_c, export_onnx
from egru.runs.load import TrainedRun, load, pretrained
from egru.runs.quieten import quieten
from egru.runs.report import report
from egru.runs.train import resume, train

__all__ = [
    "TrainedRun",
    "convert",
    "evaluate",
    "export",
    "export_c",
    "export_onnx",
    "load",
    "pretrained",
    "quieten",
    "report",
    "resume",
    "train",
]
