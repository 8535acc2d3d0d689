"""The base install, without the extras: what works, and which extra an error names. And without the compiled core."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helpers import PATIENCE

ROOT = Path(__file__).parent.parent

WITHOUT_EXTRAS = """
import importlib.abc, re, sys

class Block(importlib.abc.MetaPathFinder):
    names = {"eventax", "matplotlib", "onnx", "onnxruntime", "optuna", "psycopg", "rich", "scipy", "sklearn",
             "tensorboard", "tonic", "torchdiffeq", "tyro"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
import egru
from egru import cli
from egru.data import Classification, Split
from tests.helpers import mnist_sample

sample = Split(*(part[:30] for part in mnist_sample()))
data = Classification("some digits", 10, sample, sample, sample)
"""

README = """
egru.data.sequential_mnist = lambda: data
for block in re.findall(r"```python\\n(.*?)```", open("README.md").read(), re.DOTALL):
    exec(compile(block, "README.md", "exec"), {})
"""

EVALUATE = """
import egru.runs.load
sys.modules["egru.runs.load"].load_data = lambda config: data
sys.exit(cli.main(["evaluate", "smnist", "--device", "cpu"]))
"""


def run_without_extras(code: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process that cannot import the packages of the extras."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT)))}
    environment.pop("EGRU_DATA", None)
    command = [sys.executable, "-c", WITHOUT_EXTRAS + code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def test_readme_examples_need_no_extra() -> None:
    completed = run_without_extras(README)
    assert completed.stderr == ""
    assert "rnn (EGRU)" in completed.stdout
    assert "7 7 Activity(" in completed.stdout


def test_evaluate_smnist_needs_no_extra() -> None:
    completed = run_without_extras(EVALUATE)
    assert completed.returncode == 0, completed.stderr
    assert "accuracy" in completed.stdout


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("train digits --smoke --out run", "demo"),
        ("train smnist --smoke --hidden 8 --out run", "train"),
        ("train smnist --help", "train"),
        ("sweep smnist --search space.py", "sweep"),
    ],
)
def test_missing_extras_are_named_in_one_sentence(command: str, extra: str, tmp_path: Path) -> None:
    (tmp_path / "space.py").write_text("def search(trial):\n    return {}\n")
    completed = run_without_extras(f"sys.exit(cli.main({command.split()}))", tmp_path)
    assert completed.returncode == 1
    assert completed.stderr.startswith("egru: ")
    assert completed.stderr.endswith(f"pip install 'egru[{extra}]'\n")
    assert completed.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_commands_that_need_no_extra(tmp_path: Path) -> None:
    commands = [
        ["list"],
        ["doctor"],
        ["info"],
        ["reproduce", "smnist"],
        ["export", "smnist", "new"],
        ["report", "smnist"],
    ]
    completed = run_without_extras(f"sys.exit(max(cli.main(command) for command in {commands}))", tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert completed.stderr == ""
    assert (tmp_path / "report" / "index.html").is_file()


def test_readme_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    install = (ROOT / "README.md").read_text().split("## Install\n")[1].split("\n## ")[0]
    assert [name for name in extras if f"`{name}`" not in install and name != "test"] == []


WITHOUT_CORE = """
import sys, warnings
sys.modules["egru._core"] = None
import torch, egru
from egru import cli
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        egru.EGRU(2, 3)(torch.zeros(4, 1, 2))
print([str(warning.message) for warning in caught if "egru" in str(warning.message)])
cli.main(["doctor"])
"""


def test_warning_and_doctor_name_the_command_that_builds_the_core() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    completed = subprocess.run(
        [sys.executable, "-c", WITHOUT_CORE], env=environment, capture_output=True, text=True, check=True
    )
    warning, *doctor = completed.stdout.splitlines()
    remedy = "install a C++17 compiler, then run `pip cache remove egru; pip install --force-reinstall --no-deps egru`"
    assert warning.count("egru runs in plain torch, which is slow: ") == 1
    assert remedy in warning
    (line,) = [line for line in doctor if line.startswith("kernel cpu:")]
    assert remedy in line
