"""Packed documents, paged caches, origins: one owner of positions and block numbers."""

from __future__ import annotations

import pytest
import torch

from sparsify.kernels.layout import Layout, block_count, list_width, sequences
from sparsify.kernels.means import block_means
from tests._util.ops import KINDS, OF_KEYS, block_masks, close, cut, make, run, select, slow

every_kind = pytest.mark.parametrize("kind", KINDS)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_sizes():
    assert [block_count(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert list_width(9, 4, 2) == 2
    assert list_width(9, 4, 10**6) == 3
    assert list_width(9, 4, 2, "union") == 3
    assert list_width(0, 4, 2) == 0


def test_default_positions_are_bottom_right_and_count_from_the_first_real_key():
    mask = torch.tensor([[False, False, True, True, False, True]])
    (one,) = sequences(1, 2, 6, Layout(key_mask=mask))
    assert (one.start, one.keys, one.k_from) == (2, 4, 2)
    assert one.real.tolist() == [True, True, False, True]
    (two,) = sequences(1, 2, 6, Layout(key_mask=mask, block_origin=ints(0)))
    assert (two.start, two.keys, two.k_from) == (4, 6, 0)
    (three,) = sequences(1, 2, 6, Layout(kv_len=ints(5)))
    assert (three.start, three.keys, three.real) == (3, 5, None)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(kv_len=ints(7)), "kv_len is 7 for sequence 0, which has 6 key slots"),
        (Layout(kv_len=ints(-1)), "kv_len is -1"),
        (Layout(block_origin=ints(-1)), "block_origin is -1 for sequence 0; expected at least 0"),
        (Layout(cu_seqlens_q=ints(1, 6)), "cu_seqlens_q must start at 0"),
        (Layout(cu_seqlens_q=ints(0, 4, 3)), "cu_seqlens_q must start at 0"),
        (Layout(cu_seqlens_q=ints(0, 7)), "end at or before 6"),
        (Layout(cu_seqlens_q=ints(0, 6), cu_seqlens_k=ints(0, 9)), "cu_seqlens_k must start"),
        (Layout(cu_seqlens_q=ints(0, 6), kv_len=ints(1, 2)), "kv_len has 2 entries for 1 seq"),
    ],
)
def test_values_that_describe_no_layout_are_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        sequences(1, 6, 6, layout)


@every_kind
def test_holes_count_as_slots_but_never_as_keys(kind):
    """Positions are slots: removing a masked slot moves later keys to other blocks."""
    case = make(kind, keys=24)
    mask = torch.ones(1, 24, dtype=torch.bool)
    mask[0, [3, 8, 9, 10, 11, 17]] = False
    out = run(kind, case, 4, 2, key_mask=mask)[0]
    assert close(out, slow(kind, case, 4, 2, key_mask=mask).out)
    squeezed = {n: x[:, :, mask[0]] if n in OF_KEYS else x for n, x in case.items()}
    assert not close(out, run(kind, squeezed, 4, 2)[0], 1e-3)


@every_kind
def test_true_in_the_mask_means_a_real_key(kind):
    case = make(kind, keys=24)
    mask = torch.ones(1, 24, dtype=torch.bool)
    mask[0, 5:14] = False
    right = slow(kind, case, 4, 2, key_mask=mask).out
    assert close(run(kind, case, 4, 2, key_mask=mask)[0], right)
    assert not close(run(kind, case, 4, 2, key_mask=~mask)[0], right, 1e-3)


@every_kind
def test_a_past_block_without_real_keys_takes_no_place(kind):
    case = make(kind, keys=24)
    mask = torch.ones(1, 24, dtype=torch.bool)
    mask[0, 8:12] = False
    lists = select(kind, case, 4, 10, key_mask=mask)[0, :, 23]
    assert bool((lists == torch.tensor([0, 1, 3, 4, 5, -1])).all())


@every_kind
def test_the_own_block_keeps_its_place_even_without_a_real_key(kind):
    case = make(kind, keys=24)
    mask = torch.ones(1, 24, dtype=torch.bool)
    mask[0, 20:] = False
    lists = select(kind, case, 4, 2, key_mask=mask, q_start=ints(0))[0, :, 23]
    last = lists.amax(-1)
    assert bool((last == 5).all())


@every_kind
def test_keys_before_a_given_origin_are_never_read(kind):
    case = make(kind, keys=24)
    garbage = {n: x.clone() for n, x in case.items()}
    for name in OF_KEYS:
        garbage[name][:, :, :5] = float("nan")
    out = run(kind, garbage, 4, 2, block_origin=ints(5))[0]
    assert close(out, slow(kind, case, 4, 2, block_origin=ints(5)).out)
    assert not bool(out[:, :, :5].any())


