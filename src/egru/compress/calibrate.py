"""Choice of thresholds on a few sequences, without training."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from egru.compress.batches import (
    Loss,
    Measurement,
    call,
    check_batches,
    check_loss,
    check_number,
    evaluation,
    measure,
)
from egru.compress.ranges import measure_ranges
from egru.compress.thresholds import raise_thresholds, restored_thresholds
from egru.layers import event_directions, event_layers

LEVELS = tuple(2 ** (exponent / 6) for exponent in range(-54, 13))
"""Thresholds that the search tries, relative to the range of a unit or layer: 0.002 to 4, 12 % apart."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Result of :func:`calibrate`.

    Attributes:
        before: Loss and activity with the original thresholds.
        after: Loss and activity with the chosen thresholds.
        levels: Chosen thresholds per layer and direction, relative to the range of each unit or layer; 0 for unchanged.
        floors: Chosen thresholds per layer and direction, one value per unit.
        trials: Number of thresholds that were tried.
    """

    before: Measurement
    after: Measurement
    levels: tuple[float, ...]
    floors: tuple[Tensor, ...]
    trials: int

    def __str__(self) -> str:
        return f"before: {self.before}\nafter:  {self.after}"


def calibrate(
    model: nn.Module,
    sequences: Iterable[Any],
    within: float = 0.1,
    *,
    loss: Loss | None = None,
    per: Literal["unit", "layer"] = "unit",
    log: Callable[[str], None] | None = None,
) -> Calibration:
    """Raise the thresholds of a model as far as a few sequences allow, in place. Nothing is trained.

    A threshold is a level times the range of its unit: the standard deviation of its state over the sequences, or its
    root mean square if events are not changes. The search finds the highest common level of all layers, then raises
    the levels of single layers, from the last to the first. Thresholds are never lowered.

    Args:
        model: Model with at least one event layer, for example a result of :func:`egru.convert`.
        sequences: Batches of inputs: tensors, or tuples of arguments of the model. With ``loss``, batches for it.
        within: Accepted change. Without ``loss``, the root mean square difference of an output, relative to its root
            mean square; it holds for every floating-point output of the model except for states of its recurrent
            layers. With ``loss``, its increase. Default: 0.1.
        loss: Function of model and batch that returns a number to keep small, such as a loss or ``100 - accuracy``. If
            None, outputs are compared with those of the model before.
        per: Whether thresholds are scaled to the range of every ``"unit"``, or to the mean range of each ``"layer"``.
            Default: ``"unit"``.
        log: Called with one line per trial, for example ``print``. If None, nothing is reported.

    Returns:
        Loss and activity before and after. Without ``loss``, the loss is the largest difference of an output.

    Raises:
        TypeError: If an argument has the wrong type, or the model returns nothing to compare.
        ValueError: If there is no event layer, no sequence, ``within`` is negative, or an event layer does not run.

    Example:
        >>> import torch, egru
        >>> layer = egru.convert(torch.nn.GRU(4, 32))
        >>> result = egru.calibrate(layer, [torch.randn(50, 8, 4)], within=0.1)
        >>> result.after.loss <= 0.1 and result.after.events < 0.9
        True
    """
    check_number(within, "within", "calibrate")
    if not within >= 0:
        raise ValueError(f"calibrate: within must not be negative, got {within!r}")
    if per not in ("unit", "layer"):
        raise ValueError(f"calibrate: per must be one of unit, layer; got {per!r}")
    if not any(True for _ in event_directions(model)):
        raise ValueError(f"calibrate: the model must have an event layer, got {type(model).__name__}")
    check_batches(sequences, "sequences", "calibrate")
    batches = list(sequences)
    if not batches:
        raise ValueError("calibrate: sequences must contain at least one batch, got none")
    relative = loss is None
    if loss is None:
        loss = _difference_from(model, batches)
        ranges = measure_ranges(model, lambda: [call(model, batch, "calibrate") for batch in batches])
    else:
        check_loss(loss, "calibrate")
        function = loss
        ranges = measure_ranges(model, lambda: [function(model, batch) for batch in batches])
    if per == "layer":
        ranges = [torch.full_like(values, values.mean().item()) for values in ranges]
    trials: dict[tuple[int, ...], Measurement] = {}

    def floors(levels: Sequence[int]) -> list[Tensor]:
        return [LEVELS[level] * values for level, values in zip(levels, ranges, strict=True)]

    def attempt(levels: tuple[int, ...]) -> Measurement:
        if levels not in trials:
            with restored_thresholds(model):
                raise_thresholds(model, floors(levels))
                trials[levels] = measure(model, batches, loss, "calibrate")
            if log is not None:
                verdict = "accepted" if trials[levels].loss <= limit else f"above the limit of {limit:.4f}"
                log(f"trial {len(trials)}: {trials[levels]}: {verdict}")
        return trials[levels]

    before = measure(model, batches, loss, "calibrate")
    limit = before.loss + within
    levels = search(attempt, len(ranges), limit)
    if levels is None:
        if within > 0:
            _warn(
                f"no threshold keeps the change within {within:g}, so thresholds are unchanged; allow more, or "
                "fine-tune with egru.sparsify"
            )
        unchanged = tuple(theta.detach().clone() for theta in _thresholds(model))
        return Calibration(before, before, (0.0,) * len(ranges), unchanged, len(trials))
    raise_thresholds(model, floors(levels))
    chosen = tuple(theta.detach().clone() for theta in _thresholds(model))
    if before.events > 0 and trials[levels].events == 0:
        _warn(f"within={within:g} allows thresholds that leave no events at all; pass a smaller value")
    elif relative and within >= 1:
        _warn(f"within={within:g} accepts outputs of zeros, whose difference is 1; pass a smaller value, such as 0.1")
    return Calibration(before, trials[levels], tuple(LEVELS[i] for i in levels), chosen, len(trials))


def _warn(message: str) -> None:
    warnings.warn(f"calibrate: {message}", stacklevel=3)


def search(attempt: Callable[[tuple[int, ...]], Measurement], layers: int, limit: float) -> tuple[int, ...] | None:
    """Return the highest levels whose loss is at most ``limit``, or None if the lowest level exceeds it.

    First a bisection over one level for all layers, then single levels are raised from the last layer to the first, as
    long as this saves operations.

    Args:
        attempt: Measures the model with one index into :data:`LEVELS` per layer.
        layers: Number of layers and directions.
        limit: Largest accepted loss.
    """
    low, high = -1, len(LEVELS)  # the loss at `low` is accepted, that at `high` is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if attempt((middle,) * layers).loss <= limit else (low, middle)
    if low < 0:
        return None
    best = (low,) * layers
    if layers == 1:
        return best
    for layer in reversed(range(layers)):
        while best[layer] + 1 < len(LEVELS):
            higher = (*best[:layer], best[layer] + 1, *best[layer + 1 :])
            trial = attempt(higher)
            if trial.loss > limit or trial.activity.forward_macs >= attempt(best).activity.forward_macs:
                break
            best = higher
    return best


def _thresholds(model: nn.Module) -> list[Tensor]:
    return [layer.weights(direction).theta for _, layer, direction in event_directions(model)]


def _difference_from(model: nn.Module, batches: Sequence[Any]) -> Loss:
    """Return a loss: the largest difference of a model's outputs from those that ``model`` has now."""
    with evaluation(model):
        references = {id(batch): _outputs(model, batch) for batch in batches}

    def difference(model: nn.Module, batch: Any) -> Tensor:
        pairs = zip(_outputs(model, batch), references[id(batch)], strict=True)
        return torch.tensor(max(_relative_error(*pair) for pair in pairs), dtype=torch.float64)

    return difference


