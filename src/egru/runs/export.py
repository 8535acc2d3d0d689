"""Write the best epoch of a run as a small folder, without the training state, or as C code."""

from collections.abc import Callable
from pathlib import Path

from egru.files import new_folder
from egru.runs.load import PRETRAINED, best_weights, find_run, load, pretrained, require_new_folder
from egru.runtime.c import export_c as write_c
from egru.runtime.shards import save_shards
from egru.training import Run
from egru.training.run import CONFIG
from egru.types import CWeightFormat, WeightFormat


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
        out: The folder to write. It must be empty or not exist yet. It appears when it is complete.
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
    with new_folder(out, last=CONFIG) as temporary:
        paths = save_shards(best_weights(run)[0], temporary, weights, largest) + run.copy_records(temporary)
    return [out / path.name for path in paths]


def export_c(
    folder: Path,
    out: Path,
    weights: CWeightFormat = "float32",
    name: str = "model",
    log: Callable[[str], None] = print,
) -> list[Path]:
    """Write the network of the best epoch as C code to a new folder; see :func:`egru.runtime.export_c`.

    Args:
        folder: The folder of a run or an export, or the name of a pretrained model. A run requires its data set.
        out: The folder to write. It must be empty or not exist yet. It appears when it is complete.
        weights: Number format: ``"float32"``, ``"int8"`` or ``"integer"``.
        name: Prefix of files, functions and types.
        log: Called with messages for the user, such as a damaged checkpoint.

    Returns:
        The header and the source file.

    Raises:
        RunNotFoundError: If ``folder`` is not a run.
        RunExistsError: If ``out`` is not empty.
        TypeError: If the engine does not support the model.
        ValueError: If the engine does not support an option of the model.
    """
    source, out = find_run(folder)[0], require_new_folder(out)
    is_name = source != Path(folder) and str(folder) in PRETRAINED
    model = pretrained(str(folder)) if is_name else load(source, "cpu", log).model
    with new_folder(out) as temporary:
        paths = write_c(model, temporary, weights, name=name)
    return [out / path.name for path in paths]
