"""Is a layer right? Its first steps and their gradients against float64, before anything is timed.

Rounding can move a state across its threshold, after which trajectories part for good. So every step of the reference
starts from the state the layer carried into it, with the operands of products rounded as the layer rounds them, and
events must agree wherever the state is further from its threshold than rounding reaches. The backward reference runs on
the layer's own forward pass.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

import egru
from egru import functional
from egru.events import EventState

PRECISIONS = ("float32", "tf32", "float16", "bfloat16")
# Of the state (absolute) and of gradients (norm): those of tests/kernels/test_cuda.py. TF32 rounds inside the product,
# which the reference does not follow: 11 bits of every operand, over sums of some thousand terms.
TOLERANCE = {"float32": (2e-5, 2e-5), "tf32": (4e-3, 1e-2), "float16": (1e-3, 4e-3), "bfloat16": (2e-3, 1.5e-2)}


class Wrong(Exception):
    """A layer computes something else than the reference."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """In float64, the operands of products rounded."""

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor
    bias_hh: Tensor
    theta: Tensor


def low_type(precision: str) -> torch.dtype:
    """The type operands of products are rounded to before they are multiplied."""
    return torch.float32 if precision == "tf32" else getattr(torch, precision)


def set_tf32(precision: str) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def autocast(device: str, precision: str) -> torch.autocast:
    low = low_type(precision)
    enabled = low != torch.float32
    return torch.autocast(device, low if enabled else None, enabled=enabled)


def each_step(
    x: Tensor, y: Tensor, c: Tensor, weights: Weights, reset_gate: str, low: torch.dtype
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The state the threshold sees, and the gates, every step from ``y`` and ``c`` of the one before; zero at first."""
    H = y.shape[-1]
    before = torch.zeros_like(c[:1])
    c, y = torch.cat([before, c[:-1]]).double(), torch.cat([before, y[:-1]]).double()
    operand = y.to(low).double()
    p = F.linear(x.to(low).double(), weights.ih, weights.bias_ih)
    state, _, gates = functional.gru_update(p, operand, c, weights.hh, weights.bias_hh, reset_gate)
    if reset_gate == "before":  # the operand of the second product is rounded too
        u, r, _ = gates
        product = F.linear((r * operand).to(low).double(), weights.hh[2 * H :], weights.bias_hh[2 * H :])
        z = torch.tanh(p[..., 2 * H :] + product)
        state, gates = u * z + (1 - u) * c, (u, r, z)
    return state - y, gates


def check_forward(y: Tensor, c: Tensor, exact: Tensor, theta: Tensor, precision: str) -> dict[str, float]:
    """Errors of states ``c`` and events ``y`` against the exact states; raises where they are more than rounding."""
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
    """Errors of one layer that clears by output, from a state at rest, on ``x`` of shape ``(T, B, I)``."""
    low, records = low_type(precision), []
    set_tf32(precision)
    forget = layer.observe(records.append)
    with autocast(x.device.type, precision):
        layer(x)
    forget()
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
    found = torch.autograd.grad(y, [*(layer.get_parameter(f"{name}_l0") for name in names), theta], grad)
    with torch.no_grad():
        rest = EventState(torch.zeros_like(exact[0]), torch.zeros_like(exact[0]))
        wanted = functional.egru_backward(
            grad.double(), None, (None, None), x.to(low).double(), rest, weights.ih, weights.hh, weights.theta,
            functional.Sequence(y.double(), c.double(), rest, gates), reset=layer.reset, reset_gate=layer.reset_gate,
            surrogate=layer.surrogate, input_gradient=False,
        )  # fmt: skip
    expected = (wanted.weight_ih, wanted.weight_hh, wanted.bias, wanted.bias_hh, wanted.theta)
    for name, value, target in zip((*names, "theta"), found, expected, strict=True):
        errors[name] = ((value.double() - target).norm() / target.norm()).item()
        if not errors[name] < TOLERANCE[precision][1]:
            raise Wrong(f"gradient of {name} is off by {errors[name]:.2g}")
    return errors
