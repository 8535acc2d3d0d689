"""A run is a folder with a config, environment, metrics, checkpoints, result and report page."""

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from egru.environment import Environment
from egru.files import replace_file
from egru.records import read_json, write_json
from egru.training import checkpoint
from egru.training import metrics as metrics_file
from egru.training.records import EpochMetrics, Result, RunEnergy

CONFIG, ENVIRONMENT, METRICS, RESULT = "config.json", "environment.json", "metrics.jsonl", "result.json"
ENERGY = "energy.json"
RECORDS = (CONFIG, ENVIRONMENT, METRICS, ENERGY, RESULT)

_FILES = "|".join(map(re.escape, RECORDS))
_TEMPORARY = re.compile(rf"\.(({_FILES})|epoch-\d+(\.old)?)\.\d+")
"""Temporary names of :mod:`egru.files` and :mod:`egru.training.checkpoint`; they end with a process or thread id."""
_CHECKPOINT = re.compile(r"epoch-(\d{5,})")


class RunError(RuntimeError):
    """A run that cannot be started, continued or read."""


class RunNotFoundError(RunError, FileNotFoundError):
    """A folder that does not exist or is not a run."""


class RunExistsError(RunError, FileExistsError):
    """A folder for a new run or export that is not empty."""


class Paused(RunError):
    """Raised when a time limit ends training early. The run is saved and can be resumed."""


