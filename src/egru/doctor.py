"""What ``egru doctor`` prints: installed packages, the kernels in use, and which data sets are present."""

import importlib.metadata
import platform
from collections.abc import Callable, Iterator

import torch

from egru import __version__, data, kernels

EXTRAS = {
    "safetensors": "train",
    "tyro": "train",
    "rich": "train",
    "matplotlib": "demo",
    "scikit-learn": "demo",
    "optuna": "sweep",
    "tonic": "dvs",
    "tensorboard": "tensorboard",
    "onnxruntime": "bench",
}
"""Optional packages, and the extra of egru that installs each."""

DATA_SETS: dict[str, Callable[[], object]] = {
    "MNIST": data.sequential_mnist,
    "Penn Treebank": data.penn_treebank,
    "WikiText-2": data.wikitext2,
    "DVS128 Gesture, packed": data.dvs_gesture,
}
"""Functions that load the data sets and verify their checksums."""


def describe() -> Iterator[str]:
    """Yield one line per package, kernel and data set."""
    yield f"python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield f"egru {__version__}"
    for name in ("torch", "numpy"):
        yield f"{name} {_version(name)}"
    for name, extra in EXTRAS.items():
        hint = f"not installed (pip install 'egru[{extra}]')"
        yield f"{name} {_version(name) or hint}"
    yield f"threads: {torch.get_num_threads()}"
    yield f"CUDA: {torch.cuda.get_device_name() if torch.cuda.is_available() else 'no device'}"
    for name, status in kernels.info().items():
        yield f"kernel {name}: {status}"
    yield f"data folder: {data.data_root() or 'not set; set EGRU_DATA to the folder of the data sets'}"
    for name, load in DATA_SETS.items():
        yield f"data set {name}: {_status(load)}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _status(load: Callable[[], object]) -> str:
    try:
        load()
    except data.DataMissing:
        return "not present"
    except (data.DataCorrupt, OSError) as error:
        return f"damaged: {error}"
    return "present, checksums match"
