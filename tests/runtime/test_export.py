"""Weights in pieces: what comes back, and what is refused."""

import pytest
import torch

import egru
from egru.models import LanguageModel
from egru.runtime import BadParts, EventEngine, load_parts, save_parts
from egru.training import checkpoint

pytest.importorskip("safetensors", reason="weights in files need safetensors")
SMALL = 140_000
"""Bytes; the embedding alone takes more."""


@pytest.fixture(autouse=True)
def single_precision(ground):
    torch.set_default_dtype(torch.float32)


def speaker() -> LanguageModel:
    return LanguageModel(1500, 40, 60, num_layers=2, threshold=egru.Threshold(mean=-3.0)).eval()


def once(model: LanguageModel) -> dict[str, torch.Tensor]:
    weights = dict(model.state_dict())
    del weights["readout.weight"]
    return weights


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_there_and_back(kind, tmp_path):
    model, again = speaker(), speaker()
    weights = once(model)
    paths = save_parts(weights, tmp_path, kind, SMALL)
    assert len(paths) > (1 if kind == "int8" else 2)
    assert all(path.stat().st_size <= SMALL for path in paths)
    found = load_parts(tmp_path)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert found[name].shape == weight.shape
        assert found[name].dtype == weight.dtype
        if kind == "float32" or weight.dim() < 2:
            assert torch.equal(found[name], weight)
        elif kind == "bfloat16":
            assert torch.equal(found[name], weight.bfloat16().float())
        else:
            assert ((found[name] - weight).abs() <= weight.abs().amax(1, keepdim=True) / 253).all()
    checkpoint.put(again, found)
    assert again.readout.weight is again.embedding.weight
    tokens = torch.randint(1500, (30, 1))
    if kind == "float32":
        assert torch.equal(again(tokens)[0], model(tokens)[0])


def test_int8_is_the_engines_int8(tmp_path):
    """Rounding what is rounded already changes nothing: no accuracy is lost twice."""
    model, again = speaker(), speaker()
    save_parts(once(model), tmp_path, "int8", SMALL)
    checkpoint.put(again, load_parts(tmp_path))
    save_parts(once(again), tmp_path / "again", "int8", SMALL)
    one, two = load_parts(tmp_path), load_parts(tmp_path / "again")
    assert all(torch.allclose(one[name], two[name], rtol=1e-6, atol=0) for name in one)
    tokens = torch.randint(1500, (30,)).tolist()
    model.embedding.weight.data.copy_(again.embedding.weight.data)
    engines = [EventEngine(m, weights="int8") for m in (model, again)]
    torch.testing.assert_close(*(engine.run(tokens) for engine in engines), rtol=1e-4, atol=1e-5)


def test_damage_is_told(tmp_path):
    paths = save_parts(once(speaker()), tmp_path, "bfloat16", SMALL)
    whole = paths[1].read_bytes()
    for broken, words in (
        (whole[:-7], "cannot be read"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), "SHA-256 differs"),
    ):
        paths[1].write_bytes(broken)
        with pytest.raises(BadParts, match=words):
            load_parts(tmp_path)
    paths[1].unlink()
    with pytest.raises(BadParts, match=r"weights-2-of-\d+.safetensors is missing: all \d+ parts are needed"):
        load_parts(tmp_path)
    with pytest.raises(BadParts, match="holds no weights"):
        load_parts(tmp_path / "nowhere")


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match="kind must be one of float32, bfloat16, int8; got 'int4'"):
        save_parts({}, tmp_path, "int4")
    with pytest.raises(ValueError, match="largest must be above 131072 bytes, got 10"):
        save_parts({}, tmp_path, largest=10)
    with pytest.raises(ValueError, match="a row of w takes 400000 bytes"):
        save_parts({"w": torch.zeros(2, 100_000)}, tmp_path, "float32", SMALL)
    with pytest.raises(ValueError, match="must not hold '@'"):
        save_parts({"a@b": torch.zeros(2)}, tmp_path)
