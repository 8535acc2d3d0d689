"""Weight files: round trips in every format, and errors."""

import pytest
import safetensors
import safetensors.torch
import torch

import egru
from egru.models import LanguageModel
from egru.runtime import EventEngine, ShardError, load_shards, save_shards
from egru.runtime.shards import digest
from egru.runtime.stored_weights import store_matrix
from egru.training import checkpoint
from egru.types import WEIGHT_FORMATS

MAX_BYTES = 140_000
"""Less than the embedding takes."""


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)


def language_model() -> LanguageModel:
    return LanguageModel(1500, 40, 60, num_layers=2, threshold=egru.Threshold(mean=-3.0)).eval()


def untied_weights(model: LanguageModel) -> dict[str, torch.Tensor]:
    weights = dict(model.state_dict())
    del weights["readout.weight"]
    return weights


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_round_trip(format, tmp_path):
    model, restored = language_model(), language_model()
    weights = untied_weights(model)
    paths = save_shards(weights, tmp_path, format, MAX_BYTES)
    assert len(paths) > (1 if format == "int8" else 2)
    assert all(path.stat().st_size <= MAX_BYTES for path in paths)
    loaded = load_shards(tmp_path)
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        assert loaded[name].shape == weight.shape
        assert loaded[name].dtype == weight.dtype
        if format == "float32" or weight.dim() < 2:
            assert torch.equal(loaded[name], weight)
        elif format == "bfloat16":
            assert torch.equal(loaded[name], weight.bfloat16().float())
        else:
            assert ((loaded[name] - weight).abs() <= weight.abs().amax(1, keepdim=True) / 253).all()
    checkpoint.set_weights(restored, loaded)
    assert restored.readout.weight is restored.embedding.weight
    tokens = torch.randint(1500, (30, 1))
    if format == "float32":
        assert torch.equal(restored(tokens)[0], model(tokens)[0])


def test_int8_files_and_int8_engine_round_alike(tmp_path):
    """Quantising quantised weights again changes nothing."""
    model, restored = language_model(), language_model()
    save_shards(untied_weights(model), tmp_path, "int8", MAX_BYTES)
    checkpoint.set_weights(restored, load_shards(tmp_path))
    save_shards(untied_weights(restored), tmp_path / "again", "int8", MAX_BYTES)
    one, two = load_shards(tmp_path), load_shards(tmp_path / "again")
    assert all(torch.equal(one[name], two[name]) for name in one)
    tokens = torch.randint(1500, (30,)).tolist()
    model.embedding.weight.data.copy_(restored.embedding.weight.data)
    engines = [EventEngine(m, weights="int8") for m in (model, restored)]
    assert torch.equal(*(engine.run(tokens) for engine in engines))


def recorded_digest(path) -> str:
    with safetensors.safe_open(path, "pt") as file:
        return file.metadata()["sha256"]


