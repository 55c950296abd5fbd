"""MSA's choice of blocks by the index kernels."""

from __future__ import annotations

import math
import random
from unittest import mock

import pytest
import torch
from triton.runtime.interpreter import ReduceOps

from sparsify.kernels.layout import Layout
from sparsify.kernels.select import msa
from tests._util.index_lists import Keys, assert_choice, chosen, index_of, inputs

NAN, INF = math.nan, math.inf
LOCAL = ("inside", "union")


def check(x, block, topk, local="inside", **options):
    got = chosen(x, block, topk, local, **options)
    assert_choice(got, x, block, topk, local, layout=options.get("layout"))
    return got


@pytest.mark.parametrize(("shared", "local"), [(True, "union"), (False, "inside")])
@pytest.mark.parametrize(
    ("block", "keys", "topk"),
    [
        (1, 50, 4),
        (7, 250, 8),
        (16, 300, 1),
        (16, 300, 2),
        (24, 300, 3),
        (48, 300, 5),
        (130, 400, 2),
    ],
)
def test_choices_are_the_reference_s(block, keys, topk, shared, local):
    check(inputs(queries=19, keys=keys, shared=shared, seed=topk), block, topk, local)


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize(
    ("blocks", "topk"),
    [
        (9, 8),
        (9, 9),
        (9, 10),
        (9, 1000),
        (18, 16),
        (18, 17),
        (40, 18),
        (36, 35),
        (70, 40),
    ],
)
def test_lists_of_every_length(blocks, topk, local):
    """Up to 16 places in registers, sorted keys beyond; as many places as blocks, and more."""
    check(inputs(queries=7, keys=2 * blocks), 2, topk, local)


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("queries", [1, 140])
def test_many_blocks_in_segments(queries, local):
    x = inputs(groups=1, queries=queries, keys=queries + 60)
    whole = check(x, 1, 5, local)
    for processors in (1, 10**4):
        with mock.patch.object(msa, "processors", lambda _, n=processors: n):
            assert torch.equal(chosen(x, 1, 5, local), whole)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("groups", [1, 3, 4, 8])
def test_groups(groups, shared):
    check(inputs(batch=2, groups=groups, shared=shared, queries=9, keys=60), 8, 4)


@pytest.mark.parametrize("size", [8, 24, 80])
def test_index_sizes(size):
    check(inputs(queries=3, keys=60, size=size), 8, 3)


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize(("block", "keys"), [(16, 200), (24, 200), (128, 600), (200, 700)])
def test_half_precision(block, keys, local):
    """Tiles of 128 keys: several blocks of a tile, one, and several tiles of a block."""
    x = inputs(queries=21, keys=keys, dtype=torch.float16)
    got = chosen(x, block, 3, local)
    assert_choice(got, x, block, 3, local, differing=0.02)


@pytest.mark.parametrize("local", LOCAL)
def test_eight_bits(local):
    x = inputs(queries=21, keys=300, size=32).iq, inputs(queries=21, keys=300, size=32).ik
    x = Keys(*(t.to(torch.float8_e4m3fn) for t in x))
    got = chosen(x, 16, 4, local)
    assert_choice(got, x, 16, 4, local, differing=0.02)


def test_queries_and_keys_in_different_dtypes():
    x = inputs(queries=9, keys=60)
    x = Keys(x.iq, x.ik.half())
    assert_choice(chosen(x, 8, 3), x, 8, 3)


LAYOUTS = {
    "lengths": {"kv_len": [30, 43], "q_start": [3, 40], "block_origin": [2, 0]},
    "before the first key": {"q_start": [-4, 20]},
    "behind the last key": {"kv_len": [9, 0], "q_start": [25, 1]},
    "left padding": {"key_mask": [[s >= 5 for s in range(43)], [s >= 42 for s in range(43)]]},
    "holes": {"key_mask": [[s % 9 < 4 for s in range(43)], [False] * 43]},
    "documents": {"cu_seqlens_q": [0, 3, 3, 11], "cu_seqlens_k": [0, 17, 20, 43]},
    "many documents": {"cu_seqlens_q": [0, 5, 6, 11], "cu_seqlens_k": [0, 5, 6, 43]},
}


@pytest.mark.parametrize(
    ("block", "topk", "local"),
    [(2, 3, "inside"), (2, 3, "union"), (2, 7, "inside"), (40, 2, "union")],
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, block, topk, local):
    layout = Layout(**{n: torch.tensor(x) for n, x in LAYOUTS[name].items()})
    batch = 1 if "documents" in name else 2
    check(inputs(batch=batch, queries=11, keys=43), block, topk, local, layout=layout)


