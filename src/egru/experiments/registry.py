"""The recipes by name, each with its rows in the paper's tables."""

import dataclasses
import difflib
from collections.abc import Callable
from typing import TypeVar

from egru.experiments.config import RecipeConfig

Make = TypeVar("Make", bound=Callable[[], RecipeConfig])


@dataclasses.dataclass(frozen=True)
class Paper:
    """A row of one of the paper's tables, on the test split. Numbers are texts, as printed; empty if there is none.

    Attributes:
        table: The table: "Table 1" to "Table 3" of the main text, "Table S1" to "Table S7" of the supplement.
        accuracy: In percent. A mean over runs has its standard deviation: "95.5 ± 1.6".
        perplexity: For language models.
        activity_sparsity: In percent.
        backward_sparsity: In percent.
        parameters: Number of parameters.
        macs: Effective multiply-accumulate operations per step.
        validation: Validation perplexity.
        data: The data set of the numbers, if the recipe's default is another one.
        quoted: Whether the paper quotes the numbers from another publication.
        note: How the numbers were obtained.
    """

    table: str
    accuracy: str = ""
    perplexity: str = ""
    activity_sparsity: str = ""
    backward_sparsity: str = ""
    parameters: str = ""
    macs: str = ""
    validation: str = ""
    data: str = ""
    quoted: bool = False
    note: str = ""

    @property
    def source(self) -> str:
        """The origin of the numbers: "paper, Table 1"."""
        return f"{'quoted' if self.quoted else 'paper'}, {self.table}"

    def __str__(self) -> str:
        parts = [
            f"accuracy {self.accuracy} %" if self.accuracy else "",
            f"perplexity {self.perplexity}" if self.perplexity else "",
            f"activity sparsity {self.activity_sparsity} %" if self.activity_sparsity else "",
            f"backward sparsity {self.backward_sparsity} %" if self.backward_sparsity else "",
            f"{self.parameters} parameters" if self.parameters else "",
            f"{self.macs} MACs" if self.macs else "",
            self.note,
        ]
        data = f" with --data {self.data}" if self.data else ""
        return f"{self.source}{data}: {', '.join(filter(None, parts))}"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """An experiment.

    Attributes:
        name: The name that `egru train` accepts.
        make: Returns a new config.
        summary: One line for `egru list`.
        papers: The paper's rows for this experiment, that of the main text first.
        note: Where a recipe comes from that is not in the paper.
    """

    name: str
    make: Callable[[], RecipeConfig]
    summary: str
    papers: tuple[Paper, ...] = ()
    note: str = ""

    def describe_paper(self, config: RecipeConfig | None = None) -> str:
        """Return the paper's numbers, or where the recipe comes from. Empty if neither is known.

        Args:
            config: Leave out numbers that are not comparable with a run of this config. If None, all are comparable.
        """
        if not self.papers:
            return self.note
        comparable = [paper for paper in self.papers if config is None or paper.data in ("", config.data)]
        return str(comparable[0]) if comparable else f"the paper's numbers are for --data {self.papers[0].data}"


RECIPES: dict[str, Recipe] = {}
"""All recipes, by name."""


def add(name: str, make: Callable[[], RecipeConfig], summary: str, *papers: Paper, note: str = "") -> None:
    """Register a recipe. The arguments are those of :class:`Recipe`.

    Raises:
        ValueError: If the name is taken.
    """
    if name in RECIPES:
        raise ValueError(f"recipe {name!r} exists already")
    RECIPES[name] = Recipe(name, make, summary, papers, note)


def recipe(name: str, note: str) -> Callable[[Make], Make]:
    """Register the decorated function as a recipe. The first line of its docstring is the summary.

    Args:
        name: The name of the recipe.
        note: Where the recipe comes from.
    """

    def register(make: Make) -> Make:
        add(name, make, (make.__doc__ or "").strip().splitlines()[0].removesuffix("."), note=note)
        return make

    return register


def find(name: str) -> Recipe:
    """Return the recipe called ``name``.

    Args:
        name: A name that ``egru list`` prints.

    Returns:
        The recipe.

    Raises:
        ValueError: If there is no such recipe. The message suggests similar names.

    Example:
        >>> config = egru.experiments.find("smnist").make()
    """
    if name in RECIPES:
        return RECIPES[name]
    similar = difflib.get_close_matches(name, RECIPES, 3) or [key for key in RECIPES if "-" not in key]
    raise ValueError(f"unknown recipe {name!r}; did you mean {', '.join(similar)}? `egru list` shows all")
