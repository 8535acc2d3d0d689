"""The state of a converted GRU: a tensor that carries a second one, the internal state."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

# fmt: off
_APPLIED_TO_BOTH = {
    "__getitem__", "__imul__", "__mul__", "__rmul__", "__setitem__", "adjoint", "atleast_1d", "atleast_2d",
    "atleast_3d", "bfloat16", "broadcast_to", "cat", "chunk", "clone", "column_stack", "concat", "concatenate",
    "contiguous", "copy_", "cpu", "cuda", "detach", "detach_", "double", "dsplit", "dstack", "expand", "expand_as",
    "fill_", "flatten", "flip", "fliplr", "flipud", "float", "gather", "half", "hsplit", "hstack", "index_copy",
    "index_copy_", "index_fill", "index_fill_", "index_put", "index_put_", "index_select", "masked_fill",
    "masked_fill_", "masked_scatter", "masked_scatter_", "moveaxis", "movedim", "mul", "mul_", "narrow", "permute",
    "pin_memory", "ravel", "repeat", "repeat_interleave", "requires_grad_", "reshape", "reshape_as", "roll",
    "scatter", "scatter_", "select", "split", "split_with_sizes", "squeeze", "stack", "swapaxes", "swapdims", "t",
    "take", "take_along_dim", "tensor_split", "tile", "to", "transpose", "type", "type_as", "unbind", "unflatten",
    "unsqueeze", "view", "view_as", "vsplit", "vstack", "where", "zero_",
}
_COMBINATIONS = {"__add__", "__sub__", "add", "lerp", "sub"}
_IN_PLACE_OPERATORS = {
    "__iadd__", "__iand__", "__ifloordiv__", "__imod__", "__imul__", "__ior__", "__ipow__", "__isub__", "__itruediv__",
    "__ixor__", "__setitem__",
}
# fmt: on
"""Functions that select, arrange, copy, mask or overwrite states act on both parts of a :class:`HiddenState`, and so do
combinations of two states, as in ``mask * new + (1 - mask) * old``."""
_ABOUT_THE_OBJECT = {"__get__", "__set__", "register_hook", "requires_grad_", "retain_grad"}
_PROPERTIES_OF_BOTH = ("data", "T", "mT", "requires_grad")


class HiddenState(Tensor):
    """The state of a converted GRU: a tensor with the outputs of the last step, as ``torch.nn.GRU`` returns it.

    The attribute ``c`` is the internal state, which differs from the output for units without an event. Passed back to
    the layer, the object continues the sequence exactly. Indexing, stacking, copying, overwriting, detaching,
    multiplication with a mask and sums of two states act on both parts. Other functions see the outputs and return
    plain tensors; if they change the state in place, ``c`` restarts from the changed outputs.

    The gradient of this tensor includes that of ``c``. Therefore hooks, ``.grad`` and custom functions see the gradient
    of a state of ``torch.nn.GRU``. Functions that act on both parts carry the difference of the two gradients along.

    Args:
        y: Outputs of the last step.
        c: Internal state, of the same shape.

    Example:
        >>> output, h = egru.convert(torch.nn.GRU(4, 8))(torch.randn(20, 2, 4))
        >>> h.shape, h.c.shape
        (torch.Size([1, 2, 8]), torch.Size([1, 2, 8]))
    """

    _offset: Tensor
    """The value of ``c`` with the gradient of ``c - y``; adding ``y - y.detach()``, which is zero, completes it."""

    @staticmethod
    def __new__(cls, y: Tensor, c: Tensor) -> "HiddenState":
        return _wrap(y, c - (y - y.detach()) if _has_graph(y) else c)

    @property
    def y(self) -> Tensor:
        """The outputs as a plain tensor."""
        return self.as_subclass(Tensor)

    @property
    def c(self) -> Tensor:
        """The internal state."""
        y = self.y
        return self._offset + (y - y.detach()) if _has_graph(y) else self._offset

    @c.setter
    def c(self, value: Tensor) -> None:
        self._offset = HiddenState(self.y, value)._offset

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        target = kwargs.get("out", args[0] if args and _writes(name) else None)
        if target is not None and not isinstance(target, HiddenState):
            both = False  # a plain tensor receives the outputs
        elif name in ("__get__", "__set__"):
            both = func.__self__.__name__ in _PROPERTIES_OF_BOTH
        elif name in _COMBINATIONS:
            both = all(isinstance(operand, HiddenState) for operand in args[:2])
        else:
            both = name in _APPLIED_TO_BOTH or (name == "dropout" and not _drops(*args[1:], **kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            surplus = _gradient_of_others(func, args, kwargs) if both and torch.is_grad_enabled() else None
            if torch.compiler.is_compiling() and name not in _ABOUT_THE_OBJECT:
                y = func(*_map(args, _plain), **_map(kwargs, _plain))  # compiled graphs read plain tensors only
            else:
                y = func(*args, **kwargs)
            if both:
                offset = func(*_map(args, _offset), **_map(kwargs, _offset))
            elif isinstance(target, HiddenState):
                target._offset = target.detach().clone()
                return target
            else:
                return y
            if isinstance(target, HiddenState):
                if surplus is not None:
                    target._offset = target._offset - surplus
                return target
            if isinstance(y, tuple | list):
                return tuple(map(_wrap, y, offset))
            return _wrap(y, offset if surplus is None else offset - surplus) if isinstance(y, Tensor) else y

    def __reduce_ex__(self, protocol: Any) -> Any:
        return HiddenState, (self.y.detach(), self.c.detach()), self.requires_grad

    def __setstate__(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def __copy__(self) -> "HiddenState":
        return self.view_as(self)  # pyright: ignore[reportReturnType]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()


torch.serialization.add_safe_globals([HiddenState])  # torch.load reads states with weights_only=True


def _wrap(y: Tensor, offset: Tensor) -> HiddenState:
    # torch refuses to overwrite views from torch.no_grad() by tensors with gradients.
    with torch.set_grad_enabled(torch.is_grad_enabled() or not y.requires_grad):
        state = y.as_subclass(HiddenState)
    state._offset = offset
    return state


def _has_graph(y: Tensor) -> bool:
    return y.requires_grad and torch.is_grad_enabled()


def _gradient_of_others(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return a tensor of zeros with the gradient of other operands than states, such as a trained mask, or None.

    The outputs contribute this gradient, so that the difference of ``c`` and the outputs must not contribute it again.
    """
    operands = _pytree.tree_leaves((args, kwargs))
    if not any(isinstance(x, Tensor) and x.requires_grad and not isinstance(x, HiddenState) for x in operands):
        return None
    args, kwargs = _map(args, _constant), _map(kwargs, _constant)
    result = func(*args, **kwargs)
    result = args[0] if result is None else result  # of __setitem__
    return result - result.detach()


def _drops(p: float = 0.5, training: bool = True, *_: Any, train: bool = True, **__: Any) -> bool:
    """Return whether a call of ``dropout`` with these arguments, those of torch, can change its input."""
    return training and train and p > 0


def _writes(name: str) -> bool:
    """Return whether a function changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS


def _map(values: Any, part: Callable[[HiddenState], Tensor]) -> Any:
    return _pytree.tree_map_only(HiddenState, part, values)


def _plain(state: HiddenState) -> Tensor:
    return state.y


def _offset(state: HiddenState) -> Tensor:
    return state._offset


def _constant(state: HiddenState) -> Tensor:
    return state.detach().clone()
