"""Versions, machine and kernels of the current process: what results depend on besides the configuration."""

import dataclasses
import importlib.metadata
import platform
from pathlib import Path

import torch

from egru import __version__, kernels
from egru.records import JSONRecord

PACKAGES = ("torch", "numpy", "safetensors")


@dataclasses.dataclass(frozen=True)
class Environment(JSONRecord):
    """Software and hardware that a run used.

    Attributes:
        versions: Version of Python, egru and each package in :data:`PACKAGES`, or "not installed".
        machine: Operating system and architecture, such as "Linux x86_64".
        threads: Number of threads that torch uses.
        cuda: Name of the GPU, or None.
        kernels: Status of each kernel, from :func:`egru.kernels.info`.
    """

    versions: dict[str, str]
    machine: str
    threads: int
    cuda: str | None
    kernels: dict[str, str]

    @classmethod
    def current(cls) -> "Environment":
        """Return the environment of this process."""
        installed = {name: version(name) or "not installed" for name in PACKAGES}
        return cls(
            {"python": platform.python_version(), "egru": __version__, **installed},
            f"{platform.system()} {platform.machine()}",
            torch.get_num_threads(),
            torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            dict(kernels.info()),
        )


def cpu_name() -> str:
    """Return the model of the CPU, or the architecture on systems without ``/proc/cpuinfo``."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
