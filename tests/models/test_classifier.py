import math

import pytest
import torch
from torch import nn

import egru
from egru.models import SequenceClassifier, detach_state
from tests.helpers import lively, worst

CELLS = ["egru", "elstm", "ernn", "gru", "lstm", "cornn", "indrnn"]
READOUTS = ["trace", "mean", "last", "every"]


def classifier(**options):
    model = SequenceClassifier(3, 8, 4, **options)
    for layer in model.layers:
        if isinstance(layer, egru.EGRU):
            lively(layer)
    return model


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("readout", READOUTS)
def test_chunks_with_state_equal_one_call(cell, readout):
    model = classifier(cell=cell, readout=readout, num_layers=2, gain=0.3)
    x = torch.randn(2, 9, 3)
    whole, last = model(x)
    assert whole.shape == ((2, 9, 4) if readout == "every" else (2, 4))
    first, middle = model(x[:, :5])
    second, end = model(x[:, 5:], detach_state(middle))
    assert worst([torch.cat([first, second], 1) if readout == "every" else second], [whole]) < 1e-12
    assert end.steps == last.steps == 9
    whole.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_readout_modes():
    x = torch.randn(2, 6, 3)
    models = {readout: classifier(readout=readout, decay=0.8, gain=0.5) for readout in READOUTS}
    for model in models.values():
        model.load_state_dict(models["trace"].state_dict())
    y, _ = models["trace"].layers[0](x.transpose(0, 1))
    assert (y != 0).any()
    trace = torch.stack([0.5 * 0.8 ** (5 - t) * y[t] for t in range(6)]).sum(0)
    W, b = models["trace"].readout.weight, models["trace"].readout.bias
    expected = {"trace": trace @ W.T + b, "mean": y.mean(0) @ W.T + b, "last": y[-1] @ W.T + b}
    for readout, scores in expected.items():
        assert worst([models[readout](x)[0]], [scores]) < 1e-12
    assert worst([models["every"](x)[0]], [(y @ W.T + b).transpose(0, 1)]) < 1e-12


def test_default_readout_is_the_papers_trace():
    model = SequenceClassifier(1, 4, 2)
    assert (model.summary, model.decay, model.gain) == ("trace", math.exp(-0.1), 1.0)


def test_frames_are_flattened_or_passed_to_the_head():
    x = torch.randn(2, 5, 1, 3, 3)
    flat = SequenceClassifier(9, 4, 2, readout="last")
    assert worst([flat(x)[0]], [flat(x.flatten(2))[0]]) == 0
    head = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    model = SequenceClassifier(2, 4, 2, head=head, readout="every")
    frames = torch.stack([torch.stack([head(frame[None])[0] for frame in row]) for row in x])
    y, _ = model.layers[0](frames.transpose(0, 1))
    assert worst([model(x)[0]], [model.readout(y).transpose(0, 1)]) < 1e-12


def test_dropout_is_variational_and_off_in_evaluation():
    model = classifier(cell="gru", readout="every", num_layers=2, dropout=0.5, output_dropout=0.5)
    inputs = []
    model.layer1.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))  # pyright: ignore
    x = torch.randn(3, 6, 3)
    model(x)
    dropped = inputs[0] == 0
    assert 0.2 < dropped.double().mean() < 0.8
    assert (dropped == dropped[:1]).all(), "the mask must be the same at every step"
    assert (dropped[0, 0] != dropped[0, 1]).any(), "the mask must differ between sequences"
    model.eval()
    assert worst([model(x)[0]], [model(x)[0]]) == 0
    assert not (inputs[1] == 0).any()


@pytest.mark.parametrize("head", [None, nn.Flatten()])
def test_input_dropout_is_variational_rescaled_and_off_in_evaluation(head):
    frame = (30,) if head is None else (2, 3, 5)
    model = SequenceClassifier(30, 8, 4, cell="gru", input_dropout=0.4, head=head)
    inputs = []
    model.layer0.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))  # pyright: ignore
    x = torch.rand(5, 6, *frame) + 1
    model(x)
    frames = x.flatten(2).transpose(0, 1)
    kept = inputs[0] != 0
    assert 0.2 < kept.double().mean() < 0.8
    assert (kept == kept[:1]).all(), "the mask must be the same at every step"
    assert (kept[0, 0] != kept[0, 1]).any(), "the mask must differ between sequences"
    assert worst([inputs[0]], [frames * kept / 0.6]) < 1e-12
    model.eval()(x)
    assert torch.equal(inputs[1], frames)


