"""Energy per call of the contestants of a benchmark, from the counters of the machine."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from egru import format
from egru.energy import EnergyMeter

SECONDS = 3.0
"""Shortest time per contestant. Counters are updated every 1 to 100 ms."""


def measure_energy(
    runs: Mapping[str, Callable[[], object]],
    meter: EnergyMeter,
    synchronise: Callable[[], None] = lambda: None,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Measure the energy of each contestant, one after the other, and print a table.

    Args:
        runs: Functions to measure, by name.
        meter: Counters to read. They include the rest of the machine, such as its idle power.
        synchronise: Waits for the device.
        seconds: Shortest time to repeat each function.
        clock: Returns the time in seconds.

    Returns:
        "counters" and "missing" of the meter, and "joules": joules per call by contestant and counter. Without
        counters "joules" is empty.
    """
    joules: dict[str, dict[str, float]] = {}
    for name, run in runs.items() if meter.sources else ():
        run()
        synchronise()
        start, before, calls = clock(), meter.read(), 0
        while clock() - start < seconds:
            run()
            synchronise()
            calls += 1
        joules[name] = {counter: value / calls for counter, value in meter.since(before).items()}
    for name, values in joules.items():
        print(f"  {name:32s} {', '.join(f'{counter} {format.joules(v)}' for counter, v in values.items())} per call")
    for reason in meter.missing:
        print(f"  energy not measured: {reason}")
    return {"counters": meter.sources, "missing": list(meter.missing), "joules": joules}


def add_option(parser: Any) -> None:
    """Add the option --energy to the parser of a benchmark."""
    parser.add_argument(
        "--energy",
        action="store_true",
        help="also measure energy with the counters of the machine: powercap (RAPL) on CPUs, NVML on GPUs",
    )
