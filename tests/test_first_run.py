"""The README's examples and the demo."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import egru
from egru.data import Classification
from tests.helpers import mnist_sample

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)


def test_readme_examples_run(capsys, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    layer, engine = blocks
    assert sum(bool(line.strip()) for line in layer.splitlines()) <= 15
    exec(compile(layer, "README.md", "exec"), {})
    assert "rnn (EGRU)" in capsys.readouterr().out
    digits = Classification("some digits", 10, *[mnist_sample()] * 3)
    monkeypatch.setattr(egru.data, "sequential_mnist", lambda: digits)
    exec(compile(engine, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("7 7 Activity(steps=784, ")


def load_example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("options", [[], ["--permuted"], ["--precision", "bfloat16"]])
def test_demo_writes_a_report(options, tmp_path, capsys):
    page = load_example("digits").main(["--epochs", "2", "--hidden", "8", "--report", str(tmp_path / "out"), *options])
    assert page.read_text().startswith("<!")
    assert {p.suffix for p in page.parent.iterdir()} >= {".png", ".html", ".json"}
    runs = json.loads((page.parent / "report.json").read_text())["runs"]
    assert [run["name"] for run in runs] == ["GRU", "EGRU"]
    assert all(len(run["history"]) == 2 for run in runs)
    assert "test accuracy" in capsys.readouterr().out


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_demo_runs_on_a_gpu(precision, tmp_path):
    torch.use_deterministic_algorithms(False)
    options = ["--epochs", "2", "--hidden", "8", "--device", "cuda", "--precision", precision]
    page = load_example("digits").main([*options, "--report", str(tmp_path / "out")])
    config = json.loads((page.parent / "report.json").read_text())["config"]
    assert (config["device"], config["precision"]) == ("cuda", precision)


def test_demo_refuses_an_unknown_precision(capsys):
    with pytest.raises(SystemExit) as stop:
        load_example("digits").main(["--precision", "float8"])
    assert stop.value.code == 2
    assert "bfloat16" in capsys.readouterr().err


def test_demo_uses_only_public_names():
    source = (ROOT / "examples" / "digits.py").read_text()
    assert not re.search(r"(import|from) +[\w.]*\b_\w", source)
    assert not re.search(r"\._[a-z]", source)


def test_demo_has_help(capsys):
    with pytest.raises(SystemExit) as stop:
        load_example("digits").main(["--help"])
    assert stop.value.code == 0
    assert "--permuted" in capsys.readouterr().out
