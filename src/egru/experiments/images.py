"""Images read one pixel at a time: scikit-learn's digits, sequential and permuted MNIST (Tables 2 and S5)."""

import itertools
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


def paper_settings(hidden: int = 590, cell: Cell = "egru") -> ClassifierConfig:
    """Return the paper's config for sequential MNIST. Its gradients explode (docs/results/smnist-study.md)."""
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


def permuted_paper_settings(hidden: int = 590, cell: Cell = "egru") -> ClassifierConfig:
    """Return the paper's config for permuted sequential MNIST: more epochs, smaller batches, DropConnect."""
    return replace(paper_settings(hidden, cell), data="psmnist", batch=300, epochs=700, dropconnect=0.4)


def cornn(data: LabelledData) -> ClassifierConfig:
    """Return a coRNN 256 with its authors' settings (Rusch and Mishra, ICLR 2021; docs/guides/training.md)."""
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


@recipe("smnist", note="our recipe, stable gradients over 784 steps (docs/results/smnist-study.md)")
def smnist() -> ClassifierConfig:
    """EGRU 590 with centred pixels, no reset and a normalised readout."""
    return replace(
        paper_settings(),
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
        rate_loss=0.3,
    )


@recipe("smnist-gru", note="our recipe")
def smnist_gru() -> ClassifierConfig:
    """GRU 590, trained like smnist, with input weights of the same size."""
    return replace(smnist(), cell="gru", input_scale=18.0, rate_loss=0.0)


@recipe("psmnist", note="our recipe, stable gradients over 784 steps (docs/results/smnist-study.md)")
def psmnist() -> ClassifierConfig:
    """EGRU 590 with the settings of smnist."""
    return replace(smnist(), data="psmnist")


_EPOCHS = "over 4 runs; backward sparsity at epoch 100 (epoch 20: {}, epoch 50: {})"
add(
    "smnist-paper",
    paper_settings,
    "EGRU 590, the paper's settings",
    Paper("Table 2", "98.3", "", "72.1", "27.4", "1M", "226K"),
    Paper(
        "Table S5", "95.5 ± 1.6", "", "80.5 ± 4.9", "25.6 ± 1.7", "1.048M", "(210 ± 51)K",
        note=_EPOCHS.format("24.9 ± 6.8", "26.1 ± 5.9"),
    ),
)  # fmt: skip
add(
    "smnist-egru-512",
    partial(paper_settings, 512),
    "EGRU 512, the paper's settings",
    Paper(
        "Table S5", "87.2 ± 3.0", "", "82.1 ± 0.9", "28.7 ± 1.1", "790K", "(147 ± 7)K",
        note=_EPOCHS.format("22.2 ± 2.8", "24.9 ± 0.7"),
    ),
)  # fmt: skip
add(
    "smnist-gru-590",
    partial(paper_settings, 590, "gru"),
    "GRU 590, the paper's settings",
    Paper("Table 2", "98.8", parameters="1M", macs="1M"),
    Paper("Table S5", "98.7 ± 0.1", parameters="1.049M", macs="1.054M", note="over 4 runs"),
)
add(
    "smnist-gru-512",
    partial(paper_settings, 512, "gru"),
    "GRU 512, the paper's settings",
    Paper("Table S5", "98.6 ± 0.2", parameters="791K", macs="795K", note="over 4 runs"),
)
add(
    "smnist-cornn-256",
    partial(cornn, "smnist"),
    "coRNN 256",
    Paper("Table 2", "99.4", parameters="134K", macs="262K", quoted=True),
)
add(
    "psmnist-paper",
    permuted_paper_settings,
    "EGRU 590, the paper's settings",
    Paper("Table 2", "95.1", "", "82.0", "8.4", "1M", "195K"),
)
add("psmnist-egru-512", partial(permuted_paper_settings, 512), "EGRU 512, the paper's settings")
add("psmnist-gru-590", partial(permuted_paper_settings, 590, "gru"), "GRU 590, the paper's settings")
add(
    "psmnist-cornn-256",
    partial(cornn, "psmnist"),
    "coRNN 256",
    Paper("Table 2", "97.3", parameters="134K", macs="262K", quoted=True),
)


