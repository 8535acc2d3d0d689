"""The CUDA backend of the sequence operation: selects the implementation that runs a problem."""

import dataclasses

import torch
from torch import Tensor

from egru.kernels.cuda import cluster, lstm_steps, persistent, products, small_batch, stepwise
from egru.kernels.cuda.device import on_device
from egru.kernels.cuda.plan import Plan
from egru.kernels.cuda.prepare import PendingForward
from egru.kernels.cuda.tensors import lstm_reserve_shape, reserve_shape
from egru.kernels.problem import Backward, Forward, Problem
from egru.types import ResetGate


class CUDAKernel:
    """NVIDIA GPUs: one kernel for the whole sequence if the weights fit into shared memory, else fused steps.

    LSTMs always run in fused steps.
    """

    name = "cuda"
    device: str | None = "cuda"
    options = frozenset({"lean", "cell", "compare", "events"})
    reads_y = False

    def describe(self) -> str:
        """Return the device and the implementation it supports, or why the backend is unavailable."""
        if not torch.cuda.is_available():
            return "NVIDIA GPUs: none on this machine"
        major, minor = torch.cuda.get_device_capability()
        kernels = "persistent kernels" if major == 9 else "fused steps (persistent kernels require a Hopper GPU)"
        return f"NVIDIA GPUs: {torch.cuda.get_device_name()}, compute capability {major}.{minor}, {kernels}"

    def unsupported(self, problem: Problem) -> str | None:
        """Return why this backend cannot run ``problem``, or None if it can."""
        if torch.version.hip is not None:
            return "it requires NVIDIA CUDA, got ROCm"
        if problem.weight_hh.dtype != torch.float32:
            return f"it requires float32 parameters, got {problem.weight_hh.dtype}"
        if problem.cell == "gru" and problem.events != "positive":
            return f"it does not support events={problem.events!r} in a GRU"
        if problem.events == "delta" and (problem.reset != "none" or problem.compare != "output"):
            return "it requires reset='none' and compare='output' with events='delta'"
        if problem.precision not in products.OPERANDS:
            return f"it supports products in float32, bfloat16 or float16, got {problem.precision}"
        if problem.reset_scale.dim() and problem.reset != "none":
            return "it requires one reset_scale for all units, got one per unit"
        if problem.surrogate.shape != "triangle":
            return f"it supports the triangle surrogate only, got {problem.surrogate.shape!r}"
        if min(problem.input.shape) == 0:
            return f"it requires at least one step, row and feature, got an input of shape {tuple(problem.input.shape)}"
        if problem.input.dtype != torch.float32:
            return f"it requires a float32 input, got {problem.input.dtype}"
        return None

    def reserve_shape(self, problem: Problem) -> tuple[int, ...]:
        """Return the shape of the reserve, which all implementations of a cell share."""
        if problem.lean:
            return (0,)
        return lstm_reserve_shape(problem) if problem.cell == "lstm" else reserve_shape(problem)

    def forward(self, problem: Problem, save: bool) -> Forward:
        """Run the sequence. ``save`` requests the reserve, unless the problem is lean."""
        save = save and not problem.lean
        if problem.cell == "lstm":
            with on_device(problem.input.device.index):
                return lstm_steps.forward(problem, save)
        pending = problem.started
        if pending is None:
            pending = self.begin(
                problem.input, problem.weight_ih, problem.weight_hh, problem.reset_gate, problem.precision
            )
        with on_device(problem.input.device.index):
            if not isinstance(pending, PendingForward):
                return stepwise.forward(problem, save)
            plan = pending.plan
            if isinstance(plan, cluster.ClusterPlan):
                return cluster.forward(problem, plan, pending, save)
            if isinstance(plan, small_batch.SmallBatchPlan):
                return small_batch.forward(problem, plan, pending, save)
            assert isinstance(plan, Plan)
            return persistent.forward(problem, plan, pending, save)

    def begin(
        self, input: Tensor, weight_ih: Tensor, weight_hh: Tensor, reset_gate: ResetGate, precision: str
    ) -> PendingForward | None:
        """Enqueue the work that precedes the forward kernel. Returns None if the sequence runs in fused steps."""
        if torch.version.hip is not None or input.dim() != 3 or input.numel() == 0:
            return None
        if not input.dtype is weight_ih.dtype is weight_hh.dtype is torch.float32:
            return None
        if precision not in products.OPERANDS:
            return None
        units = weight_hh.shape[1]
        if (cluster_plan := cluster.find_plan(input, units, reset_gate, precision)) is not None:
            with on_device(input.device.index):
                return cluster.begin(cluster_plan, input, weight_ih)
        small_plan = small_batch.find_plan(input, units, reset_gate, precision)
        plan = None if small_plan is not None else persistent.find_plan(input, units, reset_gate, precision)
        with on_device(input.device.index):
            if small_plan is not None:
                return small_batch.begin(small_plan, input, weight_ih, weight_hh, precision)
            return None if plan is None else persistent.begin(plan, input, weight_ih, weight_hh, reset_gate, precision)

    def backward(
        self,
        problem: Problem,
        y: Tensor | None,
        c: Tensor,
        reserve: Tensor,
        grad_y: Tensor | None,
        grad_c: Tensor | None,
        grad_c_last: Tensor | None,
        grad_y_last: Tensor | None,
        input_gradient: bool,
        state_gradient: bool = True,
    ) -> Backward:
        """Return the gradients; a lean problem first runs forward again to restore its reserve."""
        if problem.lean:
            problem = dataclasses.replace(problem, lean=False)
            reserve = self.forward(problem, save=True).reserve
        grads = (grad_y, grad_c, grad_c_last, grad_y_last)
        if problem.cell == "lstm":
            with on_device(problem.input.device.index):
                return lstm_steps.backward(problem, c, reserve, *grads, input_gradient)
        sizes = problem.input, problem.theta.shape[0], problem.reset_gate, problem.precision
        cluster_plan = cluster.find_plan(*sizes, direction="backward")
        plan = persistent.find_plan(*sizes)
        with on_device(problem.input.device.index):
            if cluster_plan is not None:
                return cluster.backward(problem, cluster_plan, c, reserve, *grads, input_gradient)
            if plan is None:
                return stepwise.backward(problem, c, reserve, *grads, input_gradient)
            return persistent.backward(problem, plan, c, reserve, *grads, input_gradient)
