"""What ``egru doctor`` says: what is installed, which kernels are in use, which data are present."""

import importlib.metadata
import platform
from collections.abc import Callable, Iterator

import torch

from egru import data, kernels

EXTRAS = {
    "safetensors": "train",
    "tyro": "train",
    "rich": "train",
    "matplotlib": "demo",
    "scikit-learn": "demo",
    "tonic": "dvs",
    "tensorboard": "tensorboard",
    "onnxruntime": "bench",
}
"""Optional packages, and the extra of egru that brings each."""

SETS: dict[str, Callable[[], object]] = {
    "MNIST": data.sequential_mnist,
    "Penn Treebank": data.penn_treebank,
    "WikiText-2": data.wikitext2,
    "DVS gesture, packed": data.dvs_gesture,
}


def lines() -> Iterator[str]:
    """One finding a line."""
    yield f"python {platform.python_version()} on {platform.system()} {platform.machine()}"
    for name in ("egru", "torch", "numpy"):
        yield f"{name} {_version(name) or 'source tree, not installed'}"
    for name, extra in EXTRAS.items():
        wanted = f"egru[{extra}]"
        yield f"{name} {_version(name) or f'not installed: pip install {wanted!r}'}"
    yield f"threads: {torch.get_num_threads()}"
    yield f"CUDA: {torch.cuda.get_device_name() if torch.cuda.is_available() else 'no device'}"
    for name, standing in kernels.info().items():
        yield f"kernel {name}: {standing}"
    yield f"data root: {data.data_root() or 'none; set EGRU_DATA=FOLDER'}"
    for name, load in SETS.items():
        yield f"data {name}: {_standing(load)}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _standing(load: Callable[[], object]) -> str:
    try:
        load()
    except data.DataMissing:
        return "absent"
    except (data.DataCorrupt, OSError) as error:
        return f"damaged: {error}"
    return "present, checksums right"
