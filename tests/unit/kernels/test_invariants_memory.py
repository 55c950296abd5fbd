"""Views and large offsets.

Each test bears the number of its statement, which holds for both methods whatever the data; twins
show that it would fail for a neighbouring operator.
"""

from __future__ import annotations

import pytest
import torch

from tests._util.invariants import BLOCK, KEYS, every_kind, out_of
from tests._util.ops import close, make, select


@every_kind
def test_i37_views_equal_copies(kind):
    case = make(kind, seed=32)
    expected = out_of(kind, case)
    turned = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in case.items()}
    assert close(out_of(kind, turned), expected)
    inside = {
        n: torch.nn.functional.pad(x, (3, 2, 1, 1))[:, :, 1:-1, 3:-2] for n, x in case.items()
    }
    assert close(out_of(kind, inside), expected)
    flat = {n: x[:, :, :1].expand_as(x) for n, x in case.items()}
    copied = {n: x.contiguous() for n, x in flat.items()}
    assert close(out_of(kind, flat), out_of(kind, copied))


@every_kind
def test_i37_gradients_of_views_equal_those_of_copies(kind):
    case = make(kind, seed=32)
    grads = []
    for turn in (False, True):
        leaves = {n: x.clone().requires_grad_() for n, x in case.items()}
        used = {
            n: x.transpose(1, 2).contiguous().transpose(1, 2) if turn else x
            for n, x in leaves.items()
        }
        out_of(kind, used).transpose(1, 2).sum().backward()
        grads.append([leaves[n].grad for n in ("q", "k", "v")])
    for a, b in zip(*grads, strict=True):
        assert close(a, b)


@every_kind
@pytest.mark.parametrize("queries", [1, KEYS])
def test_i38_offsets_beyond_two_to_the_31_elements(kind, queries):
    case = make(kind, seed=33, queries=queries, dtype=torch.float16)
    far = dict(case)
    for name in ("k", "v", "ik"):
        heads, size = case[name].shape[1], case[name].shape[3]
        # The storage is claimed but never touched between the heads, so it takes no memory.
        storage = torch.empty(2**31 + 2 * KEYS * size, dtype=torch.float16)
        start = 0 if heads == 2 else 2**31
        view = storage.as_strided((1, heads, KEYS, size), (2**31, 2**31, size, 1), start)
        far[name] = view.copy_(case[name])
    assert torch.equal(out_of(kind, far), out_of(kind, case))
    assert torch.equal(select(kind, far, BLOCK, 3), select(kind, case, BLOCK, 3))
