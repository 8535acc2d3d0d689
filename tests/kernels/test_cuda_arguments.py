"""Argument structs of the CUDA kernels, and the values that each launch passes in them. Needs no device."""

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from egru.events import Surrogate
from egru.kernels.cuda import (
    arguments,
    driver,
    gather,
    persistent,
    prepare,
    products,
    small_batch,
    sources,
    steps,
    stepwise,
)
from egru.kernels.cuda.plan import Chip
from egru.kernels.cuda.structs import ArgumentStruct, PackedArguments, definitions
from egru.kernels.problem import Problem
from egru.types import ResetGate

H200 = Chip(132, 232448)
STRUCTS = [value for value in vars(arguments).values() if isinstance(value, ArgumentStruct)]
GAPS = ArgumentStruct("Gaps", [("a", "int"), ("p", "float*"), ("b", "float"), ("keep", arguments.KEEP), ("c", "int")])


@pytest.fixture(autouse=True)
def single_precision(defaults: None) -> None:
    torch.set_default_dtype(torch.float32)  # the kernels' state is float32


def as_ctypes(described: ArgumentStruct) -> type[ctypes.Structure]:
    """The same struct for ctypes, which implements the C layout rules independently."""
    types = {"float": ctypes.c_float, "int": ctypes.c_int, "i64": ctypes.c_int64}
    fields = [
        (name, as_ctypes(ctype) if isinstance(ctype, ArgumentStruct) else types.get(ctype, ctypes.c_void_p))
        for name, ctype in described.fields.items()
    ]
    return type(described.name, (ctypes.Structure,), {"_fields_": fields})


def distinct_values(described: ArgumentStruct, first: int = 1) -> dict[str, Any]:
    """A different number for each field; nested structs in one flat tuple."""
    values: dict[str, Any] = {}
    for i, (name, ctype) in enumerate(described.fields.items(), first):
        values[name] = tuple(distinct_values(ctype, 100 * i).values()) if isinstance(ctype, ArgumentStruct) else i
    return values


@pytest.mark.parametrize("described", [*STRUCTS, GAPS], ids=lambda s: s.name)
def test_layout_follows_the_rules_of_c(described: ArgumentStruct) -> None:
    mirror = as_ctypes(described)
    assert described.size == ctypes.sizeof(mirror)
    assert described.alignment == ctypes.alignment(mirror)
    assert described.offsets == {name: getattr(mirror, name).offset for name in described.fields}


@pytest.mark.parametrize("described", [*STRUCTS, GAPS], ids=lambda s: s.name)
def test_packed_values_are_found_under_their_names(described: ArgumentStruct) -> None:
    values = distinct_values(described)
    packed = described.pack_named(**values)
    assert len(packed) == described.size
    mirror = as_ctypes(described).from_buffer_copy(packed)
    for name, ctype in described.fields.items():
        seen = getattr(mirror, name)
        inner = tuple(getattr(seen, n) for n in ctype.fields) if isinstance(ctype, ArgumentStruct) else seen
        if not (isinstance(ctype, ArgumentStruct) and ctype.nested):
            assert inner == values[name], name
    unpacked = described.unpack(packed)
    assert list(unpacked) == list(described.fields)
    for name, value in unpacked.items():
        assert (tuple(value.values()) if isinstance(value, dict) else value) == values[name], name


def test_missing_and_unknown_fields_raise() -> None:
    with pytest.raises(TypeError, match=r"Keep: missing fields \['h'\], unknown fields \['x'\]"):
        arguments.KEEP.pack_named(p=0, t=1, b=2, x=3)
    with pytest.raises(struct.error):
        arguments.KEEP.pack(0, 1, 2)


def test_structs_reject_unknown_types_and_repeated_names() -> None:
    with pytest.raises(ValueError, match="got 'double'"):
        ArgumentStruct("Wrong", [("a", "double")])
    with pytest.raises(ValueError, match="field names must be unique"):
        ArgumentStruct("Wrong", [("a", "int"), ("a", "float")])


def test_one_field_changes_between_launches() -> None:
    values = distinct_values(arguments.STEP_BACKWARD)
    packed = PackedArguments(arguments.STEP_BACKWARD, **values)
    packed.setter("t")(99)
    packed.setter("keep")(1, 2, 3, 4)
    changed = {**values, "t": 99, "keep": (1, 2, 3, 4)}
    assert bytes(packed.data) == arguments.STEP_BACKWARD.pack_named(**changed)
    with pytest.raises(KeyError):
        packed.setter("time")