class Best(NamedTuple):
    """The best saved epoch. It is part of a checkpoint, whose checksum protects it.

    Attributes:
        epoch: Number of the epoch, 0 before the first one.
        merit: Key of its validation scores, from :meth:`egru.training.Task.merit`.
    """

    epoch: int
    merit: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """The folder of one run.

    Use :meth:`create` for a new run and :meth:`open` for an existing one.

    Attributes:
        folder: Path of the run.
        log: Called with messages for the user, such as a damaged checkpoint.

    Example:
        >>> run = egru.training.Run.create("runs/first", {})
        >>> result = egru.training.train(model, task, training, run)
        >>> egru.training.Run.open("runs/first").result() == result
        True
    """

    folder: Path
    log: Callable[[str], None] = print

    @classmethod
    def create(cls, folder: str | Path, config: Mapping[str, Any], log: Callable[[str], None] = print) -> "Run":
        """Create a run.

        The config is written last, and only a folder with a config is a run. If the process is killed before that,
        ``folder`` can be used again.

        Args:
            folder: Path that does not exist, an empty folder, or one where creating a run was interrupted.
            config: Settings to store, as JSON values.
            log: Called with messages for the user.

        Raises:
            RunExistsError: If ``folder`` is not empty.
            RunError: If ``folder`` cannot be written.
        """
        folder = Path(folder)
        if (folder / CONFIG).exists():
            raise RunExistsError(
                f"{folder} already contains a run: continue it with --resume {folder}, or use a new folder"
            )
        if folder.exists() and not is_unused(folder):
            raise RunExistsError(f"{folder} exists and is not an empty folder; use a new folder")
        try:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            Environment.current().write(folder / ENVIRONMENT)
            write_json(folder / CONFIG, config, exclusive=True)
        except FileExistsError as error:
            raise RunExistsError(f"another process has created {folder / CONFIG}; use a new folder") from error
        except OSError as error:
            raise RunError(f"cannot create the run {folder}: {error.strerror}") from error
        return cls(folder, log)

    @classmethod
    def open(cls, folder: str | Path, log: Callable[[str], None] = print) -> "Run":
        """Open an existing run.

        Args:
            folder: Path of the run.
            log: Called with messages for the user.

        Raises:
            RunNotFoundError: If ``folder`` is not a run.
        """
        folder = Path(folder)
        if not (folder / CONFIG).is_file():
            raise RunNotFoundError(f"{folder} is not a run: it has no {CONFIG}")
        return cls(folder, log)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run against training by another process. The lock is released if the process is killed.

        Raises:
            RunError: If another process holds the lock.
        """
        try:
            import fcntl
        except ImportError:  # this platform has no file locks
            yield
            return
        with (self.folder / CONFIG).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunError(f"another process is training in {self.folder}; wait for it or stop it") from error
            yield

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save(
        self,
        epoch: int,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        device: torch.device,
        best: Best,
        scaler: torch.amp.GradScaler,
    ) -> None:
        """Write the checkpoint of ``epoch`` and delete old ones.

        The previous checkpoint and the best epoch of each of the two are kept.
        """
        earlier = [saved for saved in self.saved_epochs() if saved < epoch]
        with self._report_write_errors():
            metadata = {"epoch": epoch, "best": best.epoch, "merit": best.merit, "scaler": scaler.state_dict()}
            checkpoint.save(self.checkpoint_path(epoch), model, optimiser, device, metadata)
        keep = {epoch, best.epoch, *earlier[-1:]} | {self._best_at(saved) for saved in earlier[-1:]}
        for saved in self.saved_epochs():
            if saved not in keep:
                checkpoint.discard(self.checkpoint_path(saved))

    def restore(
        self, model: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device, scaler: torch.amp.GradScaler
    ) -> tuple[int, Best]:
        """Load the newest intact checkpoint, and delete checkpoints and metrics of later epochs.

        Returns:
            The epoch of the checkpoint, and the best epoch up to it.

        Raises:
            RunError: If there is no intact checkpoint, or if it does not fit the model and optimiser.
        """
        epoch, metrics = self.newest_epoch(), self.metrics()
        for later in [saved for saved in self.saved_epochs() if saved > epoch]:
            checkpoint.discard(self.checkpoint_path(later))
        best = self._load(epoch, model, optimiser, device, scaler)
        kept = [line for line in metrics if line.epoch <= epoch]
        if len(kept) < epoch:
            self.log(f"{self.folder / METRICS} has the metrics of {len(kept)} of {epoch} epochs; the others are lost")
        self.write_metrics(kept)
        return epoch, best

    def _load(
        self,
        epoch: int,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        device: torch.device,
        scaler: torch.amp.GradScaler,
    ) -> Best:
        """Load the checkpoint of ``epoch`` and return the best epoch up to it."""
        try:
            metadata = checkpoint.load(self.checkpoint_path(epoch), model, optimiser, device)
            if metadata["scaler"]:  # empty unless the loss is scaled
                scaler.load_state_dict(metadata["scaler"])
            return Best(int(metadata["best"]), tuple(map(float, metadata["merit"])))
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise RunError(f"the checkpoint of epoch {epoch} does not fit {self.folder / CONFIG}: {reason}") from error

    def require_no_metrics(self) -> None:
        """Raise :class:`RunError` if there are metrics of epochs whose checkpoints are lost."""
        if (path := self.folder / METRICS).exists() and path.stat().st_size:
            raise RunError(f"{self.folder} has {METRICS} but no checkpoint; remove {path} to start again")

    def newest_epoch(self) -> int:
        """Return the epoch of the newest intact checkpoint. Damaged checkpoints are logged.

        Raises:
            RunError: If there is no intact checkpoint.
        """
        for epoch in reversed(self.saved_epochs()):
            try:
                checkpoint.verify(self.checkpoint_path(epoch))
            except checkpoint.DamagedCheckpointError as error:
                self.log(f"skipping a damaged checkpoint: {error}")
            else:
                return epoch
        raise RunError(f"{self.folder} has no intact checkpoint; start again in a new folder")

    def best_epoch(self) -> int:
        """Return the saved epoch with the best validation score.

        If its checkpoint is damaged, this is logged and the newest intact epoch is returned.

        Raises:
            RunError: If there is no intact checkpoint.
        """
        newest = self.newest_epoch()
        best = self._best_at(newest)
        try:
            checkpoint.verify(self.checkpoint_path(best))
        except checkpoint.DamagedCheckpointError as error:
            self.log(f"the checkpoint of the best epoch is damaged, using epoch {newest} instead: {error}")
            return newest
        return best

    def saved_epochs(self) -> list[int]:
        """Return the epochs that have a checkpoint, in increasing order."""
        names = ((_CHECKPOINT.fullmatch(path.name), path) for path in (self.folder / "checkpoints").glob("epoch-*"))
        return sorted(int(match[1]) for match, path in names if match and path.is_dir())

    def checkpoint_path(self, epoch: int) -> Path:
        """Return the folder of the checkpoint of ``epoch``."""
        return self.folder / "checkpoints" / f"epoch-{epoch:05d}"

    def _best_at(self, epoch: int) -> int:
        """Return the best epoch up to the checkpoint of ``epoch``."""
        try:
            return int(checkpoint.load_metadata(self.checkpoint_path(epoch))["best"])
        except (checkpoint.DamagedCheckpointError, ValueError, KeyError, TypeError):
            return epoch  # damaged, so there is no other checkpoint to keep for it

    @contextlib.contextmanager
    def _report_write_errors(self) -> Iterator[None]:
        """Convert an OSError to a RunError that names the last intact checkpoint."""
        try:
            yield
        except OSError as error:
            saved = self.saved_epochs()
            last = f"the checkpoint of epoch {saved[-1]} is intact" if saved else "there is no checkpoint yet"
            raise RunError(f"cannot write to {self.folder}: {error.strerror}; training stopped, {last}") from error

    def remove_temporary_files(self) -> None:
        """Delete the temporary files of interrupted writes. Other files in the folder are not touched."""
        for path in (*self.folder.glob(".*"), *(self.folder / "checkpoints").glob(".*")):
            if _TEMPORARY.fullmatch(path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    # ---- records ----------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Return the settings given to :meth:`create`.

        Raises:
            FormatError: If the run was written in another record format.
        """
        return read_json(self.folder / CONFIG)

    def environment(self) -> Environment:
        """Return the software and hardware that the run was created with.

        Raises:
            ValueError: If the file is damaged. The message names it.
        """
        return Environment.read(self.folder / ENVIRONMENT)

    def check_threads(self) -> None:
        """Log a warning if torch uses another number of threads than when the run was created.

        Sums are then added in another order, so that the run does not end with the same bits.
        """
        try:
            created, current = self.environment().threads, torch.get_num_threads()
        except (OSError, ValueError) as error:
            self.log(f"the number of threads that the run was created with is unknown: {error}")
            return
        if created != current:
            self.log(
                f"the run was created with {created} threads and continues with {current}: its results will not be "
                f"bit-identical to those of an uninterrupted run; OMP_NUM_THREADS={created} restores the number"
            )

    def append_metrics(self, metrics: EpochMetrics) -> None:
        """Append the metrics of one epoch and flush them to disk."""
        path = self.folder / METRICS
        line = metrics_file.encode([metrics], metrics_file.last_checksum(path))
        with self._report_write_errors(), path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def write_metrics(self, metrics: Sequence[EpochMetrics]) -> None:
        """Replace the metrics of all epochs."""
        path, lines = self.folder / METRICS, metrics_file.encode(metrics)
        if not path.exists() or path.read_bytes() != lines:
            with self._report_write_errors():
                replace_file(path, lines)

    def metrics(self) -> list[EpochMetrics]:
        """Return the metrics of all epochs.

        An incomplete last line, left by an interrupted write, is ignored.

        Raises:
            FormatError: If the metrics were written in another record format.
            DamagedMetricsError: If a line does not match its checksum. The message names the file and the line.
        """
        return metrics_file.read(self.folder / METRICS)

    def write_energy(self, energy: RunEnergy) -> None:
        """Write the measured energy of all epochs."""
        with self._report_write_errors():
            energy.write(self.folder / ENERGY)

    def energy(self) -> RunEnergy | None:
        """Return the measured energy, or None in runs that did not record it.

        Raises:
            ValueError: If the file is damaged. The message names it.
        """
        path = self.folder / ENERGY
        return RunEnergy.read(path) if path.exists() else None

    def write_result(self, result: Result) -> None:
        """Write the result, which marks the run as finished."""
        with self._report_write_errors():
            result.write(self.folder / RESULT)

    def result(self) -> Result | None:
        """Return the result, or None if the run is not finished."""
        path = self.folder / RESULT
        return Result.read(path) if path.exists() else None

    def copy_records(self, folder: Path) -> list[Path]:
        """Copy config, environment, metrics, energy and result, as far as they exist, and return the copies."""
        paths = [path for name in RECORDS if (path := self.folder / name).exists()]
        return [Path(shutil.copyfile(path, folder / path.name)) for path in paths]


def is_unused(folder: Path) -> bool:
    """Return whether ``folder`` is empty, or contains only what an interrupted :meth:`Run.create` left there."""
    if not folder.is_dir():
        return False
    checkpoints = folder / "checkpoints"
    left = [path for path in folder.iterdir() if path.name != ENVIRONMENT and not _TEMPORARY.fullmatch(path.name)]
    return not left or (left == [checkpoints] and checkpoints.is_dir() and not any(checkpoints.iterdir()))