@pytest.mark.parametrize("block", [16, 8, 1])
@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_zero_blocks_are_not_stored(format, block, tmp_path):
    """Files may cut a matrix between blocks. Loaded weights are encoded as the same bits again."""
    groups = torch.randn(4800 // block, block, 100)
    matrix = (groups * (torch.rand(len(groups), 1, 100) < 0.4)).flatten(0, 1)
    weights = {"w": matrix, "b": torch.randn(3)}
    paths = save_shards(weights, tmp_path, format, MAX_BYTES)
    assert len(paths) > 1
    assert all(path.stat().st_size <= MAX_BYTES for path in paths)
    element = {"float32": 4, "bfloat16": 2, "int8": 1}[format]
    expected = (
        int(matrix.count_nonzero()) * element + matrix.numel() / block / 8 + (4 * 4800 if format == "int8" else 0)
    )
    assert sum(path.stat().st_size for path in paths) < expected + 1000 * len(paths) + (block == 1 and 1000)
    loaded = load_shards(tmp_path)
    again = save_shards({name: loaded[name] for name in weights}, tmp_path / "again", format, MAX_BYTES)
    assert [recorded_digest(path) for path in again] == [recorded_digest(path) for path in paths]
    assert torch.equal(loaded["b"], weights["b"])
    largest = matrix.abs().amax(1, keepdim=True)
    error = {"float32": 0.0, "bfloat16": matrix.abs() / 256, "int8": largest / 253}[format]
    assert ((loaded["w"] - matrix).abs() <= error).all()
    assert not loaded["w"][matrix == 0].any()


def test_files_of_format_1_are_read(tmp_path):
    scale, rows = torch.rand(3), torch.randint(-127, 128, (3, 5), dtype=torch.int8)
    tensors = {"w@0": rows, "w@0.scale": scale, "b": torch.ones(2)}
    metadata = {"part": "1", "parts": "1", "kind": "int8", "sha256": digest(tensors)}
    safetensors.torch.save_file(tensors, tmp_path / "weights-1-of-1.safetensors", metadata)
    loaded = load_shards(tmp_path)
    assert torch.equal(loaded["w"], rows * scale[:, None])
    safetensors.torch.save_file(tensors, tmp_path / "weights-1-of-1.safetensors", metadata | {"format": "3"})
    with pytest.raises(
        ShardError, match=r"weights-1-of-1.safetensors has format '3'; this version of egru reads 1 and 2"
    ):
        load_shards(tmp_path)


def test_blocks_that_do_not_fit_raise(tmp_path):
    weight = torch.zeros(32, 4)
    weight[:16, 1] = 1
    entries = store_matrix(weight, "float32").entries("w@0")
    assert entries.keys() == {"w@0.blocks", "w@0.mask", "w@0.shape"}
    for part, value, message in (
        ("w@0.shape", torch.tensor([24, 4]), "blocks of 16 rows and shape"),
        ("w@0.shape", torch.tensor([32, 400]), "mask of w@0 does not fit"),
        ("w@0.mask", torch.tensor([255], dtype=torch.uint8), "mask of w@0 does not fit its 1 blocks"),
        ("w@0.mask", None, "w@0.mask"),
        ("w@0.blocks", torch.ones(16), "do not describe blocks"),
    ):
        tensors = {key: tensor for key, tensor in (entries | {part: value}).items() if tensor is not None}
        metadata = {"format": "2", "part": "1", "parts": "1", "kind": "float32", "sha256": digest(tensors)}
        safetensors.torch.save_file(tensors, tmp_path / "weights-1-of-1.safetensors", metadata)
        with pytest.raises(ShardError, match=message):
            load_shards(tmp_path)


def test_missing_and_damaged_files_raise(tmp_path):
    paths = save_shards(untied_weights(language_model()), tmp_path, "bfloat16", MAX_BYTES)
    content = paths[1].read_bytes()
    for damaged, message in (
        (content[:-7], "cannot be read"),
        (content[:-1] + bytes([content[-1] ^ 1]), "SHA-256 differs"),
    ):
        paths[1].write_bytes(damaged)
        with pytest.raises(ShardError, match=message):
            load_shards(tmp_path)
    paths[1].unlink()
    with pytest.raises(ShardError, match=r"weights-2-of-\d+.safetensors is missing: all \d+ files are required"):
        load_shards(tmp_path)
    with pytest.raises(ShardError, match="contains no weights"):
        load_shards(tmp_path / "nowhere")


def test_bad_arguments_raise(tmp_path):
    with pytest.raises(ValueError, match="format must be one of float32, bfloat16, int8; got 'int4'"):
        save_shards({}, tmp_path, "int4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="max_bytes must be greater than 131072, got 10"):
        save_shards({}, tmp_path, max_bytes=10)
    with pytest.raises(ValueError, match="a row of w takes 400000 bytes, got 140000"):
        save_shards({"w": torch.ones(2, 100_000)}, tmp_path, "float32", MAX_BYTES)
    with pytest.raises(ValueError, match="names must not contain '@', got 'a@b'"):
        save_shards({"a@b": torch.zeros(2)}, tmp_path)
