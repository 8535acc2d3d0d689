import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import egru
from tests.helpers import lively


def snapshot(module):
    return {k: v.clone() for k, v in module.state_dict().items()}


def unchanged(module, before):
    return all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_gru_state_dict_loads_and_keeps_the_thresholds():
    gru, layer = nn.GRU(3, 5, 2), egru.EGRU(3, 5, 2)
    before = snapshot(layer)
    result = layer.load_state_dict(gru.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    for name, value in gru.state_dict().items():
        assert torch.equal(layer.state_dict()[name], value)
    assert torch.equal(layer.get_parameter("threshold_l1"), before["threshold_l1"])


def test_gru_state_dict_loads_inside_a_model():
    class Model(nn.Module):
        def __init__(self, rnn):
            super().__init__()
            self.rnn, self.out = rnn, nn.Linear(5, 2)

    event, dense = Model(egru.EGRU(3, 5)), Model(nn.GRU(3, 5))
    event.load_state_dict(dense.state_dict())
    assert torch.equal(event.rnn.get_parameter("weight_hh_l0"), dense.rnn.get_parameter("weight_hh_l0"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (nn.GRU(3, 6), r"weight_ih_l0 has shape \(18, 3\), this EGRU requires \(15, 3\)"),
        (nn.GRU(4, 5), r"weight_ih_l0 has shape \(15, 4\), this EGRU requires \(15, 3\)"),
        (nn.GRU(3, 5, 2), "Unexpected key.*weight_ih_l1"),
        (nn.GRU(3, 5, bias=False), "Missing key.*bias_ih_l0"),
        (nn.LSTM(3, 5), r"weight_ih_l0 has shape \(20, 3\)"),
    ],
)
def test_mismatched_state_dict_raises_and_changes_nothing(source, message):
    layer = egru.EGRU(3, 5)
    before = snapshot(layer)
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(source.state_dict())
    assert unchanged(layer, before)


def test_missing_threshold_raises():
    layer = egru.EGRU(3, 5, 2)
    state = layer.state_dict()
    del state["threshold_l1"]
    with pytest.raises(RuntimeError, match=r"Missing key.*threshold_l1"):
        egru.EGRU(3, 5, 2).load_state_dict(state)
    assert egru.EGRU(3, 5, 2).load_state_dict(state, strict=False).missing_keys == ["threshold_l1"]


def test_state_dict_deepcopy_and_pickle_preserve_the_layer():
    layer = egru.EGRU(3, 5, 2, bidirectional=True, reset_scale=0.5, threshold=egru.Threshold(per_unit=False))
    remove = layer.observe(lambda record: None)
    x = torch.randn(6, 2, 3)
    expected = layer(x)[0]
    fresh = egru.EGRU(3, 5, 2, bidirectional=True, threshold=egru.Threshold(per_unit=False))
    fresh.load_state_dict(layer.state_dict())
    assert fresh.reset_scale == 0.5
    for other in (fresh, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x)[0], expected)
        assert not other._observers
    remove()
    assert not layer._observers


@pytest.mark.parametrize("layer_class", [egru.EGRU, egru.ELSTM])
def test_reset_scale_per_unit(layer_class):
    layer = lively(layer_class(3, 5, 2, bidirectional=True, threshold=egru.Threshold(mean=-2.0)), 3.0)
    x = torch.randn(12, 2, 3)
    plain = layer(x)[0]
    layer.reset_scale = torch.ones(20)
    assert torch.equal(layer(x)[0], plain)
    layer.reset_scale[10:15] = 0.2  # second layer, forward direction
    assert [scale.tolist() for scale in layer.reset_scales().values()] == [[1.0] * 5] * 2 + [[0.2] * 5] + [[1.0] * 5]
    expected = layer(x)[0]
    assert not torch.equal(expected, plain)
    fresh = layer_class(3, 5, 2, bidirectional=True, threshold=egru.Threshold(mean=-2.0))
    one = fresh.state_dict()["reset_scale"].clone()
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x)[0], expected)
    fresh.load_state_dict(layer.state_dict() | {"reset_scale": one})
    assert torch.equal(fresh(x)[0], plain)
    with pytest.raises(RuntimeError, match=r"reset_scale has shape \(5,\)"):
        fresh.load_state_dict(layer.state_dict() | {"reset_scale": torch.ones(5)})


def test_reset_scale_of_another_dtype_works_and_of_a_wrong_size_raises():
    layer = lively(egru.EGRU(3, 40, dtype=torch.float64), 3.0)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    expected = layer(x)[0]
    layer.reset_scale = torch.ones(40, dtype=torch.float32)
    assert torch.equal(layer(x)[0], expected)
    for size in (1, 39, 80):
        layer.reset_scale = torch.ones(size)
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            layer(x)


def test_cell_and_compiled_layer_support_reset_scale_per_unit():
    layer = lively(egru.EGRU(3, 5, reset="threshold"), 3.0)
    cell = egru.EGRUCell(3, 5, reset="threshold")
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in layer.named_parameters()})
    cell.reset_scale = layer.reset_scale = torch.rand(5)
    x = torch.randn(1, 2, 3)
    y, (c, _) = layer(x)
    assert y.any()
    assert torch.equal(cell(x[0]).y, y[0])
    assert torch.equal(cell(x[0]).c, c[0])
    x = torch.randn(12, 2, 3)
    y, _ = layer(x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x)[0], y)
    layer.reset_scale = torch.ones(5)
    assert not torch.equal(layer(x)[0], y)


def test_dtype_and_device_arguments():
    layer = egru.EGRU(3, 5, dtype=torch.float32, device="cpu")
    assert {p.dtype for p in (*layer.parameters(), *layer.buffers())} == {torch.float32}
    assert layer.double()(torch.randn(2, 1, 3))[0].dtype == torch.float64
    y, state = layer.bfloat16()(torch.randn(4, 2, 3).bfloat16())
    assert y.dtype == state.c.dtype == torch.bfloat16


@pytest.mark.parametrize("assign", [False, True])
def test_loading_into_a_layer_built_on_the_meta_device(assign):
    trained = egru.EGRU(3, 5, 2, reset_scale=0.5)
    x = torch.randn(6, 2, 3)
    with torch.device("meta"):
        layer = egru.EGRU(3, 5, 2)
    if not assign:
        layer.to_empty(device="cpu")
        layer._rest.fill_(7.0)  # uninitialised memory
    layer.load_state_dict(trained.state_dict(), assign=assign)
    assert torch.equal(layer(x)[0], trained(x)[0])


def test_reset_parameters_after_skip_init():
    layer = nn.utils.skip_init(egru.EGRU, 3, 5, reset_scale=0.5)
    assert isinstance(layer, egru.EGRU)
    layer._rest.fill_(7.0)
    layer.reset_scale.fill_(123.0)
    layer.reset_parameters()
    assert layer.reset_scale == 0.5
    assert not layer._rest.any()


def test_parametrised_layer_loads_and_keeps_its_weights_on_reset():
    """A parametrised weight is stored in a submodule."""
    layers = [egru.EGRU(3, 5, threshold=egru.Threshold(mean=-50.0)) for _ in range(2)]
    for layer in layers:
        weight_norm(layer, "weight_hh_l0")
    assert layers[1].load_state_dict(layers[0].state_dict()) == ([], [])
    x = torch.randn(6, 2, 3)
    assert torch.equal(layers[0](x)[0], layers[1](x)[0])
    layers[0].reset_parameters()
    first, second = (layer.weights(layer.directions()[0]).hh for layer in layers)
    assert torch.equal(first, second)
