"""Gradients against float64 autograd of independent formulas, for odd sizes and shared blocks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsify.kernels import schemas
from tests._util.ops import (
    KINDS,
    away_from_ties,
    block_masks,
    causal,
    close,
    make,
    run,
    select,
    slow,
)

every_kind = pytest.mark.parametrize("kind", KINDS)
QKV = ("q", "k", "v")


def leaves_of(case):
    return {n: x.detach().clone().requires_grad_() for n, x in case.items()}


def by_dense_formula(case, keep, grad_out, grad_lse, scale=None):
    """Gradients by autograd through one masked softmax over all keys, in float64."""
    leaves = leaves_of({n: case[n].double() for n in QKV})
    group = case["q"].shape[1] // case["k"].shape[1]
    k, v = (leaves[n].repeat_interleave(group, 1) for n in ("k", "v"))
    scale = case["q"].shape[-1] ** -0.5 if scale is None else scale
    logits = ((leaves["q"] @ k.mT) * scale).masked_fill(~keep, -math.inf)
    out, lse = logits.softmax(-1) @ v, logits.logsumexp(-1)
    torch.autograd.backward([out, lse], [grad_out.double(), grad_lse.double()])
    return [leaves[n].grad for n in QKV]


def by_op(kind, case, block_size, topk, grad_out, grad_lse, **options):
    leaves = leaves_of(case)
    out, lse = run(kind, leaves, block_size, topk, **options)
    torch.autograd.backward([out, lse], [grad_out, grad_lse])
    return [leaves[n].grad for n in QKV]


def random_grads(out_shape, dtype=torch.float64, seed=99):
    generator = torch.Generator().manual_seed(seed)
    grad_out = torch.randn(out_shape, generator=generator, dtype=torch.float64).to(dtype)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    grad_lse = torch.randn(out_shape[:3], generator=generator, dtype=torch.float64).to(lse_dtype)
    return grad_out, grad_lse


@every_kind
@pytest.mark.parametrize(
    ("size", "workspace"),
    [(1, None), (16, 100_000), (64, None), (80, None), (96, None), (128, None)],
)
def test_every_head_size_and_an_odd_length(kind, size, workspace):
    case = make(kind, keys=61, size=size, value_size=size // 2 + 1)
    grads = random_grads((1, 4, 61, size // 2 + 1))
    keep = block_masks(select(kind, case, 7, 3), 9, 4).repeat_interleave(7, -1)[..., :61]
    expected = by_dense_formula(case, keep & causal(61, 61), *grads)
    got = by_op(kind, case, 7, 3, *grads, workspace_bytes=workspace)
    for a, b in zip(got, expected, strict=True):
        assert close(a, b)


@every_kind
def test_heavily_shared_blocks(kind):
    """All queries want block 0, so its keys gather gradient from every row."""
    case = make(kind, keys=64, heads=6, groups=2)
    case["q"][..., 0], case["k"][..., 0] = 5.0, -1.0
    case["iq"][..., 0], case["ik"][..., 0] = 50.0, -1.0
    case["k"][:, :, :4, 0] = case["ik"][:, :, :4, 0] = 1.0
    lists = select(kind, case, 4, 2)
    assert bool((lists[:, :, 4:, 0] == 0).float().mean() > 0.9)
    grads = random_grads((1, 6, 64, 5))
    keep = block_masks(lists, 16, 6).repeat_interleave(4, -1) & causal(64, 64)
    for a, b in zip(
        by_op(kind, case, 4, 2, *grads), by_dense_formula(case, keep, *grads), strict=True
    ):
        assert close(a, b)


@every_kind
@given(
    seed=st.integers(0, 10**6),
    keys=st.integers(1, 16),
    queries=st.integers(1, 8),
    block_size=st.integers(1, 6),
    topk=st.integers(1, 4),
    holes=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_gradients_equal_autograd_through_the_oracle(
    kind, seed, keys, queries, block_size, topk, holes
):
    case = make(kind, seed=seed, keys=keys, queries=queries, batch=2)
    where = {}
    if holes:
        generator = torch.Generator().manual_seed(seed)
        where["key_mask"] = torch.rand(2, keys, generator=generator) < 0.6
    grads = random_grads((2, 4, queries, 5))
    leaves = leaves_of(case)
    answer = slow(kind, leaves, block_size, topk, **where)
    sees = answer.lse > -math.inf
    if answer.out.requires_grad:
        pairs = [(answer.out, grads[0]), (answer.lse[sees], grads[1][sees])]
        pairs = [(x, g) for x, g in pairs if x.requires_grad]
        torch.autograd.backward(*zip(*pairs, strict=True))
    got = by_op(kind, case, block_size, topk, *grads, **where)
    for name, a in zip(QKV, got, strict=True):
        expected = leaves[name].grad
        expected = torch.zeros_like(a) if expected is None else expected
        torch.testing.assert_close(a, expected, rtol=0, atol=1e-11)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_gradients_stay_near_float64(kind, dtype):
    """The bound is twice the error of masked eager attention in the same dtype."""
    case = make(kind, keys=61, size=16, dtype=dtype)
    grads = random_grads((1, 4, 61, 5), dtype)
    keep = block_masks(select(kind, case, 7, 3), 9, 4).repeat_interleave(7, -1)[..., :61]
    keep &= causal(61, 61)
    exact = by_dense_formula(case, keep, *grads)
    got = by_op(kind, case, 7, 3, *grads)
    leaves = leaves_of({n: case[n] for n in QKV})
    k, v = (leaves[n].repeat_interleave(2, 1) for n in ("k", "v"))
    logits = ((leaves["q"] @ k.mT) * 0.25).masked_fill(~keep, -math.inf)
    out, lse = logits.softmax(-1) @ v, logits.logsumexp(-1)
    torch.autograd.backward([out, lse], [grads[0], grads[1].to(dtype)])
    for name, a, b in zip(QKV, got, exact, strict=True):
        assert a.dtype == dtype
        eager = (leaves[name].grad.double() - b).abs().max()
        least = torch.finfo(dtype).eps * b.abs().max()
        assert float((a.double() - b).abs().max()) <= 2 * float(torch.maximum(eager, least))


@every_kind
def test_only_the_output_or_only_the_sum_may_be_used(kind):
    case = make(kind, keys=20)
    grads = random_grads((1, 4, 20, 5))
    nothing = [torch.zeros_like(g) for g in grads]
    both = by_op(kind, case, 4, 2, *grads)
    parts = [
        by_op(kind, case, 4, 2, grads[0], nothing[1]),
        by_op(kind, case, 4, 2, nothing[0], grads[1]),
    ]
    for whole, one, two in zip(both, *parts, strict=True):
        assert close(whole, one + two)
    leaves = leaves_of(case)
    run(kind, leaves, 4, 2)[0].backward(grads[0])
    for name, expected in zip(QKV, parts[0], strict=True):
        assert torch.equal(leaves[name].grad, expected)


def test_backward_op_takes_none_for_zero_gradients():
    case = make(keys=20)
    lists = select("moba", case, 4, 2)
    tensors = [case[n] for n in QKV]
    out, lse = schemas.block_attention(*tensors, lists, block_size=4)
    grads = random_grads(out.shape)
    zeros = [torch.zeros_like(g) for g in grads]
    for given_, full in (
        ((grads[0], None), (grads[0], zeros[1])),
        ((None, grads[1]), (zeros[0], grads[1])),
    ):
        one = schemas.block_attention_backward(*given_, *tensors, lists, out, lse, block_size=4)
        two = schemas.block_attention_backward(*full, *tensors, lists, out, lse, block_size=4)
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@every_kind
def test_two_step_and_fused_gradients_are_the_same(kind):
    case = make(kind, keys=40, batch=2)
    grads = random_grads((2, 4, 40, 5))
    leaves = leaves_of(case)
    lists = select(kind, leaves, 4, 3)
    out = schemas.block_attention(*(leaves[n] for n in QKV), lists, block_size=4)
    torch.autograd.backward(out, grads)
    for name, expected in zip(QKV, by_op(kind, case, 4, 3, *grads), strict=True):
        assert torch.equal(leaves[name].grad, expected)


@every_kind
def test_reruns_are_equal_bit_for_bit(kind):
    case = make(kind, keys=100, size=16, dtype=torch.float32)
    grads = random_grads((1, 4, 100, 5), torch.float32)
    first, second = (by_op(kind, case, 8, 3, *grads, deterministic=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", ["moba", "msa"])
def test_gradcheck_with_holes_offsets_and_the_sum(kind):
    case = make(kind, seed=3, keys=13, queries=6, heads=2, groups=1)
    where = {"key_mask": torch.rand(1, 13, generator=torch.Generator().manual_seed(1)) < 0.7}
    assert away_from_ties(kind, case, 4, 2, margin=1e-4, **where)
    qkv = [case[n].clone().requires_grad_() for n in QKV]

    def attend(q, k, v):
        out, lse = run(kind, dict(case, q=q, k=k, v=v), 4, 2, **where)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(attend, qkv, atol=1e-6, fast_mode=True)


def test_second_derivatives_are_refused_by_name():
    case = leaves_of(make(keys=12))
    out = run("moba", case, 4, 2)[0]
    (grad,) = torch.autograd.grad(out.sum(), case["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"moba_attention_backward.*second derivatives"):
        grad.sum().backward()


def test_frozen_inputs_need_no_gradient():
    case = make(keys=12)
    case["q"].requires_grad_()
    run("moba", case, 4, 2)[0].sum().backward()
    assert case["q"].grad is not None
    assert case["k"].grad is None
