"""The CPU training benchmark with a small layer."""

import json

import pytest
import torch

from egru import compiled
from egru.bench import train_cpu
from egru.bench.train_cpu import Setting

pytestmark = pytest.mark.skipif(compiled.core is None, reason="requires the compiled core")
SMALL = Setting(hidden=24, steps=8, inputs=1, batch=4, gate="after", activity=0.3, open=0.6)


@pytest.fixture(autouse=True)
def single_precision(defaults, monkeypatch, tmp_path):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)


def test_layers_have_the_given_activity():
    row = train_cpu.measure(SMALL, repeats=3, seconds=1.0)
    assert row["reached"]["activity"] == pytest.approx(0.3, abs=0.05)
    assert row["reached"]["open"] == pytest.approx(0.6, abs=0.05)
    assert set(row["milliseconds"]) >= {"gru", "egru"}


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    monkeypatch.setattr(train_cpu, "check", lambda *_: 0.1)
    with pytest.raises(SystemExit, match=r"the kernel differs from the reference by 0\.1"):
        train_cpu.measure(SMALL)


def test_results_go_to_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(train_cpu, "SIZES", {24: (8, 1)})
    existing = tmp_path / "train_cpu.json"  # the name of the results in the repository
    existing.write_text("committed")
    threads = torch.get_num_threads()
    try:
        assert train_cpu.main(["--hidden", "24", "--batch", "4", "--gate", "after", "--repeats", "3"]) == 0
    finally:
        torch.set_num_threads(threads)
    assert existing.read_text() == "committed"
    (path,) = tmp_path.glob("train_cpu-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["hidden"], row["activity"]) for row in rows] == [(24, 0.2), (24, 1.0)]


def test_default_rows_include_the_gradient_of_the_input(monkeypatch):
    measured = []

    def measure(setting, *_):
        measured.append(setting)
        return {"milliseconds": {"gru": 2.0, "egru": 1.0}, "reached": {"activity": 0.2, "open": 0.5}} | {
            "ratio": 2.0,
            "best_ratio": 2.0,
        }

    monkeypatch.setattr(train_cpu, "measure", measure)
    threads = torch.get_num_threads()
    try:
        train_cpu.main([])
        rows = [(s.hidden, s.batch, s.gate, s.activity) for s in measured if s.input_gradient]
        assert rows == [(590, 64, "before", 0.2), (1350, 64, "before", 0.2)]
        assert len(measured) == 26
        measured.clear()
        train_cpu.main(["--input-gradient", "--batch", "16", "--out", "second.json"])
        assert len(measured) == 8
        assert all(setting.input_gradient for setting in measured)
    finally:
        torch.set_num_threads(threads)
