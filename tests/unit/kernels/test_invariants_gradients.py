"""Gradients, and the choice under them.

Each test bears the number of its statement, which holds for both methods whatever the data; twins
show that it would fail for a neighbouring operator.
"""

from __future__ import annotations

import pytest
import torch

from tests._util.invariants import BLOCK, every_kind, keep_of, masked_dense, msa_kinds, out_of
from tests._util.ops import away_from_ties, close, make, ops_for, run, select


@msa_kinds
def test_i08_the_choice_carries_no_gradient(kind):
    case = {name: x.clone().requires_grad_() for name, x in make(kind, seed=6).items()}
    out_of(kind, case).sum().backward()
    assert case["iq"].grad is None
    assert case["ik"].grad is None


def test_i08_moba_gradient_is_that_of_attention_given_the_choice():
    case = {name: x.clone().requires_grad_() for name, x in make(seed=6).items()}
    out_of("moba", case).square().sum().backward()
    twin = {name: x.detach().clone().requires_grad_() for name, x in case.items()}
    masked_dense(twin, keep_of("moba", twin)).square().sum().backward()
    for name in ("q", "k", "v"):
        assert close(case[name].grad, twin[name].grad)


@every_kind
@pytest.mark.parametrize("options", [{}, {"scale": 0.7}])
def test_i34_gradcheck(kind, options):
    case = make(kind, seed=29, keys=19)
    assert away_from_ties(kind, case, 4, 2, margin=1e-4)
    qkv = [case[n].clone().requires_grad_() for n in ("q", "k", "v")]

    def attend(q, k, v):
        return run(kind, dict(case, q=q, k=k, v=v), 4, 2, **options)

    assert torch.autograd.gradcheck(attend, qkv, atol=1e-6, fast_mode=True)


@every_kind
def test_i36_same_input_same_selection_and_checkpointing_changes_no_gradient(kind):
    case = make(kind, seed=31, dtype=torch.float32)
    assert torch.equal(select(kind, case, BLOCK, 3), select(kind, case, BLOCK, 3))
    plain = {n: x.clone().requires_grad_() for n, x in case.items()}
    again = {n: x.clone().requires_grad_() for n, x in case.items()}
    out_of(kind, plain).square().sum().backward()
    names = ops_for(kind)

    def attend(*tensors):
        return out_of(kind, dict(zip(names, tensors, strict=True)))

    tensors = [again[n] for n in names]
    out = torch.utils.checkpoint.checkpoint(attend, *tensors, use_reentrant=False)
    out.square().sum().backward()
    for name in ("q", "k", "v"):
        assert torch.equal(plain[name].grad, again[name].grad)
