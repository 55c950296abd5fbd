"""The gap at the last place explains every difference between two right choices."""

from __future__ import annotations

import pytest
import torch

from sparsify.kernels.gaps import moba_gaps, msa_gaps
from sparsify.kernels.layout import Layout
from tests._util.ops import KINDS, block_masks, make, select

every_kind = pytest.mark.parametrize("kind", KINDS)


def gaps_of(kind, case, block_size, topk, layout=None):
    layout, sizes = layout or Layout(), {"block_size": block_size, "topk": topk}
    if kind == "moba":
        return moba_gaps(case["q"], case["k"], layout, **sizes)
    local = "union" if kind == "union" else "inside"
    return msa_gaps(case["iq"], case["ik"], layout, local=local, **sizes)


@every_kind
def test_gap_is_the_distance_of_the_last_chosen_from_the_best_left_out(kind):
    case = make(kind, keys=37)
    gap = gaps_of(kind, case, 8, 3).gap
    k = case["k"] if kind == "moba" else case["ik"].expand(-1, 2, -1, -1)
    q = case["q"] if kind == "moba" else case["iq"]
    for head in range(q.shape[1]):
        keys = k[0, head * 2 // q.shape[1]]
        scores = []
        for c in range(5 if kind == "union" else 4):
            block = keys[c * 8 : c * 8 + 8]
            dots = block @ q[0, head, 36]
            scores.append(float(block.mean(0) @ q[0, head, 36] if kind == "moba" else dots.max()))
        scores.sort(reverse=True)
        places = 3 if kind == "union" else 2
        assert abs(float(gap[0, head, 36]) - (scores[places - 1] - scores[places])) < 1e-12


@every_kind
def test_rows_that_leave_nothing_out_have_an_infinite_gap(kind):
    case = make(kind, keys=37)
    gap = gaps_of(kind, case, 8, 3).gap
    assert bool((gap[:, :, :24] == float("inf")).all())
    assert bool((gap[:, :, 32:] < float("inf")).all())
    assert bool((gaps_of(kind, case, 8, 5).gap == float("inf")).all())
    assert gap.shape == select(kind, case, 8, 3).shape[:3]


@every_kind
def test_ties_have_no_gap(kind):
    case = {n: torch.ones_like(x) for n, x in make(kind, keys=37).items()}
    gaps = gaps_of(kind, case, 8, 2)
    assert bool((gaps.gap[:, :, 32:] == 0).all())
    assert bool(gaps.close()[:, :, 32:].all())


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choices_by_plain_float32_arithmetic_differ_only_in_close_rows(kind, dtype):
    """A second implementation that sums in float32, and torch.topk."""
    case = make(kind, keys=1024, size=64, index_size=32, dtype=dtype)
    lists = select(kind, case, 16, 8)
    own = torch.arange(1024) // 16
    if kind == "moba":
        k = case["k"].repeat_interleave(2, 1).unflatten(2, (-1, 16))
        scores = case["q"].float() @ k.mean(3).float().mT
    else:
        dots = case["iq"].float() @ case["ik"].float().mT
        ahead = torch.arange(1024) > torch.arange(1024)[:, None]
        scores = dots.masked_fill(ahead, -torch.inf).unflatten(-1, (-1, 16)).amax(-1)
    number = torch.arange(64)
    hidden = number > own[:, None] if kind == "union" else number >= own[:, None]
    best = scores.masked_fill(hidden, -torch.inf).topk(8 if kind == "union" else 7, -1)
    second = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best.indices, True)
    second = (second & ~hidden) | (number == own[:, None])
    first = block_masks(lists, 64, scores.shape[1])
    differs = (first != second).any(-1)
    gaps = gaps_of(kind, case, 16, 8)
    assert not bool((differs & ~gaps.close()).any())
    limit = 1e-3 if dtype == torch.float32 else 1e-2
    assert float(differs.float().mean()) <= limit
    if dtype == torch.float32:
        assert float(gaps.close().float().mean()) < 0.01


@every_kind
def test_layouts_are_honoured(kind):
    case = make(kind, keys=37)
    mask = torch.arange(37)[None] >= 5
    part = {n: x[:, :, 5:] for n, x in case.items()}
    padded = gaps_of(kind, case, 8, 2, Layout(key_mask=mask)).gap[:, :, 5:]
    torch.testing.assert_close(padded, gaps_of(kind, part, 8, 2).gap)
