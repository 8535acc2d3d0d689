"""Parameters of an event layer: names, shapes, initialisation, loading, and selection of units."""

import copy
import dataclasses
import math
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from egru.layers import checks
from egru.layers.loading import compare
from egru.layers.structure import Direction, Weights, direction_name
from egru.layers.threshold import Threshold


class EventParameters(nn.Module):
    """The parameters of a stack of event layers, with the names, shapes and gate order of ``torch.nn.GRU``.

    Base class of :class:`egru.layers.EventRNN`, which runs the stack. See :class:`egru.EGRU` for the arguments.

    Example:
        >>> [name for name, _ in egru.EGRU(4, 8, bias=False).named_parameters()]
        ['weight_ih_l0', 'weight_hh_l0', 'threshold_l0']
    """

    gates: int
    """Number of gates: blocks of ``hidden_size`` rows in ``weight_ih`` and ``weight_hh``."""
    reset_scale: Tensor
    """Scale of the reset: 0-dim, or one value per unit, the directions concatenated in the order of execution."""
    _rest: Tensor
    """Zeros, ``(hidden_size,)``: the initial state, kept so that a call does not have to allocate it."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        bidirectional: bool,
        threshold: Threshold | None,
        reset_scale: float | Tensor,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        self.input_size = checks.positive_int(owner, "input_size", input_size)
        self.hidden_size = checks.positive_int(owner, "hidden_size", hidden_size)
        self.num_layers = checks.positive_int(owner, "num_layers", num_layers)
        self.bias, self.bidirectional = bool(bias), bool(bidirectional)
        self.threshold_config = checks.instance(owner, "threshold", threshold or Threshold(), Threshold)
        self._initial_reset_scale = checks.scale(owner, "reset_scale", reset_scale)
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"{owner}: dtype must be a floating type, got {dtype}")
        self._directions = self._build_directions()
        self._register_tensors(device, dtype)
        self.reset_parameters()

    def _build_directions(self) -> tuple[Direction, ...]:
        directions: list[Direction] = []
        for layer in range(self.num_layers):
            features = self.input_size if layer == 0 else self.hidden_size * self.num_directions
            for reverse in (False, True)[: self.num_directions]:
                name = direction_name(layer, reverse)
                directions.append(Direction(name, len(directions), layer, reverse, features, f"_{name}"))
        return tuple(directions)

    def _register_tensors(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        rows, H = self.gates * self.hidden_size, self.hidden_size
        for direction in self._directions:
            shapes = {"weight_ih": (rows, direction.input_size), "weight_hh": (rows, H)}
            if self.bias:
                shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
            for name, shape in shapes.items():
                parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                self.register_parameter(name + direction.suffix, parameter)
            tau = torch.empty(self.threshold_config.size(H), device=device, dtype=dtype)
            trainable = self.threshold_config.trainable
            self.register_parameter("threshold" + direction.suffix, nn.Parameter(tau, requires_grad=trainable))
        self.register_buffer("reset_scale", torch.empty((), device=device, dtype=dtype))
        self.register_buffer("_rest", torch.zeros(H, device=device, dtype=dtype), persistent=False)

    def reset_parameters(self) -> None:
        """Initialise all parameters as in the paper.

        Weights are Xavier-uniform per gate, biases uniform in ``±1/sqrt(hidden_size)``, and thresholds follow their
        :class:`egru.Threshold`.
        """
        bound = 1 / math.sqrt(self.hidden_size)
        self._rest.zero_()
        self.reset_scale.fill_(self._initial_reset_scale)
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("weight"):
                for block in torch.split(parameter.data, self.hidden_size):
                    nn.init.xavier_uniform_(block)
            elif name.startswith("bias"):
                nn.init.uniform_(parameter, -bound, bound)
            else:
                self.threshold_config.initialise_(parameter.data)

    def _parameter(self, name: str) -> Tensor:
        """Return the parameter of that name, or its parametrised value; faster than attribute access."""
        parameter = self._parameters.get(name)
        return getattr(self, name) if parameter is None else parameter

    def _buffer(self, name: str) -> Tensor:
        """Return the buffer of that name, or its parametrised value; faster than attribute access."""
        buffer = self._buffers.get(name)
        return getattr(self, name) if buffer is None else buffer

    @property
    def _first_weight(self) -> Tensor:
        """The first recurrent weight. All parameters share its dtype and device."""
        return self._parameter("weight_hh" + self._directions[0].suffix)

    @property
    def num_directions(self) -> int:
        """Number of directions per layer: 2 if bidirectional, else 1."""
        return 2 if self.bidirectional else 1

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The weights and biases of each direction, as in ``torch.nn.GRU``; thresholds are not included."""
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh") if self.bias else ("weight_ih", "weight_hh")
        return [[self._parameter(kind + direction.suffix) for kind in kinds] for direction in self._directions]

    def flatten_parameters(self) -> None:
        """Do nothing. Code written for ``torch.nn.GRU`` calls this; kernels pack the weights themselves."""

    def directions(self) -> tuple[Direction, ...]:
        """Return the directions of all layers in the order of execution."""
        return self._directions

    def weights(self, direction: Direction) -> Weights:
        """Return the effective parameters of one direction.

        Thresholds are constrained. DropConnect is not applied, also in training: its masks are drawn in the forward
        pass.

        Args:
            direction: One of :meth:`directions`.

        Returns:
            The weights, biases, thresholds and reset scale, still part of the autograd graph.
        """
        suffix = direction.suffix
        return self._weights(direction, self._parameter("weight_ih" + suffix), self._parameter("weight_hh" + suffix))

    def _weights(self, direction: Direction, ih: Tensor, hh: Tensor) -> Weights:
        """Add biases, thresholds and reset scale to the two matrices."""
        suffix = direction.suffix
        return Weights(
            ih,
            hh,
            self._parameter("bias_ih" + suffix) if self.bias else None,
            self._parameter("bias_hh" + suffix) if self.bias else None,
            self.threshold_config.constrain(self._parameter("threshold" + suffix), self.hidden_size),
            self._scale(direction),
        )

    def thresholds(self) -> dict[str, Tensor]:
        """Return the constrained thresholds, ``(hidden_size,)`` each, by direction: ``{"l0": ..., "l1": ...}``."""
        return {direction.name: self.weights(direction).theta for direction in self._directions}

    def threshold_parameters(self) -> dict[str, nn.Parameter]:
        """Return the unconstrained threshold parameters by direction."""
        parameters = {d.name: self._parameters.get("threshold" + d.suffix) for d in self._directions}
        return {name: parameter for name, parameter in parameters.items() if parameter is not None}

    def reset_scales(self) -> dict[str, Tensor]:
        """Return the reset scales, 0-dim or ``(hidden_size,)``, by direction."""
        return {direction.name: self._scale(direction) for direction in self._directions}

    def _scale(self, direction: Direction) -> Tensor:
        scale = self._buffer("reset_scale")
        if not scale.dim():
            return scale
        return scale.view(len(self._directions), self.hidden_size)[direction.index]

    @torch.no_grad()
    def select(self, units: Tensor, inputs: Tensor | None = None) -> Self:
        """Return a copy with a subset of the units.

        The copy computes what this layer computes if the other units emit no events and the other inputs are zero.

        Args:
            units: Indices of the units to keep.
            inputs: Indices of the inputs to keep. If None, all.

        Returns:
            A layer with ``len(units)`` units and ``len(inputs)`` inputs.

        Raises:
            ValueError: If the layer has several layers or directions, or parametrised weights such as masks.
        """
        if parametrize.is_parametrized(self):
            name = parametrize.type_before_parametrizations(self).__name__
            raise ValueError(
                f"{name}.select: the weights are parametrised; remove the parametrisations first "
                "(WeightPruning.remove() removes masks)"
            )
        if self.num_layers * self.num_directions > 1:
            raise ValueError(
                f"{type(self).__name__}.select: requires one layer in one direction, "
                f"got num_layers={self.num_layers}, bidirectional={self.bidirectional}"
            )
        direction, H = self._directions[0], self.hidden_size
        units = units.to(self._first_weight.device)
        inputs = torch.arange(self.input_size, device=units.device) if inputs is None else inputs.to(units.device)
        rows = (H * torch.arange(self.gates, device=units.device)[:, None] + units).flatten()
        smaller = copy.deepcopy(self)
        smaller.input_size, smaller.hidden_size = len(inputs), len(units)
        smaller._directions = (dataclasses.replace(direction, input_size=len(inputs)),)
        smaller._rest = self._rest[: len(units)].clone()
        if self.reset_scale.dim():
            smaller.reset_scale = self.reset_scale[units]
        for name, parameter in self.named_parameters(recurse=False):
            values = parameter.detach()
            if name.startswith("threshold"):
                values = values[units] if self.threshold_config.per_unit else values
            else:
                values = values[rows]
                columns = {"weight_ih": inputs, "weight_hh": units}.get(name.removesuffix(direction.suffix))
                values = values if columns is None else values[:, columns]
            setattr(smaller, name, nn.Parameter(values.clone(), requires_grad=parameter.requires_grad))
        return smaller

    @torch.no_grad()
    def fold_input(self, weight: Tensor, bias: Tensor | None = None) -> Self:
        """Return a copy that reads ``x`` where this layer reads ``weight @ x + bias``.

        Args:
            weight: Matrix of the affine map, ``(input_size, features)``.
            bias: Offset of the affine map, ``(input_size,)``, or None. A layer without biases gets them.

        Returns:
            A layer with ``features`` inputs. Products are computed in float64, then rounded.
        """
        folded = copy.deepcopy(self)
        weight, bias = weight.double(), None if bias is None else bias.double()
        if bias is not None and not folded.bias:
            folded.bias = True
            for direction in self._directions:
                for name in ("bias_ih", "bias_hh"):
                    values = torch.zeros_like(self._parameter("weight_hh" + direction.suffix)[:, 0])
                    folded.register_parameter(name + direction.suffix, nn.Parameter(values))
        for direction in (d for d in self._directions if d.layer == 0):
            changed = {"weight_ih" + direction.suffix: self._parameter("weight_ih" + direction.suffix).double()}
            if bias is not None:
                name = "bias_ih" + direction.suffix
                product = changed["weight_ih" + direction.suffix] @ bias
                changed[name] = folded._parameter(name) + product.to(self._first_weight)
            changed["weight_ih" + direction.suffix] = changed["weight_ih" + direction.suffix] @ weight
            for name, values in changed.items():
                if parametrize.is_parametrized(folded, name):
                    parametrize.remove_parametrizations(folded, name)
                folded.register_parameter(name, nn.Parameter(values.to(self._first_weight)))
        folded.input_size = weight.shape[1]
        folded._directions = tuple(
            dataclasses.replace(d, input_size=weight.shape[1]) if d.layer == 0 else d for d in self._directions
        )
        return folded

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Also accept the state dict of the dense layer, without thresholds; change nothing unless everything fits."""
        owner, tensors = type(self).__name__, {**self._parameters, **self._buffers}
        expected = {name: tensor for name, tensor in tensors.items() if tensor is not None and name != "_rest"}
        loaded = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        scale = loaded.get("reset_scale", self.reset_scale)
        if scale.shape in ((), (len(self._directions) * self.hidden_size,)):
            expected["reset_scale"] = scale  # both shapes fit, whatever this layer has now
        missing, unexpected, mismatched = compare(expected, loaded, self._modules)
        if mismatched or (strict and (missing or unexpected)):
            for name in mismatched:
                shape, needed = tuple(loaded[name].shape), tuple(expected[name].shape)
                error_msgs.append(f"{prefix}{name} has shape {shape}, this {owner} requires {needed}")
            missing_keys.extend(prefix + name for name in missing)
            unexpected_keys.extend(prefix + name for name in unexpected)
            return
        if scale.shape != self.reset_scale.shape:
            self.reset_scale = self.reset_scale.new_empty(scale.shape)
        super()._load_from_state_dict(  # pyright: ignore[reportUnknownMemberType]
            state_dict, prefix, local_metadata, strict, [], unexpected_keys, error_msgs
        )
        self._rest = torch.zeros_like(self._first_weight[0])  # layers built on the meta device have no values yet
        missing_keys.extend(prefix + name for name in missing)
