"""Random networks, their inputs, and exported networks compiled and called through ctypes."""

import ctypes
import dataclasses
import random
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from egru import EGRU, ELSTM, EventEngine, Threshold
from egru.runtime import export_c
from egru.types import COMPARES, EVENTS, RESET_GATES, RESETS, CWeightFormat

WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Werror", "-std=c99", "-pedantic", "-ffreestanding")
COMPILER = shutil.which("gcc")
STEPS = 70
"""More than the steps after which int8 sums of delta events are computed again."""


def random_parts(seed: int, *, plain: bool = False) -> dict[str, Any]:
    """Return the arguments of an engine for a small random network.

    Seeds cover all cells, kinds of events, resets, gates and readouts, and stacks of two different layers. If
    ``plain``, layers are GRUs with positive events, which the integer form supports.
    """
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    inputs, hidden, count = choose.choice([1, 3, 16, 17, 24]), choose.randint(1, 41), choose.choice([1, 1, 2])
    layers = nn.Sequential(
        *(random_layer(seed + 7 * i, hidden if i else inputs, hidden, choose, plain) for i in range(count))
    ).eval()
    readout = nn.Linear(hidden, choose.randint(1, 7), bias=choose.random() < 0.7) if choose.random() < 0.7 else None
    embedding = nn.Embedding(11, inputs) if choose.random() < 0.25 else None
    with torch.no_grad():
        for module in (layers, readout, embedding):
            for name, parameter in [] if module is None else module.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if "threshold" in name:
                    parameter.add_(0.05 * noise)
                else:
                    parameter.copy_(noise * 3 / max(parameter.shape[-1], 4) ** 0.5)
    trace = choose.choice([None, 0.9, 1.0, "mean"])
    return {"module": layers, "readout": readout, "embedding": embedding, "trace": trace}


def random_layer(seed: int, inputs: int, hidden: int, choose: random.Random, plain: bool) -> nn.Module:
    events = "positive" if plain else EVENTS[seed % 3]
    delta, lstm = events == "delta", seed % 5 == 4 and not plain
    options: dict[str, Any] = {
        "bias": choose.random() < 0.8,
        "events": events,
        "reset": "none" if delta else RESETS[seed % 4],
        "reset_scale": choose.choice([1.0, 0.5]),
        "zoneout": choose.choice([0.0, 0.0, 0.1]),
        "threshold": Threshold(
            "identity" if events == "positive" else "abs", mean=choose.choice([0.0, 0.08, 0.2]), std=0.05
        ),
    }
    if lstm:
        return ELSTM(inputs, hidden, compare="output" if delta else COMPARES[seed % 2], **options)
    return EGRU(inputs, hidden, reset_gate="after" if delta else RESET_GATES[seed // 4 % 2], **options)


def random_input(engine: EventEngine, seed: int, steps: int = STEPS) -> Tensor:
    """Return token ids, or a sequence in which half of the inputs are zero and some steps are empty."""
    generator = torch.Generator().manual_seed(seed)
    if engine._network.embedding is not None:
        return torch.randint(engine._network.tokens, (steps,), generator=generator)
    x = torch.randn(steps, engine.input_size, generator=generator)
    x *= torch.rand(x.shape, generator=generator) < 0.5
    x[torch.rand(steps, generator=generator) < 0.2] = 0
    return x


def exports(folder: Path, engines: dict[str, EventEngine], weights: CWeightFormat | None = None) -> list[Path]:
    """Export engines to one folder and return their sources."""
    return [export_c(engine, folder, weights, name=name)[1] for name, engine in engines.items()]


def compile_objects(compiler: list[str], sources: list[Path], suffix: str = ".o") -> list[Path]:
    """Compile every source with two processes."""
    objects = [source.with_suffix(suffix) for source in sources]

    def run(pair: tuple[Path, Path]) -> None:
        subprocess.run([*compiler, "-c", str(pair[0]), "-o", str(pair[1])], check=True, timeout=600)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, zip(sources, objects, strict=True)))
    return objects


