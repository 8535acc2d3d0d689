import dataclasses
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import egru
from egru import format
from egru.demo import PAGE
from egru.environment import Environment
from egru.records import to_plain
from egru.report import DARK, LIGHT, Epoch, Raster, page, read_runs, write_report
from tests.report import examples
from tests.report.parsing import Page

matplotlib = pytest.importorskip("matplotlib", reason="figures need matplotlib")
matplotlib.use("Agg")

FIGURES = ["quality", "computation", "layers-1", "raster-1", "activity-1", "sparsity-1", "curves"]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def blank_figures(monkeypatch):
    """Skip rendering, which most tests do not look at."""
    monkeypatch.setattr(page, "_png", lambda figure: PNG)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A report with rendered figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "DPI", 30)
        return write(tmp_path_factory.mktemp("drawn") / "deep" / "report")


def write(folder: Path, runs=None, rasters=None, **changes) -> Path:
    options = {"command": "egru demo --seed 3", "config": {"hidden_size": 32}} | changes
    rasters = [examples.raster()] if rasters is None else rasters
    return write_report(folder, "Digits & events", runs or examples.pair(), rasters, **options)


def test_page_contains_every_figure_and_number(drawn):
    assert drawn.parts[-3:] == ("deep", "report", "index.html")
    parsed = Page(drawn)
    names = ["activity-egru.png", "index.html", "macs.png", "raster-1.png", "report.json", "training.png"]
    assert sorted(p.name for p in drawn.parent.iterdir()) == names
    assert parsed.figures == FIGURES
    assert parsed.described == parsed.tags.count("figcaption") == len(FIGURES)
    run = examples.run()
    expected = (
        *("Digits & events", "97.8 %", "98.2 %", "0.4 points below GRU", "3,532", "egru demo --seed 3", "hidden_size"),
        *(format.ratio(run.forward_saving), format.ratio(run.backward_saving), run.activity.energy.assumption),
        *(torch.__version__, f"{100 * run.activity.activity_sparsity:.0f} %", "70.0 %", "60.0 %"),
    )
    for text in expected:
        assert text in parsed.text


def test_page_loads_no_other_file(drawn):
    assert Page(drawn).addresses == []
    source = drawn.read_text(encoding="utf-8")
    for word in ("http:", "https:", "url(", "@import", "<link", "fetch(", "XMLHttpRequest"):  # cannot occur in base64
        assert word not in source
    assert "default-src 'none'" in source  # enforced by the browser


def test_headline_states_the_saving(drawn):
    text = " ".join(Page(drawn).text.split())
    saved = format.percent(1 - 1 / examples.run().forward_saving, 0)
    title = "Digits & events "
    assert text.startswith(f"{title}{title}Events saved {saved} of the forward computation.")  # title, kicker, headline


def test_page_contains_the_data_of_its_figures(drawn):
    source = drawn.read_text(encoding="utf-8")
    numbers = json.loads(re.search(r'id="numbers">(.*?)</script>', source, re.DOTALL)[1])  # pyright: ignore
    assert list(numbers) == ["quality", "raster-1", "activity-1", "sparsity-1", "curves"]  # bars are HTML
    assert numbers["curves"]["panels"][1]["series"][0]["points"][-1] == [4, pytest.approx(0.98352, abs=1e-5)]


def test_png_files_have_a_white_background(drawn):
    import matplotlib.image

    files = list(drawn.parent.glob("*.png"))
    assert len(files) == 4
    for file in files:
        assert matplotlib.image.imread(file)[0, 0].tolist() == [1, 1, 1, 1]


def test_page_is_written_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert Page(write(tmp_path)).figures == FIGURES
    assert {p.name for p in tmp_path.iterdir()} == {"index.html", "report.json"}


def test_page_uses_the_colours_of_the_themes(drawn):
    light, dark = drawn.read_text(encoding="utf-8").split("<style>")[1].split("@media", 2)[:2]
    assert f"--hue0: {LIGHT.event[0]};" in light
    assert f"--hue0: {DARK.event[0]};" in dark


def test_page_of_a_large_language_model_stays_small(tmp_path):
    """Penn Treebank: 2500 epochs, layers of 1350, 1350 and 788 units, 160 words, 20 % of the units active."""
    sizes = (("layer0", 1350), ("layer1", 1350), ("layer2", 788))
    rng = np.random.default_rng(0)
    events = rng.random((160, 3488)) * (rng.random((160, 3488)) < 0.2)
    raster = Raster("Words", rng.random((160, 788)), events, None, "", sizes, ("word",) * 160)
    history = tuple(
        Epoch(
            i, 5 + rng.random(), rng.random(), rng.random(), 1.0, 60 + rng.random(), {n: rng.random() for n, _ in sizes}
        )
        for i in range(1, 2501)
    )
    run = examples.run(history=history, perplexity=57.2)
    page = write(tmp_path, [run, dataclasses.replace(run, name="EGRU 2")], [raster, raster])
    assert page.stat().st_size < 1.5e6  # 3 MB are allowed
    assert "Validation perplexity" in page.read_text(encoding="utf-8")


