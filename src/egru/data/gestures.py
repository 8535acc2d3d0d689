"""DVS128 Gesture: eleven gestures recorded with an event camera, as packed frames or from the raw recordings."""

import hashlib
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from egru.data.datasets import Classification, Split
from egru.data.event_camera import Events, event_frames, gesture_frames
from egru.data.files import DataCorrupt, DataFile, data_root, find_file, missing_file, verify_content

FOLDER = "dvs-gesture"
CLASSES = 11
VALIDATION_SESSIONS = 14
"""Number of sessions, of 98 in the training file, that form the validation split: the last ones.

A session is one subject under one illumination, performing each gesture once.
"""
VALIDATION_SUBJECTS = (21, 22, 23)
"""The validation subjects, of 23 training subjects, if the recordings are read directly."""
_BINS = 32
_IBM = "https://research.ibm.com/interactive/dvsgesture/"
_PACK = f"the raw recordings ({_IBM}) by pip install 'egru[dvs]' and egru.data.pack_gestures(root)"
FILES = (
    DataFile("train.npz", "e384bbe0ae72acdeb08d7310c1642879b1d0751dffd8d7210d557a8d8fadc3e3", _PACK),
    DataFile("test.npz", "fab415fe2bda8550b0f252872b3457564396b71ee5b78a3c46180758bc7f80cf", _PACK),
)