_HELPERS = """
#include "{name}.h"

int {name}_size(void);
int {name}_run(void *state, const {value} *x, int steps, {out} *out);

int {name}_size(void) {{ return (int)sizeof({name}_state); }}

int {name}_run(void *state, const {value} *x, int steps, {out} *out)
{{
    int status = 0;
    for (; steps > 0 && status == 0; --steps, x += {upper}_INPUTS)
        status = {name}_step(state, x, out);
    return status;
}}
"""
"""Functions for the tests: the size of a state, and a sequence of steps that writes the output of the last one."""


def compile_library(
    folder: Path, engines: dict[str, EventEngine], *flags: str, weights: CWeightFormat | None = None
) -> ctypes.CDLL:
    """Export engines, compile them to a shared library and load it."""
    sources = exports(folder, engines, weights)
    helpers = folder / "helpers.c"
    value, out = ("int16_t", "int32_t") if weights == "integer" else ("float", "float")
    texts = [_HELPERS.format(name=name, upper=name.upper(), value=value, out=out) for name in engines]
    helpers.write_text("".join(texts))
    objects = compile_objects(["gcc", "-O1", "-fPIC", *WARNINGS, *flags], [*sources, helpers])
    library = folder / "networks.so"
    subprocess.run(["gcc", "-shared", "-o", str(library), *map(str, objects)], check=True, timeout=60)
    return ctypes.CDLL(str(library))


@dataclasses.dataclass
class CNetwork:
    """An exported network with one state. The integer form takes and returns fixed-point numbers."""

    library: ctypes.CDLL
    name: str
    outputs: int
    integer: bool = False

    def __post_init__(self) -> None:
        self.state = ctypes.create_string_buffer(self.call("size"))

    def call(self, function: str, *arguments: Any) -> int:
        return getattr(self.library, f"{self.name}_{function}")(*arguments)

    def step(self, x: Tensor) -> npt.NDArray[Any]:
        """Compute one step from a vector or a token id."""
        out = np.full(self.outputs, -1, np.int32 if self.integer else np.float32)
        if x.dtype == torch.int64:
            status = self.call("step_token", self.state, int(x), address(out))
        else:
            row = fixed_point(x) if self.integer else x.contiguous().numpy()
            status = self.call("step", self.state, address(row), address(out))
        assert status == 0, status
        return out

    def run(self, x: Tensor) -> npt.NDArray[Any]:
        return np.stack([self.step(row) for row in x])

    def step_events(self, index: list[int], value: list[float]) -> tuple[int, npt.NDArray[np.float32]]:
        out = np.full(self.outputs, np.nan, np.float32)
        i, v = np.array(index, np.uint16), np.array(value, np.float32)
        return self.call("step_events", self.state, address(i), address(v), len(index), address(out)), out

    def skip(self, steps: int) -> tuple[npt.NDArray[np.float32], list[int]]:
        """Compute steps without input. Returns the last output and the step at which each call ended."""
        out, ends = np.full(self.outputs, np.nan, np.float32), [0]
        function = getattr(self.library, f"{self.name}_skip")
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        while ends[-1] < steps:
            done = function(self.state, steps - ends[-1], address(out))
            assert done > 0, done
            ends.append(ends[-1] + done)
        return out, ends[1:]

    def events(self, layer: int = 0) -> tuple[list[int], list[float]]:
        index, value = ctypes.POINTER(ctypes.c_uint16)(), ctypes.POINTER(ctypes.c_float)()
        count = self.call("events", self.state, layer, ctypes.byref(index), ctypes.byref(value))
        return index[:count], value[:count]


def fixed_point(x: Tensor) -> npt.NDArray[np.int16]:
    """Return inputs of the integer form, which have twelve fractional bits."""
    return np.rint(x.numpy() * 4096.0).astype(np.int16)


def address(values: npt.NDArray[Any]) -> ctypes.c_void_p:
    return values.ctypes.data_as(ctypes.c_void_p)
