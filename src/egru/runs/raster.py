"""What a trained model says while it reads: one sequence of the validation split, every event layer."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from egru.data import Classification, Text
from egru.experiments.config import ClassifierConfig, Config
from egru.layers import Record, event_layers, record
from egru.report import Raster

WORDS = 160
"""Read for a raster, from the beginning of the validation text."""


@torch.no_grad()
def draw_rasters(model: nn.Module, config: Config, data: Classification | Text) -> list[Raster]:
    """Of the first sequence of validation, and of the first of another class; of a text, its beginning.

    Empty where the model has no event layers. ``model`` is run on the CPU, in float32.
    """
    if not any(event_layers(model)):
        return []
    model.eval()
    if isinstance(data, Text):
        tokens = data.validation[:WORDS, None]
        _, records = _watched(model, tokens)
        words = tuple(data.vocabulary[i] for i in tokens[:, 0].tolist())
        read = records[0].input[:, 0].float().numpy()
        return [
            _raster("Events while reading text", read, records, None, "the beginning of the validation text", words)
        ]
    assert isinstance(config, ClassifierConfig)
    y = data.validation.y
    others = (y != y[0]).nonzero()[:1, 0].tolist()
    return [_sequence(model, config, data, index) for index in (0, *others)]


def _sequence(model: nn.Module, config: ClassifierConfig, data: Classification, index: int) -> Raster:
    x = data.validation.x[index : index + 1]
    x = (x if data.decode is None else data.decode(x)).float()
    scores, records = _watched(model, x)
    scores = scores.mean(1) if scores.dim() == 3 else scores
    right, read = int(data.validation.y[index]), int(scores.argmax())
    label = f"validation sequence {index}, class {right}, read as {'the same' if read == right else read}"
    flat = x[0].flatten(1).numpy()
    return _raster(f"Events while reading class {right}", flat, records, _picture(x[0], config), label)


def _watched(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Record]]:
    """Return the scores, and a record of every event layer and direction."""
    with record(model) as records:
        return model(x)[0], records


def _raster(
    title: str,
    read: np.ndarray,
    records: list[Record],
    image: np.ndarray | None,
    label: str,
    words: tuple[str, ...] = (),
) -> Raster:
    events = [record.y[:, 0].float().numpy() for record in records]
    layers = tuple((record.label, part.shape[1]) for record, part in zip(records, events, strict=True))
    return Raster(title, read, np.concatenate(events, 1), image, label, layers, words)


def _picture(x: Tensor, config: ClassifierConfig) -> np.ndarray | None:
    """A film of frames, both polarities together, or the picture whose pixels were read one by one in order."""
    if x.dim() == 4:
        return x.sum(1).numpy()
    side = math.isqrt(x.numel())
    if config.data.startswith("p") or side**2 != x.numel():
        return None
    return x.reshape(side, side).numpy()
