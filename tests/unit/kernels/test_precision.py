"""Accuracy against float64, given the selection: bounds follow from the dtype, none is tuned."""

from __future__ import annotations

import math

import pytest
import torch

from sparsify.kernels import reference_tiles, schemas
from tests._util.ops import KINDS, block_masks, causal, close, make, select

every_kind = pytest.mark.parametrize("kind", KINDS)
SIZES = {"keys": 300, "heads": 6, "groups": 2, "size": 64, "value_size": 64, "index_size": 32}


@pytest.fixture(params=["masked", "gathered"])
def form(request, monkeypatch):
    monkeypatch.setattr(reference_tiles, "_gather_is_less", lambda *_: request.param == "gathered")


def keep_of(lists, heads, block_size, keys):
    blocks = -(-keys // block_size)
    named = block_masks(lists, blocks, heads).repeat_interleave(block_size, -1)[..., :keys]
    return named & causal(lists.shape[2], keys)


def masked_dense(case, keep):
    """Eager attention under a mask, in the dtype of the case."""
    group = case["q"].shape[1] // case["k"].shape[1]
    k, v = (case[n].repeat_interleave(group, 1) for n in ("k", "v"))
    logits = (case["q"] @ k.mT) * case["q"].shape[-1] ** -0.5
    return logits.masked_fill(~keep, -math.inf).softmax(-1) @ v


@every_kind
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_given_the_selection_the_error_is_within_the_bound(kind, seed, dtype, bound, form):
    case = make(kind, seed=seed, dtype=dtype, **SIZES)
    lists = select(kind, case, 16, 4)
    qkv = (case["q"], case["k"], case["v"])
    out = schemas.block_attention(*qkv, lists, block_size=16)[0]
    exact = masked_dense({n: x.double() for n, x in case.items()}, keep_of(lists, 6, 16, 300))
    assert close(out, exact, bound)


@every_kind
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_at_most_twice_as_much_as_eager(kind, seed, dtype, form):
    case = make(kind, seed=seed, dtype=dtype, **SIZES)
    lists = select(kind, case, 16, 4)
    keep = keep_of(lists, 6, 16, 300)
    qkv = (case["q"], case["k"], case["v"])
    out = schemas.block_attention(*qkv, lists, block_size=16)[0]
    exact = masked_dense({n: x.double() for n, x in case.items()}, keep)
    eager = (masked_dense(case, keep).double() - exact).abs().max()
    assert out.dtype == dtype
    assert float((out.double() - exact).abs().max()) <= 2 * float(eager)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_log_sum_exp_is_float32_and_right(kind, dtype, form):
    case = make(kind, dtype=dtype, **SIZES)
    lists = select(kind, case, 16, 4)
    qkv = (case["q"], case["k"], case["v"])
    lse = schemas.block_attention(*qkv, lists, block_size=16)[1]
    k = case["k"].double().repeat_interleave(3, 1)
    logits = (case["q"].double() @ k.mT) / 8
    exact = logits.masked_fill(~keep_of(lists, 6, 16, 300), -math.inf).logsumexp(-1)
    assert lse.dtype == torch.float32
    assert close(lse, exact, 1e-6)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_selection_of_chunks_and_steps_is_that_of_the_prefill(kind, dtype):
    """Scores do not depend on the tile, so even rounded ones choose the same blocks."""
    case = make(kind, dtype=dtype, **SIZES)
    whole = select(kind, case, 16, 4)
    for first, last in ((0, 37), (150, 151), (160, 300), (299, 300)):
        part = {
            n: x[:, :, first:last] if n in ("q", "iq") else x[:, :, :last] for n, x in case.items()
        }
        lists = select(kind, part, 16, 4)
        assert torch.equal(lists, whole[:, :, first:last, : lists.shape[-1]])


@every_kind
def test_thread_count_changes_no_bit(kind):
    case = make(kind, dtype=torch.float32, **SIZES)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            lists = select(kind, case, 16, 4)
            qkv = (case["q"], case["k"], case["v"])
            results.append((lists, *schemas.block_attention(*qkv, lists, block_size=16)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
