"""The ops of MSA with SPARSIFY_IMPL=triton: choice, attention, gradients, recorded selections."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from sparsify.errors import UsageError
from sparsify.kernels import accelerated, reference, schemas
from sparsify.kernels.attend import decode
from sparsify.kernels.layout import Layout
from sparsify.kernels.selection import record_selection, replay_selection
from tests._util.parity import Inputs, assert_attention, error, inputs

BLOCK, TOPK = 16, 3
SIZES = {"block_size": BLOCK, "topk": TOPK}


@pytest.fixture(autouse=True)
def by_name(monkeypatch):
    monkeypatch.setenv("SPARSIFY_IMPL", "triton")


class Call(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    iq: torch.Tensor
    ik: torch.Tensor

    @property
    def x(self):
        return Inputs(*self[:3])


def call(*, queries=20, keys=120, heads=4, groups=2, index_heads=1, seed=0, **sizes):
    x = inputs(heads=heads, groups=groups, queries=queries, keys=keys, seed=seed, **sizes)
    index = inputs(
        batch=x.q.shape[0],
        heads=groups,
        groups=index_heads,
        queries=queries,
        keys=keys,
        size=32,
        seed=seed + 1,
    )
    return Call(*x, index.q, index.k)


def select(c, layout=None, **options):
    return schemas.msa_select(c.iq, c.ik, *(layout or Layout()), **{**SIZES, **options})


def attend(c, layout=None, **options):
    return schemas.msa_attention(*c, *(layout or Layout()), **{**SIZES, **options})


def check(c, layout=None, **options):
    """The choice is the reference's; the attention is that over the choice."""
    lists = select(c, layout, **options)
    want = reference.msa_select(c.iq, c.ik, layout or Layout(), **{**SIZES, **options})
    assert torch.equal(lists, want)
    got = attend(c, layout, **options)
    assert_attention(got, lists, c.x, options.get("block_size", BLOCK), layout=layout)
    return got


@pytest.mark.parametrize("local", ["inside", "union"])
@pytest.mark.parametrize("index_heads", [1, 2])
@pytest.mark.parametrize("topk", [1, 3, 100])
def test_choice_and_attention(local, index_heads, topk, by_block):
    check(call(index_heads=index_heads), local=local, topk=topk)


@pytest.mark.parametrize("local", ["inside", "union"])
@pytest.mark.parametrize("topk", [3, 100])
def test_few_queries(local, topk):
    """More than a decode step has, and fewer than have lists of queries per block."""
    assert decode.MOST_QUERIES < 20
    check(call(heads=7, groups=1), local=local, topk=topk)


@pytest.mark.parametrize("queries", [1, 5])
def test_decode_steps(queries):
    check(call(queries=queries))


def test_decode_steps_have_kernels_of_their_own(monkeypatch):
    seen = []
    real = decode.msa_decode
    monkeypatch.setattr(decode, "msa_decode", lambda *a, **o: (seen.append(1), real(*a, **o))[1])
    attend(call(queries=2))
    assert seen == [1]
    attend(call(queries=decode.MOST_QUERIES + 1))
    assert seen == [1]


LAYOUTS = {
    "documents": {"cu_seqlens_q": [0, 33, 33, 100, 117]},
    "holes": {"key_mask": [[s % 21 < 8 and s > 4 for s in range(120)]]},
    "lengths": {"kv_len": [90], "q_start": [41], "block_origin": [3]},
}


