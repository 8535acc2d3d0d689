"""A pytest plugin that replaces the compiled core by one for another processor, which runs in an emulator.

    export EGRU_EMULATED_CORE="qemu-aarch64 -cpu max build/aarch64/serve"
    pytest -p tests.emulated_core tests/kernels/test_parity.py

Python and torch run on this machine. Calls of the sequence operation and of the streaming engine go to the program of
``csrc/serve.cpp`` through a pipe, with all arrays. The continuous-time engine is not available.
"""

import atexit
import ctypes
import os
import shlex
import subprocess
import sys
import types
from typing import Any

import numpy as np
import numpy.typing as npt


class Emulator:
    """A process that runs calls of the core."""

    def __init__(self, command: list[str], stderr: int | None = None) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)

    def close(self) -> str:
        """End the process and return what it has written to ``stderr``, if that is a pipe."""
        return (self._process.communicate()[1] or b"").decode()

    def call(
        self, name: str, *arguments: "str | int | float | Array", **fields: "str | int | float | Array"
    ) -> list[str]:
        """Run a call, copy the arrays that it returns, and return its results.

        Raises:
            ValueError: If the call failed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        named = [(f"{key}=", value) for key, value in fields.items()]
        words = [(f"{prefix}{word(value)}", value) for prefix, value in [*(("", value) for value in arguments), *named]]
        request = " ".join([name, *(text for text, _ in words)]).encode() + b"\n"
        arrays = [value for _, value in words if isinstance(value, Array) and value.address]
        inputs = [ctypes.string_at(array.address, array.size) for array in arrays if array.kind != ">"]
        self._process.stdin.write(b"".join([request, *inputs]))
        self._process.stdin.flush()
        status, *results = self._process.stdout.readline().decode().split()
        if status != "ok":
            raise ValueError(" ".join(results))
        for array in arrays:
            if array.kind != "<":
                ctypes.memmove(array.address, self._process.stdout.read(array.size), array.size)
        return results


class Array:
    """An array of a call: ``<`` is passed, ``>`` is returned, ``=`` is both. It is absent if the address is 0."""

    def __init__(self, kind: str, address: int, count: int, item: int = 4) -> None:
        self.kind, self.address, self.size = kind, address, count * item


def word(value: "str | int | float | Array") -> str:
    if isinstance(value, Array):
        return f"{value.kind}{value.size}" if value.address else "0"
    return str(int(value)) if isinstance(value, bool) else str(value)


emulator = Emulator(shlex.split(os.environ["EGRU_EMULATED_CORE"]))
atexit.register(emulator.close)

# ---- the sequence operation ------------------------------------------------------------------------------------------

NUMBERS = (
    "T B I H chunk threads one_thread zero_blocks width height rho input_t input_b c0_b y0_b keep_t keep_b keep_h "
)
NUMBERS += "grad_y_t grad_y_b grad_c_t grad_c_b "
FLAGS = "float64 direct direct_input direct_gates lstm compare_output after bounded "
ADDRESSES = (
    "input c0 y0 weight_ih weight_hh bias_ih bias_hh theta rho_units keep lengths y c c_last y_last gates cells "
)
ADDRESSES += "grad_y grad_c grad_c_last grad_y_last grad_c0 grad_y0 grad_input grad_weight_ih grad_weight_hh "
ADDRESSES += "grad_bias_ih grad_bias_hh grad_theta"


class TrainCall:
    """The arguments of one call, see ``csrc/sequence/train.hpp``."""

    def __init__(self) -> None:
        for name in (NUMBERS + FLAGS + ADDRESSES).split():
            setattr(self, name, 0)
        self.events, self.reset, self.rho = "positive", "output", 1.0

    def set_arguments(self, *arguments: Any) -> bool:
        return False  # the caller then sets addresses of contiguous tensors

    def set_problem(self, *arguments: Any) -> bool:
        return False  # the general route then runs the call

    def set_work(
        self, rows: int, work: float, direct_rows: int, direct_forward: int, one_thread: int, threads: int
    ) -> None:
        """Do what the core does (csrc/sequence/bind.cpp)."""
        v: Any = self
        most = int(work / ((4 if v.lstm else 3) * v.H * (v.H + v.I)))
        v.chunk = min(v.T, max(1, min(rows, most) // v.B))
        all_rows = v.T * v.B
        v.direct = direct_rows >= all_rows
        v.direct_gates = v.direct_input = direct_forward >= all_rows
        v.one_thread, v.threads = one_thread, threads

    def counts(self) -> dict[str, int]:
        """The number of elements of each array."""
        v: Any = types.SimpleNamespace(**vars(self))
        state, rows = v.B * v.H, (4 if v.lstm else 3) * v.H
        saved = v.T * -(-v.H // 32) * v.B * 32

        def strided(name: str, width: int) -> int:
            return (v.T - 1) * getattr(v, f"{name}_t") + (v.B - 1) * getattr(v, f"{name}_b") + width

        counts = {"input": strided("input", v.I), "c0": (v.B - 1) * v.c0_b + v.H, "y0": (v.B - 1) * v.y0_b + v.H}
        counts |= {"keep": strided("keep", (v.H - 1) * v.keep_h + 1), "theta": v.H, "rho_units": v.H, "lengths": v.B}
        for prefix in ("", "grad_"):
            counts |= {f"{prefix}weight_ih": rows * v.I, f"{prefix}weight_hh": rows * v.H}
            counts |= {f"{prefix}bias_ih": rows, f"{prefix}bias_hh": rows}
            counts |= {f"{prefix}c_last": state, f"{prefix}y_last": state}
        counts |= {"y": v.T * state, "c": v.T * state, "cells": saved}
        counts["gates"] = saved * (3 if not v.lstm and not v.after else 4)
        counts |= {"grad_y": strided("grad_y", v.H), "grad_c": strided("grad_c", v.H)}
        return counts | {"grad_c0": state, "grad_y0": state, "grad_input": v.T * v.B * v.I, "grad_theta": v.H}

    def run(self, name: str, kinds: dict[str, str]) -> list[str]:
        """Run the call. ``kinds`` are the arrays that are not only read."""
        size = 8 if getattr(self, "float64") else 4  # noqa: B009
        fields = {key: getattr(self, key) for key in [*(NUMBERS + FLAGS).split(), "events", "reset"]}
        for key, count in self.counts().items():
            item = 8 if key == "lengths" else size
            fields[key] = Array(kinds.get(key, "<"), getattr(self, key), count, item)
        return emulator.call(name, **fields)


def train_forward(call: TrainCall) -> int:
    kinds = {"y": ">", "c": ">", "gates": ">", "cells": ">", "c_last": "=", "y_last": "="}
    return int(call.run("train_forward", kinds)[0])


def train_backward(call: TrainCall) -> None:
    results = ("c0", "y0", "input", "weight_ih", "weight_hh", "bias_ih", "bias_hh", "theta")
    call.run("train_backward", {f"grad_{name}": ">" for name in results})


# ---- the streaming engine --------------------------------------------------------------------------------------------


class EngineCore:
    def __init__(self, layers: list[tuple[Any, ...]], *options: Any) -> None:
        arguments: list[Any] = [*options, len(layers)]
        for inputs, hidden, *addresses, events, reset, after, keep, lstm, compare in layers:
            rows = (4 if lstm else 3) * hidden
            counts = [rows * inputs, rows * hidden, rows, rows, hidden, hidden]
            arrays = [Array("<", address, count) for address, count in zip(addresses, counts, strict=True)]
            arguments += [inputs, hidden, *arrays, events, reset, after, keep, lstm, compare]
        self._id = int(emulator.call("engine", *arguments)[0])
        self._hidden = [layer[1] for layer in layers]
        self._inputs, self._outputs, self._streams = layers[0][0], self._hidden[-1], options[2]

    def __del__(self) -> None:
        if hasattr(self, "_id"):
            emulator.call("delete", self._id)

    def _call(self, name: str, *arguments: Any) -> list[int]:
        return [int(result) for result in emulator.call(name, self._id, *arguments)]

    def _finish(self, finite: int) -> None:
        if not finite:
            raise ValueError("EventEngine: the state became NaN or infinite")

    def set_embedding(self, table: int, tokens: int, width: int) -> None:
        self._call("set_embedding", Array("<", table, tokens * width), tokens, width)

    def set_readout(self, weight: int, bias: int, inputs: int, outputs: int) -> None:
        self._call("set_readout", Array("<", weight, inputs * outputs), Array("<", bias, outputs), inputs, outputs)
        self._outputs = outputs

    def step_tensor(self, *arguments: Any) -> bool:
        return False  # the caller then checks the input in Python and uses the functions below

    step_array = step_token = step_tensor

    def run(self, x: int, ids: int, steps: int, last: bool, out: int, mask: int = 0) -> None:
        rows = steps * self._streams
        values, tokens = Array("<", x, rows * self._inputs), Array("<", ids, rows, 8)
        result = Array("=", out, (self._streams if last else rows) * self._outputs)
        self._finish(*self._call("run", values, tokens, steps, last, result, Array("<", mask, self._streams, 1)))

    def step_masked(self, x: int, ids: int, mask: int, out: int) -> None:
        self.run(x, ids, 1, False, out, mask)

    def step_sparse(self, index: int, value: int, count: int, out: int) -> None:
        arrays = Array("<", index, count), Array("<", value, count)
        self._finish(*self._call("step_sparse", *arrays, count, Array(">", out, self._outputs)))

    def skip(self, stream: int, steps: int, out: int, row_steps: int, rows: int, capacity: int) -> tuple[int, int]:
        arrays = Array("=", out, self._streams * self._outputs), Array("=", row_steps, capacity, 8)
        result = self._call("skip", stream, steps, *arrays, Array("=", rows, capacity * self._outputs), capacity)
        self._finish(result[0])
        return result[1], result[2]

    def set_gap(self, type: type, no_events: Any, row_steps: int, rows: int, capacity: int) -> None:
        self._rows = row_steps, rows, capacity

    def step_at(self, *arguments: Any) -> int:
        return -1  # the caller then converts the arguments

    def step_at_address(self, t: int, index: Any, value: Any, out: int) -> int:
        start, count = self.time, 0
        if t > start:
            _, count = self.skip(0, t - start, out, *self._rows)
            steps = (ctypes.c_int64 * count).from_address(self._rows[0])
            steps[:] = [step + start for step in steps]
            if self.time != t:
                return -2 - count
        self.step_sparse(index.ctypes.data, value.ctypes.data, len(index), out)
        return count

    @property
    def time(self) -> int:
        return self._call("time")[0]

    @time.setter
    def time(self, value: int) -> None:
        self._call("set_time", value)

    def reset(self, mask: int) -> None:
        self._call("reset", Array("<", mask, self._streams, 1))

    def sparse_matrices(self) -> list[bool]:
        return [bool(value) for value in self._call("sparse_matrices")]

    def reset_counters(self) -> None:
        self._call("reset_counters")

    def counters(self) -> tuple[int, int, list[int]]:
        steps, macs, *events = self._call("counters")
        return steps, macs, events

    def _state(self, name: str, kind: str, layer: int, c: int, y: int) -> None:
        count = self._streams * self._hidden[layer]
        self._call(name, layer, Array(kind, c, count), Array(kind, y, count))

    def get_state(self, layer: int, c: int, y: int) -> None:
        self._state("get_state", ">", layer, c, y)

    def set_state(self, layer: int, c: int, y: int) -> None:
        self._state("set_state", "<", layer, c, y)

    def _trace(self, name: str, kind: str, trace: int, steps: int) -> None:
        self._call(name, Array(kind, trace, self._streams * self._outputs, 8), Array(kind, steps, self._streams, 8))

    def get_trace(self, trace: int, steps: int) -> None:
        self._trace("get_trace", ">", trace, steps)

    def set_trace(self, trace: int, steps: int) -> None:
        self._trace("set_trace", "<", trace, steps)

    def always_divide(self, value: bool) -> None:
        self._call("always_divide", value)

    @property
    def team_size(self) -> int:
        return self._call("team_size")[0]

    @property
    def level(self) -> str:
        return emulator.call("engine_level", self._id)[0]

    @property
    def weight_bytes(self) -> int:
        return self._call("weight_bytes")[0]


# ---- the module ------------------------------------------------------------------------------------------------------


def allocate(count: int) -> npt.NDArray[np.uint8]:
    return np.empty(count, np.uint8)


core = types.ModuleType("egru._core", __doc__)
vars(core).update(
    levels=lambda: emulator.call("levels"),
    level=lambda: emulator.call("level")[0],
    force_level=lambda name: emulator.call("force_level", name or "auto"),
    compiler=lambda: "emulated",
    allocate=allocate,
    shares_threads=lambda: True,
    cached_memory=lambda: 0,
    release_memory=lambda: None,
    TrainCall=TrainCall,
    train_forward=train_forward,
    train_backward=train_backward,
    EngineCore=EngineCore,
)
sys.modules["egru._core"] = core
