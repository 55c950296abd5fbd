"""What is quicker than Triton's interpreter computes what the interpreter does."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton.language import standard

from tests._util import quick_interpreter


@triton.jit
def sort_kernel(x_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr, DOWN: tl.constexpr):
    at_MN = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y_ptr + at_MN, tl.sort(tl.load(x_ptr + at_MN), dim=1, descending=DOWN))


@triton.jit
def top_kernel(x_ptr, y_ptr, N: tl.constexpr, K: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, K), tl.topk(tl.load(x_ptr + tl.arange(0, N)), K))


@triton.jit
def _twice(x):
    return tl.maximum(x, 0) * 2


@triton.jit
def types_kernel(x_ptr, y_ptr, N: tl.constexpr):
    x_N = tl.load(x_ptr + tl.arange(0, N))
    tl.static_assert(x_N.shape[0] == N and x_N.numel == N)
    tl.static_assert(x_N.type == tl.block_type(x_N.dtype, [N]))
    tl.static_assert(x_N.type != tl.block_type(x_N.dtype, [2 * N]))
    tl.store(y_ptr + tl.arange(0, N), _twice(_twice(x_N)))


def whole_numbers(*shape, dtype, few):
    generator = torch.Generator().manual_seed(1)
    limits = torch.iinfo(dtype)
    low, high = (-3, 3) if few else (limits.min, limits.max)
    return torch.randint(low, high, shape, generator=generator, dtype=dtype)


def both_ways(launch, x, *shape):
    """Results with numpy's sorting and with Triton's own."""
    found = []
    for way in (quick_interpreter.sort, quick_interpreter.OWN_SORT):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(standard, "sort_impl", way)
            y = x.new_empty(shape)
            launch(x, y)
            found.append(y)
    return found


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize(("dtype", "down"), [(torch.int32, False), (torch.int64, True)])
def test_whole_numbers_are_sorted_as_triton_sorts_them(dtype, down, few):
    x = whole_numbers(4, 16, dtype=dtype, few=few)
    numpys, own = both_ways(lambda x, y: sort_kernel[(1,)](x, y, 4, 16, down), x, 4, 16)
    assert torch.equal(numpys, own)
    assert torch.equal(numpys, x.sort(1, descending=down).values)
    assert not torch.equal(numpys, x)


@pytest.mark.parametrize("count", [2, 8, 32])
def test_the_largest_whole_numbers_are_those_that_triton_takes(count):
    x = whole_numbers(32, dtype=torch.int64, few=False)
    numpys, own = both_ways(lambda x, y: top_kernel[(1,)](x, y, 32, count), x, count)
    assert torch.equal(numpys, own)
    assert torch.equal(numpys, x.sort(descending=True).values[:count])


def test_numbers_with_a_point_are_sorted_by_triton():
    x = torch.randn(1, 16, generator=torch.Generator().manual_seed(1))
    y = torch.empty_like(x)
    with mock.patch.object(quick_interpreter, "OWN_SORT", wraps=quick_interpreter.OWN_SORT) as own:
        sort_kernel[(1,)](x, y, 1, 16, False)
        assert torch.equal(y, x.sort(1).values) and own.called
        own.reset_mock()
        sort_kernel[(1,)](x.int(), y.int(), 1, 16, False)
        assert not own.called


def test_builtins_work_in_every_kernel_and_types_tell_their_shapes():
    for size in (8, 16, 8):
        x = torch.arange(size, dtype=torch.int32) - 3
        y = torch.empty_like(x)
        types_kernel[(1,)](x, y, size)
        assert torch.equal(y, x.clamp(min=0) * 4)
