"""MSA's decode kernels against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from sparsify.kernels import accelerated, decoding, reference
from sparsify.kernels.attend import decode
from sparsify.kernels.layout import Layout
from sparsify.kernels.select import decode_choice
from tests._util.index_lists import by_last_bits
from tests._util.msa_decode import (
    LISTS,
    PLACES,
    RANKED_PLACES,
    WAYS,
    attend,
    attend_by,
    case,
    check,
    in_pages,
)
from tests._util.parity import error, same_bits

NAN, INF = math.nan, math.inf


@pytest.fixture(params=WAYS)
def path(request, monkeypatch):
    attend_by(request.param, monkeypatch)


@pytest.fixture(params=[("inside", LISTS), ("union", PLACES)], ids=", ".join)
def local(request, monkeypatch):
    """Both rules, each with one way to attend a list."""
    attend_by(request.param[1], monkeypatch)
    return request.param[0]


@pytest.fixture
def short_segments(monkeypatch):
    """Lists that several programs rank."""
    monkeypatch.setattr(decoding, "LEAST_CHUNK", 8)
    monkeypatch.setattr(decoding, "CHUNK", 8)
    monkeypatch.setattr(decode_choice, "CHUNK", 8)


@pytest.mark.parametrize(
    ("block", "keys", "topk"),
    [(16, 100, 3), (24, 131, 4), (48, 200, 2), (130, 500, 2), (16, 15, 3), (16, 64, 4)],
)
def test_blocks_and_places(block, keys, topk, local):
    check(case(block=block, keys=keys, topk=topk, local=local, queries=2))


@pytest.mark.parametrize("queries", [1, 7, 16])
def test_numbers_of_queries(queries, path):
    check(case(queries=queries, keys=75))


@pytest.mark.parametrize("topk", [1, 7, 8, 1000])
def test_own_block_alone_and_dense(topk, local):
    check(case(queries=2, topk=topk, local=local))


@pytest.mark.parametrize(
    ("size", "value_size", "index_size", "dtype"),
    [(16, 24, 40, torch.float32), (80, 16, 16, torch.float16), (1, 1, 1, torch.float32)],
)
def test_head_sizes(size, value_size, index_size, dtype, path):
    check(case(size=size, value_size=value_size, index_size=index_size, dtype=dtype, queries=2))


@pytest.mark.parametrize("size", [130, 256])
def test_wide_heads(size):
    check(case(size=size, index_size=size, dtype=torch.float16, block=48))


@pytest.mark.parametrize(
    ("heads", "groups", "shared"),
    [(7, 1, True), (3, 3, True), (3, 3, False), (32, 2, False), (20, 1, True)],
)
def test_head_ratios(heads, groups, shared):
    check(case(heads=heads, groups=groups, index_heads=1 if shared else groups, queries=2))


@pytest.mark.parametrize("scale", [0.7, 1e-3])
def test_scale(scale, path):
    check(case(queries=2), scale=scale)


def test_more_rows_than_a_tile():
    """Queries times groups beyond the rows of a score tile."""
    check(case(heads=5, groups=5, queries=13, keys=70, dtype=torch.float16))
    check(case(heads=5, groups=5, queries=4, keys=40))


def test_blocks_of_several_tiles(path):
    check(case(block=256, keys=1100, topk=2, size=64, dtype=torch.float16, index_size=64))


LAYOUTS = {
    "lengths": {"kv_len": [97, 33]},
    "an empty sequence": {"kv_len": [0, 50]},
    "shorter than the queries": {"kv_len": [2, 1]},
    "at its own positions": {"kv_len": [70, 33], "q_start": [40, 31]},
    "before the first key": {"q_start": [-2, -9]},
    "behind the last key": {"kv_len": [41, 0], "q_start": [60, 5]},
    "origins": {"block_origin": [5, 33], "kv_len": [90, 40]},
    "left padding": {"key_mask": [[s >= 5 for s in range(100)], [s >= 96 for s in range(100)]]},
    "holes": {"key_mask": [[s % 9 < 4 for s in range(100)], [s < 30 for s in range(100)]]},
    "no real key": {"key_mask": [[False] * 100, [s % 40 == 39 for s in range(100)]]},
    "slot anchored": {
        "key_mask": [[s >= 5 for s in range(100)], [s >= 41 for s in range(100)]],
        "block_origin": [0, 0],
    },
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, local):
    check(case(batch=2, queries=3, local=local, **LAYOUTS[name]))


def test_the_last_bits_of_float32_queries_count():
    """One number of a query ranks each block; without the last term, otherwise."""
    x, coarse = by_last_bits(torch.float16, blocks=32, size=32, block=16)
    sizes = {"block_size": 16, "topk": 5}
    wanted = reference.msa_select(*x, Layout(), **sizes)
    assert torch.equal(decode_choice.choose(*x, Layout(), **sizes), wanted)
    assert not torch.equal(reference.msa_select(*coarse, Layout(), **sizes), wanted)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_float32_queries_and_keys_that_are_not_finite(value):
    x = case(queries=2, index_dtype=torch.float32, key_dtype=torch.float16, topk=3)
    x.ik[0, 0, 20, 3] = value
    check(x)


@pytest.mark.parametrize("count", [1, 4, 10**6])
def test_programs_share_the_blocks_of_unequal_sequences(count, monkeypatch):
    """However many there are, each block is scored, and none twice."""
    monkeypatch.setattr(decoding, "processors", lambda _: count)
    check(case(batch=5, heads=2, groups=1, keys=130, kv_len=[0, 130, 16, 3, 77]))


@pytest.mark.parametrize("name", ["lengths", "behind the last key", "origins", "holes"])
def test_layouts_with_blocks_of_several_tiles(name, monkeypatch):
    tiles = decoding.Tiles(16, 16, 1, 4, 16, 2)
    monkeypatch.setattr(decoding, "tiles_of", lambda *_: tiles)
    check(case(batch=2, queries=3, block=40, topk=2, **LAYOUTS[name]))


def test_lengths_of_other_dtypes():
    x = case(batch=2, queries=2, kv_len=[97, 33], q_start=[60, 31])
    layout = Layout(*(None if t is None else t.int() for t in x.layout))
    assert same_bits(attend(x), attend(x._replace(layout=layout)))


def test_rows_without_keys_are_zero(path):
    out, lse = attend(case(batch=2, queries=4, kv_len=[0, 2]))
    nothing = lse == -INF
    assert nothing[0].all() and nothing[1, :, :2].all() and not nothing[1, :, 2:].any()
    assert not out[nothing].any() and bool((out[~nothing] != 0).any())


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 1, 9), (1, 0, 9), (2, 3, 0)])
def test_empty_calls(batch, queries, keys):
    x = case(batch=batch, queries=queries, keys=keys)
    out, lse = attend(x)
    assert out.shape == (batch, 4, queries, 16) and lse.shape == (batch, 4, queries)
    assert not out.any() and bool((lse == -INF).all())
    lists = accelerated.msa_select(x.iq, x.ik, x.layout, **x.sizes)
    assert torch.equal(lists, reference.msa_select(x.iq, x.ik, x.layout, **x.sizes))


# Pages


@pytest.mark.parametrize(("block", "local"), [(16, "inside"), (48, "union")])
def test_pages_give_the_bits_of_contiguous_keys(block, local):
    x = case(batch=2, queries=2, block=block, keys=4 * block, local=local, kv_len=[61, 40])
    assert same_bits(attend(in_pages(x)), check(x))
    check(in_pages(x))


def test_pages_of_several_tiles_and_several_pages_of_a_tile():
    for block, size in ((256, 64), (16, 16)):
        x = case(block=block, keys=4 * block, topk=2, size=size, index_size=size)
        x = x._replace(layout=Layout(kv_len=torch.tensor([3 * block + 5])))
        assert same_bits(attend(in_pages(x)), attend(x))


def test_entries_that_name_no_page_are_not_read_as_addresses():
    x = in_pages(case(keys=64, kv_len=[20]))
    table = x.layout.page_table.clone()
    table[:, 2:] = torch.tensor([-1, 10**6])
    other = x._replace(layout=x.layout._replace(page_table=table))
    assert same_bits(attend(other), attend(x))


@pytest.mark.parametrize(
    ("block", "paged", "local"),
    [(16, False, "union"), (16, True, "inside"), (128, False, "inside"), (128, True, "union")],
)
def test_index_keys_by_descriptors(block, paged, local, monkeypatch):
    x = case(batch=2, queries=2, block=block, keys=4 * block, local=local, kv_len=[60, 37])
    x = in_pages(x) if paged else x
    plain = attend(x)
    monkeypatch.setattr(decode_choice, "is_hopper_or_newer", lambda _: True)
    assert same_bits(attend(x), plain)


# Choice


def test_equal_scores_go_to_the_lower_block(local):
    x = case(queries=2, keys=120, topk=4, local=local)
    check(x._replace(iq=torch.zeros_like(x.iq)))
    check(x._replace(iq=x.iq.sign(), ik=x.ik.round().clamp(-1, 1)))


@pytest.mark.parametrize(("topk", "local"), [(2, "inside"), (4, "union"), (20, "inside")])
def test_segments(topk, local, short_segments, monkeypatch):
    attend_by(RANKED_PLACES, monkeypatch)
    check(case(queries=2, keys=600, topk=topk, local=local))


def test_segments_of_equal_scores(short_segments, monkeypatch):
    attend_by(RANKED_PLACES, monkeypatch)
    x = case(keys=600, topk=4)
    for ik in (torch.zeros_like(x.ik), x.ik.round().clamp(-1, 1)):
        check(x._replace(ik=ik))


def test_chunks_of_one_program(short_segments, monkeypatch):
    attend_by(LISTS, monkeypatch)
    check(case(queries=2, keys=600, topk=4))


@pytest.mark.parametrize(("block", "local"), [(16, "inside"), (16, "union"), (40, "inside")])
def test_scores_that_are_not_finite(block, local):
    """NaN ranks last, -inf in front of it, +inf first."""
    x = case(queries=2, keys=6 * block, block=block, topk=3, local=local)
    x.iq.abs_().add_(0.1)
    x.ik[:, :, 5] = NAN
    x.ik[:, :, block : 2 * block] = -INF
    x.ik[:, :, 3 * block + 7] = INF
    check(x)
    check(x._replace(sizes=x.sizes | {"topk": 5}))


def test_negative_zero_is_zero():
    x = case(keys=80, topk=2)
    x.iq.abs_()
    x.ik.zero_()
    x.ik[:, :, :16] = -0.0
    check(x)


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float16), (torch.float8_e4m3fn,) * 2])
def test_index_tensors_of_other_dtypes(dtypes):
    check(case(queries=2, index_dtype=dtypes[0], key_dtype=dtypes[1]))


def test_index_keys_narrower_than_their_queries():
    check(case(queries=2, index_dtype=torch.float16, key_dtype=torch.float8_e4m3fn))


def test_future_index_keys_do_not_matter():
    x = case(queries=3, local="union")
    x.iq.abs_()
    x.ik[:, :, 96:] = -50.0
    ik = x.ik.clone()
    ik[:, :, 98:] = 50.0
    (a, _), (b, _) = attend(x), attend(x._replace(ik=ik))
    assert torch.equal(a[:, :, :1], b[:, :, :1]) and not torch.equal(a[:, :, 2:], b[:, :, 2:])


# Values that are not finite, buffers that nobody wrote


def test_hidden_keys_and_values_do_not_reach_a_row(path):
    x = case(queries=3, batch=2, kv_len=[70, 40], q_start=[60, 37])
    want = attend(x)
    for tensor in (x.k, x.v, x.ik):
        tensor[0, :, 63:], tensor[1, :, 40:] = NAN, INF
    assert same_bits(attend(x), want)


@pytest.mark.parametrize("value", [NAN, INF])
def test_visible_values_that_are_not_finite_come_out(value, path):
    x = case(queries=3, keys=64)
    x.v[:, :, 63] = value
    out, lse = attend(x)
    assert bool(out[:, :, :2].isfinite().all()) and not out[:, :, 2].isfinite().any()
    assert bool(lse.isfinite().all())


def test_keys_that_are_not_numbers_come_out(path):
    x = case(keys=64)
    x.k[:, 0, 63] = NAN
    out, _ = attend(x)
    assert bool(out[:, :2].isnan().all()) and bool(out[:, 2:].isfinite().all())


def test_logits_of_minus_infinity_alone_give_zero(path):
    x = case(keys=64)
    x.q.abs_().add_(0.1)
    x.k.fill_(-INF)
    out, lse = attend(x)
    assert not out.any() and bool((lse == -INF).all())


def test_huge_logits(path):
    x = case(queries=2)
    x.q.mul_(1e4)
    got, want = (
        attend(x),
        reference.msa_attention(*(t.double() for t in x[:5]), x.layout, **x.sizes),
    )
    assert error(got[0], want[0]) < 1e-5 and error(got[1], want[1]) < 1e-6


@pytest.mark.parametrize("name", ["an empty sequence", "holes", "behind the last key"])
def test_buffers_that_nobody_wrote(name, path, monkeypatch):
    real = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        made = real(self, *args, **kwargs)
        return made.fill_(NAN if made.is_floating_point() else 10**9)

    x = case(batch=2, queries=3, **LAYOUTS[name])
    want = attend(x)
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    assert same_bits(attend(x), want)


# Rows and their neighbours


def test_a_row_does_not_depend_on_its_batch(local):
    x = case(batch=3, queries=2, local=local, kv_len=[97, 33, 64])
    whole = attend(x)
    for b in range(3):
        assert same_bits(attend(x.row(b)), [t[b : b + 1] for t in whole])


@pytest.mark.parametrize(("block", "dtype"), [(16, torch.float32), (130, torch.float16)])
def test_all_ways_to_attend_a_list_give_the_same_bits(block, dtype, monkeypatch):
    x = case(batch=2, queries=3, block=block, keys=5 * block, topk=4, dtype=dtype, kv_len=[40, 66])
    x.k[1, :, 5] = -INF
    attend_by(LISTS, monkeypatch)
    whole = attend(x)
    for way in (PLACES, RANKED_PLACES):
        attend_by(way, monkeypatch)
        assert same_bits(attend(x), whole)


@pytest.mark.parametrize(("value_size", "local"), [(16, "inside"), (24, "inside"), (48, "union")])
def test_slices_of_the_values_change_no_bits(value_size, local, monkeypatch):
    """With blocks that numpy multiplies alike whatever the number of columns."""
    attend_by(PLACES, monkeypatch)
    sizes = {"block": 16, "value_size": value_size, "dtype": torch.float16}
    x = case(queries=2, keys=120, local=local, topk=4, kv_len=[100], **sizes)
    cut, slices = decode._slices, []
    monkeypatch.setattr(decode, "_slices", lambda *call: slices.append(cut(*call)) or slices[-1])
    whole = attend(x)
    monkeypatch.setattr(decode, "_LEAST_SLICE", 8)
    assert same_bits(check(x), whole)
    assert slices == [1, 2]


def test_any_strides():
    x = case(batch=2, queries=3, heads=4, kv_len=[97, 33])
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x[:5]]
    assert same_bits(attend(x._replace(**dict(zip(x._fields, turned, strict=False)))), attend(x))
