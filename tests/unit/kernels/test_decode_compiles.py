"""The kernels of MSA's decode compile for GPUs that are not there, and fit them."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from sparsify.kernels import decoding, tiling
from sparsify.kernels.attend import decode
from sparsify.kernels.layout import Layout
from sparsify.kernels.select import decode_choice
from tests._util.compiling import SHARED_BYTES, compiled, key, launches, resources

pytestmark = pytest.mark.slow

MOST_REGISTERS = 255
MOST_STACK_BYTES = 8  # some compilers keep two words there, so that a third program fits
FLOAT8 = torch.float8_e4m3fn
KERNELS = (
    "decode_score_fwd_kernel",
    "decode_top_fwd_kernel",
    "decode_attention_fwd_kernel",
    "decode_merge_fwd_kernel",
)


def case(
    target="sm_90",
    *,
    batch=1,
    heads=64,
    groups=4,
    queries=1,
    keys=131_072,
    size=128,
    value_size=None,
    index_size=128,
    index_heads=1,
    block=128,
    topk=16,
    local="inside",
    dtype=torch.bfloat16,
    index_dtype=None,
    paged=False,
    masked=False,
):
    """What a call would launch on a target, one of each kind."""
    index_dtype = index_dtype or dtype
    rows, slots = (64, block) if paged else (batch, keys)
    q = torch.empty(batch, heads, queries, size, dtype=dtype)
    k = torch.empty(rows, groups, slots, size, dtype=dtype)
    v = torch.empty(rows, groups, slots, value_size or size, dtype=dtype)
    iq = torch.empty(batch, groups, queries, index_size, dtype=index_dtype)
    ik = torch.empty(rows, index_heads, slots, index_size, dtype=index_dtype)
    layout = Layout(
        kv_len=torch.zeros(batch, dtype=torch.int64),
        key_mask=torch.ones(batch, keys, dtype=torch.bool) if masked else None,
        page_table=torch.zeros(batch, keys // block, dtype=torch.int32) if paged else None,
    )
    newer = target in ("sm_90", "sm_100")
    with (
        launches() as found,
        mock.patch.object(decoding, "is_hopper_or_newer", lambda _: newer),
        mock.patch.object(decode_choice, "is_hopper_or_newer", lambda _: newer),
        mock.patch.object(tiling, "shared_bytes", lambda _: SHARED_BYTES[target]),
    ):
        decode.msa_decode(q, k, v, iq, ik, layout, block_size=block, topk=topk, local=local)
    return list({key(launch): launch for launch in found}.values())


CASES = {
    "128K": {},
    "256K, two sequences": {"keys": 1 << 18, "batch": 2},
    "1M": {"keys": 1 << 20},
    "128K float8": {"index_dtype": FLOAT8, "queries": 8},
    "float8 of 16": {"index_dtype": FLOAT8, "index_size": 16, "size": 64, "heads": 8},
    "batch 8 of 100K in pages": {"paged": True, "batch": 8, "queries": 8, "keys": 102_400},
    "batch 128 of 10K in pages": {"paged": True, "batch": 128, "queries": 8, "keys": 10_240},
    "16 queries": {"queries": 16},
    "d256": {"size": 256, "index_size": 256, "heads": 16},
    "7 heads, d80, masked": {
        "heads": 28,
        "size": 80,
        "value_size": 64,
        "index_size": 48,
        "block": 96,
        "masked": True,
        "index_heads": 4,
    },
    "blocks of 16, union": {"block": 16, "local": "union", "paged": True, "keys": 65_536},
    "blocks of 256, top 200": {"block": 256, "topk": 200, "heads": 32},
    "float32": {"dtype": torch.float32, "keys": 8192},
}
# Too many blocks, or more places than multiprocessors.
RANKED_BEFORE = {
    "1M",
    "128K float8",
    "16 queries",
    "blocks of 16, union",
    "blocks of 256, top 200",
}


@pytest.mark.parametrize("name", CASES)
def test_cases_launch_what_they_are_for(name):
    score, top, attention, merge = KERNELS
    names = [launch.name for launch in case(**CASES[name])]
    if "batch" in name:  # whole lists
        assert names == [score, top, attention]
    elif name in RANKED_BEFORE:
        assert names == [score, top, attention, merge]
    else:  # programs of a place each, that find it in the scores
        assert names == [score, attention, merge]


@pytest.mark.parametrize(
    ("given", "slices"),
    [
        ({}, 2),
        ({"value_size": 80}, 2),
        ({"value_size": 64}, 1),
        ({"batch": 2}, 1),
        ({"heads": 128}, 2),
        ({"heads": 132}, 1),  # 33 heads of a group
        ({"dtype": torch.float32}, 1),
    ],
)
def test_values_of_a_place_are_sliced_where_multiprocessors_are_left(given, slices):
    launch = case(**given)[1]
    assert launch.name == KERNELS[2] and launch.values["SLICES"] == slices


def layouts_of_row_sums(target, **given):
    """How the threads hold what rows are summed over, whole or in halves of a place's values."""
    launch = next(x for x in case(target, **given) if x.name == KERNELS[2])
    text = compiled(launch, target).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.+)$", text, re.M))
    sums = re.findall(
        r'"tt.reduce"\(%\S+\) <\{axis = 1 : i32\}> \(\{(?:(?!\}\)).)*arith.addf'
        r".*?\}\) : \(tensor<\d+x\d+xf32, (#\w+)>\)",
        text,
        re.S,
    )
    assert sums
    return {layouts[name] for name in sums}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("heads", [64, 128, 256])
