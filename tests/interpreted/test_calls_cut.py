"""Calls of more lists than one grid takes, and of packed documents that attend every block."""

from __future__ import annotations

import pytest
import torch

from sparsify.kernels import accelerated, reference, schemas
from sparsify.kernels.attend import cutting, forward
from sparsify.kernels.layout import Layout
from sparsify.kernels.placement import place
from sparsify.kernels.select import moba, msa
from tests._util.parity import assert_attention, inputs

BLOCK = 16
SIZES = {"block_size": BLOCK, "topk": 3}


@pytest.fixture
def few_programs(monkeypatch):
    """Grids that take few lists."""
    for module in (cutting, forward, moba, msa):
        monkeypatch.setattr(module, "MOST_PROGRAMS", 4)


@pytest.fixture
def cut(monkeypatch):
    """The lists of each slice that is attended."""
    lists, real = [], forward.combine
    monkeypatch.setattr(forward, "combine", lambda *a: (lists.append(a[10].lists), real(*a)))
    return lists


@pytest.mark.parametrize("topk", [3, 100])
def test_moba_of_many_lists(topk, path, few_programs, cut):
    x = inputs(batch=3, heads=3, queries=5, keys=100)
    sizes = {**SIZES, "topk": topk}
    lists = accelerated.moba_select(x.q, x.k, Layout(), None, **sizes)
    assert torch.equal(lists, reference.moba_select(x.q, x.k, Layout(), None, **sizes))
    assert_attention(accelerated.moba_attention(*x, Layout(), None, **sizes), lists, x, BLOCK)
    assert sum(cut) == 9 and max(cut) <= 4
    listed = accelerated.block_attention(*x, lists, Layout(), block_size=BLOCK)
    assert_attention(listed, lists, x, BLOCK)
    assert sum(cut) == 18 and max(cut) <= 4


@pytest.mark.parametrize("index_heads", [1, 3])
def test_msa_of_many_lists(index_heads, path, few_programs, cut):
    x = inputs(batch=3, heads=6, groups=3, queries=20, keys=100)
    index = inputs(batch=3, heads=3, groups=index_heads, queries=20, keys=100, size=32, seed=1)
    lists = accelerated.msa_select(index.q, index.k, Layout(), **SIZES)
    assert torch.equal(lists, reference.msa_select(index.q, index.k, Layout(), **SIZES))
    got = accelerated.msa_attention(*x, index.q, index.k, Layout(), **SIZES)
    assert_attention(got, lists, x, BLOCK)
    assert sum(cut) == 9 and max(cut) <= 4


def test_calls_of_few_lists_are_not_cut(cut):
    x = inputs(batch=3, heads=3, queries=5, keys=100)
    for topk in (3, 100):
        accelerated.moba_attention(*x, Layout(), None, block_size=BLOCK, topk=topk)
    assert cut == [9, 9]


@pytest.mark.parametrize("topk", [6, 7])
@pytest.mark.parametrize("name", ["moba", "msa"])
def test_documents_are_dense_as_soon_as_none_has_more_blocks(name, topk, monkeypatch):
    monkeypatch.setenv("SPARSIFY_IMPL", "triton")
    seen, real = [], forward.dense
    monkeypatch.setattr(forward, "dense", lambda *a: (seen.append(1), real(*a))[1])
    # As many keys as fill 7 blocks, in 9 of them.
    layout = Layout(cu_seqlens_q=torch.tensor([0, 33, 33, 90, 100]))
    x = inputs(heads=2, groups=2, keys=100)
    index = inputs(heads=2, keys=100, size=32, seed=1)
    sizes = {**SIZES, "topk": topk}
    if name == "moba":
        lists = schemas.moba_select(x.q, x.k, *layout, **sizes)
        want = reference.moba_select(x.q, x.k, layout, None, **sizes)
        got = schemas.moba_attention(*x, *layout, **sizes)
    else:
        lists = schemas.msa_select(index.q, index.k, *layout, **sizes)
        want = reference.msa_select(index.q, index.k, layout, **sizes)
        got = schemas.msa_attention(*x, index.q, index.k, *layout, **sizes)
    assert torch.equal(lists, want)
    assert_attention(got, lists, x, BLOCK, layout=layout)
    assert seen == [1] * (topk == 7)


def masks(keys):
    """Holes, in every form a mask may have in memory."""
    rows = torch.tensor([[s % 21 < 8 and s > 4 for s in range(keys)]] * 2)
    wide = torch.zeros(2, 2 * keys, dtype=torch.bool)
    wide[:, ::2] = rows
    return {
        "one row for all": rows[:1].expand(2, -1),
        "by columns": rows.t().contiguous().t(),
        "every other": wide[:, ::2],
    }


