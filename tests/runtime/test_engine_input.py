"""The engine's inputs and errors, its fallback without the compiled core, interruption and threads."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import egru
from egru import EGRU, EventEngine, Threshold, compiled
from egru.types import WeightFormat
from tests.helpers import wait_until


@pytest.fixture(autouse=True)
def float32() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(params=["compiled", "reference"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "compiled":
        pytest.importorskip("egru._core", reason="the compiled core is not built")
    else:
        monkeypatch.setattr(compiled, "core", None)
        monkeypatch.setattr(compiled, "_warned", True)
    return request.param


def layer(**options: Any) -> EGRU:
    torch.manual_seed(0)
    return EGRU(5, 8, **{"threshold": Threshold.constant(0.05), **options}).eval()


BAD_STEPS: list[tuple[Any, type[Exception], str]] = [
    (torch.zeros(4), ValueError, r"x has shape \(4,\), expected \(5,\)"),
    (torch.zeros(1, 5), ValueError, r"x has shape \(1, 5\), expected \(5,\)"),
    (np.zeros((5, 1), np.float32), ValueError, r"x has shape \(5, 1\), expected \(5,\)"),
    (torch.zeros(5, dtype=torch.float64), TypeError, "x must be float32, got float64"),
    (torch.zeros(5, dtype=torch.bfloat16), TypeError, "x must be"),
    (np.zeros(5), TypeError, "x must be float32, got float64"),
    (torch.zeros(5, dtype=torch.complex64).conj(), TypeError, "x must be float32, got complex64"),
    (torch.tensor([0, 0, float("nan"), 0, 0]), ValueError, "nan.*expected finite"),
    (np.array([0, np.inf, 0, 0, 0], np.float32), ValueError, "inf.*expected finite"),
    (torch.zeros(5, dtype=torch.int64), TypeError, "must be float32 because there is no embedding, got int64"),
    (3, TypeError, "must be float32 because there is no embedding, got int64"),
    ("x", TypeError, "x must be a float32 array or CPU tensor"),
    (None, TypeError, "x must be a float32 array or CPU tensor.*NoneType"),
    ([0.5] * 5, TypeError, "x must be"),
    (([0, 5], [1.0, 1.0]), ValueError, "index 5 is outside the input; expected 0 to 4"),
    (([-1], [1.0]), ValueError, "index -1 is outside"),
    (([1, 1], [1.0, 2.0]), ValueError, "index 1 occurs more than once"),
    ((np.array([3, 0, 3], np.uint16), [1.0, 2.0, 5.0]), ValueError, "index 3 occurs more than once"),
    (([1, 2], [1.0]), ValueError, r"expected one value per index, got 2 indices and values of shape \(1,\)"),
    (([1.5], [1.0]), TypeError, "indices must be a vector of integers"),
    (([1], [float("nan")]), ValueError, "nan.*expected finite"),
    ((np.array([1]), np.array([1.0])), TypeError, "values must be float32, got float64"),
]


@pytest.mark.parametrize(("x", "error", "message"), BAD_STEPS)
def test_failed_step_leaves_the_state_unchanged(runner: str, x: Any, error: type[Exception], message: str) -> None:
    engine = EventEngine(layer())
    engine.run(torch.randn(3, 5))
    before = engine.state
    with pytest.raises(error, match=message):
        engine.step(x)
    after = engine.state
    assert torch.equal(before["c"], after["c"])
    assert torch.equal(before["y"], after["y"])
    assert engine.activity.steps == 3


def test_bad_run_arguments_raise(runner: str) -> None:
    engine = EventEngine(layer(), streams=2)
    for x, message in (
        (torch.zeros(3, 5), r"x has shape \(3, 5\), expected \(3, 2, 5\)"),
        (torch.zeros(0, 2, 5), "at least one step"),
        (5, "at least one step"),
        (torch.full((3, 2, 5), float("inf")), "inf.*expected finite"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.run(x)  # pyright: ignore[reportCallIssue, reportArgumentType]
    for out, message in (
        (torch.zeros(3, 2, 9), r"out must be float32 of shape \(3, 2, 8\), got float32 \(3, 2, 9\)"),
        (torch.zeros(2, 3, 8).transpose(0, 1), "contiguous"),
        (torch.zeros(3, 2, 8, requires_grad=True), "must not require grad"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.run(torch.zeros(3, 2, 5), out=out)
    with pytest.raises(TypeError, match="out must be a numpy array or a CPU tensor, got list"):
        engine.step(torch.zeros(2, 5), out=[0.0])  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(ValueError, match="got 3 pairs for 2 streams"):
        engine.step([([], [])] * 3)
    read_only = np.zeros((2, 8), np.float32)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        engine.step(torch.zeros(2, 5), out=read_only)


def test_token_ids_are_checked(runner: str) -> None:
    engine = EventEngine(layer(), embedding=nn.Embedding(10, 5), readout=nn.Linear(8, 3))
    with pytest.raises(ValueError, match="token id 10 is outside the embedding; expected 0 to 9"):
        engine.step(10)
    with pytest.raises(ValueError, match="token id -1 is outside"):
        engine.run([3, -1])
    with pytest.raises(ValueError, match=r"token ids have shape \(2, 1\), expected \(2,\)"):
        engine.run(torch.zeros(2, 1, dtype=torch.int64))
    assert engine.run([3, 1]).shape == (2, 3)
    assert isinstance(engine.run(np.array([3, 1], np.int32)), np.ndarray)
    several = EventEngine(layer(), embedding=nn.Embedding(10, 5), streams=2)
    assert several.step([3, 4]).shape == (2, 8)
    assert several.step(torch.tensor([3, 4])).shape == (2, 8)


def test_any_memory_layout_is_accepted(runner: str) -> None:
    engine = EventEngine(layer())
    x = torch.randn(6, 5)
    plain = engine.run(x)
    for other in (x.T.contiguous().T, x.repeat(1, 2)[:, :5], x.numpy()[:], np.asfortranarray(x.numpy())):
        engine.reset()
        assert torch.equal(torch.as_tensor(engine.run(other)), plain)
        engine.reset()
        assert torch.equal(torch.stack([torch.as_tensor(engine.step(row)).clone() for row in other]), plain)
    assert isinstance(engine.step(x[0]), torch.Tensor)
    assert isinstance(engine.step(x[0].numpy()), np.ndarray)
    assert isinstance(engine.step(nn.Parameter(x[0])), torch.Tensor)


def test_unsupported_modules_raise(runner: str) -> None:
    class Parts(nn.Module):
        def __init__(self, *parts: nn.Module) -> None:
            super().__init__()
            for i, part in enumerate(parts):
                self.add_module(f"part{i}", part)

    with_parameter = Parts(layer())
    with_parameter.scale = nn.Parameter(torch.ones(1))
    cases: list[tuple[Any, type[Exception], str]] = [
        ("model", TypeError, "module must be a torch module, got str"),
        (nn.GRU(5, 8), TypeError, "has parameters or buffers outside its children"),
        (egru.models.SequenceClassifier(5, 8, 3), TypeError, r"EventEngine\(\*\*model.streaming\(\)\)"),
        (egru.ERNN(5, 8), TypeError, "accepted: egru.EGRU"),
        (with_parameter, TypeError, r"parameters or buffers outside its children \(scale\)"),
        (Parts(nn.Linear(4, 5), layer()), TypeError, "part0, a Linear, is not supported in this position"),
        (
            Parts(layer(), nn.Linear(8, 3), nn.Linear(3, 2)),
            TypeError,
            "part2, a Linear, is not supported in this position",
        ),
        (Parts(layer(), nn.ReLU()), TypeError, "part1, a ReLU, is not supported in this position"),
        (Parts(nn.Dropout()), TypeError, "has no event layer"),
        (Parts(layer(), layer()), ValueError, "takes 5 inputs and the layer below it has 8 outputs"),
        (Parts(nn.Embedding(7, 4), layer()), ValueError, "the first layer takes 5 inputs and the embedding has 4"),
        (EGRU(5, 8, bidirectional=True), ValueError, "bidirectional layers are not supported"),
    ]
    for module, error, message in cases:
        with pytest.raises(error, match=message):
            EventEngine(module)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_parameters_that_are_not_finite_raise(runner: str, value: float, weights: WeightFormat) -> None:
    names = [name for name, _ in layer(num_layers=2).named_parameters()] + ["reset_scale"]
    for name in names:
        broken = layer(num_layers=2)
        broken.state_dict()[name].view(-1)[-1:] = value
        with pytest.raises(ValueError, match=f"{name} contains .*; expected finite"):
            EventEngine(broken, weights)
    parts: list[tuple[str, Any]] = [("embedding.weight", nn.Embedding(3, 5)), ("readout.weight", nn.Linear(8, 2))]
    for name, part in parts:
        part.weight.data[-1, -1] = value
        with pytest.raises(ValueError, match=f"{name} contains .*; expected finite"):
            EventEngine(layer(), weights, **{name.split(".")[0]: part})
    readout = nn.Linear(8, 2)
    readout.bias.data[0] = value
    with pytest.raises(ValueError, match=r"readout.bias contains"):
        EventEngine(layer(), weights, readout=readout)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": "float16"}, ValueError, "weights must be one of float32, bfloat16, int8; got 'float16'"),
        ({"threads": 0}, ValueError, "threads must be at least 1, got 0"),
        ({"streams": 1.5}, TypeError, "streams must be an int, got float 1.5"),
        ({"trace": 1.1}, ValueError, "trace must be None, 'mean' or a decay per step, 0 <= trace <= 1; got 1.1"),
        ({"trace": "sum"}, ValueError, "trace must be None, 'mean' or a decay"),
        ({"readout": nn.Linear(9, 2)}, ValueError, "the readout takes 9 inputs and the last layer has 8"),
        ({"readout": nn.ReLU()}, TypeError, "readout must be a torch.nn.Linear, got ReLU"),
        ({"embedding": nn.Embedding(3, 5, max_norm=1.0)}, ValueError, "embedding.max_norm must be None, got 1.0"),
        ({"token_table": -1}, ValueError, "token_table must be a number of bytes"),
    ],
)
def test_bad_options_raise(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EventEngine(layer(), **options)


def test_bad_states_raise(runner: str) -> None:
    engine = EventEngine(layer(), streams=2)
    zeros = torch.zeros(1, 2, 8)
    for state, error, message in (
        (zeros, TypeError, "state must be a dict with c, y; got Tensor"),
        ({"c": zeros}, ValueError, "state has no 'y'; this engine requires c, y"),
        ({"c": zeros, "y": zeros, "trace": zeros}, ValueError, "unknown entry 'trace'; expected c, y"),
        ({"c": zeros, "y": None}, TypeError, r"state\['y'\] must be a Tensor, got NoneType"),
        ({"c": zeros, "y": zeros[:, 0]}, ValueError, r"state\['y'\] has shape \(1, 8\), expected \(1, 2, 8\)"),
        ({"c": torch.full((1, 2, 8), float("nan")), "y": zeros}, ValueError, r"state\['c'\] contains nan"),
    ):
        with pytest.raises(error, match=message):
            engine.state = state  # pyright: ignore[reportAttributeAccessIssue]
    single = torch.zeros(1, 8)
    with pytest.raises(ValueError, match="state has no 'trace'; this engine requires c, y, trace"):
        EventEngine(layer(), trace=0.5).state = {"c": single, "y": single}
    mean = EventEngine(layer(), trace="mean")
    with pytest.raises(ValueError, match="state has no 'trace_steps'"):
        mean.state = {"c": single, "y": single, "trace": single[0]}
    for steps in (torch.tensor(-1), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="must be int64 and not negative"):
            mean.state = {"c": single, "y": single, "trace": single[0], "trace_steps": steps}


def test_overflowing_state_raises(runner: str) -> None:
    engine = EventEngine(layer())
    engine.state = {"c": torch.full((1, 8), 3e38), "y": torch.full((1, 8), -3e38)}
    with pytest.raises(ValueError, match="became NaN or infinite"):
        engine.step(torch.zeros(5))
    engine.reset()
    assert torch.isfinite(engine.run(torch.randn(5, 5))).all()


def test_reference_runner_agrees_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("egru._core", reason="the compiled core is not built")
    readout, x = nn.Linear(8, 3), torch.randn(30, 2, 5)
    for weights in ("float32", "bfloat16", "int8"):
        fast = EventEngine(layer(), weights, streams=2, readout=readout, trace=0.9)
        expected = fast.run(x)
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "core", None)
            patch.setattr(compiled, "_warned", False)
            with pytest.warns(RuntimeWarning, match="plain torch, which is slow"):
                slow = EventEngine(layer(), weights, streams=2, readout=readout, trace=0.9)
            EventEngine(layer())  # must not warn again: warnings are errors in the tests
            assert slow.level == "reference"
            torch.testing.assert_close(slow.run(x), expected, rtol=0, atol=2e-6)
            assert slow.activity == fast.activity


def is_running(engine: EventEngine) -> bool:
    """Return whether another thread runs the engine."""
    try:
        return engine.activity is None
    except RuntimeError:
        return True


def test_engine_continues_after_an_interrupted_run() -> None:
    pytest.importorskip("egru._core", reason="the compiled core is not built")
    import _thread

    engine = EventEngine(EGRU(1, 300))
    x = torch.randn(5_000_000, 1)  # several seconds
    sent: list[float] = []

    def interrupt() -> None:
        wait_until(lambda: is_running(engine))
        sent.append(time.process_time())
        _thread.interrupt_main()

    worker = threading.Thread(target=interrupt)
    worker.start()
    with pytest.raises(KeyboardInterrupt):
        engine.run(x, last=True)
    assert time.process_time() - sent[0] < 1
    worker.join()
    assert 0 < engine.activity.steps < len(x)
    assert torch.isfinite(engine.run(x[:5])).all()


def test_use_from_a_second_thread_raises() -> None:
    pytest.importorskip("egru._core", reason="the compiled core is not built")
    import _thread

    engine = EventEngine(layer())
    x = torch.randn(5_000_000, 5)  # several seconds
    messages: list[str] = []

    def use_the_engine() -> None:
        wait_until(lambda: is_running(engine))
        for use in (lambda: engine.step(x[0]), lambda: engine.state, engine.reset, lambda: engine.activity):
            try:
                use()
            except RuntimeError as error:
                messages.append(str(error))
        _thread.interrupt_main()

    worker = threading.Thread(target=use_the_engine)
    worker.start()
    with pytest.raises(KeyboardInterrupt):
        engine.run(x, last=True)
    worker.join()
    assert len(messages) == 4
    assert all("already running in another thread" in message for message in messages)
    assert 0 < engine.activity.steps < len(x)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.int16])
def test_indices_of_any_integer_dtype(dtype):
    """Unsigned integers matter because their differences wrap around."""
    layer = egru.EGRU(5, 8).float().eval()
    engine, other = EventEngine(layer), EventEngine(layer)
    y = engine.step((np.array([3, 0, 4], dtype), np.array([1, 2, 3], np.float32)))
    assert np.array_equal(y, other.step((np.array([0, 3, 4]), np.array([2, 1, 3], np.float32))))
    with pytest.raises(ValueError, match="index 3 occurs more than once"):
        engine.step((np.array([3, 0, 3], dtype), np.array([1, 2, 5], np.float32)))


def test_layer_used_twice_runs_twice():
    layer = egru.EGRU(5, 5).float().eval()
    x = torch.randn(7, 5, dtype=torch.float32)
    expected = layer(layer(x)[0])[0]
    torch.testing.assert_close(EventEngine(nn.Sequential(layer, layer)).run(x), expected.detach())
