"""CPU and memory energy from the Linux powercap interface (RAPL; AMD processors use the same folders).

Zones overlap: ``core`` and ``uncore`` are parts of ``package``, and ``psys`` contains all of them. The packages and
their ``dram``, which is not part of them, are read. ``intel-rapl-mmio`` repeats the packages and is left out.
"""

import re
import threading
from pathlib import Path

from egru.energy.unavailable import CounterUnavailable

FOLDER = "/sys/class/powercap"

_ZONE = re.compile(r"intel-rapl:(\d+)(:\d+)?")


class Zone:
    """A zone of the powercap interface. Its counter starts again at zero after ``max_energy_range_uj``.

    Args:
        path: Folder of the zone.
        name: Name of the counter.

    Raises:
        OSError: If the counter cannot be read.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name, self.source = name, f"powercap {path.name}"
        self._file, self._lock = path / "energy_uj", threading.Lock()
        self._range = _read_int(path / "max_energy_range_uj")
        self._last, self._total = _read_int(self._file), 0

    def joules(self) -> float:
        """Return the joules since the counter was opened. Call it at least once per wrap-around."""
        with self._lock:
            value = _read_int(self._file)
            step = value - self._last
            self._total += step if step >= 0 else step + self._range
            self._last = value
            return self._total * 1e-6

    def close(self) -> None:
        """Do nothing: files are opened for each reading."""


def counters(folder: Path) -> list[Zone]:
    """Return the counters of all CPU packages and of their memory.

    Raises:
        CounterUnavailable: If there is none, or if one cannot be read: a sum over some packages would be wrong.
    """
    found: list[Zone] = []
    try:
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        for path in paths:
            match = _ZONE.fullmatch(path.name)
            name = (path / "name").read_text(encoding="utf-8").strip() if match else ""
            if name.startswith("package"):
                found.append(Zone(path, name))
            elif match and name == "dram":
                found.append(Zone(path, f"dram-{match[1]}"))
    except OSError as error:
        advice = "; run as root, or make it readable" if isinstance(error, PermissionError) else ""
        raise CounterUnavailable(f"CPU: cannot read {error.filename}: {error.strerror}{advice}") from None
    if not found:
        raise CounterUnavailable(f"CPU: {folder} has no RAPL counters")
    return found


def _read_int(path: Path) -> int:
    return int(path.read_text(encoding="utf-8"))
