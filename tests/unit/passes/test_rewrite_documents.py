"""Sites with packed documents, rewritten: every document is attended as if it were alone."""

import pytest
import torch

from sparsify.ir import site_key
from sparsify.passes.capture import capture
from sparsify.passes.detect import detect
from sparsify.passes.rewrite import rewrite
from sparsify.plans import LayerPlan, Plan
from tests._util.attention import Attention, masked, tokens
from tests._util.packed_rows import each, positions
from tests._util.tiny_models import build
from tests._util.tiny_models import tokens as token_ids

SIZE, TOPK = 4, 2
ROWS = [[5, 24, 11], [1, 39]]


def causal(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


def same(d):
    return (d[:, :, None] == d[:, None])[:, None]


def numbers(rows):
    return torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows]
    )


def rewritten(model, args, method="moba", kwargs=None, **changes):
    captured = capture(model, args, kwargs or {})
    found = detect(captured)
    assert not found.refusals, found.refusals
    sizes = dict(block_size=SIZE, topk=TOPK) | changes
    if method == "msa":
        sizes["indexer"] = "proxy"
    layers = [
        LayerPlan(site.fqn, site.ordinal, method, "rewritten", "by rule", **sizes)
        for site in found.sites
    ]
    sites = {site_key(site.fqn, site.ordinal): site for site in found.sites}
    return rewrite(captured, sites, Plan(tuple(layers))).module()


def close(a, b, bound=1e-4):
    return bool((a - b).abs().max() <= bound * b.abs().max())


DOCUMENTS = Attention(masked(lambda n, d: causal(n) & same(d)))
ALONE = Attention(masked(causal))


@pytest.mark.parametrize("method", ["moba", "msa"])
@pytest.mark.parametrize("rows", [ROWS, [[3, 20], [22, 1], [7, 16]]])
def test_every_document_equals_itself_alone(method, rows):
    packed = rewritten(DOCUMENTS, (tokens(2, 40), numbers(ROWS)), method)
    alone = rewritten(ALONE, (tokens(2, 40),), method)
    x, documents = tokens(len(rows), sum(rows[0]), seed=1), numbers(rows)
    out = packed(x, documents)
    for row, first, last in each(rows):
        part = x[row : row + 1, first:last]
        assert close(out[row : row + 1, first:last], alone(part.repeat(2, 1, 1))[:1])


def test_with_all_blocks_it_is_the_original_and_with_few_it_is_not():
    x, documents = tokens(2, 40), numbers(ROWS)
    full, few = (rewritten(DOCUMENTS, (x, documents), topk=k) for k in (100, TOPK))
    wanted = DOCUMENTS(x, documents)
    assert close(full(x, documents), wanted) and not close(few(x, documents), wanted)


def test_attention_that_is_written_out():
    def attend(self, q, k, v, x, d):
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        hidden = ~(causal(x.shape[1]) & same(d))
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    x, documents = tokens(2, 40), numbers(ROWS)
    full, few = (rewritten(Attention(attend), (x, documents), topk=k) for k in (100, TOPK))
    assert close(full(x, documents), DOCUMENTS(x, documents))
    fused = rewritten(DOCUMENTS, (x, documents))
    assert close(few(x, documents), fused(x, documents))


def test_numbers_that_are_not_next_to_each_other_are_an_error_when_it_runs():
    model = rewritten(DOCUMENTS, (tokens(2, 40), numbers(ROWS)))
    documents = numbers(ROWS)
    documents[0, -1] = 0
    with pytest.raises(RuntimeError, match="do not stand next to each other"):
        model(tokens(2, 40), documents)


def test_number_0_hides_keys():
    x, documents = tokens(2, 40), numbers(ROWS)
    model = Attention(masked(lambda n, d: causal(n) & same(d) & (d != 0)[:, None, None]))
    full = rewritten(model, (x, documents), topk=100)
    real = documents != 0
    assert close(full(x, documents)[real], model(x, documents)[real])


def test_packed_positions_of_a_transformers_model():
    model, ids = build("llama", num_hidden_layers=2), token_ids(2, 40)
    inputs = {"position_ids": positions(ROWS), "use_cache": False}
    full = rewritten(model, (ids,), kwargs=inputs, topk=100)
    few = rewritten(model, (ids,), kwargs=inputs)
    wanted = model(ids, **inputs).logits
    assert close(full(ids, **inputs).logits, wanted)
    out = few(ids, **inputs).logits
    assert not close(out, wanted, 1e-3)
    for row, first, last in each(ROWS):
        part = ids[row : row + 1, first:last].repeat(2, 1)
        places = torch.arange(last - first).repeat(2, 1)
        alone = few(part, position_ids=places, use_cache=False).logits[:1]
        assert close(out[row : row + 1, first:last], alone)
