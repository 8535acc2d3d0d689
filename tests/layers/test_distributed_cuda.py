"""Under DistributedDataParallel on a GPU, gradients equal those of one process with the whole batch."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import egru

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

BATCH = 12
# Relative error of the norm. float32: order of summation. bfloat16: error of each gradient, as in test_cuda.py.
TOLERANCE = {"float32": 2e-5, "bfloat16": 1.5e-2}


def batch() -> Tensor:
    return torch.randn(9, BATCH, 5, generator=torch.Generator().manual_seed(1))


def gradients(layer: nn.Module, x: Tensor, precision: str) -> dict[str, Tensor]:
    """Return the gradients of a mean over sequences and steps: equal parts of a batch average to the whole."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        y, _ = layer(x)
    y.square().mean().backward()
    result = {}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        result[name.removeprefix("module.")] = parameter.grad.cpu()
    return result


def make_layer(device: str) -> egru.EGRU:
    torch.manual_seed(0)
    layer = egru.EGRU(5, 40, num_layers=2, reset_gate="after", surrogate=egru.Surrogate(width=0.6, height=0.5))
    return layer.to(device, torch.float32)


def worker(rank: int, world: int, backend: str, precision: str, device: str, folder: str) -> None:
    """Run one process with its part of the batch; all processes use the same device."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        layer = nn.parallel.DistributedDataParallel(make_layer(device))
        share = batch().chunk(world, 1)[rank].to(device)
        first = gradients(layer, share, precision)
        layer.zero_grad()
        second = gradients(layer, share, precision)  # the reducer must be ready for another round
        torch.save((first, second), f"{folder}/{rank}")
    finally:
        torch.distributed.destroy_process_group()


def compare(backend: str, world: int, precision: str, device: str, folder: Path) -> None:
    arguments = (world, backend, precision, device, str(folder))
    spawn(worker, arguments, nprocs=world)
    alone = gradients(make_layer(device), batch().to(device), precision)
    for rank in range(world):
        for result in torch.load(folder / str(rank)):
            assert result.keys() == alone.keys()
            for name, gradient in result.items():
                error = (gradient - alone[name]).norm() / alone[name].norm()
                assert error < TOLERANCE[precision], (rank, name, error)  # NaN fails too


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("backend", "world"), [("nccl", 1), ("gloo", 2)])
def test_data_parallel_gradients_equal_one_process(backend: str, world: int, precision: str, tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    compare(backend, world, precision, "cuda", tmp_path)
