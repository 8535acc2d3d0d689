"""Damaged files of a run: every error is one sentence that names the file, and nothing else is raised."""

import dataclasses
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from egru import cli
from egru.experiments import find, smoke
from egru.runs import export, load, resume, train
from egru.runs.load import read_run_config
from egru.runtime.shards import digest
from egru.training import DamagedCheckpointError, DamagedMetricsError, Run, RunError, checkpoint, make_optimiser
from egru.training.optimise import make_scaler

SMALL = dataclasses.replace(smoke(find("digits").make()), hidden=8, epochs=2, limit=60)
ERRORS = (RunError, DamagedCheckpointError, DamagedMetricsError, ValueError, FileNotFoundError)
READERS: dict[str, Callable[[Run], Any]] = {
    "config.json": read_run_config,
    "environment.json": Run.environment,
    "metrics.jsonl": Run.metrics,
    "result.json": Run.result,
}


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("trained")
    train("digits", SMALL, folder / "run", lambda message: None, page=False)
    export(folder / "run", folder / "small", "int8")
    return folder


@pytest.fixture
def run(trained, tmp_path) -> Run:
    return Run.open(shutil.copytree(trained / "run", tmp_path / "run"), lambda message: None)


def refuses(operation: Callable[[], Any], *names: str) -> bool:
    """Return whether ``operation`` raises, and check that the message is one line that has one of the names."""
    try:
        operation()
        return False
    except ERRORS as error:
        message = str(error)
    assert any(name in message for name in names), message
    assert "\n" not in message
    return True


def truncations_and_flips(data: bytes, count: int) -> Iterator[bytes]:
    choice = random.Random(8)
    for _ in range(count):
        yield data[: choice.randrange(len(data))]
        changed = bytearray(data)
        changed[choice.randrange(len(data))] ^= 1 << choice.randrange(8)
        yield bytes(changed)
        start = choice.randrange(len(data))
        yield data[:start] + choice.randbytes(20) + data[start + 20 :]
    yield from (b"", b"{}", b"[]", b"7", b'"text"', b"null", b"[" * 100_000, b"\xff\xfe\x00")


