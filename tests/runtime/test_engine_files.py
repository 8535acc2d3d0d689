"""Engine files: what they contain, and which ones are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from egru import EGRU, ELSTM, EventEngine, Threshold
from egru.compress import prune_weights
from egru.models import LanguageModel
from egru.runtime.engine_file import VERSION
from egru.runtime.network import Trace
from egru.runtime.shards import digest
from egru.types import WEIGHT_FORMATS, WeightFormat
from tests.runtime.networks import SUMMARIES, in_float64, network

pytestmark = pytest.mark.usefixtures("float32")


@pytest.mark.parametrize("trace", SUMMARIES)
@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_loaded_engine_computes_the_same_bits(
    runner: str, weights: WeightFormat, trace: Trace | None, tmp_path: Path
) -> None:
    path = tmp_path / "engine.safetensors"
    engine = EventEngine(network(), weights, 2, 3, trace=trace, embedding=nn.Embedding(9, 20))
    ids = torch.randint(9, (20, 3))
    expected = engine.run(ids)
    engine.save(path)
    loaded = EventEngine.load(path)
    assert repr(loaded) == repr(engine)
    assert loaded._options == engine._options
    assert list(loaded.state) == list(engine.state)
    assert not any(value.any() for value in loaded.state.values())
    assert torch.equal(loaded.run(ids), expected)
    single = EventEngine.load(str(path), streams=1, threads=1)
    torch.testing.assert_close(single.run(ids[:, 1]), expected[:, 1], rtol=0, atol=0 if runner == "compiled" else 1e-5)
    other = EventEngine(network(), "float32", trace=trace, embedding=None)
    other.save(path)
    assert EventEngine.load(path, weights).weights == weights


@pytest.mark.parametrize("inputs", [16, 17])
@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_files_contain_the_weights_as_the_engine_uses_them(weights: WeightFormat, inputs: int, tmp_path: Path) -> None:
    """Rows differ in scale by many orders of magnitude; a loaded engine writes the same tensors."""
    layer = EGRU(inputs, 200, threshold=Threshold.constant(0.05)).float()
    with torch.no_grad():
        for parameter in (layer.get_parameter("weight_ih_l0"), layer.get_parameter("weight_hh_l0")):
            parameter.mul_(torch.exp(4 * torch.randn(600, 1)))
        layer.get_parameter("weight_hh_l0")[7] = 0
    x = torch.randn(30, inputs)
    engine = EventEngine(layer, weights)
    engine.save(tmp_path / "engine")
    loaded = EventEngine.load(tmp_path / "engine")
    assert torch.equal(loaded.run(x), engine.run(x))
    loaded.save(tmp_path / "again")
    stored, again = (safetensors.torch.load_file(tmp_path / name) for name in ("engine", "again"))
    assert {name: tensor.dtype for name, tensor in again.items()} == {name: x.dtype for name, x in stored.items()}
    assert all(torch.equal(again[name], stored[name]) for name in stored)
    element = {"float32": 4, "bfloat16": 2, "int8": 1}[weights]
    matrices = 1 + (inputs > 16)
    other = 4 * (2 * 600 + 2 * 200 + (600 * matrices if weights == "int8" else 0))  # biases, theta, reset_scale, scales
    expected = 600 * 200 * element + 600 * inputs * (element if inputs > 16 else 4) + other
    assert expected <= (tmp_path / "engine").stat().st_size < expected + 2000
    if weights != "float32":
        with pytest.raises(ValueError, match=f"engine contains {weights} weights, got weights='float32'; save an"):
            EventEngine.load(tmp_path / "engine", "float32")


def test_loaded_engine_matches_float64(runner: str, tmp_path: Path) -> None:
    x = torch.randn(12, 20)
    for trace in SUMMARIES:
        EventEngine(network(), "bfloat16", trace=trace).save(tmp_path / "engine")
        y = EventEngine.load(tmp_path / "engine").run(x)
        torch.testing.assert_close(y.double(), in_float64("bfloat16", trace, x), rtol=0, atol=5e-6)


def test_damaged_bytes_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "engine.safetensors"
    EventEngine(EGRU(2, 3, threshold=Threshold.constant(0.1)), trace=0.5).save(path)
    data = path.read_bytes()
    for position in range(0, len(data), 7):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(ValueError, match=r"EventEngine.load: .*engine\.safetensors"):
            EventEngine.load(path)
    for length in (0, 1, 100, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(
            ValueError, match=r"EventEngine.load: .*engine\.safetensors is damaged or not an engine file"
        ):
            EventEngine.load(path)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    with pytest.raises(FileNotFoundError, match=r"there is no file .*weights\.safetensors"):
        EventEngine.load(path)
    safetensors.torch.save_file(network().state_dict(), path)
    with pytest.raises(ValueError, match=r"weights\.safetensors is not an engine file"):
        EventEngine.load(path)


CRAFTED: list[tuple[Any, str]] = [
    (lambda tensors, plain: tensors.pop("layers.0.theta"), "theta is missing"),
    (lambda tensors, plain: tensors.pop("layers.0.weight_ih"), "weight_ih is missing"),
    (lambda tensors, plain: tensors.pop("layers.0.weight_hh"), "weight_hh is missing"),
    (lambda tensors, plain: tensors.update({"layers.0.weight_hh.mask": torch.zeros(1)}), "mask is not part"),
    (lambda tensors, plain: tensors.update({"layers.0.weight_hh.blocks": tensors.pop("layers.0.weight_hh")}), "mask"),
    (lambda tensors, plain: plain.update(tied=True), "readout"),
    (lambda tensors, plain: tensors.update(extra=torch.zeros(1)), "extra is not part of the network"),
    (lambda tensors, plain: tensors.update({"layers.0.weight_hh": torch.zeros(3, 3)}), "weight_hh has shape"),
    (lambda tensors, plain: tensors.update({"layers.0.theta": torch.zeros(3).double()}), "expected float32"),
    (lambda tensors, plain: tensors.update({"layers.0.theta": torch.full((3,), torch.inf)}), "contains inf"),
    (lambda tensors, plain: tensors.update({"layers.0.weight_hh": torch.zeros(9, 3).char()}), "weight_hh.largest"),
    (lambda tensors, plain: tensors.update({"layers.0.theta.largest": torch.zeros(3)}), "is not part of the network"),
    (lambda tensors, plain: tensors.update(readout=torch.zeros(4, 5)), "the readout takes 5 inputs"),
    (lambda tensors, plain: tensors.update(readout_bias=torch.zeros(4)), "readout.bias has shape"),
    (lambda tensors, plain: tensors.update(embedding=torch.zeros(4, 5)), "the embedding has 5 outputs"),
    (lambda tensors, plain: plain["layers"].append(plain["layers"][0]), "weight_ih is missing"),
    (lambda tensors, plain: plain["groups"].clear(), "do not fit the 1 layers"),
    (lambda tensors, plain: plain["groups"][0].update(hidden=4), "do not fit the 1 layers"),
    (lambda tensors, plain: plain["layers"][0].update(reset="maybe"), "reset must be one of"),
    (lambda tensors, plain: plain["layers"][0].update(cell="lstm"), "weight_ih has shape"),
    (lambda tensors, plain: plain["layers"][0].update(compare="state"), "compare must be one of"),
    (lambda tensors, plain: plain["layers"][0].update(keep=2.0), "zoneout must be a probability"),
    (lambda tensors, plain: plain.update(trace=3.0), "trace must be None"),
    (lambda tensors, plain: plain.pop("options"), "KeyError"),
    (lambda tensors, plain: plain["options"].update(weights="int4"), "weights must be one of"),
    (lambda tensors, plain: plain["options"].update(streams=0), "streams must be at least 1"),
    (lambda tensors, plain: plain["options"].update(unknown=0), "unknown"),
]


@pytest.mark.parametrize(("change", "message"), CRAFTED)
def test_files_with_an_invalid_network_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    """The checksum is right; shapes that do not fit would read memory out of bounds."""
    path = tmp_path / "engine.safetensors"
    EventEngine(EGRU(2, 3), trace=0.5).save(path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    plain = json.loads(metadata["description"])
    change(tensors, plain)
    metadata["description"] = json.dumps(plain)
    metadata["sha256"] = digest(tensors, VERSION + metadata["description"])
    safetensors.torch.save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=rf"EventEngine.load: .*engine\.safetensors .*{message}"):
        EventEngine.load(path)


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_zero_blocks_and_tied_embeddings_are_not_stored(weights: WeightFormat, tmp_path: Path) -> None:
    model = LanguageModel(320, 32, 48, num_layers=2, threshold=Threshold.constant(0.02))
    prune_weights(model, 0.9, block=16)
    with torch.no_grad():  # weights that int8 and bfloat16 represent
        model.embedding.weight.copy_((model.embedding.weight * 1000).round().clamp(-63, 63) / 64)
        model.embedding.weight[:, 0] = 127 / 64
    engine, ids = EventEngine(model, weights), torch.randint(320, (50,))
    engine.save(tmp_path / "engine")
    assert torch.equal(EventEngine.load(tmp_path / "engine").run(ids), engine.run(ids))
    weights_count = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    element = {"float32": 4, "bfloat16": 2, "int8": 1}[weights]
    assert (tmp_path / "engine").stat().st_size < 0.3 * weights_count * element + 8_000  # vectors, header
    with safetensors.safe_open(tmp_path / "engine", "pt") as file:
        names = set(file.keys())
    assert "readout.blocks" in names
    assert not any(name.startswith("embedding") for name in names)


def test_files_of_version_2_are_read(tmp_path: Path) -> None:
    """Version 2 stored all weights of every matrix."""
    path, engine = tmp_path / "engine.safetensors", EventEngine(network(), "int8")
    engine.save(path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert not any(name.endswith(".blocks") for name in tensors)
    plain = json.loads(metadata["description"])
    del plain["tied"]
    metadata |= {"version": "2", "description": json.dumps(plain)}
    metadata["sha256"] = digest(tensors, metadata["description"])
    safetensors.torch.save_file(tensors, path, metadata)
    x = torch.randn(20, 20)
    assert torch.equal(EventEngine.load(path).run(x), engine.run(x))


def test_files_of_another_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "engine.safetensors"
    metadata = {"format": "egru.EventEngine", "version": "1"}
    safetensors.torch.save_file({"x": torch.zeros(1)}, path, metadata)
    with pytest.raises(ValueError, match=r"engine\.safetensors has version '1'; this version of egru reads 2 and 3"):
        EventEngine.load(path)


@pytest.mark.parametrize("layer_type", [EGRU, ELSTM])
def test_engine_of_one_unit_is_saved(layer_type: type[EGRU] | type[ELSTM], tmp_path: Path) -> None:
    engine, x = EventEngine(layer_type(4, 1, threshold=Threshold.constant(0.01))), torch.randn(5, 4)
    engine.save(tmp_path / "engine.safetensors")
    assert torch.equal(EventEngine.load(tmp_path / "engine.safetensors").run(x), engine.run(x))
