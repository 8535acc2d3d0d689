"""Configs of your own models and data, for :func:`egru.runs.train` and all other operations on a run.

``config.json`` names the class of such a config as ``module:Class``. Reading the run imports the module, from Python's
path or the working directory.
"""

import dataclasses
import hashlib
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from egru.data import Classification, Text
from egru.training import ClassifierTraining, LanguageTraining

_CLASSES: dict[str, type["Custom"]] = {}
"""The subclasses that were defined in this process, by their paths."""


def class_path(cls: type) -> str:
    """Return ``module:Class``, with the name under which a script can be imported instead of ``__main__``."""
    module = cls.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else module if file is None else Path(file).stem
    return f"{module}:{cls.__qualname__}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Custom:
    """Base class of :class:`CustomClassifier` and :class:`CustomLanguageModel`."""

    start_from: str | None = None
    """Initialise the weights from this run or export folder. If None, as ``build_model`` does."""
    threshold_floor: tuple[float, ...] = ()
    """Raise lower initial thresholds to this value: one for all layers, or one per layer. If empty, raise none."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _CLASSES[class_path(cls)] = cls

    @property
    def label(self) -> str:
        """Name of the network in reports."""
        return type(self).__name__

    def load_data(self) -> Any:
        """Return the data set."""
        raise NotImplementedError(f"{type(self).__name__} must define load_data(self)")

    def build_model(self, data: Any) -> nn.Module:
        """Return the model, with new weights. Torch is seeded before."""
        raise NotImplementedError(f"{type(self).__name__} must define build_model(self, data)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomClassifier(Custom, ClassifierTraining):
    """Config of your own classifier of sequences.

    A subclass adds its settings as fields, and defines ``load_data``, which returns an
    :class:`egru.data.Classification`, and ``build_model``, which returns a module with at least one recurrent layer
    that maps ``x`` of shape ``(B, T, ...)`` to scores ``(B, classes)`` or ``(B, T, classes)``, alone or as the first
    entry of a tuple. Define the class in a module that can be imported, not in a notebook.

    Example:
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Mine(CustomClassifier):
        ...     hidden: int = 64
        ...
        ...     def load_data(self):
        ...         return egru.data.digits()
        ...
        ...     def build_model(self, data):
        ...         return egru.models.SequenceClassifier(1, self.hidden, data.classes)
        >>> egru.runs.train("mine", Mine(epochs=20), Path("runs/mine"))  # doctest: +SKIP
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomLanguageModel(Custom, LanguageTraining):
    """Config of your own word-level language model.

    As :class:`CustomClassifier`, but ``load_data`` returns an :class:`egru.data.Text`, and ``build_model`` returns a
    module with the methods ``forward``, ``features`` and ``decode`` of :class:`egru.models.LanguageModel`.

    Example:
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Letters(CustomLanguageModel):
        ...     hidden: int = 64
        ...
        ...     def load_data(self):
        ...         tokens = torch.randint(3, (1000,))
        ...         return egru.data.Text("letters", ["a", "b", "c"], tokens, tokens, tokens)
        ...
        ...     def build_model(self, data):
        ...         return egru.models.LanguageModel(len(data.vocabulary), 16, self.hidden)
        >>> config = Letters(epochs=20)
    """


def load_custom_data(config: Custom) -> Classification | Text:
    """Return the data set of a config.

    Raises:
        TypeError: If the class of the config returns something else than a data set for its kind of training.
    """
    data, expected = config.load_data(), Text if isinstance(config, LanguageTraining) else Classification
    if not isinstance(data, expected):
        name = type(config).__name__
        raise TypeError(f"{name}.load_data must return an egru.data.{expected.__name__}, got {type(data).__name__}")
    return data


def identify_data(data: Classification | Text) -> str:
    """Return the name of a data set and a checksum of its test labels or words. Runs with equal ones are compared."""
    targets = data.test if isinstance(data, Text) else data.test.y
    digest = hashlib.sha256(torch.as_tensor(targets).cpu().contiguous().numpy().tobytes()).hexdigest()
    return f"{data.name}, test labels {digest[:8]}"


def find_class(path: str, source: str | Path) -> type[CustomClassifier] | type[CustomLanguageModel]:
    """Return the class of a config by its path. Imports its module if necessary.

    Raises:
        ValueError: If it cannot be imported or is another object. The message names ``source``.
    """
    cls: Any = _CLASSES[path] if path in _CLASSES else _import(path, source)
    if not isinstance(cls, type) or not issubclass(cls, CustomClassifier | CustomLanguageModel):
        raise ValueError(
            f"{source}: {path} must be a subclass of egru.experiments.CustomClassifier or CustomLanguageModel, "
            f"got {cls!r}"
        )
    return cls


def _import(path: str, source: str | Path) -> Any:
    """Import ``module:Class``, also from the working directory, which console scripts do not search."""
    module, _, name = path.partition(":")
    folder = os.getcwd()
    is_searched = folder in sys.path or "" in sys.path
    if not is_searched:
        sys.path.append(folder)
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        return value
    except Exception as error:  # the module may raise anything
        raise ValueError(
            f"{source}: the class {path} cannot be imported ({type(error).__name__}: {error}); run the command in the "
            "folder of its module, or add that folder to PYTHONPATH"
        ) from error
    finally:
        if not is_searched:
            sys.path.remove(folder)
