"""Train a list of recipes side by side on one GPU within a time limit, and collect their records.

    python benchmarks/gpu_queue.py run JOBS --work /tmp/queue --slots 3 --memory 120 --minutes 18 --out OUT
    python benchmarks/gpu_queue.py watch --work /tmp/queue --seconds 560    # follow a queue that runs in the background
    python benchmarks/gpu_queue.py set --work /tmp/queue --slots 2          # change the limits of a running queue
    python benchmarks/gpu_queue.py collect --work /tmp/queue --out OUT      # pack the records of what has ended so far
    python benchmarks/gpu_queue.py collect --work /tmp/queue --out OUT --weights int8 --part 15   # and weights so far

JOBS is a file as described in gpu_jobs.py. The folder benchmarks/jobs has lists of the rows that were not run yet.

Recipes that keep the GPU busy, such as smnist, gain nothing side by side: an epoch takes 3.5 s alone on an H200,
7.3 s with two runs and 10.8 s with three. Two more gesture runs raise it to 12.4 s. Give large networks a
large ``--save-every``: a checkpoint of 15.7M parameters takes 0.8 s, an epoch of gestures on a free GPU 0.05 s.

Jobs with the lowest ``priority`` start first, and among them the longest. A job starts when a slot is free, its memory
fits and its minutes fit the time left; a job that does not fit is passed over for one that does. Each job is one
``python -m egru train`` process that logs to ``WORK/logs/NAME.log`` and trains in ``WORK/runs/NAME``.

``run`` writes ``records.tar.gz`` to OUT (per run: config.json, environment.json, metrics.jsonl and result.json,
plus all logs and queue.json) and, for jobs with ``export``, ``exports.tar.gz``. ``collect --weights`` also exports the
best weights so far of unfinished runs, so that a lost machine costs less, and ``--part`` splits large archives.

To outlive the command that starts it, run it as ``setsid nohup python benchmarks/gpu_queue.py run ... > /dev/null 2>&1
&`` and follow it with ``watch``, which exits with 0 when the queue has ended, 1 when it died and 3 when it is still
running.
"""

import argparse
import collections
import contextlib
import dataclasses
import datetime
import fnmatch
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from gpu_jobs import Job, read_jobs
from gpu_logs import cut, gpu_load, last_epoch, last_lines, nvidia_smi
from gpu_records import LIMITS, LOG, PID, QUEUE, collect, export_unfinished, watch


@dataclasses.dataclass
class Attempt:
    """A job with the state of its process."""

    job: Job
    status: str = "waiting"
    """One of waiting, running, finished, failed, stopped (by the queue) and not started."""
    started: float | None = None
    """Seconds since the start of the queue."""
    seconds: float | None = None
    exit_code: int | None = None
    process: subprocess.Popen[bytes] | None = None
    export: subprocess.Popen[bytes] | None = None

    def to_dict(self, common: Sequence[str]) -> dict[str, Any]:
        """Return the entry of the job in ``queue.json``."""
        plain = {name: getattr(self, name) for name in ("status", "started", "seconds", "exit_code")}
        command = self.job.command or self.job.train_command(common)
        return dataclasses.asdict(self.job) | plain | {"command": shlex.join(command)}


