"""The tables and studies of the paper, and which recipes are their rows."""

import dataclasses
import difflib
from collections.abc import Mapping

from egru.experiments.registry import RECIPES, Paper

ALIASES = {
    "ptb": "ptb-egru-1350",
    "wikitext2": "wikitext2-egru-1350",
}
"""Short names of recipes that are also rows of a table."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table or study.

    Attributes:
        title: What the table shows.
        data: The data set. Runs of its recipes on other data are listed separately.
        prefixes: Recipes whose names start with one of these are rows.
        names: Further rows.
        quoted: Published rows without a recipe, by the name of the model.
    """

    title: str
    data: str
    prefixes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    quoted: Mapping[str, Paper] = dataclasses.field(default_factory=dict)

    def recipes(self, aliases: bool = False) -> list[str]:
        """Return the names of the recipes in this table, with or without :data:`ALIASES`."""
        rows = [name for name in RECIPES if name in self.names or name.startswith(self.prefixes)]
        rows = [name for name in rows if name not in ALIASES]
        return [name for name in RECIPES if name in rows or (aliases and ALIASES.get(name) in rows)]


_GESTURES = ("dvs-egru-", "dvs-gru-", "dvs-lstm-", "dvs-cnn-")
_LANGUAGE = ("ptb-egru-", "ptb-gru-", "ptb-awd-lstm", "ptb-indrnn", "ptb-evnn")
_GESTURE_ROWS = {
    "LSTM 512 (He et al., 2020)": Paper("Table 1", "86.8", parameters="7.4M", macs="3.9M", quoted=True, data="dvs-raw"),
    "AlexNet + LSTM 256 with augmentation (Innocenti et al., 2021)": Paper(
        "Table 1", "97.7", parameters="8.3M", macs="601.3M", quoted=True, data="dvs-raw"
    ),
    "EGRU 1024 on 128 by 128 pixels": Paper(
        "Table S1",
        "85.7 ± 0.9",
        "",
        "77.3 ± 7.0",
        "64.6 ± 1.1",
        "110.1M",
        "105.2M ± 441.3K",
        data="dvs-raw",
        note="over 5 runs",
    ),
}
_GU = "Gu et al., 2020, 512 units"
TABLES = {
    "digits": Table("Digits of scikit-learn, one pixel at a time (our task)", "digits", names=("digits", "digits-gru")),
    "smnist": Table(
        "Sequential MNIST (Tables 2 and S5 of the paper)",
        "smnist",
        ("smnist-",),
        ("smnist",),
        {_GU: Paper("Table 2", "98.9", parameters="1M", macs="1M", quoted=True)},
    ),
    "psmnist": Table(
        "Permuted sequential MNIST (Table 2 of the paper)",
        "psmnist",
        ("psmnist-",),
        ("psmnist",),
        {_GU: Paper("Table 2", "95.1", parameters="1M", macs="1M", quoted=True)},
    ),
    "scaling": Table("Sequential MNIST with 14 by 14 pixels, size of the layer", "smnist", ("smnist14-egru-",)),
    "small-ablation": Table(
        "Sequential MNIST with 14 by 14 pixels, ablation study (our task)", "smnist", ("smnist14-ablation-",)
    ),
    "small-thresholds": Table(
        "Sequential MNIST with 14 by 14 pixels, initial thresholds (our task)", "smnist", ("smnist14-threshold",)
    ),
    "small-epsilon": Table(
        "Sequential MNIST with 14 by 14 pixels, width of the surrogate (our task)", "smnist", ("smnist14-epsilon-",)
    ),
    "small-zeros": Table(
        "Sequential MNIST with 14 by 14 pixels, pruned weights (our task)",
        "smnist",
        ("smnist14-zeros-",),
        ("smnist14-ablation-none",),
    ),
    "gestures": Table("DVS128 Gesture (Tables 1 and S1 of the paper)", "dvs-raw", _GESTURES, quoted=_GESTURE_ROWS),
    "ablation": Table(
        "DVS128 Gesture, ablation study (Table S4 of the paper)", "dvs-raw", ("dvs-ablation-",), ("dvs-egru-1024",)
    ),
    "frames": Table("DVS128 Gesture on packed frames (our task)", "dvs", names=("dvs", "dvs-gru")),
    "ptb": Table("Penn Treebank (Tables 3 and S6 of the paper)", "ptb", _LANGUAGE),
    "thresholds": Table("Penn Treebank, initial thresholds (Table S7 of the paper)", "ptb", ("ptb-threshold",)),
    "epsilon": Table("Penn Treebank, width of the surrogate", "ptb", ("ptb-epsilon-",)),
    "wikitext2": Table(
        "WikiText-2 (Tables 3 and S6 of the paper)",
        "wikitext2",
        ("wikitext2-",),
        quoted={"Melis et al., 2018": Paper("Table 3", "", "65.9", parameters="24M", quoted=True)},
    ),
}


def find_table(name: str) -> Table:
    """Return the table called ``name``.

    Raises:
        ValueError: If there is no such table. The message suggests a similar name.
    """
    if name in TABLES:
        return TABLES[name]
    similar = difflib.get_close_matches(name, TABLES, 1)
    hint = f" (did you mean {similar[0]}?)" if similar else ""
    raise ValueError(f"unknown table {name!r}{hint}; the tables are {', '.join(TABLES)}")
