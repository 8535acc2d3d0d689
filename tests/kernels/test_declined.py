"""Problems that a kernel declines: a warning with the reason and the cost, and the table of ``egru doctor``."""

import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import egru
from egru import doctor
from egru.kernels import Problem, registry
from egru.kernels.support import KERNELS, support
from tests.kernels.test_problem import make_problem

X = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


@pytest.fixture(autouse=True)
def no_earlier_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_warned", set())
    warnings.simplefilter("error", RuntimeWarning)  # which pyproject.toml ignores
    torch.set_default_dtype(torch.float32)


class _PretendCuda:
    """A stand-in for a CUDA tensor: the choice of a kernel reads only these attributes."""

    device = torch.device("cuda", 0)
    dtype = torch.float32
    shape = (3, 2, 4)


def cuda_problem(**changes: Any) -> Problem:
    options = {"surrogate": egru.Surrogate(), "precision": "", "input": _PretendCuda(), "lengths": None}
    return make_problem(**options | changes)


def layer(**options: Any) -> egru.EGRU:
    return egru.EGRU(4, 5, **options)


DECLINED_BY_CUDA = [
    ({"reset_scale": torch.ones(5)}, "it requires one reset_scale for all units, got one per unit"),
    ({"recurrent_clip": 0.5}, "it does not support recurrent_clip"),
    ({"events": "signed"}, "it does not support events='signed' in a GRU"),
    ({"events": "delta", "reset": "none", "reset_gate": "after"}, "it does not support events='delta' in a GRU"),
    ({"surrogate": egru.Surrogate(shape="rectangle")}, "it supports the triangle surrogate only, got 'rectangle'"),
    ({"weight_hh": torch.zeros(15, 5).double()}, "it requires float32 parameters, got torch.float64"),
]


@pytest.mark.parametrize(("change", "reason"), DECLINED_BY_CUDA)
def test_gpu_layer_that_the_kernel_declines_warns_once(change: dict[str, Any], reason: str) -> None:
    with pytest.warns(RuntimeWarning, match="EGRU runs in plain torch, which is slow") as record:
        assert registry.choose("auto", cuda_problem(**change)) == "reference"
    assert f"the cuda kernel cannot run it, because {reason}; egru doctor" in str(record[0].message)
    assert "about 20 operations per step, 60 in training" in str(record[0].message)
    assert registry.choose("auto", cuda_problem(**change)) == "reference"  # a second warning would raise


def test_every_reason_has_a_warning() -> None:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for change, _ in DECLINED_BY_CUDA * 2:
            registry.choose("auto", cuda_problem(**change))
    assert len(record) == len({reason for _, reason in DECLINED_BY_CUDA})


def test_supported_or_explicitly_chosen_calls_do_not_warn() -> None:
    assert registry.choose("auto", cuda_problem()) == "cuda"
    assert registry.choose("reference", cuda_problem(recurrent_clip=0.5)) == "reference"
    layer(backend="reference", recurrent_clip=1.0)(X)
    layer()(X)
    with torch.no_grad():
        layer(recurrent_clip=1.0)(X)


def test_device_without_a_kernel_warns() -> None:
    mps = type("PretendMps", (_PretendCuda,), {"device": torch.device("mps")})()
    with pytest.warns(RuntimeWarning, match="there is no kernel for mps tensors"):
        assert registry.choose("auto", cuda_problem(input=mps)) == "reference"


def test_cells_without_a_kernel_warn_once() -> None:
    model = egru.ERNN(4, 5)
    with pytest.warns(RuntimeWarning, match="ERNN runs in plain torch.*no kernel supports this cell"):
        model(X)
    model(X)


