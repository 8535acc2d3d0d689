"""Outputs and gradients of the layer, compared with autograd through the plain torch reference."""

import pytest
import torch

import egru
from egru import functional
from egru.events import EventState
from egru.types import RESET_GATES, RESETS, THRESHOLD_KINDS
from tests.helpers import worst


@pytest.mark.parametrize("kind", THRESHOLD_KINDS)
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("reset_gate", RESET_GATES)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_layer_equals_reference(kind, reset, reset_gate, backend):
    threshold = egru.Threshold(kind)
    options = {"reset": reset, "reset_gate": reset_gate, "surrogate": egru.Surrogate(0.6, 0.8)}
    layer = egru.EGRU(3, 6, threshold=threshold, backend=backend, **options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("threshold"):
                parameter.uniform_(-0.3, 0.3)
            else:
                parameter.mul_(2)
    x = torch.randn(8, 4, 3, requires_grad=True)
    c0, y0 = torch.randn(1, 4, 6, requires_grad=True), torch.rand(1, 4, 6, requires_grad=True)
    parameters = dict(layer.named_parameters())
    inputs = [x, c0, y0, *parameters.values()]

    def gradients(y, c, y_last):
        weights = [torch.sin(torch.arange(t.numel())).reshape(t.shape) for t in (y, c, y_last)]
        loss = torch.stack([(w * t).sum() for w, t in zip(weights, (y, c, y_last), strict=True)]).sum()
        return torch.autograd.grad(loss, inputs)

    y, (c, y_last) = layer(x, EventState(c0, y0))
    plain = functional.egru_sequence(
        x,
        EventState(c0[0], y0[0]),
        parameters["weight_ih_l0"],
        parameters["weight_hh_l0"],
        parameters["bias_ih_l0"],
        parameters["bias_hh_l0"],
        threshold.constrain(parameters["threshold_l0"], 6),
        **options,
    )
    assert 0.05 < (y != 0).double().mean() < 0.95
    assert worst([plain.y, *plain.state], [y, c[0], y_last[0]]) <= 1e-12
    assert worst(gradients(plain.y, *plain.state), gradients(y, c[0], y_last[0])) <= 1e-12


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_lean_saves_memory_and_gives_the_same_gradients(backend):
    plain = egru.EGRU(3, 40, zoneout=0.2, threshold=egru.Threshold(mean=-2.0), backend=backend).eval()
    lean = egru.EGRU(3, 40, zoneout=0.2, threshold=egru.Threshold(mean=-2.0), backend=backend, lean=True).eval()
    lean.load_state_dict(plain.state_dict())
    x = torch.randn(12, 5, 3)
    grads, saved = [], []
    for layer in (plain, lean):
        sizes: dict[int, int] = {}

        def pack(tensor, sizes=sizes):
            sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y, _ = layer(x)
        saved.append(sum(sizes.values()))
        grads.append(torch.autograd.grad(y.square().sum(), list(layer.parameters())))
    assert worst(*grads) <= 1e-12
    assert saved[1] < 0.7 * saved[0]
