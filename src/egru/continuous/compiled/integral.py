"""The integral of a running loss in the compiled engine.

The engine updates units one by one, but a running loss may couple them. So the engine also visits the nodes of a
quadrature over time, at which it advances all units. The running loss is evaluated at all nodes in one call. In the
backward pass its derivatives at the nodes are point losses, and every event contributes the jump of the running loss to
the derivative with respect to its time.
"""

from typing import Any

import torch
from torch import Tensor

from egru.continuous.problem import Problem, RunningLoss


class Integral:
    """The nodes of a run, the states there and just before events, and the integral.

    Attributes:
        value: The integral of each sample ``(B,)``. If values of the running loss require gradients, it is
            differentiable with respect to the tensors that they depend on.
    """

    def __init__(
        self, tape: Any, problem: Problem, running_loss: RunningLoss, times: Tensor, units: Tensor, counts: Tensor
    ) -> None:
        N, (B, H) = tape.node_count, problem.c0.shape
        t, w, c, before = (torch.empty(shape, dtype=torch.float64) for shape in ((N,), (N,), (N, H), (len(units), H)))
        sample = torch.empty(N, dtype=torch.int64)
        tape.copy_nodes(*(x.data_ptr() for x in (t, w, sample, c, before)))
        self.sample, self.w = sample, w.to(problem.c0.dtype)
        self.c, self.t, self.before = c.to(problem.c0.dtype), t.to(problem.c0.dtype), before.to(problem.c0.dtype)
        self.units = units
        self.event_times = times.to(problem.c0.dtype)
        self.event_sample = torch.repeat_interleave(torch.arange(B), counts)
        density = running_loss(self.c, self.t, sample)
        with torch.set_grad_enabled(density.requires_grad):
            self.value = self.w.new_zeros(B).index_add(0, sample, self.w * density)

    @torch.no_grad()
    def cotangents(self, running_loss: RunningLoss, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients with respect to the states at the nodes and to the event times.

        Args:
            running_loss: The running loss.
            weights: The gradient with respect to the integral of each sample ``(B,)``.
        """
        with torch.enable_grad():
            state = self.c.clone().requires_grad_()
            value = running_loss(state, self.t, self.sample)
            total = value.sum() + 0 * state.sum()  # a running loss need not depend on c
            (gradient,) = torch.autograd.grad(total, state)
        by_node = gradient * (self.w * weights[self.sample])[:, None]
        after = self.before.clone()
        after[torch.arange(len(after)), self.units] = 0.0
        jump = running_loss(self.before, self.event_times, self.event_sample)
        jump = jump - running_loss(after, self.event_times, self.event_sample)
        return by_node, weights[self.event_sample] * jump
