"""The exported C code gives the same bits on every target: natively, in emulators, and as WebAssembly."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from egru import EGRU, EventEngine, Threshold
from egru.types import WeightFormat
from tests.runtime.c.networks import COMPILER, STEPS, CNetwork, compile_library, exports, random_input, random_parts
from tests.runtime.c.targets import PACKAGES, TARGETS, expected_lines, main_source

core = pytest.importorskip("egru._core", reason="the compiled core is not built")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[str]]:
    """The sources of a program that runs eight networks, and the lines that it must print.

    The integer form has no engine: its outputs must be those of the library compiled for this machine.
    """
    if COMPILER is None:
        pytest.skip("requires gcc")
    core.force_level("plain")
    torch.set_default_dtype(torch.float32)
    folder, native = tmp_path_factory.mktemp("program"), tmp_path_factory.mktemp("native")
    formats: dict[int, WeightFormat] = {0: "float32", 7: "int8"}
    engines = {f"net{seed}": EventEngine(**without_embedding(seed), weights=w) for seed, w in formats.items()}
    integer = {f"integer{seed}": EventEngine(**without_embedding(seed, plain=True)) for seed in (1, 4)}
    for key, layer in {"wide": wide_layer(), "wide_blocks": wide_layer(150, 3, 3)}.items():
        engines[key], integer[f"integer_{key}"] = EventEngine(layer, weights="int8"), EventEngine(layer)
    runs = {
        key: (engine, random_input(engine, 1, 8 if "wide" in key else STEPS))
        for key, engine in (engines | integer).items()
    }
    main = folder / "main.c"
    main.write_text(main_source({key: runs[key] for key in engines}, {key: runs[key] for key in integer}))
    library = compile_library(native, integer, weights="integer")
    lines: list[str] = []
    for key, (engine, x) in runs.items():
        network = CNetwork(library, key, engine.output_size, True) if key in integer else None
        lines += expected_lines(np.asarray(engine.run(x)) if network is None else network.run(x))
    core.force_level("auto")
    return [*exports(folder, engines), *exports(folder, integer, "integer"), main], lines


def without_embedding(seed: int, plain: bool = False) -> dict[str, Any]:
    return random_parts(seed, plain=plain) | {"embedding": None}


def wide_layer(hidden: int = 301, active: int = 2, silent: int = 301) -> EGRU:
    """Return a layer with more active units and more columns than any loop over rows of int8 weights takes at once.

    Args:
        hidden: Number of units. With 150, blocks of 128, 64 and 16 columns occur.
        active: One unit in this many always has an event. Values have both signs.
        silent: One unit in this many never has an event.
    """
    torch.manual_seed(0)
    layer = EGRU(3, hidden, reset="none", threshold=Threshold("identity", mean=-0.02, std=0.05)).eval()
    with torch.no_grad():
        layer.get_parameter("threshold_l0")[::active] = -2.0
        layer.get_parameter("threshold_l0")[1::silent] = 2.0
    return layer


@pytest.mark.parametrize("name", TARGETS)
def test_outputs_have_the_bits_of_the_engine(name: str, program: tuple[list[Path], list[str]]) -> None:
    target, (sources, lines) = TARGETS[name], program
    if target.missing:
        pytest.skip(f"requires {', '.join(target.missing)} (apt-get install {PACKAGES})")
    binary = sources[0].with_name(name)
    target.build(sources, binary)
    assert target.output(binary) == lines


@pytest.mark.parametrize("name", ["x86-64", "aarch64", "cortex-m4f"])
def test_infinite_states_are_reported(name: str, tmp_path: Path) -> None:
    """Every unit is checked: those in vectors and those after the last vector."""
    target, units = TARGETS[name], 23
    if target.missing:
        pytest.skip(f"requires {', '.join(target.missing)} (apt-get install {PACKAGES})")
    torch.set_default_dtype(torch.float32)
    sources = exports(tmp_path, {"net": EventEngine(EGRU(3, units))})
    main = tmp_path / "main.c"
    main.write_text(
        f"""
#include "net.h"
static net_state state;
void emit(uint32_t word);
void run(void);
void run(void)
{{
    const float x[3] = {{0.0f, 0.0f, 0.0f}};
    float out[{units}];
    volatile float huge = 1e38f;
    int j;
    for (j = 0; j < {units}; ++j) {{
        net_reset(&state);
        emit((uint32_t)net_step(&state, x, out));
        state.c_0[j] = huge * huge;
        emit(net_step(&state, x, out) == NET_ERROR_STATE);
    }}
}}
"""
    )
    target.build([*sources, main], tmp_path / name)
    assert target.output(tmp_path / name) == ["00000000", "00000001"] * units
