"""Runs of a user's own model and data: the example of the documentation, and what is refused."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import egru
from egru import cli
from egru.experiments import CustomClassifier, CustomLanguageModel
from egru.report import page, read_runs
from egru.runs import evaluate, load, quieten, report, resume, train
from egru.runs.command import train_command
from egru.runs.reproduce import keep_run
from egru.training import Run, RunError, checkpoint
from tests.helpers import PATIENCE
from tests.training import tiny

ROOT = Path(__file__).parents[2]
SEARCHED = [os.path.abspath(path) for path in sys.path]  # before a test changes the folder
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guides" / "training.md").read_text(), re.DOTALL)


@pytest.fixture(autouse=True)
def in_a_new_folder(defaults, monkeypatch, tmp_path):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(page, "_png_files", lambda runs, rasters: {})  # tested in tests/report


@pytest.fixture
def new_modules():
    """Forget the modules that a test imports."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halves(CustomClassifier):
    hidden: int = 12
    surrogate: egru.Surrogate = dataclasses.field(default_factory=lambda: egru.Surrogate(width=0.3))

    def load_data(self):
        return tiny.sequences()

    def build_model(self, data):
        threshold = egru.Threshold(mean=-3.0)
        return egru.models.SequenceClassifier(1, self.hidden, data.classes, threshold=threshold)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk(CustomLanguageModel):
    def load_data(self):
        return tiny.text()

    def build_model(self, data):
        return tiny.make_language_model()


def quiet(message: str) -> None:
    pass


HALVES = Halves(epochs=2, batch=16, learning_rate=4e-2)
WALK = Walk(epochs=2, batch=8, evaluation_batch=4, learning_rate=2e-2, bptt=20)


def test_example_of_the_documentation_works_with_every_command(capsys, tmp_path, new_modules):
    (source,) = [block for block in BLOCKS if "CustomClassifier" in block]
    (tmp_path / "mine.py").write_text(source)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(SEARCHED), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "mine.py"], env=environment, check=True, capture_output=True, timeout=PATIENCE)
    assert json.loads(Path("runs/louder/config.json").read_text())["kind"] == "mine:Louder"
    result = Run.open("runs/louder").result()
    assert result is not None
    assert result.test.accuracy > 0.8
    Path("runs/louder/report/index.html").unlink()
    for command in (
        "evaluate runs/louder",
        "report runs/louder",
        "export runs/louder small",
        "evaluate small",
        "quieten runs/louder sparser --floor 0.3",
        "evaluate sparser",
        "report runs/louder small sparser",
        "train --resume runs/louder",
    ):
        assert cli.main([*command.split()]) == 0, (command, capsys.readouterr().err)
        printed = capsys.readouterr().out
        if command.startswith("evaluate") and "sparser" not in command:
            assert f"accuracy {100 * result.test.accuracy:.2f} %" in printed
    source = Path("runs/louder/report/index.html").read_text(encoding="utf-8")
    assert "louder, Louder" in source
    assert 'id="raster-1"' in source


def test_example_of_the_training_loop_runs(capsys):
    (source,) = [block for block in BLOCKS if "ClassifierTask" in block]
    exec(compile(source, "training.md", "exec"), {})
    assert capsys.readouterr().out.endswith("True\n")
    message = r"runs/digits-loop/config.json: recipe, kind or config is missing; only runs made by egru.runs.train"
    for operation in (evaluate, load, resume, lambda folder: report([folder])):
        Path("runs/digits-loop/result.json").unlink(missing_ok=True)
        with pytest.raises(ValueError, match=message):
            operation(Path("runs/digits-loop"))


