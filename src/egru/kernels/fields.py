"""Derive argument lists and operator schemas from the annotations of a dataclass.

Every field of :class:`egru.kernels.problem.Problem` declares its role once, by its annotation:

* ``Tensor`` or ``Tensor | None``: a tensor argument;
* ``Differentiable[...]``: a tensor argument that receives a gradient;
* ``str``, ``bool``, ``int``, ``float``, a ``Literal`` of strings, or a dataclass of these: an option;
* ``BackwardOnly[...]``: an option that changes the backward pass only;
* ``EagerOnly[...]``: not an argument of the operator.
"""

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from torch import Tensor

T = TypeVar("T")


class Role(enum.Enum):
    """Markers inside ``Annotated``; plain tensors and options carry none."""

    DIFFERENTIABLE = enum.auto()
    BACKWARD_ONLY = enum.auto()
    EAGER_ONLY = enum.auto()


Differentiable = Annotated[T, Role.DIFFERENTIABLE]
BackwardOnly = Annotated[T, Role.BACKWARD_ONLY]
EagerOnly = Annotated[T, Role.EAGER_ONLY]


class Option(NamedTuple):
    """An option and the plain values it is made of."""

    name: str
    factory: Any
    """The dataclass that the plain values are passed to, or None if the option is a plain value itself."""
    paths: tuple[tuple[str, ...], ...]
    """Attribute paths of the plain values, such as ``("surrogate", "width")``."""
    types: tuple[type, ...]


class FieldTable(NamedTuple):
    """The names of a dataclass's fields by role, each in the order of declaration."""

    differentiable: tuple[str, ...]
    tensors: tuple[str, ...]
    """All tensor arguments; the differentiable ones come first."""
    options: tuple[Option, ...]
    option_names: tuple[str, ...]
    defaults: dict[str, Any]
    """Default values of the options that have one."""
    backward_only: tuple[str, ...]
    schema: str
    """The arguments as ``torch.library`` declares them, e.g. ``"Tensor input, Tensor? keep, str reset"``."""

    def argument_getter(self) -> Callable[[Any], tuple[Any, ...]]:
        """Return a function of an instance that returns the operator's arguments.

        These are the tensors, then the plain values of the options, converted to the types in the schema.
        """
        expressions = [f"instance.{name}" for name in self.tensors]
        for option in self.options:
            for path, kind in zip(option.paths, option.types, strict=True):
                expressions.append(f"{kind.__name__}(instance.{'.'.join(path)})")
        return _tuple_getter(expressions)

    def unflatten(self, values: Sequence[Any]) -> list[Any]:
        """Return the constructor's arguments, given those of the operator."""
        end = len(self.tensors)
        arguments = list(values[:end])
        for option in self.options:
            begin, end = end, end + len(option.paths)
            arguments.append(values[begin] if option.factory is None else option.factory(*values[begin:end]))
        return arguments


def attribute_getter(names: Iterable[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function of an instance that returns the attributes called ``names``."""
    return _tuple_getter(f"instance.{name}" for name in names)


def _tuple_getter(expressions: Iterable[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function of ``instance`` that returns the values of Python expressions.

    With ``operator.attrgetter``, ``torch.compile`` breaks the graph. A loop over the names leaves guards on every name
    and type, which compiled code checks at every call.
    """
    return eval(f"lambda instance: ({''.join(f'{expression}, ' for expression in expressions)})")


def describe_fields(cls: type) -> FieldTable:
    """Read the roles of a dataclass's fields from their annotations.

    Raises:
        TypeError: If the fields are not declared in the order differentiable tensors, other tensors, options,
            eager-only fields, or if an option has a type that an operator cannot take.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    ranks: list[int] = []
    tensors: list[str] = []
    differentiable: list[str] = []
    backward_only: list[str] = []
    options: list[Option] = []
    defaults: dict[str, Any] = {}
    schema: list[str] = []
    for field in dataclasses.fields(cls):
        annotation, role = _strip_role(hints[field.name])
        if role is Role.EAGER_ONLY:
            ranks.append(3)
        elif (tensor_type := _tensor_type(annotation)) is not None:
            ranks.append(0 if role is Role.DIFFERENTIABLE else 1)
            tensors.append(field.name)
            schema.append(f"{tensor_type} {field.name}")
            if role is Role.DIFFERENTIABLE:
                differentiable.append(field.name)
        else:
            ranks.append(2)
            option = _option(field.name, annotation)
            options.append(option)
            schema += [f"{t.__name__} {'_'.join(path)}" for path, t in zip(option.paths, option.types, strict=True)]
            if field.default is not dataclasses.MISSING:
                defaults[field.name] = field.default
            if role is Role.BACKWARD_ONLY:
                backward_only.append(field.name)
    if ranks != sorted(ranks):
        raise TypeError(
            f"{cls.__name__}: fields must be declared in the order differentiable tensors, other tensors, options, "
            f"eager-only fields; got {', '.join(field.name for field in dataclasses.fields(cls))}"
        )
    return FieldTable(
        tuple(differentiable),
        tuple(tensors),
        tuple(options),
        tuple(option.name for option in options),
        defaults,
        tuple(backward_only),
        ", ".join(schema),
    )


def _strip_role(annotation: Any) -> tuple[Any, Role | None]:
    if get_origin(annotation) is Annotated:
        plain, role = get_args(annotation)
        return plain, role
    return annotation, None


def _tensor_type(annotation: Any) -> str | None:
    """Return the schema type of a tensor annotation, or None if it is not one."""
    if annotation is Tensor:
        return "Tensor"
    if get_origin(annotation) in (types.UnionType, typing.Union) and set(get_args(annotation)) == {Tensor, type(None)}:
        return "Tensor?"
    return None


def _option(name: str, annotation: Any) -> Option:
    if dataclasses.is_dataclass(annotation):
        parts = list(_plain_parts(annotation))
        return Option(name, annotation, tuple((name, part) for part, _ in parts), tuple(kind for _, kind in parts))
    return Option(name, None, ((name,),), (_plain_type(name, annotation),))


def _plain_parts(cls: Any) -> Iterator[tuple[str, type]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield field.name, _plain_type(field.name, hints[field.name])


def _plain_type(name: str, annotation: Any) -> type:
    if get_origin(annotation) is Literal and all(isinstance(value, str) for value in get_args(annotation)):
        return str
    if annotation in (str, bool, int, float):
        return annotation
    raise TypeError(f"{name}: an option must be a str, bool, int, float or a dataclass of these, got {annotation}")
