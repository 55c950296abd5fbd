"""The warp-specialised kernel of large blocks: what it takes, and what the compiler makes of it."""

from __future__ import annotations

import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import triton

from sparsify.kernels.attend import large_hopper
from sparsify.kernels.attend.forward import Parts, Slice, shape_of
from sparsify.kernels.layout import Layout
from sparsify.kernels.placement import place
from sparsify.kernels.select.reverse_index import ReverseIndex
from tests._util.compiling import POINTERS, SHARED_BYTES, TARGETS, launches, resources

CHOSEN, WIDTH, KEYS = 11, 16, 8192


def tensors(size=128, dtype=torch.bfloat16, value_size=None):
    q = torch.empty(1, 4, KEYS, size, dtype=dtype)
    k, v = (torch.empty(1, 2, KEYS, s, dtype=dtype) for s in (size, value_size or size))
    return q, k, v


def launched(block, **sizes):
    """The launch that a call would do."""
    q, k, v = tensors(**sizes)
    shape = shape_of(q, k, v, block, None)
    placement = place(Layout(), 1, KEYS, KEYS, block)
    part = Slice(0, 4, 0, KEYS)
    numbers = torch.empty(4 * KEYS * WIDTH, dtype=torch.int32)
    index = ReverseIndex(numbers, numbers.view(-1, 4), numbers[:1], 4096)
    stats = q.new_empty(4, KEYS, WIDTH, 2, dtype=torch.float32)
    parts = Parts(q.new_empty(4, KEYS, CHOSEN, v.shape[-1]), stats)
    with launches() as found, mock.patch.object(large_hopper, "processors", lambda _: 132):
        large_hopper.large_block(q, k, v, index, parts, placement, shape, part, CHOSEN, WIDTH)
    (launch,) = found
    return launch


def built(launch):
    """Compiled for sm_90 with the types that the launch would have."""
    from triton.experimental.gluon._runtime import GluonASTSource

    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(index,)] = "constexpr", value
            continue
        signature[parameter.name] = kind(value)
        stride = parameter.name.startswith("stride")
        if isinstance(value, torch.Tensor) or (stride and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGETS["sm_90"], options=launch.options)


def kind(value):
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if hasattr(value, "block_shape"):
        return f"tensordesc<{POINTERS[value.base.dtype][1:]}{value.block_shape},{value.layout!r}>"
    return "fp32" if isinstance(value, float) else "i32"


CASES = {
    "4096": {"block": 4096},
    "4096 float16": {"block": 4096, "dtype": torch.float16},
    "512 d64": {"block": 512, "size": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_fits_an_h200_and_overlaps_products_with_softmax(name):
    kernel = built(launched(**CASES[name]))
    assert kernel.metadata.shared <= SHARED_BYTES["sm_90"]
    assert resources(kernel)["stack_bytes"] == 0
    ptx = kernel.asm["ptx"]
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor.4d", "cp.async.cg", "setmaxnreg"):
        assert instruction in ptx
    waits = re.findall(r"WARPGROUP\.DEPBAR|MUFU\.EX2|HGMMA", kernel.asm["sass"])
    # Four waits a group and no more: ptxas serialises products by waits of its own.
    assert waits.count("WARPGROUP.DEPBAR") == 8
    # In the loop, the exponentials stand between the waits for scores and for the values' product.
    between = "".join(x[0] for x in waits).split("W")
    assert [part.count("M") >= 64 for part in between[2::4]] == [True, True]


def test_a_launch_tells_the_shape():
    values = launched(4096).values
    assert (values["block"], values["group"], values["TILE_N"]) == (4096, 2, 128)
    assert values["k_desc"].block_shape == [1, 1, 128, 128]


def test_one_kernel_serves_blocks_of_all_lengths():
    constants = [
        {p.name: launch.values[p.name] for p in launch.kernel.params if p.is_constexpr}
        for launch in (launched(256), launched(4096))
    ]
    assert constants[0] == constants[1]


def takes(block=4096, share=1, **sizes):
    q, k, v = tensors(**sizes)
    return large_hopper._takes(q, shape_of(q, k, v, block, None)._replace(share=share))


def test_what_it_takes():
    assert takes() and takes(block=256) and takes(size=64) and takes(dtype=torch.float16)


@pytest.mark.parametrize(
    "other",
    [
        {"block": 128},
        {"block": 4096 + 64},
        {"size": 80},
        {"size": 256},
        {"value_size": 64},
        {"dtype": torch.float32},
        {"share": 2},
    ],
)
def test_what_it_does_not_take(other):
    assert not takes(**other)


def test_rows_that_can_be_fetched():
    q, k, _ = tensors()
    assert large_hopper._is_gathered(q) and large_hopper.is_bulk(k)
    across = torch.empty(1, 2, 128, KEYS, dtype=torch.bfloat16).mT
    odd = torch.empty(1, 2, KEYS, 132, dtype=torch.bfloat16)[..., :128]
    late = torch.empty(2 * KEYS * 128 + 1, dtype=torch.bfloat16)[1:].view(1, 2, KEYS, 128)
    for x in (across, odd, late):
        assert not large_hopper._is_gathered(x) and not large_hopper.is_bulk(x)
    # One key for all heads can be gathered; descriptors have no stride of 0.
    shared = k[:, :1].expand(-1, 2, -1, -1)
    assert large_hopper._is_gathered(shared) and not large_hopper.is_bulk(shared)


def hopper_call(**other):
    """A call as `fits` sees it on a GPU that is not there."""
    q, k, v = tensors()
    shape = shape_of(q, k, v, 4096, None)
    placement = place(Layout(**other), 1, KEYS, KEYS, 4096)
    device = SimpleNamespace(type="cuda")
    key = mock.Mock(wraps=k, device=device, stride=k.stride, data_ptr=k.data_ptr)
    key.element_size = k.element_size
    with mock.patch.object(large_hopper, "is_hopper", lambda _: True):
        return large_hopper.fits(q, key, v, placement, shape)


@pytest.mark.skipif(torch.version.hip is not None, reason="CUDA only")
def test_plain_calls_fit_and_others_do_not():
    assert hopper_call()
    assert not hopper_call(key_mask=torch.ones(1, KEYS, dtype=torch.bool))
    assert not hopper_call(kv_len=torch.tensor([KEYS - 1]))


def test_nothing_fits_without_a_gpu():
    q, k, v = tensors()
    shape = shape_of(q, k, v, 4096, None)
    assert not large_hopper.fits(q, k, v, place(Layout(), 1, KEYS, KEYS, 4096), shape)
