"""The threads of the CPU kernel: torch's where possible, and the same results with any number of them."""

import os
import subprocess
import sys

import pytest

from egru import compiled
from egru.kernels.cpu.kernel import Limits

pytestmark = pytest.mark.skipif(compiled.core is None, reason="the compiled core is not built")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc; elsewhere the core starts its own")

SETUP = """
import os, torch, egru
from egru import compiled
from egru.kernels.cpu import kernel
torch.set_num_threads(THREADS)
torch.manual_seed(0)
layer, x = egru.EGRU(8, 160), torch.randn(6, 5, 8)

def run(threads):
    kernel.Limits.threads = lambda *_: threads
    layer.zero_grad()
    y = layer(x)[0]
    y.sum().backward()
    return [y.detach(), *(p.grad.clone() for p in layer.parameters())]

def same(a, b):
    return all(torch.equal(i, j) for i, j in zip(a, b, strict=True))

alone = run(1)
"""


def execute(threads: int, script: str, **environment: str) -> None:
    """Run a script after :data:`SETUP` in a new process, with ``threads`` threads of torch."""
    command = [sys.executable, "-c", SETUP.replace("THREADS", str(threads)) + script]
    subprocess.run(command, check=True, timeout=120, env=os.environ | environment)


@LINUX
def test_core_runs_on_the_threads_of_torch_and_not_after_a_fork() -> None:
    execute(
        3,
        """
torch.rand(1_000_000).exp()
before = len(os.listdir("/proc/self/task"))
assert compiled.core.shares_threads()
for threads in (2, 3):  # a smaller team than torch's must not end torch's threads
    assert same(run(threads), alone)
    assert len(os.listdir("/proc/self/task")) == before
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    shares = compiled.core.shares_threads()
    os._exit(0 if not shares and same(run(2), alone) else 1)
assert os.waitpid(child, 0)[1] == 0
assert compiled.core.shares_threads()
""",
    )


def test_team_may_be_smaller_than_requested() -> None:
    execute(2, "assert same(run(4), alone)", OMP_THREAD_LIMIT="2")


def test_threads_are_used_where_each_has_enough_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 16)
    monkeypatch.setattr(compiled.core, "shares_threads", lambda: True)
    limits = Limits()
    assert limits.threads(1, 1, 32, 32) == 1
    assert limits.threads(100, 1, 64, 128) == 1  # many steps, each of them small
    assert limits.threads(1, 1, 64, 512) == 7
    assert limits.threads(16, 128, 64, 64) == 2  # two blocks of units
    assert limits.threads(16, 128, 64, 512) == 16
    monkeypatch.setattr(compiled.core, "shares_threads", lambda: False)
    assert limits.threads(1, 128, 64, 512) == 1
    assert limits.threads(100, 128, 64, 512) == 16
