"""Job lists of the GPU queue.

A list is a JSON file (objects with the fields of :class:`Job`, or ``seeds`` in place of ``seed`` for one job per seed)
or a text file with one line per recipe; ``#`` starts a comment:

    # recipe        seeds   minutes  GiB   options of `egru train`
    smnist          0,1,2   2.6      12    --rate-loss 0.3
    dvs-egru-512    0-3     0.8      4     --save-every 20
"""

import collections
import dataclasses
import json
import pathlib
import re
import shlex
import sys
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One training run, and what it needs."""

    recipe: str
    seed: int = 0
    options: tuple[str, ...] = ()
    """Further options of ``egru train``."""
    minutes: float = 1.0
    """Expected duration. The job is not started with less time left."""
    memory: float = 0.0
    """Expected GPU memory in GiB."""
    priority: int = 0
    """Jobs with a lower number start first."""
    export: str | None = None
    """Precision of the weights to export after training: float32, bfloat16 or int8."""
    name: str = ""
    """Name of the run folder and the log; made from recipe, options and seed by default."""
    command: tuple[str, ...] | None = None
    """Run this command instead of ``egru train``; ``{out}`` is replaced by the run folder."""

    def __post_init__(self) -> None:
        if not self.name:
            words = [self.recipe, *(option.lstrip("-") for option in self.options), f"seed{self.seed}"]
            object.__setattr__(self, "name", re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words)))
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError(f"name must consist of letters, digits, '.', '_' and '-', got {self.name!r}")
        if not self.minutes > 0:
            raise ValueError(f"minutes of {self.name} must be positive, got {self.minutes}")

    def train_command(self, common: Sequence[str]) -> list[str]:
        """Return the ``egru train`` command as a user would type it, without the run folder."""
        return ["egru", "train", self.recipe, *common, *self.options, "--seed", str(self.seed)]

    def process_command(self, common: Sequence[str], out: pathlib.Path) -> list[str]:
        """Return the command line of the job's process, which trains in ``out``."""
        if self.command is not None:
            return [part.replace("{out}", str(out)) for part in self.command]
        return [sys.executable, "-m", *self.train_command(common), "--out", str(out)]


def read_jobs(path: pathlib.Path) -> list[Job]:
    """Read a list of jobs from a JSON or text file.

    Args:
        path: A file as described at the top of this module. Files whose name ends in ``.json`` are JSON.

    Returns:
        The jobs in the order of the file, one per seed.

    Raises:
        ValueError: A line or an object cannot be read, or two jobs have the same name.
    """
    text = path.read_text(encoding="utf-8")
    jobs = list(_json_jobs(text) if path.suffix == ".json" else _text_jobs(text))
    if not jobs:
        raise ValueError(f"{path} contains no jobs")
    repeated = [name for name, count in collections.Counter(job.name for job in jobs).items() if count > 1]
    if repeated:
        raise ValueError(f"job names must be unique, got {repeated[0]} more than once")
    return jobs


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of a list such as ``0,1,2`` or ``0-3``."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def _text_jobs(text: str) -> Iterator[Job]:
    for number, line in enumerate(text.splitlines(), 1):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        try:
            recipe, seeds, minutes, memory, *options = words
            for seed in parse_seeds(seeds):
                yield Job(
                    recipe=recipe, seed=seed, minutes=float(minutes), memory=float(memory), options=tuple(options)
                )
        except ValueError as error:
            raise ValueError(f"line {number}: expected RECIPE SEEDS MINUTES GIB [OPTIONS], got {line!r}") from error


def _json_jobs(text: str) -> Iterator[Job]:
    for fields in json.loads(text):
        if "seeds" in fields and "seed" in fields:
            raise ValueError(f"a job takes seed or seeds, not both; got {fields}")
        several, seeds = "seeds" in fields, fields.pop("seeds", [fields.get("seed", 0)])
        for name in ("options", "command"):
            value = fields.get(name)
            if value is not None:
                fields[name] = tuple(shlex.split(value) if isinstance(value, str) else value)
        try:
            for seed in seeds:
                name = {"name": f"{fields['name']}-seed{seed}"} if several and "name" in fields else {}
                yield Job(**fields | {"seed": seed} | name)
        except TypeError as error:
            raise ValueError(f"cannot read the job {fields}: {error}") from error
