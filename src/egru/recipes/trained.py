"""What a run learnt, from its folder."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from torch import nn

from egru.data import Classification, Text
from egru.recipes.build import build, load
from egru.recipes.config import Config, read
from egru.runtime.export import has_parts, load_parts
from egru.training import Run, Task, checkpoint


@dataclasses.dataclass(frozen=True)
class Trained:
    """The best epoch of a run: a model in evaluation mode, on the device of its config."""

    config: Config
    model: nn.Module
    task: Task
    data: Classification | Text
    epoch: int | None
    """None where only the weights are left of the run, and not its result."""


def trained(folder: Path, device: str | None = None, say: Callable[[str], None] = print) -> Trained:
    """What a run learnt, from its folder or from what :func:`export` made of it; on another ``device`` in float32."""
    run = Run.open(folder, say)
    _, config = read(run.config())
    if device is not None and device != config.device:
        config = dataclasses.replace(config, device=device, precision="float32", graph=False)
    data_set = load(config)
    model, task = build(config, data_set)
    if has_parts(run.folder):
        epoch = (run.result() or {}).get("best_epoch")
        checkpoint.put(model, load_parts(run.folder))
    else:
        epoch = run.best()
        checkpoint.load_weights(run.at(epoch), model)
    return Trained(config, model.eval(), task, data_set, epoch)
