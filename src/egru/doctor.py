"""What ``egru doctor`` prints: installed packages, the kernels in use, and which data sets are present."""

from collections.abc import Callable, Iterator

from egru import data
from egru.environment import Environment, version
from egru.kernels.support import KERNELS, Support, support
from egru.layers.ernn import NO_KERNEL

EXTRAS = {
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
    environment = Environment.current()
    yield f"python {environment.versions['python']} on {environment.machine}"
    for name in ("egru", "torch", "numpy", "safetensors"):
        yield f"{name} {environment.versions[name]}"
    for name, extra in EXTRAS.items():
        hint = f"not installed (pip install 'egru[{extra}]')"
        yield f"{name} {version(name) or hint}"
    yield f"threads: {environment.threads}"
    yield f"CUDA: {environment.cuda or 'no device'}"
    for name, status in environment.kernels.items():
        yield f"kernel {name}: {status}"
    yield from _support_table()
    yield f"data folder: {data.data_root() or 'not set; set EGRU_DATA to the folder of the data sets'}"
    for name, load in DATA_SETS.items():
        yield f"data set {name}: {_status(load)}"


def _support_table() -> Iterator[str]:
    """Yield a table of the options that each kernel supports, with the reasons for those that it does not."""
    rows = [*support(), Support("ERNN", dict.fromkeys(KERNELS, NO_KERNEL))]
    width = max(len(row.option) for row in rows) + 2
    yield "options that each kernel supports; layers with other options run in plain torch:"
    yield f"  {'option':<{width}}{''.join(f'{name:<10}' for name in KERNELS)}reason"
    for option, declined in rows:
        cells = [f"{'yes' if reason is None else 'no':<10}" for reason in declined.values()]
        reasons = dict.fromkeys(reason for reason in declined.values() if reason is not None)
        yield f"  {option:<{width}}{''.join(cells)}{'; '.join(reasons)}".rstrip()


def _status(load: Callable[[], object]) -> str:
    try:
        load()
    except data.DataMissing:
        return "not present"
    except (data.DataCorrupt, OSError) as error:
        return f"damaged: {error}"
    return "present, checksums match"
