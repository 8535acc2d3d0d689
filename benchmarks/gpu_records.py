"""The folder of a GPU queue: following a running queue, and packing the records of its runs."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import time

RECORDS = ("config.json", "environment.json", "metrics.jsonl", "result.json")
QUEUE, LOG, LIMITS, PID = "queue.json", "queue.log", "limits.json", "queue.pid"
RUNNING, DIED, ENDED = 3, 1, 0
"""Exit codes of ``watch``."""


def alive(work: pathlib.Path) -> bool:
    """Return whether the process of the queue in ``work`` runs."""
    try:
        number = int((work / PID).read_text())
        os.kill(number, 0)
        state = pathlib.Path(f"/proc/{number}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, ValueError):
        return False


def ended(work: pathlib.Path) -> bool:
    """Return whether the queue in ``work`` came to its end."""
    try:
        return json.loads((work / QUEUE).read_text())["ended"]
    except (OSError, ValueError, KeyError):
        return False


def watch(work: pathlib.Path, seconds: float, patience: float = 10.0) -> int:
    """Print the log of a queue until it ends, dies or ``seconds`` have passed.

    Args:
        work: The queue's folder.
        seconds: How long to follow it.
        patience: How long to wait for the queue to start.

    Returns:
        0 when the queue has ended, 1 when it died or never started, 3 when it is still running.
    """
    begun, position = time.monotonic(), 0
    while True:
        over, lives = ended(work), alive(work)
        with contextlib.suppress(OSError), (work / LOG).open(encoding="utf-8") as log:
            log.seek(position)
            print(log.read(), end="", flush=True)
            position = log.tell()
        passed = time.monotonic() - begun
        if over:
            return ENDED
        if not lives and (position or passed > patience):
            print(f"the queue in {work} died: its process is gone and {QUEUE} has no end", flush=True)
            return DIED
        if passed >= seconds:
            return RUNNING
        time.sleep(min(0.5, max(0.01, seconds - passed)))


def export_unfinished(work: pathlib.Path, weights: str) -> list[str]:
    """Export the best weights so far of every run that has not finished, so that a lost machine costs less.

    Args:
        work: The queue's folder.
        weights: float32, bfloat16 or int8.

    Returns:
        The names of the runs that were exported. A run without a checkpoint is left out.
    """
    exported = []
    for run in sorted((work / "runs").iterdir()):
        if (run / "result.json").exists():
            continue
        with tempfile.TemporaryDirectory(dir=work) as folder:
            new, target = pathlib.Path(folder) / run.name, work / "exports" / run.name
            command = [sys.executable, "-m", "egru", "export", str(run), str(new), "--weights", weights]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                if target.exists():
                    target.replace(pathlib.Path(folder) / "old")
                target.parent.mkdir(exist_ok=True)
                new.replace(target)
                exported.append(run.name)
    return exported


def collect(work: pathlib.Path, out: pathlib.Path, part: float | None = None) -> list[pathlib.Path]:
    """Pack the small files of all runs, and exported weights, into archives.

    Args:
        work: The queue's folder.
        out: Where ``records.tar.gz`` and ``exports.tar.gz`` go.
        part: Split archives larger than this many MiB into ``exports.tar.gz.00``, ``.01``, ... (``cat`` joins them).

    Returns:
        The files written.
    """
    out.mkdir(parents=True, exist_ok=True)
    archives = [out / "records.tar.gz"]
    with tarfile.open(archives[0], "w:gz") as tar:
        for path in (work / QUEUE, work / LOG, *sorted((work / "logs").glob("*.log"))):
            if path.exists():
                tar.add(path, str(path.relative_to(work)))
        for run in sorted((work / "runs").iterdir()):
            for name in RECORDS:
                if (run / name).exists():
                    tar.add(run / name, f"runs/{run.name}/{name}")
    exports = [path for path in sorted((work / "exports").glob("*/*")) if path.is_file()]
    if exports:
        archives.append(out / "exports.tar.gz")
        with tarfile.open(archives[1], "w:gz") as tar:
            for path in exports:
                tar.add(path, str(path.relative_to(work)))
    return [file for archive in archives for file in split(archive, part)]


def split(path: pathlib.Path, part: float | None) -> list[pathlib.Path]:
    """Replace a file larger than ``part`` MiB by numbered parts, and return the files."""
    size = path.stat().st_size if part is None else int(part * 2**20)
    if path.stat().st_size <= size:
        return [path]
    parts = []
    with path.open("rb") as whole:
        while data := whole.read(size):
            parts.append(path.with_name(f"{path.name}.{len(parts):02d}"))
            parts[-1].write_bytes(data)
    path.unlink()
    return parts
