"""What the tests on a GPU share."""

import pytest


@pytest.fixture
def kernels_alone(monkeypatch):
    """The kernels or an error; never the reference in their place."""
    monkeypatch.setenv("SPARSIFY_IMPL", "triton")
    monkeypatch.delenv("SPARSIFY_DISABLE", raising=False)
