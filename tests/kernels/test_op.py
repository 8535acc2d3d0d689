"""The operator inside torch: registration, compilers, exporters, autocast, data parallelism."""

from typing import Any

import pytest
import torch
from torch import nn

import egru
from egru.kernels.op import sequence
from tests.helpers import lively, worst

OPTIONS = [
    pytest.param({"reset": "output", "reset_gate": "before"}, id="output before"),
    pytest.param({"reset": "threshold", "reset_gate": "after"}, id="threshold after"),
    pytest.param({"reset": "hard", "reset_gate": "before", "zoneout": 0.2}, id="hard zoneout"),
    pytest.param({"recurrent_clip": 0.01}, id="clipped"),
    pytest.param({"events": "signed", "reset": "output"}, id="signed"),
    pytest.param({"events": "delta", "reset": "none", "reset_gate": "after"}, id="delta"),
]


def arguments(dtype=torch.float64, grad=True, backend="reference"):
    T, B, I, H = 4, 2, 3, 5
    made = [
        torch.randn(T, B, I), torch.randn(B, H), torch.randn(B, H), torch.randn(3 * H, I), torch.randn(3 * H, H),
        torch.randn(3 * H), torch.randn(3 * H), torch.rand(H),
    ]  # fmt: skip
    tensors = [x.to(dtype).requires_grad_(grad) for x in made]
    options = ("output", "after", 1.0, 1.0, False, "triangle", "", False, 0.0, "positive", "gru", "cell", backend, True)
    return (*tensors, torch.ones((), dtype=dtype), None, torch.tensor([4, 2]), *options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operator_passes_opcheck(dtype):
    torch.use_deterministic_algorithms(False)  # opcheck compares uninitialised fake outputs
    torch.library.opcheck(sequence, arguments(dtype))


class Classifier(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.rnn = lively(egru.EGRU(3, 8, 2, **options))
        self.readout = nn.Linear(8, 4)

    def forward(self, x):
        y, state = self.rnn(x)
        return self.readout(egru.exponential_trace(y, last=True)), state.c


@pytest.mark.parametrize("options", OPTIONS)
def test_compiles_into_one_graph(options):
    assert_compiles_into_one_graph(options, False, [6])


def test_compiles_into_one_graph_of_any_length():
    assert_compiles_into_one_graph({}, True, [6, 9])
    assert_compiles_into_one_graph({}, False, [6, 9])


def assert_compiles_into_one_graph(options, dynamic, lengths):
    torch._dynamo.reset()
    model = Classifier(**options).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for T in lengths:
        x = torch.randn(T, 2, 3)
        expected, got = model(x), compiled(x)
        assert worst(expected, got) <= 1e-12
        parameters = list(model.parameters())
        assert (
            worst(*(torch.autograd.grad(out[0].sum() + out[1].sum(), parameters) for out in (expected, got))) <= 1e-12
        )


def test_inductor_trains_with_dropout():
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)  # inductor uses uninitialised buffers
    model = Classifier(dropout=0.1, dropconnect=0.1, zoneout=0.1).float()
    compiled = torch.compile(model, fullgraph=True)
    out, _ = compiled(torch.randn(5, 2, 3, dtype=torch.float32))
    out.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_monitor_records_compiled_models():
    torch._dynamo.reset()
    model = Classifier().eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(6, 2, 3)
    compiled(x)
    summaries = []
    for watched in (model, compiled):
        assert isinstance(watched, nn.Module)
        with egru.ActivityMonitor(watched) as activity, torch.no_grad():
            watched(x)
            watched(2 * x)
        summaries.append(activity.summary())
    assert summaries[0].steps == 24
    assert str(summaries[0]) == str(summaries[1])


def test_export_contains_one_operator_per_layer():
    model = Classifier().eval()
    x = torch.randn(6, 2, 3)
    program = torch.export.export(model, (x,))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("egru.sequence.default") == 2
    assert worst(model(x), program.module()(x)) <= 1e-12


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("grad", [True, False])
def test_jit_trace_depends_on_its_input(grad):
    """The trace must not contain the values of the input that it was recorded with."""
    model = Classifier().eval()
    with torch.set_grad_enabled(grad):
        traced: Any = torch.jit.trace(model, torch.randn(4, 2, 3), check_trace=False)
        x = torch.randn(6, 3, 3)
        assert worst(traced(x), model(x)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_products_and_keeps_the_state(dtype):
    # The same kernel twice, so that results are bitwise equal.
    layer = lively(egru.EGRU(3, 16, dtype=torch.float32, backend="reference"))
    x = torch.randn(10, 4, 3, dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        y, state = layer(x)
        low_input, _ = layer(x.to(dtype))
    assert y.dtype == state.c.dtype == torch.float32
    y.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    rounded = egru.EGRU(3, 16, dtype=torch.float32, backend="reference")
    rounded.load_state_dict(layer.state_dict())
    with torch.no_grad():
        for name in ("weight_ih_l0", "weight_hh_l0"):
            rounded.get_parameter(name).copy_(layer.get_parameter(name).to(dtype))
        expected, _ = rounded(x.to(dtype).float())
        exact, _ = layer(x)
    assert torch.equal(y, expected)
    assert torch.equal(y, low_input)
    assert not torch.equal(y, exact)


def test_gradients_require_save():
    with pytest.raises(RuntimeError, match="gradients require save=True"):
        sequence(*arguments()[:-1], False)


@pytest.mark.parametrize("loss", [torch.square, torch.abs, torch.neg])
def test_second_derivatives_raise_an_error(loss):
    """Also if the first gradients do not depend on the outputs, where they would otherwise be zero."""
    layer, x = egru.EGRU(2, 3, backend="reference"), torch.randn(3, 1, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(loss(layer(x)[0]).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        grad.square().sum().backward()


def test_reference_backend_runs():
    layer = egru.EGRU(2, 3, backend="reference")
    assert layer(torch.randn(3, 1, 2))[0].shape == (3, 1, 3)


def test_data_parallel_gradients_are_equal(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Classifier()
        parallel = nn.parallel.DistributedDataParallel(model)
        x = torch.randn(5, 2, 3)
        expected = torch.autograd.grad(model(x)[0].sum(), list(model.parameters()))
        parallel(x)[0].sum().backward()
        assert worst(expected, [p.grad for p in model.parameters()]) <= 1e-12
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.cuda
@pytest.mark.parametrize("options", OPTIONS)
def test_cuda_matches_the_reference(options):
    layer = lively(egru.EGRU(3, 8, 2, backend="reference", **options)).eval()  # the compiled core may be missing here
    x = torch.randn(6, 2, 3)
    expected, state = layer(x)
    grads = torch.autograd.grad(expected.sum(), list(layer.parameters()))
    layer.backend = "auto"
    layer.cuda()
    got, got_state = layer(x.cuda())
    assert got.is_cuda
    assert torch.equal(expected != 0, (got != 0).cpu())
    assert worst([expected, *state], [t.cpu() for t in (got, *got_state)]) <= 1e-10
    assert worst(grads, [g.cpu() for g in torch.autograd.grad(got.sum(), list(layer.parameters()))]) <= 1e-10
