import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import egru
from egru.activity import rate_loss, state_loss
from egru.events import emit
from tests.helpers import lively


def test_rate_loss_matches_the_paper():
    c = torch.randn(6, 3, 4, requires_grad=True)
    theta = torch.rand(4, requires_grad=True)
    surrogate = egru.Surrogate(width=0.5)
    rate = (c > theta).double().mean()
    loss = rate_loss(c, theta, surrogate)
    assert loss.item() == pytest.approx((rate - 0.05).item())
    assert rate_loss(c, theta, surrogate, squared=True, target=0.2).item() == pytest.approx(((rate - 0.2) ** 2).item())
    (grad,) = torch.autograd.grad(loss, c)
    torch.testing.assert_close(grad, surrogate.slope(c, theta) / c.numel())


@pytest.mark.parametrize("chunk", [5, 30, 1 << 18])
@pytest.mark.parametrize("lengths", [None, torch.tensor([6, 2, 4])])
@pytest.mark.parametrize("shape", ["triangle", "fast_sigmoid"])
def test_rate_loss_gradient_equals_that_of_the_events(lengths, shape, chunk, monkeypatch):
    monkeypatch.setattr("egru.activity.chunks._CPU_STATES", chunk)
    c, theta = torch.randn(6, 3, 4, requires_grad=True), torch.rand(4, requires_grad=True)
    surrogate = egru.Surrogate(width=0.5, height=0.7, shape=shape)
    _, e = emit(c, c, theta, surrogate)
    valid = torch.ones(6, 3) if lengths is None else (torch.arange(6)[:, None] < lengths).double()
    expected = 2.5 * (e * valid[..., None]).sum() / (4 * valid.sum())
    loss = 2.5 * rate_loss(c, theta, surrogate, target=0, lengths=lengths)
    torch.testing.assert_close(loss, expected)
    grads = torch.autograd.grad(loss, (c, theta), retain_graph=True)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (c, theta)))
    differentiable = torch.autograd.grad(loss, (c, theta), create_graph=True)
    torch.testing.assert_close(differentiable, grads)
    assert differentiable[0].requires_grad


def test_rate_loss_sums_bfloat16_chunks_accurately(monkeypatch):
    monkeypatch.setattr("egru.activity.chunks._CPU_STATES", 8)
    c = torch.full((2000, 1, 8), 0.1, dtype=torch.bfloat16, requires_grad=True)
    theta = torch.zeros(8, dtype=torch.bfloat16, requires_grad=True)
    rate_loss(c, theta, egru.Surrogate(width=0.5, height=1.0)).backward()
    assert theta.grad is not None
    torch.testing.assert_close(theta.grad.double(), torch.full((8,), -0.1, dtype=torch.float64), rtol=0.01, atol=0)


def test_state_loss_has_no_threshold_gradient():
    c, theta = torch.randn(6, 3, 4, requires_grad=True), torch.rand(4, requires_grad=True)
    loss = state_loss(c, theta)
    assert loss.item() == pytest.approx((c - theta + 0.05).mean().item())
    grad_c, grad_theta = torch.autograd.grad(loss, (c, theta), allow_unused=True)
    assert grad_theta is None
    torch.testing.assert_close(grad_c, torch.full_like(c, 1 / c.numel()))


def test_padding_is_excluded():
    c, theta, lengths = torch.randn(6, 2, 4), torch.rand(4), torch.tensor([6, 2])
    valid = torch.cat([c[:, 0], c[:2, 1]])
    assert state_loss(c, theta, lengths=lengths).item() == pytest.approx((valid - theta + 0.05).mean().item())
    rate = rate_loss(c, theta, egru.Surrogate(), target=0, lengths=lengths)
    assert rate.item() == pytest.approx((valid > theta).double().mean().item())


