"""``egru`` itself: help, version, ``info`` and ``bench``."""

import runpy
import sys

import pytest

import egru
from egru import bench, cli
from egru.cli.exit_codes import MEANINGS, ExitCode

COMMANDS = [
    "train", "evaluate", "report", "export", "quieten", "sweep", "list", "reproduce", "bench", "demo", "doctor",
    "info",
]  # fmt: skip


def exit_code(arguments: list[str]) -> int | str | None:
    """Return the exit code of ``egru``, whether it returns or exits."""
    try:
        return cli.main(arguments)
    except SystemExit as stop:
        return stop.code or 0


def test_info_names_every_kernel(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in egru.kernels.info())


def test_version(capsys):
    assert exit_code(["--version"]) == 0
    assert capsys.readouterr().out == f"egru {egru.__version__}\n"


def test_help_documents_every_exit_code(capsys):
    assert set(MEANINGS) == set(ExitCode)
    assert exit_code(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {code:<4} {meaning}\n" in printed for code, meaning in MEANINGS.items())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_description(name, capsys):
    assert exit_code([name, "--help"]) == 0
    usage, description = capsys.readouterr().out.split("\n\n")[:2]
    assert usage.startswith(f"usage: egru {name}")
    assert description[0].isupper()
    assert description.endswith(".")


def test_bench_passes_options_to_the_benchmark(monkeypatch):
    calls = []
    monkeypatch.setattr(bench, "run", lambda module, arguments=(): calls.append((module, list(arguments))) or 0)
    assert cli.main(["bench", "cpu", "infer", "--rounds", "3"]) == 0
    assert cli.main(["bench", "gpu", "train", "--rows", "ptb"]) == 0
    assert cli.main(["bench", "cpu"]) == 0
    assert calls == [
        ("infer_cpu", ["--rounds", "3"]),
        ("train_gpu", ["--rows", "ptb"]),
        ("infer_cpu", []),
        ("train_cpu", []),
        ("small_cpu", []),
        ("lstm_cpu", []),
    ]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ([], "{cpu,gpu}"),
        (["cpu"], "{infer,train,small,lstm}"),
        (["cpu", "infer"], "--sizes"),
        (["cpu", "train"], "--activity"),
        (["cpu", "small"], "--units"),
        (["cpu", "lstm"], "--activity"),
        (["gpu"], "{infer,train,small,lstm}"),
        (["gpu", "train"], "--rows"),
        (["gpu", "small"], "--precisions"),
        (["gpu", "lstm"], "--rows"),
    ],
)
def test_bench_help_shows_the_options_of_the_benchmark(arguments, option, capsys):
    assert exit_code(["bench", *arguments, "--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: egru bench")
    assert option in printed


@pytest.mark.parametrize("module", [module for modules in bench.BENCHMARKS.values() for module in modules.values()])
@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
def test_benchmarks_run_as_modules(module, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(f"egru.bench.{module}", run_name="__main__")
    assert capsys.readouterr().out.startswith("usage: egru bench")
    assert stopped.value.code in (None, 0)
