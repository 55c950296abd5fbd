"""The MoBA kernels compile for GPUs that are not there, and fit them.

A case is a call; its kernel launches are recorded and built. The hot kernels are held to what makes
them fast on sm_90: no spilled registers, and products on the tensor cores by whole warp groups.
"""

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
    "gate_packed_fwd_kernel",
    "small_block_fwd_kernel",
    "large_block_fwd_kernel",
    "combine_fwd_kernel",
)
MOST_REGISTERS = 255


def case(
    block,
    topk,
    *,
    keys=32_768,
    queries=None,
    size=128,
    value_size=None,
    heads=2,
    groups=2,
    dtype=torch.bfloat16,
    tma=False,
    masked=False,
    target="sm_90",
):
    """What a call would launch on a target, one of each kind."""
    queries, value_size = queries or keys, value_size or size
    q = torch.empty(1, heads, queries, size, dtype=dtype)
    k = torch.empty(1, groups, keys, size, dtype=dtype)
    v = torch.empty(1, groups, keys, value_size, dtype=dtype)
    mask = torch.ones(1, keys, dtype=torch.bool) if masked else None
    layout = Layout(key_mask=mask)
    with (
        launches() as found,
        mock.patch.object(forward, "_fits_tma", lambda *_: tma),
        mock.patch.object(tiling, "shared_bytes", lambda _: SHARED_BYTES[target]),
    ):
        accelerated.moba_attention(q, k, v, layout, None, block_size=block, topk=topk)
    return list({key(launch): launch for launch in found}.values())


CASES = {
    "128/8": lambda **at: case(128, 8, **at),
    "512/3": lambda **at: case(512, 3, **at),
    "512/3 by TMA": lambda **at: case(512, 3, tma=True, **at),
    "4096/12": lambda **at: case(4096, 12, keys=131_072, groups=1, **at),
    "4096/12 by TMA": lambda **at: case(4096, 12, keys=131_072, groups=1, tma=True, **at),
    "64/16 d64": lambda **at: case(64, 16, size=64, **at),
    "128/8 d256": lambda **at: case(128, 8, size=256, **at),
    "96/8 d80": lambda **at: case(96, 8, keys=9600, size=80, **at),
    "128/8 d192 values of 128": lambda **at: case(128, 8, size=192, value_size=128, **at),
    "128/8 masked": lambda **at: case(128, 8, masked=True, **at),
    "128/8 few queries": lambda **at: case(128, 8, queries=1, **at),
    "128/8 float32": lambda **at: case(128, 8, keys=8192, dtype=torch.float32, **at),
    "dense": lambda **at: case(32_768, 2, **at),
}
# Registers held down to run two programs at once, or masks beside everything else: what does not
# fit goes to the stack.
HELD_DOWN = {"4096/12 by TMA": 64, "128/8 masked": 96}
TENSOR_CORES = ("128/8", "512/3", "512/3 by TMA", "4096/12", "4096/12 by TMA", "64/16 d64")


def hot(name):
    return [launch for launch in CASES[name]() if launch.name in HOT]


@pytest.mark.parametrize("name", CASES)
def test_cases_launch_what_they_are_for(name):
    names = {launch.name for launch in CASES[name]()}
    assert "combine_fwd_kernel" in names
    assert ("query_block_fwd_kernel" in names) == ("few" in name)
    attends = {"small_block_fwd_kernel", "large_block_fwd_kernel"} & names
    assert bool(attends) == (name != "dense" and "few" not in name)
    if name in ("128/8", "512/3", "96/8 d80"):
        assert "gate_packed_fwd_kernel" in names


@pytest.mark.parametrize("name", [n for n in CASES if "float32" not in n])
def test_hot_kernels_spill_nothing_on_sm_90(name):
    for launch in hot(name):
        kernel = compiled(launch, "sm_90")
        used = resources(kernel)
        assert used["registers"] <= MOST_REGISTERS
        assert used["stack_bytes"] <= HELD_DOWN.get(name, 0), launch.name
        assert kernel.metadata.shared <= SHARED_BYTES["sm_90"]
        if name in TENSOR_CORES:
            assert "wgmma.mma_async" in kernel.asm["ptx"], launch.name


@pytest.mark.parametrize("name", ["512/3 by TMA", "4096/12 by TMA"])
def test_descriptors_become_bulk_copies(name):
    (launch,) = [x for x in CASES[name]() if x.name == "large_block_fwd_kernel"]
    assert "cp.async.bulk.tensor" in compiled(launch, "sm_90").asm["ptx"]


EVERY = [("sm_90", "128/8 few queries")]
EVERY += [(target, "128/8") for target in ("sm_80", "sm_100", "gfx942")]


def assert_fits(launch, target):
    kernel = compiled(launch, target)
    assert kernel.metadata.shared <= SHARED_BYTES[target], launch.name
    if target != "gfx942":
        assert resources(kernel)["registers"] <= MOST_REGISTERS


@pytest.mark.parametrize(("target", "name"), EVERY)
def test_every_kernel_fits(target, name):
    for launch in CASES[name](target=target):
        assert_fits(launch, target)


OTHER = ["4096/12", "128/8 d256", "128/8 float32", "128/8 few queries"]
SMALLER = [(target, name) for target in ("sm_80", "gfx942") for name in OTHER]
# Masks cost registers and odd sizes shared memory: each where it is scarcer.
SMALLER += [("sm_80", "128/8 masked"), ("gfx942", "96/8 d80")]


@pytest.mark.parametrize(("target", "name"), [*SMALLER, ("sm_90", "128/8 float32")])
def test_attention_of_other_shapes_fits(target, name):
    for launch in CASES[name](target=target):
        if launch.name in (*HOT, "query_block_fwd_kernel"):
            assert_fits(launch, target)


def test_the_longest_lists_fit():
    """Everything that sorts grows with the list."""
    longest = accelerated._MOST_PLACES
    for launch in case(64, longest, keys=32_768, size=64):
        if "gate" in launch.name or "entries" in launch.name:
            assert_fits(launch, "sm_90")
