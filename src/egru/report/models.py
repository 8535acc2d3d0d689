"""A report page of any models, measured with a loss function of the user."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from egru.compress.batches import Loss, evaluation, measure
from egru.layers import Record, event_layers, record
from egru.report.page import write_report
from egru.report.run import Raster, RunReport


def report_models(
    folder: Path | str,
    models: nn.Module | Mapping[str, nn.Module],
    batches: Iterable[Any],
    loss: Loss,
    *,
    accuracy: Callable[[nn.Module, Any], float] | None = None,
    split: Literal["test", "validation"] = "validation",
    title: str = "Event-based and dense models",
    seconds: Mapping[str, float] | None = None,
) -> Path:
    """Measure models on the same batches and write a report page.

    The page shows loss, activity sparsity, operations and estimated energy of every model, the activity of its units,
    and the events of the first sequence. Models run in evaluation mode, and their modes are restored. For runs of
    ``egru train``, use ``egru report``, which also shows training curves.

    Args:
        folder: Folder to write to. It is created if it does not exist.
        models: A model, or several by name. The first model without event layers is the baseline of the others.
        batches: Batches for ``loss``.
        loss: Function of model and batch that runs the model and returns the mean loss over the batch.
        accuracy: Function of model and batch that returns a fraction between 0 and 1. If given, the page compares the
            mean accuracy over the batches instead of the loss.
        split: Which part of the data the batches are, for the labels of the page.
        title: Title of the page.
        seconds: Duration of training by name of the model, if known.

    Returns:
        The path of the page.

    Raises:
        TypeError: If ``models`` is neither a module nor a dict, or ``loss`` does not return a number.
        ValueError: If there are no models or batches, a loss is not finite, an accuracy is not a fraction, or
            ``seconds`` names a model that does not exist.

    Example:
        >>> import tempfile, torch, egru
        >>> gru = torch.nn.GRU(4, 16)
        >>> models = {"GRU": gru, "EGRU": egru.EGRU(4, 16)}
        >>> loss = lambda layer, x: layer(x)[0].square().mean()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = egru.report.report_models(folder, models, [torch.randn(20, 8, 4)], loss)
        ...     page.name
        'index.html'
    """
    if not isinstance(models, nn.Module | Mapping):
        raise TypeError(f"report_models: models must be a module or a dict of modules, got {type(models).__name__}")
    named = {"model": models} if isinstance(models, nn.Module) else dict(models)
    if not named:
        raise ValueError("report_models: models must contain at least one model, got none")
    seconds = seconds or {}
    if unknown := sorted(seconds.keys() - named.keys()):
        raise ValueError(f"report_models: seconds names {unknown[0]!r}, the models are {', '.join(named)}")
    batches = list(batches)
    runs: list[RunReport] = []
    rasters: list[Raster] = []
    notes: list[str] = []
    for name, model in named.items():
        measured = measure(model, batches, loss, "report_models")
        mean_accuracy = None
        if accuracy is not None:
            with evaluation(model):
                mean_accuracy = float(np.mean([float(accuracy(model, batch)) for batch in batches]))
        runs.append(
            RunReport(
                name,
                (),
                mean_accuracy,
                measured.activity,
                seconds.get(name),
                None,
                split=split,
                loss=measured.loss,
            )
        )
        if any(event_layers(model)):
            with evaluation(model), record(model) as records:
                loss(model, batches[0])
            raster = _first_sequence(name, records)
            if raster is None:
                notes.append(f"The events of {name} are not drawn: its layers ran for different numbers of steps.")
            else:
                rasters.append(raster)
    return write_report(Path(folder), title, runs, rasters, command="", config={}, notes=notes)


def _first_sequence(name: str, records: list[Record]) -> Raster | None:
    """Return the events of the first sequence of a batch, or None if the layers did not run once over the same steps.

    A cell that is called once per step has one record per step. These are joined.
    """
    parts: dict[str, list[np.ndarray]] = {}
    inputs: dict[str, list[np.ndarray]] = {}
    for entry in records:
        steps = len(entry.y) if entry.lengths is None else int(entry.lengths[0])
        parts.setdefault(entry.label, []).append(entry.sent()[:steps, 0].float().cpu().numpy())
        inputs.setdefault(entry.label, []).append(entry.input[:steps, 0].float().cpu().numpy())
    events = [np.concatenate(part) for part in parts.values()]
    if len({len(part) for part in events}) != 1:
        return None
    layers = tuple((label, part.shape[1]) for label, part in zip(parts, events, strict=True))
    first = np.concatenate(next(iter(inputs.values())))
    return Raster(f"Events of {name}", first, np.concatenate(events, 1), None, "first sequence of the data", layers)
