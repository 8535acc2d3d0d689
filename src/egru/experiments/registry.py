"""Recipes by name, each with the number it is held against."""

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any, TypeVar

from egru.experiments.config import Config

Make = TypeVar("Make", bound=Callable[[], Config])


@dataclasses.dataclass(frozen=True)
class Paper:
    """What the paper reports for a row: accuracy and sparsities in percent, perplexity on the test split."""

    accuracy: float | None = None
    perplexity: float | None = None
    activity_sparsity: float | None = None
    backward_sparsity: float | None = None
    parameters: str = ""
    macs: str = ""
    note: str = ""

    def __str__(self) -> str:
        parts = [
            f"{self.accuracy} %" if self.accuracy is not None else "",
            f"perplexity {self.perplexity}" if self.perplexity is not None else "",
            f"{self.activity_sparsity} % silent" if self.activity_sparsity is not None else "",
            f"{self.backward_sparsity} % backward" if self.backward_sparsity is not None else "",
            f"{self.parameters} parameters" if self.parameters else "",
            f"{self.macs} MACs" if self.macs else "",
            self.note,
        ]
        return ", ".join(filter(None, parts)) or "no number"


@dataclasses.dataclass(frozen=True)
class Recipe:
    name: str
    make: Callable[[], Config]
    paper: Paper
    summary: str


RECIPES: dict[str, Recipe] = {}


def add(name: str, make: Callable[[], Config], paper: Paper, summary: str) -> None:
    if name in RECIPES:
        raise ValueError(f"recipe {name!r} is there already")
    RECIPES[name] = Recipe(name, make, paper, summary)


def recipe(name: str, **paper: Any) -> Callable[[Make], Make]:
    """Register a function under ``name``; its docstring is what `egru list` shows, ``paper`` the number beside it."""

    def register(make: Make) -> Make:
        summary = (make.__doc__ or "").strip().splitlines()[0]
        add(name, make, Paper(**paper), summary)
        return make

    return register


def find(name: str) -> Recipe:
    """The recipe called ``name``, or an error that names the nearest."""
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(name, RECIPES, 3) or [key for key in RECIPES if "-" not in key]
    raise ValueError(f"unknown recipe {name!r}; did you mean {', '.join(near)}? `egru list` shows all")