@pytest.mark.parametrize("name", ["holes", "many documents"])
def test_layouts_with_long_lists(name):
    layout = Layout(**{n: torch.tensor(x) for n, x in LAYOUTS[name].items()})
    batch = 1 if "documents" in name else 2
    check(inputs(batch=batch, queries=11, keys=43), 1, 20, "union", layout=layout)


def test_documents_with_a_key_head_for_each_group():
    layout = Layout(cu_seqlens_q=torch.tensor([0, 20, 21, 60]))
    check(inputs(keys=60, shared=False), 4, 4, layout=layout)


def test_more_queries_than_keys():
    check(inputs(queries=30, keys=21), 4, 3)
    check(inputs(queries=30, keys=21), 4, 3, "union")


def test_pages():
    x = inputs(queries=5, keys=4, batch=1)
    x = x._replace(ik=torch.randn(9, 1, 4, 16, generator=torch.Generator().manual_seed(1)))
    table = torch.tensor([[7, 2, 5, 0, 3, -1]], dtype=torch.int32)
    check(x, 4, 3, layout=Layout(page_table=table, kv_len=torch.tensor([18])))


def scored(scores, queries=3):
    """Blocks of two keys whose scores are `scores`, and one more, in which the queries stand."""
    x = inputs(groups=1, queries=queries, keys=2 * len(scores) + 2)
    x.iq.zero_()[..., 0] = 1.0
    x.ik.zero_()
    x.ik[0, 0, :-2:2, 0] = torch.tensor(scores)
    x.ik[0, 0, 1:-2:2, 0] = torch.tensor([-INF if s == -INF else -5.0 for s in scores])
    return x


@pytest.mark.parametrize(("blocks", "topk"), [(20, 4), (40, 9), (40, 17), (150, 8)])
@pytest.mark.parametrize("kind", ["equal", "few values", "zeros", "last bit", "odd"])
def test_rank_of_crafted_scores(kind, blocks, topk):
    """Ties go to the lower block, NaN comes last, infinite scores are scores."""
    pick = random.Random(blocks + topk)
    scores = {
        "equal": [1.5] * blocks,
        "few values": [pick.choice([0.5, 0.25, 1.0]) for _ in range(blocks)],
        "zeros": [pick.choice([0.0, -0.0, -1.0]) for _ in range(blocks)],
        "last bit": [1 + pick.randrange(3 * blocks) * 2**-23 for _ in range(blocks)],
        "odd": [pick.choice([NAN, INF, -INF, 1.0, 2.0]) for _ in range(blocks)],
    }[kind]
    x = scored(scores)
    if kind == "odd":  # 0 * inf is NaN: only one number may be not 0
        x = Keys(x.iq[..., :1].contiguous(), x.ik[..., :1].contiguous())
    lists = check(x, 2, topk)
    best = sorted(range(blocks), key=lambda c: (math.isnan(scores[c]), -_number(scores[c]), c))
    # The last query stands in the last block.
    assert lists[0, 0, -1].tolist() == [*sorted(best[: topk - 1]), blocks]
    check(x, 2, topk, "union")


def _number(score):
    return 0.0 if math.isnan(score) else score + 0.0


@pytest.mark.parametrize("topk", [3, 8, 20])
def test_all_scores_equal_take_the_first_blocks(topk):
    x = inputs(groups=1, queries=3, keys=60)
    x.ik.fill_(1.0)
    assert check(x, 2, topk)[0, 0, -1].tolist() == [*range(topk - 1), 29]
    assert check(x, 2, topk, "union")[0, 0, -1].tolist() == [*range(topk), 29]


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_key_that_is_not_finite(value, local):
    x = inputs(queries=12, keys=37)
    x.ik[0, 0, 9, 3] = value
    check(x, 4, 3, local)
    check(x, 4, 10, local)  # every block has a place, NaN too


@pytest.mark.parametrize("block", [4, 40])
def test_the_kernel_s_own_maxima(block, quick_reductions, monkeypatch):
    """Not numpy's in their place: NaN wins over any number, of several tiles too."""
    monkeypatch.setattr(ReduceOps, "apply_impl", quick_reductions)
    x = inputs(groups=1, queries=2, keys=130)
    x.ik[0, 0, 50, 3] = NAN
    check(x, block, 3)
    check(x, block, 3, "union")


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("value", [NAN, INF])
def test_later_keys_have_no_effect(value, local):
    x = inputs(keys=40)
    before = chosen(x, 4, 3, local)
    x.ik[:, :, 22:] = value
    after = chosen(x, 4, 3, local)
    assert torch.equal(before[:, :, :22], after[:, :, :22])


@pytest.mark.parametrize("local", LOCAL)
def test_earlier_keys_have_an_effect(local):
    x = inputs(keys=40)
    before = chosen(x, 4, 3, local)
    x.ik[:, :, 20] = 100 * x.iq[:, :1, 30]
    assert not torch.equal(before[:, :, 30], chosen(x, 4, 3, local)[:, :, 30])


