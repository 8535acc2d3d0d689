"""Measure the cost of the compiled continuous-time engine on one core in float64.

    python benchmarks/continuous.py                     # all sections, with the other solvers that are installed
    python benchmarks/continuous.py --only events fan   # some sections; the results file keeps the others
    python benchmarks/continuous.py --rounds 3 --no-save

The sections are the cost per event ("events"), that of other neurons ("cells"), its dependence on the network size with
a fixed fan-out ("fan") and with dense connections ("dense"), the overhead of a call of a layer ("call"), the lockstep
engine through long rest ("rest"), and a comparison with other solvers ("rivals"). The other solvers are optional: pip
install 'egru[bench-continuous]'.

All contestants run in turn in one process. Times are medians over rounds of the processor time, so that other load on
the machine has little effect. Before anything is timed, outputs and gradients of the engine must agree with the float64
reference to 1e-11. The errors of the other solvers are measured in the same run. Compilation by JAX is not included.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import continuous_rivals
import numpy as np
import torch

from egru import Threshold
from egru.continuous import ContinuousEGRU, InputEvents, engines
from egru.continuous.compiled import CompiledEngine
from egru.continuous.options import Options
from egru.continuous.problem import DIFFERENTIABLE, Cotangents, Events, Gradients, Problem

RESULTS = Path(__file__).parent / "results"
SECTIONS = ("events", "cells", "fan", "dense", "call", "rest", "rivals")
FAN = 16
RATE = 0.42  # events per unit and unit of time in these networks
ENGINE = CompiledEngine()
EXACT = Options(nodes=12, panel=1.0)


def network(
    hidden: int, horizon: float, fan: int | None = None, *, inputs: float = 2.0, gain: float = 1.0, seed: int = 0
) -> Problem:
    """Return a random problem. All time constants are 1, and the biases let every unit emit events.

    Args:
        hidden: The number of units.
        horizon: The end of the run.
        fan: The number of units that each unit and channel reaches. If None, the network is dense. With a fan-out, the
            number of channels grows with the number of units.
        inputs: Input events per unit of time.
        gain: A factor on the recurrent weights.
        seed: The seed of the random numbers.
    """
    g = torch.Generator().manual_seed(seed)
    channels, count = 8 if fan is None else hidden // 8, int(inputs * horizon)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=g, dtype=torch.float64)

    V, U = normal(3, hidden, hidden) * gain / (fan or hidden) ** 0.5, normal(3, hidden, channels) / 2
    mask = input_mask = None
    if fan is not None:
        mask, input_mask = (torch.zeros(hidden, n, dtype=torch.bool) for n in (hidden, channels))
        for m in (mask, input_mask):
            m.scatter_(0, uniform(*m.shape).topk(fan, 0).indices, True)
        V, U = V * mask, U * input_mask
    one = torch.ones((), dtype=torch.float64)
    return Problem(
        V, U, normal(3, hidden) * 0.3 + torch.tensor([[0.5], [0.0], [0.6]]), 0.3 + 0.2 * uniform(hidden), one, one, one,
        torch.zeros(1, 3, hidden, dtype=torch.float64), torch.zeros(1, hidden, dtype=torch.float64),
        (uniform(count) * horizon).sort().values, torch.randint(channels, (count,), generator=g),
        torch.ones(count, dtype=torch.float64), torch.tensor([0, count]), one[None] * horizon, horizon,
        Options(), mask, input_mask,
    )  # fmt: skip


def ones(events: Events, *, times_only: bool = False) -> Cotangents:
    """Return the cotangents of the sum of all outputs, or of all event times."""
    other = 0.0 if times_only else 1.0
    return Cotangents(
        torch.ones_like(events.times),
        torch.full_like(events.times, other),
        torch.full_like(events.c_read, other),
        torch.full_like(events.o_read, other),
    )


def check_agreement() -> dict[str, float]:
    """Return the difference from the reference engine, dense and sparse; fail if it is 1e-11 or more."""
    worst = {}
    for name, problem in (("dense", network(24, 4.0)), ("sparse", network(288, 2.0, FAN, inputs=10.0))):
        problem = dataclasses.replace(problem, options=EXACT)
        plain = dataclasses.replace(problem, mask=None, input_mask=None)
        events, exact = ENGINE.forward(problem), engines.get("reference").forward(plain)
        assert torch.equal(events.units, exact.units), "events differ"
        gradients = ENGINE.backward(problem, events, ones(events))
        expected = engines.get("reference").backward(plain, exact, ones(exact))
        if problem.mask is not None and problem.input_mask is not None:
            expected = expected._replace(V=expected.V * problem.mask, U=expected.U * problem.input_mask)
        errors = {"times": float((events.times - exact.times).abs().max())}
        for field in DIFFERENTIABLE:
            a, b = getattr(gradients, field), getattr(expected, field)
            errors[field] = float((a - b).abs().max() / b.abs().max().clamp(min=1)) if a.numel() else 0.0
        worst[name] = max(errors.values())
        assert worst[name] < 1e-11, errors
        print(f"agreement with the reference, {name}, {len(events.times)} events: {worst[name]:.1e}")
    return worst


# Timing


def time_call(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor time of a call in seconds, and its result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def measure(problems: Sequence[Problem], rounds: int) -> list[dict[str, float]]:
    """Return the median seconds of both passes of each problem. The problems are run in turn."""
    forward, backward = ([[] for _ in problems] for _ in range(2))
    counts = [0] * len(problems)
    for _ in range(rounds + 1):
        for k, problem in enumerate(problems):
            forward_time, events = time_call(lambda problem=problem: ENGINE.forward(problem))
            weights = ones(events)
            backward_time, _ = time_call(lambda p=problem, e=events, w=weights: ENGINE.backward(p, e, w))
            counts[k] = len(events.times)
            forward[k].append(forward_time)
            backward[k].append(backward_time)

    def median(times: list[float]) -> float:
        return float(np.median(times[1:]))  # the first round is a warm-up

    return [
        {"events": n, "forward_s": median(f), "backward_s": median(b)}
        for n, f, b in zip(counts, forward, backward, strict=True)
    ]


def fit_line(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """Fit y = slope x + offset by least squares, in microseconds."""
    slope, offset = np.polyfit(x, y, 1)
    residue = np.asarray(y) - (slope * np.asarray(x) + offset)
    return {
        "us_per_event": 1e6 * float(slope),
        "offset_us": 1e6 * float(offset),
        "r2": 1 - float((residue**2).sum() / ((np.asarray(y) - np.mean(y)) ** 2).sum()),
    }


def fit_lines(rows: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    events = [row["events"] for row in rows]
    return {side: fit_line(events, [row[f"{side}_s"] for row in rows]) for side in ("forward", "backward")}


def print_fits(title: str, fits: dict[str, dict[str, float]]) -> None:
    parts = [f"{side} {fit['us_per_event']:.2f} us per event (R2 {fit['r2']:.5f})" for side, fit in fits.items()]
    print(f"{title}: {', '.join(parts)}")


def by_events(rounds: int) -> dict[str, Any]:
    """Measure time against the number of events: 64 units, dense."""
    shared = [network(64, horizon) for horizon in (2.5, 5.0, 10.0, 20.0, 40.0, 80.0)]
    each = torch.ones(64, dtype=torch.float64)
    per_unit = [dataclasses.replace(problem, tau_s=each, tau_m=each, tau_o=each) for problem in shared]
    rows = measure([*shared, *per_unit], rounds)
    rows, unit_rows = rows[: len(shared)], rows[len(shared) :]
    for row in rows:
        row |= {f"{side}_us": 1e6 * row[f"{side}_s"] / row["events"] for side in ("forward", "backward")}
    fits = fit_lines(rows)
    print_fits("64 units, dense", fits)
    unit_fits = fit_lines(unit_rows)
    print_fits("64 units, dense, time constants per unit", unit_fits)
    return {"rows": rows, "fits": fits, "unit_fits": unit_fits}


def by_cell(rounds: int) -> dict[str, Any]:
    """Measure the cost per event of the event-based GRU, of LIF neurons and of adaptive ones: 64 units, dense."""
    options = {cell: Options(cell=cell, amplitude="one") for cell in ("lif", "alif")}
    problems, horizons = {"gru": [], "lif": [], "alif": []}, (5.0, 10.0, 20.0, 40.0)
    for problem in (network(64, horizon) for horizon in horizons):
        linear = dataclasses.replace(problem, V=0.05 * problem.V, options=options["lif"])
        beta, tau_a = torch.full_like(problem.theta, 0.1), 5 * problem.tau_s
        problems["gru"].append(problem)
        problems["lif"].append(linear)
        problems["alif"].append(dataclasses.replace(linear, options=options["alif"], beta=beta, tau_a=tau_a))
    rows, result = measure([p for group in problems.values() for p in group], rounds), {}
    for k, cell in enumerate(problems):
        result[cell] = fit_lines(rows[k * len(horizons) : (k + 1) * len(horizons)])
        print_fits(f"64 units, dense, {cell}", result[cell])
    return result


def by_size(rounds: int, fan: int | None, sizes: Sequence[int], events: Sequence[int]) -> list[dict[str, Any]]:
    """Measure the cost per event for each size, from several horizons, so that the overhead per call is excluded."""
    problems = [
        network(H, count / (RATE * H), fan, inputs=2.0 if fan is None else H / 32) for H in sizes for count in events
    ]
    rows, result = measure(problems, rounds), []
    for k, H in enumerate(sizes):
        fits = fit_lines(rows[k * len(events) : (k + 1) * len(events)])
        print_fits(f"{H} units, {'dense' if fan is None else f'fan-out {fan}'}", fits)
        result.append({"units": H, "fan": fan, "fits": fits})
    return result


def call_overhead(rounds: int) -> dict[str, float]:
    """Measure a call of a layer with 64 units, one input event and no event of its own, in microseconds."""
    layer = ContinuousEGRU(8, 64, threshold=Threshold.constant(1.5), dtype=torch.float64)
    one = torch.full((1,), 0.1, dtype=torch.float64)
    events = InputEvents.from_lists([one], [torch.zeros(1, dtype=torch.int64)])

    def infer() -> None:
        with torch.no_grad():
            layer(events, 0.2)

    calls: dict[str, Callable[[], Any]] = {
        "without gradients": infer,
        "forward": lambda: layer(events, 0.2),
        "forward and backward": lambda: layer(events, 0.2).state.c.sum().backward(),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(20 * rounds):
        for name, call in calls.items():
            times[name].append(time_call(call)[0])
    result = {name: 1e6 * float(np.median(values)) for name, values in times.items()}
    print("call of a layer with 64 units: " + ", ".join(f"{name} {value:.0f} us" for name, value in result.items()))
    return result


def through_rest() -> dict[str, float]:
    """Time the lockstep engine on few events and long rest: 8 units of time with tau_s = 1.1e-3, in seconds."""
    problem = network(7, 8.0, inputs=2.0)
    problem = dataclasses.replace(problem, tau_s=1.1e-3 * problem.tau_s)
    engine, result = engines.get("lockstep"), {}
    for name, running_loss in (("", None), (" with a running loss", lambda c, t, sample: c.square().sum(-1))):
        start = time.process_time()
        events = engine.forward(problem, running_loss)
        weights = ones(events)
        if running_loss is not None:
            weights.integral = torch.ones_like(events.c_read[:, 0, 0])
        engine.backward(problem, events, weights, running_loss)
        result[f"seconds{name}"] = time.process_time() - start
        result["events"] = len(events.times)
        print(f"lockstep, {len(events.times)} events{name}: {result[f'seconds{name}']:.2f} s forward and backward")
    return result


# Comparison with other solvers


def compiled_calls(problem: Problem) -> tuple[Callable[[], Events], Callable[[], Gradients]]:
    """Return functions that run the compiled engine forward, and forward and backward."""
    return (
        lambda: ENGINE.forward(problem),
        lambda: ENGINE.backward(problem, events := ENGINE.forward(problem), ones(events, times_only=True)),
    )


def compare(rounds: int) -> dict[str, Any]:
    """Compare all solvers on the model they share: 64 units, dense, the loss is the sum of all event times."""
    if hasattr(os, "sched_setaffinity"):  # restrict JAX to one core; it counts them when it is imported
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    problem = network(64, 8.0, gain=0.3)
    U = problem.U.clone()
    U[2] = 0  # eventax also gates inputs
    problem = dataclasses.replace(problem, U=U, options=continuous_rivals.OPTIONS)
    exact = dataclasses.replace(
        problem, options=dataclasses.replace(continuous_rivals.OPTIONS, nodes=16, panel=0.5, grazing_floor=0.0)
    )
    events = ENGINE.forward(exact)
    expected = ENGINE.backward(exact, events, ones(events, times_only=True)).V.numpy()
    times, count = events.times.numpy(), len(events.times)
    contestants: list[tuple[str, Callable[[], Any], Callable[[], Any], Any]] = []
    for nodes in (4, 6):
        variant = dataclasses.replace(problem, options=dataclasses.replace(continuous_rivals.OPTIONS, nodes=nodes))
        forward, backward = compiled_calls(variant)
        contestants.append((f"egru compiled, {nodes} nodes", forward, backward, None))
    rivals = continuous_rivals.all_rivals(problem, count)
    rival_names = {rival.name for rival in rivals}
    for rival in rivals:
        run = rival.run
        contestants.append((rival.name, lambda run=run: run(False), lambda run=run: run(True), rival))
    rows, failed = [], {}
    for name, forward, backward, rival in list(contestants):  # the first run: errors, and compilation by JAX
        try:
            forward()
            result = backward()
        except Exception as error:  # a failing solver is a result
            failed[name] = str(error).strip().splitlines()[-1]
            contestants = [c for c in contestants if c[0] != name]
            print(f"{name}: failed: {failed[name]}")
            continue
        event_times, by_V = result if rival is not None else (forward().times.numpy(), result.V.numpy())
        same = len(event_times) == count
        rows.append({
            "name": name,
            "time_error": float(abs(event_times - times).max()) if same else None,
            "gradient_error": float(abs(by_V - expected).max() / abs(expected).max()) if same else None,
            "forward": [], "gradient": [],
        })  # fmt: skip
    for _ in range(rounds):
        for row, (_, forward, backward, _) in zip(rows, contestants, strict=True):
            for _ in range(1 if row["name"] in rival_names else 10):  # the compiled engine takes a millisecond
                row["forward"].append(time_call(forward)[0])
                row["gradient"].append(time_call(backward)[0])
    base = 1e6 * float(np.median(rows[1]["gradient"])) / count
    for row in rows:
        for side in ("forward", "gradient"):
            row[f"{side}_us"] = 1e6 * float(np.median(row.pop(side))) / count
        row["slower"] = row["gradient_us"] / base
        error = "wrong number of events" if row["time_error"] is None else f"time {row['time_error']:.1e}, gradient "
        error += "" if row["gradient_error"] is None else f"{row['gradient_error']:.1e}"
        print(
            f"{row['name']}: forward {row['forward_us']:.1f}, with gradient {row['gradient_us']:.1f} us per event "
            f"({row['slower']:.1f} times egru with 6 nodes); errors: {error}"
        )
    return {"events": count, "units": 64, "missing": continuous_rivals.missing(), "failed": failed, "rows": rows}


# Figure and command line


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(18, 4))
    sides = (("forward", "tab:blue"), ("backward", "tab:orange"))
    rows = results["events"]["rows"]
    for side, colour in sides:
        fit = results["events"]["fits"][side]
        axes[0].plot([r["events"] for r in rows], [1e3 * r[f"{side}_s"] for r in rows], "o", color=colour)
        x = np.array([0, rows[-1]["events"]])
        label = f"{side}: {fit['us_per_event']:.2f} µs per event, R² {fit['r2']:.5f}"
        axes[0].plot(x, (x * fit["us_per_event"] + fit["offset_us"]) / 1e3, color=colour, label=label)
        for axis, key in ((axes[1], "fan"), (axes[2], "dense")):
            y = [r["fits"][side]["us_per_event"] for r in results[key]]
            axis.plot([r["units"] for r in results[key]], y, "o-", color=colour, label=side)
    axes[0].set(xlabel="events", ylabel="ms", title="64 units, dense")
    for axis, title in ((axes[1], f"fan-out {FAN}"), (axes[2], "dense")):
        axis.set(xlabel="units", ylabel="µs per event", title=title, xscale="log", ylim=(0, None))
    axes[2].set(yscale="log", ylim=(None, None))
    for row in results["rivals"]["rows"]:
        if row["time_error"] is not None:
            mark = "*" if row["name"].startswith("egru") else "o"
            axes[3].loglog(row["time_error"], row["gradient_us"], mark, label=row["name"], markersize=8)
    axes[3].set(xlabel="largest error of an event time", ylabel="µs per event, with gradient", title="64 units, dense")
    for axis in axes:
        axis.legend(fontsize=7, **({"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if axis is axes[3] else {}))
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def processor() -> str:
    path = Path("/proc/cpuinfo")
    rows = path.read_text().splitlines() if path.exists() else []
    names = [row.split(":")[1].strip() for row in rows if row.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="sections to measure")
    parser.add_argument("--rounds", type=int, default=15, help="rounds per measurement")
    parser.add_argument("--no-save", action="store_true", help="do not write the results file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "continuous.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    results["machine"] = {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores_used": 1,
        "torch": torch.__version__,
    }
    results["agreement"] = check_agreement()
    rounds = arguments.rounds
    if "events" in arguments.only:
        results["events"] = by_events(rounds)
    if "cells" in arguments.only:
        results["cells"] = by_cell(rounds)
    if "fan" in arguments.only:
        results["fan"] = by_size(rounds, FAN, (64, 128, 256, 512, 1024, 2048), (20_000, 40_000, 60_000))
    if "dense" in arguments.only:
        results["dense"] = by_size(rounds, None, (64, 128, 256, 512, 1024), (1000, 2000, 3000))
    if "call" in arguments.only:
        results["call"] = call_overhead(rounds)
    if "rest" in arguments.only:
        results["rest"] = through_rest()
    if "rivals" in arguments.only:
        results["rivals"] = compare(min(rounds, 3))
    if not arguments.no_save:
        RESULTS.mkdir(exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
        if all(section in results for section in SECTIONS):
            plot(results, path.with_suffix(".png"))
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
