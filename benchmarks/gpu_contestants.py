"""The layers a GPU benchmark compares, behind the same few calls: one round, and what it keeps for its backward."""

import gc
from collections.abc import Iterator
from typing import Any

import gpu_check
import torch
from torch import Tensor, nn

import egru
from egru.events import Surrogate

SURROGATE = Surrogate(width=0.5, height=0.3, bounded=True)
CUDNN = {"gru": nn.GRU, "lstm": nn.LSTM}


class Contestant:
    """A layer on random input: float32 parameters under autocast, or (``native``) of the precision themselves."""

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
        # Made once, as around a whole model: making one takes longer than entering it.
        self.autocast = gpu_check.autocast("cuda", "float32" if native else precision)

    def forward(self, train: bool) -> Tensor:
        gpu_check.set_tf32(self.precision)
        with torch.set_grad_enabled(train), self.autocast:
            return self.layer(self.x)[0]

    def __call__(self) -> None:
        """One round: forward, and backward from a random gradient where the row trains."""
        y = self.forward(self.train)
        if not self.train:
            return
        if self.grad is None:
            self.grad = torch.randn_like(y) * 1e-3
        self.forget()
        y.backward(self.grad)

    def forget(self) -> None:
        self.layer.zero_grad(set_to_none=True)
        self.x.grad = None

    def memory(self) -> dict[str, Any]:
        """Bytes after a forward pass that will be differentiated, beyond parameters and input.

        ``held`` stays until the backward pass, the output included; ``peak`` is the most during the call; ``saved``
        lists what the graph holds, by shape and type, again without parameters and input.
        """
        self.forward(True)  # handles, compiled kernels and workspaces are there from here on
        self.forget()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = self.forward(True)
        torch.cuda.synchronize()
        held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        output = y.numel() * y.element_size()
        del y

        own = {t.untyped_storage().data_ptr() for t in (self.x, *self.layer.parameters(), *self.layer.buffers())}
        saved: dict[int, tuple[int, str]] = {}
        alive: list[Tensor] = []  # no address is used twice; returned instead, an output would keep itself alive

        def note(tensor: Tensor) -> None:
            alive.append(tensor.detach())
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kind = str(tensor.dtype).removeprefix("torch.")
                saved[storage.data_ptr()] = (storage.nbytes(), f"{'x'.join(map(str, tensor.shape))} {kind}")

        with torch.autograd.graph.saved_tensors_hooks(note, lambda _: None):
            self.forward(True)
        listed = [f"{what}, {size} bytes" for size, what in sorted(saved.values(), reverse=True)]
        return {"held": held, "peak": peak, "output": output, "saved": listed}


def aligned(size: int) -> int:
    """The next size at which cuDNN is at its best: the multiple of 64 above, but for the single-feature input."""
    return size if size == 1 else -(-size // 64) * 64


def make_egru(inputs: int, H: int, reset_gate: str, lean: bool = False) -> egru.EGRU:
    torch.manual_seed(0)
    return egru.EGRU(inputs, H, reset_gate=reset_gate, surrogate=SURROGATE, lean=lean, device="cuda")


def cudnn(
    kind: str, precision: str, T: int, B: int, inputs: int, H: int, train: bool, input_gradient: bool
) -> Iterator[tuple[str, Contestant]]:
    """cuDNN's layer at the exact and, where that is another one, at the aligned size; the exact one under autocast."""
    sizes = {"exact": (inputs, H), "aligned": (aligned(inputs), aligned(H))}
    if sizes["aligned"] == sizes["exact"]:
        del sizes["aligned"]
    if gpu_check.low_type(precision) != torch.float32:
        sizes["autocast"] = sizes["exact"]
    for name, (features, units) in sizes.items():
        layer = CUDNN[kind](features, units)
        yield (
            f"cudnn {kind} {precision} {name}",
            Contestant(layer, (T, B, features), precision, train, input_gradient, native=name != "autocast"),
        )