def test_lstms_run_on_kernels_and_warn_by_their_name_where_they_cannot() -> None:
    egru.ELSTM(4, 5)(X)
    egru.ELSTM(4, 5, compare="output", lean=True)(X)
    with pytest.warns(RuntimeWarning, match="ELSTM runs in plain torch.*the cpu kernel.*recurrent_clip"):
        egru.ELSTM(4, 5, recurrent_clip=1.0)(X)
    assert registry.choose("auto", cuda_problem(cell="lstm")) == "cuda"
    with pytest.warns(RuntimeWarning, match="ELSTM runs in plain torch.*the cuda kernel.*recurrent_clip"):
        assert registry.choose("auto", cuda_problem(cell="lstm", recurrent_clip=1.0)) == "reference"


def test_compiled_layer_warns_too() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layer(recurrent_clip=1.0), backend="aot_eager", fullgraph=True)
    with pytest.warns(RuntimeWarning, match="does not support recurrent_clip"):
        compiled(X)


def test_transforms_warn() -> None:
    model = layer()
    with pytest.warns(RuntimeWarning, match="no kernel supports forward-mode differentiation or torch.func"):
        torch.func.jacrev(lambda x: model(x)[0])(X)


class _CountOperations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("training", "expected"), [(False, 20), (True, 60)])
def test_warning_states_the_number_of_operations_per_step(training: bool, expected: int) -> None:
    counts: list[int] = []
    kernel = registry.get("reference")
    for steps in (2, 12):
        problem = make_problem(input=torch.randn(steps, 2, 4), reset="output", precision="", lengths=None)
        with _CountOperations() as operations:
            result = kernel.forward(problem, training)
            if training:
                grads = torch.ones_like(result.y), None, None, None
                kernel.backward(problem, result.y, result.c, result.reserve, *grads, True)
        counts.append(operations.count)
    assert (counts[1] - counts[0]) / 10 == pytest.approx(expected, rel=0.1)


# ---- the table -------------------------------------------------------------------------------------------------------

LAYERS: dict[str, Any] = {
    "default": layer,
    "lean": lambda **options: layer(lean=True, **options),
    "zoneout": lambda **options: layer(zoneout=0.1, **options),
    "recurrent_clip, training": lambda **options: layer(recurrent_clip=1.0, **options),
    "surrogates other than 'triangle'": lambda **options: layer(surrogate=egru.Surrogate(shape="rectangle"), **options),
    "ELSTM": lambda **options: egru.ELSTM(4, 5, **options),
    "float64 parameters": lambda **options: layer(**options).double(),
    "bfloat16 or float16 parameters": lambda **options: layer(**options).bfloat16(),
}


@pytest.mark.parametrize("option", LAYERS)
def test_table_agrees_with_the_layers_on_the_cpu(option: str) -> None:
    declined = {row.option: row.declined for row in support()}[option]["cpu"]
    model = LAYERS[option](backend="cpu")
    x = X.to(next(model.parameters()).dtype)
    if declined is None:
        model(x)
    else:
        with pytest.raises(ValueError, match="backend='cpu' cannot run this") as error:
            model(x)
        assert declined in str(error.value)


def test_doctor_shows_which_options_kernels_support() -> None:
    lines = {" ".join(line.split()) for line in doctor.describe()}
    assert KERNELS == ("cpu", "cuda")
    assert {
        "option cpu cuda reason",
        "default yes yes",
        "events='signed' yes no it does not support events='signed' in a GRU",
        "events='delta' yes no it does not support events='delta' in a GRU",
        "reset_scale per unit yes no it requires one reset_scale for all units, got one per unit",
        "recurrent_clip, training no no it does not support recurrent_clip",
        "surrogates other than 'triangle' no no it supports the triangle surrogate only, got 'rectangle'",
        "ELSTM yes yes",
        "ERNN no no no kernel supports this cell",
    } <= lines


@pytest.mark.parametrize(
    "call",
    [
        lambda: egru.ERNN(4, 5)(X),
        lambda: torch.nn.Sequential(egru.ERNN(4, 5))(X),
        lambda: egru.EGRU(4, 5, dropout=0.5),
    ],
)
def test_warning_points_to_the_line_of_the_user(call: Any) -> None:
    with pytest.warns() as record:
        call()
    assert (record[0].filename, record[0].lineno) == (__file__, call.__code__.co_firstlineno)
