"""No row sees the future, so a prefix, a chunk and a decode step are parts of the whole.

Each test bears the number of its statement, which holds for both methods whatever the data; twins
show that it would fail for a neighbouring operator.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests._util.invariants import BLOCK, BLOCKS, KEYS, NAN, every_kind, msa_kinds, out_of
from tests._util.ops import close, cut, make, select


@every_kind
@pytest.mark.parametrize("t", [1, 7, 8, 9, 20, 36])
@pytest.mark.parametrize("future", ["other", "nan", "inf", "-inf"])
def test_i06_the_future_changes_nothing_bit_for_bit(kind, t, future):
    case = make(kind, seed=4)
    changed = {name: x.clone() for name, x in case.items()}
    for x in changed.values():
        x[:, :, t:] = x[:, :, t:] * -3 + 1 if future == "other" else float(future)
    assert torch.equal(out_of(kind, changed)[:, :, :t], out_of(kind, case)[:, :, :t])


@every_kind
def test_i06_twin_the_past_changes_later_rows(kind):
    case = make(kind, seed=4)
    changed = dict(case, v=case["v"].clone())
    changed["v"][:, :, 0] += 1
    assert not close(out_of(kind, changed, BLOCKS), out_of(kind, case, BLOCKS), 1e-4)


@every_kind
def test_i07_gradients_never_point_into_the_future(kind):
    case = {name: x.clone().requires_grad_() for name, x in make(kind, seed=5).items()}
    out_of(kind, case)[:, :, 20].sum().backward()
    for name in ("q", "k", "v"):
        assert float(case[name].grad[:, :, 21:].abs().max()) == 0
        assert float(case[name].grad.abs().max()) > 0
    assert float(case["q"].grad[:, :, :20].abs().max()) == 0


@msa_kinds
def test_i07_hidden_inputs_of_the_index_get_nothing_from_the_future(kind):
    case = make(kind, seed=5)
    hidden = torch.linspace(-1, 1, 4 * KEYS, dtype=torch.float64).view(1, 1, KEYS, 4)
    hidden.requires_grad_()
    with_index = dict(case, iq=case["iq"] * hidden, ik=case["ik"] * hidden)
    q = case["q"].clone().requires_grad_()
    out_of(kind, dict(with_index, q=q)).square().sum().backward()
    assert hidden.grad is None or float(hidden.grad.abs().max()) == 0


@every_kind
@pytest.mark.parametrize("t", [1, 8, 9, 23])
def test_i09_a_prefix_is_a_prefix(kind, t):
    case = make(kind, seed=7)
    assert close(out_of(kind, cut(case, 0, t)), out_of(kind, case)[:, :, :t])


@every_kind
@pytest.mark.parametrize("t", [1, 8, 9, 16, 37])
def test_i10_decode_is_the_last_row_of_the_prefill(kind, t):
    case = make(kind, seed=8)
    assert close(out_of(kind, cut(case, t - 1, t)), out_of(kind, case)[:, :, t - 1 : t])


@every_kind
@given(borders=st.sets(st.integers(1, KEYS - 1), max_size=5))
@settings(max_examples=25, deadline=None)
def test_i11_chunked_prefill_is_the_whole(kind, borders):
    case = make(kind, seed=9)
    edges = [0, *sorted(borders), KEYS]
    parts = [out_of(kind, cut(case, a, b)) for a, b in pairwise(edges)]
    assert close(torch.cat(parts, 2), out_of(kind, case))


@msa_kinds
def test_m04_future_index_keys_of_the_own_block_have_no_effect(kind):
    case = make(kind, seed=37)
    for value in (1e6, NAN):
        changed = dict(case, ik=case["ik"].clone())
        changed["ik"][:, :, 21:24] = value
        expected = select(kind, case, BLOCK, 3)[:, :, :21]
        assert torch.equal(select(kind, changed, BLOCK, 3)[:, :, :21], expected)
        assert torch.equal(out_of(kind, changed)[:, :, :21], out_of(kind, case)[:, :, :21])
