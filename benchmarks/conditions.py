"""Machine, load and versions of a benchmark on the CPU, for its record."""

import datetime
import os
from typing import Any

import torch

from egru.environment import cpu_name


def load_average() -> float:
    """Return the load average of the last minute. Call this before the measurement, which increases it."""
    return os.getloadavg()[0]


def conditions(load: float) -> dict[str, Any]:
    """Return the entries of a record that describe the machine and the day.

    Args:
        load: The load average before the measurement. Timings require a value near 0.
    """
    return {
        "threads": torch.get_num_threads(),
        "load_average": load,
        "torch": torch.__version__,
        "machine": f"{cpu_name()}, {os.cpu_count()} cores",
        "date": datetime.date.today().isoformat(),
    }
