"""The recipes by name, each with the paper's numbers."""

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any, TypeVar

from egru.experiments.config import RecipeConfig

Make = TypeVar("Make", bound=Callable[[], RecipeConfig])


@dataclasses.dataclass(frozen=True)
class Paper:
    """The paper's numbers for a recipe, on the test split.

    Attributes:
        accuracy: In percent.
        perplexity: For language models.
        activity_sparsity: In percent.
        backward_sparsity: In percent.
        parameters: Number of parameters, as printed.
        macs: Effective multiply-accumulate operations per step, as printed.
        note: Further numbers, or where the recipe comes from.
    """

    accuracy: float | None = None
    perplexity: float | None = None
    activity_sparsity: float | None = None
    backward_sparsity: float | None = None
    parameters: str = ""
    macs: str = ""
    note: str = ""

    @property
    def numbers(self) -> str:
        """The numbers as text, without the note. Empty if the paper has none."""
        parts = [
            f"accuracy {self.accuracy} %" if self.accuracy is not None else "",
            f"perplexity {self.perplexity}" if self.perplexity is not None else "",
            f"activity sparsity {self.activity_sparsity} %" if self.activity_sparsity is not None else "",
            f"backward sparsity {self.backward_sparsity} %" if self.backward_sparsity is not None else "",
            f"{self.parameters} parameters" if self.parameters else "",
            f"{self.macs} MACs" if self.macs else "",
        ]
        return ", ".join(filter(None, parts))

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.numbers, self.note))) or "no numbers in the paper"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """An experiment.

    Attributes:
        name: The name that `egru train` accepts.
        make: Returns a new config.
        paper: The paper's numbers.
        summary: One line for `egru list`.
    """

    name: str
    make: Callable[[], RecipeConfig]
    paper: Paper
    summary: str


RECIPES: dict[str, Recipe] = {}
"""All recipes, by name."""


def add(name: str, make: Callable[[], RecipeConfig], paper: Paper, summary: str) -> None:
    """Register a recipe.

    Raises:
        ValueError: If the name is taken.
    """
    if name in RECIPES:
        raise ValueError(f"recipe {name!r} exists already")
    RECIPES[name] = Recipe(name, make, paper, summary)


def recipe(name: str, **paper: Any) -> Callable[[Make], Make]:
    """Register the decorated function as a recipe. The first line of its docstring is the summary.

    Args:
        name: The name of the recipe.
        paper: Fields of :class:`Paper`.
    """

    def register(make: Make) -> Make:
        summary = (make.__doc__ or "").strip().splitlines()[0].removesuffix(".")
        add(name, make, Paper(**paper), summary)
        return make

    return register


def find(name: str) -> Recipe:
    """Return the recipe called ``name``.

    Raises:
        ValueError: If there is no such recipe. The message suggests similar names.

    Example:
        >>> config = egru.experiments.find("smnist").make()
    """
    if name in RECIPES:
        return RECIPES[name]
    similar = difflib.get_close_matches(name, RECIPES, 3) or [key for key in RECIPES if "-" not in key]
    raise ValueError(f"unknown recipe {name!r}; did you mean {', '.join(similar)}? `egru list` shows all")
