"""Attention over chosen and over listed blocks, by the rule of replay."""

from __future__ import annotations

import pytest
import torch

from sparsify.kernels import accelerated
from sparsify.kernels.layout import Layout
from sparsify.kernels.select import reverse_index
from tests._util.parity import assert_attention, error, expected, inputs


def attend(x, block_size, topk, *, layout=None, block_means=None, **options):
    layout = layout or Layout()
    sizes = {"block_size": block_size, "topk": topk}
    return accelerated.moba_attention(*x, layout, block_means, **sizes, **options)


def choose(x, block_size, topk, layout=None, block_means=None):
    layout = layout or Layout()
    return accelerated.moba_select(x.q, x.k, layout, block_means, block_size=block_size, topk=topk)


def listed(x, lists, block_size, *, layout=None, **options):
    lists = torch.as_tensor(lists, dtype=torch.int32)
    return accelerated.block_attention(
        *x, lists, layout or Layout(), block_size=block_size, **options
    )


def check(x, block_size, topk, *, layout=None, block_means=None, **options):
    got = attend(x, block_size, topk, layout=layout, block_means=block_means, **options)
    lists = choose(x, block_size, topk, layout, block_means)
    scale = options.get("scale")
    assert_attention(got, lists, x, block_size, layout=layout, scale=scale)
    return got


@pytest.mark.parametrize(
    ("block", "keys", "topk"),
    [(1, 45, 2), (7, 50, 1), (7, 50, 3), (16, 100, 4), (96, 300, 3), (130, 300, 2), (7, 50, 40)],
)
def test_chosen_blocks(block, keys, topk, form):
    check(inputs(queries=5, keys=keys, dtype=form), block, topk)


@pytest.mark.parametrize("topk", [8, 9])
def test_more_places(topk, by_block):
    check(inputs(queries=9, keys=60), 3, topk)


def test_many_places(by_block):
    check(inputs(queries=1, keys=90), 2, 40)


@pytest.mark.parametrize(("size", "value_size"), [(16, 24), (24, 16), (80, 40), (8, 1), (1, 80)])
def test_head_sizes(size, value_size, form):
    check(inputs(queries=4, keys=30, size=size, value_size=value_size, dtype=form), 7, 3)


@pytest.mark.parametrize("size", [130, 256])
def test_wide_heads(size, by_block):
    check(inputs(queries=4, keys=40, size=size, dtype=torch.float16), 7, 3)


@pytest.mark.parametrize(("heads", "groups"), [(7, 1), (4, 2)])
def test_head_ratios(heads, groups, path):
    check(inputs(heads=heads, groups=groups, queries=2, keys=20), 5, 3)


@pytest.mark.parametrize("scale", [None, 0.7, 1e-3])
def test_scale(scale, path):
    check(inputs(queries=4, keys=40), 7, 3, scale=scale)


def test_prefill_of_odd_length():
    """More than one tile of queries, and the tiles of the own block that all rows see whole."""
    check(inputs(keys=75), 16, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_long_own_block(dtype):
    check(inputs(queries=70, keys=420, dtype=dtype), 300, 2)


@pytest.mark.parametrize("topk", [1, 2, 1000])
@pytest.mark.parametrize("keys", [1, 15, 17, 33])
def test_short_inputs(keys, topk):
    check(inputs(keys=keys), 16, topk)


@pytest.mark.parametrize("topk", [2, 1000])
@pytest.mark.parametrize("sizes", [(0, 5, 9), (1, 0, 9), (1, 5, 0), (2, 1, 1), (1, 7, 3)])
def test_empty_and_more_queries_than_keys(sizes, topk, path):
    batch, queries, keys = sizes
    x = inputs(batch=batch, queries=queries, keys=keys)
    got = attend(x, 4, topk)
    lists = torch.full((batch, 1, queries, 1), 0, dtype=torch.int32)
    assert_attention(got, lists, x, 4)
    assert_attention(listed(x, lists, 4), lists, x, 4)


LAYOUTS = {
    "lengths": {"kv_len": [30, 43], "q_start": [3, 38], "block_origin": [2, 0]},
    "before the first key": {"q_start": [-4, 20]},
    "behind the last key": {"kv_len": [9, 0], "q_start": [25, 1]},
    "left padding": {"key_mask": [[s >= 5 for s in range(43)], [s >= 42 for s in range(43)]]},
    "holes": {"key_mask": [[s % 9 < 4 for s in range(43)], [False] * 43]},
    "slot anchored": {
        "key_mask": [[s >= 5 for s in range(43)], [s >= 11 for s in range(43)]],
        "block_origin": [0, 0],
    },
    "documents": {"cu_seqlens_q": [0, 3, 3, 7], "cu_seqlens_k": [0, 17, 20, 43]},
    "documents with holes": {
        "cu_seqlens_q": [0, 0, 3, 7, 7],
        "cu_seqlens_k": [0, 9, 20, 43, 43],
        "key_mask": [[s % 5 != 1 for s in range(43)]],
        "kv_len": [9, 8, 23, 0],
        "block_origin": [0, 1, 2, 0],
    },
}


def laid_out(name):
    layout = Layout(**{n: torch.tensor(x) for n, x in LAYOUTS[name].items()})
    return layout, inputs(batch=1 if "documents" in name else 2, queries=7, keys=43)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, path):
    layout, x = laid_out(name)
    check(x, 4, 3, layout=layout)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("topk", [1, 1000])
