from typing import Any

import pytest
import torch
from torch import nn

import egru
from egru.models import LanguageModel, detach_state
from egru.models.language import AlignedLinear, aligned_linear
from tests.helpers import lively, worst

CELLS = {"egru": {}, "gru": {}, "lstm": {}, "indrnn": {}, "dense_indrnn": {"num_layers": 1, "blocks": (1, 1)}}


def language(cell: Any = "egru", **options: Any) -> LanguageModel:
    model = LanguageModel(11, 6, 9, cell=cell, **{**CELLS[cell], **options})
    for layer in model.layers:
        if isinstance(layer, egru.EGRU):
            lively(layer, 3.0)
    nn.init.normal_(model.embedding.weight)
    return model


@pytest.mark.parametrize("cell", CELLS)
def test_chunks_with_state_equal_one_call(cell):
    model = language(cell)
    tokens = torch.randint(11, (8, 3))
    whole, last = model(tokens)
    assert whole.shape == (8, 3, 11)
    first, middle = model(tokens[:3])
    second, end = model(tokens[3:], detach_state(middle))
    assert worst([torch.cat([first, second])], [whole]) < 1e-12
    assert type(end) is type(last) is tuple
    whole.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_last_layer_has_embedding_size_and_decoder_shares_weights():
    model = language()
    sizes = [(layer.input_size, layer.hidden_size) for layer in model.layers]  # pyright: ignore
    assert sizes == [(6, 9), (9, 9), (9, 6)]
    assert model.readout.weight is model.embedding.weight
    assert (model.readout.bias == 0).all()
    assert len([name for name, _ in model.named_parameters() if "embedding" in name or "readout" in name]) == 2
    untied = language(tied=False)
    assert untied.readout.weight is not untied.embedding.weight


@pytest.mark.parametrize("cell", CELLS)
def test_batch_first_raises(cell):
    with pytest.raises(
        TypeError, match=r"LanguageModel: the layer option batch_first=True is not supported: .*LanguageModel \(T, B\)"
    ):
        language(cell, batch_first=True)


def test_dropout_is_off_in_evaluation():
    model = language(word_dropout=0.3, embedding_dropout=0.3, dropout=0.3, output_dropout=0.3, dropconnect=0.3)
    tokens = torch.randint(11, (8, 3))
    model.eval()
    plain = language()
    plain.load_state_dict(model.state_dict())
    assert worst([model(tokens)[0]], [plain(tokens)[0]]) == 0
    model.train()
    assert worst([model(tokens)[0]], [model(tokens)[0]]) > 0


def first_input(model, tokens):
    inputs = []
    handle = model.layer0.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    model(tokens)
    handle.remove()
    return inputs[0]


def test_word_dropout_removes_all_occurrences_of_a_word():
    model = language(word_dropout=0.4)
    tokens = torch.randint(11, (40, 5))
    x = first_input(model, tokens)
    scaled = torch.isclose(x, model.embedding(tokens) / 0.6).all(-1)
    zero = (x == 0).all(-1)
    assert (scaled ^ zero).all(), "each word must be zero or rescaled as a whole"
    dropped = set(tokens[zero].tolist())
    assert dropped
    assert dropped.isdisjoint(tokens[scaled].tolist()), "a word must be dropped at all its positions"


def test_embedding_dropout_is_shared_over_time():
    model = language(embedding_dropout=0.5)
    dropped = first_input(model, torch.randint(11, (20, 5))) == 0
    assert (dropped == dropped[:1]).all()
    assert 0.1 < dropped.double().mean() < 0.9


def test_features_returns_output_before_and_after_dropout():
    model = language(output_dropout=0.5)
    tokens = torch.randint(11, (20, 5))
    output, dropped, _ = model.features(tokens)
    kept = dropped != 0
    assert worst([dropped[kept]], [output[kept] * 2]) < 1e-12
    assert kept.any()
    assert ((output != 0) & ~kept).any()
    torch.manual_seed(3)
    scores, _ = model(tokens)
    torch.manual_seed(3)
    assert torch.equal(scores, model.readout(model.features(tokens).dropped))


