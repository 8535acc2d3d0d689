"""Wrong command lines: each ends with its documented exit code and one plain sentence, where possible a suggestion."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from egru import cli
from egru.cli.exit_codes import ExitCode
from tests.helpers import PATIENCE

FAILED, USAGE = ExitCode.FAILED, ExitCode.USAGE_OR_MISSING_FILE

WRONG = [
    # the command
    ("", USAGE, "a COMMAND is required; see `egru --help`"),
    ("trian digits", USAGE, "unknown command 'trian' (did you mean train?); see `egru --help`"),
    ("zzz", USAGE, "unknown command 'zzz', choose from train, evaluate, report"),
    ("--hlep", USAGE, "unknown option --hlep (did you mean --help?); see `egru --help`"),
    ("--vers", USAGE, "unknown option --vers (did you mean --version?)"),
    # options
    ("evaluate smnist --splt test", USAGE, "unknown option --splt (did you mean --split?); see `egru evaluate --help`"),
    ("evaluate smnist --split tset", USAGE, "--split: unknown value 'tset' (did you mean test?)"),
    ("evaluate smnist extra", USAGE, "unexpected argument 'extra'; see `egru evaluate --help`"),
    ("evaluate smnist --device", USAGE, "--device: expected one argument"),
    ("evaluate", USAGE, "the following arguments are required: RUN"),
    ("export run", USAGE, "the following arguments are required: FOLDER"),
    ("export run new --weights bfloat", USAGE, "--weights: unknown value 'bfloat' (did you mean bfloat16?)"),
    ("export run new --target c --weights bfloat16", USAGE, "supports --weights float32, int8, integer; got b"),
    ("export run new --target c --part 3", USAGE, "--part requires --target run"),
    ("export run new --name net", USAGE, "--name requires --target c"),
    ("export smnist new --target c --name 1st", FAILED, "name must be a C identifier"),
    ("export run new --part 0", USAGE, "--part: must be a positive number, got '0'"),
    ("export run new --part big", USAGE, "--part: must be a positive number, got 'big'"),
    ("quieten run new --within nan", USAGE, "--within: must be a non-negative number, got 'nan'"),
    ("quieten run new --floor inf", USAGE, "--floor: must be a number, got 'inf'"),
    ("info --all", USAGE, "unknown option --all; see `egru info --help`"),
    # recipes and their fields
    ("train", USAGE, "a RECIPE (see `egru list`) or --resume RUN is required"),
    ("train smnits", USAGE, "unknown recipe 'smnits'; did you mean smnist"),
    ("train digits --hiden 64", USAGE, "unknown option --hiden (did you mean --hidden?)"),
    ("train digits --hiden=64", USAGE, "unknown option --hiden (did you mean --hidden?)"),
    ("train digits --minuts 5", USAGE, "unknown option --minuts (did you mean --minutes?)"),
    ("train digits --threshold.men -2", USAGE, "unknown option --threshold.men (did you mean --threshold.mean?)"),
    ("train digits --epochs many", USAGE, "--epochs: invalid literal"),
    ("train digits --epochs 0", USAGE, "epochs must be at least 1, got 0; see `egru train digits --help`"),
    ("train digits --cell rgu", USAGE, "invalid choice 'rgu'"),
    ("train digits --cell gru", USAGE, "zoneout is not supported with cell gru, got 0.1"),
    ("train digits extra", USAGE, "Unrecognized options: extra"),
    ("train digits --minutes 0", USAGE, "--minutes: must be a positive number, got '0'"),
    ("train digits --minutes nan", USAGE, "--minutes: must be a positive number, got 'nan'"),
    ("train digits --resume run", USAGE, "--resume uses the settings of the run"),
    ("train --resume run --epochs 3", USAGE, "--resume uses the settings of the run"),
    ("train smnist --smoke", USAGE, "set the root with EGRU_DATA=FOLDER"),
    ("train digits --smoke --out full", USAGE, "full exists and is not an empty folder; use a new folder"),
    ("train digits --smoke --out file", USAGE, "file exists and is not an empty folder; use a new folder"),
    ("train digits --smoke --out file/run", FAILED, "cannot create the run file/run: Not a directory"),
    ("train digits --smoke --start-from nowhere", USAGE, "nowhere is neither the folder of a run nor a pretrained"),
    # runs
    ("train --resume nowhere", USAGE, "nowhere is not a run: it has no config.json"),
    ("evaluate nowhere", USAGE, "nowhere is neither the folder of a run nor a pretrained model (smnist)"),
    ("evaluate smnits", USAGE, "nor a pretrained model (smnist); did you mean smnist?"),
    ("evaluate runs/digts", USAGE, "; did you mean runs/digits?"),
    ("evaluate full", USAGE, "full is not a run: it has no config.json"),
    ("evaluate file", USAGE, "file is neither the folder of a run nor a pretrained model (smnist)"),
    ("evaluate smnist", USAGE, "set the root with EGRU_DATA=FOLDER"),
    ("export nowhere new", USAGE, "nowhere is neither the folder of a run nor a pretrained model (smnist)"),
    ("export smnist full", USAGE, "full exists and is not an empty folder; choose another one"),
    ("quieten smnist full", USAGE, "full exists and is not an empty folder; choose another one"),
    ("report nowhere", USAGE, "nowhere is neither the folder of a run nor a pretrained model (smnist)"),
    # tables
    ("list smnits", USAGE, "unknown table 'smnits' (did you mean smnist?); the tables are digits"),
    ("reproduce nothing", USAGE, "unknown table 'nothing'; the tables are digits"),
    ("reproduce --keep nowhere", USAGE, "nowhere is not a run: it has no config.json"),
    # sweeps
    ("sweep digits", USAGE, "the following arguments are required: --search"),
    ("sweep digits --search nowhere.py", USAGE, "--search: nowhere.py does not exist"),
    ("sweep digits --search space.py --trials 0", USAGE, "--trials: must be a positive int, got '0'"),
    ("sweep digits --search space.py --objectives speed", USAGE, "objectives must be among quality, macs"),
    ("sweep digits --search space.py --pruner medain", USAGE, "unknown value 'medain' (did you mean median?)"),
    # benchmarks
    ("bench", USAGE, "a device is required: cpu or gpu; see `egru bench --help`"),
    ("bench cpx", USAGE, "unknown device 'cpx' (did you mean cpu?)"),
    ("bench gpu infer", USAGE, "there is no gpu benchmark 'infer'; choose from train, small, lstm"),
    ("bench cpu --rounds 3", USAGE, "--rounds 3: options require the name of one benchmark, infer or train"),
    ("bench cpu infer --size 590x1", USAGE, "unknown option --size (did you mean --sizes?); see `egru bench cpu infer"),
    ("bench cpu infer --sizes 590", USAGE, "--sizes: must be UNITSxINPUTS such as 590x1, got '590'"),
    ("bench cpu infer --sparsities 2", USAGE, "--sparsities: must be a number from 0 to 1, got '2'"),
    ("bench cpu infer --rounds 0", USAGE, "--rounds: must be a positive int, got '0'"),
    ("bench cpu infer --out full", USAGE, "--out: full is a folder"),
    ("bench cpu infer --out file/result.json", USAGE, "--out: cannot create the folder file: File exists"),
    ("bench cpu infer --out file", USAGE, "--out: file exists and does not hold results of this benchmark"),
    ("bench cpu train --hidden", USAGE, "--hidden: expected at least one argument"),
    ("bench cpu train --batch 0", USAGE, "--batch: must be a positive int, got '0'"),
    ("bench cpu train --open 0.5", USAGE, "--open requires --activity"),
    ("bench cpu train --memory --activity 0.1", USAGE, "--memory measures layers with activity 0.2"),
    ("bench gpu train --rows minst", USAGE, "--rows: unknown value 'minst' (did you mean smnist?)"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(defaults: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run in a folder with a file, a folder that is not empty, and a search space; without data sets."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.delenv("EGRU_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    (tmp_path / "space.py").write_text("def search(trial):\n    return {}\n")


@pytest.mark.parametrize(("line", "code", "message"), WRONG, ids=[line or "nothing" for line, *_ in WRONG])
def test_wrong_command_lines_are_refused_in_one_sentence(
    line: str, code: ExitCode, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    try:
        actual = cli.main(line.split())
    except SystemExit as stop:
        actual = stop.code
    error = capsys.readouterr().err
    assert message in error
    assert actual == code
    assert error.startswith("egru: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    assert sorted(tmp_path.rglob("*")) == before


def test_benchmark_without_a_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "gpu", "train"])
    assert stop.value.code == USAGE
    assert capsys.readouterr().err == "egru: this benchmark requires a CUDA device; see `egru bench gpu train --help`\n"


UNNEEDED = ["--help", "--version", "", "trian", "train", "train --help", "bench --help", "evaluate --splt", "bench tpu"]


@pytest.mark.parametrize("line", UNNEEDED)
def test_help_and_usage_errors_do_not_load_torch(line: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    completed = _egru(line.split(), tmp_path)
    assert "torch was imported" not in completed.stderr
    assert completed.returncode == (0 if "--help" in line or "--version" in line else USAGE)


AFTER_CTRL_C = {
    "evaluate smnist": "nothing was written and there is nothing to resume: run the command again",
    "train digits": "nothing was written and there is nothing to resume: run the command again",
    "sweep digits --search space.py": "the same command resumes the sweep and repeats unfinished trials",
    "export smnist new": "nothing was written and there is nothing to resume: run the command again",
    "report smnist": "the page may be incomplete: run the command again",
    "bench cpu infer": "a benchmark cannot be resumed: run the command again",
}


@pytest.mark.parametrize("line", AFTER_CTRL_C)
def test_ctrl_c_during_imports_says_what_can_be_resumed(line: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n")
    completed = _egru(line.split(), tmp_path)
    assert completed.stderr == f"egru: stopped; {AFTER_CTRL_C[line]}\n"
    assert completed.returncode == ExitCode.INTERRUPTED


def _egru(arguments: list[str], first_on_path: Path) -> subprocess.CompletedProcess[str]:
    """Run ``python -m egru``. Modules in ``first_on_path`` replace installed ones."""
    source = str(Path(cli.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(first_on_path), source])}
    command = [sys.executable, "-m", "egru", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
