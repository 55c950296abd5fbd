"""Attention over lists that the query heads of a key group share, against the float64 reference."""

from __future__ import annotations

import math

import pytest
import torch

from sparsify.kernels import accelerated
from sparsify.kernels.attend import cutting, forward
from sparsify.kernels.layout import Layout
from sparsify.kernels.select import reverse_index
from tests._util.parity import Inputs, assert_attention, error, expected, inputs

NAN, INF = math.nan, math.inf
BLOCK = 7


def listed(x, lists, block=BLOCK, *, layout=None, **options):
    return accelerated.block_attention(*x, lists, layout or Layout(), block_size=block, **options)


def random_lists(x, places=5, *, most=9, seed=1):
    """One list per key group; entries may be none, repeated, ahead or beyond the keys."""
    shape = (x.q.shape[0], x.k.shape[1], x.q.shape[2], places)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, most, shape, generator=generator, dtype=torch.int32)


def check(x, lists=None, block=BLOCK, *, layout=None, **options):
    lists = random_lists(x) if lists is None else lists
    got = listed(x, lists, block, layout=layout, **options)
    assert_attention(got, lists, x, block, layout=layout, scale=options.get("scale"))
    return got


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 1), (4, 2), (7, 1), (14, 2), (8, 1)])
def test_shares(heads, groups, form):
    check(inputs(heads=heads, groups=groups, queries=6, keys=50, dtype=form))


@pytest.mark.parametrize(("heads", "groups"), [(16, 1), (32, 2), (24, 1), (32, 1)])
def test_shares_of_a_whole_tile_and_more(heads, groups, path):
    check(inputs(heads=heads, groups=groups, queries=5, keys=40))


@pytest.mark.parametrize("block", [1, 16, 96, 130, 256])
def test_blocks(block, form):
    x = inputs(heads=8, groups=2, queries=5, keys=3 * block + 2, dtype=form)
    check(x, random_lists(x, most=4), block)


@pytest.mark.parametrize(("size", "value_size"), [(16, 24), (80, 40), (130, 16), (16, 130)])
def test_head_sizes(size, value_size, form):
    check(inputs(heads=4, queries=5, keys=30, size=size, value_size=value_size, dtype=form))


@pytest.mark.parametrize("scale", [0.7, 1e-3])
def test_scale(scale, path):
    check(inputs(heads=4, queries=5, keys=40), scale=scale)


@pytest.mark.parametrize("heads", [2, 16])
def test_every_list_of_its_own_equals_the_shared_one(heads, path):
    """Lists repeated per head go through the kernels of one head per list."""
    x = inputs(heads=heads, queries=5, keys=40)
    lists = random_lists(x)
    own = listed(x, lists.repeat_interleave(heads, 1))
    for a, b in zip(listed(x, lists), own, strict=True):
        assert error(a, b) < 1e-6


def test_groups_with_other_lists_differ(path):
    """The comparison itself: the lists of the other group give another output."""
    x = inputs(heads=4, groups=2, queries=5, keys=40)
    lists = torch.tensor([[0, 5], [2, 5]], dtype=torch.int32)[None, :, None].expand(1, 2, 5, 2)
    layout = Layout(q_start=torch.tensor([35]))
    got = listed(x, lists.contiguous(), layout=layout)[0]
    want = expected(lists.flip(1), x, BLOCK, layout=layout)[0]
    assert error(got, want) > 1e-2
    check(x, lists.contiguous(), layout=layout)


