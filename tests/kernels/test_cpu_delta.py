"""Delta events in the CPU kernel, which multiplies the changes of y. See also "delta" in ``test_parity.py``."""

import dataclasses
from typing import Any

import pytest
import torch

from egru import compiled
from egru.kernels import Problem, get
from tests.kernels.parity_cases import Case, error, run
from tests.kernels.test_parity import LEVELS, Implementation

pytestmark = pytest.mark.skipif(not LEVELS, reason=f"requires the compiled core: {compiled.missing}")

CELLS: dict[str, dict[str, Any]] = {
    "gru": {"reset_gate": "after"},
    "lstm": {"cell": "lstm", "compare": "output"},
}
STEPS = 150
"""More than two intervals of 64 steps, after which recurrent products are computed anew."""


def delta(cell: str, **options: Any) -> Case:
    return Case(**{"events": "delta", "reset": "none", "T": STEPS, "B": 18, "H": 40} | CELLS[cell] | options)


def changing(problem: Problem) -> float:
    """Return the share of the outputs that change per step."""
    y = get("reference").forward(problem, False).y
    return (y[1:] != y[:-1]).double().mean().item()


# With few changes, products add them; with more than half of the units changing, they use the values.
@pytest.mark.parametrize(("theta", "fewest", "most"), [(0.7, 0.0, 0.2), (0.2, 0.2, 0.5), (0.0, 0.5, 1.0)])
@pytest.mark.parametrize("options", [{}, {"lengths": True, "keep": "mask"}, {"zero_blocks": 0.7}], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_long_sequences_match_the_reference(
    cell: str, options: dict[str, Any], theta: float, fewest: float, most: float
) -> None:
    problem = delta(cell, theta=theta, **options).problem()
    if not options:
        assert fewest <= changing(problem) <= most
    expected = run(get("reference"), problem)
    for level in LEVELS[-2:]:
        with Implementation("cpu", level=level, threads=2, skip="zero_blocks" in options).active() as kernel:
            errors = error(run(kernel, problem), expected)
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("cell", CELLS)
def test_bits_do_not_depend_on_threads(cell: str) -> None:
    problem = delta(cell, theta=0.2, H=100).problem(dtype=torch.float32)
    results = []
    for threads in (1, 2, 3):
        with Implementation("cpu", threads=threads).active() as kernel:
            results.append(run(kernel, problem))
    for other in results[1:]:
        assert all(torch.equal(x, other[name]) for name, x in results[0].items())


def test_rounding_errors_of_large_products_do_not_stay() -> None:
    """Products are computed anew at times: the sum of all changes would keep the rounding errors of large products."""
    T, B, H, active = 160, 20, 32, 10  # fewer than half of the units change
    torch.manual_seed(0)
    x = torch.full((T, B, 3), 0.7)  # the last one: u is no power of two, so that sums round
    x[:, :, 0] = -60  # the reset gate is closed
    x[:20, :, 1], x[20:, :, 1] = 4, 0  # states rise to 1 and return to 0
    x[-1:, :, 0] = 60  # the reset gate opens: the product, which is 0 again, reaches the states
    weight_ih = torch.zeros(3 * H, 3)
    weight_ih[:H, 0] = weight_ih[H : 2 * H, 2] = weight_ih[2 * H : 2 * H + active, 1] = 1
    weight_hh = torch.cat([torch.zeros(2 * H, H), 3e4 * torch.rand(H, H)])
    weight_hh[2 * H + active :] = 0
    problem = dataclasses.replace(
        delta("gru", T=T, B=B, I=3, H=H, bias=False).problem(), input=x, weight_ih=weight_ih,
        weight_hh=weight_hh, theta=torch.zeros(H), c0=torch.zeros(B, H), y0=torch.zeros(B, H),
    )  # fmt: skip
    core = Implementation("cpu")
    with core.active() as kernel:
        result = kernel.forward(core.convert(problem, torch.float32), False)
    assert result.y[15, :, :active].min() > 0.9
    assert result.y[-1].abs().max() < 1e-6
