"""Counters of a machine that does not exist: a powercap folder, and NVML as a shared library."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

NVML = r"""
#include <string.h>
int found = 1, devices = 1, supported = 1, users = 0;
unsigned long long millijoules = 5000000;
typedef struct { int index; } *device_t;
static struct { int index; } gpu = {0};
int nvmlInit_v2(void) { users++; return 0; }
int nvmlShutdown(void) { users--; return 0; }
const char *nvmlErrorString(int error) { return error == 3 ? "Not Supported" : "Not Found"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, device_t *device)
{
    if (!found || strcmp(uuid, "GPU-1234")) return 6;
    *device = (device_t)&gpu;
    return 0;
}
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = (unsigned)devices; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, device_t *device)
{
    if (index != 0) return 6;
    *device = (device_t)&gpu;
    return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(device_t device, unsigned long long *energy)
{
    if ((void *)device != (void *)&gpu) return 2;
    if (!supported) return 3;
    *energy = millijoules;
    return 0;
}
"""


class FakeNvml:
    """The library of :data:`NVML`. Attributes are its global variables."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("a fake NVML requires a C compiler")
        (folder / "nvml.c").write_text(NVML)
        self.path = str(folder / "libnvidia-ml.so.1")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", self.path, str(folder / "nvml.c")], check=True)
        self._library = ctypes.CDLL(self.path)

    def set(self, **values: int) -> None:
        for name, value in values.items():
            kind = ctypes.c_ulonglong if name == "millijoules" else ctypes.c_int
            kind.in_dll(self._library, name).value = value

    @property
    def users(self) -> int:
        return ctypes.c_int.in_dll(self._library, "users").value


def add_zone(folder: Path, zone: str, name: str, microjoules: int, wrap: int = 1_000_000) -> Path:
    """Create a zone of the powercap interface and return its counter file."""
    (folder / zone).mkdir(parents=True)
    (folder / zone / "name").write_text(f"{name}\n")
    (folder / zone / "max_energy_range_uj").write_text(f"{wrap}\n")
    (folder / zone / "energy_uj").write_text(f"{microjoules}\n")
    return folder / zone / "energy_uj"
