"""Gestures from event-camera frames: recurrent layers on the pixels, or behind a convolutional head."""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from egru.models.classifier import SequenceClassifier


class ConvolutionalHead(nn.Sequential):
    """The paper's feature extractor: frames ``(N, channels, S, S)`` to 512 features.

    Channels are averaged to one; frames of another size than 128 are scaled to it, nearest pixel. Kernels, strides and
    the two groups of the second, fourth and fifth convolution are AlexNet's: they give the shapes of the paper's layer
    table, its 1.7 million parameters and its 79 million operations a frame.
    """

    size = 128
    features = 512

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 64, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2, groups=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(384, 256, 3, padding=1, groups=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(256, 256, 3, padding=1, groups=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(256, self.features),
            nn.ReLU(),
        )

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() != 4 or input.shape[-1] != input.shape[-2]:
            raise ValueError(f"ConvolutionalHead: input must be square frames (N, C, S, S), got {tuple(input.shape)}")
        frames = input.mean(1, keepdim=True)
        if frames.shape[-1] != self.size:
            frames = F.interpolate(frames, (self.size, self.size), mode="nearest")
        return super().forward(frames)


def gesture_network(
    hidden_size: int,
    *,
    frame: tuple[int, ...] = (2, 32, 32),
    classes: int = 11,
    num_layers: int = 2,
    convolutional: bool = False,
    readout: str = "last",
    **options: Any,
) -> SequenceClassifier:
    """A classifier of sequences of frames, ``(B, T, *frame)``: the paper's two layers on the flattened pixels.

    Args:
        hidden_size, num_layers: of the recurrent layers.
        frame: shape of a frame, channels first.
        convolutional: put a :class:`ConvolutionalHead` in front; the layers then read its 512 features.
        readout, options: as in :class:`SequenceClassifier`; "every" gives scores at every step.
    """
    head = ConvolutionalHead() if convolutional else None
    features = math.prod(frame) if head is None else head.features
    return SequenceClassifier(
        features, hidden_size, classes, num_layers=num_layers, readout=readout, head=head, **options
    )
