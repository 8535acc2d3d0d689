"""The grid of everyday sizes on a GPU, run on the CPU: schedule, record, summary."""

import argparse
import json

import pytest
import torch

from egru.bench import gpu_check, small_gpu


@pytest.fixture(autouse=True)
def float32_and_flags(defaults):
    """Use float32 and restore the flags that the benchmark sets."""
    torch.set_default_dtype(torch.float32)
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


class FakeClock(small_gpu.Clock):
    """A clock that only advances when a fake layer runs: some microseconds on the host, more on the device."""

    def __init__(self):
        super().__init__("cpu")
        self.host = self.busy = 0.0

    def now(self):
        return self.host

    def wait(self):
        self.host = max(self.host, self.busy)

    def layer(self, host, device):
        def call():
            self.host += host
            self.busy = max(self.busy, self.host) + device

        return call


def fake_pair(clock, gru, egru, shape=(1, 1, 32), mode="training"):
    rounds = {"gru": clock.layer(*gru), "egru": clock.layer(*egru)}
    return small_gpu.Pair(shape, "float32", mode, rounds)


def options(**changes):
    values = {"steps": [1, 3], "batches": [1, 2], "units": [8], "precisions": ["float32", "bfloat16"], "seconds": 1e-9}
    return argparse.Namespace(**{**values, **changes})


def test_time_of_host_and_device_are_separated():
    clock = FakeClock()
    pair = fake_pair(clock, gru=(10e-6, 90e-6), egru=(40e-6, 10e-6))
    for _ in range(3):
        pair.turn(clock)
    result = pair.result()
    assert result["calls"] == small_gpu.MOST_CALLS
    assert result["gru_host_us"] == pytest.approx(10)
    assert result["gru_us"] == pytest.approx(90, abs=1)  # the host runs ahead
    assert result["egru_us"] == pytest.approx(40, abs=1)  # the device waits for the host
    assert result["ratio"] == pytest.approx(90 / 40, rel=0.02)


def test_slower_shapes_are_named_with_what_limits_them():
    clock = FakeClock()
    pairs = [
        fake_pair(clock, gru=(10e-6, 5e-6), egru=(40e-6, 5e-6), shape=(1, 1, 32)),
        fake_pair(clock, gru=(10e-6, 50e-6), egru=(10e-6, 100e-6), shape=(16, 8, 32)),
        fake_pair(clock, gru=(10e-6, 50e-6), egru=(10e-6, 20e-6), shape=(16, 8, 64)),
    ]
    for pair in pairs:
        pair.turn(clock)
    values = small_gpu.summarise_precisions(small_gpu.merge(pairs))["float32 training"]
    assert values["slower"] == ["T 1 B 1 H 32: 0.25x, host", "T 16 B 8 H 32: 0.50x, device"]
    assert values["below 0.95"] == 2


