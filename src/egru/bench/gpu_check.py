"""Compare the first steps of a layer and their gradients with float64, before anything is timed.

Rounding can move a state across its threshold, and the trajectories then diverge. Every step of the reference therefore
starts from the layer's state at that step, and rounds the operands of products as the layer does. Events must agree
wherever the state is further from its threshold than the rounding error. The backward reference uses the states of the
layer's forward pass.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

import egru
from egru import functional
from egru.events import EventState
from egru.types import ResetGate

PRECISIONS = ("float32", "tf32", "float16", "bfloat16")
# Maximum absolute error of the state and relative error of gradients, as in tests/kernels/test_cuda.py. TF32 rounds
# inside the product, to 11 bits per operand, which the reference does not reproduce.
TOLERANCE = {"float32": (2e-5, 2e-5), "tf32": (4e-3, 1e-2), "float16": (1e-3, 4e-3), "bfloat16": (2e-3, 1.5e-2)}


class Wrong(Exception):
    """The output or a gradient of a layer differs from the reference."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters in float64, after rounding the operands of products."""

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor
    bias_hh: Tensor
    theta: Tensor


def low_type(precision: str) -> torch.dtype:
    """Return the dtype that operands are rounded to before a product."""
    return torch.float32 if precision == "tf32" else getattr(torch, precision)


def set_tf32(precision: str) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def autocast(device: str, precision: str) -> torch.autocast:
    low = low_type(precision)
    enabled = low != torch.float32
    return torch.autocast(device, low if enabled else None, enabled=enabled)


def each_step(
    x: Tensor, y: Tensor, c: Tensor, weights: Weights, reset_gate: ResetGate, low: torch.dtype
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the states before thresholding and the gates, each step from the previous step's ``y`` and ``c``."""
    H = y.shape[-1]
    before = torch.zeros_like(c[:1])
    c, y = torch.cat([before, c[:-1]]).double(), torch.cat([before, y[:-1]]).double()
    operand = y.to(low).double()
    p = F.linear(x.to(low).double(), weights.ih, weights.bias_ih)
    update = functional.gru_update(p, operand, c, weights.hh, weights.bias_hh, reset_gate)
    state, gates = update.c, update.gates
    if reset_gate == "before":  # the operand of the second product is rounded too
        u, r, _ = gates
        product = F.linear((r * operand).to(low).double(), weights.hh[2 * H :], weights.bias_hh[2 * H :])
        z = torch.tanh(p[..., 2 * H :] + product)
        state, gates = u * z + (1 - u) * c, (u, r, z)
    return state - y, gates


def check_forward(y: Tensor, c: Tensor, exact: Tensor, theta: Tensor, precision: str) -> dict[str, float]:
    """Return the errors of states ``c`` and events ``y``; raise :class:`Wrong` if they exceed the rounding error."""
    tolerance = TOLERANCE[precision][0]
    error = (c.double() - exact).abs().max().item()
    tie = (exact - theta).abs() <= tolerance
    same = ((y != 0) == (exact > theta)) | tie
    emitted = torch.equal(y, torch.where(c > theta.to(c.dtype), c, 0))
    if not (error < tolerance and bool(same.all()) and emitted):  # NaN fails too
        wrong = (~same).sum().item()
        raise Wrong(f"states off by {error:.2g}, {wrong} events differ, y {'=' if emitted else '!='} c [c > theta]")
    return {"state": error, "ties": tie.double().mean().item()}


def check_layer(layer: egru.EGRU, x: Tensor, precision: str, gradients: bool) -> dict[str, float]:
    """Return the errors of a layer with reset "output" on ``x`` of shape ``(T, B, I)``, starting from zero."""
    low, records = low_type(precision), []
    set_tf32(precision)
    remove = layer.observe(records.append)
    with autocast(x.device.type, precision):
        layer(x)
    remove()
    (record,) = records
    y, c, theta = record.y, record.c, record.theta
    ih, hh, bias_ih, bias_hh = (
        layer.get_parameter(f"{name}_l0").detach() for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    weights = Weights(ih.to(low).double(), hh.to(low).double(), bias_ih.double(), bias_hh.double(), theta.double())
    with torch.no_grad():
        exact, gates = each_step(x, y, c, weights, layer.reset_gate, low)
        errors = check_forward(y, c, exact, weights.theta, precision)
    if not gradients:
        return errors
    grad = torch.randn_like(y)
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    actual = torch.autograd.grad(y, [*(layer.get_parameter(f"{name}_l0") for name in names), theta], grad)
    with torch.no_grad():
        rest = EventState(torch.zeros_like(exact[0]), torch.zeros_like(exact[0]))
        reference = functional.egru_backward(
            grad.double(), None, (None, None), x.to(low).double(), rest, weights.ih, weights.hh, weights.theta,
            functional.Sequence(y.double(), c.double(), rest, gates), reset=layer.reset, reset_gate=layer.reset_gate,
            surrogate=layer.surrogate, input_gradient=False,
        )  # fmt: skip
    expected = (reference.weight_ih, reference.weight_hh, reference.bias, reference.bias_hh, reference.theta)
    for name, value, target in zip((*names, "theta"), actual, expected, strict=True):
        errors[name] = ((value.double() - target).norm() / target.norm()).item()
        if not errors[name] < TOLERANCE[precision][1]:
            raise Wrong(f"gradient of {name} off by {errors[name]:.2g}")
    return errors
