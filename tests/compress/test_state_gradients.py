"""Gradients of the state of a converted GRU: those of ``torch.nn.GRU`` in the dense limit, exact when it is sparse."""

import copy
import io
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import egru
from egru.compress.drop_in import HiddenState
from egru.types import EVENTS
from tests.helpers import worst

pytestmark = pytest.mark.filterwarnings("ignore:.*Converted.* runs in plain torch")

TOLERANCE = 1e-12
KINDS = {
    "layer": (nn.GRU, (6, 3, 4)),
    "stack": (lambda *s: nn.GRU(*s, num_layers=2), (6, 3, 4)),
    "cell": (nn.GRUCell, (3, 4)),
}
kinds = pytest.mark.parametrize("kind", KINDS)
all_events = pytest.mark.parametrize("events", EVENTS)


def last(module: Any, x: Tensor, h: Any = None) -> Any:
    result = module(x, h)
    return result[1] if isinstance(result, tuple) else result


class Halved(torch.autograd.Function):
    """The identity with half of its gradient."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / 2


def hooked(k: Any, x: Tensor, h: Any) -> Any:
    h.register_hook(lambda gradient: 0.3 * gradient)
    return h


def gated(k: Any, x: Tensor, h: Any) -> Any:
    return h * k.gate


def mixed(k: Any, x: Tensor, h: Any) -> Any:
    return torch.where(torch.tensor([[True], [False], [True]]), h, k.start.expand_as(h))


def overwritten(k: Any, x: Tensor, h: Any) -> Any:
    h = h.clone()
    h[..., 1, :] = k.start
    return h


def joined(k: Any, x: Tensor, h: Any) -> Any:
    return torch.cat([h[..., :2, :], k.start.expand(*h.shape[:-2], 1, 8)], -2)


def interpolated(k: Any, x: Tensor, h: Any) -> Any:
    return torch.lerp(h, last(k, -x), k.gate)


def scaled_in_place(k: Any, x: Tensor, h: Any) -> Any:
    return h.clone().mul_(k.gate)


def changed_in_place(k: Any, x: Tensor, h: Any) -> Any:
    h.mul_(0.5)
    h[..., 1, :] = k.start
    return h


def shifted_in_place(k: Any, x: Tensor, h: Any) -> Any:
    return h.clone().add_(k.start)


def shifted(k: Any, x: Tensor, h: Any) -> Any:
    return h + k.start


CHANGES: dict[str, Callable[[Any, Tensor, Any], Any]] = {
    "none": lambda k, x, h: h,
    "hook": hooked,
    "custom function": lambda k, x, h: Halved.apply(h),
    "hook of a copy": lambda k, x, h: hooked(k, x, h.clone()),
    "hook and order": lambda k, x, h: hooked(k, x, h)[..., [2, 0, 0], :],
    "gate": gated,
    "where": mixed,
    "overwritten": overwritten,
    "cat": joined,
    "lerp": interpolated,
    "mul_": scaled_in_place,
    "in place": changed_in_place,
    "add_": shifted_in_place,
    "add": shifted,
    "detach": lambda k, x, h: h.detach(),
    "checkpoint": lambda k, x, h: checkpoint(lambda h: last(k, x, h), h, use_reentrant=True),
    "checkpoint without re-entry": lambda k, x, h: checkpoint(lambda h: last(k, x, h), h, use_reentrant=False),
    "copies": lambda k, x, h: copy.copy(copy.deepcopy(h)) if isinstance(h, HiddenState) else h.clone(),
}


def gradients(module: Any, x: Tensor, change: Callable[[Any, Tensor, Any], Any]) -> list[Tensor]:
    """Return the gradients of the parameters, of the input and of the state before and after a change."""
    module.gate, module.start = (
        nn.Parameter(torch.linspace(0.2, 1.3, 3)[:, None]),
        nn.Parameter(torch.linspace(-1, 1, 8)),
    )
    module.zero_grad()
    x = x.clone().requires_grad_()
    first = last(module, x)
    first.retain_grad()
    second = change(module, x, first)
    if second.requires_grad:
        second.retain_grad()
    last(module, -x, second).square().sum().backward()
    found = [p.grad for name, p in module.named_parameters() if "threshold" not in name]
    return [torch.zeros(()) if grad is None else grad for grad in (*found, x.grad, first.grad, second.grad)]


@kinds
@all_events
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_are_those_of_torch_in_the_dense_limit(kind, events, change):
    build, shape = KINDS[kind]
    dense = build(4, 8)
    converted, x = egru.convert(dense, events), torch.randn(shape)
    expected, found = (gradients(module, x, CHANGES[change]) for module in (dense, converted))
    assert worst(found, expected) <= TOLERANCE


LINEAR = [
    "none",
    "gate",
    "where",
    "overwritten",
    "cat",
    "lerp",
    "mul_",
    "detach",
    "copies",
    "checkpoint without re-entry",
]


@kinds
@all_events
@pytest.mark.parametrize("change", LINEAR)
def test_gradients_of_sparse_layers_are_those_of_both_parts(kind, events, change):
    """The reference applies the change to the two parts of the state of an event layer."""
    build, shape = KINDS[kind]
    converted, x = egru.convert(build(4, 8), events), torch.randn(shape)
    egru.compress.raise_thresholds(converted, 0.1)
    layer = converted.__class__.__mro__[1]  # EGRU or EGRUCell

    def run(h: Any, x: Tensor) -> egru.EventState:
        result = layer.forward(converted, x, h)
        return result if isinstance(result, egru.EventState) else result[1]

    def step(h: Any) -> egru.EventState:
        return run(h, x)

    def changed(state: egru.EventState) -> egru.EventState:
        if change == "lerp":
            return egru.EventState(
                *(torch.lerp(a, b, converted.gate) for a, b in zip(state, run(None, -x), strict=True))
            )
        if change.startswith("checkpoint"):
            return step(state)
        return egru.EventState(*(CHANGES[change](converted, x, half) for half in state))

    found = gradients(converted, x, CHANGES[change])[:-3]
    assert (last(converted, x).c != last(converted, x)).any()
    converted.zero_grad()
    output = run(changed(run(None, x)), -x)
    output.y.square().sum().backward()
    expected = [p.grad for name, p in converted.named_parameters() if "threshold" not in name]
    assert worst(found, [torch.zeros(()) if grad is None else grad for grad in expected]) <= TOLERANCE


@kinds
@all_events
def test_gradient_of_a_given_state_is_that_of_torch(kind, events):
    build, shape = KINDS[kind]
    dense = build(4, 8)
    converted, x = egru.convert(dense, events), torch.randn(shape)
    found = []
    for module in (dense, converted):
        h = last(module, x).detach().requires_grad_()
        last(module, x, h).sum().backward()
        nonleaf = last(module, x)
        (gradient,) = torch.autograd.grad(last(module, -x, nonleaf).sum(), nonleaf)
        found.append([h.grad, gradient])
        assert h.is_leaf
    assert worst(*found) <= TOLERANCE


@all_events
def test_c_has_its_own_gradient(events):
    layer = cast(Any, egru.convert(nn.GRU(4, 8), events))
    x = torch.randn(6, 3, 4)
    egru.compress.raise_thresholds(layer, 0.1)
    found = []
    for state in (last(layer, x), egru.EGRU.forward(layer, x)[1]):
        layer.zero_grad()
        state.c.square().sum().backward()
        found.append([p.grad for name, p in layer.named_parameters() if p.grad is not None])
    assert worst(*found) <= TOLERANCE


@all_events
def test_state_is_continued_bit_by_bit(events):
    layer = cast(Any, egru.convert(nn.GRU(4, 8, dtype=torch.float32), events))
    x = torch.randn(12, 3, 4, dtype=torch.float32)
    egru.compress.raise_thresholds(layer, 0.1)
    _, state = egru.EGRU.forward(layer, x[:5])
    expected, end = egru.EGRU.forward(layer, x[5:], state)
    _, h = layer(x[:5])
    output, h = layer(x[5:], h)
    assert torch.equal(output, cast(Tensor, expected))
    assert torch.equal(h.c, end.c)
    assert torch.equal(h, end.y)


def test_states_that_require_gradients_are_saved_and_loaded():
    _, h = egru.convert(nn.GRU(4, 8))(torch.randn(5, 2, 4))
    file = io.BytesIO()
    torch.save([h, h.detach().requires_grad_(), h.detach()], file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert [state.requires_grad for state in loaded] == [True, True, False]
    for state in loaded:
        assert state.is_leaf
        assert torch.equal(state.c, h.c)


def test_states_without_gradients_are_overwritten_by_others():
    layer, x = egru.convert(nn.GRU(4, 8)), torch.randn(6, 3, 4)
    with torch.no_grad():
        buffer = last(layer, x)
    buffer.copy_(last(layer, x))
    last(layer, -x, buffer).sum().backward()
    assert layer.weight_ih_l0.grad is not None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_have_the_same_gradients(backend):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.cell = nn.GRU(4, 8), nn.GRUCell(4, 8)

        def forward(self, x):
            h = self.layer(x)[1][0] * 0.5
            h.register_hook(lambda gradient: 0.3 * gradient)
            return self.cell(x[0], h).square().sum()

    model, x = egru.convert(Model()), torch.randn(6, 3, 4)
    egru.compress.raise_thresholds(model, 0.1)
    found = []
    for module in (model, torch.compile(model, backend=backend)):
        model.zero_grad()
        module(x).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == 8
    assert worst(*found) <= TOLERANCE
