"""``egru convert``: the folder it writes, without training and with fine-tuning."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import egru
from egru import cli
from egru.compress import raise_thresholds
from egru.experiments import find
from egru.report import read_runs
from egru.runs import convert, evaluate, load, report, train

SMALL = replace(find("digits").make(), epochs=2, limit=60, hidden=12, batch=30, evaluation_batch=60, readout="last")
QUIET: dict[str, Any] = {"log": lambda line: None}


@pytest.fixture
def source(defaults, tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)

    def make(cell, **options):
        config = replace(SMALL, cell=cell, uniform_gates=False, zoneout=0.0, **options)
        train("digits", config, tmp_path / cell, page=False, **QUIET)
        return tmp_path / cell

    return make


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_exported_network_is_the_converted_run_with_the_chosen_thresholds(source, cell, tmp_path):
    run = source(cell)
    result = convert(run, tmp_path / "out", "delta", within=1e-3, weights="float32", **QUIET)
    dense, events = load(run, **QUIET), load(tmp_path / "out", **QUIET)
    assert events.config.label == f"E{cell.upper()} 12"
    assert isinstance(events.model.get_submodule("layer0"), egru.EGRU if cell == "gru" else egru.ELSTM)
    expected = egru.convert(dense.model, "delta")
    raise_thresholds(expected, [events.model.get_parameter("layer0.threshold_l0").abs().detach()])
    x = torch.randn(4, 64, 1)
    torch.testing.assert_close(events.model(x)[0], expected(x)[0])
    assert (events.model(x)[0] - dense.model(x)[0]).abs().max() > 0
    assert evaluate(tmp_path / "out", **QUIET)[0] == result.test
    looser = convert(run, tmp_path / "looser", "delta", within=0.1, **QUIET)
    assert looser.activity.activity_sparsity > result.activity.activity_sparsity
    assert looser.derivation is not None
    before, after = looser.derivation.trials
    assert after.activity_sparsity > before.activity_sparsity
    assert looser.derivation.command == f"egru convert {cell} OUT --events delta --within 0.1"


def test_positive_events_have_few_positive_states_before_thresholds_rise(source, tmp_path):
    run, messages = source("gru", normalise=True), []
    convert(run, tmp_path / "out", "positive", within=0.0, weights="float32", log=messages.append)
    assert "units with mostly positive states are negated, which does not change the outputs" in messages[0]
    dense, events = load(run, **QUIET), load(tmp_path / "out", **QUIET)
    assert int(messages[0].split()[0]) > 0
    assert not torch.equal(
        events.model.get_parameter("layer0.weight_hh_l0"), dense.model.get_parameter("layer0.weight_hh_l0")
    )
    x = torch.randn(4, 64, 1)
    torch.testing.assert_close(events.model(x)[0], dense.model(x)[0])


def test_command_fine_tunes_to_an_activity_and_the_page_shows_the_run(source, tmp_path, capsys):
    run = source("gru")
    arguments = ["convert", str(run), "out", "--events", "signed", "--activity", "0.4", "--epochs", "3"]
    assert cli.main([*arguments, "--weights", "float32"]) == 0
    assert "written: out" in capsys.readouterr().out
    assert 1 - evaluate(tmp_path / "out", "validation", **QUIET)[1].activity_sparsity < 0.5
    page = report([run, tmp_path / "out"], tmp_path / "page", **QUIET)
    dense, events = read_runs(page.with_name("report.json"))
    assert (dense.search, events.config["events"]) == (None, "signed")
    assert events.search is not None
    assert events.search.chosen == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs", "3"], "--epochs requires --activity"),
        (["--activity", "0.3", "--within", "0.1"], "--within and --activity exclude each other"),
    ],
)
def test_wrong_options_are_refused(options, message, capsys):
    assert cli.main(["convert", "smnist", "out", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_run_of_event_layers_is_refused(source, tmp_path):
    run = source("egru")
    with pytest.raises(ValueError, match="the run must have the cell gru or lstm, got EGRU 12"):
        convert(run, tmp_path / "out", **QUIET)
    assert not (tmp_path / "out").exists()
