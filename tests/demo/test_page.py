"""The page that reads drawn digits: current, self-contained, and with the scores of the engine."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import egru
from egru import cli
from egru.demo import PAGE, build
from tests.demo.strokes import strokes_of

HELPER = Path(__file__).with_name("digits.js")
SOURCE = PAGE.read_text(encoding="utf-8")
Images = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def sample() -> tuple[Images, list[int]]:
    """Fifty test digits of MNIST."""
    with np.load(Path(__file__).parents[1] / "mnist-sample.npz") as stored:
        return stored["images"][::10].astype(np.float32) / 255, stored["labels"][::10].tolist()


@pytest.fixture
def plain_engine() -> Iterator[Callable[[], egru.EventEngine]]:
    """An engine whose bits are those of the C code."""
    core = pytest.importorskip("egru._core", reason="the compiled core is not built")
    core.force_level("plain")
    torch.set_default_dtype(torch.float32)
    yield lambda: egru.EventEngine(**egru.pretrained("smnist").streaming(), weights="int8")
    core.force_level("auto")


def run_page(folder: Path, page: str, images: Any = (), drawings: Any = ()) -> dict[str, Any]:
    """Run the script of a page in Node.js, up to the part that needs a browser."""
    if shutil.which("node") is None:
        pytest.skip("requires Node.js")
    match = re.search(r"<script>\n\(\(\) => \{\n(.*)// The page: drawing", page, re.DOTALL)
    assert match is not None
    (folder / "page.js").write_text(match[1])
    data = {"images": [image.ravel().tolist() for image in images], "drawings": drawings}
    (folder / "data.json").write_text(json.dumps(data))
    command = ["node", str(HELPER), str(folder / "page.js"), str(folder / "data.json")]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_shipped_page_is_built_from_the_current_files() -> None:
    (stored,) = re.findall(r'name="egru-sources" content="([0-9a-f]{64})"', SOURCE)
    assert stored == build.checksum(), "run `python -m egru.demo.build` (requires clang and lld)"


def test_page_is_one_small_file_without_requests() -> None:
    assert len(SOURCE.encode()) < 3_000_000
    code = re.sub(r'const WASM = "[^"]*"', "", SOURCE)
    assert not re.search(r"https?:|//[a-z]|src=|href=|url\(|import\(|fetch\(|XMLHttpRequest|WebSocket", code)
    assert "default-src 'none'" in code


def test_scores_and_counters_are_those_of_the_engine(sample, plain_engine, tmp_path: Path) -> None:
    images, labels = sample
    engine = plain_engine()
    results = run_page(tmp_path, SOURCE, images[:8])["images"]
    for image, result in zip(images[:8], results, strict=True):
        engine.reset()
        engine.reset_activity()
        expected = engine.run(image.reshape(784, 1), last=True)
        np.testing.assert_array_equal(np.asarray(result["scores"], np.float32), np.asarray(expected))
        assert (result["macs"], result["events"]) == (engine.activity.macs, engine.activity.events[0])
        assert result["macs"] < 0.1 * 784 * build.describe_network()["dense"]
    assert [result["digit"] for result in results] == labels[:8]


def test_a_new_build_computes_the_bits_of_the_shipped_page(sample, tmp_path: Path) -> None:
    if shutil.which("clang") is None or shutil.which("wasm-ld") is None:
        pytest.skip("requires clang and lld: apt-get install clang lld")
    torch.set_default_dtype(torch.float32)
    page = build.build(build.compile_network(tmp_path))
    images = sample[0][8:11]
    assert run_page(tmp_path, page, images)["images"] == run_page(tmp_path, SOURCE, images)["images"]


def test_drawings_are_prepared_as_mnist_and_read_correctly(sample, tmp_path: Path) -> None:
    """Lines of test digits, drawn anywhere in the area with a thin or thick pen, at a third of the size or larger."""
    images, labels = sample
    drawings: list[Any] = []
    for i, image in enumerate(images):
        scale, x0, y0 = ((10.0, 0.0, 0.0), (4.0, 20.0, 150.0))[i % 2]
        drawings.append([[(x0 + scale * x, y0 + scale * y) for x, y in stroke] for stroke in strokes_of(image)])
    result = run_page(tmp_path, SOURCE, drawings=drawings)
    assert result["examples"] == list(range(10))
    prepared = np.asarray(result["prepared"]).reshape(-1, 28, 28)
    assert prepared.min() == 0
    assert prepared.max() == 1
    mass = prepared.sum((1, 2))
    for axis in (1, 2):
        centre = (prepared.sum(3 - axis) * (np.arange(28) + 0.5)).sum(1) / mass
        assert np.abs(centre - 14).max() <= 0.51  # moved by whole pixels
    extents = [max(np.ptp(np.nonzero(image)[0]), np.ptp(np.nonzero(image)[1])) + 1 for image in prepared]
    assert set(extents) <= {20, 21}  # a box of 20 pixels
    assert abs(float(mass.mean()) / float(images.sum((1, 2)).mean()) - 1) < 0.15  # lines of the same width
    correct = [digit == label for digit, label in zip(result["drawn"], labels, strict=True)]
    assert sum(correct) >= 47, result["drawn"]


def test_command_writes_a_copy_or_opens_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or len(opened) == 1)
    assert cli.main(["demo", "--out", str(tmp_path / "copy.html")]) == 0
    assert (tmp_path / "copy.html").read_bytes() == PAGE.read_bytes()
    assert (cli.main(["demo"]), cli.main(["demo"])) == (0, 0)
    assert opened == [PAGE.as_uri()] * 2
    assert capsys.readouterr().out.endswith(f"no browser found; open this file: {PAGE}\n")
