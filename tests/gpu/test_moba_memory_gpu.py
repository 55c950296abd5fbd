"""MoBA's kernels and memory: strides, what was there before, what lies around, how much it is."""

from __future__ import annotations

import math

import pytest
import torch

from sparsify.kernels import accelerated
from sparsify.kernels.layout import Layout
from tests._util.moba_gpu import (
    BF16,
    BLOCK,
    DEVICE,
    KEYS,
    NEEDS_GPU,
    SIZE,
    TOPK,
    attend,
    base,
    choose,
    layouts,
    strided,
)
from tests._util.parity import assert_attention, assert_lists, same_bits

NAN = math.nan

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("name", ["transposed", "sliced", "offset", "keys across"])
def test_strides_as_they_come(name):
    x = base()
    other = strided(name, x)
    assert all(map(torch.equal, other, x))
    lists = choose(other)
    assert_lists(lists, x, BLOCK, TOPK)
    assert_attention(attend(other), lists, x, BLOCK)


def test_expanded_views():
    x = base()
    one = x._replace(
        q=x.q[:, :1].expand(-1, 4, -1, -1),
        k=x.k[:, :1].expand(-1, 2, -1, -1),
        v=x.v[:, :, :1].expand(-1, -1, KEYS, -1),
    )
    same_numbers = type(x)(*(t.contiguous() for t in one))
    lists = choose(one)
    assert_lists(lists, same_numbers, BLOCK, TOPK)
    assert_attention(attend(one), lists, same_numbers, BLOCK)


class Guarded:
    """Every allocation filled with poison, and bands of it on both sides."""

    BAND = 512

    def __init__(self, monkeypatch):
        self.made = []
        real = torch.Tensor.new_empty
        guarded = self

        def new_empty(tensor, *size, dtype=None, **further):
            shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
            dtype = dtype or tensor.dtype
            count, band = math.prod(shape), guarded.BAND
            buffer = real(tensor, (count + 2 * band,), dtype=dtype, **further)
            buffer.fill_(guarded.poison(dtype))
            guarded.made.append((buffer, count))
            return buffer[band : band + count].view(tuple(shape))

        monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)

    @staticmethod
    def poison(dtype):
        # A number of a block that is there: reading it gives a wrong answer, not a crash.
        return NAN if dtype.is_floating_point else 3

    def assert_whole(self):
        assert self.made
        for buffer, count in self.made:
            poison, band = self.poison(buffer.dtype), self.BAND
            for part in (buffer[:band], buffer[band + count :]):
                fine = part.isnan() if poison != poison else part == poison
                assert bool(fine.all())


@pytest.mark.parametrize("what", ["prefill", "few queries", "documents", "listed", "dense"])
def test_nothing_is_read_before_it_is_written_or_written_outside(what, monkeypatch):
    x = base(queries=5 if what == "few queries" else None)
    layout = Layout(**layouts()["documents"]) if what == "documents" else Layout()
    topk = 10**6 if what == "dense" else TOPK
    lists = choose(x)

    def call():
        if what == "listed":
            return accelerated.block_attention(*x, lists, layout, block_size=BLOCK)
        return accelerated.moba_attention(*x, layout, None, block_size=BLOCK, topk=topk)

    def select():
        return accelerated.moba_select(x.q, x.k, layout, None, block_size=BLOCK, topk=TOPK)

    clean, chosen = call(), select()
    guards = Guarded(monkeypatch)
    got, again = call(), select()
    torch.cuda.synchronize()
    monkeypatch.undo()
    assert same_bits(got, clean) and torch.equal(again, chosen)
    guards.assert_whole()


def test_inputs_are_not_written_to():
    x = base()
    before = [t.clone() for t in x]
    attend(x), choose(x)
    assert all(map(torch.equal, x, before))


@pytest.mark.parametrize("axis", ["tokens", "batch"])
def test_offsets_beyond_two_to_the_31(axis):
    """Views into a large buffer, whose elements lie more than 2^31 apart."""
    batch, keys = (1, 1027) if axis == "tokens" else (2, 515)
    step = 2**21 + 512 if axis == "tokens" else 8 * SIZE
    far = 2**31 + 2**12
    elements = (keys - 1) * step + 8 * SIZE + (far if axis == "batch" else 0)
    if torch.cuda.mem_get_info()[0] < 3 * elements:
        pytest.skip("needs more free memory")
    buffer = torch.empty(elements, dtype=BF16, device=DEVICE)
    small = base(batch=batch, keys=keys)
    views, at = [], 0
    for t in small:
        strides = (far, SIZE, step, 1)
        view = buffer.as_strided(t.shape, strides, storage_offset=at)
        at += t.shape[1] * SIZE
        views.append(view.copy_(t))
    x = type(small)(*views)
    assert sum((n - 1) * s for n, s in zip(x.q.shape, x.q.stride(), strict=True)) > 2**31
    lists = choose(x, 15, 3)
    assert_lists(lists, small, 15, 3)
    assert_attention(attend(x, 15, 3), lists, small, 15)


@pytest.mark.parametrize("block", [128, 512])
def test_heads_that_lie_far_apart(block):
    """Each stride fits 32 bits, its product with the number of a head does not."""
    stride, heads, keys = 2**29, 6, 2051
    elements = (heads - 1) * stride + 3 * keys * SIZE
    if torch.cuda.mem_get_info()[0] < 3 * elements:
        pytest.skip("needs more free memory")
    buffer = torch.empty(elements, dtype=BF16, device=DEVICE)
    near = base(heads=heads, groups=heads, keys=keys)
    strides = (heads * stride, stride, SIZE, 1)
    x = type(near)(
        *(
            buffer.as_strided(t.shape, strides, storage_offset=at * keys * SIZE).copy_(t)
            for at, t in enumerate(near)
        )
    )
    lists = choose(x, block, 3)
    assert_lists(lists, near, block, 3)
    assert_attention(attend(x, block, 3), lists, near, block)


def test_a_small_workspace_gives_the_same_bits():
    x = base()
    whole = attend(x)
    for workspace_bytes in (1, 3 << 20, 30 << 20):
        assert same_bits(attend(x, workspace_bytes=workspace_bytes), whole)


def test_memory_grows_with_the_length_alone():
    """Forward and backward; four times the tokens take about four times the memory."""
    peaks = []
    for keys in (4099, 4 * 4099):
        x = base(keys=keys)
        leaves = [t.requires_grad_() for t in x]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(x)[0].sum().backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del leaves, x
    assert peaks[1] < 6 * peaks[0] + (64 << 20)


def test_scratch_memory_stays_below_the_workspace():
    x = base(keys=8 * 4099)
    result_bytes = sum(t.numel() * t.element_size() for t in attend(x))
    for workspace_bytes in (64 << 20, 256 << 20):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(x, workspace_bytes=workspace_bytes)
        torch.cuda.synchronize()
        used = torch.cuda.max_memory_allocated() - before - result_bytes
        assert used < 1.25 * workspace_bytes + (16 << 20)
