"""The number of threads that an engine uses: small work stays on one thread, and slow teams are given up.

The choice depends on measured times, so most tests simulate them.
"""

from collections.abc import Callable

import pytest
import torch

from egru import EGRU, EventEngine, Threshold

core = pytest.importorskip("egru._core", reason="the compiled core is not built")


def simulate(
    step: float,
    team: Callable[[int], float],
    *,
    calls: int = 20_000,
    steps: int = 1,
    gap: float = 1e-6,
    threads: int = 2,
) -> tuple[float, float]:
    """Simulate calls that take ``step`` seconds per step on one thread.

    Args:
        step: Seconds per step on one thread.
        team: Seconds of a call with a team, as a function of the number of calls so far.
        calls: Number of calls.
        steps: Steps per call.
        gap: Seconds between calls.
        threads: Maximum number of threads.

    Returns:
        The speed relative to one thread, and the fraction of calls with a team.
    """
    size = core.TeamSize(threads)
    total, teams = 0.0, 0
    for call in range(calls):
        chosen = size.choose(steps, gap)
        seconds = step * steps if chosen == 1 else team(call)
        size.record(1e6 * step * steps, steps, seconds)
        total += seconds
        teams += chosen > 1
    return calls * step * steps / total, teams / calls


def test_large_steps_use_the_team() -> None:
    speed, fraction = simulate(50e-6, lambda call: 28e-6)
    assert speed > 1.7
    assert fraction > 0.98


@pytest.mark.parametrize("microseconds", [1, 2, 5, 10, 11.9])
def test_small_steps_stay_on_one_thread(microseconds: float) -> None:
    _, fraction = simulate(1e-6 * microseconds, lambda call: 1.0)
    assert fraction == 0


@pytest.mark.parametrize("milliseconds", [1, 30, 1000])
def test_small_steps_stay_on_one_thread_if_the_first_call_was_preempted(milliseconds: float) -> None:
    size = core.TeamSize(2)
    step = 0.5e-6
    for call in range(1000):
        assert size.choose(1, 1e-6) == 1
        size.record(1e6 * step, 1, step if call else 1e-3 * milliseconds)


def test_calls_with_pauses_between_them_stay_on_one_thread() -> None:
    """Workers sleep after some microseconds, and waking them takes about 50."""
    _, fraction = simulate(50e-6, lambda call: 1.0, gap=1e-3)
    assert fraction == 0
    speed, _ = simulate(1e-3, lambda call: 0.6e-3, gap=1e-3)
    assert speed > 1.6
    speed, _ = simulate(20e-6, lambda call: 800e-6, gap=1e-3, steps=64)  # 1.3 ms per call
    assert speed > 1.5


@pytest.mark.parametrize("microseconds", [13, 20, 50, 200, 2000])
@pytest.mark.parametrize("slowdown", [1.0, 1.5, 4, 30])
def test_slow_teams_are_given_up(microseconds: float, slowdown: float) -> None:
    step = 1e-6 * microseconds
    speed, fraction = simulate(step, lambda call: slowdown * step)
    assert speed > 0.9
    assert fraction < 0.01


@pytest.mark.parametrize("microseconds", [13, 50, 2000])
def test_teams_that_are_interrupted_now_and_then_are_given_up(microseconds: float) -> None:
    """One of five calls waits 4 ms for a core."""
    step = 1e-6 * microseconds
    speed, _ = simulate(step, lambda call: 0.6 * step + 4e-3 * (call % 5 == 0), calls=100_000)
    assert speed > 0.85


def test_steps_near_the_limit_do_not_wake_the_team_again_and_again() -> None:
    """Activity varies, and every call of a team finds the workers asleep."""
    size = core.TeamSize(2)
    total = alone = 0.0
    for call in range(20_000):
        step = 50e-6 if call % 3 == 0 else 2e-6
        seconds = step + 60e-6 if size.choose(1, 1e-6) > 1 else step
        size.record(1e6 * step, 1, seconds)
        total, alone = total + seconds, alone + step
    assert alone / total > 0.95


def test_team_is_tried_again_when_cores_become_free() -> None:
    speed, fraction = simulate(50e-6, lambda call: 1e-3 if call < 5_000 else 28e-6, calls=40_000)
    assert fraction > 0.7
    assert speed > 1.3


def test_slow_wake_up_costs_little() -> None:
    """The first call of a team finds its workers asleep."""
    speed, fraction = simulate(50e-6, lambda call: 150e-6 if call < 20 else 28e-6, calls=2_000)
    assert fraction > 0.9
    assert speed > 1.5


def test_small_layers_run_on_one_thread() -> None:
    engine = EventEngine(EGRU(1, 64, threshold=Threshold.constant(0.1)).float(), threads=2)
    x = torch.randn(500, 1, dtype=torch.float32)
    expected = engine.run(x)
    engine.reset()
    assert engine._core is not None
    for row, y in zip(x, expected, strict=True):
        assert torch.equal(engine.step(row), y)
        assert engine._core.team_size == 1
    engine._core.always_divide(True)
    engine.reset()
    assert torch.equal(engine.run(x), expected)
    assert engine._core.team_size == 2
