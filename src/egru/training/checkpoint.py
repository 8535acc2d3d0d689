"""Checkpoints: folders that are written atomically and verified by checksum.

A checkpoint is a folder ``epoch-00012/`` with ``weights.safetensors`` (the weights that are evaluated),
``trainer.safetensors`` (optimiser and random generators), ``state.json`` and ``SHA256SUMS``. It can be checked with
`sha256sum -c SHA256SUMS`. A checkpoint is written under a temporary name, flushed to disk and renamed. Nothing is
unpickled.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from egru import files
from egru.compress.weights import fold_masks
from egru.records import FORMAT, read_json
from egru.training.optimise import AveragedSGD

SUMS = "SHA256SUMS"
WEIGHTS, TRAINER, STATE = "weights.safetensors", "trainer.safetensors", "state.json"


class DamagedCheckpointError(RuntimeError):
    """A checkpoint with a missing, unreadable or changed file."""


def save(
    folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device, metadata: Mapping[str, Any]
) -> None:
    """Write a checkpoint of the model, the optimiser and the random generators.

    Args:
        folder: Folder of the checkpoint. An existing one is replaced.
        model: Model to save. If the optimiser averages the weights, the averages are saved as the model's weights.
        optimiser: Optimiser whose state is saved.
        device: Device whose random generator is saved, in addition to the CPU's.
        metadata: JSON values that :func:`load` and :func:`load_metadata` return.

    Raises:
        OSError: If the checkpoint cannot be written. An existing checkpoint is unchanged.
    """
    tensors, settings = _optimiser_state(optimiser)
    weights = get_weights(model)
    if isinstance(optimiser, AveragedSGD) and optimiser.averaging:
        tensors |= {f"raw.{name}": value for name, value in weights.items()}
        with optimiser.averaged():
            weights = get_weights(model)
    tensors["random.cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    state = {"format": FORMAT, "optimiser": settings, "metadata": metadata}
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        _write_tensors(temporary / WEIGHTS, weights)
        _write_tensors(temporary / TRAINER, tensors)
        files.write_synced(temporary / STATE, json.dumps(state).encode())
        sums = "".join(f"{_digest(temporary / name)}  {name}\n" for name in (WEIGHTS, TRAINER, STATE))
        files.write_synced(temporary / SUMS, sums.encode())
        files.sync_folder(temporary)
        discard(folder)
        temporary.rename(folder)
        files.sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def verify(folder: Path) -> None:
    """Check every file of a checkpoint against its checksum.

    Raises:
        DamagedCheckpointError: If a file is missing, unreadable or changed.
    """
    try:
        lines = (folder / SUMS).read_text(encoding="ascii").splitlines()
        expected = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{folder.name}: {SUMS} cannot be read") from error
    for name in (WEIGHTS, TRAINER, STATE):
        try:
            digest = _digest(folder / name)
        except OSError as error:
            raise DamagedCheckpointError(f"{folder.name}: {name} cannot be read") from error
        if digest != expected.get(name):
            raise DamagedCheckpointError(f"{folder.name}: {name} was changed after it was written (SHA-256 differs)")


def load(folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device) -> dict[str, Any]:
    """Restore the model, the optimiser's state and the random generators from a checkpoint.

    The optimiser keeps its current settings, such as the learning rate, because the config may have changed.

    Args:
        folder: Folder of the checkpoint.
        model: Model that receives the weights.
        optimiser: Optimiser that receives the state.
        device: Device whose random generator is restored, in addition to the CPU's.

    Returns:
        The metadata given to :func:`save`.

    Raises:
        DamagedCheckpointError: If a file cannot be read or has another structure than :func:`save` writes.
        RuntimeError: If the weights do not fit the model.
        ValueError: If the optimiser's type or parameter groups differ from those of the checkpoint.
    """
    tensors, stored = _read_tensors(folder / TRAINER), _read_state(folder)
    raw = {name.removeprefix("raw."): value for name, value in tensors.items() if name.startswith("raw.")}
    set_weights(model, _read_tensors(folder / WEIGHTS) | raw)
    try:
        _load_optimiser(optimiser, stored["optimiser"], tensors)
        torch.set_rng_state(tensors["random.cpu"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(tensors["random.cuda"], device)
    except (AttributeError, LookupError, TypeError) as error:
        raise DamagedCheckpointError(f"{folder.name}: {type(error).__name__}: {error}") from error
    return stored["metadata"]


def load_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata of a checkpoint without loading its tensors; raises as :func:`load` does."""
    return _read_state(folder)["metadata"]


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint by name; raises as :func:`load` does.

    Tied weights appear once. Masks of pruned weights are applied, so that the weights fit a model without masks.
    """
    return fold_masks(_read_tensors(folder / WEIGHTS))


def load_weights(folder: Path, model: nn.Module) -> None:
    """Load the weights of a checkpoint into ``model``."""
    set_weights(model, read_weights(folder))


def discard(folder: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that an interrupted deletion does not leave a partial checkpoint."""
    if folder.exists():
        renamed = folder.with_name(f".{folder.name}.old.{os.getpid()}")
        folder.rename(renamed)
        shutil.rmtree(renamed)