def test_page_compares_settings_and_environments_of_runs(tmp_path):
    environment = Environment.current()
    runs = [
        examples.run(name, config={"hidden": 32, "cell": name}, environment=environment, command=f"train {name}")
        for name in ("EGRU", "EGRU b")
    ]
    text = " ".join(Page(write(tmp_path, runs, [], config={"shared": 1}, notes=["No data & no events."])).text.split())
    assert "Settings that differ setting EGRU EGRU b cell EGRU EGRU b" in text
    assert "Settings shared 1 hidden 32" in text
    assert "train EGRU train EGRU b egru demo --seed 3" in text
    assert f"Environment python {environment.versions['python']} egru " in text
    assert text.count(" threads ") == 1
    assert "page written" in text
    assert "No data & no events." in text
    other = [runs[0], dataclasses.replace(runs[1], environment=dataclasses.replace(environment, threads=99))]
    text = " ".join(Page(write(tmp_path, other, [])).text.split())
    assert "Environment EGRU python " in text
    assert "EGRU b python " in text
    again = [*other, dataclasses.replace(runs[0], name="EGRU c")]
    assert "Environment EGRU, EGRU c python " in " ".join(Page(write(tmp_path, again, [])).text.split())
    assert f" threads {environment.threads} " in text
    assert " threads 99 " in text


def test_only_settings_with_different_values_are_called_different(tmp_path):
    runs = [
        examples.run("EGRU", config={"data": "digits", "width": 0.5, "rate": 2, "depth": 1, "on": True}),
        examples.run("GRU", config={"data": "digits", "rate": 2.0, "depth": 2, "on": 1}),
    ]
    text = " ".join(Page(write(tmp_path, runs, [])).text.split())
    differing = text.split("Settings that differ")[1].split("Settings hidden_size")[0]
    assert differing.split() == ["setting", "EGRU", "GRU", "depth", "1", "2", "on", "yes", "1"]
    assert "data digits width 0.5 rate 2" in text.split("Settings hidden_size")[1]


def test_long_lists_of_settings_are_folded_and_changed_ones_come_first(tmp_path):
    config = {f"setting {i:02}": i for i in range(65)}
    path = write(tmp_path, [examples.run(config=config, changed=("setting 40",))], [], config={})
    text = " ".join(Page(path).text.split())
    assert "Settings Changed from the recipe setting 40 40 64 more settings setting 00 0" in text
    source = path.read_text(encoding="utf-8")
    assert source.index("<dt>setting 40</dt>") < source.index("<details>") < source.index("<dt>setting 00</dt>")
    other = examples.run("GRU", config={name: -1 - i for i, name in enumerate(config)})
    source = write(tmp_path, [examples.run(config=config), other], []).read_text(encoding="utf-8")
    assert "<h2>Settings that differ</h2><details><summary>65 settings</summary>" in source


def test_derived_run_shows_its_search_and_no_training(tmp_path):
    path = write(tmp_path, [examples.searched()], [])
    parsed, text = Page(path), " ".join(Page(path).text.split())
    assert parsed.figures == ["computation", "layers-1", "search-1", "activity-1"]
    assert "EGRU is first with raised thresholds; nothing was trained." in text
    assert "The search measured 3 settings of the thresholds on the validation split in 75.0 s." in text
    assert "on validation before after smallest threshold, per layer 0 0.5 loss 0.1000 0.1050" in text
    assert "time of the threshold search 75.0 s" in text
    assert "training time" not in text
    assert "epochs" not in text
    assert not (tmp_path / "training.png").exists()
    both = write(tmp_path, [examples.searched("EGRU b"), examples.run("EGRU a")], [])
    parsed, text = Page(both), " ".join(Page(both).text.split())
    assert "EGRU b has no training curves: its weights are those of first." in text
    assert "training time - 2.5 s time of the threshold search 75.0 s -" in text
    assert [figure for figure in parsed.figures if figure.startswith("sparsity")] == ["sparsity-2"]


def test_page_names_runs_that_were_not_tested(tmp_path):
    text = " ".join(Page(write(tmp_path, [examples.run(split="validation")], [])).text.split())
    assert "The test split was not scored: the numbers of EGRU are on validation." in text
    assert "validation accuracy 97.8 %" in text
    assert "test accuracy" not in text
    text = " ".join(Page(write(tmp_path, [examples.run(split="validation"), examples.run("GRU")], [])).text.split())
    assert "accuracy 97.8 % (validation) 97.8 % (test)" in text
    assert "points below" not in text  # the splits differ


def test_runs_on_other_data_are_no_baseline(tmp_path):
    runs = [examples.run("GRU", config={"data": "dvs"}), examples.run(config={"data": "smnist"})]
    parsed = Page(write(tmp_path, runs, []))
    assert "points" not in parsed.text
    assert "quality" not in parsed.figures
    assert "no dense baseline" in parsed.text


def test_many_runs_have_no_sentence_each(tmp_path):
    parsed = Page(write(tmp_path, [examples.run(f"EGRU {i}") for i in range(6)], []))
    assert "EGRU 1 used" not in parsed.text


