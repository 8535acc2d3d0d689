"""Word-level language models on Penn Treebank and WikiText-2 (Table 3 of the paper, its supplement and studies)."""

from dataclasses import replace
from functools import partial

from egru.events import Surrogate
from egru.experiments.config import LanguageConfig
from egru.experiments.registry import Paper, add
from egru.layers import Threshold
from egru.types import TextData

_PAPER = {
    1350: {
        "learning_rate": 4.44e-4,
        "batch": 64,
        "bptt": 68,
        "embedding": 788,
        "dropconnect": 0.679,
        "dropout": 0.264,
        "output_dropout": 0.264,
        "embedding_dropout": 0.707,
        "word_dropout": 0.055,
        "weight_decay": 9.01e-6,
        "surrogate": Surrogate(width=0.459),
        "threshold": Threshold("sigmoid", mean=-3.769, std=0.0),
    },
    2000: {
        "learning_rate": 4.94e-4,
        "batch": 128,
        "bptt": 67,
        "embedding": 786,
        "dropconnect": 0.621,
        "dropout": 0.241,
        "output_dropout": 0.241,
        "embedding_dropout": 0.765,
        "word_dropout": 0.149,
        "weight_decay": 6.69e-6,
        "surrogate": Surrogate(width=0.425),
        "threshold": Threshold("sigmoid", mean=-3.496, std=0.0),
    },
}
"""The paper's settings by number of units. It does not give the standard deviation of the initial thresholds; 0 is
the best value of its grid."""


def egru(data: TextData = "ptb", hidden: int = 1350) -> LanguageConfig:
    """Return the paper's EGRU: Adam without momentum, a constant learning rate, then a cosine to a tenth of it."""
    return LanguageConfig(
        data=data,
        hidden=hidden,
        epochs=2500,
        betas=(0.0, 0.999),
        clip=2.0,
        schedule="cosine",
        constant_share=0.5,
        final_factor=0.1,
        **_PAPER[hidden],
    )


def gru(data: TextData = "ptb") -> LanguageConfig:
    """Return the paper's GRU 1350. The paper does not name the epochs; we use those of the EGRU."""
    return LanguageConfig(
        data=data,
        cell="gru",
        hidden=1350,
        embedding=563,
        epochs=2500,
        batch=96,
        bptt=34,
        learning_rate=4.62e-4,
        betas=(0.0, 0.999),
        clip=0.25,
        schedule="cosine",
        dropconnect=0.506,
        dropout=0.474,
        output_dropout=0.474,
        embedding_dropout=0.729,
        word_dropout=0.093,
        weight_decay=4.60e-6,
        activity_decay=2.766,
        temporal_decay=0.29,
    )


def awd_lstm(data: TextData = "ptb") -> LanguageConfig:
    """Return an AWD-LSTM 1150 with the settings of its authors' code (Merity et al., 2018; docs/training.md)."""
    settings = {
        "ptb": {"epochs": 500, "batch": 20, "dropout": 0.25, "embedding_dropout": 0.4},
        "wikitext2": {"epochs": 750, "batch": 80, "dropout": 0.2, "embedding_dropout": 0.65},
    }
    return LanguageConfig(
        data=data,
        cell="lstm",
        hidden=1150,
        embedding=400,
        optimiser="ntavsgd",
        learning_rate=30.0,
        weight_decay=1.2e-6,
        clip=0.25,
        bptt=70,
        dropconnect=0.5,
        output_dropout=0.4,
        word_dropout=0.1,
        activity_decay=2.0,
        temporal_decay=1.0,
        **settings[data],
    )


def indrnn() -> LanguageConfig:
    """Return a densely connected IndRNN (Li et al., 2019). Optimiser, dropout and normalisation are our choice."""
    return LanguageConfig(
        data="ptb",
        cell="dense_indrnn",
        layers=1,
        hidden=256,
        embedding=600,
        epochs=300,
        batch=128,
        bptt=50,
        learning_rate=2e-4,
        clip=10.0,
        weight_decay=1e-6,
        schedule="cosine",
        output_dropout=0.5,
        embedding_dropout=0.5,
        word_dropout=0.1,
    )


def evnn(data: TextData = "ptb") -> LanguageConfig:
    """Return EvNN's recipe: AdamW, low fixed thresholds, a narrow and high surrogate, a cosine to zero.

    All values are from EvNN's ``benchmarks/lm``. docs/training.md lists the differences between its code and ours.
    """
    return LanguageConfig(
        data=data,
        hidden=1350,
        embedding=750,
        epochs=1000,
        batch=64,
        evaluation_batch=64,
        bptt=70,
        optimiser="adamw",
        learning_rate=1.2e-3,
        betas=(0.0, 0.999),
        weight_decay=0.10,
        clip=0.1,
        schedule="cosine",
        constant_share=0.7,
        final_factor=0.0,
        freeze_thresholds=True,
        embedding_dropout=0.6,
        word_dropout=0.1,
        dropout=0.25,
        output_dropout=0.5,
        dropconnect=0.7,
        reset="threshold",
        reset_gate="after",
        threshold=Threshold("clamp", mean=0.01),
        surrogate=Surrogate(width=1 / 3.6, height=3.6),
    )


