"""Our results for the paper's tables, which ship with the package in ``results.json``.

`egru reproduce --keep RUN` updates the file. The records of the runs are in the repository, in
``benchmarks/results/runs``.
"""

import dataclasses
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from egru.records import FORMAT, dumps, from_plain, read_json, to_plain

RESULTS = Path(__file__).with_name("results.json")


@dataclasses.dataclass(frozen=True)
class KeptResult:
    """The result of a run on the test split.

    Attributes:
        run: Name of the folder with the records of the run.
        recipe: Name of the recipe, see :data:`egru.experiments.tables.ALIASES`.
        data: Name of the data set.
        seed: Random seed.
        command: The command that reproduces the run.
        note: Remark on the run, such as the precision of the weights that it started from.
        date: The day on which the run finished, as ``YYYY-MM-DD``.
        machine: The GPU, or the operating system and architecture if there was none.
        accuracy: Share of correct answers.
        perplexity: For language models, else None.
        validation: Accuracy or perplexity on the validation split, of the epoch that was tested.
        validation_one_column: Validation perplexity of a text read in one column, like the test text. None if not
            measured.
        activity_sparsity: Share of units that emit no event. None for dense networks.
        backward_sparsity: Share of zero gradients in training, averaged over the epochs, as in the paper. None for
            dense networks and if not measured.
        parameters: Number of parameters.
        forward_macs: Effective multiply-accumulate operations per step.
    """

    run: str
    recipe: str
    data: str
    seed: int
    command: str
    note: str
    date: str
    machine: str
    accuracy: float
    perplexity: float | None
    validation: float
    validation_one_column: float | None
    activity_sparsity: float | None
    backward_sparsity: float | None
    parameters: int
    forward_macs: float


def read_results(path: Path = RESULTS) -> list[KeptResult]:
    """Read the results, in order of their dates.

    Raises:
        FormatError: If the file has another format.
    """
    return [from_plain(KeptResult, result, use_defaults=False) for result in read_json(path)["results"]]


def format_results(results: Iterable[KeptResult]) -> str:
    """Return the content of ``results.json``."""
    return dumps({"format": FORMAT, "results": to_plain(list(results))}) + "\n"


def without_seed(command: str) -> str:
    """Return a command without its option ``--seed``."""
    return re.sub(r" --seed \d+", "", command)


def group_seeds(results: Iterable[KeptResult]) -> list[list[KeptResult]]:
    """Group results that differ only in their seed, in order of the first of each group."""
    groups: dict[tuple[str, str, str], list[KeptResult]] = {}
    for result in results:
        groups.setdefault((result.recipe, without_seed(result.command), result.note), []).append(result)
    return [sorted(group, key=lambda result: result.seed) for group in groups.values()]


def spread(values: Iterable[float | None], show: Callable[[float], str]) -> str:
    """Format one value as it is, and several as mean and standard deviation (n - 1). None is left out."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return " ± ".join(map(show, [statistics.mean(known), *([statistics.stdev(known)] if len(known) > 1 else [])]))
