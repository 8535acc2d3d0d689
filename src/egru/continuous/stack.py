"""A stack of continuous-time layers."""

from collections.abc import Sequence

from torch import Tensor, nn

from egru.continuous.inputs import InputEvents
from egru.continuous.module import ContinuousEGRU
from egru.continuous.outputs import ContinuousOutput, ContinuousState
from egru.continuous.problem import RunningLoss


class ContinuousStack(nn.Module):
    """Layers in sequence: the events of each layer are the input of the next one.

    Gradients pass from layer to layer through event times and amplitudes.

    Args:
        *layers: The layers, first to last. The ``input_size`` of each must be the ``hidden_size`` of the one before.

    Raises:
        ValueError: If there are no layers or their sizes do not match.
        TypeError: If a layer is not a :class:`ContinuousEGRU`.

    Example:
        >>> stack = ContinuousStack(ContinuousEGRU(3, 32), ContinuousEGRU(32, 16))
        >>> first, last = stack(events, horizon=4.0, readout_times=[4.0])
        >>> last.trace.sum().backward()
    """

    def __init__(self, *layers: ContinuousEGRU) -> None:
        super().__init__()
        if not layers:
            raise ValueError("ContinuousStack: at least one layer is required, got none")
        for k, layer in enumerate(layers):
            if not isinstance(layer, ContinuousEGRU):
                raise TypeError(f"ContinuousStack: layer {k} must be a ContinuousEGRU, got {type(layer).__name__}")
            if k and layer.input_size != layers[k - 1].hidden_size:
                raise ValueError(
                    f"ContinuousStack: input_size of layer {k} must be the hidden_size of layer {k - 1}, "
                    f"{layers[k - 1].hidden_size}; got {layer.input_size}"
                )
        self.layers = nn.ModuleList(layers)

    def forward(
        self,
        input: InputEvents,
        horizon: float | Tensor,
        readout_times: Tensor | Sequence[float] | None = None,
        states: Sequence[ContinuousState] | None = None,
        *,
        running_loss: RunningLoss | None = None,
    ) -> tuple[ContinuousOutput, ...]:
        """Run all layers from time 0 to ``horizon``.

        Args:
            input: Input events of the first layer.
            horizon: The end of the run, one number or one per sample.
            readout_times: When states and traces of every layer are read; see :meth:`ContinuousEGRU.forward`.
            states: One initial state per layer. If None, the default initial states.
            running_loss: A running loss on the states of the last layer.

        Returns:
            One output per layer, first to last.

        Raises:
            ValueError: If the number of states is not the number of layers, or an argument is invalid.
            EventLimitError: If a sample emits too many events.
        """
        if states is not None and len(states) != len(self.layers):
            raise ValueError(
                f"ContinuousStack: states must have one entry per layer, {len(self.layers)}; got {len(states)}"
            )
        outputs: list[ContinuousOutput] = []
        for k, layer in enumerate(self.layers):
            last = k == len(self.layers) - 1
            output = layer(
                input,
                horizon,
                readout_times,
                None if states is None else states[k],
                running_loss=running_loss if last else None,
            )
            outputs.append(output)
            input = output.as_input()
        return tuple(outputs)
