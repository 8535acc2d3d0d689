"""``egru train``, ``evaluate``, ``list``, ``doctor`` and others: their output and exit codes."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from egru import cli, doctor
from egru.data import Classification, Split
from egru.experiments import RECIPES
from egru.records import FORMAT
from egru.training import Run
from egru.training.tasks import ClassifierTask
from tests.helpers import PATIENCE, mnist_sample, wait_until

PATH = [os.path.abspath(path) for path in sys.path]  # before a test changes the folder
SMALL = ["--smoke", "--hidden", "8", "--epochs", "2", "--limit", "60"]


@pytest.fixture(autouse=True)
def single_precision(defaults, monkeypatch, tmp_path):
    torch.set_default_dtype(torch.float32)
    monkeypatch.delenv("EGRU_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def egru(capsys, *arguments):
    code = cli.main(list(arguments))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_train_and_evaluate(capsys, tmp_path):
    code, out, err = egru(
        capsys, "train", "digits", *SMALL, "--out", "run", "--threshold.mean", "-2", "--input-dropout", "0.3"
    )
    assert (code, err) == (0, "")
    assert "epoch 2: loss" in out
    assert "test, epoch" in out
    assert "energy per epoch" in out  # measured, or not measured with the reason
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["recipe"] == "digits"
    assert stored["config"]["threshold"]["mean"] == -2
    assert stored["config"]["input_dropout"] == 0.3
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "config.json", "environment.json", "metrics.jsonl", "energy.json", "result.json", "checkpoints", "report"
    }  # fmt: skip
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    code, out, _ = egru(capsys, "evaluate", "run")
    assert code == 0
    assert f"accuracy {100 * result['test']['accuracy']:.2f} %" in out
    assert "layer0 (EGRU)" in out
    assert egru(capsys, "evaluate", "run", "--split", "validation")[0] == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_tensorboard_reads_the_metrics_of_a_run(capsys, tmp_path):
    pytest.importorskip("tensorboard", reason="requires tensorboard: pip install 'egru[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )

    assert egru(capsys, "train", "digits", *SMALL, "--out", "run", "--tensorboard")[0] == 0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    lines = Run.open(tmp_path / "run").metrics()
    for group in ("train", "validation", "activity"):
        metrics = [dataclasses.asdict(getattr(line, group)) for line in lines]
        for name, value in metrics[0].items():
            if value is None:
                continue
            points = events.Scalars(f"{group}/{name}")
            assert [point.step for point in points] == [1, 2]
            assert [point.value for point in points] == pytest.approx([values[name] for values in metrics], rel=1e-6)


def test_missing_tensorboard_is_reported(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    code, _, err = egru(capsys, "train", "digits", *SMALL, "--out", "run", "--tensorboard")
    assert code == 1
    assert "pip install 'egru[tensorboard]'" in err


@pytest.mark.parametrize("arguments", ["list", "--help", "train digits --help", "list unbuffered"])
def test_closed_pipe_is_not_an_error(arguments):
    """As in `egru list | head`. The error shows at the first line without a buffer, and at the end with one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATH)}
    if arguments.endswith("unbuffered"):
        environment["PYTHONUNBUFFERED"] = "1"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "egru", *arguments.removesuffix("unbuffered").split()]
    completed = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, env=environment, text=True, timeout=PATIENCE
    )
    os.close(writer)
    assert completed.stderr == ""
    assert completed.returncode == (0 if arguments == "--help" else 141)  # argparse ignores a closed pipe


def test_header_shows_numbers_of_the_paper_only_if_there_are_any(capsys):
    assert egru(capsys, "train", "digits", *SMALL, "--out", "run")[1].startswith("digits in run: EGRU 128\n")
    assert str(RECIPES["smnist-gru-590"].papers[0]) == "paper, Table 2: accuracy 98.8 %, 1M parameters, 1M MACs"
    assert RECIPES["digits"].papers == ()


