"""Write the best epoch of a run as a small folder, without the training state, as C code or as an ONNX graph."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from egru.data import Classification, Text
from egru.files import new_folder
from egru.runs.load import PRETRAINED, best_weights, find_run, load, pretrained, require_new_folder
from egru.runtime.c import export_c as write_c
from egru.runtime.onnx_export import export_onnx as write_onnx
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

    Example:
        >>> files = egru.runs.export(Path("runs/digits"), Path("small"), weights="int8")
        >>> scores, activity, epoch = egru.runs.evaluate(Path("small"))
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

    Example:
        >>> [file.name for file in egru.runs.export_c(Path("runs/digits"), Path("firmware"), weights="int8")]
        ['model.h', 'model.c']
    """
    out, model = require_new_folder(out), _load_model(folder, log)[0]
    with new_folder(out) as temporary:
        paths = write_c(model, temporary, weights, name=name)
    return [out / path.name for path in paths]


def export_onnx(folder: Path, out: Path, log: Callable[[str], None] = print) -> list[Path]:
    """Write the network of the best epoch as an ONNX graph to a new folder; see :func:`egru.runtime.export_onnx`.

    Args:
        folder: The folder of a run or an export, or the name of a pretrained model. A run requires its data set.
        out: The folder to write ``model.onnx`` to. It must be empty or not exist yet.
        log: Called with messages for the user, such as a damaged checkpoint.

    Returns:
        The file.

    Raises:
        RunNotFoundError: If ``folder`` is not a run.
        RunExistsError: If ``out`` is not empty.
        ImportError: If onnx or onnxscript is not installed.
        ValueError: If a layer has an option that the graph does not support.

    Example:
        >>> egru.runs.export_onnx(Path("runs/digits"), Path("portable"))  # doctest: +SKIP
    """
    out, (model, data) = require_new_folder(out), _load_model(folder, log)
    example = torch.zeros(2, 784, 1)
    if isinstance(data, Text):
        example = data.validation[:64].reshape(32, 2)
    elif data is not None:
        frames = data.validation.x[:2]
        example = (frames if data.decode is None else data.decode(frames)).float()
    with new_folder(out) as temporary:
        path = write_onnx(model.float().eval(), temporary / "model.onnx", example)
    return [out / path.name]


def _load_model(folder: Path, log: Callable[[str], None]) -> tuple[nn.Module, Classification | Text | None]:
    """Return the model of the best epoch on the CPU, and its data. Pretrained models require no data."""
    source = find_run(folder)[0]
    if source != Path(folder) and str(folder) in PRETRAINED:
        return pretrained(str(folder)), None
    trained = load(source, "cpu", log)
    return trained.model, trained.data