def test_activity_loss_sums_over_layers_and_restarts():
    model = nn.ModuleList([lively(egru.EGRU(3, 6, 2)), egru.ELSTM(6, 4)])
    records = []
    for layer in model:
        layer.observe(records.append)  # pyright: ignore[reportCallIssue]
    regulariser = egru.ActivityLoss(model, rate=0.3, state=0.7)
    for _ in range(2):
        records.clear()
        with regulariser as activity:
            model[1](model[0](torch.randn(5, 2, 3))[0])
        assert len(records) == 3
        expected = sum(0.3 * rate_loss(r.c, r.theta, r.surrogate) + 0.7 * state_loss(r.c, r.theta) for r in records)
        assert isinstance(activity.value, torch.Tensor)
        torch.testing.assert_close(activity.value, expected)
    assert isinstance(regulariser.value, torch.Tensor)
    regulariser.value.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_training_on_the_loss_lowers_the_activity():
    layer = lively(egru.EGRU(3, 16, threshold=egru.Threshold(mean=-3.0)))
    x = torch.randn(10, 8, 3)
    optimiser = torch.optim.Adam(layer.parameters(), 0.03)
    before = (layer(x)[0] != 0).double().mean()
    for _ in range(15):
        with egru.ActivityLoss(layer, rate=1.0, state=0.1) as activity:
            layer(x)
        assert isinstance(activity.value, torch.Tensor)
        optimiser.zero_grad()
        activity.value.backward()
        optimiser.step()
    assert (layer(x)[0] != 0).double().mean() < 0.5 * before


def test_training_pass_without_gradients_raises():
    """Reentrant checkpointing runs the layer without a graph, so the loss would have no gradient."""
    layer = lively(egru.EGRU(3, 6))
    x = torch.randn(5, 2, 3, requires_grad=True)
    with egru.ActivityLoss(layer) as activity:
        with pytest.raises(RuntimeError, match=r"EGRU ran in training mode without gradients.*checkpoint"):
            checkpoint(lambda x: layer(x)[0], x, use_reentrant=True)
        layer.eval()
        with torch.no_grad():
            layer(x)
    assert isinstance(activity.value, torch.Tensor)
    assert not layer._observers


def test_non_reentrant_checkpointing_has_the_same_gradients():
    model = nn.ModuleList([lively(egru.EGRU(3, 6)), lively(egru.EGRU(6, 4))])
    x = torch.randn(5, 2, 3)
    gradients = []
    for run in (lambda layer, x: layer(x), lambda layer, x: checkpoint(layer, x, use_reentrant=False)):
        model.zero_grad()
        with egru.ActivityLoss(model, rate=1.0, state=1.0) as activity:
            y = run(model[1], run(model[0], x)[0])[0]  # pyright: ignore[reportOptionalSubscript]
            (y.sum() + activity.value).backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_entering_twice_raises():
    layer = lively(egru.EGRU(3, 6))
    with egru.ActivityLoss(layer) as activity, pytest.raises(RuntimeError, match="ActivityLoss: already active"):
        activity.__enter__()
    assert not layer._observers


@pytest.mark.parametrize("lengths", [None, torch.tensor([300, 300, 200])])
def test_half_precision_counts_above_65504(lengths):
    c = (torch.rand(300, 3, 100) + 0.5).half().requires_grad_()  # all are events, 90000 or 80000 of them
    theta, surrogate = torch.zeros(100).half(), egru.Surrogate(width=2.0)
    rate = rate_loss(c, theta, surrogate, target=0, lengths=lengths)
    assert rate.dtype == torch.float16
    assert rate.item() == 1
    entries = 90000 if lengths is None else 80000
    valid = torch.arange(300)[:, None] < (torch.full((3,), 300) if lengths is None else lengths)
    expected = surrogate.slope(c.detach(), theta) * valid[..., None] / entries
    (grad,) = torch.autograd.grad(rate, c)
    assert torch.equal(grad, expected.half())
    state = state_loss(c, theta, margin=0, lengths=lengths).double().item()
    assert state == pytest.approx((c.detach().double() * valid[..., None]).sum().item() / entries, rel=2**-11)


def test_packed_input_works_and_dense_models_raise():
    layer = egru.EGRU(3, 6)
    with egru.ActivityLoss(layer) as activity:
        layer(pack_padded_sequence(torch.randn(7, 2, 3), torch.tensor([7, 3])))
    assert isinstance(activity.value, torch.Tensor)
    assert torch.isfinite(activity.value)
    with pytest.raises(ValueError, match="the model must have an event layer, got GRU"):
        egru.ActivityLoss(nn.GRU(1, 1))
