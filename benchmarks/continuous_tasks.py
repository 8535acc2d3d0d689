"""Train continuous-time networks on generated tasks, with controls, and record the test accuracies.

    python benchmarks/continuous_tasks.py                              # everything: about two hours on one core
    python benchmarks/continuous_tasks.py --only yinyang-first --seeds 0 1
    python benchmarks/continuous_tasks.py --only baselines

Every entry is one run of examples/continuous.py. The validation set selects the epoch, and the test set is used once.
"frozen" trains only the output units on a random recurrent layer. The baselines are logistic regressions on the number
of events per channel and on the event times. Results are added to benchmarks/results/continuous_tasks.json; runs that
are recorded there are not repeated.
"""

import argparse
import datetime
import itertools
import json
import runpy
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console

from egru import environment
from egru.data import EventSamples
from egru.files import replace_file

RESULTS = Path(__file__).parent / "results" / "continuous_tasks.json"
EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "continuous.py"))
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{task}-{output}{'-frozen' if freeze else ''}": (
        task,
        {"output": output, "freeze": freeze, "epochs": 20 if output == "first" else 0},
    )
    for task, output, freeze in itertools.product(EXAMPLE["TASKS"], ("first", "membrane"), (False, True))
    if task == "yinyang" or output == "membrane"
}


def features(samples: EventSamples, channels: int, kind: str) -> torch.Tensor:
    """Return the number of events of each channel, or the times of all events in the order of channel, then time."""
    if kind == "counts":
        return F.one_hot(samples.channels, channels).sum(1).float()
    return samples.times.gather(1, samples.channels.argsort(dim=1, stable=True))


def logistic_regression(train: EventSamples, test: EventSamples, channels: int, classes: int, kind: str) -> float:
    """Return the test accuracy of a logistic regression on standardised features."""
    x, y = (features(s, channels, kind) for s in (train, test))
    mean, scale = x.mean(0), x.std(0).clamp(min=1e-6)
    x, y = (x - mean) / scale, (y - mean) / scale
    weights = torch.zeros(x.shape[1] + 1, classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weights[:-1] + weights[-1], train.labels) + 1e-5 * weights.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        return float(((y @ weights[:-1] + weights[-1]).argmax(1) == test.labels).float().mean())


def run_baselines(seeds: list[int]) -> dict[str, list[float]]:
    """Return the accuracies of logistic regressions, one per seed."""
    results = {}
    for (name, task), kind in itertools.product(EXAMPLE["TASKS"].items(), ("counts", "times")):
        results[f"{name}-{kind}"] = [
            logistic_regression(
                task.draw(task.samples, 1000 + s), task.draw(1000, 3000 + s), task.channels, len(task.classes), kind
            )
            for s in seeds
        ]
        print(f"logistic regression on {kind}, {name}: {summary(results[f'{name}-{kind}'])}")
    return results


def summary(accuracies: list[float]) -> str:
    values = 100 * torch.tensor(accuracies, dtype=torch.float64)
    return f"{values.mean():.1f} % ({values.min():.1f} to {values.max():.1f}, {len(accuracies)} seeds)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*VARIANTS, "baselines"), default=(*VARIANTS, "baselines"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    path: Path = arguments.results
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    machine = environment.cpu_name()
    for name, seed in itertools.product(arguments.only, arguments.seeds):
        if name == "baselines" or str(seed) in results["runs"].get(name, {}):
            continue
        task, options = VARIANTS[name]
        with tempfile.TemporaryDirectory() as folder:
            config = EXAMPLE["Config"](seed=seed, folder=folder, **options)
            result = EXAMPLE["run"](task, config, Console())
        kept = {key: result[key] for key in ("test", "validation", "events_per_sample", "processor_seconds")}
        kept["date"], kept["machine"] = datetime.date.today().isoformat(), machine
        results["runs"].setdefault(name, {})[str(seed)] = kept
        replace_file(path, (json.dumps(results, indent=1) + "\n").encode())
    if "baselines" in arguments.only:
        results["baselines"] = run_baselines(arguments.seeds)
        replace_file(path, (json.dumps(results, indent=1) + "\n").encode())
    for name, runs in results["runs"].items():
        print(f"{name}: {summary([run['test'] for run in runs.values()])}")


if __name__ == "__main__":
    main()