@pytest.mark.parametrize("local", LOCAL)
def test_hidden_keys_have_no_effect(local):
    x = inputs(batch=2, queries=11, keys=43)
    mask = torch.tensor([[s % 9 < 4 for s in range(43)], [s >= 7 for s in range(43)]])
    layout = Layout(key_mask=mask)
    before = chosen(x, 4, 3, local, layout=layout)
    x.ik.masked_fill_(~mask[:, None, :, None], NAN)
    assert torch.equal(before, check(x, 4, 3, local, layout=layout))


@pytest.mark.parametrize(
    ("topk", "number"), [(5, 2**31 - 1), (5, -(2**31)), (5, 0), (20, 2**31 - 1)]
)
def test_what_stood_in_fresh_memory_has_no_effect(topk, number, monkeypatch):
    x = inputs(batch=2, queries=5, keys=60)
    layout = Layout(kv_len=torch.tensor([47, 60]))
    calls = [("inside", None), ("union", layout)]
    clean = [chosen(x, 2, topk, local, layout=where) for local, where in calls]
    empty = torch.Tensor.new_empty

    def filled(self, *shape, **options):
        return empty(self, *shape, **options).fill_(number)

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    again = [chosen(x, 2, topk, local, layout=where) for local, where in calls]
    assert all(map(torch.equal, clean, again))


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("shared", [True, False])
def test_slices_are_parts_of_the_whole(shared, local):
    x = inputs(batch=2, groups=3, shared=shared, queries=70, keys=90)
    index, _ = index_of(x, 4, 3, local)
    whole = index.all_rows().flatten(0, 1)
    for group, groups, first, count in [(0, 6, 0, 70), (0, 3, 5, 20), (2, 3, 64, 6), (5, 1, 69, 1)]:
        rows, own = index.rows(group, groups, first, count)
        assert own is None and rows.is_contiguous()
        assert torch.equal(rows, whole[group : group + groups, first : first + count])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("workspace", [1, 40_000])
def test_a_small_workspace_changes_nothing(workspace, shared):
    x = inputs(batch=2, shared=shared, queries=150, keys=160)
    small = chosen(x, 8, 3, workspace_bytes=workspace)
    assert torch.equal(small, chosen(x, 8, 3))


def test_scores_stay_within_their_share_of_the_workspace():
    x = inputs(batch=3, queries=640, keys=640)
    index, _ = index_of(x, 16, 3, workspace_bytes=300_000)
    made = []
    with (
        mock.patch.object(msa.Index, "_score", lambda _, scores, *a, **o: made.append(scores)),
        mock.patch.object(msa.Index, "_rank", lambda *a: None),
    ):
        index.all_rows()
    assert len(made) > 3
    assert max(scores.numel() * 4 for scores in made) <= 300_000 // 4


@pytest.mark.parametrize("sizes", [(0, 5, 9), (1, 0, 9), (1, 5, 0), (1, 1, 1), (1, 3, 1)])
def test_empty_and_single(sizes):
    batch, queries, keys = sizes
    x = inputs(batch=batch, queries=queries, keys=keys)
    for block, topk in ((4, 3), (1, 1), (100, 2)):
        for local in LOCAL:
            check(x, block, topk, local)


def test_strides_as_they_come():
    x = inputs(batch=2, queries=5, keys=40, shared=False)
    plain = chosen(x, 4, 3)
    swapped = Keys(
        x.iq.transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat([x.ik.mT, x.ik.mT], 2)[:, :, :16].mT,
    )
    assert swapped.ik.stride(3) != 1
    assert torch.equal(chosen(swapped, 4, 3), plain)
    one = Keys(x.iq, x.ik[:1, :1].expand(2, 2, -1, -1))
    assert torch.equal(chosen(one, 4, 3), chosen(Keys(x.iq, one.ik.contiguous()), 4, 3))


def test_rows_do_not_depend_on_their_neighbours():
    x = inputs(batch=2, queries=21, keys=70)
    whole = chosen(x, 1, 4)
    part = Keys(x.iq[1:, :, 13:], x.ik[1:])
    assert torch.equal(chosen(part, 1, 4), whole[1:, :, 13:])


def test_decode_is_the_last_row_of_a_prefill():
    x = inputs(queries=50, keys=50)
    whole = chosen(x, 4, 3)
    for t in (1, 4, 5, 37, 50):
        one = chosen(Keys(x.iq[:, :, t - 1 : t], x.ik[:, :, :t]), 4, 3)
        row = whole[:, :, t - 1, : one.shape[-1]]
        assert torch.equal(one[:, :, 0], row)
