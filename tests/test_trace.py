import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import egru


def loop(y, decay, gain=1.0, initial=None):
    trace = torch.zeros_like(y[0]) if initial is None else initial
    out = []
    for step in y:
        trace = decay * trace + gain * step
        out.append(trace)
    return torch.stack(out)


@pytest.mark.parametrize("steps", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("gain", [1.0, 0.1])
def test_trace_and_gradients_equal_the_recursion(steps, gain):
    y = torch.randn(steps, 3, 4, requires_grad=True)
    decay = torch.rand(4, requires_grad=True)
    initial = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(steps, 3, 4)
    expected, got = loop(y, decay, gain, initial), egru.exponential_trace(y, decay, gain=gain, initial=initial)
    torch.testing.assert_close(got, expected)
    inputs = (y, decay, initial)
    torch.testing.assert_close(
        torch.autograd.grad((weight * got).sum(), inputs), torch.autograd.grad((weight * expected).sum(), inputs)
    )
    last = egru.exponential_trace(y, decay, gain=gain, initial=initial, last=True)
    torch.testing.assert_close(last, expected[-1])
    torch.testing.assert_close(
        torch.autograd.grad(last.sum(), inputs), torch.autograd.grad(loop(*inputs[:2], gain, initial)[-1].sum(), inputs)
    )


def test_gradient_of_the_last_trace_reaches_every_step():
    """EvNN passes a gradient to the last step only."""
    y = torch.zeros(30, 1, 1, requires_grad=True)
    egru.exponential_trace(y, last=True).sum().backward()
    assert y.grad is not None
    torch.testing.assert_close(y.grad.flatten(), torch.exp(-torch.arange(29.0, -1, -1) / 10))


def test_last_reads_each_sequence_at_its_length():
    y = torch.randn(9, 3, 2)
    lengths = torch.tensor([9, 1, 4])
    whole = loop(y, 0.8)
    got = egru.exponential_trace(y, 0.8, lengths=lengths, last=True)
    torch.testing.assert_close(got, torch.stack([whole[n - 1, i] for i, n in enumerate(lengths)]))


def test_layouts_give_equal_traces():
    y = torch.randn(5, 3, 2)
    whole = egru.exponential_trace(y)
    torch.testing.assert_close(egru.exponential_trace(y.transpose(0, 1), batch_first=True), whole.transpose(0, 1))
    torch.testing.assert_close(egru.exponential_trace(y[:, 0]), whole[:, 0])
    torch.testing.assert_close(whole, loop(y, math.exp(-0.1)))


def test_invalid_arguments_raise_value_error():
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\], got 1.5"):
        egru.exponential_trace(torch.zeros(2, 2), 1.5)
    with pytest.raises(ValueError, match=r"non-empty .* got \(0, 2, 2\)"):
        egru.exponential_trace(torch.zeros(0, 2, 2))


def test_last_trace_without_gradients_equals_the_one_with_them_and_needs_no_product_of_all_steps():
    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            if func is torch.ops.aten.mul.Tensor:
                Sizes.largest = max(Sizes.largest, result.numel())
            return result

    y, lengths = torch.randn(200, 3, 4), torch.tensor([200, 7, 130])
    cases: list[dict[str, Any]] = [{}, {"lengths": lengths}, {"initial": torch.randn(3, 4)}]
    for options in cases:
        expected = egru.exponential_trace(y, last=True, **options)
        with torch.no_grad(), Sizes():
            torch.testing.assert_close(egru.exponential_trace(y, last=True, **options), expected)
    assert Sizes.largest <= 64 * 12
