"""benchmarks/sensor_stream.py on a short stream."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import sensor_stream  # pyright: ignore[reportMissingImports]


@pytest.fixture(autouse=True)
def single_precision(defaults: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(sensor_stream, "SIZES", ((16, 1), (24, 2)))


def test_record_has_times_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("egru._core", reason="the compiled core is not built")
    assert sensor_stream.main(["--steps", "600", "--rounds", "1", "--out", str(tmp_path / "record.json")]) == 0
    assert "step / step_at" in capsys.readouterr().out
    for row in json.loads((tmp_path / "record.json").read_text())["sizes"]:
        assert row["step / step_at"] > row["step / step_at, new"] / 3 > 0
        counts = row["counts"]
        assert counts["step_at"]["events"] == counts["step"]["events"] > 0
        assert counts["step_at"]["macs"] < counts["step"]["macs"]


def test_wrong_outputs_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(sensor_stream.egru.EventEngine):
        def step_at(self, t, indices, values, out=None):
            gap = super().step_at(t, indices, values, out)
            gap.output.add_(1)
            return gap

    monkeypatch.setattr(sensor_stream.egru, "EventEngine", Wrong)
    with pytest.raises(RuntimeError, match="the output of step_at differs"):
        sensor_stream.measure(16, 1, 600, 1)