class Queue:
    """Jobs that share one GPU.

    Args:
        jobs: What to run.
        work: Folder for runs, logs and the state of the queue.
        slots: Largest number of jobs at a time.
        memory: Largest sum of the jobs' declared memory, and of memory in use on the GPU, in GiB.
        minutes: Time limit. All jobs have ended when it is reached.
        common: Options for every job, before its own.
        reserve: Seconds before the limit at which running jobs are stopped.
        ramp: Seconds between the starts of two jobs, to see what each one costs the others.
        tick: Seconds between two status lines.
        threads: CPU threads per job; by default the cores divided by the slots.
    """

    poll = 0.2
    """Seconds between two looks at the processes."""
    grace = 5.0
    """Seconds between the interrupt that stops a job and the signal that kills it."""

    def __init__(
        self,
        jobs: Iterable[Job],
        work: pathlib.Path,
        *,
        slots: int = 2,
        memory: float = 120.0,
        minutes: float = 20.0,
        common: Sequence[str] = (),
        reserve: float = 15.0,
        ramp: float = 0.0,
        tick: float = 20.0,
        threads: int | None = None,
    ) -> None:
        ordered = sorted(jobs, key=lambda job: (job.priority, -job.minutes))  # stable: equal jobs keep their order
        self.attempts = [Attempt(job) for job in ordered]
        self.work, self.common, self.reserve, self.ramp, self.tick = work, tuple(common), reserve, ramp, tick
        self.slots, self.memory, self.limit = slots, memory, 60 * minutes
        self.threads = threads or max(1, (os.cpu_count() or 1) // slots)
        self.begun = time.monotonic()
        self.interrupted = False
        self._last_start = -float("inf")
        self._memory = (-float("inf"), 0.0)
        self._limits: dict[str, Any] = {}
        for folder in ("runs", "logs", "exports"):
            (work / folder).mkdir(parents=True, exist_ok=True)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    @property
    def left(self) -> float:
        """Seconds until running jobs are stopped."""
        return self.limit - self.reserve - self.elapsed

    @property
    def running(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.status == "running"]

    @property
    def waiting(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.status == "waiting"]

    def run(self) -> bool:
        """Run all jobs that fit the time limit.

        Returns:
            Whether every job finished.
        """
        (self.work / PID).write_text(f"{os.getpid()}\n")
        self.log(f"{len(self.attempts)} jobs, {self.slots} at a time, {self.memory:g} GiB, {self.limit / 60:.1f} min")
        shown = -float("inf")
        while not self.interrupted and self.left > 0:
            self.reap()
            self.read_limits()
            self.start_jobs()
            if not self.running:  # whatever is waiting does not fit the time left
                break
            if self.elapsed - shown >= self.tick:
                shown = self.elapsed
                self.log(self.status())
                self.write_state()
            time.sleep(self.poll)
        self.stop_jobs()
        self.finish_exports()
        for attempt in self.waiting:
            attempt.status = "not started"
            self.log(f"not started: {attempt.job.name} (needs {attempt.job.minutes:g} min)")
        counts = collections.Counter(attempt.status for attempt in self.attempts)
        self.log("ended: " + ", ".join(f"{count} {status}" for status, count in counts.items()))
        self.write_state(ended=True)
        return counts["finished"] == len(self.attempts)

    def start_jobs(self) -> None:
        """Start waiting jobs while slots, memory and time allow."""
        for attempt in self.waiting:
            running = self.running
            if len(running) >= self.slots or (running and self.elapsed - self._last_start < self.ramp):
                return
            if 60 * attempt.job.minutes > self.left:
                continue
            declared = sum(other.job.memory for other in running)
            if running and max(declared, self.used_memory()) + attempt.job.memory > self.memory:
                continue
            self.start(attempt)

    def used_memory(self) -> float:
        """Return the memory in use on the GPU in GiB, at most five seconds old; 0 without nvidia-smi."""
        if self.elapsed - self._memory[0] > 5:
            values = nvidia_smi("memory.used")
            self._memory = self.elapsed, values[0] / 1024 if values else 0.0
        return self._memory[1]

    def start(self, attempt: Attempt) -> None:
        """Start the process of one job."""
        job = attempt.job
        command = job.process_command(self.common, self.work / "runs" / job.name)
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(self.threads)}
        self._last_start = attempt.started = self.elapsed
        with (self.work / "logs" / f"{job.name}.log").open("wb") as log:
            try:
                attempt.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                attempt.status, attempt.seconds = "failed", 0.0
                self.log(f"failed to start {job.name}: {error}")
                return
        attempt.status = "running"
        self.log(f"started {job.name}")

    def reap(self) -> None:
        """Record the jobs whose processes have ended."""
        for attempt in self.running:
            assert attempt.process is not None
            if (code := attempt.process.poll()) is not None:
                self.end(attempt, "finished" if code == 0 else "failed", code)

    def end(self, attempt: Attempt, status: str, code: int) -> None:
        """Record the end of one job, and start the export of its weights."""
        assert attempt.started is not None
        attempt.status, attempt.exit_code, attempt.seconds = status, code, self.elapsed - attempt.started
        log = self.work / "logs" / f"{attempt.job.name}.log"
        lines = last_lines(log, 1 if status == "finished" else 6, skip="everything is in")
        self.log(
            f"{status} {attempt.job.name} after {attempt.seconds:.0f} s (exit code {code}): "
            + " | ".join(cut(line) for line in lines)
        )
        self.write_state()
        if status == "finished" and attempt.job.export:
            folders = [str(self.work / kind / attempt.job.name) for kind in ("runs", "exports")]
            command = [sys.executable, "-m", "egru", "export", *folders, "--weights", attempt.job.export]
            with log.open("ab") as file:
                attempt.export = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
                )

    def stop_jobs(self) -> None:
        """Interrupt running jobs, and kill those that have not ended after ``grace`` seconds."""
        for attempt in self.running:
            self.signal(attempt, signal.SIGINT)
        deadline = time.monotonic() + self.grace
        for attempt in self.running:
            assert attempt.process is not None
            try:
                code = attempt.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.signal(attempt, signal.SIGKILL)
                code = attempt.process.wait()
            self.end(attempt, "finished" if code == 0 else "stopped", code)

    def finish_exports(self, seconds: float = 30.0) -> None:
        """Wait for the exports, and for no longer than ``seconds``."""
        deadline = time.monotonic() + min(seconds, max(1.0, self.limit - self.elapsed))
        for attempt in self.attempts:
            if attempt.export is None:
                continue
            try:
                code = attempt.export.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                attempt.export.kill()
                code = attempt.export.wait()
            if code:
                self.log(f"failed to export {attempt.job.name} (exit code {code}); see its log")

    def read_limits(self) -> None:
        """Take over limits that ``set`` wrote."""
        try:
            limits = json.loads((self.work / LIMITS).read_text())
        except (OSError, ValueError):
            return
        if limits == self._limits:
            return
        self._limits = limits
        self.slots, self.memory = limits.get("slots", self.slots), limits.get("memory", self.memory)
        self.limit, self.ramp = 60 * limits.get("minutes", self.limit / 60), limits.get("ramp", self.ramp)
        self.log(
            f"limits are now {self.slots} slots, {self.memory:g} GiB, {self.limit / 60:.1f} min, {self.ramp:g} s "
            "between starts"
        )

    def status(self) -> str:
        """Return one line on the queue, and one per running job with its last epoch."""
        counts = collections.Counter(attempt.status for attempt in self.attempts)
        parts = [f"{counts[status]} {status}" for status in ("running", "waiting", "finished", "failed")]
        lines = [f"{', '.join(parts)}; {self.left:.0f} s left; GPU {gpu_load()}"]
        for attempt in self.running:
            assert attempt.started is not None
            seconds = self.elapsed - attempt.started
            epoch = last_epoch(self.work / "logs" / f"{attempt.job.name}.log")
            lines.append(f"  {attempt.job.name} [{seconds:.0f} s]: {cut(epoch)}{self.forecast(attempt, seconds)}")
        return "\n".join(lines)

    def forecast(self, attempt: Attempt, seconds: float) -> str:
        """Return when a job will end at its present speed, and whether that is too late."""
        epoch = re.match(r"epoch (\d+)", last_epoch(self.work / "logs" / f"{attempt.job.name}.log"))
        try:
            config = json.loads((self.work / "runs" / attempt.job.name / "config.json").read_text())
            epochs = config["config"]["epochs"]
        except (OSError, ValueError, KeyError):
            return ""
        if epoch is None:
            return ""
        more = seconds * (epochs / int(epoch[1]) - 1)
        return f"; ends in {more:.0f} s" + (" (TOO LATE)" if more > self.left else "")

    def signal(self, attempt: Attempt, number: signal.Signals) -> None:
        """Send a signal to a job and all its children."""
        assert attempt.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(attempt.process.pid, number)

    def log(self, message: str) -> None:
        """Print a message, and add it to the queue's log."""
        text = f"[{self.elapsed:6.1f}] {message}"
        with (self.work / LOG).open("a", encoding="utf-8") as log:
            log.write(text + "\n")
        with contextlib.suppress(BrokenPipeError, OSError):
            print(text, flush=True)

    def write_state(self, ended: bool = False) -> None:
        """Write ``queue.json``."""
        state = {
            "ended": ended,
            "elapsed": self.elapsed,
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "jobs": [attempt.to_dict(self.common) for attempt in self.attempts],
        }
        new = self.work / f".{QUEUE}"
        new.write_text(json.dumps(state, indent=2) + "\n")
        new.replace(self.work / QUEUE)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="action", required=True)
    run = commands.add_parser("run", help="run a list of jobs")
    run.add_argument("jobs", type=pathlib.Path, help="JSON or text file")
    run.add_argument("--common", type=shlex.split, default=[], help="options for every job, as one string")
    run.add_argument("--reserve", type=float, default=15.0, help="seconds before the limit to stop jobs at (15)")
    run.add_argument("--tick", type=float, default=20.0, help="seconds between two status lines (20)")
    run.add_argument("--threads", type=int, help="CPU threads per job (cores divided by slots)")
    run.add_argument("--only", default="*", help="run only the jobs whose name matches this pattern")
    run.add_argument("--out", type=pathlib.Path, help="where the archives go at the end")
    follow = commands.add_parser("watch", help="follow a running queue")
    follow.add_argument("--seconds", type=float, default=560.0, help="how long (560)")
    change = commands.add_parser("set", help="change the limits of a running queue")
    pack = commands.add_parser("collect", help="pack the records")
    pack.add_argument("--out", type=pathlib.Path, required=True, help="where the archives go")
    pack.add_argument("--weights", help="also export unfinished runs: float32, bfloat16 or int8")
    for command in (run, pack):
        command.add_argument("--part", type=float, help="split archives larger than this many MiB")
    for command in (run, follow, change, pack):
        command.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/queue"), help="(/tmp/queue)")
    for command, slots, memory, ramp in ((run, 2, 120.0, 0.0), (change, None, None, None)):
        command.add_argument("--slots", type=int, default=slots, help="jobs at a time (2)")
        command.add_argument("--memory", type=float, default=memory, help="GiB of GPU memory for all jobs (120)")
        command.add_argument("--ramp", type=float, default=ramp, help="seconds between the starts of two jobs (0)")
        command.add_argument("--minutes", type=float, required=command is run, help="time limit of the whole queue")
    return parser