def test_structs_are_defined_once_and_before_use() -> None:
    text = definitions([arguments.STEP_FORWARD, arguments.STEP_BACKWARD])
    assert text.count("struct Keep {") == 1
    assert text.index("struct Keep {") < text.index("struct StepForward {")
    assert text.index("struct Surrogate {") < text.index("struct StepBackward {")
    assert f"static_assert(sizeof(StepBackward) == {arguments.STEP_BACKWARD.size}," in text


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_size_check_compiles_and_fails_for_another_size(tmp_path: Path) -> None:
    """Compiles the generated definitions with the host compiler, whose layout rules are those of CUDA C++."""
    vectors = "struct alignas(16) float4 { float x, y, z, w; };\nstruct alignas(16) uint4 { unsigned x, y, z, w; };\n"
    text = vectors + sources.assemble({"LOW": 1}, STRUCTS, [])

    def compiles(source: str) -> bool:
        path = tmp_path / "arguments.cpp"
        path.write_text(source)
        run = subprocess.run(["c++", "-std=c++17", "-fsyntax-only", path], capture_output=True, text=True, check=False)
        return run.returncode == 0

    assert compiles(text)
    size = arguments.GATHER.size
    assert not compiles(text.replace(f"sizeof(Gather) == {size}", f"sizeof(Gather) == {size + 8}"))


# ---- the arguments of each launch, with nothing behind it ------------------------------------------------------------


class Launches:
    """Records launches in place of :class:`driver.Function`."""

    def __init__(self) -> None:
        self.arguments: list[tuple[str, dict[str, Any]]] = []

    def function(self, code: bytes, name: str, **_: object) -> Callable[[int, bytes], None]:
        tables = {
            "forward": arguments.SEQUENCE_FORWARD,
            "backward": arguments.SEQUENCE_BACKWARD,
            "small_batch": arguments.SMALL_BATCH,
            "prepare": arguments.PREPARE,
            "gather": arguments.GATHER,
        }
        return lambda grid, args: self.arguments.append((name, tables[name].unpack(args)))

    def of(self, name: str) -> list[dict[str, Any]]:
        return [values for launched, values in self.arguments if launched == name]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """A pretended H200: kernels are planned and launched, but neither compiled nor run."""
    recorded = Launches()
    monkeypatch.setattr(driver, "compile_source", lambda source, options: b"")
    monkeypatch.setattr(driver, "Function", recorded.function)
    monkeypatch.setattr(products, "product", lambda a, b: a.float() @ b.float())
    for module in (persistent, small_batch):
        monkeypatch.setattr(module, "chip", lambda device: H200)
        monkeypatch.setattr(module, "error_address", lambda: 4321)
        monkeypatch.setattr(module, "raise_if_stalled", lambda: None)
    monkeypatch.setattr(persistent, "is_hopper", lambda device: True)
    for module in (small_batch, prepare, gather):
        monkeypatch.setattr(module, "architecture", lambda device: "")
    caches = (
        persistent._function, persistent._plan, persistent._space, persistent._call, small_batch._plan,
        small_batch._function, small_batch._preparer, prepare._function, gather._function,
    )  # fmt: skip
    for cached in caches:
        cached.cache_clear()
    yield recorded
    for cached in caches:
        cached.cache_clear()


def make_problem(B: int, inputs: int, reset_gate: ResetGate = "after", **changes: Any) -> Problem:
    T, H = 3, 40
    values: dict[str, Any] = {
        "input": torch.randn(T, B, inputs),
        "c0": torch.randn(B, H),
        "y0": torch.randn(B, H),
        "weight_ih": torch.randn(3 * H, inputs),
        "weight_hh": torch.randn(3 * H, H),
        "bias_ih": torch.randn(3 * H),
        "bias_hh": torch.randn(3 * H),
        "theta": torch.randn(H),
        "reset_scale": torch.tensor(1.0),
        "keep": torch.rand(T, B, H),
        "lengths": torch.full((B,), T),
        "reset": "output",
        "reset_gate": reset_gate,
        "surrogate": Surrogate(width=0.5, height=0.25, bounded=True),
        "precision": "bfloat16",
    }
    return Problem(**{**values, **changes})


def pointers(problem: Problem, *names: str) -> dict[str, int]:
    return {name: getattr(problem, name).data_ptr() for name in names}


