"""Write the best epoch of a run as a small folder, without the training state."""

from collections.abc import Callable
from pathlib import Path

from egru.runs.load import best_weights, find_run, require_new_folder
from egru.runtime.shards import save_shards
from egru.training import Run
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
        folder: The folder of a run or an export, or the name of a pretrained model.
        out: The folder to write. It must be empty or not exist yet.
        weights: Number format of the weights: ``"float32"``, ``"bfloat16"`` or ``"int8"``.
        largest: Maximum size of a file, in bytes.
        log: Called with messages for the user, such as a damaged checkpoint.

    Returns:
        The files that were written, weights first.

    Raises:
        RunNotFoundError: If ``folder`` is not a run.
        RunExistsError: If ``out`` is not empty.
    """
    run, out = Run.open(find_run(folder)[0], log), require_new_folder(out)
    paths = save_shards(best_weights(run)[0], out, weights, largest)
    return paths + run.copy_records(out)
