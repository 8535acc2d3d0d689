"""Time the pretrained sequential MNIST model per pixel, one image at a time on one thread.

    python benchmarks/pretrained.py [--images 40] [--out FILE]

The contestants are egru.EventEngine with float32 and int8 weights, the layers of the same model, and a dense
torch.nn.GRU of the same size with a readout, whose time does not depend on its weights. They read the complete image in
one call, or one pixel per call as in streaming.

The images are the first of the MNIST test file (EGRU_DATA). Contestants are interleaved on each image, and medians over
images are reported. The predictions of the float32 engine must equal those of the model.
"""

import argparse
import datetime
import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import egru
from egru.types import WeightFormat

FORMATS: tuple[WeightFormat, ...] = ("float32", "int8")


def contestants() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return functions from an image ``(784, 1)`` to scores ``(10,)``."""
    model = egru.pretrained("smnist")
    gru, readout = nn.GRU(1, model.readout.in_features), nn.Linear(model.readout.in_features, 10)
    engines = {weights: egru.EventEngine(**model.streaming(), weights=weights) for weights in FORMATS}

    def whole(weights: WeightFormat) -> Callable[[Tensor], Tensor]:
        def read(image: Tensor) -> Tensor:
            engines[weights].reset()
            return engines[weights].run(image, last=True)

        return read

    def by_pixel(image: Tensor) -> Tensor:
        scores = torch.empty(10)
        engines["float32"].reset()
        for pixel in image:
            engines["float32"].step(pixel, out=scores)
        return scores

    def gru_by_pixel(image: Tensor) -> Tensor:
        y = state = torch.zeros(1, gru.hidden_size)
        for pixel in image:
            y, state = gru(pixel[None], state)
        return readout(y[-1])

    return {
        "engine, whole image": whole("float32"),
        "engine, int8, whole image": whole("int8"),
        "engine, one pixel per call": by_pixel,
        "layers, whole image": lambda image: model(image[None])[0][0],
        "torch GRU, whole image": lambda image: readout(gru(image)[0][-1]),
        "torch GRU, one pixel per call": gru_by_pixel,
    }


@torch.no_grad()
def measure(images: Tensor) -> dict[str, float]:
    """Return the median microseconds per pixel of each contestant."""
    readers = contestants()
    predictions = [[int(readers[name](image).argmax()) for image in images] for name in list(readers)[:4]]
    assert predictions[0] == predictions[2] == predictions[3], "the engine and the model predict different digits"
    times: dict[str, list[float]] = {name: [] for name in readers}
    for image in images:
        for name, read in readers.items():
            start = time.perf_counter()
            read(image)
            times[name].append(1e6 * (time.perf_counter() - start) / len(image))
    return {name: statistics.median(values) for name, values in times.items()}


def table(microseconds: dict[str, float]) -> str:
    rows = ["| | µs per pixel | speed-up over torch.nn.GRU, called alike |", "| --- | --- | --- |"]
    for name, value in microseconds.items():
        rival = f"torch GRU, {name.rsplit(', ', 1)[1]}"
        rows.append(f"| {name} | {value:.2f} | {'-' if rival == name else f'{microseconds[rival] / value:.0f} x'} |")
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=40, help="number of test images; default: %(default)s")
    parser.add_argument("--out", type=pathlib.Path, help="write the record to this JSON file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    microseconds = measure(egru.data.sequential_mnist().test.x[: options.images])
    print(table(microseconds))
    if options.out is not None:
        record = {
            "command": f"python benchmarks/pretrained.py --images {options.images}",
            "date": datetime.date.today().isoformat(),
            "machine": platform.machine(),
            "torch": torch.__version__,
            "microseconds_per_pixel": microseconds,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
