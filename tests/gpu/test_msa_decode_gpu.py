"""MSA's decode kernels on a GPU, against the reference in float64.

Most tests share shapes, since a kernel costs more to compile than to run.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from sparsify.kernels import decoding, reference, schemas
from sparsify.kernels.attend import decode
from sparsify.kernels.layout import Layout
from sparsify.kernels.select import decode_choice
from tests._util.index_lists import by_last_bits
from tests._util.msa_decode import (
    LISTS,
    PLACES,
    RANKED_PLACES,
    WAYS,
    assert_choice,
    attend,
    attend_by,
    case,
    check,
    in_pages,
)
from tests._util.parity import same_bits

DEVICE = "cuda"
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
LOCALS = ("inside", "union")
NAN, INF = math.nan, math.inf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WHOLE = 8704  # 68 whole blocks, for pages


def base(**given):
    """The shape that most tests share: 67 blocks, the last one short."""
    sizes = {
        "heads": 64,
        "groups": 4,
        "keys": 8640,
        "size": 128,
        "index_size": 128,
        "block": 128,
        "topk": 16,
        "dtype": BF16,
        "device": DEVICE,
    }
    x = case(**(sizes | given))
    return x._replace(iq=spread(x.iq), ik=spread(x.ik))


def spread(x):
    """Index tensors of whole numbers: their products are exact in every dtype."""
    return (2 * x.float()).round().clamp(-8, 8).to(x.dtype)


@pytest.fixture(params=WAYS)
def path(request, monkeypatch):
    attend_by(request.param, monkeypatch)


# Parity


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("queries", [1, 8, 16])
def test_numbers_of_queries(queries, local, path):
    check(base(batch=2, queries=queries, local=local, kv_len=[8620, 3001]))


def test_long_contexts():
    """More blocks than one program ranks."""
    check(base(keys=140_003))
    check(base(keys=140_003, queries=3, batch=2, kv_len=[140_000, 66_000]))


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_dtypes(dtype, path):
    check(base(dtype=dtype, queries=2))


@pytest.mark.parametrize(
    "dtypes", [(FP8, FP8), (BF16, FP8), (FP8, BF16), (FP16, BF16), (FP32, BF16)]
)
@pytest.mark.parametrize("queries", [1, 16])
def test_index_tensors_of_other_dtypes(dtypes, queries):
    check(base(index_dtype=dtypes[0], key_dtype=dtypes[1], queries=queries))


def test_short_index_vectors_of_eight_bits():
    """Tensor cores take no fewer than 32 of their numbers."""
    check(base(index_dtype=FP8, index_size=16, queries=2))


@pytest.mark.parametrize("key_dtype", [BF16, FP16])
def test_float32_queries(key_dtype):
    check(case(heads=16, groups=4, index_heads=4, keys=9000, size=128, index_size=128, block=128,
               topk=16, queries=5, dtype=BF16, index_dtype=FP32, key_dtype=key_dtype,
               device=DEVICE))  # fmt: skip


@pytest.mark.parametrize("key_dtype", [BF16, FP16])
def test_the_last_bits_of_float32_queries_count(key_dtype):
    """One number of a query ranks each block; without the last term, otherwise."""
    x, coarse = by_last_bits(key_dtype, blocks=128, size=128, block=16, device=DEVICE)
    sizes = {"block_size": 16, "topk": 9}
    wanted = reference.msa_select(*x, Layout(), **sizes)
    assert torch.equal(decode_choice.choose(*x, Layout(), **sizes), wanted)
    assert not torch.equal(reference.msa_select(*coarse, Layout(), **sizes), wanted)


SIZES = [(64, 64, 64), (80, 80, 32), (96, 128, 48), (192, 128, 64), (256, 256, 256)]


@pytest.mark.parametrize(("size", "value_size", "index_size"), SIZES)
def test_head_sizes(size, value_size, index_size, path):
    check(base(size=size, value_size=value_size, index_size=index_size, heads=16, queries=2))


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (7, 1), (6, 6), (64, 2)])
@pytest.mark.parametrize("shared", [True, False])
def test_head_ratios(heads, groups, shared):
    check(base(heads=heads, groups=groups, index_heads=1 if shared else groups, queries=3))


@pytest.mark.parametrize(("block", "topk"), [(16, 16), (32, 40), (64, 8), (96, 5), (256, 4)])
def test_blocks_and_places(block, topk, path):
    check(base(block=block, topk=topk, queries=2, keys=5003))


@pytest.mark.parametrize("topk", [1, 2, 65, 200, 10**6])
def test_own_block_alone_long_lists_and_dense(topk, path):
    check(base(topk=topk, keys=8611))


def test_many_places():
    check(base(topk=256, block=16, keys=9003, heads=8))


@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_scale(scale):
    check(base(), scale=scale)


LAYOUTS = {
    "at its own positions": {"kv_len": [8000, 700], "q_start": [5000, 690]},
    "around the ends": {"kv_len": [3, 0], "q_start": [-2, 9000]},
    "origins": {"block_origin": [5, 3333], "kv_len": [8600, 8640]},
    "left padding": {
        "key_mask": [[s >= 500 for s in range(8640)], [s >= 8638 for s in range(8640)]]
    },
    "holes": {
        "key_mask": [[s % 9 < 4 for s in range(8640)], [s % 1000 > 400 for s in range(8640)]]
    },
}


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, local):
    check(base(batch=2, queries=4, local=local, **LAYOUTS[name]))


def test_through_the_op(monkeypatch):
    monkeypatch.setenv("SPARSIFY_IMPL", "triton")
    monkeypatch.delenv("SPARSIFY_DISABLE", raising=False)
    x = base(batch=2, queries=2, kv_len=[8620, 3001])
    where = {"kv_len": x.layout.kv_len, **x.sizes}
    assert same_bits(schemas.msa_attention(*x[:5], **where), attend(x))


# Random numbers: near ties, where the replay rule decides


@pytest.mark.parametrize("index_dtype", [BF16, FP8])
def test_random_index_tensors(index_dtype):
    check(case(heads=16, groups=4, keys=9000, size=128, index_size=128, block=128, topk=16,
               queries=16, dtype=BF16, index_dtype=index_dtype, device=DEVICE))  # fmt: skip


def test_equal_scores_go_to_the_lower_block(path):
    x = base(queries=2)
    assert_choice(x._replace(ik=torch.zeros_like(x.ik)))
    check(x._replace(ik=x.ik.sign(), iq=x.iq.sign()))


@pytest.mark.parametrize("local", LOCALS)
def test_scores_that_are_not_finite(local):
    """NaN ranks last, -inf in front of it, +inf first."""
    x = base(queries=2, local=local)
    x.iq.abs_().add_(1)
    x.ik[:, :, 5] = NAN
    x.ik[:, :, 128:256] = -INF
    x.ik[:, :, 3000] = INF
    check(x)
    check(x._replace(sizes=x.sizes | {"topk": 66}))


# Pages


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize(
    ("block", "index_dtype"), [(128, BF16), (128, FP8), (16, BF16), (96, BF16)]
)
def test_pages_give_the_bits_of_contiguous_keys(block, index_dtype, local, path):
    keys = 8640 // block * block
    x = base(batch=2, queries=3, block=block, keys=keys, local=local, index_dtype=index_dtype,
             kv_len=[keys - 21, 3001])  # fmt: skip
    assert same_bits(attend(in_pages(x)), attend(x))
    check(in_pages(x))


# Bits


@pytest.mark.parametrize("queries", [1, 8])
def test_a_row_does_not_depend_on_its_batch(queries):
    lengths = [8640, 40, 5000, 128 * 16, 8000, 129, 0, 7777]
    x = base(batch=8, queries=queries, keys=WHOLE, kv_len=lengths)
    whole = attend(x)
    many = in_pages(x)
    wide = many._replace(
        q=many.q.repeat(20, 1, 1, 1),
        iq=many.iq.repeat(20, 1, 1, 1),
        layout=Layout(
            kv_len=many.layout.kv_len.repeat(20), page_table=many.layout.page_table.repeat(20, 1)
        ),
    )
    crowd = attend(wide)
    assert same_bits([t[-8:] for t in crowd], whole)
    for b in range(8):
        assert same_bits(attend(x.row(b)), [t[b : b + 1] for t in whole])


@pytest.mark.parametrize("block", [128, 256, 96])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_all_ways_to_attend_a_list_give_the_same_bits(block, dtype, monkeypatch):
    x = base(batch=2, queries=3, block=block, dtype=dtype, kv_len=[8620, 1000])
    attend_by(LISTS, monkeypatch)
    whole = attend(x)
    for way in (PLACES, RANKED_PLACES):
        attend_by(way, monkeypatch)
        assert same_bits(attend(x), whole)


def test_stages_do_not_matter(monkeypatch):
    x = base(batch=2, queries=8)
    want, real = attend(x), decoding.tiles_of
    for stages in (1, 2, 4):
        monkeypatch.setattr(
            decoding, "tiles_of", lambda *a, n=stages: dataclasses.replace(real(*a), stages=n)
        )
        assert same_bits(attend(x), want)


def test_the_same_call_twice():
    x = base(batch=3, queries=8)
    assert same_bits(attend(x), attend(x))


# Values that are not finite, buffers that nobody wrote


def test_hidden_keys_and_values_do_not_reach_a_row(path):
    x = base(queries=3, batch=2, kv_len=[7000, 400], q_start=[6990, 397])
    want = attend(x)
    for tensor in (x.k, x.v, x.ik):
        tensor[0, :, 6993:], tensor[1, :, 400:] = NAN, INF
    assert same_bits(attend(x), want)


def test_visible_values_that_are_not_finite_come_out(path):
    x = base(queries=3)
    x.v[:, :, 8639] = NAN
    out, lse = attend(x)
    assert bool(out[:, :, :2].isfinite().all()) and not out[:, :, 2].isfinite().any()
    assert bool(lse.isfinite().all())


def test_buffers_that_nobody_wrote(path, monkeypatch):
    real = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        made = real(self, *args, **kwargs)
        return made.fill_(NAN if made.is_floating_point() else 10**9)

    x = base(batch=3, queries=3, kv_len=[8640, 0, 130])
    want = attend(x)
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    assert same_bits(attend(x), want)


# Graphs


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("batch", [1, 20])
def test_a_captured_graph_is_replayed_with_other_lengths(batch, paged):
    x = base(batch=batch, queries=4, keys=WHOLE, kv_len=[8000] * batch)
    x = in_pages(x) if paged else x
    attend(x)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend(x)
    for round_ in range(3):
        lengths = torch.randint(0, 8640, (batch,), device=DEVICE)
        x.layout.kv_len.copy_(lengths)
        x.q.copy_(torch.roll(x.q, 1, 1))
        x.iq.copy_(torch.roll(x.iq, 1, 1))
        if paged:
            table = x.layout.page_table
            table.copy_(torch.roll(table, round_, 1))
        graph.replay()
        assert same_bits(got, attend(x)), round_
        check(x)


def test_calls_in_a_row_do_not_disturb_each_other():
    """Kernels start before those in front of them end, and share freed memory."""
    calls = [base(queries=1, kv_len=[n], seed=n) for n in (8640, 300, 5000)]
    want = [attend(x) for x in calls]
    torch.cuda.synchronize()
    for _ in range(20):
        got = [attend(x) for x in calls]
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def test_nothing_waits_for_the_device():
    x = in_pages(base(batch=2, queries=2, keys=WHOLE, kv_len=[8000, 70]))
    attend(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_keys_beyond_two_to_the_31_elements():
    x = in_pages(base(keys=1280, kv_len=[1270]))
    pages = 2**31 // (4 * 128 * 128) + 40
    k = torch.zeros(pages, 4, 128, 128, dtype=BF16, device=DEVICE)
    far = x.layout.page_table + (pages - len(x.k))
    k[-len(x.k) :] = x.k
    layout = x.layout._replace(page_table=far)
    v = torch.zeros_like(k)
    v[-len(x.v) :] = x.v
    ik = torch.zeros(pages, 1, 128, 128, dtype=BF16, device=DEVICE)
    ik[-len(x.ik) :] = x.ik
    assert same_bits(attend(x._replace(k=k, v=v, ik=ik, layout=layout)), attend(x))


def test_index_heads_beyond_two_to_the_31_elements():
    """By pointers: descriptors do not fetch blocks of 96 keys."""
    x = base(heads=6, groups=3, index_heads=3, keys=960, block=96, topk=3)
    numbers = torch.empty(2**31 + x.ik[0, 0].numel(), dtype=BF16, device=DEVICE)
    far = numbers.as_strided(x.ik.shape, (128, 2**30, 128, 1))
    far.copy_(x.ik)
    assert same_bits(attend(x._replace(ik=far)), attend(x))


def test_old_gpus_have_no_products_of_eight_bits(monkeypatch):
    monkeypatch.setattr(decode, "has_float8", lambda _: False)
    x = base(index_dtype=FP8)
    assert "float8" in decode.unsupported(*x[:5], x.layout, *x.sizes.values())
