"""Training in several processes at once (`torchrun`): each has its part of every batch, all take the same step.

Without a process group every function here leaves things as they are: the loop is the same for one process and many.
Runs are written by the first process; the folder must be one that all of them see.
"""

# pyright: reportPrivateImportUsage=false
# torch.distributed names what its C++ part holds without exporting it.

import contextlib
import gc
import importlib
import inspect
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from egru.training.config import Training
from egru.training.run import Run

T = TypeVar("T")

_NAMES = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
_UNSYNCED: dict[str, Any] = {
    ("forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"): False
}
"""Buffers are made the same once an epoch; torch renamed the argument."""


def rank() -> int:
    """Which process this is, from 0."""
    return dist.get_rank() if _many() else 0


def size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if _many() else 1


def launched() -> int:
    """How many processes `torchrun` has started, before they know each other."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def elastic() -> bool:
    """Whether `torchrun` started this process, perhaps again: its count of restarts is not the same on all machines."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextlib.contextmanager
def group(device: str) -> Iterator[str]:
    """The processes that `torchrun` started, connected; gives each its device. Gloo on the CPU, NCCL on GPUs."""
    if launched() == 1 or dist.is_initialized():
        yield device
        return
    options: dict[str, Any] = {"backend": "gloo"}
    if torch.device(device).type == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
        options = {"backend": "nccl", "device_id": torch.device(device)}  # or a barrier guesses, and warns
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        options |= {"store": _fresh_store(), "rank": int(os.environ["RANK"]), "world_size": launched()}
    # Its functions take the group of the moment as a default argument, and keep it. DDP imports it; imported now, there
    # is none. A group that is kept has threads that outlive the interpreter, and abort when they free a tensor then.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group(**options)
    yield device
    gc.collect()  # a DDP module left in a cycle would keep the group's threads, too
    dist.destroy_process_group()  # not after an error: others may never come, and `torchrun` ends them


def _fresh_store() -> dist.Store:
    """`torchrun`'s store, under a name of this start's own.

    It outlives the processes, and with it the addresses of dead ones (pytorch issue 135712): a restart would connect to
    those. So the first process makes up a name, and tells it to whoever asks with a question never asked before.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, launched(), is_master=False)
    me, own = int(os.environ["RANK"]), uuid.uuid4().hex
    if me == 0:
        while store.add(f"egru/joined/{own}", 0) < launched() - 1:
            for other in range(1, launched()):
                if store.check([f"egru/question/{other}"]):
                    store.set(f"egru/answer/{store.get(f'egru/question/{other}').decode()}", own)
            time.sleep(0.02)
        return dist.PrefixStore(own, store)
    store.set(f"egru/question/{me}", own)
    name = store.get(f"egru/answer/{own}").decode()
    store.add(f"egru/joined/{name}", 1)
    return dist.PrefixStore(name, store)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Only the first process prints."""
    if int(os.environ.get("RANK", "0")) == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


@contextlib.contextmanager
def first_goes_first() -> Iterator[None]:
    """The others enter once the first process is through."""
    if rank() > 0:
        wait()
    yield
    if rank() == 0:
        wait()


def wait() -> None:
    """Until all processes are here."""
    if _many():
        dist.barrier()


def agreed(make: Callable[[], T]) -> T:
    """What ``make`` returns in the first process, in all of them."""
    if not _many():
        return make()
    made = [make() if rank() == 0 else None]
    dist.broadcast_object_list(made, src=0)
    return made[0]  # pyright: ignore[reportReturnType]


def shared(items: Iterable[T]) -> Iterable[T]:
    """``items`` as the first process draws them; by one process, drawn as they are asked for."""
    return agreed(lambda: list(items)) if _many() else items


def total(value: Tensor) -> Tensor:
    """The sum over all processes, where ``value`` is."""
    if not _many():
        return value
    whole = value.detach().to(_where(), copy=True)
    dist.all_reduce(whole)
    return whole.to(value.device)


def others(mine: T) -> list[T]:
    """What the other processes have for ``mine``."""
    if not _many():
        return []
    everyone: list[Any] = [None] * size()
    dist.all_gather_object(everyone, mine)
    return everyone[: rank()] + everyone[rank() + 1 :]


def reseed(seed: int, epoch: int) -> None:
    """Random numbers of their own for all but the first process, the same whenever the epoch is done again."""
    if rank() > 0:
        torch.manual_seed((seed * 1_000_003 + epoch) * 65_537 + rank())


def same_buffers(model: nn.Module) -> None:
    """Running averages of the first process for all: what it saves is what they judge by."""
    if _many():
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def parallel(model: nn.Module, objective: Callable[..., T], training: Training) -> Callable[..., T]:
    """``objective``, with the gradients of ``model`` averaged over all processes while it is differentiated."""
    if not _many():
        return objective
    if training.graph:
        raise ValueError("graph must be off where several processes train together")
    wrapped = nn.parallel.DistributedDataParallel(_Whole(model, objective), **_UNSYNCED)
    if training.exchange == "bfloat16":
        wrapped.register_comm_hook(None, _in_bfloat16)
    return wrapped


def _in_bfloat16(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Half the bytes. As torch's own hook of that kind, which insists on NCCL."""
    rounded = bucket.buffer().to(torch.bfloat16).div_(size())
    summed = dist.all_reduce(rounded, async_op=True)
    assert summed is not None
    return summed.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


class _Whole(nn.Module):
    """A model with its loss: DDP watches what goes through one forward."""

    def __init__(self, model: nn.Module, objective: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, *args: Any) -> Any:
        return self.objective(*args)


class Follower(Run):
    """A run as all but the first process see it: they read what it holds and write nothing."""

    def sweep(self) -> None:
        pass

    def save(self, *args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        pass

    def record(self, line: Mapping[str, Any]) -> None:
        pass

    def finish(self, result: Mapping[str, Any]) -> None:
        pass

    def restore(
        self, model: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device, scaler: torch.amp.GradScaler
    ) -> tuple[int, int]:
        epoch = self.newest()
        return epoch, self._load(epoch, model, optimiser, device, scaler)


def seat(run: Run) -> Run:
    """``run`` as this process may use it."""
    return run if rank() == 0 else Follower(run.folder, lambda said: None)


def _many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _where() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
