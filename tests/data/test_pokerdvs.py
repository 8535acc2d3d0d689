"""POKER-DVS: the published files if they are available, and errors if not."""

import os
from pathlib import Path

import pytest
import torch

from egru.data import DataCorrupt, DataMissing, pokerdvs

ROOT = Path(os.environ.get("EGRU_DATA", "data"))
needs_files = pytest.mark.skipif(
    not (ROOT / "pokerdvs" / "pips_train.tar.gz").is_file(), reason="requires POKER-DVS under EGRU_DATA"
)


@needs_files
def test_published_files_have_the_expected_recordings():
    data = pokerdvs(ROOT)
    assert [len(part) for part in data] == [48, 20]
    for part, per_suit in zip(data, (12, 5), strict=True):
        assert [sum(r.suit == suit for r in part) for suit in range(4)] == [per_suit] * 4
        for recording in part:
            assert int(recording.times[0]) == 0
            assert (recording.times.diff() >= 0).all()
            assert int(torch.stack([recording.x, recording.y]).min()) >= 0
            assert int(torch.stack([recording.x, recording.y]).max()) < 35
            assert recording.polarity.unique().tolist() == [0, 1]


def test_missing_files_raise(tmp_path, monkeypatch):
    with pytest.raises(DataMissing, match=r"pips_train.tar.gz is not in .*EGRU_DATA"):
        pokerdvs(tmp_path)
    monkeypatch.setenv("EGRU_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        pokerdvs()


def test_damaged_files_raise(tmp_path):
    (tmp_path / "pokerdvs").mkdir()
    (tmp_path / "pokerdvs" / "pips_train.tar.gz").write_bytes(b"nothing")
    with pytest.raises(DataCorrupt, match=r"is not the published file"):
        pokerdvs(tmp_path)
