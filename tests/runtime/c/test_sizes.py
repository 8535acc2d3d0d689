"""The pruned sMNIST model fits a microcontroller: flash and RAM of the linked program."""

import subprocess
from pathlib import Path

import pytest
import torch

import egru
from egru.compress import prune
from egru.runtime import export_c
from tests.helpers import mnist_sample
from tests.runtime.c.targets import PACKAGES, TARGETS

TARGET = TARGETS["cortex-m4f"]
STACK = 4096
"""Bytes left for the stack: a step needs about 2 KiB."""
MAIN = """
#include "model.h"

void emit(uint32_t word);
void run(void);

static model_state state;

void run(void)
{
    float pixel = 0.5f, scores[MODEL_OUTPUTS];
    emit((uint32_t)model_step(&state, &pixel, scores));
}
"""


@pytest.fixture(scope="module")
def model() -> egru.models.SequenceClassifier:
    """The shipped model without the 40 % least active units."""
    if TARGET.missing:
        pytest.skip(f"requires {', '.join(TARGET.missing)} (apt-get install {PACKAGES})")
    torch.set_default_dtype(torch.float32)
    model = egru.pretrained("smnist").eval()
    with torch.no_grad(), egru.ActivityMonitor(model) as monitor:
        model(mnist_sample().x[:1])
    return prune(model, monitor.summary(), share=0.4)


def memory(model: egru.models.SequenceClassifier, folder: Path) -> tuple[int, int]:
    """Return the bytes of flash and RAM of a program that runs the model with int8 weights."""
    source = export_c(model, folder, "int8")[1]
    (folder / "main.c").write_text(MAIN)
    TARGET.build([source, folder / "main.c"], folder / "program")
    assert TARGET.output(folder / "program") == ["00000000"]
    output = subprocess.run(["arm-none-eabi-size", "-A", str(folder / "program")], capture_output=True, text=True)
    lines = [line.split() for line in output.stdout.splitlines() if line.startswith(".")]
    sizes = {name: int(size) for name, size, _ in lines}
    return sizes[".text"] + sizes.get(".ARM.exidx", 0), sizes[".bss"] + STACK


def test_the_pruned_model_fits_512_kib_of_flash_and_32_kib_of_ram(model, tmp_path: Path) -> None:
    assert model.layers[0].hidden_size == 354
    flash, ram = memory(model, tmp_path)
    assert 360 * 1024 < flash < 512 * 1024
    assert ram < 32 * 1024


def test_sparse_weights_fit_256_kib_of_flash(model, tmp_path: Path) -> None:
    weight = model.layers[0].get_parameter("weight_hh_l0")
    dense = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(weight.abs() > weight.abs().flatten().kthvalue(int(0.6 * weight.numel())).values)
    try:
        flash, ram = memory(model, tmp_path)
    finally:
        weight.data.copy_(dense)
    assert flash < 256 * 1024
    assert ram < 32 * 1024
