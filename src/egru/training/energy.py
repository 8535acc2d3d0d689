"""Records the measured energy of every epoch in ``energy.json``."""

import contextlib
from types import TracebackType
from typing import Self

from egru.energy import EnergyMeter
from egru.training import distributed
from egru.training.records import EpochEnergy, RunEnergy
from egru.training.run import Run

SEVERAL_PROCESSES = "energy is not recorded in runs of several processes"


class EnergyRecorder:
    """Measures epochs and writes their energy to the run, or the reasons why there is no measurement.

    Args:
        run: Run to record. Processes other than the first write nothing.
        device: Device of the training.
        meter: Meter to read. If None, one for ``device``.
    """

    def __init__(self, run: Run, device: str, meter: EnergyMeter | None = None) -> None:
        self._run, self._stack = run, contextlib.ExitStack()
        self._meter: EnergyMeter | None = None
        if distributed.world_size() == 1:
            self._meter = meter or EnergyMeter(device)
        self._before: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self._meter is not None:
            self._stack.enter_context(self._meter)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start_epoch(self) -> None:
        """Read the counters before an epoch."""
        self._before = {} if self._meter is None else self._meter.read()

    def since_start(self) -> dict[str, float]:
        """Return the joules since :meth:`start_epoch`, by counter."""
        return {} if self._meter is None else self._meter.since(self._before)

    def write(self, epoch: int, joules: dict[str, float]) -> None:
        """Write the joules of an epoch. Those of this and later epochs, left by an interrupted run, are replaced."""
        if distributed.rank() > 0:
            return
        try:
            earlier = self._run.energy()
        except ValueError as error:
            self._run.log(f"the energy of earlier epochs is lost: {error}")
            earlier = None
        counters, epochs = (dict(earlier.counters), earlier.epochs) if earlier else ({}, ())
        kept = tuple(entry for entry in epochs if entry.epoch < epoch)
        if joules:
            kept += (EpochEnergy(epoch, joules),)
        missing = (SEVERAL_PROCESSES,) if self._meter is None else self._meter.missing
        counters |= {} if self._meter is None else self._meter.sources
        energy = RunEnergy(counters, missing, kept)
        if energy != earlier:
            self._run.write_energy(energy)
