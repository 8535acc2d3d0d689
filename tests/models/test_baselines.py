import pytest
import torch
from torch import nn

from egru.activity import count_parameters
from egru.models import CoRNN, DenseIndRNN, IndRNN


def test_parameter_counts_match_the_paper():
    with torch.device("meta"):
        cornn = nn.ModuleList([CoRNN(1, 256), nn.Linear(256, 10)])
        indrnn = nn.ModuleList([DenseIndRNN(600, 600), nn.Embedding(10_000, 600)])
        gru = nn.ModuleList([nn.GRU(2048, 1024, 2), nn.Linear(1024, 11)])
        lstm = nn.ModuleList([nn.LSTM(2048, 512, 2), nn.Linear(512, 11)])
    assert round(count_parameters(cornn) / 1e3) == 134
    assert round(count_parameters(indrnn) / 1e6) == 52
    assert 15.7e6 <= count_parameters(gru) < 15.8e6
    assert round(count_parameters(lstm) / 1e6, 1) == 7.4


def test_cornn_equations():
    layer = CoRNN(3, 4, dt=0.1, gamma=2.0, epsilon=3.0)
    x = torch.randn(6, 2, 3)
    out, state = layer(x)
    y = z = torch.zeros(2, 4)
    for t in range(6):
        drive = torch.cat([y, z], -1) @ layer.weight_hh_l0.T + x[t] @ layer.weight_ih_l0.T + layer.bias_l0
        z = z + 0.1 * (torch.tanh(drive) - 2.0 * y - 3.0 * z)
        y = y + 0.1 * z
        torch.testing.assert_close(out[t], y)
    torch.testing.assert_close(state, (y, z))
    first, middle = layer(x[:3])
    torch.testing.assert_close(torch.cat([first, layer(x[3:], middle)[0]]), out)
    batch_first = CoRNN(3, 4, dt=0.1, gamma=2.0, epsilon=3.0, batch_first=True)
    batch_first.load_state_dict(layer.state_dict())
    torch.testing.assert_close(batch_first(x.transpose(0, 1))[0], out.transpose(0, 1))


def test_indrnn_equations():
    layer = IndRNN(3, 4, 2)
    x = torch.randn(6, 2, 3)
    out, state = layer(x)
    h = [torch.zeros(2, 4), torch.zeros(2, 4)]
    for t in range(6):
        below = x[t]
        for i in range(2):
            W, u, b = (layer.get_parameter(f"{n}_l{i}") for n in ("weight_ih", "weight_hh", "bias"))
            h[i] = torch.relu(below @ W.T + u * h[i] + b)
            below = h[i]
        torch.testing.assert_close(out[t], h[1])
    torch.testing.assert_close(state, torch.stack(h))
    first, middle = layer(x[:3])
    torch.testing.assert_close(torch.cat([first, layer(x[3:], middle)[0]]), out)


def test_normalised_indrnn_follows_its_equations():
    layer = IndRNN(3, 4, normalise=True)
    x = torch.randn(6, 2, 3)
    p = x @ layer.get_parameter("weight_ih_l0").T
    p = (p - p.mean(-1, True)) / (p.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    out, h = layer(x)[0], torch.zeros(2, 4)
    for t in range(6):
        h = torch.relu(p[t] + layer.get_parameter("weight_hh_l0") * h + layer.get_parameter("bias_l0"))
        torch.testing.assert_close(out[t], h)


def test_indrnn_recurrent_weights_are_clamped():
    layer = IndRNN(1, 2)
    with torch.no_grad():
        layer.get_parameter("weight_hh_l0").copy_(torch.tensor([1.5, -1.5]))
        layer.get_parameter("weight_ih_l0").fill_(1.0)
    out, _ = layer(torch.eye(20)[:, :1, None])  # one impulse
    assert out[:, 0, 0].tolist() == [1.0] * 20
    assert out[:, 0, 1].tolist() == [1.0] + [0.0] * 19


def test_dense_indrnn_output_has_moderate_scale_at_initialisation():
    out, _ = DenseIndRNN(8, 8, growth=8)(torch.randn(50, 4, 8))
    assert 0.1 < out.std() < 10  # 1e7 without normalisation


def test_dense_indrnn_chunks_with_state_equal_one_call():
    model = DenseIndRNN(5, 3, growth=2, blocks=(2, 1))
    x = torch.randn(6, 2, 5)
    out, state = model(x)
    assert out.shape == (6, 2, 3)
    assert len(state) == 2 * 3 + 2
    first, middle = model(x[:2])
    torch.testing.assert_close(torch.cat([first, model(x[2:], middle)[0]]), out)
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("make", [CoRNN, IndRNN])
def test_invalid_input_raises(make):
    with pytest.raises(ValueError, match=f"{make.__name__}: input has 2 features"):
        make(3, 4)(torch.zeros(5, 2, 2))
    with pytest.raises(ValueError, match="hidden_size must be at least 1, got 0"):
        make(3, 0)
