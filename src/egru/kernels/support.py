"""Which options each kernel runs, for ``egru doctor``. Needs no device."""

import dataclasses
from typing import Any, NamedTuple

import torch

from egru.events import Surrogate
from egru.kernels.problem import Problem
from egru.kernels.registry import info, unsupported_options
from egru.kernels.sequence import TRANSFORMS

KERNELS = tuple(name for name in info() if name != "reference")
"""The fast kernels. The reference, in plain torch, runs everything that they decline."""


class Support(NamedTuple):
    """One row of the table.

    Attributes:
        option: The option in words.
        declined: Per kernel, why it does not run the option, or None if it does.
    """

    option: str
    declined: dict[str, str | None]


def support() -> list[Support]:
    """Return which options each of :data:`KERNELS` runs on its device, and why it declines the others."""
    rows = [
        Support(option, {name: unsupported_options(name, problem) for name in KERNELS})
        for option, problem in _problems().items()
    ]
    return [*rows, Support("torch.func, forward-mode derivatives", dict.fromkeys(KERNELS, TRANSFORMS))]


def _problems() -> dict[str, Problem]:
    plain = _problem(torch.float32)

    def change(**options: Any) -> Problem:
        return dataclasses.replace(plain, **options)

    return {
        "default": plain,
        "events='signed'": change(events="signed"),
        "events='delta'": change(events="delta", reset="none", reset_gate="after"),
        "lean": change(lean=True),
        "zoneout": change(keep=torch.zeros(())),
        "packed sequences": change(lengths=torch.ones(1, dtype=torch.int64)),
        "reset_scale per unit": change(reset_scale=torch.ones(1)),
        "reset_scale per unit, reset='none'": change(reset_scale=torch.ones(1), reset="none"),
        "recurrent_clip, training": change(recurrent_clip=1.0),
        "surrogates other than 'triangle'": change(surrogate=Surrogate(shape="rectangle")),
        "autocast to bfloat16 or float16": change(precision="bfloat16"),
        "ELSTM": _problem(torch.float32, gates=4, cell="lstm"),
        "float64 parameters": _problem(torch.float64),
        "bfloat16 or float16 parameters": _problem(torch.bfloat16),
    }


def _problem(dtype: torch.dtype, gates: int = 3, **options: Any) -> Problem:
    """Return a problem with the default options: one step of one unit."""
    one, weight = torch.zeros(1, 1, dtype=dtype), torch.zeros(gates, 1, dtype=dtype)
    return Problem(
        input=one[None],
        c0=one,
        y0=one,
        weight_ih=weight,
        weight_hh=weight,
        bias_ih=None,
        bias_hh=None,
        theta=one[0],
        reset_scale=torch.ones((), dtype=dtype),
        keep=None,
        lengths=None,
        reset="output",
        reset_gate="before",
        surrogate=Surrogate(),
        precision="",
        **options,
    )
