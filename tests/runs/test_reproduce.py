"""The paper's tables with our results, and how runs are added to them."""

import dataclasses
import json
import os
import shutil
import statistics

import pytest

from egru.experiments import RECIPES
from egru.experiments.config import read_config
from egru.experiments.results import KeptResult, format_results, read_results
from egru.experiments.tables import ALIASES, TABLES
from egru.records import FORMAT, FormatError
from egru.runs import reproduce
from egru.runs.command import recorded_command
from egru.runs.load import training_metrics
from egru.runs.reproduce import RUNS, collect_results, format_table, keep_run, list_tables
from egru.training import Run, RunError
from egru.training.records import KeptRecord


def make_result(recipe: str, perplexity: float | None = None, data: str | None = None, seed: int = 7) -> KeptResult:
    return KeptResult(
        run="some-run",
        recipe=recipe,
        data=data or RECIPES[recipe].make().data,
        seed=seed,
        command=f"egru train {recipe} --seed {seed} --graph",
        note="",
        date="2026-11-15",
        machine="some GPU",
        accuracy=0.91234,
        perplexity=perplexity,
        validation=0.9321 if perplexity is None else perplexity + 2,
        validation_one_column=None,
        activity_sparsity=0.812,
        backward_sparsity=0.456,
        parameters=33_000_000,
        forward_macs=9.876e6,
    )


TWICE = ["dvs-egru-1024", "smnist14-ablation-none"]
"""The unchanged networks of two studies, which are also rows of other tables."""


def test_every_recipe_is_in_one_table():
    rows = [row for table in TABLES.values() for row in table.recipes(aliases=True)]
    assert sorted(rows) == sorted([*RECIPES, *TWICE])


def test_aliases_are_not_rows_of_their_own():
    rows = [row for table in TABLES.values() for row in table.recipes()]
    assert sorted(rows) == sorted([*(set(RECIPES) - set(ALIASES)), *TWICE])


def test_aliases_have_the_config_of_their_recipe():
    for alias, name in ALIASES.items():
        assert RECIPES[alias].make() == RECIPES[name].make()
        assert RECIPES[alias].papers == RECIPES[name].papers


def squeezed(table: str, results: list[KeptResult] | None = None) -> list[str]:
    """Return the lines of a table with single spaces."""
    return [" ".join(line.split()) for line in format_table(table, results)]


def test_recipes_without_a_result_show_their_command():
    lines = squeezed("ptb", [])
    text = "\n".join(lines)
    assert "ptb-egru-1350 paper, Table 3 ppl 57.2 - 79.7 % 46.3 % 33M 9.9M -" in lines
    assert text.count("not run") == len(TABLES["ptb"].recipes())
    assert "egru train ptb-egru-1350" in text
    assert not any("ptb-evnn paper" in line for line in lines)  # not in the paper


def test_supplement_is_labelled_and_shows_the_validation_perplexity():
    line = squeezed("ptb", [])[
        squeezed("ptb", []).index("ptb-egru-1350 paper, Table 3 ppl 57.2 - 79.7 % 46.3 % 33M 9.9M -") + 1
    ]
    expected = "paper, Table S6 ppl 58.7 ppl 59.5 (mean 59.7 ± 0.1) 79.9 ± 0.1 % 46.0 ± 0.3 % - (6.8 + 3.1)M - best run"
    assert line.startswith(expected)
    lines = squeezed("gestures", [])
    assert (
        "dvs-egru-1024 paper, Table S1 87.7 ± 2.1 % - 79.8 ± 3.3 % 54.4 ± 1.2 % 15.7M 3.1M ± 0.4M - over 5 runs"
        in lines
    )