def test_export_and_report_accept_the_name_of_a_pretrained_model(capsys, tmp_path):
    code, out, err = egru(capsys, "export", "smnist", "small", "--weights", "int8")
    assert (code, err) == (0, "")
    assert out.startswith("small/weights-1-of-1.safetensors: 1.0")
    code, out, err = egru(capsys, "report", "smnist")
    assert (code, out, err) == (0, "report/index.html\n", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report", "small"]


def test_default_run_folder_has_recipe_and_time(capsys, tmp_path):
    assert egru(capsys, "train", "digits-gru", *SMALL)[0] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("digits-gru-2")


def test_export_writes_weights_and_records(capsys, tmp_path):
    assert egru(capsys, "train", "digits", *SMALL, "--out", "run")[0] == 0
    code, out, _ = egru(capsys, "export", "run", "small", "--weights", "float32")
    assert code == 0
    assert re.match(r"small/weights-1-of-1\.safetensors: [1-9]\d*(\.\d+)? KiB$", out.splitlines()[0])
    assert sorted(path.name for path in (tmp_path / "small").iterdir()) == [
        "config.json",
        "energy.json",
        "environment.json",
        "metrics.jsonl",
        "result.json",
        "weights-1-of-1.safetensors",
    ]
    lines = [egru(capsys, "evaluate", folder)[1].splitlines()[0] for folder in ("run", "small")]
    assert lines[0] == lines[1]
    code, _, err = egru(capsys, "export", "run", "small")
    assert code == 2
    assert err == "egru: small exists and is not an empty folder; choose another one\n"


def test_device_option_evaluates_a_gpu_run_on_the_cpu(capsys, tmp_path):
    assert egru(capsys, "train", "digits", *SMALL, "--out", "run", "--precision", "bfloat16")[0] == 0
    path = tmp_path / "run" / "config.json"
    stored = json.loads(path.read_text())
    stored["config"] |= {"device": "cuda", "graph": True}
    path.write_text(json.dumps(stored))
    if not torch.cuda.is_available():
        assert "device must be cpu" in egru(capsys, "evaluate", "run")[2]
    assert egru(capsys, "evaluate", "run", "--device", "cpu")[0] == 0


def test_evaluate_accepts_the_name_of_a_pretrained_model(capsys, monkeypatch, tmp_path):
    split = Split(*(part[90:120] for part in mnist_sample()))
    data = Classification("some digits", 10, split, split, split)
    monkeypatch.setattr(sys.modules["egru.runs.load"], "load_data", lambda config: data)
    code, out, err = egru(capsys, "evaluate", "smnist")
    assert (code, err) == (0, "")
    assert out.startswith("test, epoch 28: accuracy 96.67 %, activity sparsity 97.3 %, ")  # one of 30 is wrong
    (tmp_path / "smnist").mkdir()
    assert egru(capsys, "evaluate", "smnist")[2] == "egru: smnist is not a run: it has no config.json\n"


def test_resume_continues_an_interrupted_run(capsys, monkeypatch, tmp_path):
    calls, original = 0, ClassifierTask.evaluate

    def evaluate(self, model, split, progress=None):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return original(self, model, split, progress)

    monkeypatch.setattr(ClassifierTask, "evaluate", evaluate)
    code, _, err = egru(capsys, "train", "digits", *SMALL, "--out", "run")
    assert code == 130
    assert err == "egru: stopped; `egru train --resume run` continues from the last checkpoint\n"
    assert Run.open(tmp_path / "run").newest_epoch() == 1
    code, out, _ = egru(capsys, "train", "--resume", "run")
    assert code == 0
    assert "epoch 2: loss" in out
    assert "epoch 1: loss" not in out
    page = tmp_path / "run" / "report" / "index.html"
    page.unlink()
    code, again, _ = egru(capsys, "train", "--resume", "run")
    assert code == 0
    assert "run is finished; its report page is written again" in again
    assert again.splitlines()[-2:] == out.splitlines()[-2:]  # the scores and the folder
    assert page.exists()


def test_minutes_pause_a_run(capsys, tmp_path):
    code, _, err = egru(capsys, "train", "digits", *SMALL, "--out", "run", "--minutes", "1e-9")
    assert code == 75
    assert err == "egru: the time limit was reached; epoch 1 of 2 is saved: continue with --resume run\n"
    assert egru(capsys, "train", "--resume", "run", "--minutes", "60")[0] == 0
    assert Run.open(tmp_path / "run").result() is not None


@pytest.mark.parametrize("name", ["smnist", "ptb", "wikitext2", "dvs"])
def test_missing_data_exits_with_two(name, capsys, tmp_path):
    code, _, err = egru(capsys, "train", name, "--smoke", "--out", "run")
    assert code == 2
    assert err.count("\n") == 1
    assert "http" in err
    assert "EGRU_DATA" in err
    assert not (tmp_path / "run").exists()


def test_damaged_config_is_reported_in_one_line(capsys, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"format": {FORMAT}}}')
    code, _, err = egru(capsys, "evaluate", str(tmp_path))
    assert code == 1
    assert err.startswith(f"egru: {tmp_path / 'config.json'}: recipe, kind or config is missing; ")
    assert err.count("\n") == 1


