"""The trained model that ships with the package, an image at a time on one thread: what a pixel costs.

    python benchmarks/pretrained.py [--images 40] [--out FILE]

egru.EventEngine with float32 and int8 weights and the same model's layers, against torch's GRU of the same size and a
readout (dense: its time does not depend on its weights), which gets the whole image in one call or a pixel a call, as
the engine does in use. The first images of the MNIST test file (EGRU_DATA), every contestant in turn on each; medians
over the images. Before that the engine must name the digits that the model names.
"""

import argparse
import datetime
import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import egru

RESULTS = pathlib.Path(__file__).parent / "results" / "pretrained.json"


def contestants() -> dict[str, Callable[[Tensor], Tensor]]:
    """From an image ``(784, 1)`` to scores."""
    model = egru.pretrained("smnist")
    gru, readout = nn.GRU(1, model.readout.in_features), nn.Linear(model.readout.in_features, 10)
    engines = {kind: egru.EventEngine(**model.streaming(), weights=kind) for kind in ("float32", "int8")}

    def whole(kind: str) -> Callable[[Tensor], Tensor]:
        def read(image: Tensor) -> Tensor:
            engines[kind].reset()
            return engines[kind].run(image, last=True)

        return read

    def by_pixel(image: Tensor) -> Tensor:
        engines["float32"].reset()
        return [engines["float32"].step(pixel) for pixel in image][-1]

    def gru_by_pixel(image: Tensor) -> Tensor:
        y = state = torch.zeros(1, gru.hidden_size)
        for pixel in image:
            y, state = gru(pixel[None], state)
        return readout(y[-1])

    return {
        "engine, whole image": whole("float32"),
        "engine, int8, whole image": whole("int8"),
        "engine, a pixel a call": by_pixel,
        "layers, whole image": lambda image: model(image[None])[0][0],
        "torch GRU, whole image": lambda image: readout(gru(image)[0][-1]),
        "torch GRU, a pixel a call": gru_by_pixel,
    }


@torch.no_grad()
def measure(images: Tensor) -> dict[str, Any]:
    readers = contestants()
    names = [[int(readers[name](image).argmax()) for image in images] for name in list(readers)[:4]]
    assert names[0] == names[2] == names[3], "the engine and the model name different digits"
    spent: dict[str, list[float]] = {name: [] for name in readers}
    for image in images:
        for name, read in readers.items():
            start = time.perf_counter()
            read(image)
            spent[name].append(1e6 * (time.perf_counter() - start) / len(image))
    return {name: statistics.median(times) for name, times in spent.items()}


def table(microseconds: dict[str, float]) -> str:
    rows = ["| | µs a pixel | torch's GRU, called alike, takes |", "| --- | --- | --- |"]
    for name, value in microseconds.items():
        rival = f"torch GRU, {name.rsplit(', ', 1)[1]}"
        rows.append(f"| {name} | {value:.2f} | {'-' if rival == name else f'{microseconds[rival] / value:.0f} x'} |")
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--out", type=pathlib.Path, help=f"where the record goes, such as {RESULTS.name}")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = measure(egru.data.sequential_mnist().test.x[: options.images])
    print(table(found))
    if options.out is not None:
        record = {
            "command": f"python benchmarks/pretrained.py --images {options.images}",
            "date": datetime.date.today().isoformat(),
            "machine": platform.machine(),
            "torch": torch.__version__,
            "microseconds_a_pixel": found,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