@pytest.mark.parametrize("local", ["inside", "union"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, local, by_block):
    queries = 120 if name == "documents" else 20
    layout = Layout(**{n: torch.tensor(x) for n, x in LAYOUTS[name].items()})
    check(call(queries=queries), layout, local=local)


@pytest.mark.parametrize("queries", [2, 20])
def test_pages(queries, by_block):
    c, pages = call(queries=queries, keys=BLOCK, batch=2), call(keys=BLOCK, batch=9, seed=7)
    table = torch.tensor([[7, 2, 5, 0, 3, -1], [1, 1, 8, 6, -1, -1]], dtype=torch.int32)
    c = c._replace(k=pages.k, v=pages.v, ik=pages.ik)
    layout = Layout(page_table=table, kv_len=torch.tensor([70, 51]))
    check(c, layout)


@pytest.mark.parametrize("index_heads", [1, 2])
def test_slices_change_no_bit(index_heads, by_block):
    c = call(queries=140, keys=150, batch=2, index_heads=index_heads)
    whole = attend(c)
    for workspace_bytes in (1, 150_000):
        got = attend(c, workspace_bytes=workspace_bytes)
        assert all(map(torch.equal, got, whole))


@pytest.mark.parametrize("queries", [3, 20])
def test_gradients(queries):
    """Against the reference in float64 with the same choice; the index gets none."""
    c = call(queries=queries)
    lists = select(c)
    leaves = [t.clone().requires_grad_() for t in c]
    out, lse = schemas.msa_attention(*leaves, **SIZES)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    ((out * weight).sum() + lse.sum()).backward()
    wide = [t.double() for t in c.x]
    want, want_lse = reference.block_attention(*wide, lists, Layout(), block_size=BLOCK)
    grads = reference.block_attention_backward(
        weight.double(),
        torch.ones_like(want_lse),
        *wide,
        lists,
        want,
        want_lse,
        Layout(),
        block_size=BLOCK,
    )
    for leaf, grad in zip(leaves, grads, strict=False):
        assert error(leaf.grad, grad) < 1e-5
    for leaf in leaves[3:]:
        assert leaf.grad is None or not bool(leaf.grad.any())


@pytest.mark.parametrize("queries", [3, 20])
def test_recorded_and_replayed(queries):
    c = call(queries=queries)
    with record_selection() as chosen:
        out = attend(c)
    lists = select(c)
    assert torch.equal(chosen.blocks("call:0")[0, :, 120 - queries :], lists[0])
    assert_attention(out, lists, c.x, BLOCK)
    other = c._replace(q=-c.q, iq=-c.iq)
    assert not torch.equal(select(other), lists)
    with replay_selection(chosen):
        got = attend(other)
    with replay_selection(chosen):
        assert torch.equal(select(other), lists)
    assert_attention(got, lists, other.x, BLOCK)


def test_decode_and_chunks_choose_as_the_whole_prefill(by_block):
    c = call(queries=120)
    whole, lists = attend(c)[0], select(c)
    for first, last in ((0, 40), (40, 43), (43, 120)):
        part = Call(
            c.q[:, :, first:last],
            c.k[:, :, :last],
            c.v[:, :, :last],
            c.iq[:, :, first:last],
            c.ik[:, :, :last],
        )
        rows = select(part)
        assert torch.equal(rows, lists[:, :, first:last, : rows.shape[-1]])
        assert error(attend(part)[0], whole[:, :, first:last]) < 1e-6


def test_what_the_kernels_do_not_do_is_said():
    c = call()
    with pytest.raises(UsageError, match="scale"):
        attend(c, scale=-1.0)
    wide = c._replace(iq=torch.zeros(1, 2, 20, 257), ik=torch.zeros(1, 1, 120, 257))
    with pytest.raises(UsageError, match="256"):
        attend(wide)
    doubles = c._replace(iq=c.iq.double(), ik=c.ik.double())
    with pytest.raises(UsageError, match="float64 has no tensor-core kernels"):
        select(doubles)
    eight = c._replace(q=c.q.to(torch.float8_e4m3fn))
    named = accelerated.unsupported("msa_attention", tuple(eight), Layout(), SIZES)
    assert named == "torch.float8_e4m3fn has no tensor-core kernels here"
    index = c._replace(iq=c.iq.to(torch.float8_e4m3fn), ik=c.ik.to(torch.float8_e4m3fn))
    assert accelerated.unsupported("msa_attention", tuple(index), Layout(), SIZES) is None


@pytest.mark.parametrize(("local", "most"), [("inside", 256), ("union", 255)])
def test_the_longest_lists(local, most):
    c = call(keys=2)
    c = c._replace(ik=torch.zeros(1, 1, 300, 32), iq=torch.zeros(1, 2, 1, 32))
    for topk, fits in ((most, True), (most + 1, False)):
        options = {"block_size": 1, "topk": topk, "local": local}
        why = accelerated.unsupported("msa_select", (c.iq, c.ik), Layout(), options)
        assert (why is None) == fits
