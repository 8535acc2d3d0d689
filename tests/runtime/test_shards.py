"""Weight files: round trips in every format, and errors."""

import pytest
import torch

import egru
from egru.models import LanguageModel
from egru.runtime import EventEngine, ShardError, load_shards, save_shards
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
    assert all(torch.allclose(one[name], two[name], rtol=1e-6, atol=0) for name in one)
    tokens = torch.randint(1500, (30,)).tolist()
    model.embedding.weight.data.copy_(restored.embedding.weight.data)
    engines = [EventEngine(m, weights="int8") for m in (model, restored)]
    torch.testing.assert_close(*(engine.run(tokens) for engine in engines), rtol=1e-4, atol=1e-5)


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
        save_shards({"w": torch.zeros(2, 100_000)}, tmp_path, "float32", MAX_BYTES)
    with pytest.raises(ValueError, match="names must not contain '@', got 'a@b'"):
        save_shards({"a@b": torch.zeros(2)}, tmp_path)
