"""Documents, padding, caches with room, empty rows and shapes.

Each test bears the number of its statement, which holds for both methods whatever the data; twins
show that it would fail for a neighbouring operator.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsify.kernels import schemas
from tests._util.invariants import BLOCK, KEYS, NAN, every_kind, out_of
from tests._util.ops import OF_KEYS, close, make, run, select


@every_kind
@given(lengths=st.lists(st.integers(0, 15), min_size=1, max_size=5))
@settings(max_examples=25, deadline=None)
def test_i27_packed_documents_equal_separate_runs(kind, lengths):
    total = sum(lengths)
    case = make(kind, seed=23, keys=total + 2)
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    packed = out_of(kind, case, 2, 4, cu_seqlens_q=edges)
    at = edges.tolist()
    for a, b in pairwise(at):
        document = {name: x[:, :, a:b] for name, x in case.items()}
        assert close(packed[:, :, a:b], out_of(kind, document, 2, 4))
    assert float(packed[:, :, total:].abs().max()) == 0


@every_kind
def test_i27_twin_one_long_document_differs(kind):
    case = make(kind, seed=23)
    edges = torch.tensor([0, 13, 14, 37], dtype=torch.int32)
    packed = out_of(kind, case, 2, cu_seqlens_q=edges)
    assert not close(packed, out_of(kind, case, 2), 1e-3)


@every_kind
@pytest.mark.parametrize("form", ["key_mask", "kv_len"])
@pytest.mark.parametrize("garbage", [NAN, math.inf, 1e30])
def test_i28_right_padding_changes_nothing(kind, form, garbage):
    case = make(kind, seed=24)
    pads = {n: torch.full_like(x[:, :, :5], garbage) for n, x in case.items()}
    padded = {n: torch.cat([x, pads[n]], 2) for n, x in case.items()}
    real = torch.arange(KEYS + 5)[None] < KEYS
    if form == "kv_len":
        where = {"kv_len": torch.tensor([KEYS]), "q_start": torch.tensor([0])}
    else:
        where = {"key_mask": real}
    assert close(out_of(kind, padded, **where)[:, :, :KEYS], out_of(kind, case))


@every_kind
def test_i29_left_padding_changes_nothing_unless_blocks_are_anchored_to_slots(kind):
    case = make(kind, seed=25)
    padded = {n: torch.cat([torch.full_like(x[:, :, :5], NAN), x], 2) for n, x in case.items()}
    where = {"key_mask": torch.arange(KEYS + 5)[None] >= 5}
    out = out_of(kind, padded, 2, **where)
    assert close(out[:, :, 5:], out_of(kind, case, 2))
    assert float(out[:, :, :5].abs().max()) == 0
    anchored = out_of(kind, padded, 2, block_origin=torch.tensor([0]), **where)
    assert not close(anchored[:, :, 5:], out_of(kind, case, 2), 1e-3)


@every_kind
def test_i31_rows_without_keys_give_nothing(kind):
    case = make(kind, seed=27, queries=12, keys=7)
    out, lse = run(kind, case, 4, 2)
    assert float(out[:, :, :5].abs().max()) == 0
    assert bool((lse[:, :, :5] == -math.inf).all())
    rest = {n: x[:, :, 5:] if n in ("q", "iq") else x for n, x in case.items()}
    assert close(out[:, :, 5:], out_of(kind, rest, 2, 4))


@every_kind
def test_i31_rows_without_keys_get_no_gradient_even_with_nan_inside(kind):
    case = make(kind, seed=27, queries=12, keys=7)
    case["q"][:, :, :5] = NAN
    leaves = {n: x.clone().requires_grad_() for n, x in case.items()}
    out = out_of(kind, leaves, 2, 4)
    grad = torch.ones_like(out)
    grad[:, :, :5] = NAN
    out.backward(grad)
    assert float(leaves["q"].grad[:, :, :5].abs().max()) == 0
    for name in ("q", "k", "v"):
        assert bool(leaves[name].grad.isfinite().all())


@every_kind
@pytest.mark.parametrize(
    ("batch", "queries", "keys", "groups"),
    [(0, 5, 5, 2), (1, 0, 5, 2), (1, 1, 1, 1), (2, 0, 0, 1), (1, 3, 0, 2), (2, 1, 6, 1)],
)
def test_i32_empty_and_tiny_shapes(kind, batch, queries, keys, groups):
    case = make(kind, batch=batch, queries=queries, keys=keys, groups=groups)
    leaves = {n: x.clone().requires_grad_() for n, x in case.items()}
    out, lse = run(kind, leaves, 2, 2)
    assert out.shape == (batch, 4, queries, 5)
    assert lse.shape == (batch, 4, queries)
    out.sum().backward()
    assert all(leaves[n].grad.shape == leaves[n].shape for n in ("q", "k", "v"))
    lists = select(kind, case, 2, 2)
    assert lists.shape[:3] == (batch, 4 if kind == "moba" else groups, queries)
    if keys == 1:
        assert close(out, case["v"].repeat_interleave(4 // groups, 1))


@every_kind
def test_i35_garbage_behind_the_cache_length_is_never_read(kind):
    case = make(kind, seed=30, queries=3)
    room = {n: torch.full_like(case[n], NAN).repeat(1, 1, 2, 1) for n in OF_KEYS}
    for name in OF_KEYS:
        room[name][:, :, :KEYS] = case[name]
    out = out_of(kind, dict(case, **room), kv_len=torch.tensor([KEYS]))
    assert close(out, out_of(kind, case))


@every_kind
@pytest.mark.parametrize("queries", [1, KEYS])
def test_i35_sentinels_anywhere_in_a_list_have_no_effect(kind, queries):
    case = make(kind, seed=30, queries=queries)
    qkv = (case["q"], case["k"], case["v"])
    lists = select(kind, case, BLOCK, 3)
    expected = schemas.block_attention(*qkv, lists, block_size=BLOCK)[0]
    front = torch.cat([torch.full_like(lists[..., :2], -1), lists], -1)
    twice = torch.cat([lists, lists], -1)
    wild = torch.cat([torch.full_like(lists[..., :1], 1000), lists.flip(-1)], -1)
    for other in (front, twice, wild):
        assert close(schemas.block_attention(*qkv, other, block_size=BLOCK)[0], expected)
    nothing = schemas.block_attention(*qkv, torch.full_like(lists, -1), block_size=BLOCK)
    assert float(nothing[0].abs().max()) == 0
    assert bool((nothing[1] == -math.inf).all())