def test_engine_runs_the_model_directly():
    torch.set_default_dtype(torch.float32)
    model = language(dropout=0.5).eval()
    tokens = torch.randint(11, (15, 1))
    expected, _ = model(tokens)
    scores = egru.EventEngine(model).run(tokens[:, 0])
    torch.testing.assert_close(torch.as_tensor(scores), expected[:, 0], rtol=1e-4, atol=1e-5)


def test_monitor_counts_every_layer():
    model = language()
    with egru.ActivityMonitor(model) as activity:
        model(torch.randint(11, (8, 3)))
    summary = activity.summary()
    assert [layer.name for layer in summary.layers] == ["layer0", "layer1", "layer2"]
    assert [linear.name for linear in summary.linears] == ["readout"]


def test_invalid_arguments_raise():
    model = language()
    for tokens in (torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2)):
        with pytest.raises(ValueError, match=r"tokens must be integers of shape \(time, batch\), got"):
            model(tokens)
    with pytest.raises(ValueError, match="word_dropout must be a probability"):
        language(word_dropout=1.0)
    with pytest.raises(ValueError, match="cell='dense_indrnn' requires num_layers=1, got 3"):
        language("dense_indrnn", num_layers=3)
    with pytest.raises(ValueError, match="vocabulary must be at least 1"):
        LanguageModel(0, 2, 3)


@pytest.mark.parametrize(("mode", "steps"), [("variational", 1), ("plain", 6)])
def test_dropout_mode_sets_the_number_of_masks(mode, steps, monkeypatch):
    masks = []
    dropout = torch.nn.functional.dropout
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, p: (masks.append(tuple(x.shape)), dropout(x, p))[1])
    model = language(embedding_dropout=0.3, output_dropout=0.2, dropout=0.1, dropout_mode=mode)
    model.train()
    model(torch.randint(11, (6, 3)))
    assert [shape[:2] for shape in masks] == [(steps, 3)] * (1 + model.num_layers)
    with pytest.raises(ValueError, match="dropout_mode"):
        language(dropout_mode="never")


@pytest.mark.parametrize("features", [5, 8])
def test_aligned_linear_equals_linear(features):
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((3, 2, features), (4, features), (4,)))
    pairs = []
    for linear in (aligned_linear, torch.nn.functional.linear):
        scores = linear(x, weight, bias)
        pairs.append([scores, *torch.autograd.grad(scores.square().sum(), (x, weight, bias))])
    assert worst(*pairs) < 1e-12


@pytest.mark.cuda
def test_monitor_counts_the_readout_under_autocast():
    torch.set_default_dtype(torch.float32)
    model = language().cuda().eval()
    tokens = torch.randint(11, (8, 3)).cuda()
    calls = []
    for autocast in (False, True):
        with (
            torch.no_grad(),
            torch.autocast("cuda", torch.bfloat16, enabled=autocast),
            egru.ActivityMonitor(model) as monitor,
        ):
            model(tokens)
        calls.append([linear.calls for linear in monitor.summary().linears])
    assert calls == [[24], [24]]


def test_monitor_counts_a_padded_readout(monkeypatch):
    """On a GPU under autocast the readout pads its weights; its MACs must still be counted."""
    model = language().eval()
    monkeypatch.setattr(AlignedLinear, "forward", lambda self, x: aligned_linear(x, self.weight, self.bias))
    with torch.no_grad(), egru.ActivityMonitor(model) as monitor:
        model(torch.randint(11, (8, 3)))
    assert [linear.calls for linear in monitor.summary().linears] == [24]


@pytest.mark.cuda
@pytest.mark.parametrize("cell", CELLS)
def test_cuda_matches_cpu(cell):
    torch.set_default_dtype(torch.float32)
    options = {} if "indrnn" in cell else {"dropconnect": 0.3}
    model = language(cell, word_dropout=0.1, embedding_dropout=0.2, output_dropout=0.2, **options)
    tokens = torch.randint(11, (8, 3))
    model.eval()
    events = [layer for layer in model.layers if isinstance(layer, egru.EGRU)]
    for layer in events:
        layer.backend = "reference"  # avoids the warning about a missing compiled core
    expected, _ = model(tokens)
    for layer in events:
        layer.backend = "auto"
    model.cuda()
    scores, state = model(tokens.cuda())
    torch.testing.assert_close(scores.cpu(), expected, rtol=1e-3, atol=1e-3)
    model.train()
    model(tokens.cuda(), detach_state(state))[0].square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())  # pyright: ignore