@every_kind
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_packed_documents_with_longer_keys_than_queries(kind, chunk):
    """Every document brings a cache of its own length and its last `chunk` queries."""
    lengths, parts = [9, 1, 14, 0, 8], []
    for seed, length in enumerate(lengths):
        parts.append(make(kind, seed=seed, keys=length, queries=min(chunk, length)))
    packed = {n: torch.cat([p[n] for p in parts], 2) for n in parts[0]}
    edges_q = ints(0, *torch.tensor([p["q"].shape[2] for p in parts]).cumsum(0).tolist())
    edges_k = ints(0, *torch.tensor(lengths).cumsum(0).tolist())
    out = run(kind, packed, 4, 2, cu_seqlens_q=edges_q, cu_seqlens_k=edges_k)[0]
    apart = torch.cat([run(kind, p, 4, 2)[0] for p in parts], 2)
    assert close(out, apart)


@every_kind
def test_packed_documents_take_positions_lengths_origins_and_masks_of_their_own(kind):
    case = make(kind, keys=20)
    edges = ints(0, 12, 20)
    mask = torch.ones(1, 20, dtype=torch.bool)
    mask[0, [0, 1, 15]] = False
    given = {"q_start": ints(0, -1), "kv_len": ints(11, 8)}
    out = run(kind, case, 4, 2, cu_seqlens_q=edges, key_mask=mask, **given)[0]
    for index, (a, b) in enumerate([(0, 12), (12, 20)]):
        part = {n: x[:, :, a:b] for n, x in case.items()}
        own = {n: x[index : index + 1] for n, x in given.items()}
        assert close(out[:, :, a:b], run(kind, part, 4, 2, key_mask=mask[:, a:b], **own)[0])


@every_kind
def test_tokens_behind_the_last_document_give_nothing_and_get_no_gradient(kind):
    case = make(kind, keys=20)
    for x in case.values():
        x[:, :, 15:] = float("nan")
    leaves = {n: x.clone().requires_grad_() for n, x in case.items()}
    out, lse = run(kind, leaves, 4, 2, cu_seqlens_q=ints(0, 6, 15))
    assert not bool(out[:, :, 15:].any())
    assert bool((lse[:, :, 15:] == float("-inf")).all())
    grad = torch.ones_like(out)
    grad[:, :, 15:] = float("nan")
    out.backward(grad)
    for name in ("q", "k", "v"):
        assert bool(leaves[name].grad.isfinite().all())
        assert not bool(leaves[name].grad[:, :, 15:].any())
    lists = select(kind, case, 4, 2, cu_seqlens_q=ints(0, 6, 15))
    assert bool((lists[:, :, 15:] == -1).all())


def test_documents_changed_in_place_are_seen():
    """Nothing is cached by the identity of a layout tensor."""
    case, edges = make(keys=20), ints(0, 6, 20)
    run("moba", case, 4, 2, cu_seqlens_q=edges)
    edges[1] = 13
    fresh = run("moba", case, 4, 2, cu_seqlens_q=ints(0, 13, 20))[0]
    assert torch.equal(run("moba", case, 4, 2, cu_seqlens_q=edges)[0], fresh)


def paged(case, block_size, *, seed=0, spare=3):
    """Keys cut into pages in shuffled places, garbage elsewhere; and the page table."""
    batch, _, keys, _ = case["k"].shape
    per_row = block_count(keys, block_size)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(batch * per_row + spare, generator=generator)
    table = order[: batch * per_row].view(batch, per_row).to(torch.int32)
    pages = dict(case)
    for name in OF_KEYS:
        x = torch.nn.functional.pad(case[name], (0, 0, 0, per_row * block_size - keys))
        x = x.unflatten(2, (per_row, block_size)).transpose(1, 2)
        shape = (batch * per_row + spare, *x.shape[2:])
        pages[name] = torch.full(shape, float("nan"), dtype=x.dtype)
        pages[name][table.flatten().long()] = x.flatten(0, 1)
    return pages, {"page_table": table, "kv_len": torch.full((batch,), keys)}


@every_kind
@pytest.mark.parametrize("queries", [1, 5, 22])
def test_paged_caches_equal_contiguous_ones(kind, queries):
    case = make(kind, batch=2, keys=22, queries=queries)
    pages, where = paged(case, 4)
    assert close(run(kind, pages, 4, 3, **where)[0], run(kind, case, 4, 3)[0])
    assert torch.equal(select(kind, pages, 4, 3, **where), select(kind, case, 4, 3))


