"""Write the best epoch of a run as a small folder, without the training state."""

from collections.abc import Callable
from pathlib import Path

from egru.runs.load import require_new_folder
from egru.runtime.shards import save_shards
from egru.training import Run, checkpoint
from egru.types import WeightFormat


def export(
    folder: Path,
    out: Path,
    weights: WeightFormat = "bfloat16",
    largest: int = 16 << 20,
    log: Callable[[str], None] = print,
) -> list[Path]:
    """Write the weights of the best epoch and the records of a run to a new folder.

    The result can be read like a run: by :func:`egru.runs.load`, :func:`egru.runs.evaluate` and
    :func:`egru.runs.report`.

    Args:
        folder: The folder of a run.
        out: The folder to write. It must be empty or not exist yet.
        weights: Number format of the weights: ``"float32"``, ``"bfloat16"`` or ``"int8"``.
        largest: Maximum size of a file, in bytes.
        log: Called with messages for the user, such as a damaged checkpoint.

    Returns:
        The files that were written, weights first.

    Raises:
        RunError: If ``folder`` is not a run or ``out`` is not empty.
    """
    run, out = Run.open(folder, log), require_new_folder(out)
    paths = save_shards(checkpoint.read_weights(run.checkpoint_path(run.best_epoch())), out, weights, largest)
    return paths + run.copy_records(out)