def unpack_frames(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert bytes to binary frames, on the same device.

    Args:
        packed: Eight pixels per byte, the first in the highest bit, ``(..., W / 8)``, uint8.
        dtype: Data type of the result.

    Returns:
        Zeros and ones, ``(..., W)``.

    Example:
        >>> egru.data.unpack_frames(torch.tensor([0b10100000], dtype=torch.uint8))
        tensor([1., 0., 1., 0., 0., 0., 0., 0.])
    """
    bits = torch.arange(7, -1, -1, device=packed.device)
    table = (torch.arange(256, device=packed.device)[:, None] >> bits & 1).to(dtype)
    return F.embedding(packed.int(), table).flatten(-2)


def scale_frames(counts: Tensor) -> Tensor:
    """Convert bytes to float32 in [0, 1]."""
    return counts.to(torch.float32) / 255


def smooth_frames(frames: Tensor) -> Tensor:
    """Replace every pixel by the mean of its 3 by 3 neighbourhood, ``(..., H, W)``, with zeros beyond the edge."""
    return F.avg_pool2d(frames.flatten(0, -3).unsqueeze(1), 3, stride=1, padding=1).reshape(frames.shape)


def pool_frames(frames: Tensor, size: int) -> Tensor:
    """Replace every square of ``size`` by ``size`` pixels by its mean, ``(..., H, W)`` to ``(..., H/size, W/size)``."""
    pooled = F.avg_pool2d(frames.flatten(0, -3).unsqueeze(1), size)
    return pooled.reshape(*frames.shape[:-2], *pooled.shape[-2:])


def augment_time(frames: Tensor, *, crop: float, roll: bool) -> Tensor:
    """Start each sequence at another frame and crop it in time, with one random draw per sequence.

    Args:
        frames: Sequences, ``(B, T, ...)``.
        crop: Minimum length of the cropped part, as a fraction of ``T``. It is stretched to ``T`` steps by repeating
            frames. 1 for no crop.
        roll: Whether to start at a random frame and to continue with the first frame after the last one. A cropped
            part may then contain both the end and the beginning.

    Returns:
        Sequences of the same shape.
    """
    B, T = frames.shape[:2]
    steps = torch.arange(T, device=frames.device).expand(B, T)
    if crop < 1:
        length, start = torch.rand(2, B, 1, device=frames.device)
        length = crop + (1 - crop) * length
        steps = (T * (1 - length) * start + length * (steps + 0.5)).long().clamp_max(T - 1)
    if roll:
        steps = (steps + torch.randint(T, (B, 1), device=frames.device)) % T
    return frames[torch.arange(B, device=frames.device)[:, None], steps]


def dvs_gesture(root: str | os.PathLike[str] | None = None) -> Classification:
    """Load DVS128 Gesture as 32 binary frames per recording, packed to eight pixels per byte.

    Each frame covers 1/32 of its recording, about 0.2 s. The paper uses frames of 25 ms, so accuracies on this data set
    are not comparable with the paper's; see :func:`dvs_gesture_raw`.

    Args:
        root: Data root. If None, the environment variable ``EGRU_DATA``. ``train.npz`` and ``test.npz`` are read from
            its folder ``dvs-gesture``; :func:`pack_gestures` writes them.

    Returns:
        923 / 154 / 264 recordings with ``x`` of shape ``(N, 32, 2, 32, 4)``, uint8, and 11 classes. ``decode`` is
        :func:`unpack_frames`, which gives ``(N, 32, 2, 32, 32)``, float32. The validation split consists of the last
        14 of 98 sessions of the training file.

    Raises:
        DataMissing: If a file is missing.
        DataCorrupt: If a file is damaged.

    Example:
        >>> data = egru.data.dvs_gesture()  # doctest: +SKIP
        >>> data.decode(data.train.x[:8]).shape  # doctest: +SKIP
        torch.Size([8, 32, 2, 32, 32])
    """
    paths = [find_file(file, FOLDER, root) for file in FILES]
    (x, y), test = (_load_packed(file, path) for file, path in zip(FILES, paths, strict=True))
    session = sessions(y)
    validation = session >= session[-1] + 1 - VALIDATION_SESSIONS
    splits = Split(x[~validation], y[~validation]), Split(x[validation], y[validation]), test
    return Classification("DVS gesture", CLASSES, *splits, decode=unpack_frames)


def sessions(labels: Tensor) -> Tensor:
    """Return the session of each recording, starting at 0. A new session starts when a gesture repeats."""
    number, seen, out = 0, set[int](), []
    for label in labels.tolist():
        if label in seen:
            number, seen = number + 1, set[int]()
        seen.add(label)
        out.append(number)
    return torch.tensor(out)


def _load_packed(file: DataFile, path: Path) -> Split:
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() not in _recorded_sums(path):
        verify_content(content, file, path)
    try:
        with np.load(path, allow_pickle=False) as archive:
            packed, label = archive["packed"], archive["label"]
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataCorrupt(f"{path} cannot be read ({error})") from error
    if packed.dtype != np.uint8 or packed.shape != (len(label), _BINS, 2, 32, 4) or not len(label):
        raise DataCorrupt(f"{path}: packed must be uint8 (N, {_BINS}, 2, 32, 4), got {packed.dtype} {packed.shape}")
    if label.max() >= CLASSES:
        raise DataCorrupt(f"{path}: labels must be 0 to {CLASSES - 1}, got {label.max()}")
    return Split(torch.from_numpy(packed), torch.from_numpy(label.astype(np.int64)))


def _recorded_sums(path: Path) -> set[str]:
    """Return the checksums of a file that :func:`pack_gestures` recorded in SHA256SUMS."""
    sums = path.with_name("SHA256SUMS")
    lines = sums.read_text().splitlines() if sums.is_file() else []
    return {line.split()[0] for line in lines if line.split()[1:] == [path.name]}


# ---- raw recordings --------------------------------------------------------------------------------------------------


def dvs_gesture_raw(root: str | os.PathLike[str] | None = None, *, side: int = 32) -> Classification:
    """Load DVS128 Gesture from the raw recordings and prepare it as in the paper, which takes minutes.

    Events are denoised with 10 ms, cut into slices of 1.7 s, counted in 68 bins of 25 ms, and max-pooled.

    Args:
        root: Data root. If None, the environment variable ``EGRU_DATA``. The recordings are read from its folder
            ``DVSGesture``, where tonic stores them. Nothing is downloaded.
        side: Pixels along a side of a frame; must divide 128.

    Returns:
        Slices with ``x`` of shape ``(N, 68, 2, side, side)``, uint8, and 11 classes. ``decode`` scales it to float32 in
        [0, 1]. Subjects 21 to 23 of the training recordings form the validation split.

    Raises:
        DataMissing: If a file is missing.
        DataCorrupt: If a split has no slice of 1.7 s.
        ImportError: If tonic is not installed (``pip install 'egru[dvs]'``).

    Example:
        >>> data = egru.data.dvs_gesture_raw()  # doctest: +SKIP
        >>> data.decode(data.train.x[:8]).shape  # doctest: +SKIP
        torch.Size([8, 68, 2, 32, 32])
    """
    splits: list[list[tuple[np.ndarray, int]]] = [[], [], []]
    for default, train in ((0, True), (2, False)):
        recordings = _open_recordings(root, train)
        for i, subject in enumerate(recordings.users):
            events, label = _read_recording(recordings, i)
            split = 1 if train and subject in VALIDATION_SUBJECTS else default
            frames = np.round(gesture_frames(events, side=side) * 255).astype(np.uint8)
            splits[split].extend((slice_frames, label) for slice_frames in frames)
    tensors: list[Split] = []
    for name, slices in zip(("train", "validation", "test"), splits, strict=True):
        if not slices:
            raise DataCorrupt(f"the DVS gesture recordings contain no slice of 1.7 s for the {name} split")
        x = torch.from_numpy(np.stack([frames for frames, _ in slices]))
        tensors.append(Split(x, torch.tensor([label for _, label in slices])))
    return Classification("DVS gesture, 25 ms", CLASSES, *tensors, decode=scale_frames)


def pack_gestures(root: str | os.PathLike[str] | None = None) -> Path:
    """Convert the raw recordings to the packed frames that :func:`dvs_gesture` loads.

    ``SHA256SUMS`` in the same folder records the checksums of the files; :func:`dvs_gesture` accepts them.

    Args:
        root: Data root. If None, the environment variable ``EGRU_DATA``. The recordings are read from its folder
            ``DVSGesture``, where tonic stores them. Nothing is downloaded.

    Returns:
        The folder with the files.

    Raises:
        DataMissing: If a recording is missing or no data root is set.
        ImportError: If tonic is not installed (``pip install 'egru[dvs]'``).

    Example:
        >>> egru.data.pack_gestures()  # doctest: +SKIP
        >>> data = egru.data.dvs_gesture()  # doctest: +SKIP
    """
    base = data_root(root)
    if base is None:
        raise missing_file("train.npz", FOLDER, None, _PACK)
    arrays: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for file, train in zip(FILES, (True, False), strict=True):
        recordings = _open_recordings(root, train)
        # The file names sort by subject, illumination and gesture.
        order = sorted(range(len(recordings.data)), key=lambda i: str(recordings.data[i]))
        packed, labels = [], []
        for i in order:
            events, label = _read_recording(recordings, i)
            first, last = float(events.t[0]), float(events.t[-1])
            counts = event_frames(events, start=first, width=(last - first + 1) / _BINS, bins=_BINS)
            packed.append(np.packbits(counts > 0, axis=-1))
            labels.append(label)
        arrays[file.name] = np.stack(packed), np.array(labels, np.uint8)
    folder = base / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for name, (packed, label) in arrays.items():
        np.savez_compressed(folder / name, packed=packed, label=label)
        lines.append(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n")
    (folder / "SHA256SUMS").write_text("".join(lines))
    return folder


def _open_recordings(root: str | os.PathLike[str] | None, train: bool) -> Any:
    """Open tonic's data set after checking that its files exist: otherwise tonic would download gigabytes."""
    try:
        import tonic  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("the DVS gesture recordings require tonic: pip install 'egru[dvs]'") from error
    data_set: Any = tonic.datasets.DVSGesture
    name = data_set.train_filename if train else data_set.test_filename
    base = data_root(root)
    if base is None or not (base / "DVSGesture" / name).is_file():
        origin = f"{_IBM} or with tonic.datasets.DVSGesture(save_to=ROOT, train={train})"
        raise missing_file(name, "DVSGesture", base, origin)
    return data_set(save_to=str(base), train=train)


def _read_recording(recordings: Any, index: int) -> tuple[Events, int]:
    events, label = recordings[index]
    events = events[np.argsort(events["t"], kind="stable")]
    return Events(*(events[name].astype(np.int64) for name in ("x", "y", "p", "t"))), int(label)
