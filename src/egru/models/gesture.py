"""Gesture recognition from event-camera frames, with or without a convolutional head."""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from egru.models.classifier import SequenceClassifier
from egru.types import Readout


class ConvolutionalHead(nn.Sequential):
    """The paper's feature extractor: frames ``(N, channels, S, S)`` to features ``(N, 512)``.

    Channels are averaged, and frames of other sizes are scaled to 128 x 128 by nearest neighbour. Kernels, strides and
    the two groups of the second, fourth and fifth convolution are those of AlexNet. They reproduce the shapes of the
    paper's layer table, its 1.7 million parameters and its 79 million operations per frame.

    Example:
        >>> egru.models.ConvolutionalHead()(torch.rand(3, 2, 32, 32)).shape
        torch.Size([3, 512])
    """

    size = 128
    """Height and width of the frames that the first convolution reads."""
    features = 512
    """Number of output features."""

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
        """Return the features of square frames.

        Raises:
            ValueError: If ``input`` is not ``(N, channels, S, S)``.
        """
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
    readout: Readout = "last",
    **options: Any,
) -> SequenceClassifier:
    """Build a classifier of frame sequences, ``(B, T, *frame)``.

    The defaults are the paper's network: two layers on the flattened pixels.

    Args:
        hidden_size: Number of units per recurrent layer.
        frame: Shape of a frame, channels first.
        classes: Number of classes.
        num_layers: Number of recurrent layers.
        convolutional: If True, a :class:`ConvolutionalHead` computes 512 features per frame for the layers.
        readout: As in :class:`SequenceClassifier`; ``"every"`` returns scores at every step.
        options: Further arguments of :class:`SequenceClassifier`.

    Returns:
        The classifier.

    Example:
        >>> import torch, egru
        >>> model = egru.models.gesture_network(64)
        >>> scores, state = model(torch.zeros(4, 10, 2, 32, 32))
        >>> scores.shape
        torch.Size([4, 11])
    """
    head = ConvolutionalHead() if convolutional else None
    features = math.prod(frame) if head is None else head.features
    return SequenceClassifier(
        features, hidden_size, classes, num_layers=num_layers, readout=readout, head=head, **options
    )