def test_a_short_limit_drops_turns_but_no_shape(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(small_gpu, "COMPILED", ((3, 2, 8),))
    out = tmp_path / "small.json"
    assert small_gpu.run(options(), out, small_gpu.Clock("cpu")) == 0
    record = json.loads(out.read_text())
    assert len(record["shapes"]) == 2 * 4
    assert all(shape[mode]["turns"] == 1 for shape in record["shapes"] for mode in small_gpu.MODES)
    assert record["compiled"] == []
    assert set(record["summary"]["shapes"]) == {
        f"{precision} {mode}" for precision in ("float32", "bfloat16") for mode in small_gpu.MODES
    }
    assert "bfloat16 inference: lowest" in capsys.readouterr().out


def test_more_time_compiles_and_adds_turns(tmp_path, monkeypatch):
    clock = FakeClock()
    built = []

    def build(shape, precision, mode, device, compiled=False):
        if compiled:
            built.append((shape, mode))
        return fake_pair(clock, (1e-4, 0), (1e-4, 0), shape, mode)

    monkeypatch.setattr(small_gpu, "COMPILED", ((3, 2, 8), (7, 7, 7)))
    monkeypatch.setattr(small_gpu.Pair, "build", build)
    out = tmp_path / "small.json"
    assert small_gpu.run(options(precisions=["float32"], seconds=0.5), out, clock) == 0
    record = json.loads(out.read_text())
    assert built == [((3, 2, 8), "training"), ((3, 2, 8), "inference")], "only shapes of the grid"
    assert record["compiled"][0]["training"]["turns"] == 7
    assert min(shape["inference"]["turns"] for shape in record["shapes"]) > 1
    assert clock.now() < 0.51


def test_layers_are_compiled_without_dynamic_shapes(monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda layer, **kwargs: calls.append(kwargs) or layer)
    pair = small_gpu.Pair.build((2, 3, 8), "bfloat16", "inference", "cpu", compiled=True)
    pair.turn(small_gpu.Clock("cpu"))
    assert calls == [{"dynamic": False}] * 2


def test_a_failing_compiler_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    class Failing(torch.nn.Module):
        def forward(self, x):
            raise RuntimeError("no compiler\nlong explanation")

    monkeypatch.setattr(torch, "compile", lambda layer, **kwargs: Failing())
    monkeypatch.setattr(small_gpu, "COMPILED", ((3, 2, 8),))
    monkeypatch.setattr(small_gpu, "COMPILED_SHARE", 1e12)
    out = tmp_path / "small.json"
    assert small_gpu.run(options(precisions=["float32"]), out, small_gpu.Clock("cpu")) == 1
    assert len(json.loads(out.read_text())["failed"]) == 2
    assert (
        "float32 training (3, 2, 8) failed under torch.compile: RuntimeError: no compiler\n" in capsys.readouterr().out
    )


def test_a_cut_run_leaves_a_record(tmp_path, monkeypatch):
    clock = small_gpu.Clock("cpu")
    record = small_gpu.Record(tmp_path / "small.json", {}, clock)
    record.written = -1e9
    turn, count = small_gpu.Pair.turn, []

    def interrupted(pair, clock):
        count.append(pair)
        if len(count) == 3:
            raise KeyboardInterrupt
        turn(pair, clock)

    monkeypatch.setattr(small_gpu.Pair, "turn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small_gpu.measure(record, [(1, 1, 8), (1, 2, 8)], ["float32"], 1e9, 0.0)
    assert json.loads(record.out.read_text())["shapes"][0]["training"]["turns"] == 1


def test_a_wrong_precision_is_not_timed(tmp_path, monkeypatch, capsys):
    checked = gpu_check.check_layer

    def fail(layer, x, precision, gradients):
        if precision == "bfloat16":
            raise gpu_check.Wrong("states off by 1")
        return checked(layer, x, precision, gradients)

    monkeypatch.setattr(gpu_check, "check_layer", fail)
    out = tmp_path / "small.json"
    assert small_gpu.run(options(), out, small_gpu.Clock("cpu")) == 1
    record = json.loads(out.read_text())
    assert record["wrong"] == {"bfloat16": "B 1 H 8: states off by 1"}
    assert {shape["precision"] for shape in record["shapes"]} == {"float32"}
    assert "bfloat16 is left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("precision", "cudnn", "matmul"),
    [("float32", True, False), ("tf32", True, True), ("ieee", False, False), ("bfloat16", False, False)],
)
def test_flags_of_torch(precision, cudnn, matmul):
    small_gpu.set_precision(precision)
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == (cudnn, matmul)


def test_a_layer_may_return_float16_under_autocast():
    class Half(torch.nn.Module):  # cuDNN's recurrent layers do, even under autocast to bfloat16
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(small_gpu.make_layer(8).input_size, 8)

        def forward(self, x):
            return (self.linear(x).half(),)

    layer = Half()
    small_gpu.make_round(layer, (2, 3, 8), "bfloat16", "training", "cpu")()
    assert layer.linear.weight.grad is not None
