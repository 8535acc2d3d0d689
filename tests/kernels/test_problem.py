"""The fields of ``Problem`` and what is derived from them: argument lists, the operator's schema, refused options."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import egru
from egru.kernels import Problem, choose, info, registry
from egru.kernels.fields import BackwardOnly, Differentiable, EagerOnly, describe_fields
from egru.kernels.op import sequence
from egru.kernels.problem import FIELDS, Backward
from egru.types import BACKENDS


def make_problem(**changes: Any) -> Problem:
    T, B, I, H = 3, 2, 4, 5
    values: dict[str, Any] = {
        "input": torch.randn(T, B, I),
        "c0": torch.zeros(B, H),
        "y0": torch.zeros(B, H),
        "weight_ih": torch.randn(3 * H, I),
        "weight_hh": torch.randn(3 * H, H),
        "bias_ih": torch.randn(3 * H),
        "bias_hh": None,
        "theta": torch.rand(H),
        "reset_scale": torch.ones(()),
        "keep": None,
        "lengths": torch.tensor([3, 1]),
        "reset": "hard",
        "reset_gate": "after",
        "surrogate": egru.Surrogate(0.5, 0.25, True, "rectangle"),
        "precision": "bfloat16",
    }
    return Problem(**values | changes)


def test_unflatten_restores_every_argument() -> None:
    problem = make_problem(lean=True, recurrent_clip=0.5, started=object())
    restored = Problem.unflatten(problem.flatten())
    for field in dataclasses.fields(Problem):
        if field.name != "started":
            assert getattr(restored, field.name) is getattr(problem, field.name) or (
                getattr(restored, field.name) == getattr(problem, field.name)
            )
    assert restored.started is None


def test_tensors_and_options_restore_the_problem() -> None:
    problem = make_problem(lean=True, recurrent_clip=0.5)
    arguments: tuple[Any, ...] = (*problem.tensors(), *problem.options())
    assert Problem(*arguments).flatten() == problem.flatten()


def test_flattened_numbers_have_the_type_of_the_schema() -> None:
    values = make_problem(surrogate=egru.Surrogate(1, 1), recurrent_clip=0).flatten()
    assert all(type(value) is not int for value in values)


def test_schema_lists_the_fields_in_order() -> None:
    schema = sequence._schema
    names = [argument.name for argument in schema.arguments]
    surrogate = [f"surrogate_{field.name}" for field in dataclasses.fields(egru.Surrogate)]
    expected: list[str] = []
    for field in dataclasses.fields(Problem):
        expected += surrogate if field.name == "surrogate" else [] if field.name == "started" else [field.name]
    assert names == [*expected, "kernel", "save"]
    optional = {argument.name for argument in schema.arguments if str(argument.type) == "Optional[Tensor]"}
    assert optional == {"bias_ih", "bias_hh", "keep", "lengths"}


def test_gradients_match_the_differentiable_fields() -> None:
    assert Backward._fields == FIELDS.differentiable


def test_backends_are_the_registered_kernels() -> None:
    assert ("auto", *info()) == BACKENDS


@pytest.mark.parametrize("kernel", info())
def test_kernels_declare_only_options_that_exist(kernel: str) -> None:
    assert registry.get(kernel).options <= FIELDS.defaults.keys()


def test_reference_implements_every_option() -> None:
    assert registry.get("reference").options == FIELDS.defaults.keys()


@pytest.mark.parametrize("kernel", ["cpu", "cuda"])
def test_undeclared_options_are_refused_by_name(kernel: str) -> None:
    with pytest.raises(ValueError, match=f"backend='{kernel}' cannot run this: it does not support recurrent_clip"):
        choose(kernel, make_problem(recurrent_clip=0.5))
    assert choose("auto", make_problem(recurrent_clip=0.5)) == "reference"


def test_option_that_no_kernel_implements_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = dict.fromkeys(info(), (("lean", False),))
    monkeypatch.setattr(registry, "_REFUSED_OPTIONS", refused)
    with pytest.raises(ValueError, match="no kernel can run this: it does not support lean"):
        choose("auto", make_problem(lean=True))


def test_backward_only_options_do_not_restrict_evaluation() -> None:
    problem = make_problem(recurrent_clip=0.5)
    assert problem.without_backward_options().recurrent_clip == 0
    unchanged = make_problem()
    assert unchanged.without_backward_options() is unchanged


def test_gradients_are_needed_only_if_a_differentiable_field_requires_them() -> None:
    assert not make_problem().needs_gradient()
    assert not make_problem(keep=torch.rand(5, requires_grad=True)).needs_gradient()
    needed = make_problem(theta=torch.rand(5, requires_grad=True))
    assert needed.needs_gradient()
    with torch.no_grad():
        assert not needed.needs_gradient()


@dataclasses.dataclass
class _Arguments:
    x: Differentiable[Tensor | None]
    mask: Tensor
    count: int
    clip: BackwardOnly[float] = 1.0
    cache: EagerOnly[object] = None


def test_roles_are_read_from_annotations() -> None:
    fields = describe_fields(_Arguments)
    assert fields.differentiable == ("x",)
    assert fields.tensors == ("x", "mask")
    assert fields.option_names == ("count", "clip")
    assert fields.defaults == {"clip": 1.0}
    assert fields.backward_only == ("clip",)
    assert fields.schema == "Tensor? x, Tensor mask, int count, float clip"


@dataclasses.dataclass
class _WrongOrder:
    count: int
    x: Tensor


@dataclasses.dataclass
class _WrongType:
    names: list[str]


def test_fields_that_do_not_fit_an_operator_are_refused() -> None:
    with pytest.raises(TypeError, match=r"_WrongOrder: fields must be declared in the order .* got count, x"):
        describe_fields(_WrongOrder)
    with pytest.raises(TypeError, match="names: an option must be a str, bool, int, float or a dataclass"):
        describe_fields(_WrongType)