def test_layouts_with_own_blocks_alone_and_dense(name, topk):
    layout, x = laid_out(name)
    check(x, 4, topk, layout=layout)


def test_documents_of_a_whole_prefill():
    layout = Layout(cu_seqlens_q=torch.tensor([0, 13, 13, 40, 66, 66]))
    check(inputs(keys=70), 4, 3, layout=layout)


def test_no_documents(path):
    x = inputs(queries=3, keys=9)
    out, lse = attend(x, 4, 2, layout=Layout(cu_seqlens_q=torch.tensor([0])))
    assert not bool(out.any()) and bool((lse == float("-inf")).all())


@pytest.mark.parametrize("topk", [3, 100])
def test_pages(topk, path):
    x = inputs(batch=2, heads=2, queries=3, keys=4)
    pages = inputs(batch=9, keys=4, seed=1)
    table = torch.tensor([[7, 2, 5, 0, 3, -1], [1, 1, 8, -1, -1, -1]], dtype=torch.int32)
    x = x._replace(k=pages.k, v=pages.v)
    layout = Layout(page_table=table, kv_len=torch.tensor([18, 9]))
    check(x, 4, topk, layout=layout)


def test_means_that_are_given(path):
    x = inputs(heads=2, groups=2, queries=4, keys=40)
    means = torch.randn(1, 2, 6, 16, generator=torch.Generator().manual_seed(3))
    check(x, 7, 3, block_means=means)


@pytest.mark.parametrize("topk", [3, 1000])
def test_decode_and_chunks_equal_the_whole_prefill(topk):
    x = inputs(keys=45)
    whole, whole_lse = attend(x, 4, topk)
    chosen = choose(x, 4, topk)
    for first, last in ((0, 1), (1, 17), (17, 44), (44, 45)):
        part = x._replace(
            q=x.q[:, :, first:last], k=x.k[:, :, :last].clone(), v=x.v[:, :, :last].clone()
        )
        out, lse = attend(part, 4, topk)
        rows = choose(part, 4, topk)
        width = rows.shape[-1]
        assert torch.equal(rows, chosen[:, :, first:last, :width])
        assert bool((chosen[:, :, first:last, width:] == -1).all())
        assert error(out, whole[:, :, first:last]) < 1e-6
        assert error(lse, whole_lse[:, :, first:last]) < 1e-6


@pytest.mark.parametrize("layout", [None, Layout(cu_seqlens_q=torch.tensor([0, 30, 140]))])
@pytest.mark.parametrize(("heads", "workspace_bytes"), [(1, 1), (3, 30_000)])
def test_slices(layout, heads, workspace_bytes, by_block):
    """A tiny workspace cuts the work into many slices, of queries or of heads."""
    x = inputs(heads=heads, queries=140 if heads == 1 else 20, keys=140)
    if heads > 1 and layout is not None:
        layout = layout._replace(cu_seqlens_q=torch.tensor([0, 5, 20]), cu_seqlens_k=layout[4])
    check(x, 30, 3, layout=layout, workspace_bytes=workspace_bytes)


def test_slices_of_listed_blocks(by_block):
    x = inputs(keys=140)
    lists = choose(x, 30, 3)
    assert_attention(listed(x, lists, 30, workspace_bytes=1), lists, x, 30)


ROWS = {
    "as chosen": [0, 2, 4],
    "out of order": [4, 0, 2],
    "repeated": [2, 2, 4, 2, 4],
    "ahead": [0, 5, 4, 6],
    "beyond the keys": [1, 4, 1000, 2**31 - 1],
    "own missing": [0, 2],
    "own alone": [4],
    "negative between": [-1, 1, -5, 4],
    "none": [-1, -1],
    "only ahead": [5, 6],
}


