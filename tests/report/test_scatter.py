"""Tests of the scatter plots: quality against cost of runs, and threshold searches."""

from egru.report import StepTime, scatter
from tests.report import examples

TIME = StepTime(3e-6, "EventEngine, 1 thread", "a CPU")


def test_quality_is_drawn_against_macs_and_measured_time():
    runs = [examples.run("GRU"), examples.run("EGRU a", step_time=TIME), examples.run("EGRU b", accuracy=0.9)]
    figure = scatter.quality(runs)
    assert figure is not None
    assert figure.data is not None
    macs, times = figure.data["panels"]
    assert [point["name"] for point in macs["points"]] == ["GRU", "EGRU a", "EGRU b"]
    assert macs["points"][1]["x"] == float(f"{runs[1].activity.forward_macs:.5g}")
    assert [(point["name"], point["x"], point["y"]) for point in times["points"]] == [("EGRU a", 3e-6, 0.978)]
    assert [point["label"] for point in macs["points"]] == ["1", "2", "3"]
    assert [entry["name"] for entry in figure.data["legend"]] == ["1 GRU", "2 EGRU a", "3 EGRU b"]
    assert "measured with EventEngine, 1 thread on a CPU." in figure.caption
    assert "No time per step was measured for GRU, EGRU b." in figure.caption


def test_runs_without_a_measured_time_have_no_point():
    figure = scatter.quality(examples.pair())
    assert figure is not None
    assert figure.data is not None
    assert [panel["x"]["label"] for panel in figure.data["panels"]] == ["forward MACs per step"]
    assert "No run has a measured time per step." in figure.caption


def test_runs_on_different_data_are_not_compared():
    runs = [
        examples.run(name, config={"data": data})
        for name, data in (("EGRU a", "dvs"), ("EGRU b", "smnist"), ("GRU", "dvs"))
    ]
    figure = scatter.quality(runs)
    assert figure is not None
    assert figure.data is not None
    (panel,) = figure.data["panels"]
    assert panel["title"].endswith("(dvs)")
    assert [point["label"] for point in panel["points"]] == ["1", "3"]
    assert scatter.quality(runs[:2]) is None
    assert scatter.quality(runs[:1]) is None


def test_search_marks_the_run_before_and_the_choice():
    run = examples.searched()
    assert run.search is not None
    data = scatter.threshold_search(run, run.search, "red", "search-1").data
    assert data is not None
    points = data["panels"][0]["points"]
    assert [point.get("label") for point in points] == ["before", "chosen", None]
    assert [point["x"] for point in points] == [3000.0, 2750.0, 2500.0]