@pytest.mark.parametrize(
    ("table", "row"),
    [
        ("gestures", "LSTM 512 (He et al., 2020) quoted, Table 1 86.8 % - - - 7.4M 3.9M -"),
        (
            "gestures",
            "AlexNet + LSTM 256 with augmentation (Innocenti et al., 2021) quoted, Table 1 97.7 % - - - 8.3M 601.3M -",
        ),
        (
            "gestures",
            "EGRU 1024 on 128 by 128 pixels paper, Table S1 85.7 ± 0.9 % - 77.3 ± 7.0 % 64.6 ± 1.1 % 110.1M "
            "105.2M ± 441.3K - over 5 runs",
        ),
        ("smnist", "Gu et al., 2020, 512 units quoted, Table 2 98.9 % - - - 1M 1M -"),
        ("psmnist", "Gu et al., 2020, 512 units quoted, Table 2 95.1 % - - - 1M 1M -"),
        ("wikitext2", "Melis et al., 2018 quoted, Table 3 ppl 65.9 - - - 24M - -"),
        ("psmnist", "Permuted sequential MNIST (Table 2 of the paper)"),
    ],
)
def test_published_rows_without_a_recipe_are_quoted(table, row):
    assert row in squeezed(table, [])


def test_our_results_follow_the_paper_rows():
    lines = squeezed("ptb", [make_result("ptb-egru-1350", 60.04)])
    row = next(i for i, line in enumerate(lines) if line.startswith("ptb-egru-1350"))
    ours = "ours, seed 7 ppl 60.0 ppl 62.0 81.2 % 45.6 % 33M 9.88M some GPU 2026-11-15"
    assert lines[row + 2] == f"{ours} egru train ptb-egru-1350 --seed 7 --graph"
    assert "ptb-egru-2000" in lines[row + 3]


def test_seeds_share_a_row_with_mean_and_standard_deviation():
    values = (60.0, 61.0, 62.6)
    results = [make_result("ptb-egru-1350", value, seed=seed) for seed, value in enumerate(values)]
    results.append(dataclasses.replace(make_result("ptb-egru-1350", 99.0), note="started from int8 weights"))
    lines = [line for line in squeezed("ptb", results) if line.startswith("ours, ") and "1350" in line]
    mean, std = statistics.mean(values), statistics.stdev(values)
    assert lines[0].startswith(
        f"ours, 3 seeds ppl {mean:.1f} ± {std:.1f} ppl {mean + 2:.1f} ± {std:.1f} 81.2 % ± 0.0 %"
    )
    assert lines[0].endswith("some GPU 2026-11-15 egru train ptb-egru-1350 --graph --seed 0 | 1 | 2")
    assert lines[1].startswith("ours, seed 7 ppl 99.0")
    assert lines[1].endswith("(started from int8 weights)")


@pytest.mark.parametrize("table", TABLES)
def test_runs_on_other_data_are_not_rows_of_a_table(table):
    """A WikiText-2 run of a Penn Treebank recipe, for example."""
    recipe = TABLES[table].recipes()[0]
    perplexity = 60.0 if TABLES[table].data in ("ptb", "wikitext2") else None
    result = make_result(recipe, perplexity, data="wikitext2" if TABLES[table].data == "ptb" else "ptb")
    lines = list(format_table(table, [result]))
    note = lines.index(f"On data other than {TABLES[table].data}, not comparable with the rows above:")
    assert not any("ours, seed" in line for line in lines[:note])
    assert "ours, seed 7" in lines[note + 2]
    counted = next(line for line in list_tables([result]) if line.startswith(f"{table} "))
    assert f": 0 of {len(TABLES[table].recipes())} recipes run" in counted


def test_backward_sparsity_is_the_average_over_training():
    """The paper averages it over the whole training; on the test split with the final weights it differs."""
    for result in read_results():
        run = Run.open(RUNS / result.run)
        values = [
            line.training_activity.backward_sparsity
            for line in training_metrics(run)
            if line.training_activity is not None and line.training_activity.backward_sparsity is not None
        ]
        assert (result.backward_sparsity is None) == (not values)
        if values:
            assert result.backward_sparsity == pytest.approx(sum(values) / len(values))
    ptb = next(result for result in read_results() if result.run == "ptb-evnn-seed0-20261115-2358")
    assert f"{ptb.backward_sparsity:.3f}" == "0.778"
    assert ptb.validation_one_column == pytest.approx(60.71, abs=0.005)