def check_shared(values: dict[str, Any], problem: Problem) -> None:
    """Fields that all kernels of the recursion have."""
    keep = problem.keep
    assert keep is not None
    assert values["theta"] == problem.theta.data_ptr()
    assert values["rho"] == problem.reset_scale.data_ptr()
    assert values["keep"] == {"p": keep.data_ptr(), **dict(zip("tbh", keep.stride(), strict=True))}
    assert problem.lengths is not None
    assert values["lengths"] == problem.lengths.data_ptr()
    assert (values["T"], values["B"]) == problem.input.shape[:2]


@pytest.mark.parametrize("inputs", [1, 7])
@pytest.mark.parametrize("B", [20, 3000])
def test_persistent_forward_arguments(launches: Launches, B: int, inputs: int) -> None:
    problem = make_problem(B, inputs)
    plan = persistent.find_plan(_OnDevice(problem.input), 40, "after", "bfloat16")
    assert plan is not None
    problem.input = _OnDevice(problem.input)
    pending = persistent.begin(plan, problem.input, problem.weight_ih, problem.weight_hh, "after", "bfloat16")
    out = persistent.forward(problem, plan, pending, save=True)
    (prepared,) = launches.of("prepare")
    assert prepared["pack"]["weight"] == problem.weight_hh.data_ptr()
    assert pending.buffer is not None
    assert prepared["pack"]["out"] == pending.buffer.data_ptr()
    assert (prepared["pack"]["H"], prepared["pack"]["blocks"], prepared["pack"]["after"]) == (40, plan.blocks, 1)
    assert prepared["workspace"] == pending.workspace
    assert prepared["backward"] == 0
    if inputs > 1:
        assert prepared["input"]["in"] == problem.input.data_ptr()
        assert prepared["weight_ih"]["in"] == problem.weight_ih.data_ptr()
        assert (prepared["input"]["columns"], prepared["input"]["columns_out"]) == (7, 8)
        assert (prepared["weight_ih"]["blocks"], prepared["weight_ih"]["rows"]) == (3, 40)
    waves = launches.of("forward")
    assert len(waves) == plan.waves
    for wave, values in enumerate(waves):
        check_shared(values, problem)
        expected = pointers(problem, "bias_ih", "bias_hh", "c0", "y0")
        expected |= {name: getattr(out, name).data_ptr() for name in ("y", "c", "c_last", "y_last", "reserve")}
        if inputs == 1:
            expected |= {**pointers(problem, "input", "weight_ih"), "projected": 0}
        else:
            assert pending.projected is not None
            expected |= {"input": 0, "weight_ih": 0, "projected": pending.projected.data_ptr()}
        expected |= {"weights": pending.buffer.data_ptr(), "error": 4321, "state_stride": 40}
        expected["b0"] = wave * plan.groups * plan.rows
        assert {name: values[name] for name in expected} == expected
        assert pending.workspace <= values["exchange"] < values["counter"]
    assert len({values["exchange"] for values in waves}) == plan.waves


@pytest.mark.parametrize("reset_gate", ["after", "before"])
@pytest.mark.parametrize("inputs", [1, 7])
def test_persistent_backward_arguments(launches: Launches, inputs: int, reset_gate: ResetGate) -> None:
    problem = make_problem(20, inputs, reset_gate=reset_gate)
    problem.input = _OnDevice(problem.input)
    plan = persistent.find_plan(problem.input, 40, reset_gate, "bfloat16")
    assert plan is not None
    c, reserve = torch.randn(3, 20, 40), torch.randn(3, 20, 60)
    grads = [torch.randn(3, 20, 40), torch.randn(3, 20, 40), torch.randn(20, 40), torch.randn(20, 40)]
    result = persistent.backward(problem, plan, c, reserve, *grads, input_gradient=True)
    (values,) = launches.of("backward")
    check_shared(values, problem)
    expected = pointers(problem, "c0", "y0") | {"c": c.data_ptr(), "reserve": reserve.data_ptr()}
    names = ("grad_y", "grad_c", "grad_c_last", "grad_y_last")
    expected |= {name: grad.data_ptr() for name, grad in zip(names, grads, strict=True)}
    expected |= {"input": problem.input.data_ptr() if inputs == 1 else 0, "error": 4321}
    assert result.c0 is not None
    assert result.y0 is not None
    expected |= {"dc0": result.c0.data_ptr(), "dy0": result.y0.data_ptr(), "b0": 0, "group0": 0, "state_stride": 40}
    assert {name: values[name] for name in expected} == expected
    assert values["surrogate"] == {"inverse_width": 2.0, "height": 0.25, "bounded": 1}
    assert values["source"] - values["gates"] == 2 * 60 * 4 * 40
    assert values["source_z"] - values["source"] == 2 * 60 * 48
    (gathered,) = launches.of("gather")
    expected = {"weight_ih": result.weight_ih, "weight_hh": result.weight_hh, "bias_ih": result.bias_ih}
    expected |= {"bias_hh": result.bias_hh, "theta": result.theta}
    assert {name: gathered[name] for name in expected} == {name: t.data_ptr() for name, t in expected.items()}
    sizes = {"H": 40, "HP": 40, "I": inputs, "IP": 8 if inputs > 1 else 0, "quantities": 2 if inputs > 1 else 3}
    sizes |= {"parts": plan.waves * plan.groups * 8, "after": int(reset_gate == "after"), "sums": values["sums"]}
    assert {name: gathered[name] for name in sizes} == sizes
    assert (gathered["hh_z"] == 0) == (reset_gate == "after")
    (prepared,) = launches.of("prepare")
    assert prepared["backward"] == 1


