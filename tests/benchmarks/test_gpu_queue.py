"""Host logic of benchmarks/gpu_queue.py with small processes in place of training runs; needs no GPU."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from egru import experiments, runs
from tests.helpers import PATIENCE, wait_until

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))
import gpu_queue  # pyright: ignore[reportMissingImports]
from gpu_jobs import Job, read_jobs  # pyright: ignore[reportMissingImports]

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "gpu_queue.py"
Queue = gpu_queue.Queue


def job(name: str, command: str = "true", **fields: Any) -> Any:
    """A job that runs a shell command; ``{out}`` is replaced by the run folder."""
    fields = {"minutes": 0.001} | fields
    return Job(recipe="fake", name=name, command=("sh", "-c", command), **fields)


def wait_for(*names: str) -> str:
    """Return a shell command that waits until the files ``NAME.ready`` exist next to the run folder."""
    tests = " && ".join(f"[ -e $(dirname {{out}})/{name}.ready ]" for name in names)
    return f"until {tests}; do sleep 0.05; done"


def meet(name: str, *names: str) -> str:
    """Return a shell command that creates the file ``NAME.ready`` and waits for those of other jobs."""
    return f"touch $(dirname {{out}})/{name}.ready; {wait_for(*names)}"


def span(attempt: Any) -> tuple[float, float]:
    return attempt.started, attempt.started + attempt.seconds


RUN = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[1]); out.mkdir()
print("epoch 1: loss 0.5, validation accuracy 90.0 %")
(out / "config.json").write_text(json.dumps({"recipe": "fake", "config": {"seed": int(sys.argv[3]), "epochs": 4}}))
(out / "environment.json").write_text(json.dumps({"cuda": "GPU"}))
(out / "metrics.jsonl").write_text("{}")
(out / "weights.bin").write_text("large")
(out / "result.json").write_text("{}")
"""


def by_name(queue: Any) -> dict[str, Any]:
    return {attempt.job.name: attempt for attempt in queue.attempts}


def test_text_list_gives_one_job_per_seed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "jobs.txt"
    path.write_text("# recipe seeds minutes GiB options\nsmnist 0,2-3 2.6 12 --rate-loss 0.3  # three\n\n")
    jobs = read_jobs(path)
    assert [job.seed for job in jobs] == [0, 2, 3]
    assert jobs[0].name == "smnist-rate-loss-0.3-seed0"
    assert (jobs[0].minutes, jobs[0].memory, jobs[0].options) == (2.6, 12.0, ("--rate-loss", "0.3"))
    command = jobs[1].process_command(["--device", "cuda"], pathlib.Path("runs/a"))
    expected = "-m egru train smnist --device cuda --rate-loss 0.3 --seed 2 --out runs/a"
    assert command == [sys.executable, *expected.split()]


