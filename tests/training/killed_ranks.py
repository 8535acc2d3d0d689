"""``egru train`` with two processes, each of which is killed once by SIGKILL in the middle of an epoch."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from egru import cli
from egru.training import distributed, loop

KILLS = {4: 1, 8: 0}
"""The rank that is killed in an epoch."""


class KilledStatistics(loop.EpochStatistics):
    """Kills the process in the second step of an epoch of :data:`KILLS`, unless a file shows that this was done."""

    def __init__(self, epoch: int, *arguments: Any, **options: Any) -> None:
        super().__init__(epoch, *arguments, **options)
        self.killed_file = Path(f"killed-in-epoch-{epoch}") if KILLS.get(epoch) == distributed.rank() else None

    def add(self, loss: Tensor, objective: Tensor, norm: Tensor, targets: int) -> None:
        super().add(loss, objective, norm, targets)
        if self.killed_file is not None and self.steps == 2 and not self.killed_file.exists():
            self.killed_file.touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    loop.EpochStatistics = KilledStatistics
    sys.exit(cli.main(sys.argv[1:]))
