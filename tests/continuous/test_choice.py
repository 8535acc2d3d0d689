"""The choice of an engine."""

import dataclasses

import pytest
import torch

from egru import compiled
from egru.continuous import engines
from egru.continuous.options import ENGINE_NAMES, Options
from tests.continuous.networks import density, network


def test_names_of_engines_match_the_option():
    assert ("auto", *engines.names()) == ENGINE_NAMES
    assert all(engines.get(name).name == name for name in engines.names())


@pytest.mark.skipif(compiled.core is None, reason=f"no compiled core: {compiled.missing}")
def test_auto_selects_the_fastest_engine_that_supports_the_call():
    problem = network(0)
    assert engines.choose("auto", problem).name == "compiled"
    assert engines.choose("auto", problem, density).name == "compiled"
    on_meta = dataclasses.replace(problem, c0=torch.empty_like(problem.c0, device="meta"))
    assert engines.choose("auto", on_meta).name == "lockstep"


def test_named_engine_that_does_not_support_the_call_raises():
    problem = network(0, Options(nodes=40))
    with pytest.raises(ValueError, match=r"engine='compiled' cannot run this call: .*; use engine='auto'"):
        engines.choose("compiled", problem)
