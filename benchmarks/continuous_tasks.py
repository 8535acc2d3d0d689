"""Train continuous-time networks on generated tasks, with controls, and record the test accuracies.

    python benchmarks/continuous_tasks.py FOLDER --jobs 12     # everything: about three hours of processor time
    python benchmarks/continuous_tasks.py FOLDER --only yinyang-first --seeds 0 1
    python benchmarks/continuous_tasks.py FOLDER --collect     # write benchmarks/results/continuous_tasks.json

Every entry is one run of examples/continuous.py in a process with one thread. Its result is written to FOLDER as soon
as it is known, and a run whose result is there is not repeated. benchmarks/results/continuous_tasks holds the runs that
are finished so far. For variants in SEARCH, each candidate is first trained once, with seed 100, and the one with the
highest validation accuracy is used for all seeds. The test set is used once per run, with the final settings. "frozen"
trains only the output units on a random recurrent layer, with the settings of the trained network. The baselines are
logistic regressions on the number of events per channel and on the event times.
"""

import argparse
import datetime
import functools
import itertools
import json
import multiprocessing
import runpy
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from egru import environment
from egru.data import EventSamples
from egru.files import replace_file

RESULTS = Path(__file__).parent / "results" / "continuous_tasks.json"
SEARCH_SEED = 100
VARIANTS = (
    "yinyang-membrane",
    "yinyang-membrane-frozen",
    "match-membrane",
    "match-membrane-frozen",
    "intervals-membrane",
    "intervals-membrane-frozen",
    "yinyang-first",
    "yinyang-first-frozen",
    "order-membrane",
    "order-membrane-frozen",
)
FIXED: dict[str, dict[str, Any]] = {
    "yinyang-first": {"epochs": 20},
    "order-membrane": {"trainable_tau": True},
    "match-membrane": {"trainable_tau": True},
    "intervals-membrane": {"trainable_tau": True},
}
SEARCH: dict[str, list[dict[str, Any]]] = {
    "yinyang-membrane": [
        {"epochs": 60},
        {"epochs": 60, "learning_rate": 1e-2},
        {"epochs": 60, "trainable_tau": True},
        {"samples": 20_000, "epochs": 15},
        {"samples": 20_000, "epochs": 15, "learning_rate": 1e-2},
        {"samples": 20_000, "epochs": 15, "trainable_tau": True},
        {"samples": 100_000, "epochs": 3},
        {"samples": 100_000, "epochs": 5},
    ],
}


@functools.cache
def example() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[1] / "examples" / "continuous.py"))


def run_network(path: Path, variant: str, seed: int, settings: dict[str, Any]) -> None:
    """Train and test one network and write the result to ``path``. A run of the search is not tested."""
    torch.set_num_threads(1)
    task, output, *freeze = variant.split("-")
    config = example()["Config"](output=output, seed=seed, freeze=bool(freeze), **settings)
    _, result = example()["fit"](task, config, test=seed != SEARCH_SEED)
    write(path, {"variant": variant, "seed": seed, "settings": settings, **result})


def run_baseline(path: Path, variant: str, seed: int) -> None:
    """Fit and test one logistic regression and write the result to ``path``."""
    torch.set_num_threads(1)
    name, kind = variant.split("-")
    task = example()["TASKS"][name]
    train, test = task.draw(task.samples, 1000 + seed), example()["test_set"](name, seed)
    accuracy = logistic_regression(train, test, task.channels, len(task.classes), kind)
    write(path, {"variant": variant, "seed": seed, "test": accuracy})


def write(path: Path, result: dict[str, Any]) -> None:
    result |= {"date": datetime.date.today().isoformat(), "machine": environment.cpu_name()}
    replace_file(path, (json.dumps(result, indent=1) + "\n").encode())
    print(
        f"{path.stem}: " + ", ".join(f"{k} {result[k]:.4f}" for k in ("validation", "test") if k in result), flush=True
    )


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
        return ((y @ weights[:-1] + weights[-1]).argmax(1) == test.labels).double().mean().item()


class Runner:
    """Runs trainings in parallel. Runs that wait for the result of a search start when it is complete."""

    def __init__(self, folder: Path, pool: ProcessPoolExecutor) -> None:
        self.folder, self.pool = folder, pool
        self.running: set[Future[None]] = set()
        self.errors: list[str] = []

    def start(self, name: str, function: Any, *arguments: Any) -> None:
        path = self.folder / f"{name}.json"
        if not path.exists():
            self.running.add(self.pool.submit(function, path, *arguments))

    def start_search(self, variant: str) -> None:
        for index, settings in enumerate(SEARCH[variant]):
            self.start(f"search-{variant}-{index}", run_network, variant, SEARCH_SEED, settings)

    def best_settings(self, variant: str) -> dict[str, Any] | None:
        """Return the settings of ``variant``, or None while its search is not complete."""
        if variant in FIXED:
            return FIXED[variant]
        paths = [self.folder / f"search-{variant}-{index}.json" for index in range(len(SEARCH[variant]))]
        if not all(path.exists() for path in paths):
            return None
        return max((json.loads(path.read_text()) for path in paths), key=lambda run: run["validation"])["settings"]

    def run(self, variants: list[str], seeds: list[int]) -> None:
        """Run ``variants`` and the searches that they need. A run that fails does not stop the others."""
        waiting = list(variants)
        for variant in dict.fromkeys(name.removesuffix("-frozen") for name in variants):
            if variant in SEARCH:
                self.start_search(variant)
        while True:
            for name in list(waiting):
                settings = self.best_settings(name.removesuffix("-frozen"))
                if settings is not None:
                    waiting.remove(name)
                    for seed in seeds:
                        self.start(f"{name}-{seed}", run_network, name, seed, settings)
            if not self.running:
                break
            done, self.running = wait(self.running, return_when=FIRST_COMPLETED)
            self.errors += [str(error) for future in done if (error := future.exception())]
        if self.errors:
            raise SystemExit("\n".join(["runs that failed:", *self.errors]))


def collect(folder: Path) -> dict[str, Any]:
    """Return the results in ``folder``, without learning curves, and print their means."""
    results: dict[str, Any] = {"search": {}, "runs": {}}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        for key in ("history", "config", "chance", "task"):
            result.pop(key, None)
        kind = "search" if path.stem.startswith("search-") else "runs"
        results[kind].setdefault(result.pop("variant"), []).append(result)
    for name, runs in results["runs"].items():
        values = 100 * torch.tensor([run["test"] for run in runs], dtype=torch.float64)
        print(f"{name}: {values.mean():.2f} % ({values.min():.2f} to {values.max():.2f}, {len(runs)} seeds)")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=(*VARIANTS, "baselines"), default=(*VARIANTS, "baselines"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=1, help="number of processes; default 1")
    parser.add_argument("--collect", action="store_true", help=f"write the results in FOLDER to {RESULTS.name}")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    if not arguments.collect:
        folder.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
            runner = Runner(folder, pool)
            if "baselines" in arguments.only:
                for task, kind, seed in itertools.product(example()["TASKS"], ("counts", "times"), arguments.seeds):
                    runner.start(f"{task}-{kind}-{seed}", run_baseline, f"{task}-{kind}", seed)
            runner.run([name for name in arguments.only if name != "baselines"], arguments.seeds)
    results = collect(folder)
    if arguments.collect:
        replace_file(RESULTS, (json.dumps(results, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
