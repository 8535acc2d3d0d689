import threading

import pytest
import torch

from egru.data import Batches, Split, fits_on_device


def numbered(n=10):
    return Split(torch.arange(n)[:, None].repeat(1, 3), torch.arange(n))


@pytest.mark.parametrize("resident", [True, False])
def test_batches_keep_the_order_of_the_split(resident):
    batches = Batches(numbered(), 4, resident=resident)
    assert len(batches) == 3
    seen = list(batches)
    assert [len(y) for _, y in seen] == [4, 4, 2]
    assert torch.cat([y for _, y in seen]).tolist() == list(range(10))
    assert all((x[:, 0] == y).all() for x, y in seen)


@pytest.mark.parametrize("resident", [True, False])
def test_shuffle_draws_a_new_order_from_the_generator(resident):
    def orders(seed):
        batches = Batches(
            numbered(50), 7, shuffle=True, generator=torch.Generator().manual_seed(seed), resident=resident
        )
        return [torch.cat([y for _, y in batches]).tolist() for _ in range(2)]

    first, second = orders(3)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))
    assert orders(3) == [first, second]
    assert orders(4)[0] != first


def test_prefetched_and_resident_batches_are_equal():
    a, b = (
        Batches(numbered(33), 5, shuffle=True, generator=torch.Generator().manual_seed(0), resident=resident)
        for resident in (True, False)
    )
    for (xa, ya), (xb, yb) in zip(a, b, strict=True):
        assert torch.equal(xa, xb)
        assert torch.equal(ya, yb)


def test_decode_is_applied_per_batch():
    calls = []

    def decode(x):
        calls.append(len(x))
        return x.double() / 2

    seen = list(Batches(numbered(), 4, decode=decode))
    assert calls == [4, 4, 2]
    assert seen[1][0][0].tolist() == [2.0, 2.0, 2.0]


def test_resident_batches_are_views():
    data = numbered()
    x, _ = next(iter(Batches(data, 4)))
    assert x.data_ptr() == data.x.data_ptr()


class Broken:
    """A tensor whose rows after the first batch cannot be read."""

    device = torch.device("cpu")

    def __len__(self):
        return 10

    def __getitem__(self, rows):
        if rows.start >= 4:
            raise OSError("disk failure")
        return torch.zeros(4)


def test_prefetch_errors_are_raised_at_their_batch():
    batches = iter(Batches(Split(Broken(), torch.arange(10)), 4, resident=False))  # pyright: ignore[reportArgumentType]
    next(batches)
    with pytest.raises(OSError, match="disk failure"):
        next(batches)


def test_closing_the_iterator_ends_the_thread():
    before = set(threading.enumerate())
    batches = iter(Batches(numbered(), 2, resident=False))
    next(batches)
    (thread,) = set(threading.enumerate()) - before
    batches.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert not thread.is_alive()


def test_bad_arguments_raise():
    for size in (0, True, 2.0):
        with pytest.raises(ValueError, match="size must be a positive int"):
            Batches(numbered(), size)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="10 rows and 3 labels"):
        Batches(Split(torch.zeros(10), torch.zeros(3)), 2)
    assert fits_on_device(numbered(), "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("resident", [None, False])
def test_batches_on_a_gpu(resident):
    batches = Batches(numbered(50), 8, device="cuda", shuffle=True, resident=resident)
    seen = list(batches)
    assert all(x.is_cuda and y.is_cuda and (x[:, 0] == y).all() for x, y in seen)
    assert sorted(torch.cat([y for _, y in seen]).tolist()) == list(range(50))
    assert batches.resident == (resident is None)
