"""The largest error of each check, printed after a test run with EGRU_FIGURES=1."""

CHECKS = {
    "A": "flow vs. DOP853, 200 units",
    "B": "event times and final state vs. SciPy",
    "C": "gradient vs. autograd, all options and losses",
    "D": "gradient vs. five-point differences",
    "E": "odeint_event at tolerance 1e-12",
    "F": "adjoint in the paper's scaling",
    "G": "crossings missed or wrong among 20,000 units",
    "H": "outputs vs. the reference engine",
    "H'": "gradients vs. the reference engine",
    "I": "forced event vs. differences",
    "J": "closed form at rest",
    "K": "splitting, permutation, no-op readouts and inputs",
}
REACHED: dict[tuple[str, str], float] = {}


def reached(check: str, engine: str, value: float) -> float:
    """Record ``value`` if it is the largest so far, and return it."""
    key = check, engine
    REACHED[key] = max(REACHED.get(key, 0.0), float(value))
    return float(value)