def small(hidden: int = 128) -> ClassifierConfig:
    """Return a config for images of 14 by 14 pixels.

    It resets by output, as in the paper, and has 20,000 training images, so that a run with 128 units takes minutes on
    one CPU core. With the learning rate of the paper (1e-2), gradients overflow.
    """
    return replace(
        smnist(),
        side=14,
        hidden=hidden,
        epochs=20,
        batch=100,
        limit=20_000,
        trace=200.0,
        learning_rate=3e-3,
        reset="output",
        surrogate=Surrogate(width=0.3, height=0.2),
    )


SIZES = (64, 128, 256, 384, 512, 640)
"""Units in the scaling study: a tenfold range as in the paper, whose figure does not name the sizes."""
for _hidden in SIZES:
    add(
        f"smnist14-egru-{_hidden}",
        partial(small, _hidden),
        f"EGRU {_hidden}",
        note="a curve in the paper: with ten times the units, training converges five times faster",
    )


def ablated_scalar() -> ClassifierConfig:
    """Return the ablation with one threshold, which starts at the mean of the separate ones."""
    return replace(small(), threshold=Threshold(mean=-4.0, std=0.0, per_unit=False))


_NOTE = "our version of the paper's ablation study (Table S4), on small images"
add("smnist14-ablation-full", small, "the full EGRU 128", note=_NOTE)
add(
    "smnist14-ablation-unregularised",
    lambda: replace(small(), rate_loss=0.0),
    "no activity regularisation",
    note=_NOTE,
)
add("smnist14-ablation-scalar", ablated_scalar, "one threshold for all units", note=_NOTE)
add(
    "smnist14-ablation-hard",
    lambda: replace(small(), reset="hard"),
    "an event sets the state to zero",
    note=_NOTE,
)
add(
    "smnist14-ablation-none",
    lambda: replace(small(), reset="none"),
    "an event does not reset the state",
    note=_NOTE,
)


def thresholds(mean: float, std: float, trainable: bool) -> ClassifierConfig:
    """Return one point of the grid over initial thresholds."""
    return replace(small(), threshold=Threshold(mean=mean, std=std), freeze_thresholds=not trainable)


MEANS, STDS = (-4.0, -2.0, 0.0), (0.0, 1.0, 2.0)
"""The grid over initial thresholds, as in Table S7."""
for _mean, _std, _trainable in itertools.product(MEANS, STDS, (True, False)):
    add(
        f"smnist14-threshold{_mean:g}-{_std:g}{'' if _trainable else '-fixed'}",
        partial(thresholds, _mean, _std, _trainable),
        f"EGRU 128, initial thresholds with mean {_mean:g} and std {_std:g}, {'trainable' if _trainable else 'fixed'}",
        note="our version of Table S7, on small images",
    )

WIDTHS = (0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)
"""Half-widths of the surrogate, also in the study on Penn Treebank. The paper's figure does not name its values."""
for _width in WIDTHS:
    add(
        f"smnist14-epsilon-{_width:g}",
        lambda width=_width: replace(small(), surrogate=Surrogate(width=width, height=0.2)),
        f"EGRU 128, surrogate of half-width {_width:g}",
        note="our version of a figure of the paper, on small images",
    )

ZEROS = (0.5, 0.7, 0.8, 0.9, 0.95)
"""Weight sparsities of the study of pruned weights. Its dense network is that of `smnist14-ablation-none`."""
for _zeros, _block in itertools.product(ZEROS, (1, 16)):
    add(
        f"smnist14-zeros-{_zeros:g}{'-blocks' if _block > 1 else ''}",
        lambda zeros=_zeros, block=_block: replace(
            small(), reset="none", weight_sparsity=zeros, block=block, pruning_scope="layer"
        ),
        f"EGRU 128, no reset, {100 * _zeros:g} % of the weights zero{', in blocks of 16' if _block > 1 else ''}",
        note="our study of weight and activity sparsity, on small images",
    )
