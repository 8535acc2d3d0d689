"""Round trips of the records of a run, and what is refused."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egru.activity import ActivitySummary, EnergyModel, LinearActivity
from egru.environment import Environment
from egru.files import replace_file
from egru.records import FORMAT, FormatError, dumps, from_plain, read_json, to_plain, write_json
from egru.training import ClassifierTraining, EpochMetrics, Result, Run, Scores
from egru.training.records import (
    Derivation,
    EpochEnergy,
    KeptRecord,
    LayerStability,
    ModelActivity,
    RunEnergy,
    Sparsity,
    ThresholdTrial,
    TrainingMetrics,
)
from tests.activity.test_summary import SUMMARIES

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.text(max_size=10)
SCORES = st.builds(Scores, NUMBERS, NUMBERS, st.none() | NUMBERS)
SPARSITIES = st.builds(Sparsity, NUMBERS, st.none() | NUMBERS, st.none() | NUMBERS)
LAYERS = st.dictionaries(NAMES, SPARSITIES, max_size=3)
STABILITIES = st.builds(LayerStability, NAMES, NUMBERS, st.none() | NUMBERS, st.none() | NUMBERS)
TRAINING = st.builds(
    TrainingMetrics, NUMBERS, NUMBERS, st.none() | NUMBERS, NUMBERS, st.integers(), NUMBERS, st.none() | st.integers()
)
METRICS = st.builds(
    EpochMetrics,
    st.integers(),
    TRAINING,
    SCORES,
    st.builds(ModelActivity, NUMBERS, st.none() | NUMBERS, st.none() | NUMBERS, NUMBERS, NUMBERS),
    LAYERS,
    st.none() | SPARSITIES,
    st.none() | LAYERS,
    st.lists(STABILITIES, max_size=3).map(tuple),
    NUMBERS,
    st.none() | NUMBERS,
)
TRIALS = st.builds(ThresholdTrial, st.lists(NUMBERS, max_size=3).map(tuple), SCORES, NUMBERS, NUMBERS)
DERIVATIONS = st.builds(Derivation, NAMES, NAMES, SCORES, st.lists(TRIALS, max_size=3).map(tuple))
RESULTS = st.builds(Result, st.integers(), SCORES, SUMMARIES, NUMBERS, st.none() | DERIVATIONS)
ENVIRONMENTS = st.builds(
    Environment, st.dictionaries(NAMES, NAMES), NAMES, st.integers(), st.none() | NAMES, st.dictionaries(NAMES, NAMES)
)


@given(METRICS | RESULTS | ENVIRONMENTS | st.builds(KeptRecord, NAMES, NAMES))
def test_round_trip_is_exact(record):
    assert type(record).from_dict(record.to_dict()) == record
    assert type(record).from_dict(json.loads(dumps(record.to_dict()))) == record
    assert record.to_dict()["format"] == FORMAT


SCALARS = st.none() | st.booleans() | st.integers() | NUMBERS | NAMES


@given(st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner)))
def test_dumps_writes_the_json_that_json_reads(value):
    assert json.loads(dumps(value)) == value


def test_lists_of_numbers_stay_on_one_line():
    text = '{\n  "a": [1, 2],\n  "b": [\n    {\n      "c": 3\n    }\n  ],\n  "d": {}\n}'
    assert dumps({"a": [1, 2], "b": [{"c": 3}], "d": {}}) == text


@pytest.fixture
def run(tmp_path) -> Run:
    """A finished run of two epochs, which was not trained."""
    run = Run.create(tmp_path / "run", {"recipe": "digits"})
    sparsity = Sparsity(0.5, None, None)
    for epoch in (1, 2):
        train = TrainingMetrics(1.0, 1.0, None, 2.0, 3, 0.1)
        activity = ModelActivity(0.5, None, None, 10.0, 20.0)
        run.append_metrics(
            EpochMetrics(epoch, train, Scores(1.0, 0.5), activity, {"a": sparsity}, sparsity, None, (), 1.0, None)
        )
    summary = ActivitySummary((), (LinearActivity("readout", 2, 3, 4, 5),), 6, EnergyModel())
    run.write_result(Result(2, Scores(1.0, 0.5), summary, 2.0))
    run.write_energy(RunEnergy({"package-0": "powercap"}, ("no GPU",), (EpochEnergy(1, {"package-0": 2.5}),)))
    KeptRecord("egru train digits", "2026-11-15", "").write(run.folder / "record.json")
    return run


READERS: dict[str, Any] = {
    "config.json": Run.config,
    "environment.json": Run.environment,
    "metrics.jsonl": Run.metrics,
    "energy.json": Run.energy,
    "result.json": Run.result,
    "record.json": lambda run: KeptRecord.read(run.folder / "record.json"),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("number", "message"), [(None, "no format number"), (1, "format 1"), (FORMAT + 1, f"format {FORMAT + 1}")]
)
def test_another_format_is_refused_in_every_file(name, number, message, run):
    path = run.folder / name
    lines = path.read_text().splitlines() if name == "metrics.jsonl" else [path.read_text()]
    records = [json.loads(line) for line in lines]
    assert all(record.pop("format") == FORMAT for record in records)
    changed = [record if number is None else {"format": number} | record for record in records]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in changed))
    expected = rf"{name}: the record has {message}; this version of egru reads format {FORMAT}"
    with pytest.raises(FormatError, match=expected):
        READERS[name](run)


def test_one_line_of_metrics_in_another_format_is_refused(run):
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"format": 7, "epoch": 3}\n')
    with pytest.raises(FormatError, match=r"metrics\.jsonl: the record has format 7"):
        run.metrics()


def test_files_that_are_not_json_are_named(tmp_path):
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(ValueError, match=r"record\.json: not a JSON file"):
        KeptRecord.read(tmp_path / "record.json")
    write_json(tmp_path / "record.json", {"command": "egru"})
    with pytest.raises(ValueError, match=r"record\.json: KeptRecord: field 'date' is missing"):
        KeptRecord.read(tmp_path / "record.json")
    assert read_json(tmp_path / "record.json") == {"command": "egru"}


@dataclasses.dataclass
class _Unions:
    either: int | str | None
    numbers: tuple[int | float, ...] = ()


def test_values_of_unions_have_one_of_their_types():
    for plain in ({"either": "auto", "numbers": [1, 0.5]}, {"either": 3}, {"either": None}):
        assert to_plain(from_plain(_Unions, plain)) == {"numbers": [], **plain}
    with pytest.raises(ValueError, match=r"_Unions: either must be an int or a string, got 0\.5"):
        from_plain(_Unions, {"either": 0.5})


def test_settings_added_later_take_their_defaults():
    plain = to_plain(ClassifierTraining(epochs=3))
    del plain["label_smoothing"]
    assert from_plain(ClassifierTraining, plain) == ClassifierTraining(epochs=3)
    with pytest.raises(ValueError, match="ClassifierTraining: field 'label_smoothing' is missing"):
        from_plain(ClassifierTraining, plain, use_defaults=False)


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    replace_file(path, b"old")

    def fail(*_):
        raise OSError("full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="full"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
