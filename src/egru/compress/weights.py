"""Gradual magnitude pruning of weights, with masks that are parametrisations."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from egru.layers import event_layers, labelled_modules

PruningScope = Literal["global", "layer"]
"""Whether one threshold on magnitudes holds for all matrices, or one per matrix."""


_MASK = ".0.mask"
"""End of the name of a mask in a state dict."""


class Mask(nn.Module):
    """Parametrisation that sets masked weights to zero. Their gradients are zero, too.

    Args:
        mask: Tensor of the shape of the weights, with non-zero entries where weights are kept.
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask.to(torch.uint8))  # bool cannot be exchanged by all backends of torch

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A weight matrix that is pruned.

    Attributes:
        name: Name of the parameter in the model.
        owners: Modules that hold the parameter, with its name there. Several if it is tied.
        block: Number of consecutive outputs that are pruned together.
    """

    name: str
    owners: tuple[tuple[nn.Module, str], ...]
    block: int

    @property
    def weight(self) -> Tensor:
        """The weights, masked if they have a mask."""
        module, name = self.owners[0]
        return getattr(module, name)

    @property
    def mask(self) -> Tensor:
        """The mask, after :class:`WeightPruning` has added it."""
        module, name = self.owners[0]
        mask = module.get_submodule(f"parametrizations.{name}.0")
        assert isinstance(mask, Mask)
        return mask.mask

    def blocks(self) -> "Blocks":
        """Return the blocks of the matrix, with their magnitudes and sizes."""
        module, name = self.owners[0]
        original = module.get_parameter(f"parametrizations.{name}.original").detach().float().abs()
        if not original.isfinite().all():
            raise ValueError(f"WeightPruning: the weights must be finite, {self.name} contains NaN or infinity")
        live = self.mask != 0
        shape = (-1, self.block, *original.shape[1:])
        weight, live = (original * live).view(shape), live.view(shape)
        # The mean includes masked weights. That of the others would rise with every update, and with it what is pruned.
        scale = original.sum() / original.count_nonzero()
        return Blocks((weight.mean(1) / scale).flatten(), live.sum(1).flatten())

    def empty(self, blocks: Tensor) -> Tensor:
        """Return the mask without some blocks, given as one boolean per block."""
        shape = (len(self.mask) // self.block, *self.mask.shape[1:])
        removed = blocks.view(shape).repeat_interleave(self.block, 0)
        return self.mask * ~removed


class Blocks(NamedTuple):
    """Blocks of a matrix.

    Attributes:
        magnitude: Mean magnitude of the block's weights, relative to that of the matrix.
        size: Number of its weights that are not masked.
    """

    magnitude: Tensor
    size: Tensor


class WeightPruning:
    r"""Sets the weights with the smallest magnitudes to zero while a model is trained.

    The sparsity rises from 0 to its final value ``s`` along ``s (1 - (1 - t)^3)`` (Zhu and Gupta, 2017), where ``t``
    goes from 0 to 1 during the first part of training. Weights that are zero stay zero: those of an earlier update,
    and those of a model that was pruned before.

    Input and recurrent weights of event layers, linear layers (the readout) and embeddings are pruned. Biases,
    thresholds and convolutions are not. Tied weights have one mask. The masks are parametrisations
    (:mod:`torch.nn.utils.parametrize`): dropconnect, ``torch.compile`` and distributed training see masked weights.

    Blocks are consecutive outputs of one input, so that :class:`egru.EventEngine` reads whole vectors. Embeddings that
    are not tied, and linear layers with fewer outputs than a block, are pruned weight by weight.

    Args:
        model: Model with at least one event layer. It is changed in place.
        sparsity: Final fraction of weights that are zero, in [0, 1), rounded down to whole blocks.
        block: Number of consecutive outputs that are pruned together; must divide the number of units of each event
            layer and of outputs of each linear layer. Default: 1.
        scope: ``"global"`` prunes the weights of all matrices that are smallest relative to the mean magnitude of
            their matrix, ``"layer"`` the same fraction of each matrix. Default: ``"global"``.
        share: Fraction of training after which the final sparsity is reached. Default: 0.75.

    Raises:
        TypeError: If an argument is not a number or the model is not a module.
        ValueError: If an argument is out of range, a block does not divide, the model has no event layer, the final
            sparsity would leave no weight of a matrix, or weights cannot be masked: parametrised, computed by a hook,
            not initialised, not finite, or all zero. The model does not change.

    Example:
        >>> import torch, egru
        >>> model = egru.models.SequenceClassifier(8, 32, 5)
        >>> pruning = egru.compress.WeightPruning(model, 0.8)
        >>> for epoch in range(10):
        ...     _ = pruning.update(epoch / 10)
        ...     # train for one epoch
        >>> round(pruning.sparsity, 2)
        0.8
        >>> pruning.remove()  # the zeros stay, the masks go
    """

    def __init__(
        self,
        model: nn.Module,
        sparsity: float,
        *,
        block: int = 1,
        scope: PruningScope = "global",
        share: float = 0.75,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"WeightPruning: model must be a torch.nn.Module, got {type(model).__name__}")
        for name, value, kind in (("sparsity", sparsity, float), ("block", block, int), ("share", share, float)):
            if not isinstance(value, int | kind):
                raise TypeError(f"WeightPruning: {name} must be a number ({kind.__name__}), got {value!r}")
        if not 0 <= sparsity < 1:
            raise ValueError(f"WeightPruning: sparsity must be in [0, 1), got {sparsity!r}")
        if block < 1:
            raise ValueError(f"WeightPruning: block must be at least 1, got {block!r}")
        if scope not in ("global", "layer"):
            raise ValueError(f"WeightPruning: scope must be 'global' or 'layer', got {scope!r}")
        if not 0 <= share <= 1:
            raise ValueError(f"WeightPruning: share must be in [0, 1], got {share!r}")
        self.final, self.scope, self.share = sparsity, scope, share
        self.matrices = list(_find_matrices(model, block))
        self._removed = False
        for matrix in self.matrices:
            mask = Mask(matrix.weight.detach() != 0)
            for module, name in matrix.owners:
                parametrize.register_parametrization(module, name, mask)
        try:
            self._masks(sparsity)  # fail now, not in the middle of a run
        except ValueError:
            self.remove()
            raise

    def goal(self, progress: float) -> float:
        """Return the sparsity of the schedule after a fraction of training."""
        if not isinstance(progress, int | float):
            raise TypeError(f"WeightPruning: progress must be a number, got {progress!r}")
        if not progress >= 0:
            raise ValueError(f"WeightPruning: progress must be at least 0, got {progress!r}")
        if progress >= self.share:
            return self.final
        return self.final * (1 - (1 - progress / self.share) ** 3)

    @property
    def sparsity(self) -> float:
        """Fraction of weights that are zero."""
        self._require_masks()
        kept = sum(int(matrix.mask.count_nonzero()) for matrix in self.matrices)
        return 1 - kept / sum(matrix.mask.numel() for matrix in self.matrices)

    @torch.no_grad()
    def update(self, progress: float) -> float:
        """Prune to the sparsity of the schedule.

        Args:
            progress: Fraction of training that is done, from 0 to 1.

        Returns:
            The sparsity that was aimed at.

        Raises:
            ValueError: If ``progress`` is negative, a weight is not finite, or no weight of a matrix would be left,
                because training has changed which weights are small. The model does not change.
            RuntimeError: If the masks were removed.
        """
        goal = self.goal(progress)
        self._require_masks()
        for matrix, mask in zip(self.matrices, self._masks(goal), strict=True):
            matrix.mask.copy_(mask)
        return goal

    @torch.no_grad()
    def _masks(self, goal: float) -> list[Tensor]:
        """Return the mask of each matrix for a sparsity."""
        masks: list[Tensor] = []
        for group in [self.matrices] if self.scope == "global" else [[matrix] for matrix in self.matrices]:
            blocks = [matrix.blocks() for matrix in group]
            magnitudes, sizes = (torch.cat(parts) for parts in zip(*blocks, strict=True))
            total = sum(matrix.mask.numel() for matrix in group)
            number = math.floor(goal * total) - (total - int(sizes.sum()))  # of weights to remove
            order = magnitudes.sort(stable=True).indices
            removed = torch.zeros_like(order, dtype=torch.bool)
            removed[order] = sizes[order].cumsum(0) <= number
            parts = removed.split([len(part.size) for part in blocks])
            masks += [matrix.empty(part) for matrix, part in zip(group, parts, strict=True)]
        for matrix, mask in zip(self.matrices, masks, strict=True):
            if not mask.any():
                raise ValueError(
                    f"WeightPruning: a sparsity of {goal:.3g} over all matrices removes all weights of {matrix.name}; "
                    "lower it, or prune the same fraction of each matrix (scope='layer')"
                )
        return masks

    def remove(self) -> None:
        """Remove the parametrisations. The pruned weights are zero from then on until they are trained.

        Raises:
            RuntimeError: If the masks were removed before.
        """
        self._require_masks()
        self._removed = True
        for module in {module for matrix in self.matrices for module, _ in matrix.owners}:
            # torch removes properties from the class, which copies of the module share.
            shared = type(module)
            own = {name: value for name, value in vars(shared).items() if name not in ("__dict__", "__weakref__")}
            module.__class__ = type(shared.__name__, shared.__bases__, own)  # pyright: ignore[reportAttributeAccessIssue]
        for matrix in self.matrices:
            masked = matrix.weight.detach().clone()
            for module, name in matrix.owners:
                parametrize.remove_parametrizations(module, name, leave_parametrized=False)
            with torch.no_grad():
                matrix.weight.copy_(masked)

    def _require_masks(self) -> None:
        if self._removed:
            raise RuntimeError("WeightPruning: the masks were removed; create a new WeightPruning")


def prune_weights(model: nn.Module, sparsity: float, *, block: int = 1, scope: PruningScope = "global") -> None:
    """Set the weights with the smallest magnitudes to zero, once and in place.

    Args:
        model: Model with at least one event layer.
        sparsity: Fraction of weights to set to zero, in [0, 1), rounded down to whole blocks.
        block: Number of consecutive outputs that are pruned together. Default: 1.
        scope: ``"global"`` or ``"layer"``, see :class:`WeightPruning`. Default: ``"global"``.

    Raises:
        ValueError: As :class:`WeightPruning` does.

    Example:
        >>> import egru
        >>> layer = egru.EGRU(8, 32)
        >>> egru.compress.prune_weights(layer, 0.5, block=16)
        >>> round((layer.weight_hh_l0 == 0).float().mean().item(), 1)
        0.5
    """
    pruning = WeightPruning(model, sparsity, block=block, scope=scope)
    try:
        pruning.update(1.0)
    finally:
        pruning.remove()


def fold_masks(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of a model with masks as one of the model without: masked weights under their own names."""
    folded = dict(weights)
    for name in weights:
        if name.endswith(_MASK) and "parametrizations." in name:
            prefix = name.removesuffix(_MASK)
            mask, original = folded.pop(name), folded.pop(f"{prefix}.original")
            folded[prefix.replace("parametrizations.", "")] = original * mask
    return folded


