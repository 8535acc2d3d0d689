"""The common case of a GRU on the CPU, which runs with little Python: the same results as the general route."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import egru
from egru import EventState, compiled
from egru.kernels.cpu import quick

pytestmark = pytest.mark.skipif(compiled.core is None, reason="the compiled core is not built")

OPTIONS = [
    *(
        {"reset_gate": gate, "reset": reset}
        for gate, reset in itertools.product(("before", "after"), ("output", "threshold", "hard", "none"))
    ),
    {"events": "signed", "threshold": egru.Threshold("abs"), "bias": False},
    {"events": "delta", "reset": "none", "reset_gate": "after", "threshold": egru.Threshold("abs")},
    {"surrogate": egru.Surrogate(width=0.3, height=0.7, bounded=True)},
]


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for every call whether the quick route has run it."""
    ran: list[bool] = []
    original = quick.run_quick

    def run(*arguments: Any) -> Any:
        result = original(*arguments)
        ran.append(result is not None)
        return result

    monkeypatch.setattr("egru.layers.egru.run_quick", run)
    return ran


def general(layer: egru.EGRU | egru.EGRUCell) -> egru.EGRU | egru.EGRUCell:
    """Return a copy that the general route runs, because it is observed."""
    layer = copy.deepcopy(layer)
    layer.observe(lambda record: None)
    return layer


def state_like(layer: egru.EGRU | egru.EGRUCell, batch: int) -> EventState:
    c, y = (half.clone() for half in layer.zero_state(batch))
    c.normal_().requires_grad_()
    y.normal_().relu_().requires_grad_()
    return EventState(c, y)


