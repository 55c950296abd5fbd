"""Batch rows, heads and keys in another order.

Each test bears the number of its statement, which holds for both methods whatever the data; twins
show that it would fail for a neighbouring operator.
"""

from __future__ import annotations

import pytest
import torch

from tests._util.invariants import KEYS, every_kind, keep_of, masked_dense, out_of
from tests._util.ops import OF_KEYS, close, make


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_i12_a_row_does_not_depend_on_its_neighbours_bit_for_bit(kind, dtype):
    one, two = (make(kind, seed=s, keys=150, size=16, dtype=dtype) for s in (1, 2))
    batch = {name: torch.cat([one[name], two[name], one[name]]) for name in one}
    alone, other = out_of(kind, one), out_of(kind, two)
    assert torch.equal(out_of(kind, batch), torch.cat([alone, other, alone]))


@every_kind
def test_i13_permuting_groups_permutes_the_output(kind):
    case = make(kind, seed=10)
    heads, groups = [2, 3, 0, 1], [1, 0]
    index = case["ik"] if case["ik"].shape[1] == 1 else case["ik"][:, groups]
    moved = {
        "q": case["q"][:, heads],
        "k": case["k"][:, groups],
        "v": case["v"][:, groups],
        "iq": case["iq"][:, groups],
        "ik": index,
    }
    assert close(out_of(kind, moved), out_of(kind, case)[:, heads])


@every_kind
def test_i14_permuting_heads_of_a_group_permutes_the_output(kind):
    case = make(kind, seed=11)
    heads = [1, 0, 2, 3]
    assert close(out_of(kind, dict(case, q=case["q"][:, heads])), out_of(kind, case)[:, heads])


@every_kind
def test_i14_twin_moving_a_head_to_another_group_does_not(kind):
    case = make(kind, seed=11)
    heads = [2, 1, 0, 3]
    moved = out_of(kind, dict(case, q=case["q"][:, heads]))
    assert not close(moved, out_of(kind, case)[:, heads], 1e-3)


@every_kind
@pytest.mark.parametrize("ratio", [2, 3, 7, 8])
def test_i16_grouped_heads_equal_repeated_ones(kind, ratio):
    case = make(kind, seed=13, heads=2 * ratio, groups=2)
    spread = {n: case[n].repeat_interleave(ratio, 1) for n in ("k", "v", "iq")}
    index = case["ik"] if case["ik"].shape[1] == 1 else case["ik"].repeat_interleave(ratio, 1)
    assert close(out_of(kind, dict(case, **spread, ik=index)), out_of(kind, case))
    tiled = {n: case[n].repeat(1, ratio, 1, 1) for n in ("k", "v", "iq")}
    index = case["ik"] if case["ik"].shape[1] == 1 else case["ik"].repeat(1, ratio, 1, 1)
    assert not close(out_of(kind, dict(case, **tiled, ik=index)), out_of(kind, case), 1e-3)


@every_kind
def test_i16_equal_axes_are_not_mixed_up(kind):
    case = make(kind, seed=13, batch=4, heads=4, groups=4, keys=4, size=4, value_size=4)
    keep = keep_of(kind, case, 2, 2)
    assert close(out_of(kind, case, 2, 2), masked_dense(case, keep))


def _permuted(case, order):
    return {name: x[:, :, order] if name in OF_KEYS else x for name, x in case.items()}


@every_kind
def test_i22_order_inside_a_past_block_does_not_matter(kind):
    case = make(kind, seed=20)
    order = torch.arange(KEYS)
    order[8:16] = order[8:16].flip(0)
    moved = out_of(kind, _permuted(case, order))
    assert close(moved[:, :, 16:], out_of(kind, case)[:, :, 16:])
    assert not close(moved[:, :, 8:15], out_of(kind, case)[:, :, 8:15], 1e-3)


@every_kind
def test_i23_order_of_past_blocks_does_not_matter(kind):
    case = make(kind, seed=21)
    order = torch.arange(KEYS)
    order[:8], order[8:16] = torch.arange(8, 16), torch.arange(8)
    assert close(out_of(kind, _permuted(case, order))[:, :, 16:], out_of(kind, case)[:, :, 16:])
