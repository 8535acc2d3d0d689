"""The loader, on the real files where they are and on none."""

import os
from pathlib import Path

import pytest
import torch

from egru.data import DataCorrupt, DataMissing, pokerdvs

HERE = Path(os.environ.get("EGRU_DATA", "data"))
real = pytest.mark.skipif(
    not (HERE / "pokerdvs" / "pips_train.tar.gz").is_file(), reason="needs POKER-DVS under EGRU_DATA"
)


@real
def test_counts_and_ranges():
    data = pokerdvs(HERE)
    assert [len(part) for part in data] == [48, 20]
    for part, each in zip(data, (12, 5), strict=True):
        assert [sum(r.suit == suit for r in part) for suit in range(4)] == [each] * 4
        for recording in part:
            assert int(recording.times[0]) == 0
            assert (recording.times.diff() >= 0).all()
            assert int(torch.stack([recording.x, recording.y]).min()) >= 0
            assert int(torch.stack([recording.x, recording.y]).max()) < 35
            assert recording.polarity.unique().tolist() == [0, 1]


def test_absent_files_say_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(DataMissing, match=r"pips_train.tar.gz is not in .*EGRU_DATA"):
        pokerdvs(tmp_path)
    monkeypatch.setenv("EGRU_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        pokerdvs()


def test_damaged_files_are_refused(tmp_path):
    (tmp_path / "pokerdvs").mkdir()
    (tmp_path / "pokerdvs" / "pips_train.tar.gz").write_bytes(b"nothing")
    with pytest.raises(DataCorrupt, match=r"is not the published file"):
        pokerdvs(tmp_path)
