"""The exported C code gives the same bits on every target: natively, in emulators, and as WebAssembly."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from egru import EventEngine
from egru.types import WeightFormat
from tests.runtime.c.networks import exports, random_input, random_parts
from tests.runtime.c.targets import PACKAGES, TARGETS, expected_lines, main_source

core = pytest.importorskip("egru._core", reason="the compiled core is not built")


@pytest.fixture(autouse=True)
def plain_float32() -> Iterator[None]:
    core.force_level("plain")
    torch.set_default_dtype(torch.float32)
    yield
    core.force_level("auto")


@pytest.mark.parametrize("name", TARGETS)
def test_outputs_have_the_bits_of_the_engine(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    if target.missing:
        pytest.skip(f"requires {', '.join(target.missing)} (apt-get install {PACKAGES})")
    engines: dict[str, EventEngine] = {}
    chosen: dict[int, WeightFormat] = {0: "float32", 3: "int8", 5: "int8", 6: "float32"}
    for seed, weights in chosen.items():
        parts = random_parts(seed)
        parts["embedding"] = None
        engines[f"net{seed}"] = EventEngine(**parts, weights=weights)
    runs = {key: (engine, random_input(engine, 1)) for key, engine in engines.items()}
    main = tmp_path / "main.c"
    main.write_text(main_source(runs))
    program = tmp_path / "program"
    target.build([*exports(tmp_path, engines), main], program)
    assert target.output(program) == [line for engine, x in runs.values() for line in expected_lines(engine, x)]
