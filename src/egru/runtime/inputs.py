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
Mask: TypeAlias = Tensor | Array | Sequence[bool]
"""One bool per stream."""
TokenIds: TypeAlias = int | np.integer | Sequence[int]
"""The token of one step, one per stream."""
TokenSequence: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
"""The tokens of several steps."""
StepInput: TypeAlias = Tensor | Array | SparseVector | Sequence[SparseVector] | TokenIds
"""What :meth:`egru.EventEngine.step` accepts."""


def is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def is_sparse(x: Any) -> bool:
    """Return whether ``x`` is an ``(indices, values)`` pair."""
    vectors = (np.ndarray, Tensor, list)
    return isinstance(x, tuple) and len(x) == 2 and all(isinstance(half, vectors) for half in x)


def to_array(x: Any) -> Array:
    """Convert a tensor on any device, an array or a list to an array. Views that negate or conjugate are resolved."""
    return np.asarray(x.detach().resolve_conj().resolve_neg().cpu() if isinstance(x, Tensor) else x)


def stream_mask(caller: str, mask: Any, streams: int) -> Array:
    """Return ``mask`` as a contiguous array of bool, one per stream.

    Raises:
        TypeError: If ``mask`` does not consist of bool.
        ValueError: If it does not have the shape ``(streams,)``.
    """
    array = to_array(mask)
    if array.dtype != np.bool_:
        raise TypeError(
            f"{caller}: mask must be a tensor, an array or a list of bool, got {type(mask).__name__} of {array.dtype}"
        )
    if array.shape != (streams,):
        raise ValueError(f"{caller}: mask has shape {array.shape}, expected ({streams},), one bool per stream")
    return np.ascontiguousarray(array)


def describe(x: Any) -> str:
    """Return the type of ``x`` with its shape or value, for error messages."""
    shape = getattr(x, "shape", None)
    return f"{type(x).__name__} {x!r:.60}" if shape is None else f"{type(x).__name__} of shape {tuple(shape)}"


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


def values_or_tokens(
    caller: str, x: Any, shape: torch.Size, streams: int, tokens: int, mask: Array | None = None
) -> tuple[Array | None, Array | None]:
    """Check an input of one or several steps.

    Args:
        caller: Name of the method, for errors.
        x: Values or token ids.
        shape: Expected shape of values, ``([T,] [N,] I)``. Token ids have no last dimension.
        streams: Number of streams.
        tokens: Number of tokens, or 0 if there is no embedding.
        mask: Streams that are used, ``(N,)``. Values and ids of the others are replaced by zero. If None, all.

    Returns:
        Contiguous values ``(T, N, I)`` of float32, or token ids ``(T, N)`` of int64. The other is None.

    Raises:
        TypeError: If the type or dtype of ``x`` is not supported.
        ValueError: If a shape does not fit or a token id is out of range.
    """
    if is_array(x) or (isinstance(x, Tensor) and x.dtype != torch.bfloat16):  # numpy has no bfloat16
        array = to_array(x)
    else:
        accepted = "a float32 array or CPU tensor, (indices, values)" + (", or token ids" if tokens else "")
        array = integers(caller, x, accepted)
    if array.dtype == np.float32:
        if array.shape != tuple(shape):
            raise ValueError(f"{caller}: x has shape {array.shape}, expected {tuple(shape)}")
        array = np.ascontiguousarray(array).reshape(-1, streams, shape[-1])
        return (array if mask is None else np.where(mask[:, None], array, np.float32(0))), None
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"{caller}: x must be float32, got {array.dtype}; convert it with .float() or .astype('float32')"
        )
    if not tokens:
        raise TypeError(f"{caller}: x must be float32 because there is no embedding, got {array.dtype}")
    if array.shape != tuple(shape[:-1]):
        raise ValueError(f"{caller}: token ids have shape {array.shape}, expected {tuple(shape[:-1])}")
    ids = array.reshape(-1, streams)
    ids = ids if mask is None else np.where(mask, ids, 0)
    outside = ids[(ids < 0) | (ids >= tokens)]
    if outside.size:
        raise ValueError(f"{caller}: token id {outside[0]} is outside the embedding; expected 0 to {tokens - 1}")
    return None, np.ascontiguousarray(ids, np.int64)


def to_dense(caller: str, pairs: Sequence[SparseVector], shape: torch.Size, mask: Array | None) -> Array:
    """Convert one sparse vector per stream to an array of shape ``([N,] I)``; zero outside of ``mask``."""
    streams = shape[0] if len(shape) > 1 else 1
    if len(pairs) != streams:
        raise ValueError(
            f"{caller}: x must have one (indices, values) pair per stream, got {len(pairs)} pairs for {streams} streams"
        )
    x = np.zeros((streams, shape[-1]), np.float32)
    for stream, pair in enumerate(pairs):
        if mask is None or mask[stream]:
            index, value = sparse_vector(caller, pair, shape[-1])
            x[stream, index] = value
    return x.reshape(shape)


def sparse_vector(caller: str, pair: Any, size: int) -> tuple[Array, Array]:
    """Return the indices (int32, ascending) and values (float32) of the active entries of a vector of length ``size``.

    Raises:
        TypeError: If indices are not a vector of integers or values are not float32.
        ValueError: If the two differ in length, or an index is out of range or occurs twice.
    """
    index, value = (to_array(half) for half in pair)
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
        if out.is_neg():
            raise ValueError(f"{caller}: out must not be a view that negates its memory; pass out.resolve_neg()")
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
