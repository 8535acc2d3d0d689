import struct

import numpy as np
import pytest

from egru.data import Events, denoise, dvs_clips, event_frames, gesture_frames, read_events, time_slices
from egru.data.files import DataCorrupt, DataMissing


def recording(*rows):
    """Return events from rows of (x, y, polarity, microseconds)."""
    return Events(*np.array(rows, np.int64).reshape(-1, 4).T)


def encode(rows):
    return b"".join(struct.pack(">BBBH", x, y, p << 7 | t >> 16, t & 0xFFFF) for x, y, p, t in rows)


def random_recording(n=4000, side=12, span=400_000):
    rng = np.random.default_rng(0)
    t = np.sort(rng.integers(0, span, n))
    return Events(rng.integers(0, side, n), rng.integers(0, side, n), rng.integers(0, 2, n), t)


def test_read_events_decodes_five_byte_events(tmp_path):
    rows = [(3, 127, 1, 5), (0, 2, 0, 70_000), (1, 1, 1, 0x7FFFFF)]
    (tmp_path / "a.bs2").write_bytes(encode(rows))
    events = read_events(tmp_path / "a.bs2")
    assert np.stack(events, 1).tolist() == [list(row) for row in rows]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a whole number of 5-byte events, got 0 bytes"),
        (encode([(1, 1, 0, 1)])[:-1], "expected a whole number of 5-byte events, got 4 bytes"),
        (encode([(1, 1, 0, 1), (128, 1, 0, 2)]), "pixel coordinates must be below 128, got 128"),
        (
            encode([(1, 1, 0, 3), (1, 1, 0, 4), (1, 1, 0, 2)]),
            "events must be in order of time, but event 2 is earlier than event 1",
        ),
    ],
)
def test_damaged_recordings_raise(tmp_path, content, message):
    (tmp_path / "a.bs2").write_bytes(content)
    with pytest.raises(DataCorrupt, match=message):
        read_events(tmp_path / "a.bs2")


def test_denoise_keeps_events_that_follow_a_neighbour():
    events = recording(
        (5, 5, 0, 0),  # the first event: no event precedes it
        (6, 5, 1, 9_999),  # recent neighbour, of either polarity
        (5, 6, 0, 10_000),  # too late for (5, 5)
        (7, 6, 0, 10_001),  # only a diagonal neighbour
        (6, 5, 0, 10_002),  # the same pixel is not a neighbour, and (5, 5) is too old
        (127, 9, 0, 20_000),
        (0, 10, 0, 20_001),  # adjacent in memory, but not on the sensor
    )
    assert denoise(events).t.tolist() == [9_999]


def test_denoise_matches_a_sequential_implementation():
    events = random_recording()
    last = np.full((14, 14), -(10**9))
    keep = []
    for x, y, t in zip(events.x + 1, events.y + 1, events.t, strict=True):
        keep.append(t - max(last[x - 1, y], last[x + 1, y], last[x, y - 1], last[x, y + 1]) < 1_000)
        last[x, y] = t
    assert 0.1 < np.mean(keep) < 0.9
    np.testing.assert_array_equal(np.stack(denoise(events, 1_000)), np.stack(events.select(np.array(keep))))


def test_time_slices_drop_the_incomplete_one():
    events = recording(*((0, 0, 0, t) for t in (100, 150, 199, 200, 299, 305)))
    slices = [(start, part.t.tolist()) for start, part in time_slices(events, 100)]
    assert slices == [(100, [100, 150, 199]), (200, [200, 299])]
    assert list(time_slices(recording(), 100)) == []


def test_event_frames_count_per_bin_and_polarity_and_max_pool():
    counted = [(0, 4, 1, 10), (0, 4, 1, 11), (3, 7, 1, 12), (4, 4, 0, 19), (0, 0, 0, 20)]
    events = recording((0, 0, 0, 9), *counted, (0, 0, 0, 30))
    frames = event_frames(events, start=10, width=10, bins=2, side=32)
    assert frames.shape == (2, 2, 32, 32)
    expected = np.zeros_like(frames)
    expected[0, 1, 1, 0] = 2  # the largest of the 4 by 4 pixels, not their sum
    expected[0, 0, 1, 1] = 1
    expected[1, 0, 0, 0] = 1
    np.testing.assert_array_equal(frames, expected)
    with pytest.raises(ValueError, match="side must divide 128, got 30"):
        event_frames(events, start=0, width=1, bins=1, side=30)


def test_gesture_frames_follow_the_paper():
    events = random_recording(20_000, side=40, span=3_500_000)
    frames = gesture_frames(events)
    assert frames.shape == (2, 68, 2, 32, 32)
    assert frames.dtype == np.float32
    assert (frames.reshape(2, -1).max(1) == 1).all()
    kept = denoise(events)
    first = event_frames(kept, start=kept.t[0], width=25_000, bins=68)
    np.testing.assert_allclose(frames[0], first / first.max(), rtol=1e-6)
    assert gesture_frames(events.select(slice(0, 50))).shape == (0, 68, 2, 32, 32)


def test_slice_without_events_is_zero():
    pair = [(5, 5, 0, 0), (5, 6, 0, 1)]
    events = recording(*pair, *((x, y, p, t + 4_000_000) for x, y, p, t in pair))
    frames = gesture_frames(events)
    assert frames.shape == (2, 68, 2, 32, 32)
    assert frames.sum((1, 2, 3, 4)).tolist() == [1, 0]


def test_missing_clips_raise(tmp_path):
    with pytest.raises(DataMissing, match=r"1\.bs2 is not in .*dvs-raw"):
        dvs_clips(tmp_path)


@pytest.mark.data
def test_real_recordings():
    clips = dvs_clips()
    assert {name: len(clip.t) for name, clip in clips.items()} == {
        "hand clap": 63_471,
        "right hand wave": 84_260,
        "arm roll": 101_288,
        "air guitar": 85_936,
    }
    for clip in clips.values():
        assert 1.44e6 < clip.t[-1] - clip.t[0] < 1.45e6
        denoised = denoise(clip)
        assert 0.6 < len(denoised.t) / len(clip.t) < 0.8
        frames = gesture_frames(clip, length=1_400_000)
        assert frames.shape == (1, 56, 2, 32, 32)
        counts = event_frames(denoised, start=denoised.t[0], width=25_000, bins=56)
        np.testing.assert_allclose(frames[0], counts / counts.max(), rtol=1e-6)
        assert event_frames(clip, start=0, width=25_000, bins=58, side=128).sum() == len(clip.t)


@pytest.mark.data
def test_tonic_agrees_on_real_recordings():
    tonic = pytest.importorskip("tonic", reason="requires tonic: pip install 'egru[dvs]'")
    for clip in dvs_clips().values():
        rows = list(zip(clip.x, clip.y, clip.p, clip.t, strict=True))
        events = np.array(rows, tonic.datasets.DVSGesture.dtype)
        expected = tonic.transforms.Denoise(filter_time=10_000)(events)
        actual = denoise(clip)
        # tonic keeps all events of the first 10 ms.
        np.testing.assert_array_equal(expected["t"][expected["t"] >= 20_000], actual.t[actual.t >= 20_000])
        counts = tonic.transforms.ToFrame(sensor_size=(128, 128, 2), time_window=25_000)(events)
        frames = event_frames(clip, start=clip.t[0], width=25_000, bins=len(counts), side=128)
        np.testing.assert_array_equal(counts, frames)
