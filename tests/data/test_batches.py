import threading

import pytest
import torch

from egru.data import Batches, Split, fits


def numbered(n=10):
    return Split(torch.arange(n)[:, None].repeat(1, 3), torch.arange(n))


@pytest.mark.parametrize("resident", [True, False])
def test_every_row_once_in_order(resident):
    batches = Batches(numbered(), 4, resident=resident)
    assert len(batches) == 3
    seen = list(batches)
    assert [len(y) for _, y in seen] == [4, 4, 2]
    assert torch.cat([y for _, y in seen]).tolist() == list(range(10))
    assert all((x[:, 0] == y).all() for x, y in seen)


@pytest.mark.parametrize("resident", [True, False])
def test_a_new_order_every_time_from_the_generator_alone(resident):
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


def test_prefetched_is_the_same_as_resident():
    a, b = (
        Batches(numbered(33), 5, shuffle=True, generator=torch.Generator().manual_seed(0), resident=resident)
        for resident in (True, False)
    )
    for (xa, ya), (xb, yb) in zip(a, b, strict=True):
        assert torch.equal(xa, xb)
        assert torch.equal(ya, yb)


def test_decoded_batch_by_batch():
    calls = []

    def decode(x):
        calls.append(len(x))
        return x.double() / 2

    seen = list(Batches(numbered(), 4, decode=decode))
    assert calls == [4, 4, 2]
    assert seen[1][0][0].tolist() == [2.0, 2.0, 2.0]


def test_nothing_is_copied_where_nothing_needs_to_be():
    data = numbered()
    x, _ = next(iter(Batches(data, 4)))
    assert x.data_ptr() == data.x.data_ptr()


class Broken:
    """Rows that cannot be read after the first batch."""

    device = torch.device("cpu")

    def __len__(self):
        return 10

    def __getitem__(self, rows):
        if rows.start >= 4:
            raise OSError("disk gone")
        return torch.zeros(4)


def test_an_error_while_fetching_ahead_is_raised_where_it_matters():
    batches = iter(Batches(Split(Broken(), torch.arange(10)), 4, resident=False))  # pyright: ignore[reportArgumentType]
    next(batches)
    with pytest.raises(OSError, match="disk gone"):
        next(batches)


def test_leaving_early_leaves_no_thread():
    before = threading.active_count()
    batches = iter(Batches(numbered(), 2, resident=False))
    next(batches)
    assert threading.active_count() == before + 1
    batches.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert threading.active_count() == before


def test_bad_arguments():
    for size in (0, True, 2.0):
        with pytest.raises(ValueError, match="size must be an int of at least 1"):
            Batches(numbered(), size)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="10 rows and 3 labels"):
        Batches(Split(torch.zeros(10), torch.zeros(3)), 2)
    assert fits(numbered(), "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("resident", [None, False])
def test_on_the_device(resident):
    batches = Batches(numbered(50), 8, device="cuda", shuffle=True, resident=resident)
    seen = list(batches)
    assert all(x.is_cuda and y.is_cuda and (x[:, 0] == y).all() for x, y in seen)
    assert sorted(torch.cat([y for _, y in seen]).tolist()) == list(range(50))
    assert batches.resident == (resident is None)