def test_recorded_commands_match_their_configs():
    """A changed default of a recipe must not change what a stored command trains."""
    for path in RUNS.glob(f"*/{reproduce.RECORD}"):
        run = Run.open(path.parent)
        recipe, config = read_config(run.config())
        assert recipe in RECIPES
        assert path.parent.name.startswith(f"{recipe}-seed{config.seed}-")
        assert KeptRecord.read(path).command == recorded_command(recipe, config, run.result())


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
    assert not any("paper, Table" in line for line in format_table("frames"))
    for results, count in (([packed, raw], "1 of 10 recipes run"), ([packed], "0 of 10 recipes run")):
        assert next(line for line in list_tables(results) if line.startswith("gestures")).endswith(count)


def test_packaged_results_agree_with_the_records():
    assert read_results() == collect_results()
    assert format_results(read_results()) == reproduce.RESULTS.read_text(encoding="utf-8")


def test_packaged_results_have_known_values():
    results = {result.run: result for result in read_results()}
    earlier, gru = results["dvs-seed0-20261115-1839"], results["dvs-gru-seed0-20261119-212112"]
    assert f"{100 * earlier.accuracy:.2f}" == "83.33"
    assert f"{100 * (earlier.activity_sparsity or 0):.1f}" == "82.7"
    assert earlier.command.startswith("egru train dvs --epochs 40 ")
    assert f"{100 * gru.accuracy:.2f}" == "89.02"
    assert gru.command == "egru train dvs-gru --epochs 30 --time-crop 1.0 --no-roll"
    assert gru.activity_sparsity is None
    lines = list(format_table("frames"))
    assert sum("2026-11-15  egru train dvs" in line for line in lines) == 2
    for seeds in ("0 | 1 | 2 | 3", "4 | 5 | 6 | 7"):
        assert sum("ours, 4 seeds" in line and f"--seed {seeds}" in line for line in lines) == 2


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
    shutil.copytree(RUNS / "dvs-gru-seed4-20261120-002459", tmp_path / "run")
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
    folder, results = keep_run(run, tmp_path / "records", tmp_path / "results.json", note="a remark")
    assert folder.name == "dvs-gru-seed3-20270115-080000"
    assert {p.name for p in folder.iterdir()} == {
        "config.json", "energy.json", "environment.json", "metrics.jsonl", "result.json", "record.json"
    }  # fmt: skip
    assert "private" not in (folder / "config.json").read_text()
    (result,) = read_results(results)
    assert (result.command, result.date) == ("egru train dvs-gru --seed 3 --start-from first", "2027-01-15")
    assert (result.run, result.seed, result.note) == (folder.name, 3, "a remark")
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


def test_keep_accepts_the_limit_of_the_recipe(run, tmp_path):
    recipe = RECIPES["smnist14-ablation-full"].make()
    assert recipe.limit is not None
    change_config(run, limit=recipe.limit)
    record = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**record, "recipe": "smnist14-ablation-full"}))
    folder, _ = keep_run(run, tmp_path / "records", tmp_path / "results.json")
    assert folder.name.startswith("smnist14-ablation-full-seed")


def test_keep_requires_a_checkout(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="runs are kept in a checkout of the repository"):
        keep_run(run, tmp_path / "nowhere", tmp_path / "results.json")
    with pytest.raises(FileNotFoundError, match="only in a checkout"):
        collect_results(tmp_path / "nowhere")


def test_only_folders_with_a_record_are_collected(tmp_path):
    kept = tmp_path / "records" / "some-run"
    shutil.copytree(RUNS / "dvs-gru-seed4-20261120-002459", kept)
    (result,) = collect_results(tmp_path / "records")
    assert (result.command, result.date) == ("egru train dvs-gru --seed 4", "2026-11-20")
    (kept / "result.json").rename(kept / "result.txt")
    with pytest.raises(RunError, match=r"some-run has a record\.json but no result\.json"):
        collect_results(tmp_path / "records")
    (kept / reproduce.RECORD).unlink()
    assert collect_results(tmp_path / "records") == []


def test_unknown_tables_are_refused():
    with pytest.raises(ValueError, match="unknown table 'table9'; the tables are digits, smnist"):
        list(format_table("table9"))