def test_zero_input_dropout_consumes_no_random_numbers():
    model, x = classifier(), torch.randn(3, 6, 3)
    before = torch.get_rng_state()
    trained = model(x)[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(trained, model.eval()(x)[0])


def test_mean_frame_is_subtracted_and_saved_in_the_state_dict():
    plain, centred, x = classifier(), classifier(centre=True), torch.randn(3, 6, 3)
    assert "mean" not in plain.state_dict()
    centred.load_state_dict(plain.state_dict() | {"mean": torch.tensor([0.5, -1.0, 2.0])})
    assert torch.equal(centred(x)[0], plain(x - centred.get_buffer("mean"))[0])
    assert worst([centred(x)[0]], [plain(x)[0]]) > 1e-3


def test_batch_of_one_is_normalised_by_running_statistics():
    model = SequenceClassifier(3, 5, 2, normalise=True)
    model(torch.rand(8, 6, 3))
    before = {name: value.clone() for name, value in model.named_buffers()}
    x = torch.rand(1, 6, 3)
    scores, _ = model(x)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert torch.equal(scores, model.eval()(x)[0])
    scores.sum().backward()
    assert model.normalise is not None
    assert model.normalise.weight.grad is not None


def test_options_are_passed_to_every_layer():
    model = SequenceClassifier(3, 8, 4, num_layers=2, zoneout=0.2, dropconnect=0.1, threshold=egru.Threshold("abs"))
    for layer in model.layers:
        assert isinstance(layer, egru.EGRU)
        assert (layer.zoneout, layer.dropconnect, layer.threshold_config.kind) == (0.2, 0.1, "abs")
    with pytest.raises(TypeError, match="zoneout"):
        SequenceClassifier(3, 8, 4, cell="gru", zoneout=0.2)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_first": True},
            r"SequenceClassifier: the layer option batch_first=True is not supported: .*\(B, T, features\)",
        ),
        (
            {"bidirectional": True},
            "SequenceClassifier: the layer option bidirectional=True is not supported: .*one direction",
        ),
        (
            {"dropout_mode": "plain"},
            "SequenceClassifier: the layer option dropout_mode='plain' is not supported: .*variational",
        ),
        ({"proj_size": 2}, "SequenceClassifier: the layer option proj_size=2 is not supported: .*hidden_size features"),
    ],
)
def test_options_that_change_the_layers_shapes_raise(cell, options, message):
    with pytest.raises(TypeError, match=message):
        SequenceClassifier(3, 8, 4, cell=cell, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cell": "tcn"}, "cell must be one of egru, .*; got 'tcn'"),
        ({"readout": "max"}, "readout must be one of trace, mean, last, every; got 'max'"),
        ({"decay": 1.5}, "decay must be a probability"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"normalise": True, "readout": "every"}, "normalise=True requires one summary per sequence"),
        ({"output_dropout": 1.0}, "output_dropout must be a probability"),
        ({"centre": True, "head": nn.Flatten()}, "centre=True is not supported with a head"),
        ({"input_dropout": -0.1}, "input_dropout must be a probability"),
    ],
)
def test_invalid_arguments_raise(options, message):
    with pytest.raises(ValueError, match=message):
        SequenceClassifier(3, 8, 4, **options)


def test_two_dimensional_input_raises():
    for model, shape in ((classifier(), "3"), (SequenceClassifier(3, 4, 2, head=nn.Flatten()), r"\.\.\.")):
        with pytest.raises(ValueError, match=rf"SequenceClassifier: .*\(batch, time, {shape}\), got \(2, 5\)"):
            model(torch.zeros(2, 5))


def test_state_of_another_model_raises():
    one, two = classifier(), classifier(num_layers=2)
    _, state = one(torch.randn(2, 5, 3))
    with pytest.raises(
        TypeError, match=r"state must be a tuple of length 2, one entry per layer; got a tuple of length 1"
    ):
        two(torch.randn(2, 5, 3), state)


@pytest.mark.parametrize(
    "options",
    [{"gain": 0.2}, {"normalise": True, "gain": 0.2}, {"readout": "last"}, {"readout": "every"}, {"centre": True}]
    + [{"centre": True, "bias": False}, {"readout": "mean"}, {"readout": "mean", "normalise": True}],
)
def test_engine_returns_the_same_scores(options):
    torch.set_default_dtype(torch.float32)
    model = classifier(num_layers=2, **options)
    x = torch.randn(5, 12, 3)
    if model.mean is not None:
        model.mean.copy_(torch.tensor([0.5, -1.0, 2.0]))
    for _ in range(3):
        model(x)  # running statistics
    model.eval()
    if model.normalise is not None:
        nn.init.uniform_(model.normalise.weight)
        nn.init.uniform_(model.normalise.bias)
    engine = egru.EventEngine(**model.streaming())
    scores = engine.run(x[0])
    for t in (1, 5, 12):
        expected = model(x[:1, :t])[0]
        torch.testing.assert_close(scores[t - 1], expected[0, -1] if "every" in options.values() else expected[0])


def test_streaming_raises_for_unsupported_models():
    for model, message in (
        (classifier(cell="gru"), "requires cell='egru', got GRU layers"),
        (SequenceClassifier(3, 4, 2, head=nn.Flatten()), "does not run a head"),
    ):
        with pytest.raises(ValueError, match=message):
            model.streaming()


@pytest.mark.parametrize("cell", CELLS)
def test_autocast_gradients_are_finite(cell):
    torch.set_default_dtype(torch.float32)
    model = classifier(cell=cell, readout="mean", num_layers=2)
    with torch.autocast("cpu", torch.bfloat16):
        scores, _ = model(torch.randn(2, 5, 3))
    scores.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_detach_state_preserves_the_structure():
    x = torch.randn(2, 3, 3)
    for cell, state_type in (("egru", egru.EventState), ("lstm", tuple), ("cornn", egru.models.CoRNNState)):
        state = detach_state(classifier(cell=cell)(x)[1])
        assert type(state) is egru.models.ClassifierState
        assert type(state.layers[0]) is state_type
        assert not any(part.requires_grad for part in state.layers[0])
    assert detach_state([torch.ones(1, requires_grad=True)])[0].requires_grad is False
    assert detach_state(None) is None
