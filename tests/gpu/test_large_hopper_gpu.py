"""The warp-specialised kernel of large blocks on Hopper, against float64 and the plain kernel.

Lists are made up here, so that the kernel is measured alone: partial outputs, maxima and sums of
every listed block. Whatever is not listed must keep the poison that it held.

Legend: H query heads, T queries, W places of a list, S keys, D head size.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from sparsify.kernels import schemas
from sparsify.kernels.attend import forward, large_hopper
from sparsify.kernels.attend.forward import Parts, Slice, shape_of
from sparsify.kernels.layout import Layout
from sparsify.kernels.placement import place
from sparsify.kernels.select.reverse_index import reverse_index
from tests._util.parity import assert_attention, error, inputs, same_bits

BF16, FP16 = torch.bfloat16, torch.float16
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.0"),
]


def lists_of(heads, first, queries, block, chosen, width, seed=0):
    """Some of the past blocks of every query, ascending, and -1 behind them; int32 `[H, T, W]`."""
    generator = torch.Generator().manual_seed(seed)
    most = -(-(first + queries) // block)
    past_T = torch.arange(first, first + queries) // block
    rank = torch.rand(heads, queries, most, generator=generator)
    rank.masked_fill_(torch.arange(most) >= past_T[:, None], 2.0)
    value, number = rank.sort(-1)
    kept = min(chosen, most)
    number = number[..., :kept].masked_fill(value[..., :kept] > 1.0, most)
    number = number.sort(-1).values
    number = number.masked_fill(number == most, -1)
    padding = number.new_full((heads, queries, width - kept), -1)
    return torch.cat([number, padding], -1).int().cuda()


class Case:
    """Inputs, lists and what both kernels need to know."""

    def __init__(self, block, chosen, width, part=None, **sizes):
        given = {"heads": 4, "groups": 2, "keys": 8192, "size": 128, "dtype": BF16} | sizes
        self.x = inputs(**given, device="cuda")
        batch, heads, queries = self.x.q.shape[:3]
        keys = self.x.k.shape[2]
        self.block, self.chosen = block, chosen
        self.placement = place(Layout(), batch, queries, keys, block)
        self.shape = shape_of(*self.x, block, None)
        self.part = part or Slice(0, batch * heads, 0, queries)
        start = self.placement.start + self.part.first
        self.idx = lists_of(self.part.lists, start, self.part.queries, block, chosen, width)

    def empty(self):
        """Parts full of poison."""
        heads, queries, width = self.idx.shape
        nan, size = float("nan"), self.x.v.shape[-1]
        out = self.x.q.new_full((heads, queries, self.chosen, size), nan)
        return Parts(out, out.new_full((heads, queries, width, 2), nan, dtype=torch.float32))

    def index(self):
        return reverse_index(self.idx, self.placement.blocks, large_hopper.ROWS)

    def launch(self, index, parts):
        assert large_hopper.fits(*self.x, self.placement, self.shape)
        sizes = (self.part, self.chosen, self.idx.shape[2])
        large_hopper.large_block(*self.x, index, parts, self.placement, self.shape, *sizes)

    def run(self):
        parts = self.empty()
        self.launch(self.index(), parts)
        return parts

    def plain(self):
        """What the plain kernel gives."""
        with mock.patch.object(large_hopper, "fits", lambda *_: False):
            parts = forward.by_block(
                *self.x, self.idx, self.placement, self.shape, self.part, self.chosen
            )
        return Parts(*(t.view(e.shape) for t, e in zip(parts, self.empty(), strict=True)))

    def listed(self):
        """Which places of the parts are written: `[H, T, chosen]` and `[H, T, W]`."""
        return self.idx[..., : self.chosen] >= 0, self.idx >= 0

    def wanted(self, low=False):
        """Parts in float64, or as eager attention in the dtype of the inputs has them."""
        wanted = Parts(*(t.double() for t in self.empty()))
        heads, group = self.shape.heads, self.shape.group
        for row in range(self.part.lists):
            b, h = divmod(self.part.first_list + row, heads)
            q = self.x.q[b, h, self.part.first :][: self.part.queries]
            k, v = self.x.k[b, h // group], self.x.v[b, h // group]
            for number in range(self.placement.blocks):
                t, place_ = torch.nonzero(self.idx[row] == number, as_tuple=True)
                keys = slice(number * self.block, (number + 1) * self.block)
                out, top, total = softmax_of(q[t], k[keys], v[keys], self.shape.scale_log2, low)
                wanted.out[row, t, place_] = out.double()
                wanted.stats[row, t, place_] = torch.stack([top, total], -1).double()
        return wanted


def softmax_of(q, k, v, scale_log2, low):
    if not low:
        q, k, v = q.double(), k.double(), v.double()
    s = q @ k.mT
    top = s.amax(-1)
    weights = torch.exp2((s.double() - top.double()[:, None]) * scale_log2)
    total = weights.sum(-1)
    weights = (weights / total[:, None]).to(v.dtype)
    return weights @ v, top, total


def assert_parts(got, case):
    written, told = case.listed()
    assert bool(written.any())
    assert bool(got.out[~written].isnan().all()) and bool(got.stats[~told].isnan().all())
    want, rough = case.wanted(), case.wanted(low=True)
    budget = 2 * error(rough.out[written], want.out[written])
    budget = max(budget, torch.finfo(got.out.dtype).eps / 2)
    assert error(got.out[written], want.out[written]) <= budget
    assert error(got.stats[told], want.stats[told]) <= 1e-5


SIZES = {
    "4096": (4096, 3, 4, {"keys": 16_384}),
    "1024, 11 of 16": (1024, 11, 16, {"keys": 16_384}),
    "512": (512, 2, 2, {}),
    "256": (256, 7, 8, {}),
    "384": (384, 3, 4, {"keys": 3840 + 77}),
    "512, one head a group": (512, 2, 2, {"groups": 4}),
    "1024, two batch rows": (1024, 3, 4, {"batch": 2, "heads": 6}),
    "1024, float16": (1024, 3, 4, {"dtype": FP16}),
    "1024, heads of 64": (1024, 3, 4, {"size": 64}),
    "512, heads of 64 in float16": (512, 3, 4, {"size": 64, "dtype": FP16}),
    "512, queries at the end": (512, 3, 4, {"queries": 1000}),
}


@pytest.mark.parametrize("name", SIZES)
def test_float64_and_the_plain_kernel(name):
    block, chosen, width, sizes = SIZES[name]
    case = Case(block, chosen, width, **sizes)
    got = case.run()
    assert_parts(got, case)
    plain, (written, told) = case.plain(), case.listed()
    assert error(got.out[written], plain.out[written]) < 2e-2
    assert error(got.stats[told], plain.stats[told]) < 1e-5


def test_slices_of_heads_and_of_queries():
    whole = Case(512, 2, 2)
    parts = whole.run()
    for part in (Slice(1, 2, 0, 8192), Slice(3, 1, 1024, 4096)):
        case = Case(512, 2, 2, part=part)
        rows = slice(part.first, part.first + part.queries)
        case.idx = whole.idx[part.first_list : part.first_list + part.lists, rows].contiguous()
        got, (written, told) = case.run(), case.listed()
        want = Parts(*(t[part.first_list : part.first_list + part.lists, rows] for t in parts))
        assert torch.equal(got.out[written], want.out[written])
        assert torch.equal(got.stats[told], want.stats[told])


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 128, 129, 300])
def test_lists_that_end_within_a_work_item(rows):
    """The rows that listed block 0 alone; all others list nothing."""
    case = Case(512, 1, 1, heads=1, groups=1)
    case.idx.fill_(-1)
    case.idx[0, 512 : 512 + rows] = 0
    assert_parts(case.run(), case)


def test_lists_without_entries_write_nothing():
    case = Case(512, 2, 2)
    case.idx.fill_(-1)
    assert all(bool(t.isnan().all()) for t in case.run())


def test_a_block_that_every_query_listed():
    case = Case(512, 1, 1)
    case.idx[:, 512:] = 0
    assert_parts(case.run(), case)


def test_huge_scores_keep_their_split():
    """Maxima and sums apart: equal huge scores share the weight, whatever the scale."""
    case = Case(512, 1, 1, heads=1, groups=1)
    case.x.q.fill_(64.0), case.x.k.fill_(64.0)
    got, (written, told) = case.run(), case.listed()
    assert bool((got.stats[told][:, 1] == 512.0).all())
    mean = case.x.v[0, 0].double().view(-1, 512, 128).mean(1)
    assert error(got.out[written], mean[case.idx[written].long()]) < 1e-2


def test_values_that_are_not_finite_stay_in_their_block():
    case = Case(512, 2, 2)
    case.x.v[:, :, 700] = float("nan")
    got, (written, _) = case.run(), case.listed()
    sees = written & (case.idx == 1)
    assert bool(got.out[sees].isnan().all())
    assert bool(got.out[written & ~sees].isfinite().all())


@pytest.mark.parametrize(("block", "width"), [(512, 2), (4096, 4)])
def test_reruns_give_the_same_bits(block, width):
    case = Case(block, width, width)
    first = case.run()
    for _ in range(10):
        assert same_bits(case.run(), first)


def test_other_work_items_do_not_change_a_row():
    """Half of the lists left out: what remains lies elsewhere in its work items."""
    case = Case(512, 2, 2)
    whole = case.run()
    case.idx[:, ::2] = -1
    got, (written, told) = case.run(), case.listed()
    assert torch.equal(got.out[written], whole.out[written])
    assert torch.equal(got.stats[told], whole.stats[told])


@pytest.mark.parametrize("block", [512, 4096])
def test_captured_graphs_follow_their_inputs(block):
    case = Case(block, 2, 2)
    index, parts = case.index(), case.empty()
    case.launch(index, parts)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.launch(index, parts)
    case.x.q.mul_(-0.5), case.x.k.add_(0.25)
    for _ in range(3):
        graph.replay()
    again = case.empty()
    case.launch(index, again)
    assert same_bits(parts, again)


def test_groups_that_do_not_take_turns_give_the_same_bits(monkeypatch):
    case = Case(1024, 3, 4)
    first = case.run()
    monkeypatch.setattr(large_hopper, "_BY_TURNS", not large_hopper._BY_TURNS)
    assert same_bits(case.run(), first)


def strided(name, x):
    q, k, v = x
    if name == "transposed":
        return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x]
    every = torch.cat([q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)], -1)
    size = q.shape[-1]
    return [every[..., :size], every[:, ::2, :, size : 2 * size], every[:, ::2, :, 2 * size :]]


@pytest.mark.parametrize("name", ["transposed", "sliced"])
def test_strides_as_they_come(name):
    case = Case(512, 2, 2)
    first = case.run()
    case.x = type(case.x)(*strided(name, case.x))
    assert not case.x.q.is_contiguous()
    assert same_bits(case.run(), first)


@pytest.mark.parametrize("block", [4096])
def test_the_op_uses_it(block, monkeypatch):
    monkeypatch.setenv("SPARSIFY_IMPL", "triton")
    x = inputs(heads=4, groups=2, keys=16_384, size=128, dtype=BF16, device="cuda")
    with mock.patch.object(large_hopper, "large_block", wraps=large_hopper.large_block) as used:
        got = schemas.moba_attention(*x, block_size=block, topk=3)
    assert used.called
    lists = schemas.moba_select(x.q, x.k, block_size=block, topk=3)
    assert_attention(got, lists, x, block)
