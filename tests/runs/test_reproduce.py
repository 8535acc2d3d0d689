"""The paper's tables with our results, and how runs are added to them."""

import json
import os
import shutil

import pytest

from egru.experiments import RECIPES
from egru.experiments.results import KeptResult, format_results, read_results
from egru.experiments.tables import ALIASES, TABLES
from egru.records import FORMAT, FormatError
from egru.runs import reproduce
from egru.runs.reproduce import RUNS, collect_results, format_table, keep_run, list_tables
from egru.training import Run, RunError


def make_result(recipe: str, perplexity: float | None = None, data: str | None = None) -> KeptResult:
    return KeptResult(
        run="some-run",
        recipe=recipe,
        data=data or RECIPES[recipe].make().data,
        seed=7,
        command=f"egru train {recipe} --seed 7",
        date="2026-11-15",
        accuracy=0.91234,
        perplexity=perplexity,
        activity_sparsity=0.812,
        backward_sparsity=0.456,
        parameters=33_000_000,
        forward_macs=9.876e6,
    )


def test_every_recipe_is_in_one_table():
    rows = [row for table in TABLES.values() for row in table.recipes(aliases=True)]
    assert sorted(rows) == sorted(RECIPES)


def test_aliases_are_not_rows_of_their_own():
    rows = [row for table in TABLES.values() for row in table.recipes()]
    assert sorted(rows) == sorted(set(RECIPES) - set(ALIASES))


def test_aliases_have_the_config_of_their_recipe():
    for alias, name in ALIASES.items():
        assert RECIPES[alias].make() == RECIPES[name].make()
        assert RECIPES[alias].paper == RECIPES[name].paper


def test_recipes_without_a_result_show_their_command():
    text = "\n".join(format_table("ptb", []))
    assert (
        "ptb-egru-1350  paper  ppl 57.2    79.7 %    46.3 %         33M       9.9M  perplexity 58.7 in the supplement"
        in text
    )
    assert text.count("not run") == len(TABLES["ptb"].recipes())
    assert "egru train ptb-egru-1350" in text
    assert not any("ptb-evnn  paper" in line for line in text.splitlines())  # not in the paper


def test_our_results_follow_the_paper_row():
    lines = list(format_table("ptb", [make_result("ptb-egru-1350", 60.04), make_result("ptb-egru-1350", 61.5)]))
    row = next(i for i, line in enumerate(lines) if line.startswith("ptb-egru-1350"))
    ours = "ours ppl 60.0 81.2 % 45.6 % 33M 9.88M 2026-11-15 egru train ptb-egru-1350 --seed 7"
    assert " ".join(lines[row + 1].split()) == ours
    assert "ppl 61.5" in lines[row + 2]
    assert "not run" not in lines[row + 2]


def test_packed_frames_are_separate_from_the_paper_rows():
    packed, raw = make_result("dvs-egru-512"), make_result("dvs-egru-512", data="dvs-raw")
    assert packed.data == "dvs"
    lines = list(format_table("gestures", [packed]))
    note = lines.index("On data other than dvs-raw, not comparable with the rows above:")
    assert not any("91.23 %" in line for line in lines[:note])
    assert "egru train dvs-egru-512 --data dvs-raw" in "\n".join(lines[:note])
    assert "91.23 %" in lines[note + 2]
    assert "(data dvs)" in lines[note + 2]
    lines = list(format_table("gestures", [raw]))
    assert "91.23 %" in "\n".join(lines)
    assert not any(line.startswith("On data other than") for line in lines)
    assert not any(line.split()[1:2] == ["paper"] for line in format_table("frames"))
    for results, count in (([packed, raw], "1 of 10 recipes run"), ([packed], "0 of 10 recipes run")):
        assert next(line for line in list_tables(results) if line.startswith("gestures")).endswith(count)


def test_packaged_results_agree_with_the_records():
    assert read_results() == collect_results()
    assert format_results(read_results()) == reproduce.RESULTS.read_text(encoding="utf-8")


def test_packaged_results_have_known_values():
    results = {result.recipe: result for result in read_results()}
    assert f"{100 * results['dvs'].accuracy:.2f}" == "83.33"
    assert f"{100 * (results['dvs'].activity_sparsity or 0):.1f}" == "82.7"
    assert results["dvs-gru"].command == "egru train dvs-gru"
    assert results["dvs-gru"].activity_sparsity is None
    assert sum("2026-11-15  egru train dvs" in line for line in format_table("frames")) >= 2