@pytest.mark.parametrize("queries", [2, 20])
@pytest.mark.parametrize("form", ["one row for all", "by columns", "every other"])
def test_masks_of_any_strides(form, queries, path):
    x = inputs(batch=2, heads=2, groups=1, queries=queries, keys=70)
    index = inputs(batch=2, queries=queries, keys=70, size=32, seed=1)
    mask = masks(70)[form]
    assert not mask.is_contiguous()
    # Dense calls have but one path.
    for topk in (3, 100) if path == "by query" else (3,):
        sizes = {**SIZES, "topk": topk}
        layout = Layout(key_mask=mask)
        lists = accelerated.msa_select(index.q, index.k, layout, **sizes)
        assert torch.equal(lists, reference.msa_select(index.q, index.k, layout, **sizes))
        got = accelerated.msa_attention(*x, index.q, index.k, layout, **sizes)
        assert_attention(got, lists, x, BLOCK, layout=layout)
        own = accelerated.moba_select(x.q, x.k, layout, None, **sizes)
        got = accelerated.moba_attention(*x, layout, None, **sizes)
        assert_attention(got, own, x, BLOCK, layout=layout)


@pytest.mark.parametrize("local", ["inside", "union"])
@pytest.mark.parametrize("queries", [1, 3, 20])
def test_hidden_blocks_are_not_listed_where_all_others_are(queries, local):
    index = inputs(queries=queries, keys=70, size=32)
    layout = Layout(key_mask=(torch.arange(70) // BLOCK != 1)[None])
    sizes = {"block_size": BLOCK, "topk": 100, "local": local}
    lists = accelerated.msa_select(index.q, index.k, layout, **sizes)
    assert torch.equal(lists, reference.msa_select(index.q, index.k, layout, **sizes))
    assert not bool((lists == 1).any()) and bool((lists == 2).any())


@pytest.fixture
def buffer():
    """More elements than 32 bits count; pages that nobody touches take no memory."""
    try:
        return torch.empty(2**32 + 2**20, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("needs more address space")


@pytest.mark.parametrize("block", [16, 144])
def test_heads_that_lie_far_apart(block, buffer, by_block):
    """Each stride fits 32 bits, its product with the number of a head does not."""
    near = inputs(heads=5, groups=5, queries=20, keys=300, dtype=torch.float16)
    views, at = [], 2**31  # what wraps round stays in the buffer
    for x in near:
        view = buffer.as_strided(x.shape, (0, 2**29, x.shape[3], 1), storage_offset=at)
        views.append(view.copy_(x))
        at += x[0, 0].numel()
    far = type(near)(*views)
    sizes = {"block_size": block, "topk": 2}
    lists = accelerated.moba_select(far.q, far.k, Layout(), None, **sizes)
    assert torch.equal(lists, accelerated.moba_select(near.q, near.k, Layout(), None, **sizes))
    assert_attention(accelerated.moba_attention(*far, Layout(), None, **sizes), lists, near, block)


@pytest.mark.parametrize("start", [3, 100, 2**31 - 5, 2**40])
@pytest.mark.parametrize("keys", [15, 70])
def test_queries_behind_all_keys(keys, start, path):
    """All their blocks are past ones, be it a single one."""
    x = inputs(heads=2, groups=1, queries=20, keys=keys)
    index = inputs(queries=20, keys=keys, size=32, seed=1)
    layout = Layout(q_start=torch.tensor([start]))
    for local in ("inside", "union"):
        sizes = {"block_size": BLOCK, "topk": 2, "local": local}
        lists = accelerated.msa_select(index.q, index.k, layout, **sizes)
        assert torch.equal(lists, reference.msa_select(index.q, index.k, layout, **sizes))
        got = accelerated.msa_attention(*x, index.q, index.k, layout, **sizes)
        assert_attention(got, lists, x, BLOCK, layout=layout)
        listed = accelerated.block_attention(*x, lists, layout, block_size=BLOCK)
        assert_attention(listed, lists, x, BLOCK, layout=layout)


def test_a_kernel_that_does_not_fit_is_not_forced_on_a_call():
    x = inputs(heads=2, keys=100)
    placement = place(Layout(), 1, 100, 100, BLOCK)
    shape = forward.shape_of(*x, BLOCK, None)
    chooser = moba.Gate(x.q, x.k, placement, None, BLOCK, 2)
    want = forward.sparse(*x, placement, shape, chooser, 1 << 30)
    plain = forward.sparse(*x, placement, shape, chooser, 1 << 30, "triton")
    assert all(torch.equal(a, b) for a, b in zip(plain, want, strict=True))
    with pytest.raises(ValueError, match="no Gluon kernel fits"):
        forward.sparse(*x, placement, shape, chooser, 1 << 30, "gluon")
