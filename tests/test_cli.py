import runpy

import pytest

import egru
from egru import cli


def test_info_names_every_kernel(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in egru.kernels.info())


def test_bench_runs_the_scripts_with_their_options(monkeypatch):
    ran = []
    monkeypatch.setattr(
        runpy, "run_path", lambda path, run_name: ran.append((path.rsplit("/", 1)[1], list(cli.sys.argv[1:])))
    )
    monkeypatch.setattr(cli.sys, "argv", [])
    monkeypatch.setattr(cli.sys, "path", list(cli.sys.path))
    assert cli.main(["bench", "cpu", "--rounds", "3"]) == 0
    assert ran == [("infer_cpu.py", ["--rounds", "3"]), ("train_cpu.py", ["--rounds", "3"])]
    ran.clear()
    assert cli.main(["bench", "cpu", "train"]) == 0
    assert ran == [("train_cpu.py", [])]
    ran.clear()
    assert cli.main(["bench", "gpu"]) == 0
    assert ran == [("train_gpu.py", [])]


def test_bench_without_the_repository(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "a" / "b" / "cli.py"))
    assert cli.main(["bench", "cpu"]) == 2
    assert "needs the repository" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["bench"], ["bench", "tpu"], ["info", "--all"], ["train"]])
def test_bad_commands_exit_with_two(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: egru" in capsys.readouterr().err
