"""The base class of event layers: state, observers, and the forward pass through a stack of layers."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from egru._warn import warn_user
from egru.events import EventState, Surrogate, check_events, compared
from egru.layers import checks, packing
from egru.layers.dropout import sequence_dropout, zoneout_keep
from egru.layers.parameters import EventParameters
from egru.layers.structure import Direction, Observer, Record, Weights, class_label, direction_label
from egru.layers.threshold import Threshold
from egru.types import DROPOUT_MODES, EVENTS, DropoutMode, Events, Reset


class EventRNN(EventParameters):
    """Base class of :class:`egru.EGRU`, :class:`egru.ELSTM` and :class:`egru.ERNN`.

    A subclass sets :attr:`gates` and :attr:`resets` and implements :meth:`run_direction`, and may implement
    :meth:`begin`. This class handles everything around it: layers, directions, packed input, dropout, zoneout, state
    and observers. See :class:`egru.EGRU` for the arguments.

    Example:
        >>> class LeakyIntegrator(egru.layers.EventRNN):
        ...     gates = 1
        ...     resets = ("output", "threshold", "hard", "none")
        ...
        ...     def run_direction(self, x, state, weights, keep=None, lengths=None, started=None):
        ...         def update(p, y, memory):
        ...             c = 0.9 * memory + p + torch.nn.functional.linear(y, weights.hh, weights.bias_hh)
        ...             return egru.functional.CellUpdate(c, output_gate=None, gates=())
        ...
        ...         p = torch.nn.functional.linear(x, weights.ih, weights.bias_ih)
        ...         result = egru.functional.event_sequence(
        ...             update, p, state, weights.theta, reset=self.reset, surrogate=self.surrogate, lengths=lengths
        ...         )
        ...         return result.y, result.c, result.state
        >>> events, state = LeakyIntegrator(4, 8, num_layers=2)(torch.randn(20, 2, 4))
    """

    resets: tuple[Reset, ...]
    """Accepted values of ``reset``."""
    emits_state: bool = True
    """Whether the value of an event is the state ``c``."""
    _state_names: tuple[str, str] = ("state.c", "state.y")

    @property
    def emits_compared(self) -> bool:
        """Whether the value of an event is what was compared with the threshold."""
        return self.emits_state

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        events: Events = "positive",
        reset: Reset = "output",
        threshold: Threshold | None = None,
        surrogate: Surrogate | None = None,
        reset_scale: float | Tensor = 1.0,
        dropconnect: float = 0.0,
        zoneout: float = 0.0,
        dropout_mode: DropoutMode = "variational",
        recurrent_clip: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size, hidden_size, num_layers, bias, bidirectional, threshold, reset_scale, device, dtype
        )
        owner = type(self).__name__
        self.batch_first = bool(batch_first)
        self.dropout = checks.probability(owner, "dropout", dropout, include_one=True)
        self.dropout_mode: DropoutMode = checks.choice(owner, "dropout_mode", dropout_mode, DROPOUT_MODES)
        self.events: Events = checks.choice(owner, "events", events, EVENTS)
        self.reset: Reset = checks.choice(owner, "reset", reset, self.resets)
        check_events(events, reset, owner=owner)
        if events != "positive" and (self.threshold_config.initial_value() or 0.0) < 0:
            raise ValueError(
                f"{owner}: events={events!r} requires thresholds of at least 0, got {self.threshold_config}"
            )
        self.surrogate = checks.instance(owner, "surrogate", surrogate or Surrogate(), Surrogate)
        self.dropconnect = checks.probability(owner, "dropconnect", dropconnect)
        self.zoneout = checks.probability(owner, "zoneout", zoneout)
        self.recurrent_clip = checks.positive_or_none(owner, "recurrent_clip", recurrent_clip)
        self._observers: list[tuple[Observer, str]] = []
        if dropout and num_layers == 1:
            warn_user(f"{owner}: dropout={dropout} acts between layers and num_layers=1 has none")

    def zero_state(self, batch: int | None = None) -> EventState:
        """Return the initial state, all zeros.

        Args:
            batch: Batch size ``B``, or None for unbatched input.

        Returns:
            Both halves with shape ``(num_layers * num_directions, B, H)``, or without ``B`` if unbatched.
        """
        sizes = () if batch is None else (batch,)
        shape = (len(self._directions), *sizes, self.hidden_size)
        return EventState(self._first_weight.new_zeros(shape), self._first_weight.new_zeros(shape))

    def observe(self, observer: Observer, label: str | None = None) -> Callable[[], None]:
        """Call a function with a :class:`Record` of each direction in every forward pass.

        Args:
            observer: Function of one :class:`Record`.
            label: Label of this layer in the records. If None, the name of its class in lower case.

        Returns:
            A function that removes the observer.
        """
        entry = (observer, class_label(self) if label is None else label)
        self._observers.append(entry)
        return lambda: self._observers.remove(entry)

    def forward(
        self, input: Tensor | PackedSequence, hx: EventState | Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, EventState]:
        """Run the layers over a sequence.

        Args:
            input: ``(T, B, I)``, ``(B, T, I)`` with ``batch_first``, ``(T, I)`` unbatched, or a ``PackedSequence``.
            hx: State returned by an earlier call, to continue its sequence. For layers that emit their state, a tensor
                ``h`` stands for ``EventState(h, h)``. If None, start from zeros.

        Returns:
            The output of the last layer, arranged like ``input``, and the state after the last step. Both halves of
            the state have shape ``(num_layers * num_directions, B, H)``.

        Raises:
            TypeError: If ``input`` or ``hx`` have the wrong type or dtype.
            ValueError: If they have the wrong shape or device, or contain NaN or infinite values. Values are checked
                on the CPU only, since on a GPU the check would have to wait for the device.
        """
        if (quick := self._run_quick(input, hx)) is not None:
            return quick
        if isinstance(input, PackedSequence):
            x, lengths = pad_packed_sequence(input)
            self._check_input(x)
            y, states = self._run(x, self._starts(x, hx), lengths.to(x.device))
            return packing.pack_like(y, input, lengths), packing.stack_states(states)
        self._check_input(input)
        if input.dim() == 2:
            if hx is not None:
                shape = (len(self._directions), self.hidden_size)
                c, y = self._check_state(hx, shape)
                hx = EventState(c[:, None], y[:, None])
            x = input[:, None]
            y, states = self._run(x, self._starts(x, hx), None)
            c_last, y_last = packing.stack_states(states)
            return y[:, 0], EventState(c_last[:, 0], y_last[:, 0])
        x = input.transpose(0, 1) if self.batch_first else input
        y, states = self._run(x, self._starts(x, hx), None)
        return (y.transpose(0, 1) if self.batch_first else y), packing.stack_states(states)

    def _run_quick(self, input: Any, hx: Any) -> tuple[Tensor, EventState] | None:
        """Return the result of :meth:`forward` with less overhead, or None if this is not a common case."""
        return None

    def _starts(self, x: Tensor, hx: EventState | Tensor | None) -> list[EventState] | None:
        """Check the initial state and return it for each direction; None for zeros."""
        if hx is None:
            return None
        weight, shape = self._first_weight, (len(self._directions), x.shape[1], self.hidden_size)
        state = self._check_state(hx, shape)
        return [EventState(*s) for s in zip(*(half.to(weight.dtype).unbind() for half in state), strict=True)]

    def _check_state(self, hx: Any, shape: tuple[int, ...]) -> EventState:
        names = self._state_names
        return checks.event_state(type(self).__name__, hx, shape, self._first_weight, self.emits_state, names)

    def _check_input(self, x: Any) -> None:
        weight = self._first_weight
        if (
            isinstance(x, Tensor)
            and x.dtype is weight.dtype
            and x.device == weight.device
            and x.dim() == 3
            and x.shape[2] == self.input_size
            and x.numel() > 0
        ):
            return  # the common case, without the cost of the detailed checks
        layout = "(batch, time, features)" if self.batch_first else "(time, batch, features)"
        layout = f"{layout} or (time, features)"
        checks.sequence_input(type(self).__name__, x, self.input_size, weight, (2, 3), layout)

    def _run(
        self, x: Tensor, starts: list[EventState] | None, lengths: Tensor | None
    ) -> tuple[Tensor, list[EventState]]:
        """Run all directions over ``x``, ``(T, B, I)``, and return the output and the final state of each."""
        T, B, _ = x.shape
        weight = self._first_weight
        if x.dtype != weight.dtype:
            x = x.to(weight.dtype)
        last: list[EventState] = []
        outputs: list[Tensor] = []
        for direction in self._directions:
            read = packing.reverse_time(x, lengths) if direction.reverse else x
            ih, hh = self._parameter("weight_ih" + direction.suffix), self._parameter("weight_hh" + direction.suffix)
            if self.dropconnect and self.training:
                hh = F.dropout(hh, self.dropconnect)  # one mask per call, shared by all steps
            started = self.begin(read, ih, hh)  # on a GPU, before the small operations below are queued
            weights = self._weights(direction, ih, hh)
            if starts is None:
                rest = self._buffer("_rest").expand(B, self.hidden_size)
                starts = [EventState(rest, rest)] * len(self._directions)
            start = starts[direction.index]
            keep = zoneout_keep(start.c, T, self.zoneout, self.training)
            y, c, end = self.run_direction(read, start, weights, keep, lengths, started)
            if direction.reverse:
                y = packing.reverse_time(y, lengths)
            outputs.append(y)
            last.append(end)
            self._notify(direction, x, y, c, start, weights.theta, lengths)
            if len(outputs) == self.num_directions:  # the layer is complete
                x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
                outputs = []
                if direction.layer < self.num_layers - 1:
                    x = sequence_dropout(x, self.dropout, self.dropout_mode, self.training)
        return x, last

    def _run_step(self, x: Tensor, hx: EventState | Tensor | None) -> EventState:
        """Run one step of a cell over ``x``, ``(B, I)`` or ``(I,)``, and return the new state."""
        owner, weight = type(self).__name__, self._first_weight
        plain = type(x) is Tensor and x.dim() == 2 and x.dtype is weight.dtype and x.device == weight.device
        if not (plain and x.shape[1] == self.input_size and x.numel() > 0):
            checks.sequence_input(owner, x, self.input_size, weight, (1, 2), "(batch, features) or (features,)")
        batch, starts = x.shape[:-1], None
        if hx is not None:
            c, y = self._check_state(hx, (*batch, self.hidden_size))
            c, y = c.to(weight.dtype), y.to(weight.dtype)
            starts = [EventState(c, y) if batch else EventState(c[None], y[None])]
        _, (last,) = self._run(x.unsqueeze(0) if batch else x[None, None], starts, None)
        return last if batch else EventState(last.c[0], last.y[0])

    def _notify(
        self,
        direction: Direction,
        x: Tensor,
        y: Tensor,
        c: Tensor,
        start: EventState,
        theta: Tensor,
        lengths: Tensor | None,
    ) -> None:
        """Pass a record to the observers. Unlike ``x`` and ``y``, ``c`` is in the order that the direction reads."""
        if not self._observers:
            return
        seen = c
        if self.events == "delta":
            read = packing.reverse_time(y, lengths) if direction.reverse else y
            seen = compared(c, torch.cat([start.y[None], read[:-1]]), self.events)
        if direction.reverse:
            c, seen = packing.reverse_time(c, lengths), packing.reverse_time(seen, lengths)
        for observer, layer_label in self._observers:
            label = direction_label(layer_label, direction.name, len(self._directions))
            observer(Record(label, self, direction, x, y, c, seen, theta, self.surrogate, lengths))

    def begin(self, x: Tensor, ih: Tensor, hh: Tensor) -> object:
        """Start work that depends only on the input and the matrices.

        Returns:
            An object for the argument ``started`` of :meth:`run_direction`, or None.
        """
        return None

    def run_direction(
        self,
        x: Tensor,
        state: EventState,
        weights: Weights,
        keep: Tensor | None = None,
        lengths: Tensor | None = None,
        started: object = None,
    ) -> tuple[Tensor, Tensor, EventState]:
        """Run one direction over a sequence.

        Args:
            x: Input, ``(T, B, input_size)``, in the order in which the direction reads it.
            state: Initial state, both halves ``(B, H)``.
            weights: Effective parameters, as returned by :meth:`weights`.
            keep: Fraction of the previous state that zoneout keeps, broadcastable to ``(T, B, H)``, or None.
            lengths: Number of valid steps per sequence, ``(B,)``, or None.
            started: Result of :meth:`begin` for the same input and matrices, or None.

        Returns:
            Outputs and states at every step, ``(T, B, H)`` each, and the final state.
        """
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_observers": []}  # observers belong to this object, not to its copies

    def extra_repr(self) -> str:
        """Return the arguments that differ from their defaults."""
        parts = [f"{self.input_size}, {self.hidden_size}"]
        if self.num_layers > 1:
            parts.append(f"num_layers={self.num_layers}")
        parts += [f"{n}=True" for n in ("batch_first", "bidirectional") if getattr(self, n)]
        if not self.bias:
            parts.append("bias=False")
        if self.events != "positive":
            parts.append(f"events={self.events!r}")
        parts.append(f"reset={self.reset!r}")
        parts += [
            f"{n}={getattr(self, n)}"
            for n in ("dropout", "dropconnect", "zoneout", "recurrent_clip")
            if getattr(self, n)
        ]
        return ", ".join([*parts, repr(self.threshold_config), repr(self.surrogate)])


_ARGUMENTS = tuple(inspect.signature(EventRNN).parameters)


def base_arguments(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Select the arguments of :class:`EventRNN` from the ``locals()`` of a subclass's constructor."""
    return {name: variables[name] for name in _ARGUMENTS if name in variables}