def _find_matrices(model: nn.Module, block: int) -> Iterator[Matrix]:
    """Yield the weights to prune, tied ones once; raise ValueError if a block does not divide."""
    found: dict[int, tuple[str, list[tuple[nn.Module, str]], int]] = {}

    def add(label: str, module: nn.Module, name: str, width: int) -> None:
        full_name = f"{label}.{name}"
        if parametrize.is_parametrized(module, name):
            raise ValueError(f"WeightPruning: {full_name} must not be parametrised; remove its parametrisations first")
        parameter = module._parameters.get(name)
        if parameter is None:
            raise ValueError(f"WeightPruning: {full_name} is not a parameter but computed by a hook; make it permanent")
        if is_lazy(parameter) or parameter.is_meta:
            raise ValueError(f"WeightPruning: {full_name} is not initialised yet")
        if not parameter.any():
            raise ValueError(f"WeightPruning: all weights of {full_name} are zero and would stay zero; initialise them")
        _, owners, _ = found.setdefault(id(parameter), (full_name, [], width))
        owners.append((module, name))
        if width > found[id(parameter)][2]:  # an embedding that a readout shares is pruned as the readout
            found[id(parameter)] = (full_name, owners, width)

    layers = {layer: label for label, layer in event_layers(model)}
    if not layers:
        raise ValueError(f"WeightPruning: the model must have an event layer, got {type(model).__name__}")
    for layer, label in layers.items():
        _require_divisor(block, layer.hidden_size, f"units of {label}")
        for direction in layer.directions():
            for name in ("weight_ih", "weight_hh"):
                add(label, layer, name + direction.suffix, block)
    for label, module in labelled_modules(model):
        if isinstance(module, nn.Embedding):
            add(label, module, "weight", 1)
        elif isinstance(module, nn.Linear):
            outputs = module.out_features
            if outputs >= block:
                _require_divisor(block, outputs, f"outputs of {label}")
            add(label, module, "weight", block if outputs >= block else 1)
    for name, owners, width in found.values():
        yield Matrix(name, tuple(owners), width)


def _require_divisor(block: int, size: int, what: str) -> None:
    if size % block:
        near = [block * (size // block), block * (size // block + 1)]
        sizes = " or ".join(str(value) for value in near if value)
        raise ValueError(
            f"WeightPruning: block must divide the {size} {what}, got {block}; change them to {sizes}, or block=1"
        )
