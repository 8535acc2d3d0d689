"""Record the events of a trained model on sequences of the validation split, for the report page."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from egru.data import Classification, Text
from egru.experiments.config import ClassifierConfig, Config
from egru.layers import Record, event_layers, record
from egru.report import Raster

WORDS = 160
"""Number of words of the validation text that are drawn."""


@torch.no_grad()
def draw_rasters(model: nn.Module, config: Config, data: Classification | Text) -> list[Raster]:
    """Run a model on validation sequences and record the events of all layers.

    Args:
        model: The model, on the CPU in float32.
        config: The config of the model.
        data: The data set. Of labelled sequences, the first one and the first one of another class are drawn. Of a
            text, the first :data:`WORDS` words.

    Returns:
        One raster per sequence; empty if the model has no event layers.
    """
    if not any(event_layers(model)):
        return []
    model.eval()
    if isinstance(data, Text):
        return [_draw_text(model, data)]
    y = data.validation.y
    other_class = (y != y[0]).nonzero()[:1, 0].tolist()
    return [_draw_sequence(model, config, data, index) for index in (0, *other_class)]


def _draw_text(model: nn.Module, data: Text) -> Raster:
    tokens = data.validation[:WORDS, None]
    _, records = _run(model, tokens)
    words = tuple(data.vocabulary[i] for i in tokens[:, 0].tolist())
    inputs = records[0].input[:, 0].float().numpy()
    return _make_raster("Events while reading text", inputs, records, None, "start of the validation text", words)


def _draw_sequence(model: nn.Module, config: Config, data: Classification, index: int) -> Raster:
    x = data.validation.x[index : index + 1]
    x = (x if data.decode is None else data.decode(x)).float()
    scores, records = _run(model, x)
    scores = scores.mean(1) if scores.dim() == 3 else scores
    target, predicted = int(data.validation.y[index]), int(scores.argmax())
    outcome = "classified correctly" if predicted == target else f"classified as {predicted}"
    label = f"validation sequence {index}, class {target}, {outcome}"
    inputs = x[0].flatten(1).numpy()
    return _make_raster(f"Events while reading class {target}", inputs, records, _image(x[0], config), label)


def _run(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Record]]:
    """Return the scores, and a record of every event layer and direction."""
    with record(model) as records:
        output = model(x)
        return output[0] if isinstance(output, tuple) else output, records


def _make_raster(
    title: str,
    inputs: np.ndarray,
    records: list[Record],
    image: np.ndarray | None,
    label: str,
    words: tuple[str, ...] = (),
) -> Raster:
    events = [record.sent()[:, 0].float().numpy() for record in records]
    layers = tuple((record.label, part.shape[1]) for record, part in zip(records, events, strict=True))
    return Raster(title, inputs, np.concatenate(events, 1), image, label, layers, words)


def _image(x: Tensor, config: Config) -> np.ndarray | None:
    """Return the frames with both polarities added, or the image whose pixels were read in order, or None."""
    if x.dim() == 4:
        return x.sum(1).numpy()
    side = math.isqrt(x.numel())
    in_order = isinstance(config, ClassifierConfig) and not config.data.startswith("p")  # "psmnist" is permuted
    if not in_order or side**2 != x.numel():
        return None
    return x.reshape(side, side).numpy()
