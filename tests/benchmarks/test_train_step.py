"""benchmarks/train_step.py on a small model: times, record, and the summary of a trace."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from egru import experiments
from egru.experiments import LanguageConfig
from tests.helpers import PATIENCE
from tests.training.tiny import text

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import train_step  # pyright: ignore[reportMissingImports]

SMALL = ["--hidden", "16", "--embedding", "12", "--batch", "8", "--bptt", "10", "--turns", "2", "--steps", "3"]


@pytest.fixture(autouse=True)
def single_precision(defaults, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(experiments, "load_data", lambda config: text())


def test_trainer_and_bare_model_are_timed(tmp_path, capsys):
    files = ["--out", str(tmp_path / "step.json"), "--profile", str(tmp_path / "profile.txt")]
    train_step.main([*SMALL, *files])
    record = json.loads((tmp_path / "step.json").read_text())
    assert len(record["lengths"]) == 3
    assert [len(times) for times in record["all_milliseconds"].values()] == [2, 2, 2]
    ms = record["milliseconds"]
    assert record["ratio"] == pytest.approx(ms["trainer"] / ms["bare"])
    assert 0 < record["data_share"] < 1
    assert 0 < record["profile"]["busy_ms"] <= record["profile"]["sum_ms"]
    profile = (tmp_path / "profile.txt").read_text()
    kernels = record["profile"]["kernels"]
    assert "_SequenceBackward" in {kernel["name"] for kernel in kernels}
    assert kernels[0]["name"] in profile
    assert "longest gaps" in profile
    assert "waiting for data" in capsys.readouterr().out


def test_different_losses_fail(monkeypatch):
    config = LanguageConfig(hidden=8, embedding=6, batch=4, bptt=5)
    copy_weights = train_step.BareModel.copy_weights

    def copy_and_modify(self, model):
        copy_weights(self, model)
        self.model.readout.bias.data += torch.arange(7.0)

    monkeypatch.setattr(train_step.BareModel, "copy_weights", copy_and_modify)
    with pytest.raises(RuntimeError, match="the first losses must agree"):
        train_step.measure(config, text(), 1, 1)


def event(name, cat, ts, dur):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur}


def test_summary_of_a_gpu_trace():
    trace = [
        {"ph": "M", "name": "process_name"},
        event("multiply", "kernel", 0.0, 100.0),
        event("copy", "gpu_memcpy", 50.0, 100.0),  # half of it overlaps the kernel
        event("multiply", "kernel", 400.0, 200.0),
        event("aten::mm", "cpu_op", 0.0, 1000.0),
        event("cudaStreamSynchronize", "cuda_runtime", 100.0, 300.0),
        event("cudaLaunchKernel", "cuda_runtime", 100.0, 300.0),
    ]
    summary = train_step.summarise_trace(trace, "cuda", 2)
    assert (summary["sum_ms"], summary["busy_ms"], summary["span_ms"]) == pytest.approx((0.2, 0.175, 0.3))
    assert summary["launches"] == 1.5
    assert summary["host_waits"] == {"calls": 0.5, "ms": pytest.approx(0.15)}
    assert summary["kernels"][0] == {"name": "multiply", "calls": 1.0, "ms": pytest.approx(0.15)}
    assert summary["gaps"] == [{"us": 250.0, "after": "copy", "before": "multiply"}]
    text = train_step.profile_text({"profile": summary, "milliseconds": {"trainer": 0.21}})
    assert "1.200 x, device busy 83.3 %" in text
    with pytest.raises(RuntimeError, match="no work of cuda"):
        train_step.summarise_trace(trace[:1], "cuda", 1)


def test_requires_no_optional_dependency(tmp_path):
    code = f"""
import sys
for name in ("tyro", "rich", "matplotlib", "sklearn", "tonic", "scipy"):
    sys.modules[name] = None
sys.path[:0] = {sys.path!r}
import train_step
from egru.experiments import LanguageConfig
from tests.training.tiny import text
train_step.measure(LanguageConfig(hidden=8, embedding=6, batch=4, bptt=5), text(), 1, 1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda
def test_record_on_a_gpu(tmp_path):
    train_step.main([*SMALL, "--device", "cuda", "--out", str(tmp_path / "step.json")])
    record = json.loads((tmp_path / "step.json").read_text())
    assert record["precision"] == "bfloat16"
    assert record["profile"]["busy_ms"] > 0
    assert record["profile"]["host_waits"]["calls"] <= 1  # that of the benchmark, once per turn
