"""The layers that the GPU benchmark compares, with one interface: run a round, measure memory."""

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import egru
from egru.bench import gpu_check
from egru.events import Surrogate
from egru.types import ResetGate

SURROGATE = Surrogate(width=0.5, height=0.3, bounded=True)
CUDNN = {"gru": nn.GRU, "lstm": nn.LSTM}


class Contestant:
    """A layer and its random input. Parameters are float32 under autocast, or of the given precision if ``native``."""

    def __init__(
        self,
        layer: nn.Module,
        shape: tuple[int, int, int],
        precision: str,
        train: bool,
        input_gradient: bool,
        native: bool = False,
    ) -> None:
        self.precision, self.train = precision, train
        dtype = gpu_check.low_type(precision) if native else torch.float32
        self.layer = layer.to("cuda", dtype)
        if isinstance(self.layer, nn.RNNBase):
            self.layer.flatten_parameters()
        self.x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=input_gradient and train)
        self.grad: Tensor | None = None
        # Created once, as around a whole model: creating it takes longer than entering it.
        self.autocast = gpu_check.autocast("cuda", "float32" if native else precision)

    def forward(self, train: bool) -> Tensor:
        gpu_check.set_tf32(self.precision)
        with torch.set_grad_enabled(train), self.autocast:
            return self.layer(self.x)[0]

    def __call__(self) -> None:
        """Run one round: the forward pass and, when training, the backward pass from a random gradient."""
        y = self.forward(self.train)
        if not self.train:
            return
        if self.grad is None:
            self.grad = torch.randn_like(y) * 1e-3
        self.clear_gradients()
        y.backward(self.grad)

    def clear_gradients(self) -> None:
        self.layer.zero_grad(set_to_none=True)
        self.x.grad = None

    def memory(self) -> dict[str, Any]:
        """Return the bytes that a forward pass in training needs, without parameters and input.

        ``held`` is what remains allocated until the backward pass, including the output. ``peak`` is the maximum during
        the call. ``saved`` lists the shapes and dtypes of the tensors that autograd saves.
        """
        self.forward(True)  # warm-up: creates handles, kernels and workspaces
        self.clear_gradients()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = self.forward(True)
        torch.cuda.synchronize()
        held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        output = y.numel() * y.element_size()
        del y

        excluded = {t.untyped_storage().data_ptr() for t in (self.x, *self.layer.parameters(), *self.layer.buffers())}
        saved: dict[int, tuple[int, str]] = {}
        alive: list[Tensor] = []  # so that no address is used twice; returning the output itself would be a cycle

        def save(tensor: Tensor) -> None:
            alive.append(tensor.detach())
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in excluded:
                dtype = str(tensor.dtype).removeprefix("torch.")
                saved[storage.data_ptr()] = (storage.nbytes(), f"{'x'.join(map(str, tensor.shape))} {dtype}")

        unpack: Any = lambda _: None  # noqa: E731  # not called without a backward pass
        with torch.autograd.graph.saved_tensors_hooks(save, unpack):
            self.forward(True)
        listed = [f"{description}, {size} bytes" for size, description in sorted(saved.values(), reverse=True)]
        return {"held": held, "peak": peak, "output": output, "saved": listed}


def aligned(size: int) -> int:
    """Return the next multiple of 64, the sizes at which cuDNN is fastest. A single input stays as it is."""
    return size if size == 1 else -(-size // 64) * 64


def make_egru(inputs: int, H: int, reset_gate: ResetGate, lean: bool = False) -> egru.EGRU:
    torch.manual_seed(0)
    return egru.EGRU(inputs, H, reset_gate=reset_gate, surrogate=SURROGATE, lean=lean, device="cuda")


def cudnn(
    cell: str, precision: str, T: int, B: int, inputs: int, H: int, train: bool, input_gradient: bool
) -> Iterator[tuple[str, Contestant]]:
    """Yield cuDNN's layer at the exact size, at the aligned size if it differs, and under autocast."""
    sizes = {"exact": (inputs, H), "aligned": (aligned(inputs), aligned(H))}
    if sizes["aligned"] == sizes["exact"]:
        del sizes["aligned"]
    if gpu_check.low_type(precision) != torch.float32:
        sizes["autocast"] = sizes["exact"]
    for name, (features, units) in sizes.items():
        layer = CUDNN[cell](features, units)
        yield (
            f"cudnn {cell} {precision} {name}",
            Contestant(layer, (T, B, features), precision, train, input_gradient, native=name != "autocast"),
        )
