"""Kernels run on the CPU by Triton's interpreter, to be asked for before triton is imported.

`tests/unit/kernels/test_interpreted.py` runs this folder in processes of their own; in any other
process there is nothing to collect here.
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config):
    # The interpreter computes with numpy, which warns of what a GPU does silently.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter():
    from tests._util.quick_interpreter import quick

    with quick():
        yield


def _choose(monkeypatch, by_block):
    """Tiles of few queries: the interpreter sorts slowly."""
    from sparsify.kernels.attend import forward
    from sparsify.kernels.select import reverse_index

    monkeypatch.setattr(forward, "FEW_QUERIES", 0 if by_block else 10**9)
    monkeypatch.setattr(reverse_index, "tile_queries", lambda *_: 16)


@pytest.fixture(autouse=True)
def quick_reductions(monkeypatch):
    """The interpreter reduces number by number where it does not know the function: numpy does
    MSA's maxima, in which NaN wins, and what sorting needs. Gives the interpreter's own way."""
    import numpy
    from triton.language import standard
    from triton.runtime.interpreter import ReduceOps

    from sparsify.kernels.select.msa_scores import largest

    own = ReduceOps.apply_impl
    known = [(largest, numpy.maximum), (standard._xor_combine, numpy.bitwise_xor)]

    def apply(self, x):
        for combine, function in known:
            if self.combine_fn is combine and self.axis is not None:
                (x,) = x
                data = x.handle.data
                found = function.reduce(data, axis=self.axis, keepdims=self.keep_dims)
                return self.to_tensor(found, x.dtype)
        return own(self, x)

    monkeypatch.setattr(ReduceOps, "apply_impl", apply)
    return own


@pytest.fixture(params=["by query", "by block"])
def path(request, monkeypatch):
    """Both ways to attend past blocks: the one of few queries, and the one of many."""
    _choose(monkeypatch, request.param == "by block")
    return request.param


@pytest.fixture
def by_block(monkeypatch):
    """Attend past blocks as with many queries."""
    _choose(monkeypatch, True)


@pytest.fixture(params=["by query", "by block", "by block, float16"])
def form(request, monkeypatch):
    """The kernels that attend past blocks; gives the dtype."""
    import torch

    _choose(monkeypatch, "block" in request.param)
    return torch.float16 if "16" in request.param else torch.float32
