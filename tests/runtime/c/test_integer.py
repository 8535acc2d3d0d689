"""The integer form follows the float32 engine, saturates instead of overflowing, and names what it cannot represent."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from egru import EGRU, EventEngine, Threshold
from egru.runtime import export_c
from tests.runtime.c.networks import COMPILER, CNetwork, address, compile_library, random_input, random_parts

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="requires gcc")


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)


@needs_compiler
def test_outputs_follow_the_engine(tmp_path: Path) -> None:
    """Rounding moves single events, so that outputs are compared by the median error."""
    engines = {f"net{seed}": EventEngine(**random_parts(seed, plain=True)) for seed in range(8)}
    library = compile_library(tmp_path, engines, weights="integer")
    for name, engine in engines.items():
        x = random_input(engine, 0)
        expected = torch.as_tensor(engine.run(x)).numpy()
        network = CNetwork(library, name, engine.output_size, True)
        error = np.abs(network.run(x) / 2**16 - expected)
        assert np.median(error) < 0.01 * np.abs(expected).max(), name


@needs_compiler
def test_rows_without_weights_follow_the_engine(tmp_path: Path) -> None:
    """Pruning empties rows. Their scale must not limit the others."""
    engines: dict[str, EventEngine] = {}
    for seed in range(4):
        torch.manual_seed(seed)
        layer, readout = EGRU(40, 64, threshold=Threshold.constant(0.05)), nn.Linear(64, 5)
        with torch.no_grad():
            layer.get_parameter("weight_ih_l0")[::3] = 0
            layer.get_parameter("weight_hh_l0")[1::7] = 0
            readout.weight[slice(2, 3) if seed else slice(None)] = 0
        engines[f"net{seed}"] = EventEngine(layer, readout=readout)
    library = compile_library(tmp_path, engines, weights="integer")
    for name, engine in engines.items():
        x = random_input(engine, 0)
        expected = torch.as_tensor(engine.run(x)).numpy()
        error = np.abs(CNetwork(library, name, engine.output_size, True).run(x) / 2**16 - expected)
        assert np.median(error) < 0.01 * np.abs(expected).max(), name


@needs_compiler
def test_save_restore_and_extreme_inputs(tmp_path: Path) -> None:
    """Run the largest inputs under the undefined-behaviour sanitizer, which ends the process at an overflow."""
    parts = [
        random_parts(seed, plain=True) | {"embedding": None, "trace": trace}
        for seed, trace in ((0, 0.99), (5, 1.0), (6, "mean"))
    ]
    engines = {f"net{i}": EventEngine(**arguments) for i, arguments in enumerate(parts)}
    library = compile_library(
        tmp_path, engines, "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error", weights="integer"
    )
    for name, engine in engines.items():
        first, second = (CNetwork(library, name, engine.output_size, True) for _ in range(2))
        x = torch.where(torch.rand(60, engine.input_size) < 0.5, -8.0, 32767 / 4096)
        expected = first.run(x)
        first.call("reset", first.state)
        np.testing.assert_array_equal(first.run(x[:25]), expected[:25])
        saved = np.zeros(10_000, np.uint8)
        first.call("save", first.state, address(saved))
        assert second.call("restore", second.state, address(saved)) == 0
        np.testing.assert_array_equal(second.run(x[25:]), expected[25:])
        saved[5] ^= 1
        assert second.call("restore", second.state, address(saved)) == -3


def test_numbers_out_of_range_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="reset_scale up to 8; layer 0 has 9"):
        export_c(EGRU(2, 4, reset_scale=9.0), out, "integer")
    layer = EGRU(2, 4)
    with torch.no_grad():
        layer.get_parameter("weight_hh_l0")[3, 2] = 1e7
    with pytest.raises(ValueError, match=r"v_0 has weights up to 1e\+07, too large for integer weights"):
        export_c(layer, out, "integer")
    assert not out.exists()


def test_thresholds_beyond_the_range_never_fire(tmp_path: Path) -> None:
    layer = EGRU(1, 3, reset="none", threshold=Threshold("identity", mean=5.0))
    text = export_c(layer, tmp_path, "integer")[1].read_text()
    assert "theta_0[3] = {\n32767,32767,32767,\n}" in text


def constant_layer(hidden: int) -> EGRU:
    """Return a layer whose units all approach a state of 0.96, have events at every step and have equal weights."""
    layer = EGRU(1, hidden, reset="none", threshold=Threshold("identity", mean=-2.0, std=0.0)).eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith(("weight", "bias")):
                parameter.zero_()
        layer.get_parameter("weight_hh_l0").fill_(0.01)
        layer.get_parameter("bias_ih_l0")[2 * hidden :] = 2.0
    return layer


@needs_compiler
def test_sums_of_the_largest_products_do_not_overflow(tmp_path: Path) -> None:
    """200 rows with the largest values and weights of one sign: 32-bit sums of 128 of them are almost exhausted."""
    readout = torch.nn.Linear(200, 10)
    with torch.no_grad():
        readout.weight.fill_(0.05)
    engine = EventEngine(constant_layer(200), readout=readout)
    library = compile_library(tmp_path, {"net": engine}, weights="integer")
    x = torch.zeros(30, 1)
    expected = torch.as_tensor(engine.run(x)).numpy()
    assert expected[-1].min() > 9
    np.testing.assert_allclose(
        CNetwork(library, "net", 10, True).run(x) / 2**16, expected, rtol=0, atol=0.02 * expected.max()
    )


@needs_compiler
@pytest.mark.parametrize("sign", [-1, 1])
def test_outputs_saturate(tmp_path: Path, sign: int) -> None:
    readout = torch.nn.Linear(8, 2, bias=False)
    with torch.no_grad():
        readout.weight.fill_(sign * 200.0)
    engine = EventEngine(constant_layer(8), readout=readout, trace=1.0)
    library = compile_library(tmp_path, {"net": engine}, weights="integer")
    outputs = CNetwork(library, "net", 2, True).run(torch.zeros(60, 1))
    assert (np.diff(sign * outputs[:, 0].astype(np.int64)) >= 0).all()
    assert outputs[-1].tolist() == [2**31 - 1 if sign > 0 else -(2**31)] * 2
