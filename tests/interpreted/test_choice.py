"""MoBA's choice of blocks by the gate kernels."""

from __future__ import annotations

import math
import random

import pytest
import torch

from sparsify.kernels import accelerated, reference
from sparsify.kernels.layout import Layout
from tests._util.parity import assert_lists, inputs

NAN, INF = math.nan, math.inf


def chosen(x, block_size, topk, *, layout=None, block_means=None):
    layout = layout or Layout()
    return accelerated.moba_select(x.q, x.k, layout, block_means, block_size=block_size, topk=topk)


def check(x, block_size, topk, **options):
    lists = chosen(x, block_size, topk, **options)
    assert_lists(lists, x, block_size, topk, **options, differing=0.0)
    return lists


@pytest.mark.parametrize("topk", [1, 2, 4, 8, 9, 1000])
@pytest.mark.parametrize(("block", "keys"), [(1, 50), (7, 250), (16, 530), (130, 400)])
def test_float32_choices_are_the_reference_s(block, keys, topk):
    check(inputs(queries=19, keys=keys, seed=topk), block, topk)


@pytest.mark.parametrize(("block", "keys", "topk"), [(2, 150, 40), (1, 50, 49), (3, 61, 17)])
def test_long_lists(block, keys, topk):
    check(inputs(queries=5, keys=keys), block, topk)


@pytest.mark.parametrize("topk", [2, 8])
@pytest.mark.parametrize("queries", [1, 70, 150])
def test_many_blocks_and_any_number_of_queries(queries, topk):
    """Blocks of one key: whole tiles of past blocks, then the tiles that the diagonal cuts."""
    check(inputs(queries=queries, keys=200), 1, topk)


@pytest.mark.parametrize("size", [8, 24, 80])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (2, 1), (7, 1)])
def test_head_sizes_and_ratios(size, heads, groups):
    check(inputs(heads=heads, groups=groups, queries=3, keys=36, size=size), 4, 3)


@pytest.mark.parametrize("topk", [3, 9])
def test_half_precision(topk):
    x = inputs(heads=2, queries=40, keys=150, dtype=torch.float16)
    assert_lists(chosen(x, 4, topk), x, 4, topk, differing=0.02)


