"""Exported C code has the same bits as the engine, its functions do what the header says, and errors write nothing."""

import ctypes
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import egru
from egru import EGRU, EventEngine
from egru.runtime import export_c
from egru.runtime.c import template
from egru.types import RESET_GATES
from tests.runtime.c.networks import COMPILER, CNetwork, address, compile_library, random_input, random_parts

core = pytest.importorskip("egru._core", reason="the compiled core is not built")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="requires gcc")


@pytest.fixture(autouse=True)
def plain_float32() -> Iterator[None]:
    """Use the plain level: others sum with fused multiply-adds."""
    core.force_level("plain")
    torch.set_default_dtype(torch.float32)
    yield
    core.force_level("auto")


def compare_networks(folder: Path, seeds: range, *flags: str) -> None:
    """Compare one network per seed, with float32 and int8 weights in turn."""
    engines: dict[str, EventEngine] = {}
    for seed in seeds:
        weights = ("float32", "int8")[seed // 8 % 2 ^ seed % 2]
        engines[f"{weights}_{seed}"] = EventEngine(**random_parts(seed), weights=weights)
    library = compile_library(folder, engines, *flags)
    events = 0
    for name, engine in engines.items():
        network = CNetwork(library, name, engine.output_size)
        x = random_input(engine, int(name.split("_")[1]))
        expected = torch.as_tensor(engine.run(x)).numpy()
        np.testing.assert_array_equal(network.run(x), expected, err_msg=name)
        events += sum(engine.activity.events)
    assert events > 20 * len(engines)  # otherwise the comparison shows little


@needs_compiler
def test_outputs_have_the_bits_of_the_engine(tmp_path: Path) -> None:
    compare_networks(tmp_path, range(12))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_outputs_of_200_networks_have_the_bits_of_the_engine(first: int, tmp_path: Path) -> None:
    compare_networks(tmp_path, range(first, first + 50))


@needs_compiler
@pytest.mark.parametrize("flags", [("-O3",), ("-Os", "-std=c11")])
def test_optimisation_does_not_change_bits(flags: tuple[str, ...], tmp_path: Path) -> None:
    compare_networks(tmp_path, range(100, 102), *flags)


def test_export_accepts_models_that_from_model_accepts(tmp_path: Path) -> None:
    """A linear layer in front and a mean behind the layer are found by tracing, not by the constructor of an engine."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(3, 5)
            self.rnn = egru.EGRU(5, 8, batch_first=True, threshold=egru.Threshold.constant(0.05))
            self.readout = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.readout(self.rnn(self.project(x))[0].mean(1))

    model = Reader().eval()
    files = export_c(model, tmp_path / "model")
    engine = EventEngine.from_model(model)
    assert [file.read_text() for file in files] == [file.read_text() for file in export_c(engine, tmp_path / "engine")]


@needs_compiler
def test_layers_of_different_sizes_have_the_bits_of_the_engine(tmp_path: Path) -> None:
    """All units of the first layer have events: the second, smaller layer must not read what the first one left."""
    torch.manual_seed(0)
    always = egru.Threshold("identity", mean=-2.0)
    layers = nn.Sequential(EGRU(3, 24, reset="none", threshold=always), EGRU(24, 5, reset="none", threshold=always))
    engine = EventEngine(layers.eval())
    library = compile_library(tmp_path, {"net": engine})
    x = random_input(engine, 0, 10)
    network = CNetwork(library, "net", 5)
    np.testing.assert_array_equal(network.run(x), torch.as_tensor(engine.run(x)).numpy())
    assert network.events(1)[0] == [0, 1, 2, 3, 4]


@needs_compiler
@pytest.mark.parametrize("weights", ["float32", "integer"])
def test_a_state_equal_to_its_threshold_sends_no_event(weights: Any, tmp_path: Path) -> None:
    """After the first step, gates of a half and candidates of -1 give states of -0.5, up to rounding in float32."""
    layer = EGRU(1, 2, reset="none", threshold=egru.Threshold("identity", mean=0.0), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.get_parameter("bias_ih_l0")[4:] = -100.0
        layer.get_parameter("threshold_l0").fill_(-2.0)
        state = -0.5 if weights == "integer" else float(torch.as_tensor(EventEngine(layer).step(torch.zeros(1)))[0])
        layer.get_parameter("threshold_l0").copy_(torch.tensor([state, state - 2**-14]))
    library = compile_library(tmp_path, {"net": EventEngine(layer)}, weights=weights)
    network = CNetwork(library, "net", 2, weights == "integer")
    network.step(torch.zeros(1))
    assert network.events()[0] == [1]


@needs_compiler
def test_skipped_steps_have_the_bits_of_the_engine(tmp_path: Path) -> None:
    """Skip between inputs. The engine's power of a decaying trace rounds differently, by one unit in the last place."""
    engines: dict[str, EventEngine] = {}
    for seed in range(12):
        weights = ("float32", "int8")[seed // 2 % 2]
        parts: dict[str, Any] = {**random_parts(seed), "embedding": None}
        with torch.no_grad():
            for name, parameter in parts["module"].named_parameters():
                if "weight_hh" in name or "weight_ih" in name:
                    parameter.mul_(0.3)  # otherwise most networks have events at every step
        engines[f"net{seed}"] = EventEngine(**parts, weights=weights)
    library = compile_library(tmp_path, engines, *(f"-D{name.upper()}_COUNTERS" for name in engines))
    jumps = stops = 0
    for name, engine in engines.items():
        network = CNetwork(library, name, engine.output_size)
        x = random_input(engine, 0)
        for t, gap in enumerate([1, 3, 200, 2, 1000, 5000]):
            expected = torch.as_tensor(engine.step(x[t])).numpy()
            compare_outputs(network.step(x[t]), expected, engine)
            begin = engine.time
            result = engine.skip(gap)
            out, ends = network.skip(gap)
            compare_outputs(out, result.output.numpy(), engine)
            sent = set((result.steps - begin + 1).tolist())
            assert sent <= set(ends), name
            jumps += gap - len(ends)
            stops += len(sent)
        steps, macs, *events = np.frombuffer(network.state.raw, np.uint64)[-2 - len(engine.activity.events) :].tolist()
        activity = engine.activity
        assert (steps, macs, tuple(events)) == (activity.steps, activity.macs, activity.events), name
    assert jumps > 10_000
    assert stops > 1_000


def compare_outputs(out: Any, expected: Any, engine: EventEngine) -> None:
    if engine._network.decay in (None, 1.0):
        np.testing.assert_array_equal(out, expected)
    else:
        np.testing.assert_array_max_ulp(out, expected, 1)


@needs_compiler
def test_skip_finds_events_of_states_that_leave_the_range(tmp_path: Path) -> None:
    """A state falls from zero through a negative threshold: the first steps have events, the last one has none."""
    layer = EGRU(1, 1, reset="none", threshold=egru.Threshold("identity", mean=-0.3), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "threshold" not in name:
                parameter.zero_()
        layer.get_parameter("bias_ih_l0").copy_(torch.tensor([0.0, 2.2, -100.0]))
    engine = EventEngine(layer)
    library = compile_library(tmp_path, {"net": engine})
    out, ends = CNetwork(library, "net", 1).skip(50)
    gap = engine.skip(50)
    assert gap.steps.tolist() == [0, 1, 2]
    assert ends == [1, 2, 3, 4, 50]  # the step after an event is an ordinary one
    np.testing.assert_array_equal(out, gap.output.numpy())


@needs_compiler
def test_save_and_restore_sums_of_delta_events(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(
        *(
            EGRU(8, 8, events="delta", reset="none", reset_gate="after", threshold=egru.Threshold("abs", mean=0.1))
            for _ in "ab"
        )
    )
    engine = EventEngine(layers.eval(), "int8", readout=nn.Linear(8, 3), trace="mean")
    library = compile_library(tmp_path, {"net": engine})
    first, second = CNetwork(library, "net", 3), CNetwork(library, "net", 3)
    x = random_input(engine, 0)
    expected = torch.as_tensor(engine.run(x)).numpy()
    first.run(x[:12])
    saved = np.zeros(8 + 4 * (4 * 8 + 2 * (8 + 24) + 24 + 3) + 8 * 3 + 8 + 8, np.uint8)
    assert f"NET_SAVED_BYTES {saved.size}\n" in (tmp_path / "net.h").read_text()
    first.call("save", first.state, address(saved))
    second.run(x[:5])  # some other state
    assert second.call("restore", second.state, address(saved)) == 0
    np.testing.assert_array_equal(second.run(x[12:]), expected[12:])
    second.call("reset", second.state)
    np.testing.assert_array_equal(second.run(x), expected)
    saved[-8:-4] = 64, 0, 0, 0  # an age beyond the steps after which sums are computed again
    assert second.call("restore", second.state, address(saved)) == -3


def dense_parts(seed: int, hidden: int, zeros: float = 0.0) -> dict[str, Any]:
    """Return a network in which most units have events, and a share of the weights is zero."""
    torch.manual_seed(seed)
    gate = RESET_GATES[seed % 2]
    layer = EGRU(20, hidden, reset="none", reset_gate=gate, threshold=egru.Threshold("identity", mean=-0.5)).eval()
    readout = nn.Linear(hidden, 5)
    with torch.no_grad():
        for parameter in (*layer.parameters(), *readout.parameters()):
            if parameter.dim() == 2:
                parameter.mul_(torch.rand_like(parameter) >= zeros)
    return {"module": layer, "readout": readout}


@needs_compiler
@pytest.mark.parametrize("rows", ["0", "1", "2"])
def test_every_way_to_add_rows_has_the_bits_of_the_engine(rows: str, tmp_path: Path) -> None:
    """Cover sums of more rows than one block, and matrices that are stored without their zeros."""
    if rows == "2" and platform.machine() != "x86_64":
        pytest.skip("requires SSE2")
    parts = [dense_parts(0, 150), dense_parts(1, 90), dense_parts(0, 60, zeros=0.8), dense_parts(1, 61, zeros=0.6)]
    engines = {f"net{i}": EventEngine(**arguments, weights="int8") for i, arguments in enumerate(parts)}
    flags = [f"-D{name.upper()}_ROWS={rows}" for name in engines]
    library = compile_library(tmp_path, engines, "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error", *flags)
    sparse = ["v_0_mask" in (tmp_path / f"{name}.c").read_text() for name in engines]
    assert sparse == [False, False, True, True]
    for name, engine in engines.items():
        x = random_input(engine, 0, steps=10)
        network = CNetwork(library, name, engine.output_size)
        np.testing.assert_array_equal(network.run(x), torch.as_tensor(engine.run(x)).numpy(), err_msg=name)
        assert engine.activity.events[0] > 0.8 * 10 * engine._network.layers[0].hidden


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[ctypes.CDLL, EventEngine]:
    """A library with counters, and its engine: two layers whose reset reads the last event, and a mean."""
    if COMPILER is None:
        pytest.skip("requires gcc")
    torch.manual_seed(1)
    core.force_level("plain")
    layer = EGRU(20, 30, num_layers=2, reset="output", dtype=torch.float32, threshold=egru.Threshold(mean=-3.0))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "threshold" not in name:
                parameter.mul_(4)
    readout = nn.Linear(30, 4, dtype=torch.float32)
    engine = EventEngine(layer.eval(), "int8", readout=readout, trace="mean")
    folder = tmp_path_factory.mktemp("pair")
    wild = EGRU(2, 3, dtype=torch.float32)
    with torch.no_grad():
        wild.get_parameter("weight_ih_l0").copy_(torch.tensor([1e30, -1e30]))
    engines = {"net": engine, "wild": EventEngine(wild)}
    return compile_library(folder, engines, "-DNET_COUNTERS"), engine


def test_events_in_and_out(pair: tuple[ctypes.CDLL, EventEngine]) -> None:
    library, engine = pair
    network = CNetwork(library, "net", 4)
    engine.reset()
    for t in range(10):
        index, value = [t, t + 2, t + 9], [1.5, -2.0, 0.25]
        status, out = network.step_events(index, value)
        assert status == 0
        np.testing.assert_array_equal(out, engine.step((index, value)))
        for layer in (0, 1):
            y = engine.state["y"][layer]
            active = y.nonzero()[:, 0]
            assert network.events(layer) == (active.tolist(), y[active].tolist())
    assert sum(engine.activity.events) > 50


@pytest.mark.parametrize(
    ("index", "value"),
    [([3, 3], [1.0, 1.0]), ([4, 1], [1.0, 1.0]), ([20], [1.0]), ([1], [float("nan")]), ([1], [float("inf")])],
)
def test_invalid_events_are_refused_and_leave_the_state(
    index: list[int], value: list[float], pair: tuple[ctypes.CDLL, EventEngine]
) -> None:
    network = CNetwork(pair[0], "net", 4)
    network.run(torch.randn(3, 20))
    before = network.state.raw
    assert network.step_events(index, value)[0] == -1
    assert network.state.raw == before


def test_non_finite_inputs_and_states_are_refused(pair: tuple[ctypes.CDLL, EventEngine]) -> None:
    network = CNetwork(pair[0], "wild", 3)
    x, out = np.full(2, 1.0, np.float32), np.zeros(3, np.float32)
    for value in (np.nan, np.inf):
        x[1] = value
        assert network.call("step", network.state, address(x), address(out)) == -1
    x[:] = 1e10  # the products are infinite, with opposite signs
    assert network.call("step", network.state, address(x), address(out)) == -2
    network.call("reset", network.state)
    assert network.events() == ([], [])
    assert np.isfinite(network.step(torch.ones(2))).all()


def test_save_restore_and_reset(pair: tuple[ctypes.CDLL, EventEngine]) -> None:
    library, engine = pair
    first, second = CNetwork(library, "net", 4), CNetwork(library, "net", 4)
    x = torch.randn(20, 20)
    engine.reset()
    expected = torch.as_tensor(engine.run(x)).numpy()
    first.run(x[:12])
    saved = np.zeros(8 + 2 * 8 * 30 + 8 * 4 + 8, np.uint8)
    first.call("save", first.state, address(saved))
    second.run(x[:5])  # some other state
    assert second.call("restore", second.state, address(saved)) == 0
    np.testing.assert_array_equal(second.run(x[12:]), expected[12:])
    second.call("reset", second.state)
    np.testing.assert_array_equal(second.run(x), expected)


@pytest.mark.parametrize("byte", [0, 5, 11, 8 + 16 * 30 + 7, 8 + 16 * 30 + 8 * 4 + 7])
def test_damaged_saved_states_are_refused(byte: int, pair: tuple[ctypes.CDLL, EventEngine]) -> None:
    network = CNetwork(pair[0], "net", 4)
    network.run(torch.randn(3, 20))
    saved = np.zeros(8 + 2 * 8 * 30 + 8 * 4 + 8, np.uint8)
    network.call("save", network.state, address(saved))
    saved[byte], saved[byte - 1] = 255, 255
    before = network.state.raw
    assert network.call("restore", network.state, address(saved)) == -3
    assert network.state.raw == before


def test_counters_are_those_of_the_engine(pair: tuple[ctypes.CDLL, EventEngine]) -> None:
    library, engine = pair
    network = CNetwork(library, "net", 4)
    engine.reset()
    engine.reset_activity()
    x = torch.randn(15, 20)
    network.run(x)
    engine.run(x)
    steps, macs, *events = np.frombuffer(network.state.raw[-8 * 4 :], np.uint64).tolist()
    activity = engine.activity
    assert (steps, macs, tuple(events)) == (activity.steps, activity.macs, activity.events)


@needs_compiler
def test_a_module_is_exported_like_its_engine(tmp_path: Path) -> None:
    model = egru.models.SequenceClassifier(2, 8, 3, readout="trace").float().eval()
    paths = export_c(model, tmp_path / "a", "int8")
    assert [path.name for path in paths] == ["model.h", "model.c"]
    export_c(EventEngine(**model.streaming(), weights="int8"), tmp_path / "b")
    for path in paths:
        assert path.read_text() == (tmp_path / "b" / path.name).read_text()


@needs_compiler
@pytest.mark.parametrize(("cell", "weights"), [(nn.GRU, "float32"), (nn.LSTM, "int8")])
def test_a_converted_network_is_exported(cell: type[nn.GRU | nn.LSTM], weights: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer: Any = egru.convert(cell(20, 24, batch_first=True).eval())
    engine = EventEngine(layer, weights, readout=nn.Linear(24, 4))
    network = CNetwork(compile_library(tmp_path, {"net": engine}), "net", 4)
    x = random_input(engine, 0)
    np.testing.assert_array_equal(network.run(x), torch.as_tensor(engine.run(x)).numpy())
    assert engine.activity.events[0] > 100


def test_refusals_name_the_reason_and_write_nothing(tmp_path: Path) -> None:
    layer = EGRU(2, 4)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"weights must be one of float32, int8, integer.*'bfloat16'"):
        export_c(EventEngine(layer, "bfloat16"), out)
    for name in ("", "1st", "a-b", "é", "for"):
        with pytest.raises(ValueError, match="name must be a C identifier"):
            export_c(layer, out, name=name)
    with pytest.raises(TypeError, match=r"GRU has no event layer; egru\.convert\(model\) replaces dense layers"):
        export_c(nn.GRU(2, 4), out)
    with pytest.raises(TypeError, match=r"ERNN.* is not supported|egru\.EGRU"):
        export_c(egru.ERNN(2, 4), out)
    with pytest.raises(ValueError, match="integer weights support cell='gru' only; layer 0 has 'lstm'"):
        export_c(egru.ELSTM(2, 4), out, "integer")
    with pytest.raises(ValueError, match="integer weights support events='positive' only; layer 0 has 'signed'"):
        export_c(EGRU(2, 4, events="signed"), out, "integer")
    with pytest.raises(ValueError, match="up to 65,535 inputs; layer 0 has 65,536"):
        export_c(EGRU(65_536, 1), out)
    engine = EventEngine(EGRU(1, 1))
    big = torch.zeros(1).expand(65_536)  # no memory
    with pytest.raises(ValueError, match="up to 65,535 units; layer 0 has 65,536"):
        export_c(_with_layer(engine, theta=big), out)
    with torch.no_grad():
        layer.get_parameter("threshold_l0")[1] = float("nan")
    with pytest.raises(ValueError, match="threshold_l0 contains nan"):
        export_c(layer, out)
    assert not out.exists()


def _with_layer(engine: EventEngine, **changes: object) -> EventEngine:
    import dataclasses

    layer = dataclasses.replace(engine._network.layers[0], **changes)  # pyright: ignore[reportArgumentType]
    engine._network = dataclasses.replace(engine._network, layers=(layer,))
    return engine


def test_a_failed_write_leaves_the_previous_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = export_c(EGRU(2, 4), tmp_path)
    before = [path.read_bytes() for path in paths]
    from egru import files

    original = files.write_synced

    def fail(path: Path, data: bytes) -> None:
        if ".c" in path.name:
            raise OSError(28, "No space left on device", str(path))
        original(path, data)

    monkeypatch.setattr(files, "write_synced", fail)
    with pytest.raises(OSError, match="No space left"):
        export_c(EGRU(2, 5), tmp_path)
    assert [path.read_bytes() for path in paths] == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.c", "model.h"]


@needs_compiler
def test_files_of_different_exports_do_not_compile_together(tmp_path: Path) -> None:
    import subprocess

    export_c(EGRU(2, 4), tmp_path)
    header = (tmp_path / "model.h").read_text()
    _, source = export_c(EGRU(2, 4), tmp_path)
    (tmp_path / "model.h").write_text(header)
    result = subprocess.run(["gcc", "-c", str(source), "-o", "/dev/null"], capture_output=True, text=True)
    assert "do not belong together" in result.stderr


def test_constants_are_read_back_exactly() -> None:
    values = np.array([0.1, 1.0, -0.0, 1e-45, 3.4028235e38, 16777216.0, -1 / 3], np.float32)
    text = template.array("float", "a", values)
    numbers = text.split("{")[1].split("}")[0].replace("f", "").replace("\n", "").rstrip(",").split(",")
    np.testing.assert_array_equal(np.array(list(map(float, numbers)), np.float32), values)
    assert all("." in number or "e" in number for number in numbers)