LAYOUTS = {
    "lengths": {"kv_len": [30, 43], "q_start": [3, 38], "block_origin": [2, 0]},
    "before the first key": {"q_start": [-4, 20]},
    "behind the last key": {"kv_len": [9, 0], "q_start": [25, 1]},
    "left padding": {"key_mask": [[s >= 5 for s in range(43)], [s >= 42 for s in range(43)]]},
    "holes": {"key_mask": [[s % 9 < 4 for s in range(43)], [False] * 43]},
    "documents": {"cu_seqlens_q": [0, 3, 3, 7], "cu_seqlens_k": [0, 17, 20, 43]},
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("block", [4, 140])
def test_layouts(name, block, path):
    layout = Layout(**{n: torch.tensor(x) for n, x in LAYOUTS[name].items()})
    batch = 1 if name == "documents" else 2
    x = inputs(batch=batch, heads=6, groups=2, queries=7, keys=43)
    check(x, random_lists(x, 4), block, layout=layout)


def test_documents_of_a_whole_prefill(by_block):
    x = inputs(heads=4, groups=2, keys=70)
    layout = Layout(cu_seqlens_q=torch.tensor([0, 13, 13, 40, 66, 66]))
    check(x, random_lists(x, 3), 4, layout=layout)


@pytest.mark.parametrize("keys", [1, 15, 33])
def test_short_inputs(keys, path):
    check(inputs(heads=4, keys=keys), block=16)


@pytest.mark.parametrize("sizes", [(0, 5, 9), (1, 0, 9), (1, 5, 0), (2, 1, 1), (1, 7, 3)])
def test_empty_and_more_queries_than_keys(sizes, path):
    batch, queries, keys = sizes
    check(inputs(batch=batch, heads=4, groups=2, queries=queries, keys=keys), block=4)


@pytest.mark.parametrize("places", [1, 20])
def test_places(places, path):
    x = inputs(heads=4, queries=5, keys=90)
    check(x, random_lists(x, places, most=30), 3)


def test_lists_without_places(path):
    x = inputs(heads=4, queries=3, keys=20)
    out, lse = listed(x, torch.zeros(1, 1, 3, 0, dtype=torch.int32), 4)
    assert not bool(out.any()) and bool((lse == -INF).all())


def test_pages(path):
    x, pages = inputs(batch=2, heads=4, queries=3, keys=4), inputs(batch=9, keys=4, seed=1)
    table = torch.tensor([[7, 2, 5, 0, 3, -1], [1, 1, 8, -1, -1, -1]], dtype=torch.int32)
    x = x._replace(k=pages.k, v=pages.v)
    layout = Layout(page_table=table, kv_len=torch.tensor([18, 9]))
    lists = torch.tensor([0, 1, 2, 4], dtype=torch.int32).expand(2, 1, 3, 4).contiguous()
    check(x, lists, 4, layout=layout)


def test_strides_as_they_come(path):
    x = inputs(batch=2, heads=4, groups=2, queries=3, keys=20)
    lists = random_lists(x)
    plain = listed(x, lists)
    swapped = Inputs(
        x.q.transpose(1, 2).contiguous().transpose(1, 2),
        x.k.mT.contiguous().mT,
        torch.cat([x.v, x.v], -1)[..., 16:],
    )
    for a, b in zip(listed(swapped, lists), plain, strict=True):
        assert torch.equal(a, b)


# Slices


class Together:
    """The lists of `Given`, wanted for all groups of a batch row at once."""

    def __init__(self, given):
        self.given, self.together = given, True
        self.chosen, self.width = given.chosen, given.width

    def rows(self, *part):
        return self.given.rows(*part)


def together(monkeypatch):
    from sparsify.kernels import lists

    real = lists.Given
    monkeypatch.setattr(lists, "Given", lambda *args: Together(real(*args)))


@pytest.mark.parametrize(
    ("way", "workspace_bytes"), [("by list", 1), ("together", 100_000), ("by list", 200_000)]
)
def test_slices_change_no_bit(way, workspace_bytes, by_block, monkeypatch):
    x = inputs(batch=2, heads=4, groups=2, queries=140, keys=150)
    lists = random_lists(x, 3, most=6)
    whole = listed(x, lists, 30)
    if way == "together":
        together(monkeypatch)
    cut = []
    real = forward.combine
    monkeypatch.setattr(forward, "combine", lambda *a: (cut.append(a[10]), real(*a)))
    for a, b in zip(listed(x, lists, 30, workspace_bytes=workspace_bytes), whole, strict=True):
        assert torch.equal(a, b)
    assert len(cut) > 1
    assert len(set(cut)) == len(cut)


def parts_of(batch, heads, share, queries, workspace_bytes, *, is_together):
    class Some:
        together, chosen, width = is_together, 15, 16

    q = torch.empty(batch, heads, queries, 128, dtype=torch.bfloat16, device="meta")
    return list(cutting.slices(q, q, Some(), workspace_bytes, share))


@pytest.mark.parametrize("is_together", [False, True])
@pytest.mark.parametrize("share", [1, 16])
@pytest.mark.parametrize(("batch", "queries"), [(1, 5), (1, 1000), (3, 4000), (1, 100_000)])
def test_slices_cover_every_row_once(is_together, share, batch, queries):
    seen = torch.zeros(batch * 64 // share, queries, dtype=torch.int32)
    parts = parts_of(batch, 64, share, queries, 1 << 28, is_together=is_together)
    for part in parts:
        lists = slice(part.first_list, part.first_list + part.lists)
        seen[lists, part.first : part.first + part.queries] += 1
        rows = part.lists * part.queries * share
        assert rows * 15 * 256 <= 1 << 28
        assert not is_together or part.lists % (64 // share) == 0
    assert bool((seen == 1).all())


def test_a_million_tokens_are_cut_into_slices_of_thousands():
    parts = parts_of(1, 64, 16, 1 << 20, 2 << 30, is_together=True)
    assert {part.lists for part in parts} == {4}
    assert min(part.queries for part in parts) >= 4096


def test_a_block_that_every_query_chose(monkeypatch, by_block):
    """Its list is cut into many work items."""
    cut = reverse_index.reverse_index
    monkeypatch.setattr(forward, "reverse_index", lambda idx, n, chunk: cut(idx, n, 4))
    x = inputs(heads=16, queries=40, keys=60, dtype=torch.float16)
    check(x, torch.zeros(1, 1, 40, 1, dtype=torch.int32), 10)


# Values that a row may not see


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("name", ["k", "v"])
def test_future_tokens_reach_no_earlier_row(name, value, path):
    x = inputs(heads=4, queries=20, keys=40)
    lists = random_lists(x)
    own = (torch.arange(20, 40) // BLOCK)[None, None, :, None]
    lists = torch.cat([lists, own.int()], -1)
    x.q.abs_()
    clean = listed(x, lists)
    getattr(x, name)[0, 0, 30, 2] = value
    got = listed(x, lists)
    for a, b in zip(got, clean, strict=True):
        assert torch.equal(a[:, :, :10], b[:, :, :10])
    assert not bool(got[0][0, :, 10].isfinite().all(-1).any())


@pytest.mark.parametrize("value", [NAN, INF])
def test_blocks_that_were_not_chosen_are_never_read(value, form):
    x = inputs(heads=7, queries=5, keys=40, dtype=form)
    lists = torch.tensor([1, 3, 5], dtype=torch.int32).expand(1, 1, 5, 3).contiguous()
    clean = listed(x, lists)
    for c in (0, 2, 4):
        x.k[:, :, c * 7 : c * 7 + 7], x.v[:, :, c * 7 : c * 7 + 7] = NAN, value
    for a, b in zip(listed(x, lists), clean, strict=True):
        assert torch.equal(a, b)


def test_other_heads_and_queries_are_never_seen(path):
    """A query head that is not a number spoils its own rows alone."""
    x = inputs(heads=7, queries=6, keys=40)
    lists = random_lists(x, 4, most=5)
    clean = listed(x, lists)
    x.q[0, 3, 2] = NAN
    got = listed(x, lists)
    keep = torch.ones(1, 7, 6, dtype=torch.bool)
    keep[0, 3, 2] = False
    for a, b in zip(got, clean, strict=True):
        assert torch.equal(a[keep], b[keep])
    assert bool(got[0][0, 3, 2].isnan().all())


def test_hidden_tokens_are_never_read(path):
    mask = torch.ones(1, 40, dtype=torch.bool)
    mask[0, [15, 20, 36]] = False
    layout = Layout(key_mask=mask, kv_len=torch.tensor([38]), block_origin=torch.tensor([3]))
    x = inputs(heads=4, queries=8, keys=40)
    lists = random_lists(x)
    clean = listed(x, lists, layout=layout)
    hidden = [0, 1, 2, 15, 20, 36, 38, 39]
    x.k[:, :, hidden], x.v[:, :, hidden] = NAN, NAN
    for a, b in zip(listed(x, lists, layout=layout), clean, strict=True):
        assert torch.equal(a, b)


def test_logits_of_minus_infinity_give_nothing(path):
    x = inputs(heads=4, queries=9, keys=30)
    x.q.abs_()
    x.k[..., 0] = -INF
    out, lse = listed(x, random_lists(x))
    assert not bool(out.any()) and bool((lse == -INF).all())


@pytest.mark.parametrize("size", [1e3, 1e8, 1e30])
def test_huge_equal_logits_split_by_count(size, path):
    x = inputs(heads=2, queries=1, keys=4, size=1)
    x.q.fill_(size), x.k.fill_(1.0)
    x.v.copy_(torch.tensor([1.0, 1.0, 1.0, 0.0]).view(1, 1, 4, 1))
    lists = torch.tensor([[[[0, 1]]]], dtype=torch.int32)
    out = listed(x, lists, 2, scale=1.0)[0]
    assert float((out - 0.75).abs().max()) < 1e-6


def test_outputs_are_written_whole_and_scratch_is_never_read_unwritten(monkeypatch, path):
    x = inputs(heads=7, queries=9, keys=40)
    lists = random_lists(x)
    clean = listed(x, lists)
    real = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        made = real(self, *args, **kwargs)
        return made.fill_(NAN if made.is_floating_point() else 77)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    for a, b in zip(listed(x, lists), clean, strict=True):
        assert torch.equal(a, b)
