"""Generated tasks whose samples are lists of events."""

import pytest
import torch

from egru.data import event_order, interval_comparison, interval_match, yin_yang


@pytest.mark.parametrize("draw", [yin_yang, event_order, interval_comparison, interval_match])
def test_samples_are_sorted_and_reproducible(draw):
    samples, again, other = draw(200, 3), draw(200, 3), draw(200, 4)
    assert torch.equal(samples.times, again.times)
    assert torch.equal(samples.labels, again.labels)
    assert not torch.equal(samples.times, other.times)
    assert (samples.times.diff() >= 0).all()
    assert samples.times.min() >= 0
    part = samples.select(torch.tensor([5, 1]))
    assert torch.equal(part.times[1], samples.times[1])


def test_yin_yang_encodes_points_of_the_disc():
    samples = yin_yang(600, span=1.0)
    points = torch.zeros(600, 5).scatter_(1, samples.channels, samples.times) - 0.1
    torch.testing.assert_close(points[:, :2] + points[:, 2:4], torch.ones(600, 2))
    assert ((points[:, :2] - 0.5).norm(dim=1) <= 0.5 + 1e-6).all()
    assert (samples.labels.bincount() > 150).all()
    dots = points[samples.labels == 2]
    to_dots = torch.minimum(*((dots[:, :2] - torch.tensor([x, 0.5])).norm(dim=1) for x in (0.25, 0.75)))
    assert (to_dots <= 0.1 + 1e-6).all()


def test_class_of_event_order_is_the_order_of_the_channels():
    samples = event_order(300)
    assert samples.times.diff().min() > 0.3 - 1e-6
    assert (samples.channels.sort(1).values == torch.arange(3)).all()
    same = samples.channels[samples.labels == 4]
    assert (same == same[0]).all()


def test_interval_comparison_has_no_information_in_its_counts():
    samples = interval_comparison(2000)
    marks = samples.times[samples.channels == 0].view(-1, 4)
    longer = (marks[:, 3] - marks[:, 2]) > (marks[:, 1] - marks[:, 0])
    assert torch.equal(longer.long(), samples.labels)
    counts = torch.nn.functional.one_hot(samples.channels, 3).sum(1).float()
    means = torch.stack([counts[samples.labels == k].mean(0) for k in (0, 1)])
    assert (means[0] - means[1]).abs().max() < 0.2


def test_class_of_interval_match_is_whether_both_intervals_are_long_or_short():
    samples = interval_match(2000)
    marks = samples.times[samples.channels == 0].view(-1, 4)
    is_long = torch.stack([marks[:, 1] - marks[:, 0], marks[:, 3] - marks[:, 2]], 1) > 0.85
    assert torch.equal((is_long[:, 0] == is_long[:, 1]).long(), samples.labels)
    assert abs(is_long.float().mean() - 0.5) < 0.03
