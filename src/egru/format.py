"""Formats of numbers with fitting units, for the terminal, the report page and the figures."""

_TIMES = "\N{MULTIPLICATION SIGN}"
_SHORT = ((1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def escape_mathtext(text: str) -> str:
    """Escape dollar signs, which matplotlib would read as the start of a formula."""
    return text.replace("$", r"\$")


def percent(value: float | None, digits: int = 1) -> str:
    """Format a fraction as a percentage: 0.978 is "97.8 %". None is "-"."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def ratio(value: float) -> str:
    """Format a ratio: 5.6×, 12×."""
    return f"{value:.1f}{_TIMES}" if value < 9.95 else f"{value:.0f}{_TIMES}"


def count(value: float) -> str:
    """Format a number with three digits and a suffix: 912, 28.7K, 1.04M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= 0.9995 * limit:
            return f"{_three_digits(value / limit)}{unit}"
    return _three_digits(value)


def joules(value: float) -> str:
    """Format an energy with the prefix that leaves one to three digits before the decimal point: 214 nJ."""
    for limit, unit in ((1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ"), (1e-9, "nJ")):
        if value >= 0.9995 * limit:
            return f"{_three_digits(value / limit)} {unit}"
    return f"{_three_digits(value / 1e-12)} pJ"


def size(value: float) -> str:
    """Format a number of bytes with the binary unit that leaves one to three digits: 912 B, 8.21 KiB, 60.5 MiB."""
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= 0.9995 * limit:
            return f"{_three_digits(value / limit)} {unit}"
    return f"{value:.0f} B"


def seconds(value: float) -> str:
    """Format a duration with a fitting unit: 2.9 µs, 45 ms, 2.5 s, 19.8 min, 1.5 h."""
    if 0 < value < 0.09995:
        limit, unit = next(((limit, unit) for limit, unit in _SHORT if value >= 0.9995 * limit), _SHORT[-1])
        return f"{_three_digits(value / limit)} {unit}"
    if value < 90:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 5400 else f"{value / 3600:.1f} h"


def accuracy_difference(difference: float, baseline: str) -> str:
    """Format a difference between two accuracies in percentage points: "0.4 points below GRU"."""
    size = f"{abs(100 * difference):.1f}"
    if size == "0.0":
        return f"within 0.1 points of {baseline}"
    return f"{size} points {'above' if difference > 0 else 'below'} {baseline}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"
