"""Lists of blocks between the form of the ops and the form of the kernels."""

from __future__ import annotations

import pytest
import torch

from sparsify.kernels import reference
from sparsify.kernels.layout import Layout
from sparsify.kernels.lists import Given, public
from sparsify.kernels.placement import place
from tests._util.ops import make

BLOCK = 4
LAYOUTS = {
    "plain": {},
    "short keys": {"kv_len": [23, 11], "q_start": [0, -2]},
    "origin": {"block_origin": [5, 0]},
    "masked": {"key_mask": [[s % 7 != 3 and s > 2 for s in range(23)], [s < 9 for s in range(23)]]},
    "documents": {"cu_seqlens_q": [0, 5, 5, 14, 23]},
}


def lists_of(name, topk, queries=23):
    """The reference's lists and what the kernels are told of them."""
    batch = 1 if name == "documents" else 2
    case = make(batch=batch, queries=queries, keys=23)
    layout = Layout(**{n: torch.tensor(x) for n, x in LAYOUTS[name].items()})
    lists = reference.moba_select(case["q"], case["k"], layout, None, block_size=BLOCK, topk=topk)
    return lists, place(layout, batch, queries, 23, BLOCK)


def given(lists, *, block=BLOCK, placement=None, keys=23):
    lists = torch.as_tensor(lists, dtype=torch.int32)
    placement = placement or place(Layout(), lists.shape[0], lists.shape[2], keys, block)
    return Given(lists, placement, block)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("topk", [1, 2, 3, 5, 100])
def test_there_and_back(name, topk):
    lists, placement = lists_of(name, topk)
    batch, heads, queries, width = lists.shape
    chooser = given(lists, placement=placement)
    past, own = chooser.rows(0, batch * heads, 0, queries)
    assert past.dtype == torch.int32 and own.dtype == torch.int8
    assert past.shape == (batch * heads, queries, chooser.width)
    assert bool((past[..., chooser.chosen :] == -1).all())
    known = past.view(batch, heads, queries, -1)
    assert torch.equal(public(known, placement, queries, BLOCK, width), lists)
    listed = own.view(batch, heads, queries).bool()
    stands = True if placement.plain else placement.own_BT[:, None]
    assert bool((listed | ~torch.as_tensor(stands)).all())


def test_numbers_run_through_the_documents():
    """Blocks of a document begin behind those of the documents before it."""
    lists, placement = lists_of("documents", 3)
    past, own = given(lists, placement=placement).rows(0, 4, 0, 23)
    first = placement.first_BT[0]
    assert first.tolist() == [0] * 5 + [2] * 9 + [5] * 9
    known = past >= 0
    assert bool((past >= first[:, None])[known].all())
    assert bool((past < placement.end_BT[0][:, None])[known].all())
    assert bool(own.all())


@pytest.mark.parametrize("slices", [(0, 8, 0, 23), (3, 2, 5, 7), (7, 1, 22, 1), (2, 4, 0, 1)])
def test_slices_are_parts_of_the_whole(slices):
    lists, placement = lists_of("short keys", 3)
    chooser = given(lists, placement=placement)
    head, heads, first, count = slices
    whole, own = chooser.rows(0, 8, 0, 23)
    at = (slice(head, head + heads), slice(first, first + count))
    part, own_part = chooser.rows(*slices)
    assert torch.equal(part, whole[at]) and torch.equal(own_part, own[at])


@pytest.mark.parametrize(
    ("row", "past", "own"),
    [
        ([0, 2, 3, -1], {0, 2}, True),  # the query stands in block 3
        ([3, 2, 0, -1], {0, 2}, True),
        ([2, 2, 2, 2], {2}, False),
        ([3, 3, 1, 1], {1}, True),
        ([4, 5, 1, 3], {1}, True),  # ahead of the query, and beyond the keys
        ([4, 5, 2**31 - 1, 99], set(), False),
        ([-1, -7, -(2**31), 0], {0}, False),
        ([-1, -1, -1, -1], set(), False),
        ([-1, 1, -1, 3], {1}, True),
    ],
)
def test_entries_that_count(row, past, own):
    lists = torch.tensor(row)[None, None, None]
    placement = place(Layout(q_start=torch.tensor([13])), 1, 1, 23, BLOCK)
    for at in (placement, place(Layout(), 1, 1, 14, BLOCK)):
        rows, listed = given(lists, placement=at).rows(0, 1, 0, 1)
        found = rows[0, 0].tolist()
        named = [c for c in found if c >= 0]
        assert sorted(named) == sorted(past)
        assert found[len(named) :] == [-1] * (len(found) - len(named))
        assert bool(listed[0, 0]) == own


def test_the_first_block_of_the_next_document_is_not_a_block_of_this_one():
    """Numbers beyond a document's own blocks name nothing, though a neighbour has such a block."""
    layout = Layout(cu_seqlens_q=torch.tensor([0, 8, 16]))
    placement = place(layout, 1, 16, 16, BLOCK)
    lists = torch.full((1, 1, 16, 2), 2)
    rows, own = given(lists, placement=placement).rows(0, 1, 0, 16)
    assert bool((rows == -1).all()) and not bool(own.any())
    lists = torch.full((1, 1, 16, 2), 1)
    rows, own = given(lists, placement=placement).rows(0, 1, 0, 16)
    assert bool((rows == -1).all())
    assert own[0].tolist() == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4


def test_longer_lists_than_there_are_blocks():
    row = torch.tensor([5, 5, 1, 0, 1, 2, 0, 3, 2, 1])[None, None, None]
    chooser = given(row, keys=16)
    rows, own = chooser.rows(0, 1, 0, 1)
    assert chooser.chosen == 4 and chooser.width == 4
    assert [c for c in rows[0, 0].tolist() if c >= 0] == [0, 1, 2] and bool(own)


def test_lists_without_places():
    chooser = given(torch.zeros(1, 2, 3, 0), keys=9)
    rows, own = chooser.rows(0, 2, 0, 3)
    assert rows.shape == (2, 3, chooser.width)
    assert bool((rows == -1).all()) and not bool(own.any())


@pytest.mark.parametrize("name", ["plain", "short keys", "masked"])
def test_lists_are_counted_through_the_batch(name):
    """A slice of some lists and some queries is that part of all rows."""
    lists, placement = lists_of(name, 3)
    chooser, per_row = given(lists, placement=placement), lists.shape[1]
    rows, own = chooser.rows(0, 2 * per_row, 0, 23)
    for first, count in ((0, 1), (1, per_row), (per_row, 2)):
        some, some_own = chooser.rows(first, count, 5, 11)
        assert torch.equal(some, rows[first : first + count, 5:16])
        assert torch.equal(some_own, own[first : first + count, 5:16])
    assert not chooser.together


def test_queries_before_the_first_key_list_nothing():
    """`public` gives them no own block."""
    placement = place(Layout(), 1, 6, 4, BLOCK)
    past = torch.full((1, 1, 6, 4), -1, dtype=torch.int32)
    lists = public(past, placement, 6, BLOCK, 1)
    assert lists[0, 0, :, 0].tolist() == [-1, -1, 0, 0, 0, 0]


def test_public_lists_are_ascending_and_as_wide_as_asked():
    placement = place(Layout(), 1, 1, 30, BLOCK)
    past = torch.tensor([5, 0, 3, -1], dtype=torch.int32)[None, None, None]
    for width in (4, 5, 9):
        lists = public(past, placement, 1, BLOCK, width)
        assert lists.dtype == torch.int32
        assert lists[0, 0, 0].tolist() == [0, 3, 5, 7] + [-1] * (width - 4)
