import dataclasses
import io
import sys
from typing import Any

import numpy as np
import pytest

from egru import format
from egru.report import DARK, LIGHT, Raster, activity_histogram, event_raster, macs_bar, training_curves
from tests.report import examples

matplotlib = pytest.importorskip("matplotlib", reason="figures require matplotlib")
matplotlib.use("Agg")


def texts(figure) -> str:
    from matplotlib.text import Text

    return " | ".join(text.get_text() for text in figure.findobj(Text) if text.get_text())


def bars(axes: Any) -> list[Any]:
    return list(axes.patches)


def pixels(figure) -> np.ndarray:
    import matplotlib.image

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=60)
    buffer.seek(0)
    return matplotlib.image.imread(buffer)


def test_training_curves_show_every_run_and_value():
    runs = examples.pair()
    figure = training_curves(runs)
    loss, accuracy, sparsity = figure.axes
    assert [line.get_label() for line in loss.lines] == ["GRU", "EGRU"]
    for line, run in zip(accuracy.lines, runs, strict=True):
        np.testing.assert_array_equal(line.get_xdata(), [1, 2, 3, 4])
        np.testing.assert_array_equal(line.get_ydata(), [epoch.validation_accuracy for epoch in run.history])
    assert len(sparsity.lines) == 1  # none for the dense run
    assert "epoch" in texts(figure)


@pytest.mark.parametrize("plot", [training_curves, macs_bar])
def test_figures_of_many_runs_have_room(plot, recwarn):
    figure = plot([examples.run(f"EGRU {i} (a-recipe-with-a-very-long-name-seed0-20260101-1200)") for i in range(28)])
    pixels(figure)
    assert all(axes.get_position().width > 0.3 for axes in figure.axes)
    assert [str(warning.message) for warning in recwarn] == []


def test_training_curves_of_language_models_show_the_perplexity():
    run = examples.run(epochs=40)
    history = (dataclasses.replace(e, validation_perplexity=56 + 240 * 0.7**e.epoch) for e in run.history)
    _, perplexity, _ = training_curves([dataclasses.replace(run, history=tuple(history))]).axes
    assert perplexity.get_title(loc="left").startswith("Validation perplexity (cut at ")
    assert 56 < perplexity.get_ylim()[1] < 80


def test_derived_runs_have_no_training_curves():
    figure = training_curves([examples.run("EGRU a"), examples.searched("EGRU b")])
    assert len(figure.axes[0].lines) == 1
    with pytest.raises(
        ValueError, match="training_curves: runs must contain at least one run with a history, got none"
    ):
        training_curves([examples.searched()])


def test_training_curves_of_dense_runs_have_no_sparsity_panel():
    assert len(training_curves([examples.run("GRU")]).axes) == 2


def test_single_epoch_is_drawn_as_a_dot():
    line = training_curves([examples.run(epochs=1)]).axes[0].lines[0]
    assert line.get_marker() == "o"


def test_macs_bar_shows_effective_and_dense_macs():
    runs = examples.pair()
    figure = macs_bar(runs)
    for axes, direction in zip(figure.axes, ("forward", "backward"), strict=True):
        widths = [patch.get_width() for patch in bars(axes)]
        for run in runs:
            assert getattr(run.activity, f"{direction}_macs") in widths
            assert getattr(run.activity, f"dense_{direction}_macs") in widths
    assert f"{format.ratio(runs[1].forward_saving)} fewer" in texts(figure)
    assert f"{format.ratio(1.0)} fewer" not in texts(figure)


def test_histogram_counts_every_unit_once():
    figure = activity_histogram(examples.run())
    assert sum(patch.get_height() for patch in bars(figure.axes[0])) == 32
    shown = texts(figure)
    assert "2 never active" in shown
    assert "1 always active" in shown
    assert "32 units" in shown


@pytest.mark.parametrize("units", [(0.0,) * 6, (1.0,) * 6, (0.99, 0.999, 0.001, 0.5)])
def test_histogram_of_extreme_layers(units):
    figure = activity_histogram(examples.run(activity=examples.event_activity(units)))
    assert f"{units.count(0.0)} never active" in texts(figure)
    assert f"{units.count(1.0)} always active" in texts(figure)
    assert sum(patch.get_height() for patch in bars(figure.axes[0])) == len(units)


