"""Numbers as people read them; one spelling for the page, the figures and the terminal."""

_TIMES = "\N{MULTIPLICATION SIGN}"


def plain(text: str) -> str:
    """For matplotlib, which takes what is between two dollar signs for a formula."""
    return text.replace("$", r"\$")


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def times(value: float) -> str:
    """A ratio: 5.6×, 12×."""
    return f"{value:.1f}{_TIMES}" if value < 9.95 else f"{value:.0f}{_TIMES}"


def count(value: float) -> str:
    """Three digits and a suffix: 912, 28.7K, 1.04M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= 0.9995 * limit:
            return f"{_three_digits(value / limit)}{unit}"
    return _three_digits(value)


def joules(value: float) -> str:
    """With the prefix that leaves one to three digits before the point."""
    for limit, unit in ((1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ"), (1e-9, "nJ")):
        if value >= 0.9995 * limit:
            return f"{_three_digits(value / limit)} {unit}"
    return f"{_three_digits(value / 1e-12)} pJ"


def seconds(value: float) -> str:
    if value < 90:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 5400 else f"{value / 3600:.1f} h"


def points(difference: float, other: str) -> str:
    """A difference between two accuracies: 0.4 points below GRU."""
    size = f"{abs(100 * difference):.1f}"
    if size == "0.0":
        return f"level with {other}"
    return f"{size} points {'above' if difference > 0 else 'below'} {other}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"
