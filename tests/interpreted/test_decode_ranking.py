"""The place of a list that a decode program finds in the scores of its row."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from sparsify.kernels.select.decode_choice_kernels import place_of

NONE, NAN, LOWEST, HIGHEST = -(2**31), -(2**31) + 1, -0x7F800001, 0x7F800000


@triton.jit
def found_kernel(
    order_ptr, out_ptr, end, own, C: tl.constexpr, CHOSEN: tl.constexpr, LENGTH: tl.constexpr
):
    """Every place, and how many there are."""
    for place in range(CHOSEN):
        number, past = place_of(order_ptr, end, own, place, C, CHOSEN, LENGTH)
        tl.store(out_ptr + 2 * place, number)
        tl.store(out_ptr + 2 * place + 1, past)


def found(order, chosen, *, end=None, own=-1, numbers=128):
    """Blocks at the places of a row of scores; all programs must count the same."""
    end = len(order) if end is None else end
    length = max(4, 1 << (chosen - 1).bit_length())
    out = torch.full((chosen, 2), -1, dtype=torch.int32)
    found_kernel[(1,)](order, out, end, own, C=numbers, CHOSEN=chosen, LENGTH=length)
    past = out[0, 1].item()
    assert (out[:, 1] == past).all() and past <= chosen
    return out[:past, 0].tolist()


def wanted(order, chosen, end=None, own=-1):
    """Best first, equal ones by number, then ascending."""
    scores = order[:end].tolist()
    candidates = [n for n, score in enumerate(scores) if score != NONE]
    best = sorted(candidates, key=lambda n: (-scores[n], n))[:chosen]
    return sorted(n for n in best if n != own)


def of_scores(scores):
    bits = scores.float().view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@pytest.mark.parametrize("chosen", [1, 2, 3, 8, 15, 16])
@pytest.mark.parametrize("blocks", [17, 100, 128])
def test_random_scores(blocks, chosen):
    generator = torch.Generator().manual_seed(blocks * chosen)
    for scale in (1e-30, 1.0, 1e30):
        order = of_scores(torch.randn(blocks, generator=generator) * scale)
        assert found(order, chosen) == wanted(order, chosen)


@pytest.mark.parametrize("values", [1, 2, 5])
def test_equal_scores_go_to_the_first_blocks(values):
    generator = torch.Generator().manual_seed(values)
    for chosen in (1, 7, 16):
        order = of_scores(torch.randint(-values, values, (90,), generator=generator))
        assert found(order, chosen) == wanted(order, chosen)


@pytest.mark.parametrize("order", [NONE, NAN, LOWEST, -1, 0, HIGHEST])
def test_scores_that_are_all_the_same(order):
    """Also of -inf, +inf and NaN; and of no candidate at all."""
    row = torch.full((128,), order, dtype=torch.int32)
    assert found(row, 15) == ([] if order == NONE else list(range(15)))


@pytest.mark.parametrize("candidates", [0, 1, 14, 15, 16])
def test_fewer_candidates_than_places(candidates):
    row = torch.full((128,), NONE, dtype=torch.int32)
    at = torch.randperm(128, generator=torch.Generator().manual_seed(1))[:candidates]
    row[at] = torch.arange(candidates, dtype=torch.int32) - 8
    assert found(row, 15) == wanted(row, 15)
    assert len(found(row, 15)) == min(candidates, 15)


@pytest.mark.parametrize("extreme", [NONE, NAN, LOWEST, HIGHEST])
def test_scores_as_far_apart_as_they_can_be(extreme):
    generator = torch.Generator().manual_seed(3)
    row = of_scores(torch.randn(128, generator=generator))
    row[torch.randperm(128, generator=generator)[:60]] = extreme
    for chosen in (3, 15):
        assert found(row, chosen) == wanted(row, chosen)


def test_neighbouring_scores():
    """The search ends at the last number."""
    generator = torch.Generator().manual_seed(4)
    for base in (LOWEST, -64, 0x7F800000 - 128):
        row = base + torch.randperm(128, generator=generator).int()
        assert found(row, 15) == wanted(row, 15)


@pytest.mark.parametrize("end", [0, 3, 60])
def test_blocks_behind_the_end_are_nobodys(end):
    row = of_scores(torch.randn(128, generator=torch.Generator().manual_seed(5)))
    row[end:] = HIGHEST
    assert found(row, 15, end=end) == wanted(row, 15, end)


def test_the_own_block_is_not_counted():
    """It has the highest number, and is attended behind the others."""
    row = of_scores(torch.randn(70, generator=torch.Generator().manual_seed(6)))
    row[69] = HIGHEST
    assert found(row, 15, own=69) == wanted(row, 15, own=69)
    assert len(found(row, 15, own=69)) == 14 and len(found(row, 15)) == 15


def test_long_rows():
    generator = torch.Generator().manual_seed(7)
    row = of_scores(torch.randn(2048, generator=generator).abs() * 10 + 30)
    assert found(row, 15, numbers=2048) == wanted(row, 15)
    assert found(row, 100, numbers=2048) == wanted(row, 100)
