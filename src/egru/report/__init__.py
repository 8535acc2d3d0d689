"""What a run came to: one HTML page that needs nothing else, figures for papers, a table for the terminal.

The page needs no other package. The figures are matplotlib's, the table is rich's (``pip install 'egru[demo]'``), each
imported when asked for.
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
