"""``egru quieten``: what it writes, and how the search chooses thresholds."""

import contextlib
import shutil
from dataclasses import replace

import pytest
import torch

from egru import Threshold, cli
from egru.compress.quieten import search
from egru.data import Text
from egru.experiments import build, find
from egru.layers import EventRNN
from egru.records import write_json
from egru.report import read_runs
from egru.runs import evaluate, quieten, report, train
from egru.runs.load import load, training_metrics
from egru.runs.reproduce import keep_run
from egru.training import Run, RunError, Scores
from egru.training.records import ThresholdTrial
from egru.training.run import METRICS

LOW = Threshold("clamp", mean=0.01)
SMALL = replace(find("digits").make(), epochs=2, limit=60, hidden=12, batch=30, evaluation_batch=60)
SMALL = replace(SMALL, learning_rate=0.02, reset="none", threshold=LOW)


@pytest.fixture(autouse=True)
def first(defaults, tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    train("digits", SMALL, tmp_path / "first", page=False)
    return tmp_path / "first"


def load_layer(folder) -> EventRNN:
    module = load(folder).model.get_submodule("layer0")
    assert isinstance(module, EventRNN)
    return module


def lowest_threshold(folder) -> float:
    return load_layer(folder).thresholds()["l0"].min().item()


def test_result_is_that_of_the_exported_network(first, tmp_path):
    messages = []
    result = quieten(first, tmp_path / "quiet", floor=(0.2,), weights="int8", log=messages.append)
    scores, activity, epoch = evaluate(tmp_path / "quiet")
    assert scores == result.test
    assert epoch == result.best_epoch == Run.open(first).best_epoch()
    assert activity.forward_macs == result.activity.forward_macs < evaluate(first)[1].forward_macs
    assert lowest_threshold(tmp_path / "quiet") == pytest.approx(0.2)
    assert lowest_threshold(first) < 0.01
    assert messages[-1].startswith("floors 0.2: loss ")
    exported = Run.open(tmp_path / "quiet")
    assert not (tmp_path / "quiet" / METRICS).exists()
    assert training_metrics(exported) == Run.open(first).metrics()
    assert exported.result() == result
    assert result.derivation is not None
    assert result.derivation.source == str(first)
    assert result.derivation.validation.loss == evaluate(tmp_path / "quiet", "validation")[0].loss
    shutil.move(first, tmp_path / "moved")
    with pytest.raises(
        RunError, match=r"quiet was derived from .*first, which was not found; place that run next to it"
    ):
        training_metrics(exported)


def test_page_shows_the_search_and_not_the_training_of_the_source(first, tmp_path):
    result = quieten(first, tmp_path / "quiet", within=0.5)
    assert result.derivation is not None
    shutil.copy(first / METRICS, tmp_path / "quiet")  # as in a kept record whose source is not kept
    shutil.move(first, tmp_path / "moved")  # the page does not need the source
    source = report([tmp_path / "quiet"]).read_text(encoding="utf-8")
    (run,) = read_runs(tmp_path / "quiet" / "report" / "report.json")
    assert run.history == ()
    assert run.search is not None
    assert run.search.source == "first"
    assert run.search.trials == result.derivation.trials
    chosen = run.search.trials[run.search.chosen]
    assert list(chosen.floor) == Run.open(tmp_path / "quiet").config()["config"]["threshold_floor"]
    assert chosen.forward_macs < run.search.trials[0].forward_macs
    assert "time of the threshold search" in source
    assert ">training time<" not in source
    assert 'id="curves"' not in source
    assert 'id="sparsity-1"' not in source


def test_search_keeps_the_amount_that_an_event_resets(tmp_path):
    train("digits", replace(SMALL, reset="threshold"), tmp_path / "second", page=False)
    quieten(tmp_path / "second", tmp_path / "quiet", within=0.01)
    before, after = (evaluate(tmp_path / name, "validation") for name in ("second", "quiet"))
    assert after[0].loss <= before[0].loss + 0.01
    assert after[1].forward_macs < before[1].forward_macs
    layer, quiet_layer = (load_layer(tmp_path / name) for name in ("second", "quiet"))
    result = Run.open(tmp_path / "quiet").result()
    assert result is not None
    assert result.derivation is not None
    first = result.derivation.trials[0]
    assert first.validation.loss == before[0].loss
    assert first.floor == (0.0,)
    amounts = [each.reset_scales()["l0"] * each.thresholds()["l0"] for each in (layer, quiet_layer)]
    torch.testing.assert_close(*amounts)
    assert not torch.equal(layer.thresholds()["l0"], quiet_layer.thresholds()["l0"])


def test_search_reads_the_validation_text_in_one_column_like_the_test_text(tmp_path, monkeypatch):
    words = torch.randint(9, (300,), generator=torch.Generator().manual_seed(0))
    text = Text("text", [str(word) for word in range(9)], words, words[:200], words[100:])
    monkeypatch.setattr("egru.data.penn_treebank", lambda root: text)
    small = {"epochs": 1, "hidden": 6, "embedding": 5, "batch": 4, "evaluation_batch": 8, "bptt": 10}
    train("ptb-evnn", replace(find("ptb-evnn").make(), **small), tmp_path / "text", page=False)
    quieten(tmp_path / "text", tmp_path / "quiet", floor=(0.0,), weights="float32")
    result = Run.open(tmp_path / "quiet").result()
    assert result is not None
    assert result.derivation is not None
    trained = load(tmp_path / "quiet")
    one = build(replace(trained.config, evaluation_batch=1), text)[1].evaluate(trained.model, "validation")
    eight = trained.task.evaluate(trained.model, "validation")
    assert result.derivation.trials[-1].validation.loss == one.loss != eight.loss
    assert result.derivation.validation.loss == eight.loss  # comparable to other runs


def test_kept_record_has_the_command_and_no_paths(first, tmp_path):
    quieten(first, tmp_path / "quiet", floor=(0.1,))
    plain = Run.open(tmp_path / "quiet").config()
    assert plain["config"]["threshold_floor"] == [0.1]
    assert plain["config"]["start_from"] == str(first)
    plain["config"]["limit"] = None
    write_json(tmp_path / "quiet" / "config.json", plain)
    (tmp_path / "kept").mkdir()
    kept, _ = keep_run(tmp_path / "quiet", tmp_path / "kept", tmp_path / "results.json")
    assert Run.open(kept).metrics() == Run.open(first).metrics()  # its source is not kept
    shutil.copytree(first, tmp_path / "kept" / "first")
    (kept / METRICS).unlink()
    keep_run(tmp_path / "quiet", tmp_path / "kept", tmp_path / "results.json")
    assert not (kept / METRICS).exists()
    assert training_metrics(Run.open(kept)) == Run.open(first).metrics()
    record = (kept / "record.json").read_text()
    assert '"egru quieten first OUT --floor 0.1"' in record
    assert str(tmp_path) not in record + (kept / "config.json").read_text() + (kept / "result.json").read_text()


def test_command_prints_trials_and_the_choice(first, tmp_path, capsys):
    assert cli.main(["quieten", "first", "quiet", "--within", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "first before, on validation:"
    assert lines[1].startswith("floors 0: loss ")
    assert lines[-3].startswith("chosen: floors 0.")
    assert lines[-2].startswith("test: accuracy ")
    assert cli.main(["quieten", "first", "quiet"]) == cli.ExitCode.USAGE_OR_MISSING_FILE
    assert "quiet exists and is not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"within": -1.0}, "within must be non-negative, got -1.0"),
        ({"floor": (0.1, 0.2)}, r"floor must be one number or a sequence of length 1, .*got \(0.1, 0.2\)"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_written(options, message, first, tmp_path):
    with pytest.raises(ValueError, match=message):
        quieten(first, tmp_path / "quiet", **options, log=pytest.fail)
    assert not (tmp_path / "quiet").exists()


@pytest.mark.parametrize(("floor", "tried"), [(0.32, ["floors 0.3", "floors 0.35"]), (0.97, ["floors 0.95"])])
def test_search_starts_at_the_current_thresholds(floor, tried, first, tmp_path):
    quieten(first, tmp_path / "quiet", floor=(floor,))
    messages = []
    with contextlib.suppress(RunError):
        quieten(tmp_path / "quiet", tmp_path / "quieter", log=messages.append)
    assert [line.split(":")[0] for line in messages[1:3]] == tried


@pytest.mark.parametrize(
    ("mean", "tried"),
    [(-0.12, ["floors -0.15", "floors -0.1"]), (-1e4, ["floors -1", "floors -0.95"])],
)
def test_search_starts_at_negative_thresholds(mean, tried, tmp_path):
    config = replace(SMALL, threshold=Threshold("identity", mean=mean, std=0.0), epochs=1)
    train("digits", config, tmp_path / "negative", page=False)
    messages = []
    with contextlib.suppress(RunError):
        quieten(tmp_path / "negative", tmp_path / "quiet", log=messages.append)
    assert [line.split(":")[0] for line in messages[1:3]] == tried


def test_search_that_saves_no_macs_raises(first, tmp_path):
    quieten(first, tmp_path / "quiet", floor=(0.97,))
    with pytest.raises(RunError, match=r"no floor saves MACs within 0.001 nats of the lowest validation loss"):
        quieten(tmp_path / "quiet", tmp_path / "quieter")
    assert not (tmp_path / "quieter").exists()


def test_dense_networks_are_refused(tmp_path):
    train("digits", replace(SMALL, cell="gru", epochs=1, zoneout=0.0), tmp_path / "dense", page=False)
    with pytest.raises(ValueError, match="the run must have event layers, got GRU 12"):
        quieten(tmp_path / "dense", tmp_path / "quiet")


def run_search(loss, start, within, macs=lambda *floor: -sum(floor)):
    """Return the chosen floors and all tried ones, for given functions of loss and MACs."""
    tried = []

    def attempt(floor):
        tried.append(tuple(floor))
        return ThresholdTrial(tuple(floor), Scores(loss(*floor), 0.0), 0.0, macs(*floor))

    return search(attempt, attempt(start), within).floor, tried


def test_search_raises_the_last_layer_first_up_to_the_limit():
    floors, tried = run_search(lambda a, b: a + 2 * b, (0.0, 0.0), 0.42)
    assert floors == (0.0, 0.2)  # the last layer uses up the limit
    assert len(tried) == len(set(tried)) == 7


def test_search_repeats_all_layers_until_nothing_changes():
    """A higher floor of the first layer allows a higher one of the last layer."""
    floors, _ = run_search(lambda a, b: max(0.0, b - a - 0.1) if a < 0.22 else 9.0, (0.0, 0.0), 0.01)
    assert floors == (0.2, 0.3)


def test_search_compares_with_the_lowest_loss_so_far():
    """It does not return to the loss that it started from."""
    floors, _ = run_search(lambda a, b: 1 + (b - 0.3) ** 2, (0.0, 0.0), 0.003)
    assert floors == (0.95, 0.35)


def test_search_refuses_more_macs_and_nan():
    floors = run_search(lambda a, b: 1 - a - b, (0.0, 0.0), 0.0, macs=lambda a, b: b - a)[0]
    assert floors == (0.95, 0.0)  # the last layer would lower the loss but cost more
    assert run_search(lambda a, b: float("nan") if b else 1.0, (0.0, 0.0), 0.0)[0] == (0.95, 0.0)
