"""Positions as tensors (`place`), against the host's arithmetic (`layout.sequences`)."""

from __future__ import annotations

import random

import pytest
import torch

from sparsify.kernels.layout import Layout, sequences
from sparsify.kernels.placement import place

TRIALS = 60


def cumulative(lengths):
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def batch_layout(pick):
    """Rows of a batch with any of the tensors that may come."""
    batch, queries, keys = pick.randint(1, 3), pick.randint(1, 20), pick.randint(1, 30)
    given = {}
    if pick.random() < 0.5:
        given["kv_len"] = torch.tensor([pick.randint(0, keys) for _ in range(batch)])
    if pick.random() < 0.5:
        given["q_start"] = torch.tensor([pick.randint(-3, keys + 1) for _ in range(batch)])
    if pick.random() < 0.5:
        given["block_origin"] = torch.tensor([pick.randint(0, keys) for _ in range(batch)])
    if pick.random() < 0.5:
        given["key_mask"] = torch.tensor([[pick.random() < 0.8] * keys for _ in range(batch)])
        holes = torch.tensor([[pick.random() < 0.7 for _ in range(keys)] for _ in range(batch)])
        given["key_mask"] = given["key_mask"] & holes
    return Layout(**given), batch, queries, keys


def packed_layout(pick):
    """Packed documents, some of them empty, some with room behind."""
    documents = pick.randint(1, 5)
    q_lens = [pick.randint(0, 6) for _ in range(documents)]
    k_lens = [pick.randint(0, 9) for _ in range(documents)]
    queries, keys = max(1, sum(q_lens) + pick.randint(0, 2)), max(1, sum(k_lens))
    given = {"cu_seqlens_q": cumulative(q_lens), "cu_seqlens_k": cumulative(k_lens)}
    if pick.random() < 0.3:
        del given["cu_seqlens_k"]
        k_lens, keys = q_lens, queries
    if pick.random() < 0.4:
        given["key_mask"] = torch.tensor([[pick.random() < 0.5 for _ in range(keys)]])
    for name, low, high in (("kv_len", 0, 0), ("q_start", -2, 2), ("block_origin", 0, 0)):
        if pick.random() < 0.4:
            given[name] = torch.tensor([pick.randint(low, n + high) for n in k_lens])
    return Layout(**given), 1, queries, keys


