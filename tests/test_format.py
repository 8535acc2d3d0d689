import pytest

from egru import format


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (912, "912"), (28_712, "28.7K"), (999.7, "1K"), (1_040_000, "1.04M"), (2e9, "2G")]
)
def test_count(value, text):
    assert format.count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(2.14e-7, "214 nJ"), (1.536e-6, "1.54 µJ"), (3e-12, "3 pJ"), (0.9999e-3, "1 mJ"), (4.0, "4 J")]
)
def test_joules(value, text):
    assert format.joules(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (912, "912 B"), (2519, "2.46 KiB"), (1023.9, "1 KiB"), (63_438_848, "60.5 MiB")]
)
def test_size_has_a_fitting_binary_unit(value, text):
    assert format.size(value) == text


def test_ratio_and_percent():
    assert format.ratio(5.62) == "5.6\N{MULTIPLICATION SIGN}"
    assert format.ratio(9.97) == "10\N{MULTIPLICATION SIGN}"
    assert format.percent(0.978) == "97.8 %"
    assert format.percent(None) == "-"


def test_seconds():
    assert [format.seconds(s) for s in (2.54, 120, 7200)] == ["2.5 s", "2.0 min", "2.0 h"]
    assert [format.seconds(s) for s in (0.045, 2.9e-6, 3e-8, 0.5, 0)] == ["45 ms", "2.9 µs", "30 ns", "0.5 s", "0.0 s"]


def test_accuracy_difference():
    assert format.accuracy_difference(-0.004, "GRU") == "0.4 points below GRU"
    assert format.accuracy_difference(0.012, "GRU") == "1.2 points above GRU"
    assert format.accuracy_difference(0.0004, "GRU") == "within 0.1 points of GRU"
