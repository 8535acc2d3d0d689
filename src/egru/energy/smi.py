"""GPU energy from power samples of ``nvidia-smi``, for GPUs without an energy counter."""

import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from typing import IO, Any

import torch

from egru.energy.unavailable import CounterUnavailable

INTERVAL_MS = 100


class PowerIntegral:
    """The integral of power samples over time: each sample holds since the one before it.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._time, self._watts, self._joules = clock(), 0.0, 0.0

    def add(self, watts: float) -> None:
        """Add a sample."""
        with self._lock:
            now = self._clock()
            self._joules += watts * (now - self._time)
            self._time, self._watts = now, watts

    def joules(self) -> float:
        """Return the joules until now. Since the last sample, its power is assumed."""
        with self._lock:
            return self._joules + self._watts * (self._clock() - self._time)


class PowerSampler:
    """Runs ``nvidia-smi`` in the background and integrates the power that it prints.

    Args:
        device: CUDA device.
        uuid: UUID of the GPU. If None, that of ``device``.

    Raises:
        CounterUnavailable: If ``nvidia-smi`` is not installed or prints no power.
    """

    def __init__(self, device: torch.device, uuid: str | None = None) -> None:
        self.name = f"cuda:{device.index or 0}"
        self.source = f"nvidia-smi, power sampled every {INTERVAL_MS} ms"
        uuid = uuid or f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        command = ["nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
        command += [f"--loop-ms={INTERVAL_MS}", f"--id={uuid}"]
        try:
            self._process: subprocess.Popen[str] = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            raise CounterUnavailable("GPU: nvidia-smi is not installed") from None
        assert self._process.stdout is not None
        lines: IO[str] = self._process.stdout
        first = lines.readline().strip()
        if _watts(first) is None:
            self.close()
            raise CounterUnavailable(f"GPU: nvidia-smi prints no power, but {first!r}")
        self._integral = PowerIntegral()
        self._integral.add(float(first))
        self._thread = threading.Thread(target=self._sample, args=(lines,), name="egru-power", daemon=True)
        self._thread.start()

    def joules(self) -> float:
        """Return the joules since the sampler was started.

        Raises:
            CounterUnavailable: If ``nvidia-smi`` has ended.
        """
        if (code := self._process.poll()) is not None:
            raise CounterUnavailable(f"nvidia-smi ended with exit code {code}")
        return self._integral.joules()

    def close(self) -> None:
        """Stop ``nvidia-smi``."""
        self._process.terminate()
        self._process.wait()
        if self._process.stdout is not None:
            thread: Any = getattr(self, "_thread", None)
            if thread is not None:
                thread.join()
            self._process.stdout.close()

    def _sample(self, lines: Iterable[str]) -> None:
        for line in lines:
            if (watts := _watts(line)) is not None:
                self._integral.add(watts)


def _watts(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
