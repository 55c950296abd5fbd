"""How decode calls are cut: tiles that fit, programs that fill a GPU, few kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparsify.kernels import decoding, gpus
from sparsify.kernels.layout import Layout

HOPPER, AMD = 227 << 10, 64 << 10
FLOAT8 = torch.float8_e4m3fn


def call(batch=1, queries=1, keys=131_072, block=128, topk=16, local="inside", **types):
    """A call of 64 query and 4 key/value heads."""
    q, k, v, iq, ik = tensors(batch=batch, queries=queries, keys=keys, **types)
    return decoding.call_of(q, k, v, iq, ik, Layout(), block, topk, local)


def tensors(batch=1, queries=1, keys=131_072, size=128, dtype=torch.bfloat16, index_dtype=None):
    def empty(*shape, to=dtype):
        return torch.empty(*shape, dtype=to, device="meta")

    index_dtype = index_dtype or dtype
    return (
        empty(batch, 64, queries, size),
        empty(batch, 4, keys, size),
        empty(batch, 4, keys, size),
        empty(batch, 4, queries, size, to=index_dtype),
        empty(batch, 1, keys, size, to=index_dtype),
    )


def tiles(shared_bytes=HOPPER, block=128, **sizes):
    q, _, v, iq, ik = tensors(**sizes)
    return decoding.tiles_of(q, v, iq, ik, block, shared_bytes)


def test_few_lists_are_cut_into_places_and_many_are_not():
    assert not call().one_program
    assert not call(batch=8).one_program
    assert call(batch=8, queries=8).one_program
    assert call(batch=128, queries=8).one_program


def test_a_last_wave_that_is_nearly_empty_is_not_waited_for():
    few = call(batch=33)  # as many lists as multiprocessors
    assert few.lists == 132 and few.one_program
    assert not replace(few, batch=34).one_program
    assert replace(few, batch=7 * 34).one_program


def test_partial_results_stay_small():
    long = call(topk=256, keys=1 << 20, queries=16)
    assert not long.one_program
    assert replace(long, part_bytes=16 * long.part_bytes).one_program


@pytest.mark.parametrize(
    ("sizes", "multiprocessors"),
    [({}, 2), ({"batch": 2}, 1), ({"batch": 3}, 0), ({"topk": 33}, 1), ({"batch": 128}, 0)],
)
def test_multiprocessors_for_each_place(sizes, multiprocessors):
    assert call(**sizes).per_place == multiprocessors


@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [
        ({"keys": 128 * 20}, 128),
        ({"keys": 1 << 17}, 1024),
        ({"keys": (1 << 17) + 1}, 2048),
        ({"keys": 1 << 18, "batch": 2}, 2048),
        ({"keys": (1 << 18) + 1}, 0),  # too many for one program
        ({"batch": 3}, 0),  # too many programs
        ({"batch": 128}, 0),  # programs of whole lists
        ({"topk": 1}, 0),  # nothing to choose
        ({"keys": 128 * 15}, 0),
    ],
)
def test_programs_of_a_place_find_it_by_themselves_where_they_wait_for_nothing(sizes, numbers):
    assert call(**sizes).ranked == numbers


@pytest.mark.parametrize(
    ("keys", "topk", "segments"),
    [(16_384, 16, 1), (16_385, 16, 2), (131_072, 16, 8), (1 << 19, 16, 8), (1 << 20, 16, 16)],
)
def test_long_rows_are_ranked_by_several_programs(keys, topk, segments):
    assert call(keys=keys, topk=topk).segments == segments
    assert call(keys=keys, topk=topk, batch=64, queries=8).segments == 1


def test_the_best_of_all_segments_fit_one_program():
    for topk in (2, 16, 17, 33, 100, 129, 256):
        one = call(keys=1 << 22, topk=topk)
        assert one.segments == 1 or one.segments * one.length <= decoding.CHUNK
    assert call(keys=1 << 22, topk=200).segments == 2
    assert call(keys=1 << 22, topk=256, local="union").length == 256


def test_places_of_short_caches_come_in_few_numbers():
    """Each is a kernel of its own, and a growing cache passes all of them."""
    assert {call(keys=128 * n).chosen for n in range(1, 40)} == {1, 2, 4, 8, 15}
    assert call(keys=128 * 15).every and not call(keys=128 * 16).every
    assert call(keys=128 * 16, local="union").every
    assert not call(keys=128 * 17, local="union").every
    assert call(topk=1).every and not call(topk=1, local="union").every


def test_tiles_of_the_attention_depend_on_the_shape_of_a_row_alone():
    wanted = tiles()
    for other in (
        tiles(batch=64),
        tiles(keys=1 << 20),
        tiles(queries=16),
        tiles(index_dtype=FLOAT8),
    ):
        assert other.columns == wanted.columns


def test_float8_scores_stay_where_products_are_summed_in_float32():
    assert tiles(queries=16).score_rows == 64
    assert tiles(queries=16, index_dtype=FLOAT8).score_rows == 32


@pytest.mark.parametrize("shared_bytes", [HOPPER, AMD])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [16, 80, 128, 256])
@pytest.mark.parametrize("block", [16, 48, 128, 256])
def test_tiles_fit(block, size, dtype, shared_bytes):
    found = tiles(shared_bytes, block, size=size, dtype=dtype)
    item = dtype.itemsize
    wide = max(16, 1 << (size - 1).bit_length())
    assert found.columns * 2 * wide * item * (found.stages - 1) <= shared_bytes
    assert found.score_columns * wide * item * found.score_stages <= shared_bytes
    assert found.columns >= 16 and found.stages >= 2


def test_two_programs_that_walk_over_lists_share_a_multiprocessor():
    """The next keys of one come while the other computes."""
    for size in (64, 128, 256):
        found = tiles(size=size)
        assert 2 * found.columns * 4 * size * (found.stages - 1) <= 128 << 10
    assert tiles(size=64).stages == 3 and tiles(size=128).stages == 2


def pair(a, b):
    return tuple(torch.empty(1, dtype=t, device="meta") for t in (a, b))


def test_of_two_dtypes_the_narrower_is_widened_or_queries_become_terms():
    assert not decoding.is_exact(*pair(torch.bfloat16, FLOAT8))
    assert not decoding.is_exact(*pair(torch.float16, torch.float16))
    assert decoding.is_exact(*pair(FLOAT8, torch.float32))
    assert decoding.is_exact(*pair(torch.float32, FLOAT8))
    for queries in (torch.float32, torch.bfloat16):
        assert not decoding.is_exact(*pair(queries, torch.float16))
        assert decoding.terms_of(*pair(queries, torch.float16)) == 2
    assert decoding.terms_of(*pair(torch.float32, torch.bfloat16)) == 3
    assert decoding.terms_of(*pair(torch.bfloat16, torch.bfloat16)) == 1


def test_eight_bits_take_as_many_numbers_as_tensor_cores_do():
    def width(a, b, size):
        return decoding.index_width(*(torch.empty(1, 1, 1, size, dtype=t) for t in (a, b)))

    assert width(FLOAT8, FLOAT8, 16) == 32 and width(FLOAT8, FLOAT8, 40) == 64
    assert width(FLOAT8, torch.float16, 16) == width(torch.float32, FLOAT8, 3) == 16


@pytest.fixture
def fresh():
    """What was asked of GPUs is forgotten."""
    gpus.capability.cache_clear()
    yield
    gpus.capability.cache_clear()


@pytest.mark.parametrize(
    ("capability", "newer", "hopper", "float8"),
    [
        ((8, 0), False, False, False),
        ((8, 9), False, False, True),
        ((9, 0), True, True, True),
        ((12, 0), True, False, True),
    ],
)
def test_what_a_gpu_has(capability, newer, hopper, float8, fresh, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    device = torch.device("cuda", 0)
    assert gpus.is_hopper_or_newer(device) == newer
    assert (gpus.is_hopper(device), gpus.has_float8(device)) == (hopper, float8)


def test_what_another_device_has(fresh, monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert gpus.has_float8(cpu) and not gpus.is_hopper_or_newer(cpu)
    assert gpus.processors(cpu) == 132
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not gpus.has_float8(cuda) and not gpus.is_hopper_or_newer(cuda)


def test_a_mask_implies_the_origin():
    mask = torch.tensor([[False, False, True, False], [False] * 4, [True] * 4])
    assert decoding.readable(Layout(key_mask=mask)).block_origin.tolist() == [2, 4, 0]
    given = Layout(key_mask=mask, block_origin=torch.tensor([0, 0, 0]))
    assert decoding.readable(given).block_origin.tolist() == [0, 0, 0]


def test_layouts_that_kernels_cannot_read_are_copied():
    table = torch.arange(6, dtype=torch.int32).view(3, 2).t()
    lengths = torch.arange(4)[::2]
    made = decoding.readable(Layout(page_table=table, kv_len=lengths))
    assert made.page_table.stride(1) == 1 and torch.equal(made.page_table, table)
    assert made.kv_len.is_contiguous() and torch.equal(made.kv_len, lengths)