def test_table_of_many_runs_has_one_row_per_run(tmp_path):
    runs = [examples.run(f"EGRU {i}", accuracy=i / 10) for i in range(7)]
    text = " ".join(Page(write(tmp_path, runs, [])).text.split())
    assert "All numbers run test accuracy validation accuracy (last epoch) activity sparsity" in text
    assert "EGRU 3 30.0 % 98.4 %" in text


def test_more_than_two_runs_have_a_table_instead_of_cards(tmp_path):
    runs = [examples.run(f"EGRU {i}") for i in range(3)]
    source = write(tmp_path, runs, []).read_text(encoding="utf-8")
    assert 'class="headline"' not in source
    assert source.index("All numbers") < source.index("Where the computation goes")


def test_report_json_round_trips(tmp_path):
    path = write(
        tmp_path, config={"threshold": egru.Threshold("clamp"), "rate": math.inf, "where": Path("runs"), "n": [1]}
    )
    stored = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert read_runs(tmp_path / "report.json") == tuple(examples.pair())
    assert stored["command"] == "egru demo --seed 3"
    assert stored["config"]["threshold"]["kind"] == "clamp"
    assert (stored["config"]["rate"], stored["config"]["where"], stored["config"]["n"]) == ("inf", "runs", [1])
    assert stored["environment"] == to_plain(Environment.current())
    assert stored["derived"]["EGRU"] == examples.run().derived()
    assert "kind clamp" in Page(path).text


def test_text_is_escaped(tmp_path):
    run = examples.run("EGRU <b></script><s>")
    path = write(tmp_path, [run], [], command="a < b && c", config={"<s>": "<u>"})
    parsed = Page(path)
    assert "a < b && c" in parsed.text
    assert "EGRU <b></script><s>" in parsed.text
    assert parsed.tags.count("script") == 2
    assert "<u>" in parsed.text
    assert not {"s", "u"} & set(parsed.tags)


def test_page_of_dense_runs(tmp_path):
    parsed = Page(write(tmp_path, [examples.run("GRU", accuracy=0.5)], []))
    assert "None of the runs has event layers. GRU has a test accuracy of 50.0 %." in parsed.text
    assert "No computation was skipped." in parsed.text
    assert parsed.figures == ["computation", "curves"]


def test_page_of_two_event_runs_without_baseline(tmp_path):
    parsed = Page(write(tmp_path, [examples.run("EGRU a"), examples.run("EGRU b")], []))
    assert "EGRU a used" in parsed.text
    assert "EGRU b used" in parsed.text
    assert "layers-2" in parsed.figures
    assert "points above" not in parsed.text
    assert "points below" not in parsed.text
    assert {p.name for p in tmp_path.glob("activity-*")} == {"activity-egru-a.png", "activity-egru-b.png"}


def test_names_that_differ_in_punctuation_get_different_files(tmp_path):
    write(tmp_path, [examples.run("EGRU+"), examples.run("EGRU-")], [])
    assert len(list(tmp_path.glob("activity-*.png"))) == 2


def test_macs_of_a_baseline_of_another_size_are_shown(tmp_path):
    large = examples.run("GRU", activity=examples.dense_activity(64))
    assert "per step; GRU 12.7K" in Page(write(tmp_path, [large, examples.run()], [])).text


def test_failure_leaves_the_previous_report_unchanged(tmp_path, monkeypatch):
    path = write(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="write_report: runs must contain at least one RunReport, got none"):
        write_report(tmp_path, "t", [], [], command="", config={})

    def fail(raster):
        raise RuntimeError("no ink")

    with monkeypatch.context() as patch:
        patch.setattr(page, "event_raster", fail)
        with pytest.raises(RuntimeError, match="no ink"):
            write(tmp_path, [examples.run(accuracy=0.1)])
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path, [examples.run(accuracy=0.1)])
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert path in before


def test_second_report_replaces_the_first(tmp_path):
    write(tmp_path)
    assert "12.3 %" in Page(write(tmp_path, [examples.run(accuracy=0.123)])).text
    assert not list(tmp_path.glob(".*"))


def test_folder_must_not_be_a_file(tmp_path):
    (tmp_path / "report").write_text("text")
    with pytest.raises(NotADirectoryError, match="folder must be a directory or not exist yet"):
        write(tmp_path / "report")
    assert (tmp_path / "report").read_text() == "text"


def test_reports_on_sequential_mnist_link_the_interactive_page(tmp_path):
    runs = [examples.run("EGRU", config={"data": "smnist"})]
    page = write_report(tmp_path, "digits", runs, [], command="", config={}).read_text(encoding="utf-8")
    assert '<a href="digits.html">Draw a digit</a>' in page
    assert (tmp_path / "digits.html").read_bytes() == PAGE.read_bytes()
    for other in (examples.run("GRU", config={"data": "smnist"}), examples.run("EGRU", config={"data": "dvs"})):
        assert "digits.html" not in write_report(tmp_path, "other", [other], [], command="", config={}).read_text()
