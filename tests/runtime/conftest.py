"""Fixtures of several test files of the engine."""

from collections.abc import Iterator

import pytest
import torch

from egru import compiled


@pytest.fixture
def float32() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(params=["compiled", "reference"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "compiled":
        pytest.importorskip("egru._core", reason="the compiled core is not built")
    else:
        monkeypatch.setattr(compiled, "core", None)
        monkeypatch.setattr(compiled, "_warned", True)
    return request.param
