"""The paper's tables with ours beside them."""

import dataclasses
import json
import os
import shutil

import pytest

from egru.experiments import RECIPES, find
from egru.runs import reproduce
from egru.runs.reproduce import ALIASES, RESULTS, TABLES, Kept, keep, kept, lines, listing
from egru.training import Run, RunError


def result(recipe: str, perplexity: float | None = None, **changes) -> Kept:
    config = dataclasses.replace(find(recipe).make(), **changes)
    overall = {
        "activity_sparsity": 0.812,
        "backward_sparsity": 0.456,
        "parameters": 33_000_000,
        "forward_macs": 9.876e6,
    }
    scores = {"accuracy": 0.91234, "perplexity": perplexity}
    return Kept(recipe, config, f"egru train {recipe} --seed 7", "2026-11-15", scores, overall)


def test_every_recipe_has_one_table():
    rows = [row for table in TABLES.values() for row in table.rows()]
    assert sorted(rows) == sorted(set(RECIPES) - set(ALIASES))


def test_aliases_are_what_they_stand_for():
    for alias, name in ALIASES.items():
        assert RECIPES[alias].make() == RECIPES[name].make()
        assert RECIPES[alias].paper == RECIPES[name].paper


def test_not_run_and_how_to():
    text = "\n".join(lines("ptb", []))
    assert "ptb-egru-1350  paper  ppl 57.2  79.7 %    46.3 %         33M         9.9M  58.7 in the supplement" in text
    assert text.count("not run") == len(TABLES["ptb"].rows())
    assert "egru train ptb-egru-1350" in text
    assert not any("ptb-evnn  paper" in line for line in text.splitlines())  # the paper has no such number


def test_ours_beside_the_papers():
    found = list(lines("ptb", [result("ptb-egru-1350", 60.04), result("ptb-egru-1350", 61.5)]))
    at = next(i for i, line in enumerate(found) if line.startswith("ptb-egru-1350"))
    ours = "ours ppl 60.0 81.2 % 45.6 % 33M 9.88M 2026-11-15 egru train ptb-egru-1350 --seed 7"
    assert " ".join(found[at + 1].split()) == ours
    assert "ppl 61.5" in found[at + 2]
    assert "not run" not in found[at + 2]


def test_packed_frames_never_stand_beside_the_papers():
    packed, raw = result("dvs-egru-512"), result("dvs-egru-512", data="dvs-raw")
    assert packed.config.data == "dvs"
    found = list(lines("gestures", [packed]))
    note = found.index("On other data than dvs-raw: another task, not to be held against the rows above")
    assert not any("91.23 %" in line for line in found[:note])
    assert "egru train dvs-egru-512 --data dvs-raw" in "\n".join(found[:note])
    assert "91.23 %" in found[note + 2]
    assert "(data dvs)" in found[note + 2]
    found = list(lines("gestures", [raw]))
    assert "91.23 %" in "\n".join(found)
    assert not any(line.startswith("On other data") for line in found)
    assert not any(line.split()[1:2] == ["paper"] for line in lines("frames"))
    for results, done in (([packed, raw], "1 of 10 rows run"), ([packed], "0 of 10 rows run")):
        assert next(line for line in listing(results) if line.startswith("gestures")).endswith(done)


def test_what_is_kept_is_what_the_runs_said():
    found = {r.recipe: r for r in kept()}
    assert f"{100 * found['dvs'].scores['accuracy']:.2f}" == "83.33"
    assert f"{100 * found['dvs'].overall['activity_sparsity']:.1f}" == "82.7"
    assert found["dvs-gru"].command == "egru train dvs-gru"
    for file in RESULTS.glob("dvs-*/*.json*"):
        text = file.read_text(encoding="utf-8")
        assert not any(word in text for word in ("/home", "/tmp", "/root", "/work", "/Users")), file
    assert sum("2026-11-15  egru train dvs" in line for line in lines("frames")) >= 2


def test_keep_takes_the_small_files_and_no_paths(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(next(RESULTS.glob("dvs-gru-*")), run)
    (run / reproduce.RECORD).unlink()
    (run / "checkpoints").mkdir()
    plain = json.loads((run / "config.json").read_text())
    plain["config"] |= {"root": "/somewhere/private", "start_from": "/somewhere/private/first", "seed": 3}
    (run / "config.json").write_text(json.dumps(plain))
    os.utime(run / "result.json", (1.8e9, 1.8e9))
    folder = keep(run, tmp_path / "results")
    assert folder.name == "dvs-gru-seed3-20270115-0800"
    assert {p.name for p in folder.iterdir()} == {
        "config.json", "environment.json", "metrics.jsonl", "result.json", "record.json"
    }  # fmt: skip
    assert "private" not in (folder / "config.json").read_text()
    (again,) = kept(tmp_path / "results")
    assert (again.command, again.date) == ("egru train dvs-gru --seed 3 --start-from first", "2027-01-15")
    assert Run.open(folder).metrics() == Run.open(run).metrics()


def test_parts_of_runs_are_not_kept(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(next(RESULTS.glob("dvs-gru-*")), run)
    plain = json.loads((run / "config.json").read_text())
    plain["config"]["limit"] = 60
    (run / "config.json").write_text(json.dumps(plain))
    with pytest.raises(RunError, match="only the first 60 of each split"):
        keep(run, tmp_path / "results")
    (run / "result.json").unlink()
    with pytest.raises(RunError, match="not finished"):
        keep(run, tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_records_without_a_date_and_without_a_result(tmp_path):
    run = tmp_path / "results" / "some-run"
    shutil.copytree(next(RESULTS.glob("dvs-gru-*")), run)
    (run / reproduce.RECORD).unlink()
    (found,) = kept(tmp_path / "results")
    assert (found.command, found.date) == ("egru train dvs-gru", "undated")
    (run / "result.json").unlink()
    assert kept(tmp_path / "results") == []
    with pytest.raises(FileNotFoundError, match="needs the repository"):
        kept(tmp_path / "nowhere")


def test_unknown_tables_are_named():
    with pytest.raises(ValueError, match="unknown table 'table9'; there are gestures, ablation"):
        list(lines("table9"))
