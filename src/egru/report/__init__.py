"""Reports of trained models: a self-contained HTML page, figures for papers, and a table for the terminal.

The page requires no other package. The figures require matplotlib and the table requires rich
(``pip install 'egru[demo]'``); both are imported on first use.
"""

from egru.report.models import report_models
from egru.report.page import read_runs, write_report
from egru.report.pareto import pareto_front
from egru.report.plots import activity_histogram, macs_bar, training_curves
from egru.report.raster import event_raster
from egru.report.run import Epoch, Raster, RunReport, StepTime, ThresholdSearch
from egru.report.table import print_table
from egru.report.theme import DARK, LIGHT, Theme

__all__ = [
    "DARK",
    "LIGHT",
    "Epoch",
    "Raster",
    "RunReport",
    "StepTime",
    "Theme",
    "ThresholdSearch",
    "activity_histogram",
    "event_raster",
    "macs_bar",
    "pareto_front",
    "print_table",
    "read_runs",
    "report_models",
    "training_curves",
    "write_report",
]
