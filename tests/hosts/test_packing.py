"""Packed documents on the transformers host: sparse, and each document as if it were alone."""

import pytest
import torch
from transformers import masking_utils as mu
from transformers.masking_utils import and_masks, causal_mask_function, or_masks

from sparsify.errors import StrictError
from sparsify.hosts import transformers as host
from sparsify.hosts.calls import observing
from sparsify.hosts.masks import sparsify_mask
from sparsify.hosts.packing import documents_of
from sparsify.sparse_rows import Seen
from tests._util.packed_rows import each, positions
from tests._util.planned import relative, rewrite
from tests._util.tiny_models import build, tokens

ROWS = [[29, 1, 37], [13, 54]]  # beyond and below top-k blocks, at no border of a block


@torch.no_grad()
def logits(model, ids, **kwargs):
    return model(ids, use_cache=False, **kwargs).logits


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one_row", "two_rows"])
@pytest.mark.parametrize("method", ["moba", "msa"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_document_equals_itself_alone(family, method, rows):
    rewritten = rewrite(build(family, dtype=torch.float64), method)
    ids = tokens(len(rows), 67)
    packed = logits(rewritten, ids, position_ids=positions(rows))
    for row, first, last in each(rows):
        alone = logits(rewritten, ids[row : row + 1, first:last])
        assert relative(packed[row : row + 1, first:last], alone) <= 1e-12
    assert not host.fallbacks(rewritten)
    assert all(counts["sparse"] for counts in host.call_counts(rewritten).values())


def test_without_packed_positions_the_documents_are_one():
    rewritten, ids = rewrite(build("llama")), tokens(1, 67)
    packed = logits(rewritten, ids, position_ids=positions(ROWS[:1]))
    assert relative(packed[:, 29:], logits(rewritten, ids)[:, 29:]) > 1e-3
    assert relative(packed[:, :29], logits(rewritten, ids)[:, :29]) <= 1e-5


def test_at_top_k_all_the_logits_equal_the_originals_and_with_few_they_do_not():
    model, ids, where = build("llama"), tokens(2, 67), {"position_ids": positions(ROWS)}
    wanted = logits(model, ids, **where)
    assert relative(logits(rewrite(model, topk=10**6), ids, **where), wanted) <= 1e-4
    assert relative(logits(rewrite(model), ids, **where), wanted) > 1e-3


def test_dense_layers_get_the_masks_of_documents():
    model, ids, where = build("llama"), tokens(2, 67), {"position_ids": positions(ROWS)}
    dense = rewrite(model, dense=range(3))
    assert torch.equal(logits(dense, ids, **where), logits(model, ids, **where))
    mixed = rewrite(model, dense=[0, 2])
    packed = logits(mixed, ids, **where)
    for row, first, last in each(ROWS):
        alone = logits(mixed, ids[row : row + 1, first:last])
        assert relative(packed[row : row + 1, first:last], alone) <= 1e-4


def test_gradients_do_not_cross_documents():
    rewritten = rewrite(build("llama", dtype=torch.float64))
    embedded = rewritten.get_input_embeddings()(tokens(1, 67)).detach().requires_grad_()
    out = rewritten(
        inputs_embeds=embedded, position_ids=positions(ROWS[:1]), use_cache=False
    ).logits
    out[:, 30:].square().sum().backward()
    assert embedded.grad[:, :30].abs().max() == 0 and embedded.grad[:, 30:].abs().max() > 0


def test_the_longest_document_is_the_context():
    model, ids, where = build("llama"), tokens(2, 67), {"position_ids": positions(ROWS)}
    wanted = logits(model, ids, **where)
    assert torch.equal(logits(rewrite(model, min_context=55), ids, **where), wanted)
    assert relative(logits(rewrite(model, min_context=54), ids, **where), wanted) > 1e-3


def test_without_a_cache_object_transformers_packs_nothing():
    """transformers looks for documents only where there is no cache, and so does the rewrite."""
    model, ids, where = build("llama"), tokens(1, 67), {"position_ids": positions(ROWS[:1])}
    full = rewrite(model, topk=10**6)
    with torch.no_grad():
        wanted = model(ids, use_cache=True, **where).logits
        assert relative(full(ids, use_cache=True, **where).logits, wanted) <= 1e-4
    assert relative(logits(model, ids, **where)[:, 29:], wanted[:, 29:]) > 1e-3


def test_sparse_rows_are_counted_by_document():
    rewritten = rewrite(build("llama"))
    seen = Seen(host.plan_of(rewritten))
    with observing(seen.note):
        logits(rewritten, tokens(2, 67), position_ids=positions(ROWS))
    assert seen.sparse_rows == (29 - 16) + (37 - 16) + (54 - 16)


NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 2]])
PLACES = torch.tensor([[4, 5, 6, 0, 1, 0]])