def get_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the model's state dict on the CPU, with tied tensors once."""
    seen: set[int] = set()
    weights = {}
    for name, value in model.state_dict().items():
        if value.data_ptr() not in seen or value.numel() == 0:
            weights[name] = value.detach().to("cpu", copy=True).contiguous()
        seen.add(value.data_ptr())
    return weights


def set_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load ``weights`` into ``model``. Tied weights may be given under one of their names.

    Raises:
        RuntimeError: If names or shapes do not fit the model.
    """
    current = model.state_dict()
    by_address = {current[name].data_ptr(): value for name, value in weights.items() if name in current}
    tied = {
        name: by_address[value.data_ptr()]
        for name, value in current.items()
        if name not in weights and value.data_ptr() in by_address
    }
    model.load_state_dict(weights | tied)


def _load_optimiser(optimiser: torch.optim.Optimizer, stored: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Restore what :func:`_optimiser_state` returned."""
    state: dict[int, dict[str, Any]] = {int(key): dict(value) for key, value in stored["state"].items()}
    for name, value in tensors.items():
        if name.startswith("optimiser."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = value
    optimiser.load_state_dict({"state": state, "param_groups": _merge_groups(optimiser, stored["groups"])})


def _optimiser_state(optimiser: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split the optimiser's state into named tensors and JSON values."""
    stored = optimiser.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for index, entries in stored["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimiser.{index}.{key}"] = value.detach().to("cpu", copy=True).contiguous()
            else:
                values.setdefault(str(index), {})[key] = value
    return tensors, {"state": values, "groups": stored["param_groups"]}


_GROUP_STATE = ("params", "averaging", "losses")
"""Entries of an optimiser's parameter groups that are state and not settings."""


def _merge_groups(optimiser: torch.optim.Optimizer, stored: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ``stored`` parameter groups with the current settings of ``optimiser``."""
    current = optimiser.param_groups
    if len(current) != len(stored) or ("averaging" in current[0]) != ("averaging" in stored[0]):
        raise ValueError("the optimiser has another type or other parameter groups")
    settings = [{name: value for name, value in group.items() if name not in _GROUP_STATE} for group in current]
    return [old | new for old, new in zip(stored, settings, strict=True)]


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    files.write_synced(path, safetensors.torch.save(tensors))


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(path.read_bytes())
    except Exception as error:  # safetensors raises its own exception class, and KeyError for an unknown type
        raise DamagedCheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _read_state(folder: Path) -> dict[str, Any]:
    """Return ``state.json``, which has the entries "optimiser" and "metadata"."""
    try:
        state = read_json(folder / STATE)
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{folder / STATE} cannot be read: {error}") from error
    if not all(isinstance(state.get(name), dict) for name in ("optimiser", "metadata")):
        raise DamagedCheckpointError(f"{folder / STATE} has no optimiser or no metadata")
    return state


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