@pytest.mark.parametrize("config", [HALVES, WALK], ids=["classifier", "language"])
def test_custom_run_is_scored_resumed_and_quietened_like_a_recipe(config, tmp_path):
    train("whole", config, tmp_path / "whole", quiet)
    result = Run.open(tmp_path / "whole").result()
    assert result is not None
    scores, activity, epoch = evaluate(tmp_path / "whole")
    assert (scores, epoch) == (result.test, result.best_epoch)
    assert activity == result.activity
    train("parts", dataclasses.replace(config, epochs=1), tmp_path / "parts", quiet)
    run = Run.open(tmp_path / "parts")
    record = json.loads((run.folder / "config.json").read_text())
    record["config"]["epochs"] = 2
    (run.folder / "config.json").write_text(json.dumps(record))
    (run.folder / "result.json").unlink()
    resume(run.folder, quiet)
    one, two = (checkpoint.read_weights(tmp_path / name / "checkpoints" / "epoch-00002") for name in ("whole", "parts"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    quieten(tmp_path / "whole", tmp_path / "quiet", floor=(0.2,), log=quiet)
    assert load(tmp_path / "quiet").config.threshold_floor == (0.2,)
    started = dataclasses.replace(config, start_from=str(tmp_path / "whole"), epochs=1)
    train("started", started, tmp_path / "started", quiet)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reversed(Halves):
    """The labels are swapped."""

    def load_data(self):
        data = super().load_data()
        return dataclasses.replace(data, test=data.test._replace(y=1 - data.test.y))


def test_page_says_that_custom_runs_have_different_data(tmp_path):
    configs = {"one": HALVES, "two": dataclasses.replace(HALVES, seed=1), "other": Reversed(epochs=1, batch=16)}
    for name, config in configs.items():
        train(name, config, tmp_path / name, quiet, page=False)
    same = report([tmp_path / "one", tmp_path / "two"], tmp_path / "same").read_text(encoding="utf-8")
    assert "cannot all be compared" not in same
    page = report([tmp_path / name for name in configs], tmp_path / "page").read_text(encoding="utf-8")
    assert re.search(
        r"cannot all be compared with each other: Halves \(one\), Halves \(two\) on the test split of halves, test "
        r"labels (\w{8}); Reversed on the test split of halves, test labels (?!\1)\w{8}\.",
        page,
    )
    quieten(tmp_path / "one", tmp_path / "quiet", floor=(0.2,), log=quiet)
    runs = read_runs(report([tmp_path / "one", tmp_path / "quiet"], tmp_path / "derived").with_name("report.json"))
    assert runs[0].task == runs[1].task


def test_command_of_a_custom_run_names_changed_fields(tmp_path):
    config = dataclasses.replace(HALVES, hidden=8, surrogate=egru.Surrogate(width=0.5))
    assert train_command("digits", config) == (
        "egru.runs.train('digits', tests.runs.test_custom.Halves(epochs=2, batch=16, learning_rate=0.04, hidden=8, "
        "surrogate=Surrogate(width=0.5, height=1.0, bounded=False, shape='triangle')), FOLDER)"
    )


@pytest.mark.parametrize(
    ("hint", "value", "message"),
    [
        (Path, Path("data"), "Stored cannot be stored as JSON: Object of type PosixPath is not JSON serializable"),
        (int, 2.5, "Stored cannot be stored as JSON: Stored: extra must be an int, got 2.5"),
        (tuple, (1, 2), r"Stored: extra must be a number, string, .* of its annotated type, .*; got \(1, 2\)"),
    ],
)
def test_fields_that_cannot_be_read_back_are_refused_before_training(hint, value, message, tmp_path):
    Stored = dataclasses.make_dataclass("Stored", [("extra", hint, value)], bases=(Halves,), frozen=True, kw_only=True)
    with pytest.raises(TypeError, match=message):
        train("mine", Stored(), tmp_path / "run", quiet)
    assert not (tmp_path / "run").exists()


def test_custom_runs_are_not_kept_as_results(tmp_path):
    train("mine", dataclasses.replace(HALVES, epochs=1), tmp_path / "run", quiet, page=False)
    with pytest.raises(RunError, match="was not trained with a recipe but with Halves; only runs of recipes are kept"):
        keep_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "no_such_module:Mine",
            r"no_such_module:Mine cannot be imported \(ModuleNotFoundError: .*PYTHONPATH",
        ),
        ("broken:Mine", r"broken:Mine cannot be imported \(RuntimeError: no"),
        ("os:system", "os:system must be a subclass of egru.experiments.CustomClassifier or CustomLanguageModel"),
        ("os:nothing", r"os:nothing cannot be imported \(AttributeError"),
        ("Mine", "kind must be ClassifierConfig, LanguageConfig or module:Class, got 'Mine'"),
    ],
)
def test_classes_that_cannot_be_used_are_refused(kind, message, tmp_path, new_modules):
    (tmp_path / "broken.py").write_text("raise RuntimeError('no')")
    Run.create(tmp_path / "run", {"recipe": "mine", "kind": kind, "config": {}})
    path = list(sys.path)
    with pytest.raises(ValueError, match=rf"run/config\.json: .*{message}"):
        load(tmp_path / "run")
    assert sys.path == path


def test_classes_that_are_not_complete_are_refused(tmp_path):
    class Undecorated(Halves):
        more: int = 1

    with pytest.raises(TypeError, match=r"Undecorated must be decorated with @dataclasses\.dataclass"):
        train("mine", Undecorated(), tmp_path / "run", quiet)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Empty(CustomClassifier):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty must define load_data\(self\)"):
        train("mine", Empty(), tmp_path / "run", quiet)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wrong(CustomClassifier):
        def load_data(self):
            return tiny.text()

    with pytest.raises(TypeError, match=r"Wrong.load_data must return an egru.data.Classification, got Text"):
        train("mine", Wrong(), tmp_path / "run", quiet)
    assert not (tmp_path / "run").exists()
