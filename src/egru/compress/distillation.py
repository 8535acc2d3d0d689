"""Distillation: train a sparse model to return the outputs and states of the dense model it was made from."""

import contextlib
from collections.abc import Callable
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from egru.compress.batches import evaluation
from egru.layers import EventRNN, Record


class Distillation:
    """Compares a model with a teacher inside a context: outputs of the model, and states of the recurrent layers.

    On every call of the model, the teacher runs with the same arguments, in evaluation mode and without gradients.
    ``value`` is ``outputs * output_loss + states * state_loss``, summed over the calls. Entering the context sets it to
    zero. States are those of the last layer of each recurrent module, before the event mechanism; their squared
    difference is divided by the variance of the teacher's states.

    Args:
        model: Model with event layers, such as a result of :func:`egru.convert`.
        teacher: The model it was converted from. Recurrent layers are matched by their names.
        outputs: Weight of the difference of outputs. Default: 1.
        states: Weight of the difference of states. Default: 0.
        compare: How outputs are compared: ``"classes"`` for scores of classes (Kullback-Leibler divergence),
            ``"values"`` for other outputs (squared difference, relative to the teacher's variance).
            Default: ``"classes"``.
        dim: Dimension of the classes, such as 1 for outputs ``(B, classes, T)``. If None, the last one; outputs of
            three or more dimensions whose last dimension appears to be time are then refused.
        temperature: Divides the scores of classes. Default: 2.

    Raises:
        TypeError: If the teacher is not a module.
        ValueError: If an argument is out of range, the teacher is the model, or it has no layer of the same name (with
            ``states``: and size).

    Example:
        >>> import torch, egru
        >>> teacher = torch.nn.GRU(4, 8)
        >>> model = egru.convert(teacher)
        >>> with egru.compress.Distillation(model, teacher, compare="values") as distillation:
        ...     _ = model(torch.randn(5, 2, 4))
        >>> bool(distillation.value < 1e-6)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        *,
        outputs: float = 1.0,
        states: float = 0.0,
        compare: Literal["classes", "values"] = "classes",
        dim: int | None = None,
        temperature: float = 2.0,
    ) -> None:
        if compare not in ("classes", "values"):
            raise ValueError(f"Distillation: compare must be one of classes, values; got {compare!r}")
        if not (outputs >= 0 and states >= 0 and temperature > 0):
            raise ValueError(
                "Distillation: weights must not be negative and temperature must be positive, got "
                f"outputs={outputs!r}, states={states!r}, temperature={temperature!r}"
            )
        if compare == "values" and dim is not None:
            raise ValueError(f'Distillation: dim requires compare="classes", got dim={dim!r} and compare="values"')
        if not isinstance(teacher, nn.Module):
            raise TypeError(f"Distillation: teacher must be a torch.nn.Module, got {type(teacher).__name__}")
        if teacher is model:
            raise ValueError("Distillation: teacher must be another module than the model, such as the dense original")
        self.model, self.teacher = model, teacher
        self.outputs, self.states, self.compare, self.temperature = outputs, states, compare, temperature
        self.dim = dim
        self.value: Tensor | float = 0.0
        modules = dict(teacher.named_modules())
        self._pairs: list[tuple[EventRNN, nn.Module]] = []
        for name, layer in model.named_modules():
            if isinstance(layer, EventRNN):
                dense = modules.get(name)
                if not isinstance(dense, nn.GRU | nn.LSTM | nn.GRUCell | nn.LSTMCell | EventRNN):
                    raise ValueError(f"Distillation: the teacher must have a recurrent layer {name!r}, like the model")
                if states and dense.hidden_size != layer.hidden_size:
                    raise ValueError(
                        f"Distillation: states requires layers of equal size, {name!r} has {layer.hidden_size} units "
                        f"in the model and {dense.hidden_size} in the teacher"
                    )
                self._pairs.append((layer, dense))
        if not self._pairs:
            raise ValueError(f"Distillation: the model must have an event layer, got {type(model).__name__}")
        self._states: dict[nn.Module, list[Tensor]] = {}
        self._removers: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        if self._removers:
            raise RuntimeError("Distillation: already active; leave the context before entering it again")
        self.value = 0.0
        self._removers.append(self.model.register_forward_hook(self._after_model, with_kwargs=True).remove)
        if self.states:
            for layer, _ in self._pairs:
                self._removers.append(layer.observe(self._observe))
        return self

    def __exit__(self, *exception: object) -> None:
        while self._removers:
            self._removers.pop()()
        self._states.clear()

    def _observe(self, record: Record) -> None:
        if record.direction.layer == record.layer.num_layers - 1:
            self._states.setdefault(record.layer, []).append(record.c)

    def _after_model(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        recorded: list[tuple[nn.Module, Any]] = []
        with contextlib.ExitStack() as hooks:
            for layer, dense in self._pairs:
                hooks.callback(
                    dense.register_forward_hook(lambda _, __, out, layer=layer: recorded.append((layer, out))).remove
                )
            with evaluation(self.teacher):
                expected = self.teacher(*args, **kwargs)
        if self.outputs:
            first, target = _first(output), _first(expected)
            if self.compare == "classes":
                self._check_classes(target, recorded)
            self.value = self.value + self.outputs * self._compare_outputs(first, target)
        for layer, out in recorded if self.states else ():
            states = self._states.get(layer, [])
            count = layer.num_directions if isinstance(layer, EventRNN) else 1
            own, self._states[layer] = torch.cat(states[:count], -1), states[count:]
            self.value = self.value + self.states * _relative_error(own, _time_first(layer, out, own))
        self._states.clear()

    def _check_classes(self, scores: Tensor, recorded: list[tuple[Any, Any]]) -> None:
        """Raise an error if the dimension of the classes contains a single class, or appears to be time."""
        dim, shape = -1 if self.dim is None else self.dim, tuple(scores.shape)
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"Distillation: dim={dim} is out of range for outputs of shape {shape}")
        if shape[dim] < 2:
            raise ValueError(
                f'Distillation: compare="classes" requires at least two scores in dimension {dim}, got outputs of '
                f'shape {shape}; use compare="values"'
            )
        if self.dim is not None or len(shape) < 3:
            return
        for layer, _ in recorded:
            steps = _steps(layer, [out for other, out in recorded if other is layer])
            if shape[-1] == steps and steps not in shape[:-1]:
                raise ValueError(
                    f"Distillation: the last dimension of the outputs, of shape {shape}, appears to be time; pass "
                    "Distillation(..., dim=1), the dimension of the classes, or dim=-1 if it is the last"
                )

    def _compare_outputs(self, output: Tensor, expected: Tensor) -> Tensor:
        if self.compare == "values":
            return _relative_error(output, expected)
        dim, T = -1 if self.dim is None else self.dim, self.temperature
        scores, targets = (values.movedim(dim, -1).flatten(0, -2) / T for values in (output, expected))
        return T**2 * F.kl_div(scores.log_softmax(-1), targets.log_softmax(-1), reduction="batchmean", log_target=True)


def _first(output: Any) -> Tensor:
    """Return the first tensor of an output."""
    while isinstance(output, tuple | list):
        output = output[0]
    if not isinstance(output, Tensor):
        raise TypeError(f"Distillation: the model must return a tensor first, got {type(output).__name__}")
    return output


def _sequence(output: Any) -> Any:
    """Return the output of a recurrent layer without its state."""
    return output[0] if isinstance(output, tuple) and not isinstance(output, PackedSequence) else output


def _steps(layer: Any, outputs: list[Any]) -> int:
    """Return the number of steps of a recurrent layer, given the outputs of all its calls."""
    sequence = _sequence(outputs[0])
    if isinstance(sequence, PackedSequence):
        return len(sequence.batch_sizes)
    return sequence.shape[1 if layer.batch_first else 0] if sequence.dim() == 3 else len(outputs)  # a cell


def _time_first(layer: Any, output: Any, like: Tensor) -> Tensor:
    """Return the outputs of the teacher's layer in the arrangement of the recorded states, ``(T, B, features)``."""
    sequence = _sequence(output)
    if isinstance(sequence, PackedSequence):
        sequence, _ = pad_packed_sequence(sequence)
    elif sequence.dim() == 3 and layer.batch_first:
        sequence = sequence.transpose(0, 1)
    return sequence.as_subclass(Tensor).reshape(like.shape)


def _relative_error(values: Tensor, expected: Tensor) -> Tensor:
    """Return the mean squared difference, relative to the variance of the expected values."""
    expected = expected.detach()
    return (values - expected).square().mean() / expected.var(correction=0).clamp(min=1e-12)
