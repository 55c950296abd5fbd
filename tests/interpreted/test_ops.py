"""The registered ops with SPARSIFY_IMPL=triton: dispatch, gradients, recorded selections."""

from __future__ import annotations

import pytest
import torch

from sparsify.errors import UsageError
from sparsify.kernels import accelerated, dispatch, reference, schemas
from sparsify.kernels.layout import Layout
from sparsify.kernels.selection import record_selection, replay_selection
from tests._util.parity import assert_attention, assert_lists, error, inputs

SIZES = {"block_size": 4, "topk": 3}


@pytest.fixture(autouse=True)
def by_name(monkeypatch):
    monkeypatch.setenv("SPARSIFY_IMPL", "triton")


@pytest.fixture
def seen(monkeypatch):
    """Names of the accelerated functions that were called."""
    names = []
    for name in ("moba_select", "moba_attention", "moba_attention_backward", "block_attention"):
        real = getattr(accelerated, name)

        def spy(*args, _name=name, _real=real, **options):
            names.append(_name)
            return _real(*args, **options)

        monkeypatch.setattr(accelerated, name, spy)
    return names


def test_ops_run_the_kernels(seen):
    x = inputs(heads=2, queries=5, keys=30)
    lists = schemas.moba_select(x.q, x.k, **SIZES)
    assert_lists(lists, x, 4, 3, differing=0.0)
    assert_attention(schemas.moba_attention(*x, **SIZES), lists, x, 4)
    assert_attention(schemas.block_attention(*x, lists, block_size=4), lists, x, 4)
    assert seen == ["moba_select", "moba_attention", "block_attention"]


def test_auto_on_a_cpu_is_the_reference(monkeypatch, seen):
    x = inputs(queries=5, keys=30)
    for name in ("auto", "reference"):
        monkeypatch.setenv("SPARSIFY_IMPL", name)
        schemas.moba_attention(*x, **SIZES)
    assert seen == []


def test_what_the_kernels_do_not_do_is_said():
    x = inputs(queries=5, keys=30)
    with pytest.raises(UsageError, match="float64 has no tensor-core kernels"):
        schemas.moba_attention(*(t.double() for t in x), **SIZES)
    with pytest.raises(UsageError, match="scale"):
        schemas.moba_attention(*x, **SIZES, scale=-1.0)
    wide = inputs(queries=2, keys=9, size=257)
    with pytest.raises(UsageError, match="256"):
        schemas.moba_select(wide.q, wide.k, **SIZES)


@pytest.mark.parametrize("op", ["fused", "two steps"])
def test_gradients(op, seen):
    """Against the reference in float64 with the same choice."""
    x = inputs(heads=2, queries=9, keys=30)
    lists = schemas.moba_select(x.q, x.k, **SIZES)
    leaves = [t.clone().requires_grad_() for t in x]
    if op == "fused":
        out, lse = schemas.moba_attention(*leaves, **SIZES)
    else:
        out, lse = schemas.block_attention(*leaves, lists, block_size=4)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    ((out * weight).sum() + lse.sum()).backward()
    wide = [t.double() for t in x]
    want, want_lse = reference.block_attention(*wide, lists, Layout(), block_size=4)
    grads = reference.block_attention_backward(
        weight.double(),
        torch.ones_like(want_lse),
        *wide,
        lists,
        want,
        want_lse,
        Layout(),
        block_size=4,
    )
    for leaf, grad in zip(leaves, grads, strict=True):
        assert error(leaf.grad, grad) < 1e-5
    assert ("moba_attention_backward" in seen) == (op == "fused")


def test_recorded_and_replayed():
    x = inputs(heads=2, queries=9, keys=30)
    with record_selection() as chosen:
        out = schemas.moba_attention(*x, **SIZES)
    lists = schemas.moba_select(x.q, x.k, **SIZES)
    assert torch.equal(chosen.blocks("call:0")[0, :, 21:], lists[0])
    assert_attention(out, lists, x, 4)
    other = x._replace(q=-x.q)
    with replay_selection(chosen):
        got = schemas.moba_attention(*other, **SIZES)
    with replay_selection(chosen):
        assert torch.equal(schemas.moba_select(other.q, other.k, **SIZES), lists)
    assert_attention(got, lists, other, 4)
    with replay_selection(chosen), pytest.raises(UsageError, match="no row for position 0"):
        schemas.moba_attention(x.k.expand(-1, 2, -1, -1), x.k, x.v, **SIZES)


