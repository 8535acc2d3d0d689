"""Images read one pixel at a time: scikit-learn's digits, sequential and permuted MNIST (Table 2, supplement)."""

from dataclasses import replace
from functools import partial

from egru.events import Surrogate
from egru.experiments.config import ClassifierConfig
from egru.experiments.registry import Paper, add, recipe
from egru.layers import Threshold
from egru.types import Cell, LabelledData


@recipe("digits", note="our recipe, needs no download")
def digits() -> ClassifierConfig:
    """EGRU 128."""
    return ClassifierConfig(
        data="digits",
        hidden=128,
        epochs=100,
        batch=32,
        learning_rate=1e-2,
        schedule="one-cycle",
        clip=1.0,
        label_smoothing=0.1,
        trace=200.0,
        normalise=True,
        uniform_gates=True,
        reset="none",
        reset_gate="after",
        zoneout=0.1,
        threshold=Threshold(mean=-4.0),
        surrogate=Surrogate(width=0.3, height=0.5),
    )


@recipe("digits-gru", note="our recipe")
def digits_gru() -> ClassifierConfig:
    """GRU 128, trained like digits."""
    return replace(digits(), cell="gru", uniform_gates=False, zoneout=0.0)


def smnist(hidden: int = 590, cell: Cell = "egru") -> ClassifierConfig:
    """Return the paper's config for sequential MNIST."""
    return ClassifierConfig(
        data="smnist",
        cell=cell,
        hidden=hidden,
        epochs=200,
        batch=500,
        learning_rate=1e-3,
        clip=0.25,
        trace=10.0,
        threshold=Threshold("sigmoid", mean=0.0, std=1.0),
    )


def psmnist(hidden: int = 590, cell: Cell = "egru") -> ClassifierConfig:
    """Return the paper's config for permuted sequential MNIST: more epochs, smaller batches, DropConnect."""
    return replace(smnist(hidden, cell), data="psmnist", batch=300, epochs=700, dropconnect=0.4)


def cornn(data: LabelledData) -> ClassifierConfig:
    """Return a coRNN 256 with the settings of its authors' code (Rusch and Mishra, ICLR 2021; docs/training.md)."""
    rate, oscillators = {"smnist": (2.1e-3, (0.042, 2.7, 4.7)), "psmnist": (5.4e-3, (0.076, 0.4, 8.0))}[data]
    return ClassifierConfig(
        data=data,
        cell="cornn",
        hidden=256,
        epochs=120,
        batch=120,
        readout="last",
        learning_rate=rate,
        schedule="step",
        step_epochs=100,
        step_factor=0.1,
        oscillators=oscillators,
    )


_MAIN = Paper(98.3, None, 72.1, 27.4, "1.048M", "226K", "over 4 runs: accuracy 95.5 ± 1.6 %, activity sparsity 80.5 %")
_PERMUTED = Paper(95.1, None, 82.0, 8.4, "1.048M", "195K")
add("smnist", smnist, _MAIN, "same as smnist-egru-590")
add("smnist-egru-590", smnist, _MAIN, "EGRU 590")
add(
    "smnist-egru-512",
    partial(smnist, 512),
    Paper(87.2, None, 82.1, 28.7, "790K", "147K"),
    "EGRU 512",
)
add(
    "smnist-gru-590",
    partial(smnist, 590, "gru"),
    Paper(98.8, None, None, None, "1.049M", "1.054M"),
    "GRU 590",
)
add(
    "smnist-gru-512",
    partial(smnist, 512, "gru"),
    Paper(98.6, None, None, None, "791K", "795K"),
    "GRU 512",
)
add(
    "smnist-cornn-256",
    partial(cornn, "smnist"),
    Paper(99.4, None, None, None, "134K", "262K"),
    "coRNN 256",
)
add("psmnist", psmnist, _PERMUTED, "same as psmnist-egru-590")
add("psmnist-egru-590", psmnist, _PERMUTED, "EGRU 590")
add("psmnist-egru-512", partial(psmnist, 512), Paper(), "EGRU 512")
add("psmnist-gru-590", partial(psmnist, 590, "gru"), Paper(), "GRU 590")
add(
    "psmnist-cornn-256",
    partial(cornn, "psmnist"),
    Paper(97.3, None, None, None, "134K", "262K"),
    "coRNN 256",
)


@recipe("smnist-stable", note="our recipe, stable gradients over 784 steps (docs/smnist-study.md)")
def stable() -> ClassifierConfig:
    """EGRU 590 with centred pixels, no reset and a normalised readout."""
    return replace(
        smnist(),
        epochs=36,
        learning_rate=1e-2,
        schedule="one-cycle",
        clip=1.0,
        trace=800.0,
        normalise=True,
        centre=True,
        input_scale=7.5,
        uniform_gates=True,
        reset="none",
        threshold=Threshold(mean=-4.0),
        surrogate=Surrogate(width=0.3, height=0.5),
        rate_loss=1.0,
    )


@recipe("smnist-stable-gru", note="our recipe")
def stable_gru() -> ClassifierConfig:
    """GRU 590, trained like smnist-stable, with input weights of the same size."""
    return replace(stable(), cell="gru", input_scale=18.0, rate_loss=0.0)


@recipe("psmnist-stable", note="our recipe, stable gradients over 784 steps (docs/smnist-study.md)")
def permuted_stable() -> ClassifierConfig:
    """EGRU 590 with the settings of smnist-stable."""
    return replace(stable(), data="psmnist", rate_loss=0.3)


def scaling(hidden: int) -> ClassifierConfig:
    """Return a config of the scaling study: images of 14 by 14 pixels."""
    return replace(smnist(hidden), side=14)


SIZES = (64, 128, 256, 384, 512, 640)
"""Units in the scaling study: a tenfold range as in the paper, whose figure does not name the sizes."""
for _hidden in SIZES:
    add(
        f"smnist14-egru-{_hidden}",
        partial(scaling, _hidden),
        Paper(note="a curve in the paper: with ten times the units, training converges five times faster"),
        f"EGRU {_hidden}",
    )
