"""Positions in narrow dtypes: what they cannot hold exactly is not read as exact."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsify.passes.capture import capture
from sparsify.passes.detect import detect


class Masked(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.qkv, self.mask = nn.Linear(16, 48), mask

    def forward(self, x):
        q, k, v = (t.view(*x.shape[:2], 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = self.mask(x.shape[1])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def codes(mask):
    found = detect(capture(Masked(mask).eval(), (torch.randn(2, 24, 16),)))
    return [site.mask.kind.value for site in found.sites] + [r.code for r in found.refusals]


def ordered(positions):
    return positions[:, None] >= positions[None]


SPELLINGS = {
    "arange": lambda dtype: lambda n: ordered(torch.arange(n, dtype=dtype)),
    "to": lambda dtype: lambda n: ordered(torch.arange(n).to(dtype)),
    "cumsum": lambda dtype: lambda n: ordered(torch.ones(n, dtype=dtype).cumsum(0, dtype=dtype)),
    "sum": lambda dtype: lambda n: ordered(torch.arange(n).to(dtype) + 1),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_wide_positions_are_causal(spelling, dtype):
    assert codes(SPELLINGS[spelling](dtype)) == ["causal"]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.uint8])
def test_narrow_positions_are_refused_because_long_sequences_collide(spelling, dtype):
    assert codes(SPELLINGS[spelling](dtype)) == ["MASK_UNPROVED"]


def test_the_refused_masks_are_really_wrong_at_length():
    for dtype in (torch.bfloat16, torch.int8):
        wrong = ordered(torch.arange(300).to(dtype)) != torch.ones(300, 300).tril().bool()
        assert wrong.any()


def test_a_float_mask_of_a_narrow_dtype_is_still_a_mask():
    def mask(n):
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        return torch.zeros(n, n).masked_fill(hidden, torch.finfo(torch.bfloat16).min)

    assert codes(mask) == ["causal"]


def test_scalar_tensors_in_where_are_read():
    def mask(n):
        seen = ordered(torch.arange(n))
        return torch.where(seen, torch.tensor(0.0), torch.tensor(float("-inf")))

    assert codes(mask) == ["causal"]
