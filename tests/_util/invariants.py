"""One random attention of 37 keys in blocks of 8, as the tests of invariants ask about it."""

from __future__ import annotations

import math

import pytest

from tests._util import oracle
from tests._util.ops import KINDS, MSA_KINDS, block_masks, causal, run, select

KEYS, BLOCK = 37, 8
BLOCKS = 5
NAN = float("nan")

every_kind = pytest.mark.parametrize("kind", KINDS)
msa_kinds = pytest.mark.parametrize("kind", MSA_KINDS)


def dense(case, **where):
    """Causal attention over all keys, by the slow oracle."""
    return oracle.dense(case["q"], case["k"], case["v"], **where).out


def out_of(kind, case, topk=3, block_size=BLOCK, **options):
    """Output of the fused op."""
    return run(kind, case, block_size, topk, **options)[0]


def chosen(kind, case, topk=3, block_size=BLOCK, **where):
    """Chosen blocks, bool `[B, H, T, blocks]`."""
    blocks = -(-case["k"].shape[2] // block_size)
    return block_masks(select(kind, case, block_size, topk, **where), blocks, case["q"].shape[1])


def masked_dense(case, keep):
    """Attention under an explicit mask, float64."""
    group = case["q"].shape[1] // case["k"].shape[1]
    k, v = (case[n].double().repeat_interleave(group, 1) for n in ("k", "v"))
    logits = (case["q"].double() @ k.mT) * case["q"].shape[-1] ** -0.5
    return logits.masked_fill(~keep, -math.inf).softmax(-1) @ v


def keep_of(kind, case, topk=3, block_size=BLOCK):
    """Token mask of a selection."""
    keys, queries = case["k"].shape[2], case["q"].shape[2]
    tokens = chosen(kind, case, topk, block_size).repeat_interleave(block_size, -1)[..., :keys]
    return tokens & causal(queries, keys)
