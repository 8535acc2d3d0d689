import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from egru.models import GRU, LSTM
from tests.helpers import worst


@pytest.mark.parametrize(("ours", "theirs"), [(GRU, nn.GRU), (LSTM, nn.LSTM)])
def test_equals_torch_without_dropconnect_and_in_evaluation(ours, theirs):
    plain = theirs(3, 4)
    x = torch.randn(5, 2, 3)
    expected, _ = plain(x)
    for layer in (ours(3, 4), ours(3, 4, dropconnect=0.5).eval()):
        layer.load_state_dict(plain.state_dict())
        assert torch.equal(layer(x)[0], expected)


@pytest.mark.parametrize(("ours", "theirs"), [(GRU, nn.GRU), (LSTM, nn.LSTM)])
def test_dropconnect_masks_recurrent_weights_once_per_call(ours, theirs):
    """Outputs and gradients equal those of a torch layer whose recurrent weights are masked and rescaled."""
    layer = ours(3, 4, dropconnect=0.4)
    plain = theirs(3, 4)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(6, 2, 3)
    torch.manual_seed(5)
    y, _ = layer(x)
    torch.manual_seed(5)
    mask = nn.functional.dropout(torch.ones_like(layer.weight_hh_l0), 0.4)
    assert 0 < (mask == 0).double().mean() < 1
    with torch.no_grad():
        plain.weight_hh_l0.mul_(mask)
    expected, _ = plain(x)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert worst([y], [expected]) < 1e-12
    grads = [p.grad for p in layer.parameters()]
    wanted = [p.grad * mask if n == "weight_hh_l0" else p.grad for n, p in plain.named_parameters()]
    assert worst(grads, wanted) < 1e-12
    assert not torch.equal(layer(x)[0], y), "every call must draw a new mask"


@pytest.mark.parametrize("ours", [GRU, LSTM])
def test_chunks_with_state_equal_one_call(ours):
    layer = ours(3, 4, dropconnect=0.4)
    x = torch.randn(6, 2, 3)

    def seeded(*args):
        torch.manual_seed(5)
        return layer(*args)

    whole, last = seeded(x)
    first, middle = seeded(x[:2])
    second, end = seeded(x[2:], middle)
    assert worst([torch.cat([first, second])], [whole]) < 1e-12
    assert type(last) is type(end)
    with pytest.raises(ValueError, match=r"input must have shape \(time, batch, 3\), got \(6, 2, 4\)"):
        layer(torch.zeros(6, 2, 4))
    with pytest.raises(ValueError, match="dropconnect must be a probability"):
        ours(3, 4, dropconnect=1.0)


@pytest.mark.parametrize("ours", [GRU, LSTM])
def test_packed_and_unbatched_input_in_training(ours):
    layer = ours(3, 4, 2, True, dropconnect=0.4, bidirectional=True)
    x, lengths = torch.randn(6, 2, 3), [6, 3]

    def seeded(x, **state):
        torch.manual_seed(5)
        return layer(x, **state)

    packed, last = seeded(pack_padded_sequence(x, torch.tensor(lengths)))
    y, _ = pad_packed_sequence(packed)
    for row, length in enumerate(lengths):
        alone, end = seeded(x[:length, row])
        assert worst([y[:length, row]], [alone]) < 1e-12
        for one, all_rows in zip(*((s,) if ours is GRU else s for s in (end, last)), strict=True):
            assert worst([one], [all_rows[:, row]]) < 1e-12
    y, _ = seeded(x, hx=last)
    assert worst([y], [seeded(x)[0]]) > 1e-3
    y.sum().backward()
    assert all(p.grad is not None and (p.grad != 0).any() for p in layer.parameters())
    assert all(used is registered for used, registered in zip(layer._flat_weights, layer.parameters(), strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("ours", [GRU, LSTM])
def test_masked_weights_do_not_warn_on_cuda(ours):
    layer = ours(3, 4, dropconnect=0.4).cuda().float()
    y, _ = layer(torch.randn(6, 2, 3, device="cuda", dtype=torch.float32))
    y.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())