def _relative_error(values: Tensor, expected: Tensor) -> float:
    """Return the root mean square difference, relative to the root mean square of the expected values."""
    error = (values - expected).square().mean()
    return (error / expected.square().mean().clamp(min=torch.finfo(error.dtype).tiny)).sqrt().item()


def _outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """Run a model and return its floating-point outputs, without the states of its event layers.

    The first output is always returned: it may be the state of a cell.
    """
    states: list[Any] = []

    def observe(layer: nn.Module, arguments: Any, output: Any) -> None:
        states.extend(_pytree.tree_leaves(output[1] if isinstance(output, tuple) else output))

    with contextlib.ExitStack() as hooks:
        for _, layer in event_layers(model):
            hooks.callback(layer.register_forward_hook(observe).remove)
        first, *others = _pytree.tree_leaves(call(model, batch, "calibrate"))
    outputs = [first, *(value for value in others if not any(value is state for state in states))]
    for value in outputs:
        if not isinstance(value, Tensor | int | str | None):
            raise TypeError(f"calibrate: the model must return tensors, got {type(value).__name__}; pass loss")
    compared = [value for value in outputs if isinstance(value, Tensor) and value.is_floating_point() and value.numel()]
    if not compared:
        got = first.dtype if isinstance(first, Tensor) else type(first).__name__
        raise TypeError(f"calibrate: the model must return floating-point outputs, got {got}; pass loss")
    return [value.detach().clone() for value in compared]
