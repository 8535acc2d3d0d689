"""Defaults of every test: float64, a fixed seed, one thread, uninitialised memory filled with NaN."""

import os
import signal

import hypothesis
import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires it for deterministic results
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell starts its children with SIGINT ignored
examples = os.environ.get("EGRU_EXAMPLES")  # a number of new random examples, in place of the same 40 in every run
hypothesis.settings.register_profile(
    "egru",
    deadline=None,
    max_examples=int(examples or 40),
    derandomize=examples is None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # depends on the load of the machine
)
hypothesis.settings.load_profile("egru")


@pytest.fixture(autouse=True)
def defaults():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a second thread would only wait: tensors are small
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)  # also fills the memory of torch.empty with NaN
    assert torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if not os.environ.get("EGRU_DATA"):
        skip = pytest.mark.skip(reason="requires the published data files: set EGRU_DATA to their folder")
        for item in items:
            if item.get_closest_marker("data"):  # not item.keywords, which contains the folder name tests/data
                item.add_marker(skip)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="requires a CUDA device")
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(skip)
