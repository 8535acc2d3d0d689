"""Checkpoints: folders that are there whole or not at all, and that know when they have been damaged.

A checkpoint is ``epoch-00012/`` with ``weights.safetensors`` (what the model is judged by), ``trainer.safetensors``
(optimiser and random generators), ``state.json`` and ``SHA256SUMS``; `sha256sum -c SHA256SUMS` checks it by hand.
It is written under another name, flushed to the disk and renamed. Nothing is ever unpickled.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from egru.training.optimise import AveragedSGD

SUMS = "SHA256SUMS"
WEIGHTS, TRAINER, STATE = "weights.safetensors", "trainer.safetensors", "state.json"


class Damaged(RuntimeError):
    """A checkpoint that is not what was written."""


def save(
    folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device, facts: Mapping[str, Any]
) -> None:
    """Write the checkpoint ``folder``: model, optimiser and random generators as they are, and ``facts``."""
    tensors, plain = _optimiser_state(optimiser)
    weights = weights_of(model)
    if isinstance(optimiser, AveragedSGD) and optimiser.averaging:
        tensors |= {f"raw.{name}": value for name, value in weights.items()}
        with optimiser.averaged():
            weights = weights_of(model)
    tensors["random.cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        _write_tensors(temporary / WEIGHTS, weights)
        _write_tensors(temporary / TRAINER, tensors)
        write_synced(temporary / STATE, json.dumps({"optimiser": plain, "facts": facts}).encode())
        sums = "".join(f"{_digest(temporary / name)}  {name}\n" for name in (WEIGHTS, TRAINER, STATE))
        write_synced(temporary / SUMS, sums.encode())
        sync_folder(temporary)
        discard(folder)
        temporary.rename(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def verify(folder: Path) -> None:
    """Raise :class:`Damaged` unless every file of the checkpoint is what was written."""
    try:
        lines = (folder / SUMS).read_text(encoding="ascii").splitlines()
        listed = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError) as error:
        raise Damaged(f"{folder.name}: {SUMS} cannot be read") from error
    for name in (WEIGHTS, TRAINER, STATE):
        try:
            digest = _digest(folder / name)
        except OSError as error:
            raise Damaged(f"{folder.name}: {name} cannot be read") from error
        if digest != listed.get(name):
            raise Damaged(f"{folder.name}: {name} is not what was written (SHA-256 differs)")


def load_facts(folder: Path) -> dict[str, Any]:
    return json.loads((folder / STATE).read_text(encoding="utf-8"))["facts"]


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights the model was judged by, tied ones once."""
    return _read_tensors(folder / WEIGHTS)


def load_weights(folder: Path, model: nn.Module) -> None:
    """Put the weights the model was judged by into ``model``."""
    put(model, read_weights(folder))


def load(folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device) -> dict[str, Any]:
    """Put everything back as it was when the checkpoint was written; returns its facts.

    Settings of the optimiser, such as its learning rate, stay as they are: the config may have been changed.
    """
    tensors = _read_tensors(folder / TRAINER)
    stored = json.loads((folder / STATE).read_text(encoding="utf-8"))
    raw = {name.removeprefix("raw."): value for name, value in tensors.items() if name.startswith("raw.")}
    put(model, read_weights(folder) | raw)
    state: dict[int, dict[str, Any]] = {int(key): dict(value) for key, value in stored["optimiser"]["state"].items()}
    for name, value in tensors.items():
        if name.startswith("optimiser."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = value
    groups = _groups(optimiser, stored["optimiser"]["groups"])
    optimiser.load_state_dict({"state": state, "param_groups": groups})
    torch.set_rng_state(tensors["random.cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random.cuda"], device)
    return stored["facts"]


def discard(folder: Path) -> None:
    """Remove a checkpoint; one that is half removed no longer carries a checkpoint's name."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.old.{os.getpid()}")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Put ``data`` in the place of a file: a reader, or a crash, finds the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_synced(temporary, data)
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in ``folder``."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The state dict on the CPU, tied tensors once. A copy: what happens to the model later does not matter."""
    seen: set[int] = set()
    weights = {}
    for name, value in model.state_dict().items():
        if value.data_ptr() not in seen or value.numel() == 0:
            weights[name] = value.detach().to("cpu", copy=True).contiguous()
        seen.add(value.data_ptr())
    return weights


def put(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Put weights into ``model``, in which tied ones may be there once."""
    own = model.state_dict()
    known = {own[name].data_ptr(): value for name, value in weights.items() if name in own}
    tied = {n: known[x.data_ptr()] for n, x in own.items() if n not in weights and x.data_ptr() in known}
    model.load_state_dict(weights | tied)


def _optimiser_state(optimiser: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, and everything else as JSON holds it."""
    stored = optimiser.state_dict()
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for index, entries in stored["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimiser.{index}.{key}"] = value.detach().to("cpu", copy=True).contiguous()
            else:
                plain.setdefault(str(index), {})[key] = value
    return tensors, {"state": plain, "groups": stored["param_groups"]}


_COURSE = ("params", "averaging", "losses")
"""What an optimiser's groups hold beside settings: which parameters, and how far averaging has come."""


def _groups(optimiser: torch.optim.Optimizer, stored: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ``stored`` groups with the settings of ``optimiser``."""
    own = optimiser.param_groups
    if len(own) != len(stored) or ("averaging" in own[0]) != ("averaging" in stored[0]):
        raise ValueError("the optimiser is of another kind, or has other groups of parameters")
    settings = [{name: value for name, value in group.items() if name not in _COURSE} for group in own]
    return [old | new for old, new in zip(stored, settings, strict=True)]


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    write_synced(path, _safetensors().save(tensors))


def _read_tensors(path: Path) -> dict[str, Tensor]:
    return _safetensors().load(path.read_bytes())


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("checkpoints need safetensors: pip install 'egru[train]'") from error
    return safetensors.torch


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