def test_pages_in_the_wrong_order_give_another_result():
    case = make(keys=22)
    pages, where = paged(case, 4)
    where["page_table"] = where["page_table"].flip(1)
    where["kv_len"] = torch.tensor([20])
    assert not close(run("moba", pages, 4, 6, **where)[0], run("moba", case, 4, 6)[0], 1e-3)


def test_pages_missing_at_the_end_are_marked_below_zero():
    case = make(keys=10, queries=2)
    pages, where = paged(case, 4)
    where["page_table"] = torch.nn.functional.pad(where["page_table"], (0, 3), value=-1)
    assert close(run("moba", pages, 4, 2, **where)[0], run("moba", case, 4, 2)[0])


def test_gradients_of_pages_add_up_where_sequences_share_them():
    case = make(keys=8, queries=4)
    twice = {n: x.repeat(2, 1, 1, 1) if n in ("q", "iq") else x for n, x in case.items()}
    pages, where = paged(case, 4)
    where = {n: x.repeat(2, *[1] * (x.dim() - 1)) for n, x in where.items()}
    leaf = pages["v"].nan_to_num(0.0).requires_grad_()
    run("moba", dict(twice, k=pages["k"], v=leaf), 4, 2, **where)[0].sum().backward()
    single = case["v"].clone().requires_grad_()
    run("moba", dict(case, v=single), 4, 2)[0].sum().backward()
    table = where["page_table"][0].long()
    found = leaf.grad[table].transpose(0, 1).flatten(1, 2)
    assert close(found, 2 * single.grad[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_given_block_means_equal_computed_ones(dtype):
    case = make(keys=30, queries=4, batch=2, dtype=dtype)
    mask = torch.arange(30) >= torch.tensor([[0], [7]])
    means = block_means(case["k"], key_mask=mask, block_size=4)
    assert means.dtype == dtype
    out = run("moba", case, 4, 3, key_mask=mask, block_means=means)[0]
    assert torch.equal(out, run("moba", case, 4, 3, key_mask=mask)[0])
    other = run("moba", case, 4, 3, key_mask=mask, block_means=-means)[0]
    assert not close(other, out, 1e-3)


def test_block_means_are_means_of_real_keys():
    k = torch.arange(12.0).view(1, 1, 12, 1)
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[0, [0, 2, 5, 6, 7, 8]] = False
    means = block_means(k, key_mask=mask, block_size=4)
    assert means.flatten().tolist() == [pytest.approx((1 + 3 + 4) / 3), 0.0, 10.0]
    assert block_means(k, kv_len=torch.tensor([6]), block_size=4).flatten().tolist() == [
        1.5,
        4.5,
        0,
    ]
    with pytest.raises(ValueError, match="block_size is 0"):
        block_means(k, block_size=0)


def test_garbage_in_means_of_incomplete_blocks_is_never_read():
    case = make(keys=30, queries=3)
    means = block_means(case["k"], block_size=4)
    means[:, :, 7:] = float("nan")
    assert torch.equal(run("moba", case, 4, 3, block_means=means)[0], run("moba", case, 4, 3)[0])


@every_kind
def test_queries_may_stand_behind_the_last_key(kind):
    case = make(kind, keys=10, queries=8)
    where = {"q_start": torch.tensor([8])}
    assert close(run(kind, case, 4, 2, **where)[0], slow(kind, case, 4, 2, **where).out)


@every_kind
def test_positions_need_not_end_at_the_last_key(kind):
    """A static cache: queries in the middle of the slots see only what lies before them."""
    case = make(kind, keys=30)
    part = dict(cut(case, 12, 16), **{n: case[n] for n in OF_KEYS})
    out = run(kind, part, 4, 2, q_start=torch.tensor([12]))[0]
    assert close(out, run(kind, case, 4, 2)[0][:, :, 12:16])


def test_slot_anchored_blocks_of_a_left_padded_row():
    """Blocks counted from slot 0: the pads share the first blocks with real keys."""
    case = make("msa", keys=21)
    mask = torch.arange(21)[None] >= 5
    lists = select("msa", case, 8, 2, key_mask=mask, block_origin=ints(0))
    named = block_masks(lists, 3, 4)
    assert bool(named[0, :, 5:8, 0].all())
    assert not bool(named[0, :, 5:8, 1:].any())
    where = {"key_mask": mask, "block_origin": ints(0)}
    assert close(run("msa", case, 8, 2, **where)[0], slow("msa", case, 8, 2, **where).out)
