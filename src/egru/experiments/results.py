"""Our results for the paper's tables, which ship with the package in ``results.json``.

`egru reproduce --keep RUN` updates the file. The records of the runs are in the repository, in
``benchmarks/results/runs``.
"""

import dataclasses
from collections.abc import Iterable
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
        date: The day on which the run finished, as ``YYYY-MM-DD``.
        accuracy: Share of correct answers.
        perplexity: For language models, else None.
        activity_sparsity: Share of units that emit no event. None for dense networks.
        backward_sparsity: Share of zero gradients, as the paper counts them. None for dense networks.
        parameters: Number of parameters.
        forward_macs: Effective multiply-accumulate operations per step.
    """

    run: str
    recipe: str
    data: str
    seed: int
    command: str
    date: str
    accuracy: float
    perplexity: float | None
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
