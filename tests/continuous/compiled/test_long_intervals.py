"""The compiled engine in long intervals: accuracy, memory, cost and interrupts."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from egru import compiled
from egru.continuous import engines
from egru.continuous.compiled import CompiledEngine
from egru.continuous.options import Options
from egru.continuous.problem import Problem
from tests.continuous.networks import EXACT, cotangents, network, run, worst_gradient

pytestmark = pytest.mark.skipif(compiled.core is None, reason=f"no compiled core: {compiled.missing}")
needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="requires /proc")

ROOT = Path(__file__).parents[3]
ENGINE = CompiledEngine()


def test_long_intervals_match_the_reference():
    """Intervals of hundreds of panels, forward and backward."""
    problem = network(9, EXACT, batch=1, horizon=300.0, inputs=5)
    problem = dataclasses.replace(problem, b=problem.b - torch.tensor([[0.0], [0.0], [0.9]]))
    events, gradients = run(ENGINE, problem)
    reference = engines.get("reference")
    exact = reference.forward(problem)
    assert 0 < len(events.times) < 500
    assert torch.equal(events.units, exact.units)
    assert (events.times - exact.times).abs().max() < 1e-11
    assert max(worst_gradient(gradients, reference.backward(problem, exact, cotangents(events))).values()) < 1e-11


def test_long_inactivity_costs_nothing():
    """Ten million time constants without an event take less than half a second and have the closed form."""
    still = network(9, EXACT, batch=1, horizon=100.0, inputs=5)
    still = dataclasses.replace(
        still, b=still.b - torch.tensor([[0.0], [0.0], [2.5]]), input_values=-still.input_values
    )
    events = ENGINE.forward(still)
    last = dataclasses.replace(still, horizon=1e7, readout_times=torch.tensor([*still.readout_times[:2].tolist(), 1e7]))
    start = time.process_time()
    later, _ = run(ENGINE, last)
    assert time.process_time() - start < 0.5
    assert torch.equal(later.units, events.units)
    assert (later.c_read[:, -1] - torch.tanh(still.b[2])).abs().max() < 1e-15
    # The final state depends only on the biases.
    weights = cotangents(later, only="c_read")
    weights.c_read[:, :2] = 0
    back = ENGINE.backward(last, later, weights)
    z = torch.tanh(still.b[2])
    assert (back.b[2] - weights.c_read[0, -1] * (1 - z * z)).abs().max() < 1e-13
    for name in ("V", "U", "theta", "tau_s", "tau_m", "a0", "c0"):
        assert getattr(back, name).abs().max() < 1e-13, name
    assert back.b[:2].abs().max() < 1e-13


def driven(value: float, tau_s: float, tau_m: float = 1.0, hidden: int = 12, options: Options = EXACT) -> Problem:
    """Return a problem in which one input event of size ``value`` moves all activations far from their biases."""
    problem = network(2, options, batch=1, hidden=hidden, inputs=1, horizon=2.0)
    return dataclasses.replace(
        problem,
        tau_s=torch.tensor(tau_s),
        tau_m=torch.tensor(tau_m),
        input_times=torch.tensor([0.5]),
        input_values=torch.tensor([value]),
        readout_times=torch.tensor([0.6, 2.0]),
    )


@pytest.mark.parametrize("value", [1e2, 1e4, 6e4, 1e10, -1e10])
def test_large_activations_match_the_reference(value):
    """Saturated gates: panels do not shrink with the activations. Also compares with the lockstep engine."""
    problem = driven(value, 0.02)
    events, gradients = run(ENGINE, problem)
    assert len(events.times) > 2
    for name in ("reference", "lockstep"):
        exact_events, exact = run(engines.get(name), problem)
        assert torch.equal(events.units, exact_events.units)
        for output in ("times", "c_read", "o_read"):
            assert (getattr(events, output) - getattr(exact_events, output)).abs().max() < 1e-11, (name, output)
        assert max(worst_gradient(gradients, exact).values()) < 1e-10, name


def test_saturated_intervals_converge_to_the_same_result_as_short_panels():
    """The same run with panels that are 20 times as short, all of equal length for moderate activations."""
    fine = dataclasses.replace(EXACT, panel=0.05)
    for value in (60.0, 400.0):
        events, gradients = run(ENGINE, driven(value, 0.1))
        exact_events, exact = run(ENGINE, driven(value, 0.1, options=fine))
        assert torch.equal(events.units, exact_events.units)
        assert (events.times - exact_events.times).abs().max() < 1e-12
        assert (events.c_read - exact_events.c_read).abs().max() < 1e-12
        assert max(worst_gradient(gradients, exact).values()) < 1e-11


@pytest.mark.parametrize("engine", ["compiled", "lockstep"])
@pytest.mark.parametrize("spread", [30.0, 1e3])
def test_accuracy_does_not_depend_on_the_size_of_the_biases(engine, spread):
    """Activations pass zero, where the gates bend, at a speed proportional to the biases."""
    g = torch.Generator().manual_seed(0)
    count, empty, one = 60, torch.empty(0), torch.tensor(1.0)
    problem = Problem(
        torch.zeros(3, count, count), torch.zeros(3, count, 1), spread * torch.randn(3, count, generator=g),
        torch.full((count,), 2.0), one, one, one, 3 * torch.randn(1, 3, count, generator=g),
        torch.rand(1, count, generator=g), empty, empty.long(), empty, torch.zeros(2, dtype=torch.int64),
        torch.tensor([0.3, 2.0]), 2.0, Options(),
    )  # fmt: skip
    exact = ENGINE.forward(dataclasses.replace(problem, options=Options(nodes=32, panel=0.1)))
    c = engines.get(engine).forward(problem).c_read
    assert (c - exact.c_read).abs().max() < 1e-10


MEMORY = """
import dataclasses, torch
torch.set_default_dtype(torch.float64)
from egru.continuous.compiled import CompiledEngine
from tests.continuous.compiled.test_long_intervals import driven
from tests.continuous.networks import run

