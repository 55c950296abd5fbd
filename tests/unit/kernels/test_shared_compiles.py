"""Attention over lists that heads share compiles for GPUs that are not there, and fits them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from sparsify.kernels import accelerated, tiling
from sparsify.kernels.attend import forward
from sparsify.kernels.layout import Layout
from tests._util.compiling import SHARED_BYTES, compiled, key, launches, resources

pytestmark = pytest.mark.slow

HOT = (
    "shared_block_fwd_kernel",
    "large_block_fwd_kernel",
    "shared_query_fwd_kernel",
    "combine_fwd_kernel",
)
MOST_REGISTERS = 255


def case(
    block=128,
    places=16,
    *,
    keys=8192,
    queries=None,
    size=128,
    value_size=None,
    heads=64,
    groups=4,
    dtype=torch.bfloat16,
    tma=False,
    masked=False,
    target="sm_90",
):
    """What a call with one list per group would launch on a target, one of each kind."""
    queries, value_size = queries or keys, value_size or size
    q = torch.empty(1, queries, heads, size, dtype=dtype).transpose(1, 2)
    k = torch.empty(1, keys, groups, size, dtype=dtype).transpose(1, 2)
    v = torch.empty(1, keys, groups, value_size, dtype=dtype).transpose(1, 2)
    mask = torch.ones(1, keys, dtype=torch.bool) if masked else None
    lists = torch.zeros(1, groups, queries, places, dtype=torch.int32)
    with (
        launches() as found,
        mock.patch.object(forward, "_fits_tma", lambda *_: tma),
        mock.patch.object(tiling, "shared_bytes", lambda _: SHARED_BYTES[target]),
    ):
        accelerated.block_attention(q, k, v, lists, Layout(key_mask=mask), block_size=block)
    kinds = {key(launch): launch for launch in found}.values()
    return [launch for launch in kinds if launch.name in HOT]


CASES = {
    "16 heads": lambda **at: case(**at),
    "8 heads": lambda **at: case(heads=32, **at),
    "7 heads": lambda **at: case(heads=7, groups=1, **at),
    "32 heads": lambda **at: case(heads=32, groups=1, **at),
    "few queries": lambda **at: case(queries=8, **at),
    "masked": lambda **at: case(masked=True, **at),
    "block 64 d64": lambda **at: case(64, size=64, **at),
    "block 96 d80": lambda **at: case(96, keys=4800, size=80, **at),
    "block 512": lambda **at: case(512, 4, **at),
    "block 2048 by TMA": lambda **at: case(2048, 3, tma=True, **at),
    "d256": lambda **at: case(size=256, **at),
    "float32": lambda **at: case(dtype=torch.float32, **at),
}
TENSOR_CORES = ("16 heads", "8 heads", "7 heads", "32 heads", "block 64 d64", "block 512")
# Registers held down to run two programs at once.
HELD_DOWN = {"block 2048 by TMA": 72}


@pytest.mark.parametrize("name", CASES)
def test_cases_launch_what_they_are_for(name):
    names = {launch.name for launch in CASES[name]()}
    large = "512" in name or "2048" in name or name in ("d256", "float32")
    past = "shared_query" if "few" in name else "large_block" if large else "shared_block"
    assert names == {f"{past}_fwd_kernel", "combine_fwd_kernel"}


@pytest.mark.parametrize("name", [n for n in CASES if n != "float32"])
def test_hot_kernels_spill_nothing_on_sm_90(name):
    for launch in CASES[name]():
        kernel = compiled(launch, "sm_90")
        used = resources(kernel)
        assert used["registers"] <= MOST_REGISTERS
        assert used["stack_bytes"] <= HELD_DOWN.get(name, 0), launch.name
        assert kernel.metadata.shared <= SHARED_BYTES["sm_90"]
        if name in TENSOR_CORES:
            assert "wgmma.mma_async" in kernel.asm["ptx"], launch.name


def test_two_programs_run_at_once():
    """What hides the waits of one behind the products of the other."""
    for launch in CASES["16 heads"]():
        kernel = compiled(launch, "sm_90")
        assert 2 * (kernel.metadata.shared + 1024) <= 228 << 10, launch.name
        assert resources(kernel)["registers"] <= 256, launch.name


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
@pytest.mark.parametrize("name", ["16 heads", "few queries", "masked"])
def test_other_targets(name, target):
    for launch in CASES[name](target=target):
        kernel = compiled(launch, target)
        assert kernel.metadata.shared <= SHARED_BYTES[target], launch.name
        if target != "gfx942":
            assert resources(kernel)["registers"] <= MOST_REGISTERS


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_float32(target):
    for launch in CASES["float32"](target=target):
        assert compiled(launch, target).metadata.shared <= SHARED_BYTES[target], launch.name