def results(layer: egru.EGRU | egru.EGRUCell, x: Tensor, hx: EventState | None) -> list[Tensor]:
    """Return outputs and all gradients."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    hx = None if hx is None else EventState(*(half.detach().clone().requires_grad_() for half in hx))
    result = layer(x, hx)
    y, state = (result.y, result) if isinstance(result, EventState) else result
    torch.manual_seed(9)
    loss = sum((part * torch.randn_like(part)).sum() for part in (y, *state))
    assert isinstance(loss, Tensor)
    loss.backward()
    gradients = [x.grad, *(half.grad for half in hx or ()), *(p.grad for p in layer.parameters())]
    return [part.detach() for part in (y, *state, *gradients) if part is not None]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("steps", "batch"), [(1, 3), (7, 2), (9, 20)])
def test_layers_equal_the_general_route(
    options: dict[str, Any], dtype: torch.dtype, steps: int, batch: int, counted: list[bool]
) -> None:
    torch.manual_seed(0)
    layer = egru.EGRU(5, 37, dtype=dtype, **options)
    x = torch.randn(steps, batch, 5, dtype=dtype)
    for hx in (None, state_like(layer, batch)):
        for ours, expected in zip(results(layer, x, hx), results(general(layer), x, hx), strict=True):
            assert torch.equal(ours, expected)
        with torch.no_grad():
            for ours, expected in zip(layer(x, hx)[1], general(layer)(x, hx)[1], strict=True):
                assert torch.equal(ours, expected)
            assert torch.equal(layer(x, hx)[0], general(layer)(x, hx)[0])
    assert len(counted) == 6
    assert all(counted)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-2], {"dropout": 0.5, "batch_first": True}], ids=str)
@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (6, 3)])
def test_stacks_equal_the_general_route(options: dict[str, Any], steps: int, batch: int, counted: list[bool]) -> None:
    torch.manual_seed(0)
    layer = egru.EGRU(5, 37, num_layers=3, **options).eval()
    x = torch.randn(*((batch, steps) if layer.batch_first else (steps, batch)), 5)
    for hx in (None, state_like(layer, batch)):
        for ours, expected in zip(results(layer, x, hx), results(general(layer), x, hx), strict=True):
            assert torch.equal(ours, expected)
        with torch.no_grad():
            for ours, expected in zip(layer(x, hx)[1], general(layer)(x, hx)[1], strict=True):
                assert torch.equal(ours, expected)
    assert counted == [True] * 12


def test_stacks_that_the_general_route_runs(counted: list[bool]) -> None:
    torch.manual_seed(0)
    layer, x = egru.EGRU(5, 37, num_layers=2, dropout=0.5), torch.randn(4, 3, 5)
    layer(x)  # dropout is active
    egru.EGRU(5, 37, num_layers=2, bidirectional=True)(x)
    layer.eval()
    state = state_like(layer, 3)
    for wrong in (EventState(state.c[:1], state.y[:1]), EventState(state.c[0], state.y[0])):
        with pytest.raises(ValueError, match=r"state.c has shape .* expected \(2, 3, 37\)"):
            layer(x, wrong)
    assert counted == []
    with torch.no_grad():
        layer.get_parameter("weight_hh_l1")[0, 0] = float("nan")
    messages = []
    for variant in (layer, general(layer)):
        with pytest.raises(ValueError, match="contains nan") as error:
            variant(x)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_cells_equal_the_general_route(options: dict[str, Any], counted: list[bool]) -> None:
    torch.manual_seed(0)
    cell = egru.EGRUCell(5, 37, **options)
    x = torch.randn(4, 5)
    for hx in (None, state_like(cell, 4)):
        for ours, expected in zip(results(cell, x, hx), results(general(cell), x, hx), strict=True):
            assert torch.equal(ours, expected)
        with torch.no_grad():
            for ours, expected in zip(cell(x, hx), general(cell)(x, hx), strict=True):
                assert torch.equal(ours, expected)
    assert len(counted) == 4
    assert all(counted)


@pytest.mark.parametrize("batch_first", [False, True])
def test_strides_of_the_input(batch_first: bool, counted: list[bool]) -> None:
    layer = egru.EGRU(6, 40, batch_first=batch_first)
    wide = torch.randn(8, 9, 12)
    for x in (wide[:, :, :6], wide[::2, :, 6:], wide[:, :1, :6].expand(8, 5, 6), wide.transpose(0, 1)[..., :6]):
        with torch.no_grad():
            assert torch.equal(layer(x)[0], general(layer)(x.contiguous())[0])
    assert counted == [True] * 4
    with torch.no_grad():
        layer(wide[:, :, ::2])
    assert counted[-1] is False  # the values of a row are not adjacent


def test_thresholds_and_scales(counted: list[bool]) -> None:
    x = torch.randn(4, 2, 6)
    scaled = egru.EGRU(6, 20)
    scaled.reset_scale = torch.rand(20)
    for layer in (scaled, egru.EGRU(6, 20, reset_scale=0.3), egru.EGRU(6, 20, threshold=egru.Threshold("clamp"))):
        for ours, expected in zip(results(layer, x, None), results(general(layer), x, None), strict=True):
            assert torch.equal(ours, expected)
    assert counted == [True] * 3
    shared = egru.EGRU(6, 20, threshold=egru.Threshold(per_unit=False))
    shared(x)
    assert counted[-1] is False


def test_changed_weights_are_used(counted: list[bool]) -> None:
    """Optimisers, assignments and parametrisations change what the next call reads."""
    torch.manual_seed(0)
    layer, x = egru.EGRU(6, 20), torch.randn(3, 2, 6)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.5)
    for _ in range(3):
        for ours, expected in zip(results(layer, x, None), results(general(layer), x, None), strict=True):
            assert torch.equal(ours, expected)
        optimiser.step()
    with torch.inference_mode():
        before = layer(x)[0]
        layer.get_parameter("weight_ih_l0").data.mul_(2)
        after = layer(x)[0]
        assert not torch.equal(before, after)
        assert torch.equal(after, general(layer)(x)[0])
    parametrizations.weight_norm(layer, "weight_hh_l0")
    for ours, expected in zip(results(layer, x, None), results(general(layer), x, None), strict=True):
        assert torch.equal(ours, expected)
    assert all(counted)


def test_compiled_layers_equal_eager_ones() -> None:
    layer, x = egru.EGRU(6, 20), torch.randn(3, 2, 6)
    compiled_layer: Any = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled_layer(x)[0], layer(x)[0])


def test_general_route_runs_what_is_not_common(counted: list[bool]) -> None:
    x, state = torch.randn(3, 2, 6), torch.zeros(1, 2, 20)

    class Halved(egru.EGRU):
        def run_direction(self, x: Tensor, *arguments: Any, **options: Any) -> Any:
            y, c, end = super().run_direction(x, *arguments, **options)
            return y / 2, c, end

    layer = egru.EGRU(6, 20)
    halved = Halved(6, 20)
    halved.load_state_dict(layer.state_dict())
    assert torch.equal(2 * halved(x)[0], layer(x)[0])
    assert counted == [True]
    counted.clear()
    uncommon: list[dict[str, Any]] = [
        {"bidirectional": True},
        {"zoneout": 0.1},
        {"dropconnect": 0.1},
        {"lean": True},
        {"recurrent_clip": 1.0},
        {"backend": "reference"},
    ]
    for options in uncommon:
        egru.EGRU(6, 20, **options)(x)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    layer(x, state)  # a tensor in place of an EventState
    layer(nn.utils.rnn.pack_sequence([x[:, 0], x[:2, 1]]))
    torch.func.jvp(lambda x: layer(x)[0], (x,), (torch.ones_like(x),))
    layer(nn.Parameter(x))
    assert counted == []
    with pytest.raises(ValueError, match="expected 6"):
        layer(torch.randn(3, 2, 5))
    with pytest.raises(ValueError, match=r"state\.c has shape"):
        layer(x, EventState(state[:, :1], state))
    with pytest.raises(TypeError, match="float16"):
        layer(x.half())
    egru.EGRU(6, 20, surrogate=egru.Surrogate(shape="rectangle"))(x)
    assert counted == [False] * 4


def test_values_are_checked() -> None:
    layer, x = egru.EGRU(6, 20), torch.randn(3, 2, 6)
    with pytest.raises(ValueError, match="input contains nan"):
        layer(x.clone().index_fill_(2, torch.tensor(3), torch.nan))
    signed = egru.EGRU(6, 20, events="signed", threshold=egru.Threshold("identity", mean=0.1, std=0.0))
    with torch.no_grad():
        signed.get_parameter("threshold_l0").fill_(-0.1)
    with pytest.raises(ValueError, match="thresholds of at least 0"):
        signed(x)
    with torch.no_grad():
        layer.get_parameter("weight_hh_l0")[3, 2] = torch.inf
    with pytest.raises(ValueError, match="weight_hh contains inf"):
        layer(x)


def test_saved_tensors_are_protected_and_states_are_not() -> None:
    layer, cell, x = egru.EGRU(6, 20), egru.EGRUCell(6, 20), torch.randn(3, 2, 6)
    y, state = layer(x)
    with torch.no_grad():
        state.c.zero_()  # a new episode; nothing reads the returned state again
        state.y.zero_()
    y.sum().backward()
    step = cell(x[0])
    loss = step.y.sum()
    with torch.no_grad():
        step.c.zero_()
        step.y.zero_()
    loss.backward()
    y, _ = layer(x)
    with torch.no_grad():
        layer.get_parameter("weight_hh_l0").add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_with_saved_tensor_hooks() -> None:
    """A hook may store saved tensors differently."""

    def transposed(x: Tensor) -> Tensor:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x

    torch.manual_seed(0)
    cell, layer, x = egru.EGRUCell(6, 20), egru.EGRU(6, 20), torch.randn(3, 2, 6)
    for module, value in ((layer, x), (cell, x[0])):
        hx = state_like(module, 2)
        expected = results(module, value, hx)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), transposed):
            for ours, theirs in zip(results(module, value, hx), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_second_derivatives_are_refused() -> None:
    layer, x = egru.EGRU(6, 20), torch.randn(3, 2, 6, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        gradient.sum().backward()
