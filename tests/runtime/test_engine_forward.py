"""The engine computes what ``forward`` computes, or refuses the module and says what differs."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import egru
from egru import EGRU, EGRUCell, EventEngine, EventState, Threshold, exponential_trace
from egru.runtime.network import Trace
from egru.types import EVENTS, WEIGHT_FORMATS, Events


@pytest.fixture(autouse=True)
def float32() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


class Model(nn.Module):
    """An event layer and a readout, with ``compute`` as its forward method."""

    def __init__(self, compute: Callable[[Any, Tensor], Any], batch_first: bool = True, threshold: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = EGRU(2, 40, batch_first=batch_first, threshold=Threshold.constant(threshold))
        self.dropout = nn.Dropout(0.5)
        self.readout = nn.Linear(40, 5)
        self.compute = compute

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


def trace_readout(model: Any, x: Tensor) -> Tensor:
    return model.readout(exponential_trace(model.rnn(x)[0], last=True, batch_first=True))


def mean_readout(model: Any, x: Tensor) -> Tensor:
    return model.readout(model.rnn(x)[0].mean(1))


def sum_readout(model: Any, x: Tensor) -> Tensor:
    return model.readout(model.rnn(x)[0].sum(1))


def last_readout(model: Any, x: Tensor) -> Tensor:
    return model.readout(model.dropout(model.rnn(x)[0][:, -1]))


def every_readout(model: Any, x: Tensor) -> tuple[Tensor, EventState]:
    y, state = model.rnn(x)
    return model.readout(y), state


def mean_every_readout(model: Any, x: Tensor) -> Tensor:
    y, _ = model.rnn(x)
    return model.readout(y.cumsum(1) / torch.arange(1, y.shape[1] + 1)[:, None])


SUPPORTED: list[tuple[Callable[[Any, Tensor], Any], Trace | None]] = [
    (trace_readout, math.exp(-1 / 10)),
    (mean_readout, "mean"),
    (mean_every_readout, "mean"),
    (sum_readout, 1.0),
    (last_readout, None),
    (every_readout, None),
]


@pytest.mark.parametrize(("compute", "trace"), SUPPORTED)
@pytest.mark.parametrize("threshold", [0.1, 10.0])  # with 10, no unit is ever active
def test_outputs_equal_forward_after_every_step(
    compute: Callable[[Any, Tensor], Any], trace: Trace | None, threshold: float
) -> None:
    model = Model(compute, threshold=threshold).eval()
    x = torch.randn(1, 70, 2)
    outputs = EventEngine(model, trace=trace).run(x[0])
    for t in (1, 2, 70):
        with torch.no_grad():
            result = model(x[:, :t])
        result = result[0] if isinstance(result, tuple) else result
        expected = result[0] if result.dim() == 2 else result[0, -1]
        torch.testing.assert_close(outputs[t - 1], expected, rtol=0, atol=1e-5)


def no_layer(model: Any, x: Tensor) -> Tensor:
    return model.readout(torch.zeros(*x.shape[:2], 40))


def residual(model: Any, x: Tensor) -> Tensor:
    y, _ = model.rnn(x)
    return model.readout(y + x.mean())


def initial_state(model: Any, x: Tensor) -> Tensor:
    zero = model.rnn.zero_state(len(x))
    return model.readout(model.rnn(x, EventState(zero.c + 0.5, zero.y))[0])


REFUSED: list[tuple[Callable[[Any, Tensor], Any], Trace | None, str]] = [
    (trace_readout, None, r"uses a trace of the events with decay math.exp\(-1 / 10\); pass trace=math.exp\(-1 / 10\)"),
    (trace_readout, 0.9, r"pass trace=math.exp\(-1 / 10\)"),
    (trace_readout, "mean", r"pass trace=math.exp\(-1 / 10\)"),
    (mean_readout, None, "uses the mean of the events over time; pass trace='mean'"),
    (mean_readout, 1.0, "pass trace='mean'"),
    (sum_readout, None, r"decay 1.0; pass trace=1.0"),
    (sum_readout, "mean", r"decay 1.0; pass trace=1.0"),
    (last_readout, 0.5, "uses the events of one step; pass trace=None"),
    (
        lambda m, x: m.readout(exponential_trace(m.rnn(x)[0], 0.8, gain=0.2, last=True, batch_first=True)),
        0.8,
        r"decay 0.8 and gain 0.2; multiply the weights of the readout by 0.2 and pass trace=0.8",
    ),
    (lambda m, x: m.readout(m.rnn(x)[0]).softmax(-1), None, "the result is not the output of readout"),
    (lambda m, x: m.readout(m.rnn(x)[0]).argmax(-1), None, "the result is not the output of readout"),
    (lambda m, x: m.readout(m.rnn(2 * x)[0]), None, "the input of rnn is not the input"),
    (lambda m, x: m.readout(m.rnn(x.flip(1))[0]), None, "the input of rnn is not the input"),
    (lambda m, x: m.readout(F.relu(m.rnn(x)[0] - 0.1)), None, "the input of readout is not the output of rnn"),
    (lambda m, x: m.readout(m.rnn(x)[0].amax(1)), None, "the input of readout is not the output of rnn"),
    (lambda m, x: m.readout(m.rnn(x)[0][:, 0]), None, "the input of readout is not the output of rnn"),
    (lambda m, x: m.readout(m.rnn(x)[1].c[-1]), None, "the input of readout is not the output of rnn"),
    (lambda m, x: m.readout(F.dropout(m.rnn(x)[0])), None, "the input of readout is not the output of rnn"),
    (residual, None, "the input of readout is not the output of rnn"),
    (no_layer, None, "forward calls readout, the engine runs rnn, readout"),
    (lambda m, x: m.rnn(x)[0], None, "forward calls rnn, the engine runs rnn, readout"),
    (initial_state, None, r"the outputs of shape \(3, 4, 5\) differ"),
    (lambda m, x: {"y": m.readout(m.rnn(x)[0])}, None, "forward returns dict instead of a tensor"),
    (lambda m, x: m.readout(m.rnn(x.reshape(-1, 784, 2))[0]), None, "raises RuntimeError for a random sequence"),
]


@pytest.mark.parametrize(("compute", "trace", "message"), REFUSED)
def test_other_forward_methods_are_refused(
    compute: Callable[[Any, Tensor], Any], trace: Trace | None, message: str
) -> None:
    for threshold in (0.1, 10.0):
        with pytest.raises(TypeError, match=rf"EventEngine: Model.forward .*{message}.*pass the parts"):
            EventEngine(Model(compute, threshold=threshold), trace=trace)


def test_layouts_of_the_input() -> None:
    """Modules may transpose their input, or read sequences without a batch dimension."""
    EventEngine(Model(lambda m, x: m.readout(m.rnn(x)[0]), batch_first=False))
    EventEngine(Model(lambda m, x: m.readout(m.rnn(x.transpose(0, 1))[0][-1]), batch_first=False))
    EventEngine(Model(lambda m, x: m.readout(m.rnn(x)[0][-1])))  # batch_first, unbatched


def test_summary_may_be_outside_of_a_module_without_readout() -> None:
    class Events(nn.Module):
        def __init__(self, trace: bool) -> None:
            super().__init__()
            self.rnn, self.trace = EGRU(2, 30), trace

        def forward(self, x: Tensor) -> Tensor:
            y, _ = self.rnn(x)
            return exponential_trace(y, 0.5) if self.trace else y

    EventEngine(Events(False), trace=0.5)
    EventEngine(Events(True), trace=0.5)
    EventEngine(Events(False), trace="mean", readout=nn.Linear(30, 2))
    with pytest.raises(TypeError, match=r"decay 0.5; pass trace=0.5"):
        EventEngine(Events(True))
    with pytest.raises(TypeError, match=r"decay 0.5; pass trace=0.5"):
        EventEngine(Events(True), trace=0.4)


def test_parts_with_other_forward_methods_are_refused() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    class Scaling(nn.Dropout):
        def forward(self, input: Any) -> Any:
            return input

    class Reader(nn.Module):
        def __init__(self, rnn: EGRU) -> None:
            super().__init__()
            self.rnn = rnn

        def forward(self, x: Tensor) -> Any:
            return self.rnn(x)[0]

    class Inverted(EGRU):
        def forward(self, input: Any, hx: Any = None) -> Any:
            y, state = super().forward(input, hx)
            assert isinstance(y, Tensor)
            return -y, state

    class Renamed(EGRUCell):
        pass

    EventEngine(Renamed(2, 8))
    EventEngine(nn.ModuleList([EGRU(2, 8), nn.Linear(8, 3)]))
    EventEngine(nn.Sequential(EGRU(2, 8), EGRU(8, 6), nn.Linear(6, 3)), trace=0.5)
    for module, message in (
        (Inverted(2, 8), "Inverted.forward and the engine compute different outputs"),
        (nn.Sequential(Inverted(2, 8), nn.Linear(8, 3)), "Inverted.forward and the engine compute different"),
        (nn.Sequential(EGRU(2, 8), Doubled(8, 3)), "Doubled has its own forward method"),
        (
            nn.Sequential(EGRU(2, 8), Scaling(), nn.Linear(8, 3)),
            "Scaling has its own forward method.* torch.nn.Dropout",
        ),
    ):
        with pytest.raises(TypeError, match=message):
            EventEngine(module)
    with pytest.raises(TypeError, match=r"which the engine would not run; pass a torch\.nn\.Linear"):
        EventEngine(EGRU(2, 8), readout=Doubled(8, 3))
    hooked = EGRU(2, 8)
    hooked.register_forward_hook(lambda module, args, output: (output[0] + 1, output[1]))
    for module in (hooked, nn.Sequential(hooked, nn.Linear(8, 3)), Reader(hooked)):
        with pytest.raises(TypeError, match=r"EGRU\)? has a forward hook, which the engine would not run; remove it"):
            EventEngine(module)


def test_check_changes_neither_the_module_nor_the_random_numbers() -> None:
    model = Model(every_readout).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    records: list[Any] = []
    model.rnn.observe(records.append)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    EventEngine(model)
    assert torch.equal(torch.rand(3), expected)
    assert model.training
    assert not records
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_modules_of_other_dtypes_are_checked_in_float32(dtype: torch.dtype) -> None:
    EventEngine(Model(trace_readout).to(dtype), trace=math.exp(-1 / 10))
    with pytest.raises(TypeError, match="uses a trace"):
        EventEngine(Model(trace_readout).to(dtype))


def test_parts_are_checked_in_float32_with_another_default_dtype() -> None:
    class Renamed(nn.Linear):
        pass

    model = nn.Sequential(EGRU(2, 8), Renamed(8, 3))
    torch.set_default_dtype(torch.float64)
    try:
        EventEngine(model)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_check_does_not_depend_on_the_weight_format(weights: Any) -> None:
    EventEngine(Model(mean_readout), weights, trace="mean")
    with pytest.raises(TypeError, match="pass trace='mean'"):
        EventEngine(Model(mean_readout), weights)
    model = egru.models.LanguageModel(30, 12, 20, num_layers=2)
    EventEngine(model, weights)
    with pytest.raises(TypeError, match="pass trace=None"):
        EventEngine(model, weights, trace=0.5)


def test_check_runs_on_the_cpu_without_autocast() -> None:
    model = Model(mean_readout)
    model.rnn.backend = "cuda"
    with torch.autocast("cpu", torch.bfloat16):
        EventEngine(model, trace="mean")


class Loop(nn.Module):
    """A cell that is called in a loop."""

    def __init__(self, cell: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cell = cell(4, 16)

    def forward(self, x: Tensor) -> Any:
        state: Any = None
        for t in range(5):
            state = self.cell(x[t], state)
        return state[0] if isinstance(state, tuple) else state


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize("events", EVENTS)
@pytest.mark.parametrize("build", [EventEngine, EventEngine.from_model])
def test_converted_cells_run_in_the_engine(cell: Any, events: Events, build: Callable[..., EventEngine]) -> None:
    torch.manual_seed(0)
    model = egru.convert(Loop(cell), events).eval()
    egru.compress.raise_thresholds(model, 0.02)
    x = torch.randn(5, 4)
    engine = build(model.cell)
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(engine.run(x)[-1], expected.as_subclass(Tensor), rtol=1e-4, atol=1e-5)
    assert {tuple(part.shape) for part in engine.state.values()} == {(16,)}
    with pytest.raises(TypeError, match=r"Loop\.forward cannot be expressed"):
        EventEngine.from_model(model)