@pytest.mark.parametrize("name", ROWS)
def test_listed_blocks(name, path):
    """Queries 29..33 of blocks of 7: block 4 is their own; block 5 lies ahead."""
    x = inputs(queries=5, keys=40)
    layout = Layout(q_start=torch.tensor([29]))
    lists = torch.tensor(ROWS[name], dtype=torch.int32).expand(1, 1, 5, -1)
    got = listed(x, lists, 7, layout=layout)
    assert_attention(got, lists, x, 7, layout=layout)
    if name in ("none", "only ahead"):
        assert not bool(got[0].any())


def test_lists_that_differ_by_row_and_by_group(path):
    x = inputs(batch=2, heads=2, groups=1, queries=7, keys=50)
    generator = torch.Generator().manual_seed(1)
    for heads in (1, 2):
        lists = torch.randint(-3, 9, (2, heads, 7, 5), generator=generator, dtype=torch.int32)
        assert_attention(listed(x, lists, 7), lists, x, 7)


def test_lists_without_places(path):
    x = inputs(queries=3, keys=20)
    out, lse = listed(x, torch.zeros(1, 1, 3, 0), 4)
    assert not bool(out.any()) and bool((lse == float("-inf")).all())


@pytest.mark.parametrize("name", ["documents", "holes", "lengths"])
def test_listed_blocks_of_layouts(name, path):
    layout, x = laid_out(name)
    batch = x.q.shape[0]
    generator = torch.Generator().manual_seed(1)
    lists = torch.randint(-2, 9, (batch, 1, 7, 4), generator=generator, dtype=torch.int32)
    assert_attention(listed(x, lists, 4, layout=layout), lists, x, 4, layout=layout)


def test_a_block_that_every_query_chose(monkeypatch):
    """Its list is cut into many work items."""
    from sparsify.kernels.attend import forward

    cut = reverse_index.reverse_index
    monkeypatch.setattr(forward, "reverse_index", lambda idx, n, chunk: cut(idx, n, 16))
    x = inputs(queries=100, keys=120, dtype=torch.float16)
    lists = torch.zeros(1, 1, 100, 1, dtype=torch.int32)
    assert_attention(listed(x, lists, 10), lists, x, 10)


def test_strides_as_they_come(path):
    x = inputs(batch=2, heads=2, groups=2, queries=2, keys=20)
    plain = attend(x, 7, 3)
    swapped = x._replace(
        q=x.q.transpose(1, 2).contiguous().transpose(1, 2),
        k=x.k.mT.contiguous().mT,
        v=torch.cat([x.v, x.v], -1)[..., 16:],
    )
    for a, b in zip(attend(swapped, 7, 3), plain, strict=True):
        assert torch.equal(a, b)
    one = x._replace(v=x.v[:1, :1, :1].expand(2, 2, 20, -1), q=x.q[:1].expand(2, -1, -1, -1))
    same = x._replace(q=one.q.contiguous(), v=one.v.contiguous())
    for a, b in zip(attend(one, 7, 3), attend(same, 7, 3), strict=True):
        assert torch.equal(a, b)


def test_rows_do_not_depend_on_their_neighbours(path):
    """To the last bits, which numpy's products owe to the place of a row in a tile."""
    x = inputs(batch=2, queries=7, keys=40)
    whole = attend(x, 7, 3)
    part = x._replace(q=x.q[1:, :, 3:], k=x.k[1:], v=x.v[1:])
    for a, b in zip(attend(part, 7, 3), whole, strict=True):
        assert error(a, b[1:, :, 3:]) < 1e-6


def test_outputs_are_written_whole(monkeypatch, path):
    """No element is left as it was allocated."""
    x = inputs(queries=9, keys=40)
    clean = attend(x, 7, 3)
    real = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        made = real(self, *args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else 77)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    for a, b in zip(attend(x, 7, 3), clean, strict=True):
        assert torch.equal(a, b)


def test_a_choice_that_is_wrong_is_seen():
    """The comparison itself: other lists give another output."""
    x = inputs(queries=5, keys=40)
    lists = torch.tensor([0, 5], dtype=torch.int32).expand(1, 1, 5, 2)
    other = torch.tensor([1, 5], dtype=torch.int32).expand(1, 1, 5, 2)
    assert error(listed(x, lists, 7)[0], expected(other, x, 7)[0]) > 1e-2
