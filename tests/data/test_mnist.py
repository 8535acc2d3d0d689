import gzip
import hashlib
import struct

import numpy as np
import pytest
import torch

import egru
from egru.data import mnist
from egru.data.files import DataCorrupt, DataMissing


def idx(array):
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Write ten training and four test images of noise under the published names, half of them gzipped."""
    rng = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte": rng.integers(0, 256, (10, 28, 28), np.uint8),
        "train-labels-idx1-ubyte": rng.integers(0, 10, 10, np.uint8),
        "t10k-images-idx3-ubyte": rng.integers(0, 256, (4, 28, 28), np.uint8),
        "t10k-labels-idx1-ubyte": rng.integers(0, 10, 4, np.uint8),
    }
    folder = tmp_path / "mnist"
    folder.mkdir()
    for i, (name, array) in enumerate(arrays.items()):
        content = idx(array)
        file = mnist.FILES[name]._replace(sha256=hashlib.sha256(content).hexdigest())
        monkeypatch.setitem(mnist.FILES, name, file)
        path = folder / (name if i % 2 else name + ".gz")
        path.write_bytes(content if i % 2 else gzip.compress(content))
    monkeypatch.setattr(mnist, "VALIDATION", 3)
    return tmp_path, arrays


def test_pixels_are_in_row_order(files):
    root, arrays = files
    data = egru.data.sequential_mnist(root)
    images, labels = arrays["train-images-idx3-ubyte"], arrays["train-labels-idx1-ubyte"]
    assert data.train.x.shape == (7, 784, 1)
    assert data.train.x.dtype == torch.float32
    assert data.train.x[2, 28 * 5 + 3, 0].item() == pytest.approx(images[2, 5, 3] / 255)
    assert data.validation.x[0, 0, 0].item() == pytest.approx(images[7, 0, 0] / 255)
    assert data.train.y.tolist() + data.validation.y.tolist() == labels.tolist()
    assert data.test.x.shape == (4, 784, 1)
    assert data.name == "sequential MNIST"


def test_side_14_averages_blocks_of_four_pixels(files):
    root, arrays = files
    data = egru.data.sequential_mnist(root, side=14)
    expected = arrays["t10k-images-idx3-ubyte"][1].reshape(14, 2, 14, 2).mean((1, 3)) / 255
    np.testing.assert_allclose(data.test.x[1, :, 0].reshape(14, 14), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="side must be 28 or 14, got 7"):
        egru.data.sequential_mnist(root, side=7)


def test_all_images_share_one_permutation(files):
    root, _ = files
    plain, permuted = (egru.data.sequential_mnist(root, permuted=p) for p in (False, True))
    order = torch.from_numpy(np.random.default_rng(0).permutation(784))
    for name in ("train", "validation", "test"):
        assert torch.equal(getattr(permuted, name).x, getattr(plain, name).x[:, order])
        assert torch.equal(getattr(permuted, name).y, getattr(plain, name).y)
    other = egru.data.sequential_mnist(root, permuted=True, seed=1)
    assert not torch.equal(other.test.x, permuted.test.x)


def test_root_defaults_to_the_environment_variable(files, monkeypatch):
    monkeypatch.setenv("EGRU_DATA", str(files[0]))
    assert len(egru.data.sequential_mnist().test.y) == 4


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte"])
def test_missing_file_is_named(files, name):
    path = files[0] / "mnist" / name
    path.unlink()
    with pytest.raises(DataMissing) as error:
        egru.data.sequential_mnist(files[0])
    message = str(error.value)
    for part in (name, str(path.parent), "https://", "EGRU_DATA", "root="):
        assert part in message
    assert "\n" not in message


def test_missing_root_raises(monkeypatch):
    monkeypatch.delenv("EGRU_DATA", raising=False)
    with pytest.raises(
        FileNotFoundError, match=r"mnist/train-images-idx3-ubyte.gz is needed, but no data root is set.*EGRU_DATA"
    ):
        egru.data.sequential_mnist()


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_damaged_file_raises(files, name, damage):
    path = files[0] / "mnist" / name
    content = bytearray(path.read_bytes())
    content[-len(content) // 2] ^= 4
    path.write_bytes({"truncated": path.read_bytes()[:-3], "flipped": bytes(content), "empty": b""}[damage])
    with pytest.raises(DataCorrupt, match=name):
        egru.data.sequential_mnist(files[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected 000008 at the start, got ''"),
        (b"\0\0\x09\x01\0\0\0\x01\0", "not an IDX file of unsigned bytes"),
        (b"\0\0\x08\x03\0\0\0\x01", "rank 3 takes 16 bytes, but the file has 8"),
        (b"\0\0\x08\x01\0\0\0\x02\0", "states 2 bytes of data, but the file has 1"),
        (b"\0\0\x08\x01\0\0\0\x02\0\0\0", "states 2 bytes of data, but the file has 3"),
    ],
)
def test_bad_idx_raises(content, message):
    with pytest.raises(ValueError, match=message):
        mnist.parse_idx(content)


@pytest.mark.data
def test_published_files_have_the_expected_images():
    data = egru.data.sequential_mnist(side=14)
    assert [len(split.y) for split in (data.train, data.validation, data.test)] == [55_000, 5_000, 10_000]
    assert data.train.y[:6].tolist() == [5, 0, 4, 1, 9, 2]
    assert data.test.y[:4].tolist() == [7, 2, 1, 0]
    assert data.train.x.min() == 0
    assert 0.99 < data.train.x.max() <= 1
    assert data.train.x.mean().item() == pytest.approx(0.1307, abs=1e-3)
