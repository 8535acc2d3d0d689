"""The CUDA kernel of the sequence operation: which of its forms runs a problem."""

import dataclasses

import torch
from torch import Tensor

from egru.kernels.cuda import arrange, few, persistent, products, stepwise
from egru.kernels.cuda.plan import Plan
from egru.kernels.problem import Backward, Forward, Problem


class CUDAKernel:
    """NVIDIA GPUs: one kernel for the whole sequence where the weights fit the chip, else fused steps."""

    name = "cuda"
    options = frozenset({"lean"})
    reads_y = False

    def describe(self) -> str:
        """What it runs on here, or why it runs nowhere."""
        if not torch.cuda.is_available():
            return "NVIDIA GPUs: none on this machine"
        major, minor = torch.cuda.get_device_capability()
        form = "persistent kernels" if major == 9 else "fused steps (persistent kernels need a Hopper chip)"
        return f"NVIDIA GPUs: {torch.cuda.get_device_name()}, compute capability {major}.{minor}, {form}"

    def unsupported(self, problem: Problem) -> str | None:
        device = problem.input.device
        if device.type != "cuda":
            return f"it runs on CUDA tensors, not on {device.type}"
        if torch.version.hip is not None:
            return "it needs NVIDIA's CUDA, not ROCm"
        if problem.weight_hh.dtype != torch.float32:
            return f"it keeps a float32 state, and the parameters are {problem.weight_hh.dtype}"
        if problem.precision not in products.OPERANDS:
            return f"it multiplies in float32, bfloat16 or float16, not in {problem.precision}"
        if problem.reset_scale.dim() and problem.reset != "none":
            return "it has one reset_scale for all units"
        if problem.surrogate.shape != "triangle":
            return f"it knows the triangle surrogate, not {problem.surrogate.shape!r}"
        if min(problem.input.shape) == 0:
            return f"the input is empty: {tuple(problem.input.shape)}"
        if problem.input.dtype != torch.float32:
            return f"it rounds a float32 input itself, and this one is {problem.input.dtype}"
        return None

    def reserve_shape(self, problem: Problem) -> tuple[int, ...]:
        return (0,) if problem.lean else stepwise.reserve_shape(problem)  # all forms save the same

    def forward(self, problem: Problem, save: bool) -> Forward:
        save = save and not problem.lean
        started = problem.started
        if started is None:
            started = self.begin(
                problem.input, problem.weight_ih, problem.weight_hh, problem.reset_gate, problem.precision
            )
        with stepwise.on_device(problem.input.device.index):
            if not isinstance(started, arrange.Started):
                return stepwise.forward(problem, save)
            plan = started.plan
            if isinstance(plan, few.FewPlan):
                return few.forward(problem, plan, started, save)
            assert isinstance(plan, Plan)
            return persistent.forward(problem, plan, started, save)

    def begin(
        self, input: Tensor, weight_ih: Tensor, weight_hh: Tensor, reset_gate: str, precision: str
    ) -> arrange.Started | None:
        """Ask the device for what a forward pass does before its kernel; None where no kernel runs a whole sequence."""
        if torch.version.hip is not None or input.dim() != 3 or input.numel() == 0:
            return None
        if not input.dtype is weight_ih.dtype is weight_hh.dtype is torch.float32:
            return None
        if precision not in products.OPERANDS:
            return None
        kind = input, weight_hh.shape[1], reset_gate, precision
        partition = few.find_few(*kind)
        plan = None if partition is not None else persistent.find_plan(*kind)
        with stepwise.on_device(input.device.index):
            if partition is not None:
                return few.begin(partition, input, weight_ih, weight_hh, precision)
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
    ) -> Backward:
        if problem.lean:
            problem = dataclasses.replace(problem, lean=False)
            reserve = self.forward(problem, save=True).reserve
        grads = (grad_y, grad_c, grad_c_last, grad_y_last)
        plan = persistent.find_plan(problem.input, problem.theta.shape[0], problem.reset_gate, problem.precision)
        with stepwise.on_device(problem.input.device.index):
            if plan is None:
                return stepwise.backward(problem, c, reserve, *grads, input_gradient)
            return persistent.backward(problem, plan, c, reserve, *grads, input_gradient)
