"""What the tests on a GPU share."""

import pytest
import torch


@pytest.fixture
def kernels_alone(monkeypatch):
    """The kernels or an error; never the reference in their place."""
    monkeypatch.setenv("SPARSIFY_IMPL", "triton")
    monkeypatch.delenv("SPARSIFY_DISABLE", raising=False)


@pytest.fixture(autouse=True)
def memory_given_back():
    """Several processes share a GPU: none keeps what a test took."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