def test_json_list_gives_the_same_jobs(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps([{"recipe": "ptb", "seeds": [1, 2], "options": "--epochs 3", "priority": 1}]))
    jobs = read_jobs(path)
    assert [job.name for job in jobs] == ["ptb-epochs-3-seed1", "ptb-epochs-3-seed2"]
    assert all(job.priority == 1 for job in jobs)
    path.write_text(json.dumps([{"recipe": "ptb", "seeds": [1, 2], "name": "long"}, {"recipe": "ptb", "name": "one"}]))
    assert [job.name for job in read_jobs(path)] == ["long-seed1", "long-seed2", "one"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("jobs.txt", "ptb 0", "line 1"),
        ("jobs.txt", "# none", "no jobs"),
        ("jobs.txt", "ptb 0 1 1\nptb 0 2 1", "unique"),
        ("jobs.json", '[{"recipe": "ptb", "minuets": 3}]', "minuets"),
        ("jobs.json", '[{"recipe": "ptb", "minutes": 0}]', "positive"),
        ("jobs.json", '[{"recipe": "ptb", "seed": 0, "seeds": [1]}]', "not both"),
    ],
)
def test_unreadable_list_is_refused(tmp_path: pathlib.Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_jobs(path)


def test_longest_job_starts_first_within_a_priority(tmp_path: pathlib.Path) -> None:
    jobs = [
        job("short", minutes=0.001),
        job("late", minutes=0.003, priority=1),
        job("long", minutes=0.002),
    ]
    queue = Queue(jobs, tmp_path, slots=1, minutes=1, reserve=1)
    assert queue.run()
    started = {name: attempt.started for name, attempt in by_name(queue).items()}
    assert started["long"] < started["short"] < started["late"]


def test_slots_bound_the_number_of_processes(tmp_path: pathlib.Path) -> None:
    """The first two jobs wait for each other."""
    jobs = [job(f"job{i}", meet(f"job{i}", "job0", "job1")) for i in range(4)]
    queue = Queue(jobs, tmp_path, slots=2, minutes=1, reserve=1)
    assert queue.run()
    spans = [span(attempt) for attempt in queue.attempts]
    assert max(sum(begin <= t < end for begin, end in spans) for t, _ in spans) == 2


def test_memory_passes_over_a_job_that_does_not_fit(tmp_path: pathlib.Path) -> None:
    jobs = [
        job("large", wait_for("small"), minutes=0.003, memory=60),
        job("other", minutes=0.002, memory=60),
        job("small", "touch $(dirname {out})/small.ready", memory=20),
    ]
    queue = Queue(jobs, tmp_path, slots=3, memory=100, minutes=1, reserve=1)
    assert queue.run()
    attempts = by_name(queue)
    assert attempts["small"].started < span(attempts["large"])[1] <= attempts["other"].started


def test_dead_job_is_noticed_and_its_slot_used(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [
        job("dead", "echo out of memory; kill -KILL $$", minutes=0.002),
        job("fine"),
    ]
    queue = Queue(jobs, tmp_path, slots=1, minutes=1, reserve=1)
    assert not queue.run()
    attempts = by_name(queue)
    assert (attempts["dead"].status, attempts["dead"].exit_code) == ("failed", -signal.SIGKILL)
    assert attempts["fine"].status == "finished"
    output = capsys.readouterr().out
    assert "failed dead" in output
    assert "out of memory" in output


def test_command_that_cannot_start_is_a_failed_job(tmp_path: pathlib.Path) -> None:
    queue = Queue([Job(recipe="fake", command=("/no/such/program",))], tmp_path, minutes=2, reserve=1)
    assert not queue.run()
    assert queue.attempts[0].status == "failed"


def test_jobs_end_before_the_limit(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to stop comes when both jobs have handled what the signal does to them."""
    jobs = [
        job("stubborn", "trap '' INT; touch $(dirname {out})/stubborn.ready; sleep 200"),
        job("polite", "touch $(dirname {out})/polite.ready; exec sleep 200"),
        job("never", minutes=5),
    ]
    queue = Queue(jobs, tmp_path, slots=3, minutes=3, reserve=1)
    queue.grace = 2.0
    left = Queue.left.fget

    def shortened(queue: Any) -> float:
        return (
            -1.0
            if all((tmp_path / "runs" / f"{name}.ready").exists() for name in ("stubborn", "polite"))
            else left(queue)
        )

    monkeypatch.setattr(Queue, "left", property(shortened))
    assert not queue.run()
    assert queue.elapsed < queue.limit
    attempts = by_name(queue)
    assert [attempts[n].status for n in ("stubborn", "polite", "never")] == ["stopped", "stopped", "not started"]
    assert attempts["stubborn"].exit_code == -signal.SIGKILL
    assert attempts["polite"].exit_code == -signal.SIGINT
    state = json.loads((tmp_path / "queue.json").read_text())
    assert state["ended"]


def test_limits_change_while_the_queue_runs(tmp_path: pathlib.Path) -> None:
    jobs = [job(f"job{i}", meet(f"job{i}", "job0", "job1", "job2")) for i in range(3)]
    queue = Queue(jobs, tmp_path, slots=1, minutes=1, reserve=1)
    assert gpu_queue.main(["set", "--work", str(tmp_path), "--slots", "3", "--minutes", "2"]) == 0
    assert queue.run()
    assert max(attempt.started for attempt in queue.attempts) < min(span(attempt)[1] for attempt in queue.attempts)
    assert queue.limit == 120


def test_ramp_delays_the_second_job(tmp_path: pathlib.Path) -> None:
    jobs = [job(f"job{i}", "sleep 1") for i in range(2)]
    queue = Queue(jobs, tmp_path, slots=2, minutes=1, reserve=1, ramp=0.5)
    assert queue.run()
    assert queue.attempts[1].started >= 0.5


def test_status_shows_the_last_epoch_and_the_forecast(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue([job("run")], tmp_path, minutes=2, reserve=1)
    attempt = queue.attempts[0]
    monkeypatch.setattr(Queue, "elapsed", 50.0)
    attempt.status, attempt.started = "running", 40.0
    (tmp_path / "logs" / "run.log").write_text("start\nepoch 1: loss 2\nepoch 2: loss 1, 97 % inactive\nwarning\n")
    (tmp_path / "runs" / "run").mkdir()
    (tmp_path / "runs" / "run" / "config.json").write_text('{"config": {"epochs": 4}}')
    assert "epoch 2: loss 1, 97 % inactive; ends in 10 s" in queue.status()
    (tmp_path / "runs" / "run" / "config.json").write_text('{"config": {"epochs": 400}}')
    assert "TOO LATE" in queue.status()


def test_records_come_back_in_one_archive(tmp_path: pathlib.Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    jobs = [
        Job(recipe="fake", name=f"run{seed}", minutes=0.01, seed=seed,
            command=(sys.executable, "-c", RUN, "{out}", "--seed", str(seed)))
        for seed in (0, 1)
    ]  # fmt: skip
    jobs.append(job("dead", "mkdir {out}; echo no data; exit 1"))
    queue = Queue(jobs, work, slots=2, minutes=1, reserve=1)
    assert not queue.run()
    (archive,) = gpu_queue.collect(work, out)
    with tarfile.open(archive) as tar:
        names = set(tar.getnames())
    assert {"queue.json", "queue.log", "logs/run0.log", "logs/dead.log", "runs/run1/result.json"} <= names
    assert not any("weights" in name or name.startswith("runs/dead") for name in names)


def test_collect_brings_back_weights_of_unfinished_runs_in_parts(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    torch.set_default_dtype(torch.float32)
    work, out = tmp_path / "work", tmp_path / "out"
    config = dataclasses.replace(experiments.find("digits").make(), epochs=2, limit=60, hidden=20, batch=30)
    runs.train("digits", config, work / "runs" / "long", page=False)
    (work / "runs" / "long" / "result.json").unlink()  # as if it was still running
    (work / "runs" / "started").mkdir()
    arguments = ["collect", "--work", str(work), "--out", str(out), "--part", "0.002"]
    for _ in range(2):  # a later export replaces the earlier one
        assert gpu_queue.main([*arguments, "--weights", "float32"]) == 0
    parts = sorted(out.glob("exports.tar.gz.*"))
    assert len(parts) > 1
    assert not (out / "exports.tar.gz").exists()
    assert all(part.stat().st_size <= 0.002 * 2**20 for part in parts)
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as tar:
        tar.extractall(tmp_path / "back", filter="data")
    trained, back = (runs.load(path).model for path in (work / "runs" / "long", tmp_path / "back" / "exports" / "long"))
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), back.parameters(), strict=True))


@contextlib.contextmanager
def background(folder: pathlib.Path, command: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], pathlib.Path]]:
    """Start a queue with one job in a separate process, wait for the job, and yield the process and its folder."""
    work, jobs = folder / "work", folder / "jobs.json"
    jobs.write_text(json.dumps([{"recipe": "fake", "name": "one", "minutes": 0.01, "command": command}]))
    arguments = ["run", str(jobs), "--work", str(work), "--minutes", "1", "--out", str(folder / "out")]
    with subprocess.Popen([sys.executable, str(SCRIPT), *arguments], stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: (work / "queue.log").exists() and "started" in (work / "queue.log").read_text())
            yield process, work
        finally:
            process.terminate()


def test_watch_follows_a_queue_in_the_background(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    with background(tmp_path, ["sh", "-c", wait_for("go")]) as (process, work):
        assert gpu_queue.watch(work, 0.1) == 3
        (work / "runs" / "go.ready").touch()
        assert gpu_queue.watch(work, PATIENCE) == 0
        assert process.wait(PATIENCE) == 0
    assert "finished one" in capfd.readouterr().out
    assert (tmp_path / "out" / "records.tar.gz").exists()


def test_watch_reports_a_dead_queue(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    with background(tmp_path, ["sleep", "5"]) as (process, work):
        process.kill()
        assert gpu_queue.watch(work, PATIENCE) == 1
    assert "died" in capfd.readouterr().out


def test_terminated_queue_stops_its_jobs(tmp_path: pathlib.Path) -> None:
    with background(tmp_path, ["sh", "-c", "echo $$; exec sleep 60"]) as (process, work):
        log = work / "logs" / "one.log"
        wait_until(lambda: log.read_text().strip())
        process.terminate()
        assert process.wait(PATIENCE) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text().split()[0]), 0)
    assert json.loads((work / "queue.json").read_text())["jobs"][0]["status"] == "stopped"


@pytest.mark.parametrize("path", sorted((SCRIPT.parent / "jobs").iterdir()), ids=lambda path: path.stem)
def test_lists_of_missing_rows_name_recipes_and_fit_a_session(path: pathlib.Path) -> None:
    jobs, comment = read_jobs(path), path.read_text()
    slots, minutes = (int(re.search(rf"--{name} (\d+)", comment)[1]) for name in ("slots", "minutes"))  # pyright: ignore
    assert sum(job.minutes for job in jobs) / slots <= minutes <= 28
    for job in jobs:
        recipe = experiments.find(job.recipe).make()
        epochs = dict(zip(job.options, job.options[1:], strict=False)).get("--epochs", recipe.epochs)
        assert 0 < int(epochs) <= recipe.epochs