def test_what_the_reference_recorded_is_replayed_by_the_kernels(monkeypatch):
    x = inputs(heads=2, groups=2, queries=9, keys=30)
    monkeypatch.setenv("SPARSIFY_IMPL", "reference")
    with record_selection() as chosen:
        schemas.moba_attention(*x, **SIZES)
    lists = schemas.moba_select(x.q, x.k, **SIZES)
    monkeypatch.setenv("SPARSIFY_IMPL", "triton")
    with replay_selection(chosen), record_selection() as again:
        got = schemas.moba_attention(*x, **SIZES)
    assert_attention(got, lists, x, 4)
    assert all(d.differing == d.unmatched == 0 for d in chosen.diff(again).values())


@pytest.mark.parametrize("what", ["batch", "documents", "masked"])
def test_records_of_layouts(what):
    layout = {
        "batch": {},
        "documents": {"cu_seqlens_q": torch.tensor([0, 4, 4, 13, 20])},
        "masked": {"key_mask": torch.arange(20)[None] >= torch.tensor([[3], [0]])},
    }[what]
    x = inputs(batch=1 if what == "documents" else 2, keys=20)
    with record_selection() as chosen:
        out = schemas.moba_attention(*x, **layout, **SIZES)
    with replay_selection(chosen):
        again = schemas.moba_attention(*x, **layout, **SIZES)
    assert all(map(torch.equal, out, again))
    lists = schemas.moba_select(x.q, x.k, **layout, **SIZES)
    assert_attention(out, lists, x, 4, layout=Layout(**layout))


def dense(x):
    lists = torch.arange(8, dtype=torch.int32).expand(*x.q.shape[:3], 8)
    return lists.contiguous()


@pytest.mark.parametrize(
    "options", [{"min_context": 31}, {"decode_dense": True}, {"min_context": 30}]
)
def test_calls_that_attend_every_block(options):
    x = inputs(queries=1, keys=30)
    got = schemas.moba_attention(*x, **SIZES, **options)
    lists = schemas.moba_select(x.q, x.k, **SIZES)
    sparse = options.get("min_context") == 30
    assert_attention(got, lists if sparse else dense(x), x, 4)


def test_disabled(monkeypatch):
    monkeypatch.setenv("SPARSIFY_DISABLE", "1")
    x = inputs(queries=5, keys=30)
    assert_attention(schemas.moba_attention(*x, **SIZES), dense(x), x, 4)


def test_min_context_counts_the_longest_document():
    x = inputs(keys=30)
    borders = torch.tensor([0, 12, 30])
    for least, topk in ((19, 1000), (18, 3)):
        got = schemas.moba_attention(*x, cu_seqlens_q=borders, **SIZES, min_context=least)
        lists = schemas.moba_select(x.q, x.k, cu_seqlens_q=borders, block_size=4, topk=topk)
        assert_attention(got, lists, x, 4, layout=Layout(cu_seqlens_q=borders))


def test_lengths_are_read_by_the_host_only_if_asked(monkeypatch):
    """A call without `min_context` waits for nothing."""
    q = torch.empty(1, 2, 8, 4)

    def read(*_):
        raise AssertionError("the host read the lengths")

    monkeypatch.setattr(torch.Tensor, "tolist", read)
    layout = Layout(cu_seqlens_q=torch.tensor([0, 3, 8]))
    assert not dispatch.attends_every_block(q, q, layout)


def test_nothing_is_read_by_the_host(monkeypatch):
    """Neither the choice nor the attention asks a tensor for its values."""
    x = inputs(heads=2, queries=9, keys=30)
    layout = Layout(kv_len=torch.tensor([28]), key_mask=torch.ones(1, 30).bool())
    lists = accelerated.moba_select(x.q, x.k, layout, None, **SIZES)

    def read(*_):
        raise AssertionError("the host read a tensor")

    with monkeypatch.context() as patched:
        # What the interpreter itself needs is not among these.
        for name in ("tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
            patched.setattr(torch.Tensor, name, read)
        patched.setattr(torch, "nonzero", read)
        accelerated.moba_select(x.q, x.k, layout, None, **SIZES)
        accelerated.moba_attention(*x, layout, None, **SIZES)
        accelerated.block_attention(*x, lists, layout, block_size=4)
