"""The paper's experiments: recipes (functions that return a config), the paper's numbers and our results.

To add a recipe, write a function that returns a config in one of ``images.py``, ``gestures.py`` and ``language.py`` and
register it there. To train it: :func:`egru.runs.train`. To train your own model or data, write a subclass of
:class:`CustomClassifier` or :class:`CustomLanguageModel`.
"""

from egru.experiments import gestures, images, language
from egru.experiments.build import build, load_data, smoke
from egru.experiments.config import ClassifierConfig, Config, LanguageConfig, with_fields
from egru.experiments.custom import CustomClassifier, CustomLanguageModel
from egru.experiments.registry import RECIPES, Paper, Recipe, find

__all__ = [
    "RECIPES",
    "ClassifierConfig",
    "Config",
    "CustomClassifier",
    "CustomLanguageModel",
    "LanguageConfig",
    "Paper",
    "Recipe",
    "build",
    "find",
    "gestures",
    "images",
    "language",
    "load_data",
    "smoke",
    "with_fields",
]
