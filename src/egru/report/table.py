"""A table of runs with one column per run, narrow enough for a terminal or a phone."""

from collections.abc import Sequence

from egru import format
from egru.report.run import RunReport, check_runs


def measures(runs: Sequence[RunReport]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table: a label and one cell per run."""

    def with_share(used: float, dense: float) -> str:
        return f"{format.count(used)} ({format.percent(used / dense, 0)})"

    columns = [
        (
            format.percent(run.test_accuracy),
            format.percent(run.history[-1].validation_accuracy),
            format.percent(run.activity.activity_sparsity),
            format.percent(run.activity.backward_sparsity),
            format.percent(run.activity.backward_skippable),
            with_share(run.activity.forward_macs, run.activity.dense_forward_macs),
            format.count(run.activity.dense_forward_macs),
            with_share(run.activity.backward_macs, run.activity.dense_backward_macs),
            format.count(run.activity.dense_backward_macs),
            format.joules(run.activity.joules),
            f"{run.activity.parameters:,}",
            f"{len(run.history)}",
            format.seconds(run.seconds),
            f"{run.seed}",
        )
        for run in runs
    ]
    labels = (
        "test accuracy",
        "validation accuracy (last epoch)",
        "activity sparsity",
        "backward sparsity (paper)",
        "backward sparsity (skippable)",
        "forward MACs (% of dense)",
        "forward MACs (dense)",
        "backward MACs (% of dense)",
        "backward MACs (dense)",
        "energy per step (estimate)",
        "parameters",
        "epochs",
        "training time",
        "seed",
    )
    rows = [(label, list(cells)) for label, cells in zip(labels, zip(*columns, strict=True), strict=True)]
    perplexities = [run.test_perplexity for run in runs]
    if any(value is not None for value in perplexities):
        rows.insert(0, ("test perplexity", ["-" if value is None else f"{value:.1f}" for value in perplexities]))
    return rows


NOTE = (
    "MACs and energy are per time step of one sequence. Backward sparsity (paper) is the fraction of states outside "
    "the surrogate's window. Backward sparsity (skippable) is the fraction of states with a zero gradient; backward "
    "MACs are computed from it."
)


def print_table(runs: Sequence[RunReport]) -> None:
    """Print a table of the runs to the terminal.

    Args:
        runs: Runs with distinct names, one per column.

    Raises:
        ValueError: If ``runs`` is empty or two runs have the same name.
        ImportError: If rich is not installed.
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
