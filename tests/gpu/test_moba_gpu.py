"""The MoBA kernels on a GPU, against the reference in float64.

Kernels are compiled per shape, which costs more time than running them: most tests share the shape
of `base`, and lengths that 16 does not divide.
"""

from __future__ import annotations

import math

import pytest
import torch

from sparsify.kernels import accelerated, reference, schemas
from sparsify.kernels.layout import Layout
from sparsify.kernels.selection import record_selection, replay_selection
from tests._util.parity import (
    assert_attention,
    assert_lists,
    attended,
    error,
    expected,
    inputs,
)

DEVICE = "cuda"
BLOCK, TOPK = 128, 8
KEYS = 4611  # 37 blocks: more than the lists of the exact kernel would take at once
SIZE = 128
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN, INF = math.nan, math.inf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def by_name(monkeypatch):
    """The kernels or an error; never the reference in their place."""
    monkeypatch.setenv("SPARSIFY_IMPL", "triton")
    monkeypatch.delenv("SPARSIFY_DISABLE", raising=False)


def base(**sizes):
    """Tensors of the shape that most tests share."""
    given = {"heads": 4, "groups": 2, "keys": KEYS, "size": SIZE, "dtype": BF16} | sizes
    return inputs(**given, device=DEVICE)


def choose(x, block=BLOCK, topk=TOPK, **where):
    return schemas.moba_select(x.q, x.k, block_size=block, topk=topk, **where)


def attend(x, block=BLOCK, topk=TOPK, **options):
    return schemas.moba_attention(*x, block_size=block, topk=topk, **options)


def check(x, block=BLOCK, topk=TOPK, **where):
    """Choice and output of one call."""
    layout, lists = Layout(**where), choose(x, block, topk, **where)
    assert_lists(lists, x, block, topk, layout=layout)
    got = attend(x, block, topk, **where)
    assert_attention(got, lists, x, block, layout=layout)
    return got


def same(a, b):
    """Bit for bit; NaN equals NaN."""
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return all(
        torch.equal(s.view(ints[s.element_size()]), t.view(ints[t.element_size()]))
        for s, t in zip(a, b, strict=True)
    )


def tensor(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


# Parity


HEADS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (64, 128)]


@pytest.mark.parametrize(("size", "value_size"), HEADS)
def test_head_sizes(size, value_size):
    check(base(size=size, value_size=value_size))


@pytest.mark.parametrize(("dtype", "size"), [(FP16, 128), (FP32, 64), (FP32, 128)])
def test_dtypes(dtype, size):
    check(base(size=size, dtype=dtype))


@pytest.mark.parametrize(
    ("block", "topk", "keys"),
    [(512, 3, 17_411), (64, 16, 4611), (4096, 3, 16_384), (2048, 2, 9001), (96, 5, 3301)],
)
def test_blocks_and_places(block, topk, keys):
    check(base(keys=keys), block, topk)


@pytest.mark.parametrize(("heads", "groups"), [(7, 1), (3, 3)])
def test_head_ratios(heads, groups):
    check(base(heads=heads, groups=groups, batch=2, keys=1027), 64, 4)


@pytest.mark.parametrize("topk", [1, 40, 10**6])
def test_own_block_alone_long_lists_and_dense(topk):
    check(base(), BLOCK, topk)


@pytest.mark.parametrize("keys", [3, 127, 129, BLOCK * TOPK - 1, BLOCK * TOPK + 1])
def test_lengths_around_the_borders(keys):
    check(base(keys=keys))


@pytest.mark.parametrize("queries", [1, 5, 31, 33, 700])
def test_queries_at_the_end(queries):
    check(base(queries=queries))


def test_scale():
    x = base()
    lists = choose(x)
    assert_attention(attend(x, scale=0.02), lists, x, BLOCK, scale=0.02)


def test_many_equal_scores_are_ranked_by_the_rule():
    """Products of small whole numbers are exact, so every row must agree."""
    x = base()
    generator = torch.Generator(DEVICE).manual_seed(0)
    for least, most in ((0, 2), (-1, 2), (0, 1)):
        shape = (1, 2, 37, SIZE)
        means = torch.randint(least, most, shape, generator=generator, device=DEVICE).to(BF16)
        q = torch.randint(-1, 2, x.q.shape, generator=generator, device=DEVICE).to(BF16)
        part = x._replace(q=q)
        lists = choose(part, block_means=means)
        assert_lists(lists, part, BLOCK, TOPK, block_means=means, differing=0.0)


