"""The paper's experiments: functions that return a config, each with the paper's number beside it.

They live inside the package, so that ``egru train`` finds them in an installed wheel as in a checkout.
"""

from egru.recipes import gestures, images, language
from egru.recipes.build import build, load, smoke
from egru.recipes.config import ClassifierConfig, Config, LanguageConfig, with_fields
from egru.recipes.pages import report
from egru.recipes.quieten import quieten
from egru.recipes.registry import RECIPES, Paper, Recipe, find
from egru.recipes.start import evaluate, export, resume, start
from egru.recipes.trained import Trained, trained

__all__ = [
    "RECIPES",
    "ClassifierConfig",
    "Config",
    "LanguageConfig",
    "Paper",
    "Recipe",
    "Trained",
    "build",
    "evaluate",
    "export",
    "find",
    "gestures",
    "images",
    "language",
    "load",
    "quieten",
    "report",
    "resume",
    "smoke",
    "start",
    "trained",
    "with_fields",
]
