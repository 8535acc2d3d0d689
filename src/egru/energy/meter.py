"""The energy that a device and its host use, from all counters that can be read."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from egru.energy import nvml, powercap, smi
from egru.energy.unavailable import CounterUnavailable

POLL_SECONDS = 60.0
"""Time between two readings in the background. RAPL counters wrap after 65 kJ at the earliest, which takes minutes."""


class Counter(Protocol):
    """A counter of joules.

    Attributes:
        name: What it measures, such as "package-0" or "cuda:0".
        source: Where it is read, such as "powercap intel-rapl:0".
    """

    name: str
    source: str

    def joules(self) -> float:
        """Return the joules since an arbitrary start."""
        ...

    def close(self) -> None:
        """Release the counter."""
        ...


class EnergyMeter:
    """Reads the energy counters of a device and of the CPUs of this machine.

    Counters measure the whole CPU package, memory or GPU, including other processes. A machine without readable
    counters gives an empty reading and the reasons: nothing is estimated.

    Args:
        device: Device of the computation. The counter of a GPU is read only for CUDA devices.
        folder: Folder of the Linux powercap interface. Default: ``/sys/class/powercap``.

    Example:
        >>> with egru.energy.EnergyMeter("cpu") as meter:
        ...     before = meter.read()
        ...     product = torch.randn(500, 500) @ torch.randn(500, 500)
        ...     joules = meter.since(before)  # by counter
        >>> reasons = meter.missing  # why counters are missing
    """

    def __init__(self, device: str | torch.device = "cpu", folder: str | Path = powercap.FOLDER) -> None:
        self._counters: list[Counter] = []
        self._missing: list[str] = []
        self._stop, self._lock, self._thread = threading.Event(), threading.Lock(), None
        self._open(lambda: powercap.counters(Path(folder)))
        device = torch.device(device)
        if device.type == "cuda" and not torch.cuda.is_available():
            self._missing.append("GPU: torch finds no CUDA device")
        elif device.type == "cuda":
            has_counter = self._open(lambda: [nvml.counter(device)])
            if not has_counter:
                self._open(lambda: [smi.PowerSampler(device)])

    def _open(self, find: Callable[[], Sequence[Counter]]) -> bool:
        try:
            self._counters += find()
        except CounterUnavailable as reason:
            self._missing.append(str(reason))
            return False
        return True

    @property
    def sources(self) -> dict[str, str]:
        """Where each counter is read, by name. Empty if there is no counter."""
        return {counter.name: counter.source for counter in self._counters}

    @property
    def missing(self) -> tuple[str, ...]:
        """Why counters are missing, one sentence each."""
        return tuple(self._missing)

    def read(self) -> dict[str, float]:
        """Return the joules of every counter since an arbitrary start, by name. The device is not synchronised.

        A counter that fails is left out from then on, and :attr:`missing` has the reason.
        """
        values: dict[str, float] = {}
        with self._lock:
            for counter in tuple(self._counters):
                try:
                    values[counter.name] = counter.joules()
                except (CounterUnavailable, OSError, ValueError) as error:
                    self._counters.remove(counter)
                    counter.close()
                    self._missing.append(f"{counter.name}: {counter.source} failed: {error}")
        return values

    def since(self, before: Mapping[str, float]) -> dict[str, float]:
        """Return the joules of every counter since the reading ``before``, by name."""
        return {name: value - before[name] for name, value in self.read().items()}

    def __enter__(self) -> Self:
        if self._counters:
            self._thread = threading.Thread(target=self._poll, name="egru-energy", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for counter in self._counters:
            counter.close()

    def _poll(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self.read()