def expected_rows(layout, batch, queries, keys, block):
    """Per batch row and query: its past blocks (first slot, slots), and what it sees of its own."""
    rows = {}
    for s in sequences(batch, queries, keys, layout):
        blocks = -(-s.keys // block)
        for i in range(s.queries):
            position = s.start + i
            if position < 0:
                continue
            own = position // block
            past = [
                (s.k_from + c * block, min(block, s.keys - c * block))
                for c in range(min(own, blocks))
            ]
            seen = range(s.k_from + own * block, s.k_from + min(position + 1, s.keys))
            rows[s.batch, s.q_from + i] = (past, list(seen), own < blocks)
    return rows


def placed_rows(placement, batch, queries):
    """The same read from a placement."""
    rows = {}
    for b in range(batch):
        table = list(zip(placement.slot_BN[b].tolist(), placement.keys_BN[b].tolist(), strict=True))
        for t in range(queries):
            first, end = int(placement.first_BT[b, t]), int(placement.end_BT[b, t])
            seen = range(int(placement.lo_BT[b, t]), int(placement.hi_BT[b, t]))
            rows[b, t] = (table[first:end], list(seen), bool(placement.own_BT[b, t]))
    return rows


@pytest.mark.parametrize("make", [batch_layout, packed_layout])
@pytest.mark.parametrize("seed", range(3))
def test_rows_see_what_the_host_says(make, seed):
    pick = random.Random(seed)
    compared = 0
    for _ in range(TRIALS):
        layout, batch, queries, keys = make(pick)
        block = pick.randint(1, 9)
        placement = place(layout, batch, queries, keys, block)
        if placement.plain:
            continue
        expected = expected_rows(layout, batch, queries, keys, block)
        for at, found in placed_rows(placement, batch, queries).items():
            assert found == expected.get(at, ([], [], False)), (layout, at, block)
            compared += 1
    assert compared > TRIALS


@pytest.mark.parametrize("make", [batch_layout, packed_layout])
def test_blocks_hold_a_real_key_where_the_mask_says(make):
    pick = random.Random(7)
    hidden = 0
    for _ in range(2 * TRIALS):
        layout, batch, queries, keys = make(pick)
        placement = place(layout, batch, queries, keys, block_size=pick.randint(1, 5))
        if layout.key_mask is None:
            assert placement.real_BN is None
            continue
        for b in range(batch):
            for c in range(placement.blocks):
                slot, slots = int(placement.slot_BN[b, c]), int(placement.keys_BN[b, c])
                holds = bool(layout.key_mask[b, slot : slot + slots].any())
                assert bool(placement.real_BN[b, c]) == holds
                hidden += slots > 0 and not holds
    assert hidden


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 20), (20, 3), (1, 1), (0, 4), (4, 0)])
def test_plain_calls_have_no_tensors(queries, keys):
    placement = place(Layout(), 2, queries, keys, 4)
    assert placement.plain
    assert placement.start == keys - queries
    assert placement.blocks == -(-keys // 4)
    assert not any(isinstance(x, torch.Tensor) for x in placement)


def test_pages_alone_are_plain():
    assert place(Layout(page_table=torch.zeros(2, 3, dtype=torch.int32)), 2, 1, 12, 4).plain


@pytest.mark.parametrize("name", ["q_start", "kv_len", "key_mask", "block_origin"])
def test_any_other_tensor_makes_a_call_not_plain(name):
    values = torch.ones(1, 9, dtype=torch.bool) if name == "key_mask" else torch.tensor([2])
    placement = place(Layout(**{name: values}), 1, 5, 9, 4)
    assert not placement.plain
    assert placement.first_BT.dtype == placement.slot_BN.dtype == torch.int32
    assert placement.own_BT.dtype == torch.bool


WILD = (-(2**31), -7, -1, 0, 3, 100, 2**31 - 1)


@pytest.mark.parametrize("name", ["q_start", "kv_len", "block_origin"])
@pytest.mark.parametrize("value", WILD)
def test_values_that_describe_no_layout_reach_nothing_outside(name, value):
    """What `sequences` refuses (the host does not see it here) stays within the tensors."""
    placement = place(Layout(**{name: torch.tensor([value, 5])}), 2, 6, 9, 4)
    assert_inside(placement, 9)


@pytest.mark.parametrize(
    "borders", [[0, -3, 9], [0, 7, 2, 9], [5, 5, 100], [-1, -1, -1], [0, 2**31 - 1]]
)
def test_borders_that_describe_no_documents_reach_nothing_outside(borders):
    for dtype in (torch.int32, torch.int64):
        placement = place(Layout(cu_seqlens_q=torch.tensor(borders, dtype=dtype)), 1, 9, 9, 4)
        assert_inside(placement, 9)


def assert_inside(placement, keys):
    first, end, lo, hi = placement[2:6]
    assert bool((first >= 0).all() and (end >= first).all() and (end <= placement.blocks).all())
    sees = hi > lo
    assert bool((lo[sees] >= 0).all() and (hi[sees] <= keys).all())
    slot, slots = placement.slot_BN, placement.keys_BN
    full = slots > 0
    assert bool((slots >= 0).all() and (slots <= 4).all())
    assert bool((slot[full] >= 0).all() and ((slot + slots)[full] <= keys).all())


def test_negative_lengths_count_as_none():
    clamped = place(Layout(kv_len=torch.tensor([-5]), q_start=torch.tensor([0])), 1, 3, 9, 4)
    empty = place(Layout(kv_len=torch.tensor([0]), q_start=torch.tensor([0])), 1, 3, 9, 4)
    for a, b in zip(clamped, empty, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


LAYOUTS = {
    "lengths": {"kv_len": [7, 9], "q_start": [1, 2], "block_origin": [0, 1]},
    "documents": {"cu_seqlens_q": [0, 2, 2, 6]},
    "masked": {"key_mask": [[True] * 9, [False] * 4 + [True] * 5]},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_value_is_read_by_the_host(name):
    """A tensor on the meta device has no values, so reading one would be an error."""
    given = {n: torch.tensor(x, device="meta") for n, x in LAYOUTS[name].items()}
    batch = 1 if name == "documents" else 2
    meta = place(Layout(**given), batch, 6, 9, 4)
    real = place(Layout(**{n: torch.tensor(x) for n, x in LAYOUTS[name].items()}), batch, 6, 9, 4)
    for a, b in zip(meta, real, strict=True):
        if isinstance(a, torch.Tensor):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
        else:
            assert a == b


@pytest.mark.parametrize("sizes", [(0, 3, 9), (2, 0, 9), (2, 3, 0), (0, 0, 0)])
def test_nothing_to_place(sizes):
    batch, queries, keys = sizes
    placement = place(Layout(kv_len=torch.full((batch,), keys)), batch, queries, keys, 4)
    assert placement.first_BT.shape == (batch, queries)
    assert placement.slot_BN.shape == (batch, placement.blocks)


def test_no_documents():
    placement = place(Layout(cu_seqlens_q=torch.tensor([0])), 1, 3, 3, 4)
    assert not bool(placement.own_BT.any())
    assert torch.equal(placement.lo_BT, placement.hi_BT)
