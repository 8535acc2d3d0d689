import hashlib
import sys
import types

import numpy as np
import pytest
import torch

import egru
from egru.data import gestures, unpack_frames
from egru.data.files import DataCorrupt, DataMissing


def write(path, labels, **changes):
    rng = np.random.default_rng(len(labels))
    packed = rng.integers(0, 256, (len(labels), 32, 2, 32, 4), np.uint8)
    arrays = {"packed": packed, "label": np.array(labels, np.uint8)}
    path.parent.mkdir(exist_ok=True)
    np.savez(path, **{**arrays, **changes})
    return hashlib.sha256(path.read_bytes()).hexdigest()


def publish(monkeypatch, folder, train, test):
    sums = write(folder / "train.npz", train), write(folder / "test.npz", test)
    sources = tuple(s._replace(sha256=h) for s, h in zip(gestures.FILES, sums, strict=True))
    monkeypatch.setattr(gestures, "FILES", sources)


TRAIN = [2, 0, 1, 2, 0, 1, 2, 1, 2, 0, 1]  # four sessions, one without a gesture


@pytest.fixture
def files(tmp_path, monkeypatch):
    publish(monkeypatch, tmp_path / "dvs-gesture", TRAIN, [1, 0])
    monkeypatch.setattr(gestures, "VALIDATION_SESSIONS", 2)
    return tmp_path


def test_unpack_frames_matches_numpy():
    packed = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 5, 4), np.uint8))
    frames = unpack_frames(packed)
    assert frames.dtype == torch.float32
    np.testing.assert_array_equal(frames, np.unpackbits(packed.numpy(), axis=-1))
    assert unpack_frames(packed, torch.float64).dtype == torch.float64


def test_validation_split_consists_of_whole_sessions(files):
    assert gestures.sessions(torch.tensor(TRAIN)).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
    data = egru.data.dvs_gesture(files)
    assert data.train.y.tolist() == TRAIN[:6]
    assert data.validation.y.tolist() == TRAIN[6:]
    assert data.train.x.dtype == torch.uint8
    assert data.decode is not None
    assert data.decode(data.test.x).shape == (2, 32, 2, 32, 32)
    assert data.classes == 11


def test_missing_and_damaged_files_raise(files):
    path = files / "dvs-gesture" / "test.npz"
    content = path.read_bytes()
    for damaged in (content[:-1], content[:100] + b"?" + content[101:], b""):
        path.write_bytes(damaged)
        with pytest.raises(DataCorrupt, match=r"test\.npz is not the published file"):
            egru.data.dvs_gesture(files)
    path.unlink()
    with pytest.raises(DataMissing, match=r"test\.npz is not in .*dvs-gesture.*pack_gestures.*EGRU_DATA"):
        egru.data.dvs_gesture(files)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"packed": np.zeros((2, 32, 2, 32, 3), np.uint8)},
            r"packed must be uint8 \(N, 32, 2, 32, 4\), got uint8 \(2, 32, 2, 32, 3\)",
        ),
        ({"packed": np.zeros((2, 32, 2, 32, 4), np.float32)}, "packed must be uint8 .* got float32"),
        ({"packed": np.array([None, None])}, "cannot be read"),
        ({"label": np.array([1, 11], np.uint8)}, "labels must be 0 to 10, got 11"),
    ],
)
def test_wrong_content_with_a_correct_checksum_raises(files, monkeypatch, changes, message):
    digest = write(files / "dvs-gesture" / "test.npz", [1, 0], **changes)
    monkeypatch.setattr(gestures, "FILES", (gestures.FILES[0], gestures.FILES[1]._replace(sha256=digest)))
    with pytest.raises(DataCorrupt, match=message):
        egru.data.dvs_gesture(files)


class Recordings:
    """A substitute for tonic's data set: two subjects with three gestures each, 3.6 s of events that move right."""

    train_filename, test_filename = "train.tar.gz", "test.tar.gz"

    def __init__(self, save_to, train):
        self.users = [1, 1, 1, 21, 21, 21] if train else [24] * 3
        self.targets = [2, 0, 1] * (len(self.users) // 3)
        self.data = [f"user{u:02}/{t}.npy" for u, t in zip(self.users, self.targets, strict=True)]

    def __getitem__(self, index):
        n = 8_000
        events = np.zeros(n, [("x", "<i2"), ("y", "<i2"), ("p", "?"), ("t", "<i8")])
        events["t"] = np.linspace(0, 3_600_000, n)
        events["x"], events["y"] = 40 + np.arange(n) % 2 + 60 * np.arange(n) // n, 10 * self.targets[index]
        events["p"] = np.arange(n) % 3 == 0
        return events[::-1], self.targets[index]


@pytest.fixture
def recordings(tmp_path, monkeypatch):
    tonic = types.ModuleType("tonic")
    tonic.datasets = types.SimpleNamespace(DVSGesture=Recordings)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "tonic", tonic)
    (tmp_path / "DVSGesture").mkdir()
    for name in ("train.tar.gz", "test.tar.gz"):
        (tmp_path / "DVSGesture" / name).touch()
    return tmp_path


