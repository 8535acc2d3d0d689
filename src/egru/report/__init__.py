"""What a run came to: figures, a table for the terminal and one HTML page that needs nothing else.

Needs matplotlib and rich (``pip install 'egru[demo]'``), imported when a figure or a table is asked for.
"""

from egru.report.page import read_runs, write_report
from egru.report.pareto import pareto_front
from egru.report.plots import activity_histogram, macs_bar, training_curves
from egru.report.raster import event_raster
from egru.report.run import Epoch, Raster, RunReport
from egru.report.table import print_table
from egru.report.theme import DARK, LIGHT, Theme

__all__ = [
    "DARK",
    "LIGHT",
    "Epoch",
    "Raster",
    "RunReport",
    "Theme",
    "activity_histogram",
    "event_raster",
    "macs_bar",
    "pareto_front",
    "print_table",
    "read_runs",
    "training_curves",
    "write_report",
]