def test_verbose_shows_the_traceback(capsys):
    for arguments in (["-v", "evaluate", "nowhere"], ["evaluate", "nowhere", "-v"]):
        code, _, err = egru(capsys, *arguments)
        assert code == 2
        assert "Traceback" in err


def test_list_shows_every_recipe_by_table(capsys):
    code, out, _ = egru(capsys, "list")
    assert code == 0
    lines = out.splitlines()
    listed = sorted(line.split()[0] for line in lines if line.startswith("  "))
    twice = ["dvs-egru-1024", "smnist14-ablation-none"]  # the unchanged networks of two studies
    assert listed == sorted([*RECIPES, *twice])
    assert "Sequential MNIST (Tables 2 and S5 of the paper):" in lines
    assert "[paper, Table 2: accuracy 98.3 %, activity sparsity 72.1 %" in out
    assert egru(capsys, "list", "frames")[1].count("\n") == 4


def test_doctor_shows_kernels_packages_and_data(capsys, monkeypatch, tmp_path):
    code, out, _ = egru(capsys, "doctor")
    assert code == 0
    assert "kernel cpu" in out
    assert "safetensors" in out
    assert "data folder: not set" in out
    assert "data set MNIST: not present" in out
    monkeypatch.setenv("EGRU_DATA", str(tmp_path))
    (tmp_path / "ptb").mkdir()
    for name in ("train", "valid", "test"):
        (tmp_path / "ptb" / f"ptb.{name}.txt").write_text("no text\n")
    monkeypatch.setattr(doctor, "DATA_SETS", {"Penn Treebank": doctor.DATA_SETS["Penn Treebank"], "none": list})
    _, out, _ = egru(capsys, "doctor")
    assert "data set Penn Treebank: damaged" in out
    assert "data set none: present" in out


@pytest.mark.parametrize("arguments", [["train", "--help"], ["train", "digits", "--help"]])
def test_train_help_shows_the_fields_of_a_recipe(arguments, capsys):
    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert not code
    out = capsys.readouterr().out
    assert "egru train" in out
    assert ("--learning-rate" in out) == ("digits" in arguments)
    if "digits" in arguments:
        assert out.split("\n\n")[1].startswith("EGRU 128. The fields of this recipe are options, in addition to")


def test_sigint_stops_a_run_that_can_be_resumed(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, PATH))}
    options = ["--smoke", "--hidden", "8", "--limit", "40", "--out", "run", "--epochs", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "egru", "train", "digits", *options],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    with process:
        try:
            wait_until(lambda: process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") > 2))
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 130
    assert err.strip().splitlines()[-1].startswith("egru: stopped")
    assert "Traceback" not in err
    run = Run.open(tmp_path / "run", pytest.fail)
    assert run.newest_epoch() >= len(run.metrics()) - 1


def test_report_writes_pages(capsys, tmp_path):
    for name in ("digits", "digits-gru"):
        assert egru(capsys, "train", name, *SMALL, "--out", name)[0] == 0
    code, out, err = egru(capsys, "report", "digits", "digits-gru", "--out", "page")
    assert (code, out, err) == (0, "page/index.html\n", "")
    assert "Events saved" in (tmp_path / "page" / "index.html").read_text()
    (tmp_path / "digits" / "report" / "index.html").unlink()
    assert egru(capsys, "report", "digits")[1] == "digits/report/index.html\n"
    code, _, err = egru(capsys, "reproduce", "--keep", "digits")
    assert code == 1
    assert "used only the first 60 of each split" in err


def test_reproduce_prints_tables(capsys):
    code, out, _ = egru(capsys, "reproduce")
    assert code == 0
    assert "gestures " in out
    code, out, _ = egru(capsys, "reproduce", "frames")
    assert code == 0
    assert "2026-11-15  egru train dvs" in out
