"""A run is a folder: config, environment, metrics, checkpoints, result and report page."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from egru.training import checkpoint

CONFIG, ENVIRONMENT, METRICS, RESULT = "config.json", "environment.json", "metrics.jsonl", "result.json"

_FILES = "|".join(map(re.escape, (CONFIG, ENVIRONMENT, METRICS, RESULT)))
_OURS = re.compile(rf"\.(({_FILES})|epoch-\d+(\.old)?)\.\d+")
"""Names under which :mod:`egru.training.checkpoint` writes and removes: with the number of the process at the end."""


class RunError(RuntimeError):
    """A run that cannot start or go on; the message says why and what is left."""


class Paused(RunError):
    """A run whose time was up before its end: saved, and ready to go on."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run's folder. ``say`` gets what a person should know, such as a damaged checkpoint."""

    folder: Path
    say: Callable[[str], None] = print

    @classmethod
    def create(cls, folder: Path, config: Mapping[str, Any], say: Callable[[str], None] = print) -> "Run":
        """A new run in a folder that does not exist yet or is empty."""
        folder = Path(folder)
        if (folder / CONFIG).exists():
            raise RunError(f"{folder} holds a run already: go on with --resume {folder}, or name another folder")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunError(f"{folder} exists and is not an empty folder; name another one")
        (folder / "checkpoints").mkdir(parents=True)
        checkpoint.replace_file(folder / ENVIRONMENT, _json(environment()))
        checkpoint.replace_file(folder / CONFIG, _json(config))
        return cls(folder, say)

    @classmethod
    def open(cls, folder: Path, say: Callable[[str], None] = print) -> "Run":
        """A run that was started before."""
        folder = Path(folder)
        if not (folder / CONFIG).is_file():
            raise RunError(f"{folder} is not a run: it has no {CONFIG}")
        return cls(folder, say)

    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / CONFIG).read_text(encoding="utf-8"))

    def copy_records(self, folder: Path) -> list[Path]:
        """What the run is apart from its checkpoints and its page, as far as it is there, copied to ``folder``."""
        there = [path for name in (CONFIG, ENVIRONMENT, METRICS, RESULT) if (path := self.folder / name).exists()]
        return [Path(shutil.copyfile(path, folder / path.name)) for path in there]

    def environment(self) -> dict[str, Any]:
        path = self.folder / ENVIRONMENT
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from training in this folder; a killed one lets go by itself."""
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            yield
            return
        with (self.folder / CONFIG).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunError(f"another process trains in {self.folder}; wait for it or stop it") from error
            yield

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save(
        self,
        epoch: int,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        device: torch.device,
        best: int,
        scaler: torch.amp.GradScaler,
    ) -> None:
        """Write the checkpoint of ``epoch``, then forget all but it, the one before and the best of either."""
        earlier = [e for e in self.epochs() if e < epoch]
        with self._writing():
            facts = {"epoch": epoch, "best": best, "scaler": scaler.state_dict()}
            checkpoint.save(self.at(epoch), model, optimiser, device, facts)
        keep = {epoch, best, *earlier[-1:]} | {self._best_of(e) for e in earlier[-1:]}
        for old in self.epochs():
            if old not in keep:
                checkpoint.discard(self.at(old))

    def restore(
        self, model: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device, scaler: torch.amp.GradScaler
    ) -> tuple[int, int]:
        """Put back the newest intact checkpoint, reporting damaged ones; returns its epoch and the best one's.

        What came after it, in checkpoints and metrics, is forgotten: it will be done again.
        """
        epoch = self.newest()
        for later in [e for e in self.epochs() if e > epoch]:
            checkpoint.discard(self.at(later))
        best = self._load(epoch, model, optimiser, device, scaler)
        path = self.folder / METRICS
        lines = [json.dumps(line) for line in self.metrics() if line["epoch"] <= epoch]
        kept = "".join(f"{line}\n" for line in lines).encode()
        if not path.exists() or path.read_bytes() != kept:
            with self._writing():
                checkpoint.replace_file(path, kept)
        return epoch, best

    def _load(
        self,
        epoch: int,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        device: torch.device,
        scaler: torch.amp.GradScaler,
    ) -> int:
        """Put back the checkpoint of ``epoch``; returns the best one's."""
        try:
            facts = checkpoint.load(self.at(epoch), model, optimiser, device)
            if facts.get("scaler"):
                scaler.load_state_dict(facts["scaler"])
        except (KeyError, RuntimeError, ValueError) as error:
            why = " ".join(str(error).split())
            raise RunError(f"the checkpoint of epoch {epoch} does not fit {self.folder / CONFIG}: {why}") from error
        return facts["best"]

    def must_be_new(self) -> None:
        """Refuse to begin where epochs were trained already: their metrics would stand beside the new ones."""
        if (path := self.folder / METRICS).exists() and path.stat().st_size:
            raise RunError(f"{self.folder} has {METRICS} but no checkpoint; remove {path} to begin it again")

    def newest(self) -> int:
        """The epoch of the newest intact checkpoint; damaged ones are reported."""
        for epoch in reversed(self.epochs()):
            try:
                checkpoint.verify(self.at(epoch))
            except checkpoint.Damaged as damage:
                self.say(f"damaged checkpoint passed over: {damage}")
            else:
                return epoch
        raise RunError(f"{self.folder} has no intact checkpoint; start it again in another folder")

    def best(self) -> int:
        """The epoch that validation chose; the newest intact one, with a word, where that is damaged."""
        newest = self.newest()
        best = self._best_of(newest)
        try:
            checkpoint.verify(self.at(best))
        except checkpoint.Damaged as damage:
            self.say(f"the best epoch's checkpoint is damaged, epoch {newest} stands in: {damage}")
            return newest
        return best

    def epochs(self) -> list[int]:
        return sorted(int(path.name[6:]) for path in (self.folder / "checkpoints").glob("epoch-*"))

    def at(self, epoch: int) -> Path:
        return self.folder / "checkpoints" / f"epoch-{epoch:05d}"

    def _best_of(self, epoch: int) -> int:
        try:
            return int(checkpoint.load_facts(self.at(epoch))["best"])
        except (OSError, ValueError, KeyError, TypeError):
            return epoch  # damaged: there is nothing to keep for it

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Says what is left when the disk takes no more."""
        try:
            yield
        except OSError as error:
            last = f"the checkpoint of epoch {self.epochs()[-1]} is intact" if self.epochs() else "no checkpoint yet"
            raise RunError(f"cannot write to {self.folder}: {error.strerror}; training stopped, {last}") from error

    def sweep(self) -> None:
        """Remove what an interrupted write left behind, and nothing else: the folder is its owner's."""
        for left in (*self.folder.glob(".*"), *(self.folder / "checkpoints").glob(".*")):
            if _OURS.fullmatch(left.name):
                shutil.rmtree(left) if left.is_dir() else left.unlink()

    # ---- numbers ----------------------------------------------------------------------------------------------------

    def record(self, line: Mapping[str, Any]) -> None:
        """Add a line to the metrics."""
        with self._writing(), (self.folder / METRICS).open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics so far. A last line that was cut short does not count; other damaged lines are reported."""
        path = self.folder / METRICS
        whole, _, cut = path.read_bytes().rpartition(b"\n") if path.exists() else (b"", b"", b"")
        found = [_metrics_line(line) for line in whole.split(b"\n") if line.strip()]
        bad = found.count(None)
        if bad:
            self.say(f"{path}: {bad} of {len(found)} lines cannot be read and are left out")
        return [line for line in (*found, _metrics_line(cut)) if line is not None]

    def finish(self, result: Mapping[str, Any]) -> None:
        with self._writing():
            checkpoint.replace_file(self.folder / RESULT, _json(result))

    def result(self) -> dict[str, Any] | None:
        """What the run came to, or None before its end."""
        path = self.folder / RESULT
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def environment() -> dict[str, Any]:
    """What the numbers of a run depend on beside its config."""
    from egru import kernels

    versions = {"python": platform.python_version()}
    for name in ("egru", "torch", "numpy", "safetensors"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "versions": versions,
        "machine": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernels": dict(kernels.info()),
    }


def _metrics_line(line: bytes) -> dict[str, Any] | None:
    """What a line of metrics says, or None where it is damaged."""
    try:
        said = json.loads(line)
        return said if isinstance(said["epoch"], int) and isinstance(said["validation"], dict) else None
    except (ValueError, KeyError, TypeError):  # UnicodeDecodeError is a ValueError
        return None


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