def test_raw_recordings_are_prepared_as_in_the_paper(recordings):
    data = egru.data.dvs_gesture_raw(recordings)
    assert [split.y.tolist() for split in (data.train, data.validation, data.test)] == [[2, 2, 0, 0, 1, 1]] * 3
    assert data.train.x.shape == (6, 68, 2, 32, 32)
    assert data.train.x.dtype == torch.uint8
    assert data.decode is not None
    frames = data.decode(data.train.x)
    assert frames.max() == 1
    assert frames.dtype == torch.float32
    rows = frames.sum((1, 2, 4)).argmax(1)
    assert rows.tolist() == [20 // 4, 20 // 4, 0, 0, 10 // 4, 10 // 4]


def test_packed_recordings_can_be_loaded(recordings, monkeypatch):
    monkeypatch.setattr(gestures, "VALIDATION_SESSIONS", 1)
    folder = egru.data.pack_gestures(recordings)
    data = egru.data.dvs_gesture(recordings)
    assert data.train.y.tolist() == data.validation.y.tolist() == data.test.y.tolist() == [0, 1, 2]
    frames = unpack_frames(data.test.x)
    assert frames.sum((1, 2, 4)).argmax(1).tolist() == [0, 2, 5]
    columns = frames[0].sum((1, 2)).argmax(1)
    assert columns[0] == 10
    assert columns[-1] == 24
    assert (columns.diff() >= 0).all()
    (folder / "test.npz").write_bytes((folder / "train.npz").read_bytes())
    with pytest.raises(DataCorrupt, match=r"test\.npz is not the published file"):
        egru.data.dvs_gesture(recordings)


def test_missing_recordings_raise(recordings, monkeypatch):
    (recordings / "DVSGesture" / "test.tar.gz").unlink()
    for load in (egru.data.dvs_gesture_raw, egru.data.pack_gestures):
        with pytest.raises(DataMissing, match=r"test\.tar\.gz is not in .*DVSGesture.*save_to"):
            load(recordings)
    monkeypatch.delenv("EGRU_DATA", raising=False)
    with pytest.raises(DataMissing, match="no data root is set"):
        egru.data.pack_gestures()
    monkeypatch.setitem(sys.modules, "tonic", None)
    with pytest.raises(ImportError, match=r"pip install 'egru\[dvs\]'"):
        egru.data.dvs_gesture_raw(recordings)


@pytest.mark.data
def test_published_frames():
    data = egru.data.dvs_gesture()
    assert [len(split.y) for split in (data.train, data.validation, data.test)] == [923, 154, 264]
    assert data.validation.y.bincount().tolist() == [14] * 11
    assert data.test.y.bincount().tolist() == [24] * 11
    assert 0.35 < unpack_frames(data.train.x).mean() < 0.45


@pytest.mark.cuda
def test_unpack_frames_on_a_gpu():
    packed = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 5, 4), np.uint8))
    assert torch.equal(unpack_frames(packed.cuda()).cpu(), unpack_frames(packed))


def test_smooth_frames_averages_nine_pixels():
    frames = torch.rand(2, 3, 2, 5, 7)
    smooth = gestures.smooth_frames(frames)
    assert smooth.shape == frames.shape
    assert smooth[1, 2, 1, 2, 3] == pytest.approx(frames[1, 2, 1, 1:4, 2:5].mean().item())
    assert smooth[0, 0, 0, 0, 0] == pytest.approx(frames[0, 0, 0, :2, :2].sum().item() / 9)


def test_pool_frames_averages_squares():
    frames = torch.rand(2, 3, 2, 8, 8)
    pooled = gestures.pool_frames(frames, 4)
    assert pooled.shape == (2, 3, 2, 2, 2)
    assert pooled[1, 2, 1, 0, 1] == pytest.approx(frames[1, 2, 1, :4, 4:].mean().item())
