"""Check the shell commands of the documentation: all are accepted, and those that need nothing special run.

A command is left out if it installs or builds the package, which `make setup` does before any test, or if it names a
GPU or a data set that has to be downloaded. Other commands that a test cannot run
carry a comment before their block, ``<!-- not run: REASON -->``, with one of ``REASONS``.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from egru import cli, compiled, runs, sweep
from egru.cli.arguments import UsageError
from egru.cli.parser import make_parser

ROOT = Path(__file__).parent.parent
PAGES = [page for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]) if page.name != "CHANGELOG.md"]
REASONS = {
    "data": "needs published data, or a run that was trained on them",
    "minutes": "takes minutes",
    "tools": "needs other tools or an energy counter",
    "another test": "run by the test that the comment names",
}
COMMAND = re.compile(r"^(?: {4}|!|\$ )?((?:egru|torchrun|python|make|pip|cmake|\.venv/bin/pre-commit) .*)$")
ROW = re.compile(r"^\| `(egru [^`]+ [^`]+)` \|")
MARK = re.compile(r"^<!-- not run: ([a-z ]+?)(?: \((.*)\))? -->$")
DATA = re.compile(r"^p?smnist|^ptb|^wikitext2|^dvs")
"""Recipes whose data have to be downloaded."""


class Command(NamedTuple):
    page: Path
    line: str
    words: list[str]
    mark: str
    """The reason of a comment before the block; empty if there is none."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.line}"

    @property
    def left_out(self) -> str:
        """Why no test runs the command; empty if one does."""
        text = " ".join(self.words)
        if self.words[0] in ("pip", "cmake", ".venv/bin/pre-commit"):
            return "install"
        if re.search(r"--device cuda|bench gpu|cuda:0|--nnodes|--nproc-per-node 8", self.line):
            return "GPU"
        trains = re.match(r"egru (?:train|sweep|evaluate|quieten) (\S+)", text)
        return "data" if trains and DATA.match(trains[1]) else self.mark


def shell_commands() -> Iterator[Command]:
    """Yield the commands of the documentation: indented lines, shell blocks, cells, and first columns of tables."""
    for page in PAGES:
        mark, fenced, inside = "", False, False
        for line in page.read_text().replace("\\\n", " ").splitlines():
            if found := MARK.match(line):
                mark, inside = found[1], False
                assert mark in REASONS, f"{page.name}: {line}; reasons: {', '.join(REASONS)}"
                assert mark != "another test" or (ROOT / (found[2] or "?")).is_file(), f"{page.name}: {line}"
                continue
            if line.startswith("```"):
                fenced, inside = not fenced, True
            if not fenced and inside and not line.strip():
                mark = ""  # the block ends
            inside = inside or bool(line.strip())
            if found := COMMAND.match(line) or ROW.match(line):
                words = shlex.split(re.split(r" \|+ | > | 2>&1", found[1])[0], comments=True)
                if words[0] == "torchrun" and "egru" in words:
                    words = words[words.index("egru") :]
                yield Command(page, found[1], words, mark)


def refusal(program: str, *arguments: str) -> str:
    """Return why a command does not exist or does not accept its options. An empty string if it does."""
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return "" if arguments[0] in targets else "there is no such target"
    if program == "python":
        script = next((word for word in arguments if word.endswith(".py")), "mine.py")
        return "" if script == "mine.py" or (ROOT / script).exists() else "there is no such file"
    if program == "pip":
        extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
        unknown = [name for word in arguments for name in re.findall(r"\[(.*)\]", word) if name not in extras]
        return f"there is no extra {unknown[0]}" if unknown else ""
    if program == "cmake":
        options = re.findall(r"-D(EGRU_\w+)", " ".join(arguments))
        unknown = [name for name in options if f"option({name} " not in (ROOT / "CMakeLists.txt").read_text()]
        return f"there is no option {unknown[0]}" if unknown else ""
    if program.endswith("pre-commit"):
        return "" if (ROOT / ".pre-commit-config.yaml").is_file() else "there is no configuration of pre-commit"
    trains = arguments[0] in ("train", "sweep") and "--resume" not in arguments and "RECIPE" not in arguments
    if trains and len(arguments) > 1:
        code = cli.main([word for word in arguments if word != "--help"])
        return "" if code == cli.ExitCode.INTERRUPTED else f"exit code {code}"
    try:
        options, extra = make_parser().parse_known_args(arguments)
        return "" if options.takes_extra or not extra else f"unknown {extra}"
    except (SystemExit, UsageError) as error:
        return str(error)


def test_commands_in_the_documentation_are_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Options are parsed as in a real run. Only the work is left out."""

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "train", stop)
    monkeypatch.setattr(sweep, "sweep", stop)
    monkeypatch.chdir(tmp_path)
    Path("space.py").write_text("def search(trial):\n    return {}\n")
    commands = list(shell_commands())
    assert len(commands) > 60
    assert not [f"{command}: {reason}" for command in commands if (reason := refusal(*command.words))]


def test_marks_are_needed() -> None:
    """A comment without a command after it, or before a command that is left out anyway, is out of date."""
    marks = sum(len(re.findall("^<!-- not run:", page.read_text(), re.MULTILINE)) for page in PAGES)
    blocks = {(command.page, command.mark) for command in shell_commands() if command.left_out == command.mark != ""}
    assert marks >= len(blocks) > 0
    pages = {page for page, _ in blocks}
    assert not [page.name for page in PAGES if "<!-- not run:" in page.read_text() and page not in pages]


SPACE = """
def search(trial):
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)}
"""
BEFORE = ("egru train digits-gru --smoke --epochs 1 --out runs/gru", "egru train digits --smoke --epochs 1 --out RUN")
"""Commands that make the folders which other commands read."""
FASTER = {
    "egru train digits --hidden 64": " --smoke --epochs 1",
    "egru convert runs/gru events --activity": " --epochs 1",
    "torchrun --standalone": " --smoke --epochs 1",
}


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", BROWSER="true")
    environment["PYTHONPATH"] = str(ROOT / "src")
    words = re.sub(r"^egru ", f"{shlex.quote(sys.executable)} -m egru ", line)
    words = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", words)
    return subprocess.run(
        words, shell=True, executable="/bin/bash", cwd=folder, env=environment, capture_output=True, text=True
    )


def runnable(page: Path) -> list[str]:
    lines = [command.line for command in shell_commands() if command.page == page and not command.left_out]
    return [line for i, line in enumerate(lines) if line not in lines[:i]]


RUN_PAGES = sorted({command.page for command in shell_commands() if not command.left_out})


@pytest.mark.slow
@pytest.mark.skipif(compiled.core is None, reason=f"requires the compiled core: {compiled.missing}")
@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.stem)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    """Run every command that is not left out, in the order of the page, in a new folder."""
    pytest.importorskip("sklearn")
    (tmp_path / "space.py").write_text(SPACE)
    lines = [line for line in runnable(page) if "onnx" not in line or importlib.util.find_spec("onnxscript")]
    before = [line for line in BEFORE if any(line.split()[-1] in words for words in map(str.split, lines))]
    for line in [*before, *lines]:
        out = {"events", "OUT", "small", "sparser", "firmware", "portable"} & set(line.split())
        for name in out:  # several examples write the same folder
            if (tmp_path / name).exists():
                (tmp_path / name).rename(tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}")
        faster = next((more for start, more in FASTER.items() if line.startswith(start)), "")
        command = line.partition("  #")[0] + faster
        completed = shell(command, tmp_path)
        assert completed.returncode == 0, f"{command}\n{completed.stdout[-2000:]}\n{completed.stderr[-2000:]}"
