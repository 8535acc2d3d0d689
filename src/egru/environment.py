"""Versions, machine and kernels of the current process: what results depend on besides the configuration."""

import dataclasses
import importlib.metadata
import platform

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


def version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
