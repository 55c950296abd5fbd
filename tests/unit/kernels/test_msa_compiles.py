"""The kernels of MSA's index compile for GPUs that are not there, and fit them."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from sparsify.kernels import tiling
from sparsify.kernels.layout import Layout
from sparsify.kernels.placement import place
from sparsify.kernels.select import msa, msa_tiles
from tests._util.compiling import SHARED_BYTES, compiled, key, launches, resources

CAPABILITY = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0), "gfx942": None}
MOST_REGISTERS = 255
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
SCORES, HOPPER = "msa_scores_fwd_kernel", "msa_scores_hopper_fwd_kernel"


def tensors(
    *, queries=16_384, keys=131_072, size=128, groups=4, shared=True, dtype=BF16, query=None
):
    iq = torch.empty(1, groups, queries, size, dtype=query or dtype)
    return iq, torch.empty(1, 1 if shared else groups, keys, size, dtype=dtype)


def case(
    block=128, topk=16, local="inside", *, masked=False, target="sm_90", force="triton", **sizes
):
    """What a call would launch on a target, one of each kind."""
    iq, ik = tensors(**sizes)
    layout = Layout(key_mask=torch.ones(1, ik.shape[2], dtype=torch.bool) if masked else None)
    placement = place(layout, 1, iq.shape[2], ik.shape[2], block)
    with (
        launches() as found,
        mock.patch.object(msa_tiles, "capability", lambda _: CAPABILITY[target]),
        mock.patch.object(tiling, "shared_bytes", lambda _: SHARED_BYTES[target]),
    ):
        index = msa.Index(iq, ik, placement, block, topk, local, force=force)
        index.rows(0, iq.shape[1], 0, iq.shape[2])
    return list({key(launch): launch for launch in found}.values())


CASES = {
    "128/16": {},
    "128/16 union": {"local": "union"},
    "128/8 keys of their own": {"topk": 8, "shared": False},
    "64/16 d64": {"block": 64, "size": 64},
    "16/4": {"block": 16, "topk": 4},
    "96/4 d80": {"block": 96, "topk": 4, "size": 80, "keys": 9600, "queries": 999},
    "256/16 d256": {"block": 256, "size": 256},
    "128/16 masked": {"masked": True},
    "128/16 masked union": {"masked": True, "local": "union"},
    "128/16 one query": {"queries": 1},
    "128/16 float8": {"dtype": FP8},
    "128/16 float16 d32 g7": {"dtype": FP16, "size": 32, "groups": 7},
    "128/16 float32": {"dtype": FP32, "topk": 4, "keys": 8192, "queries": 512},
    "128/16 proxy": {"query": FP32, "shared": False},
    "128/16 proxy float16": {"query": FP32, "shared": False, "dtype": FP16},
    "128/16 proxy, few queries": {"query": FP32, "shared": False, "queries": 8},
    "128/16 proxy masked union": {"query": FP32, "masked": True, "local": "union"},
    "256/16 proxy d256": {"query": FP32, "shared": False, "block": 256, "size": 256},
}
BY_POINTER = ("masked", "d80", "float32")
SLOW = ("float32", "masked", "d80")


def marked(names):
    return [pytest.param(n, marks=[pytest.mark.slow] * any(s in n for s in SLOW)) for n in names]


@pytest.mark.parametrize("name", CASES)
def test_scores_are_followed_by_two_passes(name):
    names = dict.fromkeys(launch.name for launch in case(**CASES[name]))
    assert [*names] == [SCORES, "msa_best_fwd_kernel", "msa_choice_fwd_kernel"]


def test_long_lists_are_ranked_by_sorted_keys():
    assert [launch.name for launch in case(topk=18)] == [SCORES, "msa_exact_fwd_kernel"]


@pytest.mark.parametrize("name", marked(CASES))
def test_nothing_spills_on_sm_90(name):
    for launch in case(**CASES[name]):
        kernel = compiled(launch, "sm_90")
        used = resources(kernel)
        assert used["registers"] <= MOST_REGISTERS
        assert used["stack_bytes"] == 0, launch.name
        assert kernel.metadata.shared <= SHARED_BYTES["sm_90"]
        if launch.name == SCORES:
            ptx = kernel.asm["ptx"]
            assert ("wgmma.mma_async" in ptx) == ("float32" not in name)
            assert ("cp.async.bulk.tensor" in ptx) == (not any(s in name for s in BY_POINTER))
            assert "max.NaN.f32" in ptx


EVERYWHERE = (
    "128/16",
    "256/16 d256",
    "128/16 masked union",
    "128/16 float32",
    "128/16 proxy masked union",
    "256/16 proxy d256",
)
# What differs from those in one fact, of which no GPU makes much: on one or two of them.
SOMEWHERE = {
    "sm_80": ("64/16 d64", "96/4 d80", "128/16 union"),
    "sm_100": ("16/4", "128/8 keys of their own", "128/16 one query", "128/16 float8"),
    "gfx942": ("64/16 d64", "128/16 masked"),
}
TARGETS = [(t, n) for t, more in SOMEWHERE.items() for n in (*EVERYWHERE, *more)]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "name"), TARGETS)
def test_every_kernel_fits(target, name):
    for launch in case(target=target, **CASES[name]):
        kernel = compiled(launch, target)
        assert kernel.metadata.shared <= SHARED_BYTES[target], launch.name
        if target != "gfx942":
            used = resources(kernel)
            assert used["registers"] <= MOST_REGISTERS
            assert used["stack_bytes"] == 0, launch.name


PRODUCTS = {
    "sm_80": ("ptx", "mma.sync.aligned"),
    "sm_90": ("ptx", "wgmma.mma_async.sync"),
    "sm_100": ("ptx", "tcgen05.mma"),
    "gfx942": ("amdgcn", "v_mfma_f32"),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", PRODUCTS)
def test_terms_of_queries_are_multiplied_by_tensor_cores(target):
    """By three products in bfloat16 and two in float16; keys stay as they are."""
    kind, instruction = PRODUCTS[target]
    found = {}
    for query, dtype in ((FP32, BF16), (FP32, FP16), (FP16, FP16)):
        made = case(target=target, query=query, dtype=dtype, groups=1, queries=64)
        (launch,) = [x for x in made if x.name == SCORES]
        keys = launch.values["ik_ptr"]  # or a descriptor
        assert getattr(keys, "base", keys).dtype == dtype
        kernel = compiled(launch, target)
        assert kernel.metadata.shared <= SHARED_BYTES[target]
        assert target == "gfx942" or resources(kernel)["stack_bytes"] <= 8
        found[query, dtype] = kernel.asm[kind].count(instruction)
    once = found[FP16, FP16]
    assert found[FP32, BF16] > found[FP32, FP16] > once > 0


@pytest.mark.slow
# The longest lists take a compiler for sm_80 most of a minute.
@pytest.mark.parametrize(("topk", "target"), [(18, "sm_80"), (256, "sm_90"), (256, "gfx942")])
def test_long_lists_fit(topk, target):
    (launch,) = [x for x in case(topk=topk, target=target) if "exact" in x.name]
    kernel = compiled(launch, target)
    assert kernel.metadata.shared <= SHARED_BYTES[target]
    if target != "gfx942":
        assert resources(kernel)["registers"] <= MOST_REGISTERS


GLUON = {
    "bfloat16": {},
    "bfloat16 d64 union": {"size": 64, "local": "union"},
    "float8": {"dtype": FP8},
    "float8 d64 keys of their own": {"dtype": FP8, "size": 64, "shared": False},
    "float16 one query": {"dtype": FP16, "queries": 1},
    "three groups": {"groups": 3},
    "proxy": {"query": FP32, "shared": False},
    "proxy d64 union": {"query": FP32, "shared": False, "size": 64, "local": "union"},
    "proxy float16": {"query": FP32, "shared": False, "dtype": FP16},
}


@pytest.mark.parametrize("name", GLUON)
def test_the_hopper_kernel(name):
    """Tensor cores work on while maxima are taken: ptxas serialises nothing."""
    found = case(force="gluon", **GLUON[name])
    (launch,) = [x for x in found if x.name == HOPPER]
    assert ([x.name for x in found].count(SCORES) == 1) == ("union" in name)
    kernel = compiled(launch, "sm_90")
    used = resources(kernel)
    assert used["registers"] <= MOST_REGISTERS and used["stack_bytes"] == 0
    assert kernel.metadata.shared <= SHARED_BYTES["sm_90"]
    ptx, sass = kernel.asm["ptx"], kernel.asm["sass"]
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx and "max.NaN.f32" in ptx
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) == 4


@pytest.mark.parametrize(
    ("query", "dtype"), [(BF16, BF16), (FP16, FP16), (FP8, FP8), (FP32, BF16), (FP32, FP16)]
)
@pytest.mark.parametrize("size", [64, 128])
def test_the_hopper_kernel_is_taken_where_it_fits(size, query, dtype):
    assert taken(size=size, query=query, dtype=dtype) == "gluon"


@pytest.mark.parametrize(
    "other",
    [
        {"capability": (8, 0)},
        {"capability": (10, 0)},
        {"capability": None},
        {"block": 64},
        {"size": 80},
        {"size": 256},
        {"dtype": FP32},
        {"query": FP32, "dtype": FP8},
        {"queries": 16},
        {"masked": True},
        {"keys_last": False},
        {"offset": 1},
    ],
)
def test_the_hopper_kernel_is_not_taken_elsewhere(other):
    assert taken(**other) == "triton"


def taken(
    *, capability=(9, 0), block=128, masked=False, keys_last=True, offset=0, queries=999, **sizes
):
    iq, ik = tensors(queries=queries, keys=4096, **sizes)
    if not keys_last:
        ik = ik.mT.contiguous().mT
    if offset:
        ik = torch.empty(ik.numel() + offset, dtype=ik.dtype)[offset:].view(ik.shape)
    layout = Layout(key_mask=torch.ones(1, 4096, dtype=torch.bool) if masked else None)
    placement = place(layout, 1, queries, 4096, block)
    with mock.patch.object(msa_tiles, "capability", lambda _: capability):
        chosen = msa.path(iq, ik, placement, block)
        assert msa.Index(iq, ik, placement, block, 16).path == chosen
    return chosen


@pytest.mark.parametrize("force", ["gluon", "triton"])
def test_a_kernel_can_be_forced(force):
    iq, ik = tensors(keys=4096, queries=100)
    placement = place(Layout(), 1, 100, 4096, 128)
    assert msa.Index(iq, ik, placement, 128, 16, force=force).path == force


def test_a_kernel_that_does_not_fit_cannot_be_forced():
    iq, ik = tensors(keys=4096, queries=100)
    placement = place(Layout(), 1, 100, 4096, 64)
    with pytest.raises(ValueError, match="blocks of 128 keys"):
        msa.Index(iq, ik, placement, 64, 16, force="gluon")


@pytest.mark.parametrize("layout", ["BGSD", "BSGD", "one head", "cut"])
def test_keys_as_a_matrix(layout):
    """Rows and columns of the matrix are the keys of each head."""
    from sparsify.kernels.select.msa_scores_hopper import keys_of

    x = torch.arange(2 * 3 * 256 * 64).view(2, 3, 256, 64).to(torch.float16)
    ik = {
        "BGSD": x,
        "BSGD": x.transpose(1, 2).contiguous().transpose(1, 2),
        "one head": x[:, 1:2],
        "cut": x[:1, :, 128:],
    }[layout]
    keys = keys_of(ik)
    matrix = keys.descriptor
    seen = torch.as_strided(ik, matrix.shape, matrix.strides, ik.storage_offset())
    for b in range(ik.shape[0]):
        for g in range(ik.shape[1]):
            row = b * keys.row_of_batch + g * keys.row_of_head
            column = b * keys.column_of_batch + g * keys.column_of_head
            part = seen[row : row + ik.shape[2], column : column + 64]
            assert torch.equal(part, ik[b, g])


def test_expanded_batches_are_no_matrix_of_rows_twice():
    from sparsify.kernels.select.msa_scores_hopper import keys_of

    x = torch.zeros(1, 1, 256, 64, dtype=torch.float16)
    keys = keys_of(x.expand(3, 1, -1, -1))
    assert (keys.row_of_batch, keys.column_of_batch) == (0, 0)
    assert keys_of(x.mT) is None


@pytest.mark.parametrize("steps", [1, 15, 16, 100, 1024, 8192])
@pytest.mark.parametrize("tiles", [1, 8, 100, 256, 5000])
def test_segments_keep_enough_work(tiles, steps):
    splits = msa_tiles.splits(tiles, steps, 132)
    assert 1 <= splits <= max(1, steps // 16)
    if tiles * max(1, steps // 16) >= 132:
        assert tiles * splits >= 100
