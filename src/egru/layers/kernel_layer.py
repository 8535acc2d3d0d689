"""The base class of event layers that run on the kernels."""

from typing import Any

import torch
from torch import Tensor

from egru.events import EventState
from egru.kernels import Problem, run_sequence
from egru.layers import checks
from egru.layers.stack import EventRNN
from egru.layers.structure import Weights
from egru.types import BACKENDS, Backend


class KernelEventRNN(EventRNN):
    """Base class of :class:`egru.EGRU` and :class:`egru.ELSTM`: choose a kernel and run one direction on it."""

    backend: Backend
    lean: bool

    def _set_kernel_options(self, backend: Backend, lean: bool) -> None:
        self.backend = checks.choice(type(self).__name__, "backend", backend, BACKENDS)
        self.lean = bool(lean)

    def _cell_options(self) -> dict[str, Any]:
        """Return the fields of :class:`egru.kernels.Problem` that select the cell and its variants."""
        raise NotImplementedError

    def run_direction(
        self,
        x: Tensor,
        state: EventState,
        weights: Weights,
        keep: Tensor | None = None,
        lengths: Tensor | None = None,
        started: object = None,
    ) -> tuple[Tensor, Tensor, EventState]:
        if weights.reset_scale.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{type(self).__name__}: reset_scale must not require a gradient, because no kernel computes it; call "
                "reset_scale.requires_grad_(False)"
            )
        problem = Problem(
            x,
            *state,
            weights.ih,
            weights.hh,
            weights.bias_ih,
            weights.bias_hh,
            weights.theta,
            weights.reset_scale,
            keep,
            lengths,
            reset=self.reset,
            surrogate=self.surrogate,
            precision=autocast_precision(x),
            lean=self.lean,
            recurrent_clip=self.recurrent_clip or 0.0,
            events=self.events,
            started=started,
            **self._cell_options(),
        )
        return run_sequence(problem, self.backend)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backend={self.backend!r}"


_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def autocast_precision(x: Tensor) -> str:
    """Return the name of the dtype that autocast rounds products to, or an empty string without autocast."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return ""
    dtype = torch.get_autocast_dtype(device)
    return _DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")