def same(numbers=NUMBERS):
    return mu.packed_sequence_mask_function(numbers)


def on_positions(places=PLACES, function=causal_mask_function):
    """The causal function on positions; older versions of transformers compare places."""
    if not hasattr(mu, "remap_positions_for_packed_sequence"):
        return function
    return mu.remap_positions_for_packed_sequence(function, places)


def lookalike(packed_sequence_mask):
    def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
        return packed_sequence_mask[batch_idx, q_idx] != packed_sequence_mask[batch_idx, kv_idx]

    return inner_mask


def test_the_functions_of_transformers_are_known_by_their_code():
    assert documents_of(and_masks(on_positions(), same())) is NUMBERS
    assert documents_of(and_masks(causal_mask_function, same())) is NUMBERS


@pytest.mark.parametrize(
    "function",
    [
        causal_mask_function,
        same(),
        and_masks(causal_mask_function),
        and_masks(same(), same()),
        or_masks(causal_mask_function, same()),
        and_masks(causal_mask_function, lookalike(NUMBERS)),
        and_masks(causal_mask_function, same(), mu.sliding_window_overlay(3)),
        and_masks(mu.bidirectional_mask_function, same()),
        and_masks(mu.sliding_window_causal_mask_function(3), same()),
        and_masks(on_positions(function=mu.sliding_window_causal_mask_function(3)), same()),
        and_masks(causal_mask_function, same(torch.tensor([[0, 0, 1, 1, 0, 0]]))),
        and_masks(causal_mask_function, same(NUMBERS[0])),
        lambda b, h, q, k: k <= q,
    ],
)
def test_any_other_function_is_not(function):
    assert documents_of(function) is None


@pytest.mark.skipif(not hasattr(mu, "remap_positions_for_packed_sequence"), reason="places only")
@pytest.mark.parametrize("places", [PLACES * 2, PLACES.flip(1), PLACES[:, :4]])
def test_positions_that_do_not_rise_by_one_are_not_taken_for_places(places):
    assert documents_of(and_masks(on_positions(places), same())) is None


def packed_mask(**changes):
    sizes = dict(batch_size=1, q_length=6, kv_length=6, allow_is_causal_skip=False) | changes
    return sparsify_mask(mask_function=and_masks(on_positions(), same()), **sizes)


def test_the_mask_object_holds_the_documents():
    mask = packed_mask()
    assert mask.causal and mask.documents is NUMBERS and mask.holds_whole_documents
    assert mask.keys_in_use == 3
    assert mask.dense()[0, 0, 4].tolist() == [False, False, False, True, True, False]


@pytest.mark.parametrize(
    "changes",
    [{"kv_length": 8}, {"kv_length": 8, "q_offset": 2}, {"q_length": 1}, {"q_offset": 1}],
)
def test_documents_that_lie_in_a_cache_in_part_are_noticed(changes):
    assert not packed_mask(**changes).holds_whole_documents


def test_a_user_function_on_packed_rows_stays_dense_or_is_an_error(monkeypatch):
    model, ids, where = build("llama"), tokens(1, 67), {"position_ids": positions(ROWS[:1])}
    rewritten = rewrite(model)
    original = mu.packed_sequence_mask_function

    def other(numbers):
        inner = original(numbers)
        return lambda b, h, q, k: inner(b, h, q, k)

    monkeypatch.setattr(mu, "packed_sequence_mask_function", other)
    assert torch.equal(logits(rewritten, ids, **where), logits(model, ids, **where))
    assert set(host.fallbacks(rewritten).values()) == {"mask is not plain causal"}
    monkeypatch.setenv("SPARSIFY_STRICT", "1")
    with pytest.raises(StrictError, match="not plain causal"):
        logits(rewritten, ids, **where)
