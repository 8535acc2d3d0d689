import pytest
import torch
from torch import nn

import egru
from egru.models import ConvolutionalHead, gesture_network


def test_readout_every_and_last_agree_at_the_last_step():
    x = torch.rand(2, 5, 2, 8, 8).gt(0.5).double()
    every = gesture_network(6, frame=(2, 8, 8), readout="every")
    last = gesture_network(6, frame=(2, 8, 8))
    last.load_state_dict(every.state_dict())
    assert every(x)[0].shape == (2, 5, 11)
    assert torch.equal(every(x)[0][:, -1], last(x)[0])
    assert len(last.layers) == 2


def test_frames_are_flattened_in_memory_order():
    model = gesture_network(6, frame=(2, 8, 8))
    inputs = []
    model.layer0.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))  # pyright: ignore
    x = torch.rand(3, 5, 2, 8, 8)
    model(x)
    assert torch.equal(inputs[0][4, 2], x[2, 4].flatten())


def test_head_shapes_match_the_paper():
    head = ConvolutionalHead().float()
    shapes = []
    for layer in head:
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d | nn.Linear):
            layer.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape[1:])))
    head(torch.rand(1, 1, 128, 128, dtype=torch.float32))
    assert shapes == [
        (64, 31, 31),
        (64, 15, 15),
        (192, 15, 15),
        (192, 7, 7),
        (384, 7, 7),
        (384, 3, 3),
        (256, 3, 3),
        (256, 1, 1),
        (256, 1, 1),
        (512,),
    ]


def test_head_averages_channels_and_upscales_small_frames():
    head = ConvolutionalHead().float()
    x = torch.rand(2, 2, 32, 32, dtype=torch.float32)
    large = x.repeat_interleave(4, -1).repeat_interleave(4, -2).mean(1, keepdim=True)
    torch.testing.assert_close(head(x), head(large))
    with pytest.raises(ValueError, match=r"square frames \(N, C, S, S\), got \(2, 2, 32, 16\)"):
        head(x[..., :16])


def test_convolutional_network_trains():
    torch.set_default_dtype(torch.float32)
    model = gesture_network(16, num_layers=1, convolutional=True, output_dropout=0.5)
    scores, state = model(torch.rand(2, 3, 2, 32, 32))
    assert scores.shape == (2, 11)
    assert isinstance(state.layers[0], egru.EventState)
    scores.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.cuda
def test_convolutional_network_trains_on_cuda():
    torch.set_default_dtype(torch.float32)
    model = gesture_network(16, num_layers=1, convolutional=True).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        scores, _ = model(torch.rand(2, 3, 2, 32, 32, device="cuda"))
    scores.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())  # pyright: ignore