def peak():  # in KiB; not ru_maxrss, which starts at the size of the parent process
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))

run(CompiledEngine(), driven(1.0, 1e-3, hidden=64))
before = peak()
problem = driven({value}, {tau_s}, {tau_m}, hidden=64)
if {tau_m} < 1:  # no events, which would be many
    problem = dataclasses.replace(problem, theta=torch.full_like(problem.theta, 2.0))
run(CompiledEngine(), problem)
print((peak() - before) / 1024)
"""


@needs_proc
@pytest.mark.parametrize(("value", "tau_s", "tau_m"), [(6e4, 1e-3, 1.0), (1.0, 1.0, 1e-4)])
def test_memory_does_not_grow_with_the_number_of_panels(value, tau_s, tau_m):
    """Large activations, and an interval of many panels, which are computed in portions."""
    code = MEMORY.format(value=value, tau_s=tau_s, tau_m=tau_m)
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(result.stdout) < 40  # MB


def test_portions_of_panels_give_the_same_result_as_one_portion():
    """Intervals with several thousand panels, forward and backward, against longer panels."""
    problem = network(9, dataclasses.replace(EXACT, panel=0.02), batch=1, horizon=60.0, inputs=2)
    problem = dataclasses.replace(problem, b=problem.b - torch.tensor([[0.0], [0.0], [0.9]]))
    events, gradients = run(ENGINE, problem)
    exact_events, exact = run(ENGINE, dataclasses.replace(problem, options=EXACT))
    assert torch.equal(events.units, exact_events.units)
    assert (events.times - exact_events.times).abs().max() < 1e-11
    assert max(worst_gradient(gradients, exact).values()) < 1e-11


INTERRUPTED = """
import dataclasses, sys, time
import torch
torch.set_default_dtype(torch.float64)
from egru.continuous.compiled import CompiledEngine
from egru.continuous.options import Options
from tests.continuous.networks import cotangents, network
torch.set_num_threads({threads})
problem = network(21, batch=3, hidden=16, horizon={horizon})
problem = dataclasses.replace(problem, options=Options(nodes=32, panel=2e-4))
if {single}:  # one interval of {single:.0e} panels per unit, without events
    nothing = torch.empty(0)
    problem = dataclasses.replace(
        problem,
        theta=torch.full_like(problem.theta, 2.0),
        tau_m=problem.tau_s * 2 * {horizon} / {single},
        horizon={horizon},
        readout_times=torch.tensor([{horizon}]),
        input_times=nothing,
        input_values=nothing,
        input_channels=nothing.long(),
        input_offsets=torch.zeros(4, dtype=torch.int64),
        options=Options(),
    )
engine = CompiledEngine()
print("forward", flush=True)
try:
    events = engine.forward(problem)
    print("backward", flush=True)
    engine.backward(problem, events, cotangents(events))
except KeyboardInterrupt:
    print("stopped after", time.process_time(), "seconds", flush=True)
    sys.exit(7)
"""


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, which other processes do not affect."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@needs_proc
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("stage", "horizon", "single"),
    [("forward", 1000.0, 0), ("backward", 5.0, 0), ("forward", 1.0, 5e8), ("backward", 1.0, 1e5)],
)
def test_interrupt_stops_a_run_within_a_second(threads, stage, horizon, single):
    """With many events, and within a single interval."""
    code = INTERRUPTED.format(threads=threads, horizon=horizon, single=single)
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.strip() == stage:
                break
        time.sleep(0.3)
        assert child.poll() is None, "finished before the interrupt"
        start = cpu_seconds(child.pid)
        child.send_signal(signal.SIGINT)
        stopped = child.stdout.readline().split()
        assert stopped[:2] == ["stopped", "after"]
        assert float(stopped[2]) - start < 1.0
        assert child.wait() == 7
