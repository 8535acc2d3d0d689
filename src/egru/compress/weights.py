"""Gradual magnitude pruning of weights, with masks that are parametrisations."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
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

    def magnitude(self) -> Tensor:
        """Return the mean magnitude of the block of each weight, relative to that of the matrix; -1 for zeros."""
        weight = self.weight.detach().abs()
        if self.block > 1:
            blocks = weight.unflatten(0, (-1, self.block))
            weight = blocks.mean(1, keepdim=True).expand_as(blocks).flatten(0, 1)
        zero = weight == 0
        return (weight / weight.sum() * (~zero).sum()).masked_fill(zero, -1.0)


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
        sparsity: Final fraction of weights that are zero, in [0, 1).
        block: Number of consecutive outputs that are pruned together; must divide the number of units of each event
            layer and of outputs of each linear layer. Default: 1.
        scope: ``"global"`` prunes the weights of all matrices that are smallest relative to the mean magnitude of
            their matrix, ``"layer"`` the same fraction of each matrix. Default: ``"global"``.
        share: Fraction of training after which the final sparsity is reached. Default: 0.75.

    Raises:
        ValueError: If an argument is out of range, a block does not divide, or the model has no event layer.

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
        for matrix in self.matrices:
            mask = Mask(matrix.weight.detach() != 0)
            for module, name in matrix.owners:
                parametrize.register_parametrization(module, name, mask)

    def goal(self, progress: float) -> float:
        """Return the sparsity of the schedule after a fraction of training."""
        if progress >= self.share:
            return self.final
        return self.final * (1 - (1 - progress / self.share) ** 3)

    @property
    def sparsity(self) -> float:
        """Fraction of weights that are zero."""
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
            ValueError: If no weight of a matrix would be left.
        """
        goal = self.goal(progress)
        groups = [self.matrices] if self.scope == "global" else [[matrix] for matrix in self.matrices]
        for group in groups:
            magnitudes = [matrix.magnitude() for matrix in group]
            values = torch.cat([magnitude.flatten() for magnitude in magnitudes])
            count = math.floor(goal * len(values))
            if not count:
                continue
            limit = values.sort().values[count - 1]  # kthvalue is not deterministic on a GPU
            for matrix, magnitude in zip(group, magnitudes, strict=True):
                keep = (magnitude > limit) & (matrix.mask != 0)
                if not keep.any():
                    raise ValueError(
                        f"WeightPruning: a sparsity of {goal:.3g} removes all weights of {matrix.name}; lower it, or "
                        "prune with scope='layer'"
                    )
                matrix.mask.copy_(keep)
        return goal

    def remove(self) -> None:
        """Remove the parametrisations. The pruned weights are zero from then on until they are trained."""
        for matrix in self.matrices:
            masked = matrix.weight.detach().clone()
            for module, name in matrix.owners:
                parametrize.remove_parametrizations(module, name, leave_parametrized=False)
            with torch.no_grad():
                matrix.weight.copy_(masked)


def prune_weights(model: nn.Module, sparsity: float, *, block: int = 1, scope: PruningScope = "global") -> None:
    """Set the weights with the smallest magnitudes to zero, once and in place.

    Args:
        model: Model with at least one event layer.
        sparsity: Fraction of weights to set to zero, in [0, 1).
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
        parameter = getattr(module, name)
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
        raise ValueError(f"WeightPruning: block must divide the {size} {what}, got {block}; use {sizes}, or block=1")