@pytest.mark.parametrize("precision", ["", "bfloat16"])
@pytest.mark.parametrize("inputs", [1, 7])
def test_small_batch_arguments(launches: Launches, inputs: int, precision: str) -> None:
    problem = make_problem(2, inputs, precision=precision)
    problem.input = _OnDevice(problem.input)
    plan = small_batch.find_plan(problem.input, 40, "after", precision)
    assert plan is not None
    pending = small_batch.begin(plan, problem.input, problem.weight_ih, problem.weight_hh, precision)
    out = small_batch.forward(problem, plan, pending, save=True)
    (values,) = launches.of("small_batch")
    check_shared(values, problem)
    expected = pointers(problem, "bias_ih", "bias_hh", "c0", "y0", "input", "weight_ih")
    expected |= {name: getattr(out, name).data_ptr() for name in ("y", "c", "c_last", "y_last", "reserve")}
    expected |= {"weights": problem.weight_hh.data_ptr(), "exchange": pending.workspace, "error": 4321}
    expected |= {"projected": 0 if pending.projected is None else pending.projected.data_ptr()}
    expected |= {"b0": 0, "state_stride": 40}
    assert {name: values[name] for name in expected} == expected
    assert (pending.projected is None) == (inputs == 1)


@pytest.mark.parametrize("reset_gate", ["after", "before"])
def test_fused_step_arguments(reset_gate: ResetGate, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bytes]] = []
    names = ("forward_gates", "forward_state", "backward_state", "backward_reset")
    monkeypatch.setattr(stepwise, "_functions", lambda *_: {name: name for name in names})
    monkeypatch.setattr(steps, "launch", lambda name, threads, args: seen.append((name, bytes(args.data))))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    problem = make_problem(5, 7, reset_gate=reset_gate, precision="")
    out = stepwise.forward(problem, save=True)
    for name, packed in seen:
        values = arguments.STEP_FORWARD.unpack(packed)
        check_shared(values, problem)
        expected = pointers(problem, "bias_ih", "bias_hh")
        expected |= {name: getattr(out, name).data_ptr() for name in ("y", "c", "c_last", "y_last", "reserve")}
        assert {name: values[name] for name in expected} == expected, name
        assert values["product"] != 0
        assert (values["H"], values["HP"]) == (40, 40)
    seen.clear()
    grads = [torch.randn(3, 5, 40), torch.randn(3, 5, 40), torch.randn(5, 40), torch.randn(5, 40)]
    result = stepwise.backward(problem, out.c, out.reserve, *grads, input_gradient=True)
    assert result.c0 is not None
    for i, (_, packed) in enumerate(seen):
        values = arguments.STEP_BACKWARD.unpack(packed)
        check_shared(values, problem)
        expected = pointers(problem, "c0", "y0")
        expected |= {"c": out.c.data_ptr(), "reserve": out.reserve.data_ptr(), "dc": result.c0.data_ptr()}
        expected |= {"grad_y": grads[0].data_ptr(), "grad_c": grads[1].data_ptr()}
        assert {name: values[name] for name in expected} == expected
        assert (values["product"] == 0) == (i == 0), "the last step has no gradient through the weights"
        assert values["surrogate"] == {"inverse_width": 2.0, "height": 0.25, "bounded": 1}


class _OnDevice(Tensor):
    """A CPU tensor that reports device index 0."""

    @staticmethod
    def __new__(cls, tensor: Tensor) -> "_OnDevice":
        return tensor.as_subclass(cls)

    @property
    def device(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.device("cpu", 0)
