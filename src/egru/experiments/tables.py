"""The tables and studies of the paper, and which recipes are their rows."""

import dataclasses

from egru.experiments.registry import RECIPES

ALIASES = {
    "smnist": "smnist-egru-590",
    "psmnist": "psmnist-egru-590",
    "ptb": "ptb-egru-1350",
    "wikitext2": "wikitext2-egru-1350",
}
"""Short names of recipes that are also rows of a table."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table or study.

    Attributes:
        title: What the table shows.
        prefixes: Recipes whose names start with one of these are rows.
        names: Further rows.
        data: The table's data set, if its recipes can also be trained on another.
    """

    title: str
    prefixes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    data: str | None = None

    def recipes(self, aliases: bool = False) -> list[str]:
        """Return the names of the recipes in this table, with or without :data:`ALIASES`."""
        rows = [name for name in RECIPES if name in self.names or name.startswith(self.prefixes)]
        rows = [name for name in rows if name not in ALIASES]
        return [name for name in RECIPES if name in rows or (aliases and ALIASES.get(name) in rows)]


_GESTURES = ("dvs-egru-", "dvs-gru-", "dvs-lstm-", "dvs-cnn-")
_LANGUAGE = ("ptb-egru-", "ptb-gru-", "ptb-awd-lstm", "ptb-indrnn", "ptb-evnn")
TABLES = {
    "digits": Table("Digits of scikit-learn, one pixel at a time (our task)", names=("digits", "digits-gru")),
    "smnist": Table("Sequential MNIST (Table 2 and supplement of the paper)", ("smnist-",)),
    "psmnist": Table("Permuted sequential MNIST (supplement of the paper)", ("psmnist-",)),
    "scaling": Table("Sequential MNIST with 14 by 14 pixels, size of the layer", ("smnist14-",)),
    "gestures": Table("DVS128 Gesture (Table 1 and supplement of the paper)", _GESTURES, data="dvs-raw"),
    "ablation": Table("DVS128 Gesture, ablation study", ("dvs-ablation-",), data="dvs-raw"),
    "frames": Table("DVS128 Gesture on packed frames (our task)", names=("dvs", "dvs-gru"), data="dvs"),
    "ptb": Table("Penn Treebank (Table 3 and supplement of the paper)", _LANGUAGE),
    "thresholds": Table("Penn Treebank, initial thresholds", ("ptb-threshold",)),
    "epsilon": Table("Penn Treebank, width of the surrogate", ("ptb-epsilon-",)),
    "wikitext2": Table("WikiText-2 (Table 3 of the paper)", ("wikitext2-",)),
}


def find_table(name: str) -> Table:
    """Return the table called ``name``.

    Raises:
        ValueError: If there is no such table.
    """
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}; the tables are {', '.join(TABLES)}")
    return TABLES[name]