LAYOUTS = {
    "lengths": {"kv_len": [30, 43], "q_start": [3, 40], "block_origin": [2, 0]},
    "before the first key": {"q_start": [-4, 20]},
    "behind the last key": {"kv_len": [9, 0], "q_start": [25, 1]},
    "left padding": {"key_mask": [[s >= 5 for s in range(43)], [s >= 42 for s in range(43)]]},
    "holes": {"key_mask": [[s % 9 < 4 for s in range(43)], [False] * 43]},
    "documents": {"cu_seqlens_q": [0, 3, 3, 11], "cu_seqlens_k": [0, 17, 20, 43]},
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("topk", [3, 7])
def test_layouts(name, topk):
    layout = Layout(**{n: torch.tensor(x) for n, x in LAYOUTS[name].items()})
    batch = 1 if name == "documents" else 2
    check(inputs(batch=batch, queries=11, keys=43), 2, topk, layout=layout)
    if name != "documents" and topk < 9:
        # More than 32 blocks: the other kernel.
        check(inputs(batch=batch, queries=11, keys=43), 1, topk, layout=layout)


def test_pages():
    x = inputs(queries=5, keys=4, batch=1)
    k = torch.randn(9, 1, 4, 16)
    table = torch.tensor([[7, 2, 5, 0, 3, -1]], dtype=torch.int32)
    layout = Layout(page_table=table, kv_len=torch.tensor([18]))
    check(x._replace(k=k), 4, 3, layout=layout)


def scored(scores, queries=3, dtype=torch.float32):
    """Queries and means whose gate is `scores`, in blocks of two keys; all of them are past."""
    blocks = len(scores) + 1
    x = inputs(queries=queries, keys=2 * blocks, dtype=dtype)
    x.q.zero_()[..., 0] = 1.0
    means = torch.zeros(1, 1, blocks, 16, dtype=dtype)
    means[0, 0, :-1, 0] = torch.tensor(scores, dtype=torch.float64).to(dtype)
    return x, means


@pytest.mark.parametrize(("blocks", "topk"), [(20, 4), (40, 9), (40, 2), (150, 8)])
@pytest.mark.parametrize("kind", ["equal", "few values", "zeros", "last bit", "one list", "odd"])
def test_rank_of_crafted_scores(kind, blocks, topk):
    """Ties go to the lower block, NaN comes last, infinite scores are scores."""
    pick = random.Random(blocks + topk)
    scores = {
        "equal": [1.5] * blocks,
        "few values": [pick.choice([0.5, 0.25, 1.0]) for _ in range(blocks)],
        "zeros": [pick.choice([0.0, -0.0, -1.0]) for _ in range(blocks)],
        "last bit": [1 + pick.randrange(3 * blocks) * 2**-23 for _ in range(blocks)],
        # The best all belong to one short list of the packed kernel.
        "one list": [100.0 + c if c % 16 == 5 else pick.random() for c in range(blocks)],
        "odd": [pick.choice([NAN, INF, -INF, 1.0, 2.0]) for _ in range(blocks)],
    }[kind]
    x, means = scored(scores)
    lists = check(x, 2, topk, block_means=means)
    best = sorted(range(blocks), key=lambda c: (math.isnan(scores[c]), -_number(scores[c]), c))
    # The last query stands in the last block.
    assert lists[0, 0, -1].tolist() == [*sorted(best[: topk - 1]), blocks]


def _number(score):
    return 0.0 if math.isnan(score) else score + 0.0


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(("block", "keys"), [(4, 37), (1, 40)])
def test_a_key_that_is_not_finite(value, block, keys):
    x = inputs(queries=12, keys=keys)
    x.k[0, 0, 9, 3] = value
    check(x, block, 3)


def test_a_query_that_is_not_finite_concerns_no_other():
    x = inputs(queries=20, keys=60)
    clean = chosen(x, 1, 4)
    x.q[0, 0, 7, 2], x.q[0, 0, 9, 0] = NAN, INF
    lists = check(x, 1, 4)
    others = [i for i in range(20) if i not in (7, 9)]
    assert torch.equal(lists[:, :, others], clean[:, :, others])


@pytest.mark.parametrize("topk", [3, 8])
@pytest.mark.parametrize("kind", ["exactly", "room behind", "float32 for float16", "strided"])
def test_means_that_are_given(kind, topk):
    dtype = torch.float16 if "16" in kind else torch.float32
    x = inputs(batch=2, heads=4, groups=2, queries=9, keys=150, dtype=dtype)
    room = 45 if kind == "room behind" else 38
    generator = torch.Generator().manual_seed(5)
    means = torch.randn(2, 2, room, 32, generator=generator)[..., ::2]
    if kind != "strided":
        means = means.contiguous()
    check(x, 4, topk, block_means=means)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("block", [1, 7, 33, 130])
def test_means_of_blocks(block, dtype):
    from sparsify.kernels import means
    from sparsify.kernels.placement import place
    from sparsify.kernels.select import moba

    k = inputs(batch=1, groups=2, keys=137, size=24, dtype=dtype).k
    got = moba.block_means(k, place(Layout(), 1, 1, 137, block), block)
    wanted = means.block_means(k, block_size=block)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    ulp = torch.finfo(dtype).eps * (2 if dtype == torch.float32 else 1)
    assert float((got - wanted).abs().max()) <= ulp * float(wanted.abs().max().clamp(min=1.0))


@pytest.mark.parametrize("sizes", [(0, 5, 9), (1, 0, 9), (1, 5, 0), (1, 1, 1), (1, 3, 1)])
def test_empty_and_single(sizes):
    batch, queries, keys = sizes
    x = inputs(batch=batch, queries=queries, keys=keys)
    for block, topk in ((4, 3), (1, 1), (100, 2)):
        check(x, block, topk)


def test_strides_as_they_come():
    x = inputs(batch=2, heads=2, groups=2, queries=3, keys=20)
    plain = chosen(x, 4, 3)
    swapped = x._replace(
        q=x.q.transpose(1, 2).contiguous().transpose(1, 2),
        k=torch.cat([x.k.mT, x.k.mT], 2)[:, :, :16].mT,
    )
    assert swapped.k.stride(3) != 1
    assert torch.equal(chosen(swapped, 4, 3), plain)
    one = x._replace(k=x.k[:1, :1].expand(2, 2, -1, -1))
    same = x._replace(k=one.k.contiguous())
    assert torch.equal(chosen(one, 4, 3), chosen(same, 4, 3))


def test_rows_do_not_depend_on_their_neighbours():
    x = inputs(batch=2, queries=21, keys=70)
    whole = chosen(x, 1, 4)
    part = inputs(batch=2, queries=21, keys=70)
    part = part._replace(q=part.q[1:, :, 13:], k=part.k[1:])
    assert torch.equal(chosen(part, 1, 4), whole[1:, :, 13:])


def test_argument_errors_are_the_reference_s():
    x = inputs(heads=3, groups=2)
    for module in (accelerated, reference):
        with pytest.raises(ValueError, match="q has 3 heads and k has 2"):
            module.moba_select(x.q, x.k, Layout(), None, block_size=4, topk=2)