def test_rows_are_summed_alike_whatever_the_batch(target, heads):
    """By each of the ways to attend a list; else a row would depend on its batch."""
    one, many = {"keys": 16_384}, {"keys": 16_384, "batch": 256}
    alone = layouts_of_row_sums(target, heads=heads, **one)
    assert alone == layouts_of_row_sums(target, heads=heads, **many)
    with mock.patch.object(decoding, "MOST_RANKED", 0):
        assert alone == layouts_of_row_sums(target, heads=heads, **one)


def test_slices_of_many_rows_would_be_summed_in_another_order():
    """Why they are not sliced; on one GPU at least."""
    whole = layouts_of_row_sums("sm_80", heads=256, keys=16_384)
    with mock.patch.object(decode, "_MOST_SLICED_ROWS", 64):
        assert layouts_of_row_sums("sm_80", heads=256, keys=16_384) != whole


@pytest.mark.parametrize("given", [{"masked": True}, {"paged": True}])
def test_growing_caches_and_batches_share_kernels(given):
    """A kernel more would be compiled in the middle of a text."""
    sizes = [(5, 128 * 70), (7, 128 * 80), (8, 128 * 97), (8, 128 * 128)]
    if "masked" in given:
        sizes += [(6, 9001), (6, 9008)]
    found = [{key(launch) for launch in case(batch=b, keys=n, **given)} for b, n in sizes]
    assert all(keys == found[0] for keys in found)
    assert {key(launch) for launch in case(batch=9, keys=9088, **given)} != found[0]


@pytest.mark.parametrize("name", CASES)
def test_kernels_spill_nothing_on_sm_90(name):
    for launch in case(**CASES[name]):
        kernel = compiled(launch, "sm_90")
        used = resources(kernel)
        assert used["registers"] <= MOST_REGISTERS, launch.name
        assert used["stack_bytes"] <= MOST_STACK_BYTES, launch.name
        assert kernel.metadata.shared <= SHARED_BYTES["sm_90"]
        assert "griddepcontrol" in kernel.asm["ptx"]
        if "float32" not in name and launch.name in (KERNELS[0], KERNELS[2]):
            assert "mma" in kernel.asm["ptx"], launch.name


@pytest.mark.parametrize("name", ["7 heads, d80, masked", "blocks of 16, union"])
def test_strides_are_multiplied_in_64_bits(name):
    """32 index heads of 1M tokens are further apart than 2**31 numbers."""
    reading = (KERNELS[0], KERNELS[2])
    found = [launch for launch in case("sm_80", **CASES[name], queries=2) if launch.name in reading]
    assert len(found) == 2
    for launch in found:
        lines = compiled(launch, "sm_80").asm["ttir"].splitlines()
        uses = [line for line in lines if "%stride_" in line and "tt.func" not in line]
        assert len(uses) > 5 and all("arith.extsi" in line for line in uses), launch.name


@pytest.mark.parametrize(
    "name", ["128K", "128K float8", "batch 8 of 100K in pages", "batch 128 of 10K in pages"]
)
def test_two_programs_share_a_multiprocessor(name):
    """Tiles in flight of two programs at once are what keeps the memory busy."""
    for launch in case(**CASES[name]):
        kernel = compiled(launch, "sm_90")
        assert 2 * kernel.metadata.shared <= SHARED_BYTES["sm_90"], launch.name
        assert 2 * 128 * resources(kernel)["registers"] <= 65_536


@pytest.mark.parametrize("name", ["128K", "128K float8", "batch 8 of 100K in pages"])
def test_index_keys_come_by_bulk_copies_into_several_buffers(name):
    launch = case(**CASES[name])[0]
    kernel = compiled(launch, "sm_90")
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"]
    tile = launch.values["TILE_N"] * launch.values["DP"] * (1 if "float8" in name else 2)
    assert kernel.metadata.shared >= 2 * tile


def test_keys_and_values_of_a_list_come_by_copies_that_nothing_waits_for_at_once():
    launch = case(**CASES["batch 128 of 10K in pages"])[-1]
    pair = launch.values["TILE_N"] * (launch.values["DP"] + launch.values["VP"]) * 2
    kernel = compiled(launch, "sm_90")
    assert "cp.async.cg" in kernel.asm["ptx"] and kernel.metadata.shared >= pair
    loop = kernel.asm["ttgir"].split("scf.for")[1]
    assert loop.index("ttg.async_wait") < loop.index("ttg.async_copy_global_to_local")


OTHER = [
    "128K",
    "1M",
    "batch 128 of 10K in pages",
    "d256",
    "7 heads, d80, masked",
    "blocks of 16, union",
    "float32",
]


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_other_gpus(target, name):
    for launch in case(target, **CASES[name]):
        kernel = compiled(launch, target)
        assert kernel.metadata.shared <= SHARED_BYTES[target], launch.name
        if target != "gfx942":
            assert resources(kernel)["registers"] <= MOST_REGISTERS
        if target in ("sm_80", "gfx942"):
            assert not launch.values["PDL"]