def test_results_of_another_format_are_refused(tmp_path):
    (tmp_path / "results.json").write_text('{"format": 0, "results": []}')
    expected = rf"results\.json: the record has format 0; this version of egru reads format {FORMAT}"
    with pytest.raises(FormatError, match=expected):
        read_results(tmp_path / "results.json")


def test_records_contain_no_paths_of_a_machine():
    for file in RUNS.glob("*/*.json*"):
        text = file.read_text(encoding="utf-8")
        assert not any(word in text for word in ("/home", "/tmp", "/root", "/work", "/Users")), file


@pytest.fixture
def run(tmp_path):
    """A finished run that is not kept yet, and an empty folder of records."""
    shutil.copytree(next(RUNS.glob("dvs-gru-seed0-*")), tmp_path / "run")
    (tmp_path / "run" / reproduce.RECORD).unlink()
    (tmp_path / "records").mkdir()
    return tmp_path / "run"


def change_config(run, **changes):
    record = json.loads((run / "config.json").read_text())
    record["config"] |= changes
    (run / "config.json").write_text(json.dumps(record))


def test_keep_copies_records_without_paths(run, tmp_path):
    (run / "checkpoints").mkdir()
    change_config(run, root="/somewhere/private", start_from="/somewhere/private/first", seed=3)
    os.utime(run / "result.json", (1.8e9, 1.8e9))
    folder, results = keep_run(run, tmp_path / "records", tmp_path / "results.json")
    assert folder.name == "dvs-gru-seed3-20270115-080000"
    assert {p.name for p in folder.iterdir()} == {
        "config.json", "environment.json", "metrics.jsonl", "result.json", "record.json"
    }  # fmt: skip
    assert "private" not in (folder / "config.json").read_text()
    (result,) = read_results(results)
    assert (result.command, result.date) == ("egru train dvs-gru --seed 3 --start-from first", "2027-01-15")
    assert (result.run, result.seed) == (folder.name, 3)
    assert Run.open(folder).metrics() == Run.open(run).metrics()


def test_keep_never_replaces_another_record(run, tmp_path):
    first, _ = keep_run(run, tmp_path / "records", tmp_path / "results.json")
    change_config(run, batch=3)
    second, results = keep_run(run, tmp_path / "records", tmp_path / "results.json")
    assert second.name == f"{first.name}-2"
    assert "--batch 3" not in read_results(results)[0].command
    assert "--batch 3" in read_results(results)[1].command


def test_keep_refuses_partial_and_unfinished_runs(run, tmp_path):
    change_config(run, limit=60)
    with pytest.raises(RunError, match="used only the first 60 of each split"):
        keep_run(run, tmp_path / "records", tmp_path / "results.json")
    (run / "result.json").unlink()
    with pytest.raises(RunError, match="not finished"):
        keep_run(run, tmp_path / "records", tmp_path / "results.json")
    assert not any((tmp_path / "records").iterdir())


def test_keep_requires_a_checkout(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="runs are kept in a checkout of the repository"):
        keep_run(run, tmp_path / "nowhere", tmp_path / "results.json")
    with pytest.raises(FileNotFoundError, match="only in a checkout"):
        collect_results(tmp_path / "nowhere")


def test_only_folders_with_a_record_are_collected(tmp_path):
    kept = tmp_path / "records" / "some-run"
    shutil.copytree(next(RUNS.glob("dvs-gru-seed0-*")), kept)
    (result,) = collect_results(tmp_path / "records")
    assert (result.command, result.date) == ("egru train dvs-gru", "2026-11-15")
    (kept / "result.json").rename(kept / "result.txt")
    with pytest.raises(RunError, match=r"some-run has a record\.json but no result\.json"):
        collect_results(tmp_path / "records")
    (kept / reproduce.RECORD).unlink()
    assert collect_results(tmp_path / "records") == []


def test_unknown_tables_are_refused():
    with pytest.raises(ValueError, match="unknown table 'table9'; the tables are digits, smnist"):
        list(format_table("table9"))
