"""The paper's experiments: functions that return a config, each with the paper's number beside it."""

from egru.experiments import gestures, images, language
from egru.experiments.build import build, load_data, smoke
from egru.experiments.config import ClassifierConfig, Config, LanguageConfig, with_fields
from egru.experiments.registry import RECIPES, Paper, Recipe, find

__all__ = [
    "RECIPES",
    "ClassifierConfig",
    "Config",
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
