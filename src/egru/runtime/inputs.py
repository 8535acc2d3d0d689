"""Check and convert what users pass to :class:`egru.EventEngine`: sparse vectors, token ids and output buffers."""

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array: TypeAlias = NDArray[Any]
Indices: TypeAlias = Tensor | Array | list[int]
Values: TypeAlias = Tensor | Array | list[float]
SparseVector: TypeAlias = tuple[Indices, Values]
"""Indices and values of the active entries of a vector."""
TokenIds: TypeAlias = int | np.integer | Sequence[int]
"""The token of one step, one per stream."""
TokenSequence: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
"""The tokens of several steps."""
StepInput: TypeAlias = Tensor | Array | SparseVector | Sequence[SparseVector] | TokenIds
"""What :meth:`egru.EventEngine.step` accepts."""


def is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def is_sparse(x: Any) -> bool:
    """Whether ``x`` is an ``(indices, values)`` pair."""
    vectors = (np.ndarray, Tensor, list)
    return isinstance(x, tuple) and len(x) == 2 and all(isinstance(half, vectors) for half in x)


def describe(x: Any) -> str:
    """Return the type of ``x`` with its shape or value, for error messages."""
    shape = getattr(x, "shape", None)
    return f"{type(x).__name__} {x!r:.60}" if shape is None else f"{type(x).__name__} of shape {tuple(shape)}"


def check_finite(caller: str, values: Array) -> None:
    nonfinite = values[~np.isfinite(values)]
    if nonfinite.size:
        raise ValueError(f"{caller}: x contains {nonfinite[0]}; expected finite values")


def integers(caller: str, x: Any, accepted: str) -> Array:
    """Convert one token id or nested lists of token ids to an array.

    Raises:
        TypeError: If ``x`` is anything else.
    """
    try:
        array = np.asarray(x) if isinstance(x, list | tuple) else np.asarray(operator.index(x))
    except (TypeError, ValueError):
        array = None
    if array is None or array.dtype.kind not in "iu":
        raise TypeError(f"{caller}: x must be {accepted}; got {describe(x)}")
    return array


def token_ids(caller: str, array: Array, shape: tuple[int, ...], tokens: int) -> Array:
    """Return contiguous int64 token ids after checking their shape and range."""
    if array.shape != shape:
        raise ValueError(f"{caller}: token ids have shape {array.shape}, expected {shape}")
    ids = np.ascontiguousarray(array, np.int64)
    outside = ids[(ids < 0) | (ids >= tokens)]
    if outside.size:
        raise ValueError(f"{caller}: token id {outside[0]} is outside the embedding; expected 0 to {tokens - 1}")
    return ids


def sparse_vector(caller: str, pair: Any, size: int) -> tuple[Array, Array]:
    """Return the indices (int32, ascending) and values (float32) of the active entries of a vector of length ``size``.

    Raises:
        TypeError: If indices are not a vector of integers or values are not float32.
        ValueError: If the two differ in length, or an index is out of range or occurs twice.
    """
    index, value = (np.asarray(half.detach() if isinstance(half, Tensor) else half) for half in pair)
    if index.size == 0:
        index = index.astype(np.int64)
    if index.dtype.kind not in "iu" or index.ndim != 1:
        raise TypeError(f"{caller}: indices must be a vector of integers, got {index.dtype} {index.shape}")
    if value.dtype != np.float32 and not isinstance(pair[1], list):
        raise TypeError(f"{caller}: values must be float32, got {value.dtype}")
    value = value.astype(np.float32)
    if value.shape != index.shape:
        raise ValueError(
            f"{caller}: expected one value per index, got {index.size} indices and values of shape {value.shape}"
        )
    outside = index[(index < 0) | (index >= size)]
    if outside.size:
        raise ValueError(f"{caller}: index {outside[0]} is outside the input; expected 0 to {size - 1}")
    index = index.astype(np.int64)  # differences of unsigned integers wrap around
    if (np.diff(index) <= 0).any():
        order = np.argsort(index, kind="stable")
        index, value = index[order], value[order]
        duplicates = index[1:][np.diff(index) == 0]
        if duplicates.size:
            raise ValueError(f"{caller}: index {duplicates[0]} occurs more than once; expected unique indices")
    return np.ascontiguousarray(index, np.int32), np.ascontiguousarray(value)


def output_buffer(caller: str, out: Any, shape: torch.Size) -> Array:
    """Return ``out`` as an array that the engine can write to.

    Raises:
        TypeError: If ``out`` is neither an array nor a float32 CPU tensor.
        ValueError: If ``out`` requires grad, is read-only or not contiguous, or has another shape.
    """
    if isinstance(out, Tensor):
        if out.requires_grad:
            raise ValueError(f"{caller}: out must not require grad; the engine does not support autograd")
        if not out.is_cpu or out.dtype != torch.float32:
            raise TypeError(f"{caller}: out must be float32 on the CPU, got {out.dtype} on {out.device}")
        array: Any = out.numpy()
    else:
        array = out
    if not is_array(array):
        raise TypeError(f"{caller}: out must be a numpy array or a CPU tensor, got {type(out).__name__}")
    if array.dtype != np.float32 or array.shape != tuple(shape):
        raise ValueError(f"{caller}: out must be float32 of shape {tuple(shape)}, got {array.dtype} {array.shape}")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise ValueError(f"{caller}: out must be contiguous and writeable")
    return array
