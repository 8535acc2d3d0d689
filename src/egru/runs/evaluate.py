"""Score a trained run on one of its splits."""

from collections.abc import Callable
from pathlib import Path

from egru.activity import ActivitySummary
from egru.runs.load import load
from egru.training import Scores, score
from egru.training.progress import evaluation_progress


def evaluate(
    folder: Path, split: str = "test", log: Callable[[str], None] = print, device: str | None = None
) -> tuple[Scores, ActivitySummary, int | None]:
    """Score the best epoch of a run. The progress is shown on the standard error.

    Args:
        folder: The folder of a run or an export, or the name of a pretrained model.
        split: ``"test"`` or ``"validation"``.
        log: Called with messages for the user, such as a damaged checkpoint.
        device: Device to run on, in float32. If None, the device and precision of the run.

    Returns:
        The scores, the activity on the split, and the epoch. The epoch is None if the run has no result.

    Example:
        >>> scores, activity, epoch = egru.runs.evaluate(Path("runs/digits"), "validation")
        >>> print(f"{scores.accuracy:.1%} correct, {activity.activity_sparsity:.1%} of the outputs are zero")
    """
    trained = load(folder, device, log)
    with evaluation_progress(f"{folder}, {split} split") as progress:
        scores, activity = score(trained.model, trained.task, split, progress)
    return scores, activity, trained.epoch
