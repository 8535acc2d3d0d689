"""A table of runs with one column per run, narrow enough for a terminal or a phone."""

from collections.abc import Callable, Sequence

from egru import format
from egru.report.run import RunReport, check_runs


def measures(runs: Sequence[RunReport]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table: a label and one cell per run. Rows that apply to no run are left out."""

    def with_share(used: float, dense: float) -> str:
        return f"{format.count(used)} ({format.percent(used / dense, 0)})"

    def cells(value: Callable[[RunReport], str | None]) -> list[str]:
        return ["-" if (cell := value(run)) is None else cell for run in runs]

    split = runs[0].split if len({run.split for run in runs}) == 1 else None

    def score(name: str, value: Callable[[RunReport], str | None]) -> tuple[str, list[str]]:
        """Name the split in the label if it is the same for all runs, and in each cell otherwise."""
        if split is not None:
            return f"{split} {name}", cells(value)
        return name, cells(lambda run: None if (text := value(run)) is None else f"{text} ({run.split})")

    rows = [
        score("perplexity", lambda run: None if run.perplexity is None else f"{run.perplexity:.1f}"),
        score("accuracy", lambda run: format.percent(run.accuracy)),
        score("loss", lambda run: None if run.loss is None else f"{run.loss:.4g}"),
        (
            "validation accuracy (last epoch)",
            cells(lambda run: format.percent(run.history[-1].validation_accuracy) if run.history else None),
        ),
        ("activity sparsity", cells(lambda run: format.percent(run.activity.activity_sparsity))),
        ("weight sparsity", cells(lambda run: format.percent(run.activity.weight_sparsity or None))),
        ("backward sparsity (paper)", cells(lambda run: format.percent(run.activity.backward_sparsity))),
        ("backward sparsity (skippable)", cells(lambda run: format.percent(run.activity.backward_skippable))),
        (
            "forward MACs (% of dense)",
            cells(lambda run: with_share(run.activity.forward_macs, run.activity.dense_forward_macs)),
        ),
        ("forward MACs (dense)", cells(lambda run: format.count(run.activity.dense_forward_macs))),
        (
            "backward MACs (% of dense)",
            cells(lambda run: with_share(run.activity.backward_macs, run.activity.dense_backward_macs)),
        ),
        ("backward MACs (dense)", cells(lambda run: format.count(run.activity.dense_backward_macs))),
        ("energy per step (estimated)", cells(lambda run: format.joules(run.activity.estimated_joules))),
        ("time per step (measured)", cells(lambda run: run.step_time and format.seconds(run.step_time.seconds))),
        ("parameters", cells(lambda run: f"{run.activity.parameters:,}")),
        ("epochs", cells(lambda run: f"{len(run.history)}" if run.history else None)),
        (
            "training time",
            cells(lambda run: None if run.search or run.seconds is None else format.seconds(run.seconds)),
        ),
        (
            "time of the threshold search",
            cells(lambda run: format.seconds(run.seconds) if run.search and run.seconds is not None else None),
        ),
        ("seed", cells(lambda run: None if run.seed is None else f"{run.seed}")),
    ]
    always = {"backward sparsity (paper)", "backward sparsity (skippable)"}
    return [(label, row) for label, row in rows if label in always or set(row) != {"-"}]


NOTE = (
    "MACs and estimated energy are per time step of one sequence. Backward sparsity (paper) is the fraction of states "
    "outside the surrogate's window. Backward sparsity (skippable) is the fraction of states with a zero gradient; "
    "backward MACs are computed from it."
)


def print_table(runs: Sequence[RunReport]) -> None:
    """Print a table of the runs to the terminal.

    Args:
        runs: Runs with distinct names, one per column.

    Raises:
        ValueError: If ``runs`` is empty or two runs have the same name.
        ImportError: If rich is not installed.

    Example:
        >>> egru.report.print_table([run])  # run: an egru.report.RunReport
    """
    check_runs("print_table", runs)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise ImportError("print_table requires rich: pip install 'egru[demo]'") from error
    from rich.box import SIMPLE_HEAD
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for run in runs:
        style = "bold" if run.event_layers else ""
        table.add_column(Text(run.name), justify="right", style=style, header_style="bold")
    for label, cells in measures(runs):
        table.add_row(label, *map(Text, cells))
    console = Console()
    console.print(table)
    console.print(Text(NOTE, style="dim"))