def test_a_block_that_every_query_chose():
    x = base()
    x.q.abs_()
    x.k[:, :, 3 * BLOCK : 4 * BLOCK] += 3.0
    lists = choose(x)
    assert bool((lists[:, :, 4 * BLOCK :] == 3).any(-1).all())
    check(x)


def test_listed_blocks():
    x = base()
    generator = torch.Generator().manual_seed(0)
    for heads in (2, 4):
        lists = torch.randint(-2, 40, (1, heads, KEYS, TOPK), generator=generator).int().to(DEVICE)
        got = schemas.block_attention(*x, lists, block_size=BLOCK)
        assert_attention(got, lists, x, BLOCK)


# Layouts


def layouts():
    at = torch.arange(KEYS, device=DEVICE)
    borders = [0, 700, 700, 1801, KEYS - 40, KEYS]
    return {
        "lengths": {
            "kv_len": tensor([KEYS, 3003]),
            "q_start": tensor([KEYS - 650, 2000]),
            "block_origin": tensor([0, 77]),
        },
        "documents": {"cu_seqlens_q": tensor(borders)},
        "left padding": {"key_mask": at[None] >= tensor([[0], [333]])},
        "holes": {"key_mask": (at % 301 > 30)[None].repeat(2, 1)},
    }


@pytest.mark.parametrize("name", ["lengths", "documents", "left padding", "holes"])
@pytest.mark.parametrize("topk", [TOPK, 10**6])
def test_layouts(name, topk):
    where = layouts()[name]
    batch = 1 if name == "documents" else 2
    queries = None if name == "documents" else 650
    check(base(batch=batch, queries=queries), BLOCK, topk, **where)


def test_pages():
    x, pages = base(batch=2, queries=5), base(batch=60, keys=BLOCK, seed=1)
    table = torch.randperm(60)[:52].view(2, 26).int().to(DEVICE)
    x = x._replace(k=pages.k, v=pages.v)
    check(x, page_table=table, kv_len=tensor([26 * BLOCK, 1999]))


def test_chunks_choose_as_the_whole_prefill():
    x = base()
    chosen = choose(x)
    whole = attend(x)[0]
    for first, last in ((0, 1001), (1001, 1002), (1002, KEYS)):
        part = x._replace(q=x.q[:, :, first:last], k=x.k[:, :, :last], v=x.v[:, :, :last])
        rows = choose(part)
        assert torch.equal(rows, chosen[:, :, first:last, : rows.shape[-1]])
        got = attend(part)
        assert_attention(got, rows, part, BLOCK)
        assert error(got[0], whole[:, :, first:last]) < 2e-2


# Memory: strides, what was there before, what lies around


