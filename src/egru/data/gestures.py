"""DVS128 Gesture: eleven gestures seen by an event camera, as packed frames or from the recordings."""

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

from egru.data.events import Events, event_frames, gesture_frames
from egru.data.root import DataCorrupt, Source, data_root, find, missing, verify
from egru.data.sets import Classification, Split

FOLDER = "dvs-gesture"
CLASSES = 11
VALIDATION_SESSIONS = 14
"""The last of the 98 training sessions: a session is one subject under one light, going once through the gestures."""
VALIDATION_SUBJECTS = (21, 22, 23)
"""Of the 23 training subjects, where the recordings say who it was."""
_BINS = 32
_IBM = "https://research.ibm.com/interactive/dvsgesture/"
_PACK = f"the recordings ({_IBM}, through pip install 'egru[dvs]') with egru.data.pack_gestures(root)"
PACKED = (
    Source("train.npz", "e384bbe0ae72acdeb08d7310c1642879b1d0751dffd8d7210d557a8d8fadc3e3", _PACK),
    Source("test.npz", "fab415fe2bda8550b0f252872b3457564396b71ee5b78a3c46180758bc7f80cf", _PACK),
)


def unpack_frames(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``(..., W / 8)`` bytes to ``(..., W)`` zeros and ones, first pixel in the top bit, on the same device."""
    bits = torch.arange(7, -1, -1, device=packed.device)
    table = (torch.arange(256, device=packed.device)[:, None] >> bits & 1).to(dtype)
    return F.embedding(packed.int(), table).flatten(-2)


def scale_frames(counts: Tensor) -> Tensor:
    """Bytes to float32 in [0, 1]."""
    return counts.to(torch.float32) / 255


def smooth_frames(frames: Tensor) -> Tensor:
    """Every pixel the mean of itself and its eight neighbours, ``(..., H, W)``; black beyond the edge."""
    return F.avg_pool2d(frames.flatten(0, -3).unsqueeze(1), 3, stride=1, padding=1).reshape(frames.shape)


def dvs_gesture(root: str | os.PathLike[str] | None = None) -> Classification:
    """1,077 + 264 recordings as 32 frames, binary, 32 by 32 pixels, two polarities; kept packed, 8 pixels a byte.

    ``decode`` is :func:`unpack_frames`: ``(B, 32, 2, 32, 4)`` bytes to ``(B, 32, 2, 32, 32)`` floats. The bins are an
    equal share of each recording (about 0.2 s): coarser than the paper's 25 ms, so accuracies do not compare.
    Validation takes whole sessions, the last 14 of 98. Files lie in the folder ``dvs-gesture``.
    """
    paths = [find(source, FOLDER, root) for source in PACKED]
    (x, y), test = (_packed(source, path) for source, path in zip(PACKED, paths, strict=True))
    session = sessions(y)
    held = session >= session[-1] + 1 - VALIDATION_SESSIONS
    return Classification(
        "DVS gesture", CLASSES, Split(x[~held], y[~held]), Split(x[held], y[held]), test, decode=unpack_frames
    )


def sessions(labels: Tensor) -> Tensor:
    """Which session each recording belongs to, from 0 up: a new one begins where a gesture comes a second time."""
    number, seen, out = 0, set[int](), []
    for label in labels.tolist():
        if label in seen:
            number, seen = number + 1, set[int]()
        seen.add(label)
        out.append(number)
    return torch.tensor(out)


def _packed(source: Source, path: Path) -> Split:
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() not in _own_sums(path):
        verify(content, source, path)
    try:
        with np.load(path, allow_pickle=False) as file:
            packed, label = file["packed"], file["label"]
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataCorrupt(f"{path} cannot be read ({error})") from error
    if packed.dtype != np.uint8 or packed.shape != (len(label), _BINS, 2, 32, 4) or not len(label):
        raise DataCorrupt(f"{path}: packed is {packed.dtype} {packed.shape}, expected uint8 (N, {_BINS}, 2, 32, 4)")
    if label.max() >= CLASSES:
        raise DataCorrupt(f"{path}: label {label.max()}, expected 0 to {CLASSES - 1}")
    return Split(torch.from_numpy(packed), torch.from_numpy(label.astype(np.int64)))


def _own_sums(path: Path) -> set[str]:
    """Checksums that :func:`pack_gestures` left beside the files it wrote."""
    sums = path.with_name("SHA256SUMS")
    lines = sums.read_text().splitlines() if sums.is_file() else []
    return {line.split()[0] for line in lines if line.split()[1:] == [path.name]}


# ---- from the recordings ---------------------------------------------------------------------------------------------


def dvs_gesture_raw(root: str | os.PathLike[str] | None = None, *, side: int = 32) -> Classification:
    """The paper's preparation: slices of 1.7 s, denoised 10 ms, 68 bins of 25 ms, max-pooled to ``side``.

    ``x`` is kept in bytes, ``(N, 68, 2, side, side)``, and ``decode`` scales it to [0, 1]. Subjects 21 to 23 validate.
    Needs tonic (``pip install 'egru[dvs]'``) and the recordings as it stores them under the data root: minutes of work.
    """
    splits: list[list[tuple[np.ndarray, int]]] = [[], [], []]
    for part, train in ((0, True), (2, False)):
        recordings = _recordings(root, train)
        for i, subject in enumerate(recordings.users):
            events, label = _events(recordings, i)
            at = 1 if train and subject in VALIDATION_SUBJECTS else part
            frames = np.round(gesture_frames(events, side=side) * 255).astype(np.uint8)
            splits[at].extend((piece, label) for piece in frames)
    parts: list[Split] = []
    for name, pieces in zip(("train", "validation", "test"), splits, strict=True):
        if not pieces:
            raise DataCorrupt(f"the DVS gesture recordings hold no slice of 1.7 s for the {name} split")
        x = torch.from_numpy(np.stack([frames for frames, _ in pieces]))
        parts.append(Split(x, torch.tensor([label for _, label in pieces])))
    return Classification("DVS gesture, 25 ms", CLASSES, *parts, decode=scale_frames)


def pack_gestures(root: str | os.PathLike[str] | None = None) -> Path:
    """Write the packed frames of :func:`dvs_gesture` from the recordings, with their checksums; returns the folder."""
    base = data_root(root)
    if base is None:
        raise missing("train.npz", FOLDER, None, _PACK)
    arrays: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for source, train in zip(PACKED, (True, False), strict=True):
        recordings = _recordings(root, train)
        order = sorted(range(len(recordings.data)), key=lambda i: str(recordings.data[i]))  # subject, light, gesture
        packed, labels = [], []
        for i in order:
            events, label = _events(recordings, i)
            first, last = float(events.t[0]), float(events.t[-1])
            counts = event_frames(events, start=first, width=(last - first + 1) / _BINS, bins=_BINS)
            packed.append(np.packbits(counts > 0, axis=-1))
            labels.append(label)
        arrays[source.name] = np.stack(packed), np.array(labels, np.uint8)
    folder = base / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for name, (packed, label) in arrays.items():
        np.savez_compressed(folder / name, packed=packed, label=label)
        lines.append(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n")
    (folder / "SHA256SUMS").write_text("".join(lines))
    return folder


def _recordings(root: str | os.PathLike[str] | None, train: bool) -> Any:
    """tonic's data set, if its files are there; it would start a download of gigabytes otherwise."""
    try:
        import tonic  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("the DVS gesture recordings need tonic: pip install 'egru[dvs]'") from error
    kind: Any = tonic.datasets.DVSGesture
    name = kind.train_filename if train else kind.test_filename
    base = data_root(root)
    if base is None or not (base / "DVSGesture" / name).is_file():
        address = f"{_IBM}, or by tonic.datasets.DVSGesture(save_to=ROOT, train={train})"
        raise missing(name, "DVSGesture", base, address)
    return kind(save_to=str(base), train=train)


def _events(recordings: Any, index: int) -> tuple[Events, int]:
    events, label = recordings[index]
    events = events[np.argsort(events["t"], kind="stable")]
    return Events(*(events[name].astype(np.int64) for name in ("x", "y", "p", "t"))), int(label)
