"""Word-level language models on Penn Treebank and WikiText-2 (Tables 3 and S6 of the paper, and its studies)."""

from dataclasses import replace
from functools import partial

from egru.events import Surrogate
from egru.experiments.config import LanguageConfig
from egru.experiments.images import WIDTHS
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
    """Return an AWD-LSTM 1150 with the settings of its authors' code (Merity et al., 2018; docs/guides/training.md)."""
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

    All values are from EvNN's ``benchmarks/lm``. docs/guides/training.md lists where our code differs.
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


def supplement(test: str, best: str, mean: str, sparsity: str, backward: str, macs: str) -> Paper:
    """Return a row of Table S6: best test and validation perplexity, and means over five runs."""
    note = "best run; sparsities are means over 5 runs, MACs those of layers + readout"
    return Paper("Table S6", "", test, sparsity, backward, "", macs, f"{best} (mean {mean})", note=note)


_PTB_1350 = (
    Paper("Table 3", "", "57.2", "79.7", "46.3", "33M", "9.9M"),
    supplement("58.7", "59.5", "59.7 ± 0.1", "79.9 ± 0.1", "46.0 ± 0.3", "(6.8 + 3.1)M"),
)
_WIKI_1350 = (
    Paper("Table 3", "", "70.6", "76.8", "44.2", "51M", "17.5M"),
    supplement("70.6", "73.9", "74.0 ± 0.1", "77.0 ± 0.1", "43.8 ± 0.3", "(7.4 + 10.1)M"),
)
add("ptb", egru, "same as ptb-egru-1350", *_PTB_1350)
add("ptb-egru-1350", egru, "EGRU 1350", *_PTB_1350)
add(
    "ptb-egru-2000",
    partial(egru, "ptb", 2000),
    "EGRU 2000",
    Paper("Table 3", "", "57.0", "84.8", "42.9", "55M", "12.7M"),
    supplement("58.8", "59.6", "60.0 ± 0.5", "85.3 ± 0.9", "40.5 ± 3.8", "(9.7 + 3.0)M"),
)
add(
    "ptb-gru-1350",
    gru,
    "GRU 1350",
    Paper("Table 3", "", "66.3", parameters="28M", macs="27.6M"),
    supplement("66.3", "68.7", "68.9 ± 0.1", "0.0 ± 0.0", "0.0 ± 0.0", "(21.9 + 5.6)M"),
)
add(
    "ptb-awd-lstm",
    awd_lstm,
    "AWD-LSTM",
    Paper("Table 3", "", "57.3", parameters="24M", macs="24.0M", quoted=True),
)
add(
    "ptb-indrnn",
    indrnn,
    "densely connected IndRNN",
    Paper("Table 3", "", "55.2", parameters="52M", macs="51.6M", quoted=True),
)
_EVNN = "EvNN's recipe, not in the paper: embedding 750, reset by threshold, reset gate after, frozen thresholds"
add("ptb-evnn", evnn, "EGRU 1350 with EvNN's settings", note=_EVNN)
add("ptb-evnn-gru", evnn_gru, "GRU 1350, trained like ptb-evnn", note="our recipe")
add("wikitext2", partial(egru, "wikitext2"), "same as wikitext2-egru-1350", *_WIKI_1350)
add("wikitext2-egru-1350", partial(egru, "wikitext2"), "EGRU 1350", *_WIKI_1350)
add(
    "wikitext2-egru-2000",
    partial(egru, "wikitext2", 2000),
    "EGRU 2000",
    Paper("Table 3", "", "68.9", "82.7", "42.2", "74M", "20.1M"),
    supplement("68.9", "71.5", "75.7 ± 6.5", "84.6 ± 2.9", "36.1 ± 8.7", "(10.6 + 9.5)M"),
)
add(
    "wikitext2-gru-1350",
    partial(gru, "wikitext2"),
    "GRU 1350",
    Paper("Table 3", "", "71.8", parameters="39M", macs="38.8M"),
    supplement("71.8", "75.7", "75.9 ± 0.1", "0.0 ± 0.0", "0.0 ± 0.0", "(21.9 + 16.9)M"),
)
add(
    "wikitext2-awd-lstm",
    partial(awd_lstm, "wikitext2"),
    "AWD-LSTM",
    Paper("Table 3", "", "65.8", parameters="33M", macs="32.0M", quoted=True),
)
add("wikitext2-evnn", partial(evnn, "wikitext2"), "EGRU 1350 with EvNN's settings for PTB", note=_EVNN)
add("wikitext2-evnn-gru", partial(evnn_gru, "wikitext2"), "GRU 1350, trained like wikitext2-evnn", note="our recipe")


def thresholds(mean: float, std: float, trainable: bool) -> LanguageConfig:
    """Return one point of the grid over initial thresholds."""
    return replace(egru(), threshold=Threshold("sigmoid", mean=mean, std=std), freeze_thresholds=not trainable)


GRID = {
    (-4.0, 0.0): ("59.2 ± 0.1", "59.7 ± 0.1"),
    (-4.0, 1.0): ("59.4 ± 0.2", "59.5 ± 0.1"),
    (-4.0, 2.0): ("60.0 ± 0.2", "60.1 ± 0.1"),
    (-2.0, 0.0): ("682.7 ± 0.0", "682.7 ± 0.0"),
    (-2.0, 1.0): ("61.8 ± 0.2", "63.0 ± 0.2"),
    (-2.0, 2.0): ("62.6 ± 0.2", "63.9 ± 0.2"),
    (0.0, 0.0): ("682.7 ± 0.0", "682.7 ± 0.0"),
    (0.0, 1.0): ("288.8 ± 341.1", "292.5 ± 337.9"),
    (0.0, 2.0): ("69.8 ± 0.1", "73.8 ± 0.6"),
}
"""Perplexity by mean and standard deviation of the initial thresholds, trainable and fixed (Table S7)."""
for (_mean, _std), _numbers in GRID.items():
    for _trainable, _number in zip((True, False), _numbers, strict=True):
        add(
            f"ptb-threshold{_mean:g}-{_std:g}{'' if _trainable else '-fixed'}",
            partial(thresholds, _mean, _std, _trainable),
            f"initial thresholds with mean {_mean:g} and std {_std:g}, {'trainable' if _trainable else 'fixed'}",
            Paper("Table S7", "", _number, note="over 3 runs"),
        )


def epsilon(width: float) -> LanguageConfig:
    """Return one point of the sweep over the surrogate's width."""
    return replace(egru(), surrogate=Surrogate(width=width))


for _width in WIDTHS:
    add(
        f"ptb-epsilon-{_width:g}",
        partial(epsilon, _width),
        f"EGRU 1350, surrogate of half-width {_width:g}",
        note="a point in a figure of the paper",
    )
