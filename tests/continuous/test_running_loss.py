"""The running loss of the module: gradients of its own weights, and what it may be."""

import dataclasses

import pytest
import torch
from torch import nn

from egru.continuous import ContinuousEGRU, InputEvents, engines
from tests.continuous.networks import EXACT, cotangents, density, network, worst_gradient

ENGINES = list(engines.names())


def events() -> InputEvents:
    g = torch.Generator().manual_seed(1)
    times = [torch.rand(6, generator=g, dtype=torch.float64) * 3 for _ in range(2)]
    channels = [torch.randint(2, (6,), generator=g) for _ in range(2)]
    return InputEvents.from_lists(times, channels, [torch.full((6,), 2.0, dtype=torch.float64)] * 2)


def layer(engine: str) -> ContinuousEGRU:
    torch.manual_seed(3)
    model = ContinuousEGRU(2, 5, engine=engine, nodes=12, panel=1.0, dtype=torch.float64)  # pyright: ignore
    with torch.no_grad():
        model.b.normal_(0.5)
    return model


class Density(nn.Module):
    """A running loss with weights; ``scale`` is used through a tensor that is computed outside the call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.hidden = nn.Linear(5, 4, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        self.factor = self.scale.exp()

    def forward(self, c, t, sample):
        return self.factor * (self.hidden(c).tanh().sum(-1) * torch.cos(t) * (1 + sample)).square()


def total(model: ContinuousEGRU, density: Density) -> torch.Tensor:
    out = model(events(), 4.0, [4.0], running_loss=density)
    assert out.integral is not None
    return (out.integral * torch.tensor([1.0, -0.7], dtype=torch.float64)).sum() + out.c.sum()


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_of_a_running_loss_match_finite_differences(engine):
    model, density = layer(engine), Density()
    total(model, density).backward()
    h = 1e-4
    for parameter in density.parameters():
        assert parameter.grad is not None
        index = tuple(0 for _ in parameter.shape)
        values = []
        for k in (-2, -1, 1, 2):
            moved = Density()
            moved.load_state_dict(density.state_dict())
            with torch.no_grad():
                dict(moved.named_parameters())[_name(density, parameter)][index] += k * h
                moved.factor = moved.scale.exp()
                values.append(total(model, moved).item())
        difference = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * h)
        assert abs(parameter.grad[index].item() - difference) < 1e-8 * max(1.0, abs(difference))


def _name(module: nn.Module, parameter: nn.Parameter) -> str:
    return next(name for name, other in module.named_parameters() if other is parameter)


def test_engines_agree_on_the_gradients_of_a_running_loss():
    results = {}
    for engine in ENGINES:
        model, density = layer(engine), Density()
        total(model, density).backward()
        gradients = {f"layer.{name}": p.grad for name, p in model.named_parameters()}
        results[engine] = gradients | {f"density.{name}": p.grad for name, p in density.named_parameters()}
    for name, gradient in results["reference"].items():
        for engine in ENGINES:
            other = results[engine][name]
            assert (gradient - other).abs().max() < 1e-11 * max(1.0, float(gradient.abs().max())), (engine, name)
    assert results["reference"]["density.scale"].abs() > 1e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_the_layer_do_not_depend_on_whether_the_loss_is_trained(engine):
    gradients = []
    for trained in (True, False):
        model, density = layer(engine), Density().requires_grad_(trained)
        density.factor = density.scale.exp()
        total(model, density).backward()
        gradients.append(model.V.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("engine", ENGINES)
def test_second_derivatives_of_a_running_loss_raise(engine):
    model, density = layer(engine), Density()
    tensors = (model.V, density.hidden.weight)
    gradients = torch.autograd.grad(total(model, density), tensors, create_graph=True)
    for gradient in gradients:
        for tensor in tensors:
            with pytest.raises(RuntimeError, match="second derivatives are not supported"):
                torch.autograd.grad(gradient.sum(), tensor, allow_unused=True, retain_graph=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_running_loss_without_gradient_mode_records_nothing(engine):
    with torch.no_grad():
        out = layer(engine)(events(), 4.0, running_loss=Density())
    assert out.integral is not None
    assert not out.integral.requires_grad


@pytest.mark.parametrize("engine", ENGINES)
def test_running_loss_may_ignore_the_state(engine):
    model = layer(engine)
    out = model(events(), 4.0, running_loss=lambda c, t, sample: torch.cos(t) * (1 + sample))
    assert out.integral is not None
    exact = torch.sin(torch.tensor(4.0, dtype=torch.float64)) * torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert (out.integral - exact).abs().max() < 1e-12
    out.integral.sum().backward()
    assert model.V.grad is not None
    assert (model.V.grad == 0).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_running_loss_must_return_one_value_per_state(engine):
    with pytest.raises(ValueError, match=r"running_loss must return a tensor of shape \(\d+,\), got \(\)"):
        layer(engine)(events(), 4.0, running_loss=lambda c, t, sample: c.sum())


def test_lockstep_takes_long_steps_at_rest():
    """A time constant far below the others takes few iterations, and the gradient is that of the other engines."""
    problem = network(4, EXACT, hidden=4, inputs=4)
    problem = dataclasses.replace(problem, tau_s=torch.tensor(4e-4, dtype=torch.float64))
    lockstep, compiled = engines.get("lockstep"), engines.get("compiled")
    events, expected = lockstep.forward(problem, density), compiled.forward(problem, density)
    assert len(events.units) > 20
    assert torch.equal(events.units, expected.units)
    assert len(events.tape.iterations) < 60 * len(events.units)
    assert events.integral is not None
    assert expected.integral is not None
    assert (events.integral - expected.integral).abs().max() < 1e-9
    weights = cotangents(events)
    gradients, exact = (e.backward(problem, x, weights, density) for e, x in ((lockstep, events), (compiled, expected)))
    errors = worst_gradient(gradients, exact)
    assert max(errors.values()) < 1e-8, errors


def test_lockstep_resolves_the_reset_gate_at_rest():
    """The gates u and z rest at the start, and the reset gate, which is far from rest, scales later events."""
    problem = network(4, EXACT, hidden=4, inputs=4, drive=0.3)
    U, V, a0 = problem.U.clone(), problem.V.clone(), problem.a0.clone()
    U[[0, 2]], V[0] = 0.0, 0.0
    a0[:, 0], a0[:, 1], a0[:, 2] = problem.b[0], problem.b[1] + 2.0, problem.b[2]
    problem = dataclasses.replace(problem, U=U, V=V, a0=a0)
    lockstep, compiled = engines.get("lockstep"), engines.get("compiled")
    events, expected = lockstep.forward(problem, density), compiled.forward(problem, density)
    assert bool(events.tape.iterations[0].rests.all())
    weights = cotangents(events)
    gradients, exact = (e.backward(problem, x, weights, density) for e, x in ((lockstep, events), (compiled, expected)))
    errors = worst_gradient(gradients, exact)
    assert max(errors.values()) < 1e-9, errors