def type_swaps(value: Any) -> Iterator[Any]:
    """Yield ``value`` with one entry replaced, for every entry and several types, and without each entry."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield {name: other for name, other in value.items() if name != key}
            yield from (value | {key: swapped} for swapped in type_swaps(entry))
    elif isinstance(value, list):
        for i, entry in enumerate(value[:2]):
            yield from ([*value[:i], swapped, *value[i + 1 :]] for swapped in type_swaps(entry))
        yield value[:-1]
    yield from (None, True, -7, 1.5, 10**400, "text", [], [[1]], {}, {"a": 1})


@pytest.mark.parametrize("name", READERS)
def test_damaged_records_are_named(name, run):
    path = run.folder / name
    good = path.read_bytes()
    refused = 0
    for bad in truncations_and_flips(good, 60):
        path.write_bytes(bad)
        refused += refuses(lambda: READERS[name](run), name)
    assert refused > 80


@pytest.mark.parametrize("name", ["config.json", "environment.json", "result.json"])
def test_values_of_another_type_are_named(name, run):
    path = run.folder / name
    refused = 0
    for bad in type_swaps(json.loads(path.read_bytes())):
        path.write_text(json.dumps(bad))
        refused += refuses(lambda: READERS[name](run), name)
    assert refused > 100


def test_damaged_configs_build_no_model(run):
    """Values that are valid by themselves may not fit the data, the weights or each other."""
    path = run.folder / "config.json"
    good = path.read_bytes()
    for bad in truncations_and_flips(good, 40):
        path.write_bytes(bad)
        refuses(lambda: load(run.folder, log=lambda message: None), "config.json")
    record = json.loads(good)
    for field, value, message in [
        ("hidden", 9, "the weights of .*run do not fit its config.json: layer0.weight_ih_l0 has shape"),
        ("layers", 0, "config.json: .*num_layers must be at least 1, got 0"),
        ("data", "digitz", "config.json: ClassifierConfig: data must be one of digits, .*, got 'digitz'"),
        ("device", "gpu", "config.json: ClassifierConfig: device must be a device of torch.*, got 'gpu'"),
        ("cell", "GRU", "config.json: ClassifierConfig: cell must be one of egru, .*, got 'GRU'"),
        ("threshold", 3, "config.json: ClassifierConfig: threshold must be an object, got 3"),
        ("betas", [0.9], "config.json: ClassifierConfig: betas must be a list of 2, got"),
    ]:
        path.write_text(json.dumps(record | {"config": record["config"] | {field: value}}))
        with pytest.raises((RunError, ValueError), match=message):
            load(run.folder)


def rewrite_sums(folder: Path) -> None:
    """Write checksums that match the files, as someone who changes a checkpoint on purpose would."""
    names = (checkpoint.WEIGHTS, checkpoint.TRAINER, checkpoint.STATE)
    digests = (f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    (folder / checkpoint.SUMS).write_text("".join(digests))


@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.TRAINER, checkpoint.STATE])
def test_crafted_checkpoints_are_refused(name, run):
    trained = load(run.folder)
    optimiser, scaler = make_optimiser(trained.model, trained.config), make_scaler(trained.config)
    saved = [run.checkpoint_path(epoch) for epoch in run.saved_epochs()]
    good = (saved[-1] / name).read_bytes()
    damages = [b"", b"\xff" * 8, (10**9).to_bytes(8, "little") + b"{}", b"\x02" + bytes(7) + b"{}"]
    damages += [safetensors.torch.save({key: torch.zeros(3)}) for key in ("a", "optimiser.x.y", "optimiser.0.step")]
    damages += list(truncations_and_flips(good, 5))
    damages += [json.dumps(bad).encode() for bad in _states(json.loads(good))] if name == checkpoint.STATE else []
    refused = 0
    for damage in damages:
        for path in saved:
            (path / name).write_bytes(damage)
            rewrite_sums(path)
        refuses(lambda: load(run.folder, log=lambda message: None), "epoch", "config.json")
        refused += refuses(
            lambda: run.restore(trained.model, optimiser, torch.device("cpu"), scaler), "epoch", "config.json"
        )
    assert refused > 10


def _states(state: dict[str, Any]) -> Iterator[Any]:
    for part in ("optimiser", "metadata"):
        for bad in (None, 7, [], {}, "text"):
            yield state | {part: bad}
        for key in state[part]:
            for bad in (None, 7, [], {}, "text", {"a": 1}, [{"a": 1}]):
                yield state | {part: state[part] | {key: bad}}


def test_crafted_exports_are_refused(trained, tmp_path):
    folder = shutil.copytree(trained / "small", tmp_path / "small")
    (path,) = folder.glob("weights-*.safetensors")
    good = path.read_bytes()
    crafted = [
        safetensors.torch.save({"a": torch.zeros(3)}),  # no metadata
        safetensors.torch.save({"a@x": torch.zeros(3)}, {"sha256": digest({"a@x": torch.zeros(3)})}),
        safetensors.torch.save({"a": torch.zeros(3)}, {"sha256": digest({"a": torch.zeros(3)})}),
    ]
    refused = 0
    for bad in (*truncations_and_flips(good, 20), *crafted):
        path.write_bytes(bad)
        refused += refuses(lambda: load(folder, log=lambda message: None), "small")
    assert refused > 60


def test_other_files_among_the_checkpoints_are_ignored(run):
    checkpoints = run.folder / "checkpoints"
    shutil.copytree(run.checkpoint_path(2), checkpoints / "epoch-00009.bak")
    (checkpoints / "epoch-notes").mkdir()
    (checkpoints / "epoch-00011").write_text("a file")
    assert run.saved_epochs() == [1, 2]
    (run.folder / "result.json").unlink()
    assert resume(run.folder, lambda message: None).best_epoch in (1, 2)
    assert (checkpoints / "epoch-00009.bak").is_dir()


@pytest.mark.parametrize("command", ["evaluate run", "report run", "export run out", "train --resume run"])
def test_commands_report_damage_in_one_line(command, run, capsys, monkeypatch):
    monkeypatch.chdir(run.folder.parent)
    config = run.folder / "config.json"
    good = config.read_text()
    for bad in ("{", "[]", "{}", good.replace('"digits"', '"digitz"')):
        config.write_text(bad)
        (run.folder / "result.json").unlink(missing_ok=True)
        code = cli.main(command.split())
        error = capsys.readouterr().err
        if command.startswith("export"):  # copies the config without reading it
            assert (code, error) == (0, "")
            assert Path("out/config.json").read_text() == bad
            shutil.rmtree("out")
            continue
        assert code == 1
        assert error.startswith("egru: run/config.json: ")
        assert error.count("\n") == 1
