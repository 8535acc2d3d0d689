"""Tests of the figures' HTML and of the data that the scripts draw."""

import base64
import dataclasses

import numpy as np
import pytest

from egru import format
from egru.report import Raster, figures, rasters
from tests.report import examples


def levels(text: str, rows: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(rows, -1)


def test_bars_show_effective_and_dense_macs():
    figure = figures.computation(examples.pair())
    activity = examples.run().activity
    used = 100 * activity.forward_macs / activity.dense_forward_macs
    assert f"width:{used:.2f}%" in figure.content
    assert figure.content.count('class="bar"') == 6
    assert figure.content.count("saved") == 3  # none for the GRU
    assert "var(--dense)" in figure.content


def test_layers_show_the_macs_of_each_part():
    run = examples.run()
    cost = run.activity.layers[0].cost
    content = figures.layers(run, "red", "layers-1").content
    assert content.count('class="bar"') == 3  # input, recurrence, readout
    rows = 3 * cost.hidden_size
    inputs = rows * (0.5 * 1 + 1)
    assert f">{inputs:.0f} of {2 * rows}" in content
    assert (
        f">{format.count(rows * cost.activity * cost.hidden_size)} of {format.count(rows * cost.hidden_size)}"
        in content
    )
    assert f"activity sparsity {100 * (1 - cost.activity):.0f} %" in content


def test_layer_that_runs_every_other_step_counts_half():
    activity = examples.event_activity()
    (layer,) = activity.layers
    slow = dataclasses.replace(
        layer,
        name="slow",
        steps=layer.steps // 2,
        active=tuple(count // 2 for count in layer.active),
        input_active=layer.input_active // 2,
    )
    content = figures.layers(
        examples.run(activity=dataclasses.replace(activity, layers=(layer, slow))), "red", "layers-1"
    ).content
    rows = 3 * layer.cost.hidden_size
    for share in (1, 0.5):
        assert f">{rows * 1.5 * share:.0f} of {rows * 2 * share:.0f}" in content
        assert f" of {format.count(rows * layer.cost.hidden_size * share)}" in content


def test_language_models_have_a_perplexity_panel():
    run = examples.run(perplexity=60.0)
    language = dataclasses.replace(
        run, history=tuple(dataclasses.replace(epoch, validation_perplexity=70.0) for epoch in run.history)
    )
    data = figures.curves([language]).data
    assert data is not None
    assert [panel["title"] for panel in data["panels"]][1] == "Validation perplexity"
    assert data["panels"][1]["log"]
    mixed = figures.curves([language, examples.run("GRU")]).data
    assert mixed is not None
    assert mixed["panels"][1]["title"] == "Validation accuracy"


def test_sparsity_is_drawn_by_layer_if_measured():
    run = examples.run()
    data, caption = figures.sparsity(run, "red", "sparsity-1").data, figures.sparsity(run, "red", "sparsity-1").caption
    assert data is not None
    assert [series["name"] for series in data["panels"][0]["series"]] == ["all layers"]
    assert "no metrics per layer" in caption
    layered = dataclasses.replace(
        run,
        history=tuple(dataclasses.replace(e, layer_sparsity={"layer0": 0.5, "layer1": 0.25}) for e in run.history[1:]),
    )
    data = figures.sparsity(layered, "red", "sparsity-1").data
    assert data is not None
    series = {entry["name"]: entry["points"] for entry in data["panels"][0]["series"]}
    assert series["layer1"] == [(2, 0.25), (3, 0.25), (4, 0.25)]
    assert len(series["all layers"]) == 3


def test_histogram_counts_every_unit_once():
    data = figures.histogram(examples.run(), "activity-1").data
    assert data is not None
    (layer,) = data["layers"]
    assert (layer["never"], layer["always"]) == (2, 1)
    assert layer["never"] + layer["always"] + sum(layer["bins"]) == 32
    assert "32 units" in data["title"]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_raster_data_contain_every_event_and_its_value(sign):
    raster = examples.raster(T=20, hidden=16, sign=sign)
    data = rasters.raster_figure(raster, "raster-1").data
    assert data is not None
    order = data["layers"][0]["units"]
    assert sorted(order) == list(range(16))
    drawn = levels(data["events"], 16)
    events = raster.events[:, order].T
    np.testing.assert_array_equal(drawn > 0, events != 0)
    values = data["low"] + (drawn - 1.0) / 254 * (data["high"] - data["low"])
    spread = data["high"] - data["low"]
    assert np.abs(values - events)[events != 0].max() < spread / 500 + 1e-4
    assert data["active"] == (raster.events != 0).sum(1).tolist()
    activity = (events != 0).sum(1)
    assert (np.diff(activity) <= 0).all()  # most active first


def test_large_rasters_show_evenly_spaced_units():
    rng = np.random.default_rng(0)
    events = (rng.random((900, 1000)) < np.linspace(0, 1, 1000)).astype(float)
    raster = Raster("Large", rng.random((900, 300)), events, None, "", (("a", 600), ("b", 400)))
    figure = rasters.raster_figure(raster, "raster-1", cells=152_200)
    data = figure.data
    assert data is not None
    assert data["steps"] == 784
    assert [len(layer["units"]) for layer in data["layers"]] == [97, 97]
    assert levels(data["events"], 194).size <= 152_200
    assert data["layers"][1]["size"] == 400
    assert max(data["layers"][1]["units"]) < 400  # numbered within the layer
    assert levels(data["input"]["data"], 64).shape == (64, 784)
    drawn = levels(data["events"], 194)[97:] > 0
    np.testing.assert_array_equal(drawn, events[:784, 600 + np.array(data["layers"][1]["units"])].T > 0)
    inactive = int((events[:784] == 0).all(0).sum())
    assert f"Not drawn: {inactive} of 1,000 units, which emit no event here." in figure.caption
    active = 1000 - inactive
    assert f"Drawn: 194 of the {active} active units, evenly spaced by activity." in figure.caption
    assert "Shown: the first 784 of 900 steps." in figure.caption
    assert data["active"][0] == int((events[0] != 0).sum())  # counts all units


def test_units_without_events_are_left_out_and_counted():
    events = np.zeros((20, 12))
    events[::2, 3], events[0, 7], events[5:, 10] = 0.5, 0.25, 1.0
    raster = Raster("Dead units", np.zeros((20, 1)), events, None, "", (("a", 6), ("b", 3), ("c", 3)))
    figure = rasters.raster_figure(raster, "raster-1")
    assert figure.data is not None
    assert [layer["units"] for layer in figure.data["layers"]] == [[3], [1], [1]]
    assert (levels(figure.data["events"], 3) > 0).sum() == 26
    assert "Not drawn: 9 of 12 units, which emit no event here." in figure.caption
    only_c = dataclasses.replace(raster, events=np.where(np.arange(12) == 10, events, 0.0))
    figure = rasters.raster_figure(only_c, "raster-1")
    assert figure.data is not None
    assert [layer["units"] for layer in figure.data["layers"]] == [[], [], [1]]
    silent = rasters.raster_figure(dataclasses.replace(raster, events=np.zeros((20, 12))), "raster-1")
    assert silent.data is not None
    assert sum(len(layer["units"]) for layer in silent.data["layers"]) == 12
    assert "Not drawn" not in silent.caption


def test_short_rasters_are_limited_too():
    data = rasters.raster_figure(Raster("Wide", np.zeros((9, 1)), np.ones((9, 1000)), None, ""), "raster-1").data
    assert data is not None
    assert len(data["layers"][0]["units"]) == rasters.MAX_UNITS


def test_rasters_share_the_limit_of_the_page():
    large = Raster("Large", np.zeros((500, 1)), np.ones((500, 400)), None, "")
    drawn = rasters.raster_figures([large] * 10)
    assert sum(len(base64.b64decode(f.data["events"])) for f in drawn if f.data) <= rasters.MAX_CELLS


def test_images_and_sequences_of_frames_are_reduced():
    picture = rasters.raster_figure(examples.raster(), "r").data
    assert picture is not None
    assert (picture["image"]["rows"], picture["image"]["columns"], picture["image"]["frames"]) == (8, 8, 1)
    frames = dataclasses.replace(examples.raster(), image=np.arange(20 * 96 * 128.0).reshape(20, 96, 128))
    data = rasters.raster_figure(frames, "r").data
    assert data is not None
    assert (data["image"]["rows"], data["image"]["columns"], data["image"]["frames"]) == (64, 64, 20)
    brightness = levels(data["image"]["data"], 20)
    assert (np.diff(brightness.astype(int).mean(1)) > 0).all()  # every frame is brighter than the one before
    stripes = dataclasses.replace(frames, image=np.broadcast_to(np.arange(96.0)[:, None], (20, 96, 128)).copy())
    data = rasters.raster_figure(stripes, "r").data
    assert data is not None
    first = levels(data["image"]["data"], 20)[0].reshape(64, 64)
    assert (first == first[:, :1]).all()  # rows are not transposed
    assert np.ptp(first) > 200


def test_raster_data_contain_the_words():
    raster = dataclasses.replace(examples.raster(T=3), words=("the", "old", "man"))
    data = rasters.raster_figure(raster, "r").data
    assert data is not None
    assert data["words"] == ["the", "old", "man"]
