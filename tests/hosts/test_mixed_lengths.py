"""A batch of sequences of different lengths, padded left or right, equals each sequence alone."""

import functools

import pytest
import torch

import sparsify as sp
from tests._util.tiny_models import build, tokens
from tests._util.verified import FAMILIES, pairs

LENGTHS, WIDTH = (40, 1, 23, 17), 40
POLICY = sp.Policy.moba(block_size=8, topk=2)
ALLOWED = 1e-5  # float32, the same blocks on both sides: rounding of the layers around


def batch(left):
    """Tokens `[B, T]`, their mask and positions, and the slots of every sequence."""
    ids, mask = tokens(len(LENGTHS), WIDTH), torch.zeros(len(LENGTHS), WIDTH, dtype=torch.long)
    slots = [slice(WIDTH - n, WIDTH) if left else slice(0, n) for n in LENGTHS]
    for row, where in enumerate(slots):
        mask[row, where] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}, slots


@functools.cache
def rewritten(family, attention, host):
    """On the graph host with positions as an input: some families count them from slot 0 else."""
    model = build(family, attention=attention)
    inputs = {**batch(left=True)[0], "use_cache": False}
    return sp.sparsify(model, POLICY, kwargs=inputs, host=host).model


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize(("family", "attention", "host"), pairs(FAMILIES))
@torch.no_grad()
def test_a_padded_batch_equals_each_sequence_alone(family, attention, host, left):
    model = rewritten(family, attention, host)
    inputs, slots = batch(left)
    together = model(**inputs, use_cache=False).logits
    for row, where in enumerate(slots):
        alone = {name: value[row : row + 1, where] for name, value in inputs.items()}
        wanted = model(**alone, use_cache=False).logits
        error = (together[row : row + 1, where] - wanted).abs().max() / wanted.abs().max()
        assert error < ALLOWED


@torch.no_grad()
def test_without_the_mask_the_padding_is_read():
    model = rewritten("llama", "sdpa", "graph")
    inputs, slots = batch(left=True)
    blind = {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}
    row, where = 2, slots[2]
    together = model(**blind, use_cache=False).logits[row, where]
    right = model(**inputs, use_cache=False).logits[row, where]
    assert (together - right).abs().max() / right.abs().max() > 1e-2
