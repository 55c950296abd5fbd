"""What the mask object knows, and the dense mask it builds on demand."""

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from sparsify.hosts.masks import sparsify_mask

CPU = torch.device("cpu")


def mask(attention_mask=None, q=4, kv=4, **kwargs):
    return sparsify_mask(2, q, kv, attention_mask=attention_mask, **kwargs)


def test_only_the_causal_function_itself_is_known_to_be_causal():
    assert mask(mask_function=causal_mask_function).causal
    assert not mask(mask_function=sliding_window_causal_mask_function(2)).causal
    assert not mask(mask_function=lambda b, h, q, k: k <= q).causal


def test_a_mask_of_ones_is_no_padding():
    assert mask(torch.ones(2, 4)).padding is None
    assert mask(torch.ones(2, 4)).origins is None
    assert mask(None).padding is None


def test_padding_is_cut_to_the_keys_and_missing_keys_are_hidden():
    given = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert mask(given).padding.tolist() == [[False, True, True, True], [True] * 4]
    assert mask(given, kv=6).padding[1].tolist() == [True] * 5 + [False]


@pytest.mark.parametrize(
    ("row", "contiguous", "origin"),
    [([0, 0, 1, 1], True, 2), ([1, 1, 1, 1], True, 0), ([0, 1, 0, 1], False, 1)],
)
def test_origin_is_the_first_real_key_and_holes_are_noticed(row, contiguous, origin):
    known = mask(torch.tensor([row, [0, 1, 1, 1]]))
    assert known.left_padded_only is contiguous
    assert known.origins == (origin, 1)


def test_right_padding_leaves_blocks_broken_by_holes():
    assert not mask(torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])).left_padded_only


def test_queries_at_the_end_need_no_start():
    assert mask(q=4, kv=4).q_start(CPU) is None
    assert mask(q=2, kv=6, q_offset=4).q_start(CPU) is None


def test_queries_elsewhere_get_a_start_per_sequence():
    assert mask(q=2, kv=6, q_offset=1).q_start(CPU).tolist() == [1, 1]
    assert mask(q=2, kv=6, q_offset=torch.tensor(3)).q_start(CPU).tolist() == [3, 3]


@pytest.mark.parametrize("offset", [1, torch.tensor(3)])
def test_what_a_layer_is_told_lies_where_it_computes(offset):
    known = mask(torch.tensor([[0, 1, 1, 1, 1, 1]] * 2), q=2, kv=6, q_offset=offset)
    elsewhere = torch.device("meta")
    start, padding, documents = known.on(elsewhere)
    assert start.device == padding.device == elsewhere and documents is None
    assert known.on(elsewhere)[0] is start and known.on(CPU)[1].device == CPU


def test_the_dense_mask_is_the_one_that_transformers_would_build():
    given = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    wanted = sdpa_mask(2, 4, 4, attention_mask=given.bool())
    assert torch.equal(mask(given.bool()).dense(), wanted)
    assert mask(torch.ones(2, 4, dtype=torch.bool)).dense() is None
