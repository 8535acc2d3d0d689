"""Finding, labelling and recording the event layers of a model."""

import contextlib
from collections.abc import Generator, Iterable, Iterator
from typing import cast

from torch import nn

from egru.layers.stack import EventRNN
from egru.layers.structure import Direction, Record, class_label, direction_label


def labelled_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over a model and its submodules with a label for each.

    The label is the module's name in the model, without the ``_orig_mod`` that ``torch.compile`` inserts. The model
    itself has no name; its label is the name of its class in lower case.

    Args:
        model: Any module.

    Yields:
        Pairs of label and module, in the order of ``model.named_modules()``.

    Example:
        >>> model = torch.nn.ModuleDict({"rnn": egru.EGRU(4, 8), "readout": torch.nn.Linear(8, 2)})
        >>> [label for label, module in egru.layers.labelled_modules(model)]
        ['moduledict', 'rnn', 'readout']
    """
    for name, module in cast(Iterable[tuple[str, nn.Module]], model.named_modules()):
        parts = [part for part in name.split(".") if part not in ("", "_orig_mod")]
        yield ".".join(parts) or class_label(module), module


def event_layers(model: nn.Module) -> Iterator[tuple[str, EventRNN]]:
    """Iterate over the event layers of a model, the model itself included.

    Args:
        model: Any module.

    Yields:
        Pairs of label (see :func:`labelled_modules`) and layer.

    Example:
        >>> import torch, egru
        >>> from egru.layers import event_layers
        >>> model = torch.nn.ModuleDict({"rnn": egru.EGRU(3, 4), "readout": torch.nn.Linear(4, 2)})
        >>> [(label, layer.hidden_size) for label, layer in event_layers(model)]
        [('rnn', 4)]
    """
    for label, module in labelled_modules(model):
        if isinstance(module, EventRNN):
            yield label, module


def event_directions(model: nn.Module) -> Iterator[tuple[str, EventRNN, Direction]]:
    """Iterate over every direction of every event layer of a model.

    Args:
        model: Any module.

    Yields:
        Triples of label, layer and direction. The label is the layer's label; a layer with several directions
        appends their names: ``"rnn.l0"``, ``"rnn.l0_reverse"``, ….

    Example:
        >>> model = torch.nn.ModuleDict({"rnn": egru.EGRU(4, 8, bidirectional=True)})
        >>> [label for label, layer, direction in egru.layers.event_directions(model)]
        ['rnn.l0', 'rnn.l0_reverse']
    """
    for label, layer in event_layers(model):
        directions = layer.directions()
        for direction in directions:
            yield direction_label(label, direction.name, len(directions)), layer, direction


def is_cell(layer: EventRNN) -> bool:
    """Return whether a layer computes one step per call."""
    return layer.directions()[0].name == "cell"


@contextlib.contextmanager
def record(model: nn.Module) -> Generator[list[Record], None, None]:
    """Record the forward passes of all event layers of a model.

    Args:
        model: Any module.

    Yields:
        A list that receives one :class:`Record` per direction for each forward pass inside the context.

    Example:
        >>> import torch, egru
        >>> from egru.layers import record
        >>> model = torch.nn.Sequential(egru.EGRU(3, 4, num_layers=2))
        >>> with record(model) as records:
        ...     _ = model(torch.randn(5, 1, 3))
        >>> [(r.label, tuple(r.y.shape)) for r in records]
        [('0.l0', (5, 1, 4)), ('0.l1', (5, 1, 4))]
    """
    records: list[Record] = []
    with contextlib.ExitStack() as observers:
        for label, layer in event_layers(model):
            observers.callback(layer.observe(records.append, label))
        yield records
