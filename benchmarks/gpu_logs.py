"""What the GPU queue shows of its jobs and of the GPU: the last lines of logs, load and memory."""

import pathlib
import re
import subprocess


def last_lines(path: pathlib.Path, count: int, skip: str | None = None) -> list[str]:
    """Return the last non-empty lines of a log, without those that start with ``skip``."""
    try:
        text = path.read_bytes()[-20_000:].decode(errors="replace")
    except OSError:
        return []
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in re.split(r"[\r\n]", text)]
    return [line for line in lines if line and not (skip and line.startswith(skip))][-count:]


def cut(text: str, length: int = 160) -> str:
    """Return ``text`` shortened to ``length`` characters."""
    return text if len(text) <= length else text[: length - 1] + "…"


def last_epoch(path: pathlib.Path) -> str:
    """Return the last epoch's line of a log, or its last line where no epoch has ended."""
    lines = last_lines(path, 200)
    epochs = [line for line in lines if line.startswith("epoch ")]
    return (epochs or lines or ["no output yet"])[-1]


def gpu_load() -> str:
    """Return load and used memory of the first GPU as nvidia-smi reports them."""
    values = nvidia_smi("utilization.gpu", "memory.used")
    return f"{values[0]:.0f} %, {values[1] / 1024:.1f} GiB" if values else "unknown"


def nvidia_smi(*names: str) -> list[float]:
    """Return properties of the first GPU; an empty list without nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        return [float(value) for value in answer.splitlines()[0].split(",")]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []
