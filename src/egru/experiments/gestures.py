"""DVS128 Gesture (Table 1 of the paper, its supplement and the ablation study).

The paper's data are ``--data dvs-raw``: slices of 1.7 s in bins of 25 ms. The packed frames, the default, are coarser,
and accuracies on them are not comparable with the paper's. The recipes "dvs" and "dvs-gru" were tuned on the packed
frames; the others are rows of the paper's tables.
"""

from dataclasses import replace
from functools import partial

from egru.events import Surrogate
from egru.experiments.config import ClassifierConfig
from egru.experiments.registry import Paper, add
from egru.layers import Threshold
from egru.types import Cell


def frames(cell: Cell = "egru") -> ClassifierConfig:
    """Return two layers of 512 on the packed frames, tuned by cross-validation (docs/training.md)."""
    common = ClassifierConfig(
        data="dvs",
        cell=cell,
        hidden=512,
        layers=2,
        readout="mean",
        smooth=True,
        centre=True,
        input_dropout=0.3,
        dropout=0.3,
        epochs=40,
        batch=32,
        evaluation_batch=256,
        optimiser="adamw",
        schedule="cosine",
        constant_share=0.0,
        final_factor=0.0,
        clip=1.0,
    )
    if cell == "gru":
        return replace(common, learning_rate=2e-3, weight_decay=0.05, label_smoothing=0.2)
    return replace(
        common,
        learning_rate=1e-3,
        weight_decay=0.5,
        label_smoothing=0.1,
        normalise=True,
        output_dropout=0.3,
        dropconnect=0.3,
        threshold=Threshold(mean=-2.0),
        surrogate=Surrogate(width=0.6, height=0.5),
        rate_loss=0.03,
    )


def dvs(hidden: int = 512, cell: Cell = "egru", augment: bool = False) -> ClassifierConfig:
    """Return the paper's two layers on 32 by 32 pixels.

    The paper does not name the epochs and the readout. We use a trace for events, which learns several times faster
    than the last output, and the last output for dense layers.
    """
    events = cell == "egru"
    return ClassifierConfig(
        data="dvs",
        cell=cell,
        hidden=hidden,
        layers=2,
        readout="trace" if events else "last",
        epochs=1000 if augment else 300,
        batch=256,
        evaluation_batch=256,
        learning_rate=1e-3,
        schedule="step",
        step_epochs=100,
        step_factor=0.8,
        augment=augment,
        threshold=Threshold("abs", mean=0.0, std=1.0),
        rate_loss=0.01 if events else 0.0,
        state_loss=0.05 if events else 0.0,
    )


def convolutional(hidden: int, cell: Cell = "egru", **changes: object) -> ClassifierConfig:
    """Return recurrent layers after the convolutional network, with augmentation."""
    return replace(dvs(hidden, cell, augment=True), convolutional=True, batch=40, **changes)  # pyright: ignore


_CNN_256 = {"layers": 2, "dropconnect": 0.4}
_CNN_795 = {
    "layers": 1,
    "step_factor": 0.874,
    "step_epochs": 56,
    "output_dropout": 0.632,
    "dropconnect": 0.081,
    "zoneout": 0.2,
    "surrogate": Surrogate(width=0.588),
    "threshold": Threshold("abs", mean=-0.246),
}
_CNN_136 = {"layers": 1, "step_factor": 0.89, "step_epochs": 70, "output_dropout": 0.239, "dropconnect": 0.074}


def scalar_threshold() -> ClassifierConfig:
    """Return the ablation with one threshold per layer."""
    return replace(dvs(1024), threshold=Threshold("abs", per_unit=False))


_512 = Paper(88.0, None, 83.8, 46.8, "5.5M", "0.98M", "over 5 runs: accuracy 86.0 ± 1.2 %, activity sparsity 76.1 %")
add("dvs", frames, Paper(), "EGRU 512, two layers, minutes on a CPU")
add("dvs-gru", partial(frames, "gru"), Paper(), "GRU 512, two layers, tuned separately")
add("dvs-egru-512", dvs, _512, "EGRU 512, two layers")
add("dvs-gru-512", partial(dvs, 512, "gru"), Paper(), "GRU 512, two layers")
add(
    "dvs-egru-1024",
    partial(dvs, 1024),
    Paper(90.2, None, 82.5, 54.4, "15.7M", "3.1M", "over 5 runs: accuracy 87.7 ± 2.1 %"),
    "EGRU 1024, two layers",
)
add(
    "dvs-gru-1024",
    partial(dvs, 1024, "gru"),
    Paper(88.1, None, 0.0, None, "15.7M", "10.6M"),
    "GRU 1024, two layers",
)
add(
    "dvs-lstm-867",
    partial(dvs, 867, "lstm"),
    Paper(87.9, None, 0.0, None, "16.3M", "14.2M"),
    "LSTM 867, two layers",
)
add(
    "dvs-egru-1024-da",
    partial(dvs, 1024, augment=True),
    Paper(97.1, None, 78.8, 58.2, "15.7M", "3.2M"),
    "EGRU 1024, two layers, with augmentation",
)
add(
    "dvs-gru-1024-da",
    partial(dvs, 1024, "gru", True),
    Paper(95.1, None, 0.0, None, "15.7M", "10.6M"),
    "GRU 1024, two layers, with augmentation",
)
add(
    "dvs-cnn-gru-136-da",
    partial(convolutional, 136, "gru", **_CNN_136),
    Paper(97.4, None, 0.0, None, "2.1M", "79.1M"),
    "CNN + GRU 136 with augmentation",
)
add(
    "dvs-cnn-egru-256-da",
    partial(convolutional, 256, **_CNN_256),
    Paper(96.8, None, 73.4, 55.3, "2.7M", "79.5M"),
    "CNN + EGRU 256 with augmentation",
)
add(
    "dvs-cnn-egru-795-da",
    partial(convolutional, 795, **_CNN_795),
    Paper(97.8, None, 76.4, 72.3, "4.8M", "80.6M"),
    "CNN + EGRU 795 with augmentation",
)
add("dvs-ablation-full", partial(dvs, 1024), Paper(90.2, None, 82.5), "the full EGRU 1024")
add(
    "dvs-ablation-unregularised",
    lambda: replace(dvs(1024), rate_loss=0.0, state_loss=0.0),
    Paper(89.3, None, 76.5),
    "no activity regularisation",
)
add("dvs-ablation-scalar", scalar_threshold, Paper(88.3, None, 90.8), "one threshold per layer")
add(
    "dvs-ablation-hard",
    lambda: replace(dvs(1024), reset="hard"),
    Paper(87.2, None, 90.0),
    "an event sets the state to zero",
)
add(
    "dvs-ablation-none",
    lambda: replace(dvs(1024), reset="none"),
    Paper(88.9, None, 80.7),
    "an event does not reset the state",
)
