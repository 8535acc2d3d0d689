"""Data-parallel training with `torchrun`: two processes equal one with the doubled batch, and killed ranks resume."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from egru import ActivityMonitor, cli
from egru.cli import ExitCode
from egru.data import Batches, Split
from egru.models import LanguageModel
from egru.training import ClassifierTraining, NoProgress, Run, Scores, distributed, loop, to_plain
from tests.helpers import PATIENCE
from tests.training import distributed_runs
from tests.training.killed_ranks import KILLS
from tests.training.tiny import make_classifier, make_language_model

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
HERE = Path(__file__).parents[2]


def torchrun(*arguments: str, restarts: int = 0, folder: Path) -> subprocess.Popen:
    paths = [os.path.abspath(path) for path in sys.path]
    return subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "--max-restarts", str(restarts), "--monitor-interval", "0.1", *arguments,
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *paths])},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Folders with the same runs, trained by one process and by two."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    process = torchrun("-m", "tests.training.distributed_runs", str(two), folder=two)
    watch, default = loop.EpochStatistics, torch.get_default_dtype()
    try:
        distributed_runs.main(one, 1)
    finally:
        loop.EpochStatistics = watch
        torch.set_default_dtype(default)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    return one, two


def curve(folder: Path) -> list[float]:
    return json.loads((folder / "curve.json").read_text())


def scores(of: Scores) -> dict:
    return {name: value for name, value in to_plain(of).items() if value is not None}


@pytest.mark.parametrize("name", ["classifier", "language", "pruned"])
def test_two_processes_equal_one_with_the_doubled_batch(name, both):
    one, two = (folder / name for folder in both)
    assert len(curve(one)) >= 20
    assert curve(two) == pytest.approx(curve(one), rel=1e-9)
    assert max(curve(one)) / min(curve(one)) > 1.001
    for a, b in zip(Run.open(one).metrics(), Run.open(two).metrics(), strict=True):
        assert b.train.loss == pytest.approx(a.train.loss, rel=1e-9)
        assert b.train.gradient_norm == pytest.approx(a.train.gradient_norm, rel=1e-9)
        assert b.train.steps == a.train.steps
        assert scores(b.validation) == pytest.approx(scores(a.validation), rel=1e-6)  # the loss of a text is in float32
        assert b.activity == a.activity  # counts are exact
    a, b = Run.open(one).result(), Run.open(two).result()
    assert a is not None
    assert b is not None
    assert b.activity == a.activity
    assert scores(b.test) == pytest.approx(scores(a.test), rel=1e-6)
    assert b.best_epoch == a.best_epoch
    newest = Run.open(one).newest_epoch()
    weights = [load((Run.open(f).checkpoint_path(newest) / "weights.safetensors").read_bytes()) for f in (one, two)]
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-8, atol=1e-10)


def test_bfloat16_exchange_rounds_gradients(both):
    one, two = (folder / "bfloat16" for folder in both)
    error = [abs(b / a - 1) for a, b in zip(curve(one), curve(two), strict=True)]
    assert 1e-8 < max(error) < 1e-2
    assert error[0] < 1e-12  # no gradient is rounded before the first step


def test_killed_ranks_resume_bit_identically(tmp_path):
    """Rank 1, then rank 0 dies by SIGKILL. The result equals that of an uninterrupted run, including dropout."""
    epochs = 10
    options = ["digits", "--smoke", "--hidden", "8", "--limit", "60", "--epochs", str(epochs), "--zoneout", "0.1"]
    command = ["train", *options, "--batch", "10", "--out"]
    launcher = torchrun("-m", "tests.training.killed_ranks", *command, "killed", restarts=2, folder=tmp_path)
    output, _ = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 0, output
    assert {path.name for path in tmp_path.glob("killed-*")} == {f"killed-in-epoch-{epoch}" for epoch in KILLS}
    whole = torchrun("-m", "egru", *command, "whole", folder=tmp_path)
    assert whole.communicate(timeout=PATIENCE)[0].count("test, epoch") == 1  # only rank 0 prints
    assert whole.returncode == 0
    run, other = Run(tmp_path / "killed"), Run(tmp_path / "whole")
    lines = run.metrics()
    assert [line.epoch for line in lines] == list(range(1, epochs + 1))
    assert output.count("epoch 1: loss") == 1  # it was resumed, not restarted
    assert [line.train.loss for line in lines] == [line.train.loss for line in other.metrics()]
    results = run.result(), other.result()
    assert results[0] is not None
    assert results[1] is not None
    assert results[0].test == results[1].test


@pytest.mark.parametrize("exchange", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.cuda)])
def test_group_with_one_process_trains_like_no_group(backend, exchange, tmp_path, monkeypatch):
    """Covers NCCL on a machine with one GPU."""
    torch.set_default_dtype(torch.float32)
    device = "cuda" if backend == "nccl" else "cpu"
    make_model, make_task, training = distributed_runs.classifier(1, exchange=exchange, device=device)

    def losses(folder: Path) -> list[float]:
        torch.manual_seed(0)
        loop.train(make_model().to(device), make_task(), training, Run.create(folder, {}), NoProgress())
        return [line.train.loss for line in Run.open(folder).metrics()]

    alone = losses(tmp_path / "alone")
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    where = torch.device("cuda", 0) if backend == "nccl" else None
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, device_id=where)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(distributed, "_is_distributed", lambda: True)
            grouped = losses(tmp_path / "group")
    finally:
        torch.distributed.destroy_process_group()
    assert grouped == pytest.approx(alone, rel=1e-6 if exchange == "float32" else 1e-2)
    assert exchange == "float32" or grouped[1:] != alone[1:]  # gradients were rounded


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", {"backend": "gloo"}), ("cuda", {"backend": "nccl", "device_id": torch.device("cuda", 1)})],
)
def test_process_group_sets_the_local_device(device, expected, monkeypatch):
    asked, current = [], []
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda **options: asked.append(options))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    with distributed.process_group(device) as local:
        assert local == ("cuda:1" if device == "cuda" else "cpu")
    assert asked == [expected]
    assert current == (["cuda:1"] if device == "cuda" else [])


def test_ranks_split_each_batch():
    """Every row appears once, in the order of a single process. A rank without rows gets a placeholder of weight 0."""
    split = Split(torch.arange(9.0)[:, None], torch.arange(9))
    batches = [Batches(split, 4, shuffle=True, part=(i, 2), order=lambda n: torch.arange(n).flip(0)) for i in (0, 1)]
    assert [y.tolist() for _, y in batches[0]] == [[8, 7], [4, 3], [0]]
    assert [y.tolist() for _, y in batches[1]] == [[6, 5], [2, 1], [0]]


@pytest.mark.parametrize("model", [make_classifier(), make_language_model(), make_language_model("gru")])
def test_monitor_counts_add_up_over_processes(model):
    text = isinstance(model, LanguageModel)
    torch.set_default_dtype(torch.float32)
    inputs = [torch.randint(7, (5, 2)) if text else torch.randn(3, 5, 1) for _ in range(2)]
    model.eval()
    with torch.no_grad(), ActivityMonitor(model) as whole:
        for x in inputs:
            model(x)
    parts = []
    for x in inputs:
        with torch.no_grad(), ActivityMonitor(model) as part:
            model(x)
        parts.append(part)
    idle = ActivityMonitor(model)  # a process without rows
    for part in parts:
        idle.add(part.counts())
    assert idle.summary() == whole.summary()


def test_functions_do_nothing_without_a_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    value, state = torch.ones(2), torch.get_rng_state()
    assert (distributed.rank(), distributed.world_size(), distributed.launched_processes()) == (0, 1, 1)
    assert distributed.all_sum(value) is value
    assert distributed.gather_from_others(value) == []
    assert distributed.from_rank_zero(lambda: 3) == 3
    distributed.reseed(0, 1)
    assert torch.equal(torch.get_rng_state(), state)
    with distributed.process_group("cuda") as device, distributed.rank_zero_first():
        assert device == "cuda"
    distributed.barrier()


def test_graphs_are_refused_with_several_processes(monkeypatch):
    monkeypatch.setattr(distributed, "_is_distributed", lambda: True)
    training = ClassifierTraining(device="cuda", graph=True)
    with pytest.raises(ValueError, match="graph is not supported with several processes"):
        distributed.data_parallel(torch.nn.Linear(1, 1), print, training)


def test_several_processes_require_out(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", "digits", "--smoke"]) == ExitCode.USAGE_OR_MISSING_FILE
    assert "multi-process runs require --out" in capsys.readouterr().err
