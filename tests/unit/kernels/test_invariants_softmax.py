"""What a softmax over the chosen keys implies for the output.

Each test bears the number of its statement, which holds for both methods whatever the data; twins
show that it would fail for a neighbouring operator.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests._util.invariants import BLOCK, BLOCKS, KEYS, chosen, dense, every_kind, keep_of, out_of
from tests._util.ops import causal, close, make


@every_kind
def test_i17_linear_in_values(kind):
    case = make(kind, seed=14)
    other = make(kind, seed=15)["v"]
    mixed = out_of(kind, dict(case, v=2 * case["v"] - 3 * other))
    parts = 2 * out_of(kind, case) - 3 * out_of(kind, dict(case, v=other))
    assert close(mixed, parts, 1e-11)


@every_kind
def test_i18_weights_sum_to_one_and_reveal_the_selection(kind):
    case = make(kind, seed=16)
    ones = out_of(kind, dict(case, v=torch.ones_like(case["v"])))
    assert float((ones - 1).abs().max()) <= 1e-14
    number = torch.arange(KEYS) // BLOCK
    indicator = (number[:, None] == torch.arange(BLOCKS)).double().expand(1, 2, KEYS, BLOCKS)
    weights = out_of(kind, dict(case, v=indicator))
    assert torch.equal(weights > 0, chosen(kind, case))


@every_kind
def test_i19_one_vector_added_to_all_keys_changes_nothing(kind):
    case = make(kind, seed=17)
    assert close(out_of(kind, dict(case, k=case["k"] + 0.7)), out_of(kind, case), 1e-11)


@every_kind
def test_i20_query_factor_against_scale(kind):
    case = make(kind, seed=18, dtype=torch.float32)
    scale = 6**-0.5
    doubled = out_of(kind, dict(case, q=4 * case["q"]), scale=scale / 4)
    assert torch.equal(doubled, out_of(kind, case, scale=scale))
    tripled = out_of(kind, dict(case, q=3 * case["q"]), scale=scale / 3)
    assert close(tripled, out_of(kind, case), 1e-6)
    assert not close(out_of(kind, dict(case, q=4 * case["q"])), out_of(kind, case), 1e-3)


@every_kind
def test_i21_joint_rotation_changes_nothing(kind):
    case = make(kind, seed=19)
    generator = torch.Generator().manual_seed(19)
    turn = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    turn = torch.linalg.qr(turn)[0]
    turned = dict(case, q=case["q"] @ turn, k=case["k"] @ turn)
    assert close(out_of(kind, turned), out_of(kind, case), 1e-11)


@every_kind
@pytest.mark.parametrize("seed", range(5))
def test_i25_inside_the_hull_of_the_selected_values(kind, seed):
    case = make(kind, seed=seed)
    keep, out = keep_of(kind, case)[..., None], out_of(kind, case)
    v = case["v"].repeat_interleave(2, 1)[:, :, None].expand(-1, -1, KEYS, -1, -1)
    low = v.masked_fill(~keep, math.inf).amin(3)
    high = v.masked_fill(~keep, -math.inf).amax(3)
    assert bool(((out >= low - 1e-12) & (out <= high + 1e-12)).all())


@every_kind
@pytest.mark.parametrize("seed", range(5))
def test_i26_error_is_bounded_by_the_lost_mass(kind, seed):
    case = make(kind, seed=seed)
    k, v = (case[n].repeat_interleave(2, 1) for n in ("k", "v"))
    logits = (case["q"] @ k.mT) * 6**-0.5
    weights = logits.masked_fill(~causal(KEYS, KEYS), -math.inf).softmax(-1)
    lost = 1 - (weights * keep_of(kind, case)).sum(-1, keepdim=True)
    span = v.amax(2, keepdim=True) - v.amin(2, keepdim=True)
    error = (out_of(kind, case) - dense(case)).abs()
    assert bool((error <= lost * span + 1e-12).all())