def test_histogram_requires_event_layers():
    with pytest.raises(ValueError, match="run 'GRU' has no event layers"):
        activity_histogram(examples.run("GRU"))


def test_raster_has_one_dot_per_event_and_one_time_axis():
    raster = examples.raster()
    figure = event_raster(raster)
    dots: Any = max(
        (c for axes in figure.axes for c in axes.collections), key=lambda c: len(np.asarray(c.get_offsets()))
    )
    t, unit = np.nonzero(raster.events)
    assert len(dots.get_offsets()) == len(t)
    assert sorted(dots.get_offsets()[:, 0]) == sorted(t)
    np.testing.assert_array_equal(np.sort(np.asarray(dots.get_array())), np.sort(raster.events[t, unit]))
    on_time_axis = [axes for axes in figure.axes if axes.get_xlim() == (-0.5, 19.5)]
    assert len(on_time_axis) == 3
    assert raster.image is not None
    (picture,) = [image for axes in figure.axes for image in axes.images]
    np.testing.assert_array_equal(np.asarray(picture.get_array()), raster.image)
    assert "A seven" in texts(figure)
    assert "predicted 7" in texts(figure)


@pytest.mark.parametrize("inputs", [1, 5])
@pytest.mark.parametrize("image", [True, False])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_raster_draws_with_and_without_image(inputs, image, sign):
    drawn = pixels(event_raster(examples.raster(inputs=inputs, image=image, sign=sign)))
    assert np.ptp(drawn[..., :3]) > 0.5


def test_raster_leaves_out_units_without_events():
    events = np.zeros((9, 5))
    events[2:4, 1], events[7, 3] = 0.5, 0.25
    figure = event_raster(Raster("Dead units", np.zeros((9, 1)), events, None, ""))
    assert "units, most active first (3 without events left out)" in texts(figure)
    assert max(axes.get_ylim()[0] for axes in figure.axes if "most active" in axes.get_ylabel()) < 2


def test_raster_without_events():
    raster = Raster("Nothing", np.zeros((9, 1)), np.zeros((9, 4)), None, "")
    figure = event_raster(raster)
    assert "no events" in texts(figure)
    assert "activity sparsity 100 %" in texts(figure)
    assert np.ptp(pixels(figure)[..., :3]) > 0.5


def test_light_figures_are_white_and_dark_figures_transparent():
    for plot in (training_curves, macs_bar):
        light, dark = pixels(plot(examples.pair(), theme=LIGHT)), pixels(plot(examples.pair(), theme=DARK))
        np.testing.assert_array_equal(light[0, 0], [1, 1, 1, 1])
        assert dark[0, 0, 3] == 0


def test_drawing_does_not_change_rcparams():
    before = dict(matplotlib.rcParams)
    macs_bar(examples.pair())
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("plot", [training_curves, macs_bar])
def test_runs_must_be_non_empty_and_distinct(plot):
    with pytest.raises(ValueError, match="runs must contain at least one RunReport, got none"):
        plot([])
    with pytest.raises(ValueError, match="distinct names, got 'EGRU', 'EGRU'"):
        plot([examples.run(), examples.run()])


def test_error_without_matplotlib_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'egru\[demo\]'"):
        macs_bar(examples.pair())


def test_largest_negative_value_has_the_strongest_contrast():
    events = np.zeros((5, 2))
    events[1, 0], events[3, 1] = -0.1, -0.9
    figure = event_raster(Raster("Below", np.zeros((5, 1)), events, None, ""))
    dots: Any = max(
        (c for axes in figure.axes for c in axes.collections), key=lambda c: len(np.asarray(c.get_offsets()))
    )
    weak, strong = dots.to_rgba([-0.1, -0.9])
    assert strong[:3].sum() < weak[:3].sum()  # darker on white


def test_dollar_signs_are_escaped():
    run = dataclasses.replace(examples.pair()[1], name="a$b_$")
    for draw in (training_curves, macs_bar):
        pixels(draw([run]))
    figure = activity_histogram(run)
    pixels(figure)
    assert r"a\$b_\$" in texts(figure)
