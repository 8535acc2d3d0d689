"""Build what a config describes: data set, model and task."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from egru import data
from egru.data.gestures import augment_time, pool_frames, smooth_frames
from egru.experiments.config import ClassifierConfig, Config, LanguageConfig, RecipeConfig
from egru.experiments.custom import Custom, load_custom_data
from egru.layers import EGRU
from egru.models import LanguageModel, SequenceClassifier, gesture_network
from egru.models.gesture import ConvolutionalHead
from egru.training import ClassifierTask, LanguageTask, LanguageTraining, Task


def load_data(config: Config) -> data.Classification | data.Text:
    """Load the data set of a config, with its limit, size, smoothing and pooling applied.

    Args:
        config: Config of a recipe.

    Returns:
        The data set.

    Raises:
        FileNotFoundError: If the data set is not available.

    Example:
        >>> data = egru.experiments.load_data(egru.experiments.find("digits").make())
        >>> data.classes
        10
    """
    if isinstance(config, Custom):
        return load_custom_data(config)
    limit = config.limit
    if isinstance(config, LanguageConfig):
        text = {"ptb": data.penn_treebank, "wikitext2": data.wikitext2}[config.data](config.root)
        return text._replace(train=text.train[:limit], validation=text.validation[:limit], test=text.test[:limit])
    match config.data:
        case "digits" | "permuted-digits":
            whole = data.digits(permuted=config.data == "permuted-digits")
        case "smnist" | "psmnist":
            side = config.side or 28
            whole = data.sequential_mnist(config.root, permuted=config.data == "psmnist", side=side)
        case "dvs":
            whole = data.dvs_gesture(config.root)
        case "dvs-raw":
            side = ConvolutionalHead.size if config.convolutional else 32
            whole = data.dvs_gesture_raw(config.root, side=config.side or side)
    splits = (data.Split(x[:limit], y[:limit]) for x, y in (whole.train, whole.validation, whole.test))
    decode, decode_training = whole.decode, None
    augments = config.shift or config.time_crop < 1 or config.roll
    if decode is not None and (config.smooth or config.pool > 1 or augments):
        prepare = functools.partial(_prepare, decode, smooth=config.smooth, pool=config.pool)
        if augments:
            draws = {"shift": config.shift, "time_crop": config.time_crop, "roll": config.roll}
            decode_training = functools.partial(prepare, **draws)
        decode = prepare
    return data.Classification(whole.name, whole.classes, *splits, decode=decode, decode_training=decode_training)


def _prepare(
    decode: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    *,
    smooth: bool,
    pool: int,
    shift: float = 0.0,
    time_crop: float = 1.0,
    roll: bool = False,
) -> torch.Tensor:
    """Return the frames of ``x``, moved at random in time and space, smoothed and pooled."""
    frames = decode(x)
    if time_crop < 1 or roll:
        frames = augment_time(frames, crop=time_crop, roll=roll)
    if shift:
        frames = data.augment(frames, crop=1.0, translate=shift, rotate=0.0)
    if smooth:
        frames = smooth_frames(frames)
    return frames if pool == 1 else pool_frames(frames, pool)


def build(config: Config, data_set: data.Classification | data.Text) -> tuple[nn.Module, Task]:
    """Build the model and the task of a config. Seeds torch, so that the initial weights are reproducible.

    Args:
        config: The network and its training.
        data_set: The data set, from :func:`load_data`.

    Returns:
        The model on the config's device, and the task that computes its loss and scores.

    Raises:
        ValueError: If the config's options do not fit together, or its device is not available.

    Example:
        >>> config = egru.experiments.smoke(egru.experiments.find("digits").make())
        >>> data = egru.experiments.load_data(config)
        >>> model, task = egru.experiments.build(config, data)
        >>> scores = task.evaluate(model, "validation")
    """
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device must be cpu because torch finds no CUDA device, got {config.device!r}")
    torch.manual_seed(config.seed)
    if isinstance(config, LanguageTraining):
        assert isinstance(data_set, data.Text)
        is_custom = isinstance(config, Custom)
        model = config.build_model(data_set) if is_custom else _language_model(config, len(data_set.vocabulary))
        return model.to(config.device), LanguageTask(data_set, config)
    assert isinstance(data_set, data.Classification)
    if isinstance(config, Custom):
        return config.build_model(data_set).to(config.device), ClassifierTask(data_set, config)
    model = build_classifier(config, _shape(data_set)).to(config.device)
    if config.centre:
        model.get_buffer("mean").copy_(_mean_frame(data_set))
    if config.uniform_gates or config.longest_memory:
        _spread_gates(model, config.longest_memory)
    if config.input_scale != 1:
        _scale_input(model, config.input_scale)
    return model, ClassifierTask(data_set, config)


def _language_model(config: LanguageConfig, vocabulary: int) -> nn.Module:
    return LanguageModel(
        vocabulary,
        config.embedding,
        config.hidden,
        num_layers=config.layers,
        cell=config.cell,
        word_dropout=config.word_dropout,
        embedding_dropout=config.embedding_dropout,
        dropout=config.dropout,
        output_dropout=config.output_dropout,
        dropout_mode=config.dropout_mode,
        **config.layer_options(),
    )


class Shape(NamedTuple):
    """The shape of a data set: frame of one step, steps per sequence, number of classes."""

    frame: tuple[int, ...]
    steps: int
    classes: int


def _shape(data_set: data.Classification) -> Shape:
    first = data_set.train.x[:1]
    frame = (first if data_set.decode is None else data_set.decode(first)).shape[2:]
    return Shape(tuple(frame), first.shape[1], data_set.classes)


def build_classifier(config: ClassifierConfig, shape: Shape) -> SequenceClassifier:
    """Build a classifier. :func:`build` also sets what depends on the training data and initial gates."""
    decay = math.exp(-1 / config.trace)
    options = {
        "num_layers": config.layers,
        "cell": config.cell,
        "readout": config.readout,
        "decay": decay,
        "gain": (1 - decay) / (1 - decay**shape.steps) if config.normalise else 1.0,
        "normalise": config.normalise,
        "centre": config.centre,
        "input_dropout": config.input_dropout,
        "dropout": config.dropout,
        "output_dropout": config.output_dropout,
        **config.layer_options(),
    }
    if len(shape.frame) > 1:
        return gesture_network(
            config.hidden, frame=shape.frame, classes=shape.classes, convolutional=config.convolutional, **options
        )
    return SequenceClassifier(math.prod(shape.frame), config.hidden, shape.classes, **options)


def _mean_frame(data_set: data.Classification) -> torch.Tensor:
    """Return the flat mean frame of the training split. Decodes 64 sequences at a time to save memory."""
    decode = data_set.decode or (lambda x: x)
    chunks = data_set.train.x.split(64)
    total = sum(decode(chunk).flatten(2).sum((0, 1), dtype=torch.float64) for chunk in chunks)
    return total / math.prod(data_set.train.x.shape[:2])  # pyright: ignore[reportReturnType]


@torch.no_grad()
def _spread_gates(model: nn.Module, longest: float | None) -> None:
    """Initialise update-gate biases: gates uniform over (0, 1), or time constants log-uniform from 1 to ``longest``."""
    for layer in _gated_layers(model, "uniform_gates" if longest is None else "longest_memory"):
        H = layer.hidden_size
        gates = torch.empty(H).uniform_(1 / H, 1 - 1 / H)  # the share of the state that a step keeps: torch's z
        if longest is not None:
            gates = (1 - longest**-gates).clamp_min(1 / H)
        for i in range(layer.num_layers):
            layer.get_parameter(f"bias_ih_l{i}")[H : 2 * H] = torch.logit(gates)
            layer.get_parameter(f"bias_hh_l{i}")[H : 2 * H] = 0


@torch.no_grad()
def _scale_input(model: nn.Module, scale: float) -> None:
    _gated_layers(model, "input_scale")[0].get_parameter("weight_ih_l0").mul_(scale)


def _gated_layers(model: nn.Module, option: str) -> list[EGRU | nn.GRU]:
    """Return the layers with an update gate. EGRU and nn.GRU store their gates in the same order."""
    layers = [module for module in model.modules() if isinstance(module, EGRU | nn.GRU)]
    if not layers:
        raise ValueError(f"{option} requires cell egru or gru")
    return layers


def smoke(config: RecipeConfig) -> RecipeConfig:
    """Return a small version of a config that runs in less than a minute on a CPU. It tests the code, not learning.

    Args:
        config: Config of a recipe.

    Returns:
        The config with a smaller network, fewer data and fewer epochs.

    Example:
        >>> config = egru.experiments.smoke(egru.experiments.find("smnist").make())
    """
    changes: dict[str, Any] = {"epochs": 3, "hidden": min(config.hidden, 48)}
    if config.optimiser != "ntavsgd":
        changes["learning_rate"] = max(config.learning_rate, 5e-3)  # large enough for a few steps
    if isinstance(config, LanguageConfig):
        changes |= {"limit": 1_600, "batch": 8, "evaluation_batch": 8, "bptt": min(config.bptt, 20)}
        changes |= {"hidden": 8} if config.cell == "dense_indrnn" else {"embedding": min(config.embedding, 32)}
    elif config.convolutional:
        changes |= {"epochs": 2, "limit": 12, "batch": 4, "evaluation_batch": 12}
    else:
        changes |= {"limit": 120, "batch": 20, "evaluation_batch": 120}
    return dataclasses.replace(config, **changes)