def run_queue(options: argparse.Namespace) -> int:
    """Run the jobs of the command line; the exit code is 1 if a job did not finish."""
    jobs = [job for job in read_jobs(options.jobs) if fnmatch.fnmatch(job.name, options.only)]
    queue = Queue(
        jobs, options.work, slots=options.slots, memory=options.memory, minutes=options.minutes,
        common=options.common, reserve=options.reserve, ramp=options.ramp, tick=options.tick, threads=options.threads,
    )  # fmt: skip

    def interrupt(*_: object) -> None:
        queue.interrupted = True

    # Handlers also undo the ignored SIGINT that a shell gives background processes: children would inherit it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    complete = queue.run()
    if options.out is not None:
        for path in collect(options.work, options.out, options.part):
            queue.log(f"{path}: {path.stat().st_size / 2**20:.2f} MiB")
    return 0 if complete else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = parser().parse_args(arguments)
    match options.action:
        case "run":
            return run_queue(options)
        case "watch":
            return watch(options.work, options.seconds)
        case "set":
            given = {name: getattr(options, name) for name in ("slots", "memory", "minutes", "ramp")}
            (options.work / LIMITS).write_text(json.dumps({k: v for k, v in given.items() if v is not None}))
        case _:
            if options.weights is not None:
                print("exported", ", ".join(export_unfinished(options.work, options.weights)) or "nothing")
            for path in collect(options.work, options.out, options.part):
                print(f"{path}: {path.stat().st_size / 2**20:.2f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
