"""q, k and v as model inputs of their own."""

import pytest
import torch

from tests._util.attention import code_of, sdpa, site_of


class Bare(torch.nn.Module):
    def __init__(self, view=lambda t: t):
        super().__init__()
        self.view = view

    def forward(self, q, k, v):
        return sdpa(self.view(q), self.view(k), self.view(v), is_causal=True)


def qkv(lengths=(20, 20, 20)):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, n, 8, generator=generator) for n in lengths]


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.flatten(0, 1)], ids=["4d", "3d"])
def test_three_inputs_of_one_length_are_taken_at_their_word(view):

    site = site_of(Bare(view), *qkv())
    assert site.stream.source is None
    assert site.stream.assumptions == (
        "the model inputs q, k, v belong to one token stream",
        "queries and keys are equally many, as in the example",
    )
    assert site.q_len == site.kv_len and site.mask.q_offset == 0


def test_other_lengths_are_cross_attention():

    assert code_of(Bare(), *qkv((12, 20, 20))) == "CROSS_ATTENTION"


def test_computed_queries_are_cross_attention():
    class Projected(Bare):
        def forward(self, q, k, v):
            return super().forward(q * 2, k, v)

    assert code_of(Projected(), *qkv()) == "CROSS_ATTENTION"