def strided(name, x):
    """The same numbers laid out otherwise."""
    q, k, v = x
    if name == "transposed":  # as projections leave them
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in x)
    elif name == "sliced":  # parts of one projection
        parts = [t.repeat_interleave(4 // t.shape[1], 1) for t in x]
        every = torch.stack(parts, 3).flatten(3)
        size = q.shape[-1]
        q = every[..., :size]
        k, v = every[:, ::2, :, size : 2 * size], every[:, ::2, :, 2 * size :]
    elif name == "offset":  # not aligned
        q, k, v = (unaligned(t) for t in x)
    elif name == "keys across":  # the head axis is not the innermost
        k, v = k.mT.contiguous().mT, v.mT.contiguous().mT
    return type(x)(q, k, v)


def unaligned(t):
    buffer = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:]
    return buffer.view(t.shape).copy_(t)


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
    assert same(got, clean) and torch.equal(again, chosen)
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
        assert same(attend(x, workspace_bytes=workspace_bytes), whole)


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


# The same bits every time


def test_reruns():
    x = base()
    first, lists = attend(x), choose(x)
    for _ in range(4):
        assert same(attend(x), first)
        assert torch.equal(choose(x), lists)


def test_batch_composition():
    x = base(batch=3)
    whole, lists = attend(x), choose(x)
    for rows in (slice(1, 2), slice(0, 2), slice(2, 3)):
        part = type(x)(*(t[rows].clone() for t in x))
        assert same(attend(part), [t[rows] for t in whole])
        assert torch.equal(choose(part), lists[rows])
    turned = type(x)(*(t.flip(0) for t in x))
    assert same(attend(turned), [t.flip(0) for t in whole])


def test_decode_in_a_batch():
    x = base(batch=5, queries=1)
    whole = attend(x)
    for row in (0, 3):
        part = type(x)(*(t[row : row + 1].clone() for t in x))
        assert same(attend(part), [t[row : row + 1] for t in whole])


# Compilers, graphs, streams


def test_compiled_full_graph():
    def twice(q, k, v):
        return schemas.moba_attention(q * 2, k, v, block_size=BLOCK, topk=TOPK)[0] * 2

    x = base()
    compiled = torch.compile(twice, fullgraph=True)
    assert torch.equal(compiled(*x), twice(*x))
    leaves = [t.clone().requires_grad_() for t in x]
    others = [t.clone().requires_grad_() for t in x]
    twice(*leaves).square().mean().backward()
    compiled(*others).square().mean().backward()
    for a, b in zip(leaves, others, strict=True):
        assert error(b.grad, a.grad) < 2e-2


@pytest.mark.parametrize("what", ["prefill", "decode", "documents", "masked"])
def test_captured_graphs_follow_their_inputs(what):
    queries = {"decode": 1, "masked": 650}.get(what)
    x = base(batch=1, queries=queries)
    where = {}
    if what == "documents":
        where = layouts()["documents"]
    elif what == "masked":
        where = {"key_mask": layouts()["holes"]["key_mask"][:1].clone()}
    attend(x, **where)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend(x, **where)
    for seed in (5, 6):
        for old, new in zip(x, base(batch=1, queries=queries, seed=seed), strict=True):
            old.copy_(new)
        if what == "documents":
            where["cu_seqlens_q"].copy_(tensor([0, 1, 400 * seed, 3000, 3000, KEYS]))
        elif what == "masked":
            where["key_mask"].copy_(torch.rand(1, KEYS, device=DEVICE) < 0.6)
        graph.replay()
        torch.cuda.synchronize()
        assert same(got, attend(x, **where))


@pytest.mark.parametrize("name", ["plain", "lengths", "documents", "holes"])
def test_nothing_waits_for_the_device(name):
    where = {} if name == "plain" else layouts()[name]
    batch = 1 if name in ("plain", "documents") else 2
    x = base(batch=batch, queries=KEYS if batch == 1 else 650)
    lists = choose(x, **where)
    attend(x, **where)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(x, **where)
        choose(x, **where)
        schemas.block_attention(*x, lists, block_size=BLOCK, **where)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_other_streams():
    x = base()
    want = attend(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = attend(x)
    stream.synchronize()
    assert same(got, want)


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices")
def test_tensors_on_a_device_that_is_not_the_current_one():
    x = base()
    want = attend(x)
    there = type(x)(*(t.to("cuda:1") for t in x))
    assert same([t.to("cuda:0") for t in attend(there)], want)


# Empty and hard inputs


@pytest.mark.parametrize("topk", [2, 10**6])
@pytest.mark.parametrize(
    "sizes", [(0, 5, 9), (1, 0, 9), (1, 5, 0), (1, 1, 1), (2, 1, 300), (1, 300, 3)]
)
def test_empty_and_single(sizes, topk):
    batch, queries, keys = sizes
    x = base(batch=batch, queries=queries, keys=keys)
    check(x, BLOCK, topk)


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("name", ["k", "v"])
def test_future_tokens_reach_no_earlier_row(name, value):
    x = base()
    clean, lists = attend(x), choose(x)
    at = 3000
    getattr(x, name)[:, :, at:, 5] = value
    got = attend(x)
    assert same([t[:, :, :at] for t in got], [t[:, :, :at] for t in clean])
    if name == "v" or value != INF:  # an infinite key may give a logit of -inf, that is no weight
        assert not bool(got[0][:, :, at:].isfinite().all(-1).any())
    assert torch.equal(choose(x)[:, :, :at], lists[:, :, :at])


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_odd_tokens_reach_the_rows_that_attend_them(name):
    x = base()
    for at in (1000, 1500, 3333):
        getattr(x, name)[:, :1, at, 7] = NAN
    lists = choose(x)
    assert_lists(lists, x, BLOCK, TOPK)
    want = expected(lists, x, BLOCK)[0]
    got = attend(x)[0]
    finite = want.isfinite().all(-1)
    assert torch.equal(got.isfinite().all(-1), finite)
    assert bool(finite.any()) and not bool(finite.all())
    assert error(got[finite], want[finite]) < 2e-2


def test_hidden_tokens_are_never_read():
    where = layouts()["holes"]
    x = base(batch=2, queries=650)
    clean = attend(x, **where)
    hidden = ~where["key_mask"][0]
    x.k[:, :, hidden], x.v[:, :, hidden] = NAN, INF
    assert same(attend(x, **where), clean)


@pytest.mark.parametrize("queries", [700, 5])
def test_rows_whose_logits_are_all_minus_infinity_give_nothing(queries):
    x = base(queries=queries)
    x.q.abs_()
    x.k[..., 0] = -INF
    x.v[:, :, 4000:4020] = NAN
    out, lse = attend(x)
    assert not bool(out.any()) and bool((lse == -INF).all())


@pytest.mark.parametrize("size", [1e3, 1e6, 1e8, 1e15, 1e30])
@pytest.mark.parametrize("queries", [700, 5])
def test_huge_equal_logits_split_by_count(size, queries):
    """Every attended key has the largest logit, so the output is the mean of the values."""
    x = base(queries=queries)
    x.q.fill_(size), x.k.fill_(1.0)
    x.v.fill_(0.0)[:, :, ::4] = 1.0
    lists = choose(x)
    keep = attended(lists, x, BLOCK)
    v = x.v.repeat_interleave(2, 1).double()
    weights = keep.double() / keep.sum(-1, keepdim=True)
    assert error(attend(x, scale=1.0)[0], weights @ v) < 1e-2


def test_a_choice_that_is_wrong_is_seen():
    """The comparison itself: with other lists it fails."""
    x = base()
    lists = choose(x)
    wrong = lists.clone()
    wrong[:, :, 4000:4040, 0] = 36 - wrong[:, :, 4000:4040, 1]  # not every row is close
    with pytest.raises(AssertionError):
        assert_attention(attend(x), wrong, x, BLOCK)
    with pytest.raises(AssertionError):
        assert_lists(wrong, x, BLOCK, TOPK)


# Gradients and selections


def eager_gradients(lists, x, grad):
    """Gradients of attention as models write it, in the dtype of the inputs."""
    leaves = [t.detach().clone().requires_grad_() for t in x]
    q, k, v = leaves
    ratio = q.shape[1] // k.shape[1]
    logits = (q @ k.repeat_interleave(ratio, 1).mT) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~attended(lists, x, BLOCK), -INF)
    weights = logits.softmax(-1, dtype=torch.float32).to(q.dtype)
    (weights @ v.repeat_interleave(ratio, 1)).backward(grad)
    return [t.grad for t in leaves]


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("op", ["fused", "two steps"])
def test_gradients(dtype, op, monkeypatch):
    x = base(dtype=dtype, keys=2051)
    lists = choose(x)
    grad = inputs(heads=4, keys=2051, size=SIZE, dtype=dtype, device=DEVICE, seed=9).q
    leaves = [t.clone().requires_grad_() for t in x]
    if op == "fused":
        attend(leaves)[0].backward(grad)
    else:
        monkeypatch.setenv("SPARSIFY_IMPL", "auto")
        schemas.block_attention(*leaves, lists, block_size=BLOCK)[0].backward(grad)
    wide = [t.double() for t in x]
    out, lse = reference.block_attention(*wide, lists, Layout(), block_size=BLOCK)
    wanted = reference.block_attention_backward(
        grad.double(), None, *wide, lists, out, lse, Layout(), block_size=BLOCK
    )
    yardstick = eager_gradients(lists, x, grad)
    for leaf, want, eager in zip(leaves, wanted, yardstick, strict=True):
        bound = 1e-5 if dtype == FP32 else max(2 * error(eager, want), 1e-2)
        assert error(leaf.grad, want) <= bound


def test_recorded_and_replayed(monkeypatch):
    x = base()
    monkeypatch.setenv("SPARSIFY_IMPL", "reference")
    with record_selection() as chosen:
        attend(x)
    lists = choose(x)
    monkeypatch.setenv("SPARSIFY_IMPL", "triton")
    with replay_selection(chosen), record_selection() as again:
        got = attend(x)
    assert_attention(got, lists, x, BLOCK)
    assert all(d.differing == d.unmatched == 0 for d in chosen.diff(again).values())


def test_auto_is_the_kernels(monkeypatch):
    monkeypatch.setenv("SPARSIFY_IMPL", "auto")
    x = base()
    calls = []
    real = accelerated.moba_attention

    def spy(*args, **options):
        calls.append(1)
        return real(*args, **options)

    monkeypatch.setattr(accelerated, "moba_attention", spy)
    attend(x)
    assert calls