def evnn_gru(data: TextData = "ptb") -> LanguageConfig:
    """Return a GRU with the training settings of :func:`evnn`."""
    return replace(evnn(data), cell="gru")


_1350 = Paper(None, 57.2, 79.7, 46.3, "33M", "9.9M", "perplexity 58.7 in the supplement")
_WIKI_1350 = Paper(None, 70.6, 76.8, 44.2, "51M", "17.5M")
add("ptb", egru, _1350, "same as ptb-egru-1350")
add("ptb-egru-1350", egru, _1350, "EGRU 1350")
add(
    "ptb-egru-2000",
    partial(egru, "ptb", 2000),
    Paper(None, 57.0, 84.8, 42.9, "55M", "12.7M", "perplexity 58.8 in the supplement"),
    "EGRU 2000",
)
add("ptb-gru-1350", gru, Paper(None, 66.3, None, None, "28M", "27.6M"), "GRU 1350")
add("ptb-awd-lstm", awd_lstm, Paper(None, 57.3, None, None, "24M", "24.0M"), "AWD-LSTM")
add("ptb-indrnn", indrnn, Paper(None, 55.2, None, None, "52M", "51.6M"), "densely connected IndRNN")
add(
    "ptb-evnn",
    evnn,
    Paper(note="not in the paper"),
    "EGRU 1350 with EvNN's settings",
)
add("ptb-evnn-gru", evnn_gru, Paper(note="our recipe"), "GRU 1350, trained like ptb-evnn")
add("wikitext2", partial(egru, "wikitext2"), _WIKI_1350, "same as wikitext2-egru-1350")
add("wikitext2-egru-1350", partial(egru, "wikitext2"), _WIKI_1350, "EGRU 1350")
add(
    "wikitext2-egru-2000",
    partial(egru, "wikitext2", 2000),
    Paper(None, 68.9, 82.7, 42.2, "74M", "20.1M"),
    "EGRU 2000",
)
add(
    "wikitext2-gru-1350",
    partial(gru, "wikitext2"),
    Paper(None, 71.8, None, None, "39M", "38.8M"),
    "GRU 1350",
)
add(
    "wikitext2-awd-lstm",
    partial(awd_lstm, "wikitext2"),
    Paper(None, 65.8, None, None, "33M", "32.0M"),
    "AWD-LSTM",
)
add("wikitext2-evnn", partial(evnn, "wikitext2"), Paper(note="our recipe"), "EGRU 1350 with EvNN's settings for PTB")
add(
    "wikitext2-evnn-gru",
    partial(evnn_gru, "wikitext2"),
    Paper(note="our recipe"),
    "GRU 1350, trained like wikitext2-evnn",
)


def thresholds(mean: float, std: float, trainable: bool) -> LanguageConfig:
    """Return one point of the grid over initial thresholds."""
    return replace(egru(), threshold=Threshold("sigmoid", mean=mean, std=std), freeze_thresholds=not trainable)


GRID = {
    (-4.0, 0.0): (59.2, 59.7),
    (-4.0, 1.0): (59.4, 59.5),
    (-4.0, 2.0): (60.0, 60.1),
    (-2.0, 0.0): (682.7, 682.7),
    (-2.0, 1.0): (61.8, 63.0),
    (-2.0, 2.0): (62.6, 63.9),
    (0.0, 0.0): (682.7, 682.7),
    (0.0, 1.0): (288.8, 292.5),
    (0.0, 2.0): (69.8, 73.8),
}
"""Perplexity by mean and standard deviation of the initial thresholds, trainable and fixed: averages of three runs."""
for (_mean, _std), _numbers in GRID.items():
    for _trainable, _number in zip((True, False), _numbers, strict=True):
        add(
            f"ptb-threshold{_mean:g}-{_std:g}{'' if _trainable else '-fixed'}",
            partial(thresholds, _mean, _std, _trainable),
            Paper(None, _number, note="average of three runs"),
            f"initial thresholds from N({_mean:g}, {_std:g}√2), {'trainable' if _trainable else 'fixed'}",
        )


def epsilon(width: float) -> LanguageConfig:
    """Return one point of the sweep over the surrogate's width."""
    return replace(egru(), surrogate=Surrogate(width=width))


EPSILONS = (0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)
"""Widths in the sweep. The paper shows them in a figure without numbers."""
for _width in EPSILONS:
    _point = Paper(note="a point in a figure of the paper")
    add(f"ptb-epsilon-{_width:g}", partial(epsilon, _width), _point, f"EGRU 1350, surrogate of half-width {_width:g}")
