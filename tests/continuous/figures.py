"""The worst figure each check came to, printed after a run with EGRU_FIGURES=1."""

CHECKS = {
    "A": "flow against DOP853, 200 units",
    "B": "event times and final state against SciPy",
    "C": "gradient against autograd, all options and losses",
    "D": "gradient against five-point differences",
    "E": "odeint_event at tolerance 1e-12",
    "F": "paper's scaling against ours",
    "G": "crossings missed or wrong among 20,000 units",
    "H": "engine against the reference: outputs",
    "H'": "engine against the reference: gradients",
    "I": "forced event against differences",
    "J": "closed form at rest",
    "K": "splitting, permutation, null readouts and inputs",
}
REACHED: dict[tuple[str, str], float] = {}


def reached(check: str, engine: str, value: float) -> float:
    """Note ``value`` and give it back."""
    key = check, engine
    REACHED[key] = max(REACHED.get(key, 0.0), float(value))
    return float(value)
