"""Data-parallel training with `torchrun`: each process trains on a part of every batch, and all take the same step.

Without a process group, every function here does nothing, so that the loop is the same for one process and for many.
Only rank 0 writes the run, in a folder that all processes can read.
"""

# pyright: reportPrivateImportUsage=false
# torch.distributed does not export the names of its C++ part.

import contextlib
import gc
import importlib
import inspect
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from egru.training.config import Training
from egru.training.records import EpochMetrics, Result
from egru.training.run import Best, Run

T = TypeVar("T")

_DDP_OPTIONS = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {
    ("forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers"): False
}
"""Option that disables DDP's own synchronisation of buffers, which happens once per epoch here. torch renamed it."""


def rank() -> int:
    """Return the rank of this process, from 0."""
    return dist.get_rank() if _is_distributed() else 0


def world_size() -> int:
    """Return the number of processes in the group."""
    return dist.get_world_size() if _is_distributed() else 1


def launched_processes() -> int:
    """Return the number of processes that `torchrun` started. Does not require a process group."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def launched_rank() -> int:
    """Return the rank that `torchrun` gave this process. Does not require a process group."""
    return int(os.environ.get("RANK", "0"))


def is_elastic() -> bool:
    """Return whether `torchrun` started this process, possibly as a restart.

    The restart count of `torchrun` is not used because it can differ between machines.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextlib.contextmanager
def process_group(device: str) -> Iterator[str]:
    """Connect the processes that `torchrun` started: with Gloo on the CPU, with NCCL on GPUs.

    Args:
        device: Device of the config, such as "cpu" or "cuda".

    Yields:
        The device of this process, such as "cuda:1".
    """
    if launched_processes() == 1 or dist.is_initialized():
        yield device
        return
    options: dict[str, Any] = {"backend": "gloo"}
    if torch.device(device).type == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
        options = {"backend": "nccl", "device_id": torch.device(device)}  # without it barriers guess, and warn
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        options |= {"store": _fresh_store(), "rank": int(os.environ["RANK"]), "world_size": launched_processes()}
    # The functions of this module store the current group as a default argument, and DDP imports it. If it is imported
    # before the group exists, it does not keep the group alive. A group that is kept alive has threads that outlive the
    # interpreter and abort when they free a tensor.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group(**options)
    yield device
    gc.collect()  # a DDP module in a reference cycle would keep the group's threads alive
    dist.destroy_process_group()  # not after an error: other ranks may never arrive, and `torchrun` ends them


def _fresh_store() -> dist.Store:
    """Return `torchrun`'s store under a prefix that is new for each start.

    The store outlives the processes and still contains the addresses of killed ones (pytorch issue 135712). A restart
    would connect to those. Rank 0 therefore chooses a new prefix and sends it to each rank that asks with a new key.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, launched_processes(), is_master=False)
    own_rank, key = int(os.environ["RANK"]), uuid.uuid4().hex
    if own_rank == 0:
        while store.add(f"egru/joined/{key}", 0) < launched_processes() - 1:
            for other in range(1, launched_processes()):
                if store.check([f"egru/question/{other}"]):
                    store.set(f"egru/answer/{store.get(f'egru/question/{other}').decode()}", key)
            time.sleep(0.02)
        return dist.PrefixStore(key, store)
    store.set(f"egru/question/{own_rank}", key)
    prefix = store.get(f"egru/answer/{key}").decode()
    store.add(f"egru/joined/{prefix}", 1)
    return dist.PrefixStore(prefix, store)


@contextlib.contextmanager
def only_rank_zero_prints() -> Iterator[None]:
    """Discard the standard output of all processes but the first."""
    if launched_rank() == 0:
        yield
        return
    with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
        yield


@contextlib.contextmanager
def rank_zero_first() -> Iterator[None]:
    """Run the body in rank 0 before it runs in the other processes."""
    if rank() > 0:
        barrier()
    yield
    if rank() == 0:
        barrier()


def barrier() -> None:
    """Wait until all processes have called this function."""
    if _is_distributed():
        dist.barrier()


def from_rank_zero(compute: Callable[[], T]) -> T:
    """Call ``compute`` in rank 0 and return its result in all processes."""
    if not _is_distributed():
        return compute()
    values = [compute() if rank() == 0 else None]
    dist.broadcast_object_list(values, src=0)
    return values[0]  # pyright: ignore[reportReturnType]


def items_from_rank_zero(items: Iterable[T]) -> Iterable[T]:
    """Return the ``items`` of rank 0 in all processes. A single process draws them lazily."""
    return from_rank_zero(lambda: list(items)) if _is_distributed() else items


def all_sum(value: Tensor) -> Tensor:
    """Return the sum of ``value`` over all processes, on the device of ``value``."""
    if not _is_distributed():
        return value
    total = value.detach().to(_backend_device(), copy=True)
    dist.all_reduce(total)
    return total.to(value.device)


def gather_from_others(value: T) -> list[T]:
    """Return the ``value`` of each other process, in the order of their ranks."""
    if not _is_distributed():
        return []
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values[: rank()] + values[rank() + 1 :]


def reseed(seed: int, epoch: int) -> None:
    """Seed the generator of each process but the first, so that random numbers differ between ranks.

    The seed depends on the epoch only, so that an epoch that is repeated after a restart draws the same numbers.
    """
    if rank() > 0:
        torch.manual_seed((seed * 1_000_003 + epoch) * 65_537 + rank())


def broadcast_buffers(model: nn.Module) -> None:
    """Copy the buffers of rank 0, such as running averages, to all processes: rank 0 saves them, all evaluate them."""
    if _is_distributed():
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def data_parallel(model: nn.Module, objective: Callable[..., T], training: Training) -> Callable[..., T]:
    """Return ``objective`` such that its backward pass averages the gradients of ``model`` over all processes.

    Raises:
        ValueError: If ``training.graph`` is set, which is not supported with several processes.
    """
    if not _is_distributed():
        return objective
    if training.graph:
        raise ValueError("graph is not supported with several processes; leave it off")
    wrapped = nn.parallel.DistributedDataParallel(_Objective(model, objective), **_NO_BUFFER_SYNC)
    if training.exchange == "bfloat16":
        wrapped.register_comm_hook(None, _reduce_in_bfloat16)
    return wrapped


def _reduce_in_bfloat16(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average gradients in bfloat16, which halves the traffic. torch's equivalent hook requires NCCL."""
    rounded = bucket.buffer().to(torch.bfloat16).div_(world_size())
    summed = dist.all_reduce(rounded, async_op=True)
    assert summed is not None
    return summed.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]))


class _Objective(nn.Module):
    """A model and its objective in one module, because DDP synchronises the gradients of one forward method."""

    def __init__(self, model: nn.Module, objective: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, *args: Any) -> Any:
        return self.objective(*args)


class ReadOnlyRun(Run):
    """The run of all processes but the first: reads the folder and writes nothing."""

    def remove_temporary_files(self) -> None:
        pass

    def save(self, *args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        pass

    def append_metrics(self, metrics: EpochMetrics) -> None:
        pass

    def write_result(self, result: Result) -> None:
        pass

    def restore(
        self, model: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device, scaler: torch.amp.GradScaler
    ) -> tuple[int, Best]:
        epoch = self.newest_epoch()
        return epoch, self._load(epoch, model, optimiser, device, scaler)


def run_for_rank(run: Run) -> Run:
    """Return ``run`` in rank 0, and a read-only view without log messages in the other processes."""
    return run if rank() == 0 else ReadOnlyRun(run.folder, lambda message: None)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _backend_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
