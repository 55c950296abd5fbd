"""No launch asks for more programs than a GPU starts along the second and third axis of a grid."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from sparsify.kernels import accelerated
from sparsify.kernels.attend import cutting, forward
from sparsify.kernels.layout import Layout
from sparsify.kernels.select import moba, msa

LIMIT = 65_535
BATCH, HEADS, KEYS, SIZE = 1100, 64, 64, 16  # 70,400 lists
SIZES = {"block_size": 16, "topk": 2}


@contextlib.contextmanager
def grids():
    """The grids of all launches, which are not done."""
    found = []

    def record(self, *args, grid, warmup, **kwargs):
        found.append((self.fn.__name__, *grid))

    with mock.patch.object(JITFunction, "run", record):
        yield found


def assert_started(found, *names):
    assert set(names) <= {name for name, *_ in found}
    assert not beyond(found)


def beyond(found):
    """Kernels that a GPU would not start."""
    return {name for name, _, *sizes in found if max(sizes, default=0) > LIMIT}


def queries(count=1, heads=HEADS):
    return torch.empty(BATCH, heads, count, SIZE, dtype=torch.float16)


def keys(heads=HEADS):
    return torch.empty(1, 1, KEYS, SIZE, dtype=torch.float16).expand(BATCH, heads, -1, -1)


@pytest.mark.parametrize(
    ("few", "kernel"), [(32, "query_block_fwd_kernel"), (0, "small_block_fwd_kernel")]
)
def test_moba(few, kernel, monkeypatch):
    monkeypatch.setattr(forward, "FEW_QUERIES", few)
    with grids() as found:
        accelerated.moba_attention(queries(), keys(), keys(), Layout(), None, **SIZES)
    assert_started(found, "block_means_fwd_kernel", kernel, "combine_fwd_kernel")


@pytest.mark.parametrize("op", ["moba", "moba, dense", "msa"])
def test_calls_that_are_not_cut_ask_for_too_many(op, monkeypatch):
    for module in (cutting, forward, moba, msa):
        monkeypatch.setattr(module, "MOST_PROGRAMS", 10**9)
    x = (queries(17), keys(), keys())
    sizes = SIZES | {"topk": 100} if "dense" in op else SIZES
    with grids() as found:
        if op == "msa":
            accelerated.msa_attention(*x, queries(17), keys(), Layout(), **sizes)
        else:
            accelerated.moba_attention(*x, Layout(), None, **sizes)
    assert "combine_fwd_kernel" in beyond(found)


def test_lists_of_moba():
    with grids() as found:
        accelerated.moba_select(queries(), keys(1), Layout(), None, **SIZES)
    assert_started(found, "gate_exact_fwd_kernel")


def test_dense():
    with grids() as found:
        accelerated.moba_attention(
            queries(), keys(), keys(), Layout(), None, block_size=16, topk=100
        )
    assert_started(found, "combine_fwd_kernel", "combine_clean_fwd_kernel")


def test_msa():
    x = (queries(17), keys(), keys(), queries(17), keys())
    with grids() as found:
        accelerated.msa_attention(*x, Layout(), **SIZES)
    assert_started(found, "msa_scores_fwd_kernel", "combine_fwd_kernel")


def test_msa_of_few_queries():
    x = (queries(), keys(), keys(), queries(), keys())
    with grids() as found:
        accelerated.msa_attention(*x, Layout(), **SIZES)
    assert_started(found, "decode_score_fwd_kernel", "decode_attention_fwd_kernel")
