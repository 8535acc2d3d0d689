"""Forward-mode differentiation and the transforms of ``torch.func``: exact first derivatives, no second ones."""

import functools

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import egru
from egru.types import RESETS
from tests.helpers import worst


def make(layer_class, **options):
    layer = layer_class(3, 5, threshold=egru.Threshold(mean=-2.0), surrogate=egru.Surrogate(0.6, 0.8), **options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if not name.startswith("threshold"):
                parameter.mul_(2)
    return layer


LAYERS = [
    *[pytest.param(functools.partial(make, egru.EGRU, reset=reset), id=f"EGRU {reset}") for reset in RESETS],
    pytest.param(functools.partial(make, egru.EGRU, num_layers=2, bidirectional=True, zoneout=0.1), id="EGRU stack"),
    pytest.param(functools.partial(make, egru.ELSTM), id="ELSTM"),
    pytest.param(functools.partial(make, egru.ERNN), id="ERNN"),
]


def outputs(layer, x, parameters):
    y, state = functional_call(layer, parameters, (x,))
    return torch.cat([part.flatten() for part in (y, *state)])


@pytest.mark.parametrize("make_layer", LAYERS)
def test_forward_mode_equals_reverse_mode(make_layer):
    layer = make_layer().eval()
    x, parameters = torch.randn(6, 2, 3), dict(layer.named_parameters())
    assert 0 < (layer(x)[0] != 0).double().mean() < 1
    tangents = torch.randn_like(x), {name: torch.randn_like(value) for name, value in parameters.items()}

    leaves = [x.clone().requires_grad_(), *parameters.values()]
    flat = outputs(layer, leaves[0], parameters)
    rows = [torch.autograd.grad(out, leaves, retain_graph=True, allow_unused=True) for out in flat]
    directions = [tangents[0], *tangents[1].values()]
    products = [[(g * d).sum() for g, d in zip(row, directions, strict=True) if g is not None] for row in rows]
    expected = torch.stack([torch.stack(row).sum() for row in products])
    assert expected.abs().max() > 0.1

    values, pushed, *_ = jvp(functools.partial(outputs, layer), (x, parameters), tangents)
    assert worst([flat, expected], [values, pushed]) <= 1e-12
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(value, tangents[1][name]) for name, value in parameters.items()}
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                dual = outputs(layer, forward_ad.make_dual(x, tangents[0]), duals)
            assert worst([expected], [forward_ad.unpack_dual(dual).tangent]) <= 1e-12


@pytest.mark.parametrize("make_layer", LAYERS)
def test_jacobians_and_batched_calls_are_exact(make_layer):
    layer = make_layer().eval()
    x = torch.randn(3, 4, 2, 3)

    def run(x):
        return layer(x)[0]

    inputs = x[0].clone().requires_grad_()
    expected = torch.stack([torch.autograd.grad(v, inputs, retain_graph=True)[0] for v in run(inputs).flatten()])
    assert expected.any()
    for jacobian in (jacfwd(run)(x[0]), jacrev(run)(x[0])):
        assert worst([expected.reshape(jacobian.shape)], [jacobian]) <= 1e-12
    assert worst([torch.stack([run(part) for part in x])], [vmap(run)(x)]) <= 1e-12

    def loss(parameters, x):
        return outputs(layer, x, parameters).square().sum()

    parameters = {name: value.detach() for name, value in layer.named_parameters()}
    single = [grad(loss)(parameters, part) for part in x]
    batched = vmap(grad(loss), (None, 0))(parameters, x)
    for name in parameters:
        assert worst([torch.stack([gradients[name] for gradients in single])], [batched[name]]) <= 1e-12


@pytest.mark.parametrize("layer_class", [egru.EGRU, egru.ELSTM])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from torch.compile itself
@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_compiled_transforms_are_exact(layer_class, transform):
    torch._dynamo.reset()
    layer, x = make(layer_class), torch.randn(3, 1, 3)
    jacobian = transform(lambda x: layer(x)[0])
    expected = jacobian(x)
    assert expected.any()
    assert worst([expected], [torch.compile(jacobian, backend="aot_eager")(x)]) <= 1e-12


def test_a_vjp_equals_the_compiled_kernel():
    layer, x = make(egru.EGRU), torch.randn(6, 2, 3)
    inputs = x.clone().requires_grad_()
    y, _ = layer(inputs)
    cotangent = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, inputs, cotangent)
    value, pull, *_ = vjp(lambda x: layer(x)[0], x)
    assert worst([y, expected], [value, *pull(cotangent)]) <= 1e-12


@pytest.mark.parametrize("layer_class", [egru.EGRU, egru.ELSTM, egru.ERNN])
@pytest.mark.parametrize(
    "second",
    [
        hessian,
        lambda f: jacfwd(jacfwd(f)),
        lambda f: jacrev(jacrev(f)),
        lambda f: jacrev(jacfwd(f)),
        lambda f: functools.partial(torch.autograd.functional.hessian, f),
    ],
)
def test_second_derivatives_of_transforms_raise(layer_class, second):
    layer = make(layer_class)
    with pytest.raises(RuntimeError, match="egru: second derivatives are not supported"):
        second(lambda x: layer(x)[0].square().sum())(torch.randn(4, 1, 3))


@pytest.mark.parametrize("layer_class", [egru.EGRU, egru.ELSTM, egru.ERNN])
@pytest.mark.parametrize("loss", [torch.square, torch.neg])
@pytest.mark.parametrize("name", ["input", "weight_ih_l0", "weight_hh_l0", "bias_hh_l0", "threshold_l0"])
def test_second_derivative_of_an_argument_raises_with_allow_unused(layer_class, loss, name):
    """The gradient depends on every argument, so None would be wrong."""
    layer, x = make(layer_class), torch.randn(4, 1, 3, requires_grad=True)
    (first,) = torch.autograd.grad(loss(layer(x)[0]).sum(), x, create_graph=True)
    argument = x if name == "input" else layer.get_parameter(name)
    with pytest.raises(RuntimeError, match="egru: second derivatives are not supported"):
        torch.autograd.grad(first.sum(), argument, allow_unused=True)


def test_forward_mode_through_a_backward_pass_raises():
    x = torch.randn(4, 1, 3, requires_grad=True)
    y, _ = make(egru.EGRU)(x)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode differentiation of a backward pass"):
        torch.autograd.grad(y, x, forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


def test_named_backend_rejects_transforms():
    layer = make(egru.EGRU, backend="cpu")
    with pytest.raises(ValueError, match=r"backend='cpu' does not support forward-mode differentiation or torch.func"):
        jacfwd(lambda x: layer(x)[0])(torch.randn(4, 1, 3))


@pytest.mark.parametrize("layer_class", [egru.EGRU, egru.ELSTM])
def test_recurrent_clip_rejects_forward_mode(layer_class):
    layer, x = make(layer_class, recurrent_clip=0.1), torch.randn(4, 1, 3)
    with pytest.raises(RuntimeError, match="recurrent_clip bounds gradients of the backward pass"):
        jacfwd(lambda x: layer(x)[0])(x)
    inputs = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(layer(inputs)[0].square().sum(), inputs)
    assert worst([expected], [grad(lambda x: layer(x)[0].square().sum())(x)]) <= 1e-12
