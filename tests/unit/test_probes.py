"""V4 passes on right rewrites; a model that leaks fails the probe that is there for it."""

import dataclasses
import functools
import itertools

import pytest
import torch
import transformers

import sparsify as sp
from sparsify import checks
from sparsify.hosts import attention
from sparsify.hosts.transformers import plan_of
from sparsify.kernels.selection import record_selection, replay_selection
from tests._util.tiny_models import FAMILIES, build, tokens

PROBES = ("future", "padding and batch", "documents")
SIZE, TOPK = 8, 2


@functools.cache
def inspection(family="llama"):
    return sp.inspect(build(family))


def rewritten(method="moba", family="llama", dtype=torch.float32, **options):
    model = build(family, dtype=dtype)
    policy = getattr(sp.Policy, method)(**{"block_size": SIZE, "topk": TOPK, **options})
    return model, sp.sparsify(model, policy, inspection=inspection(family)).model


@pytest.fixture(params=["moba", "msa"])
def pair(request):
    return rewritten(request.param)


def probe(pair, sample=None):
    sample = tokens(1, 120) if sample is None else sample
    found = checks.run(*pair, sample, checks=["V4"]).checks
    assert [check.name for check in found] == list(PROBES)
    return found


def statuses(found):
    return dict(zip(PROBES, (check.status for check in found), strict=True))


PASSED = dict.fromkeys(PROBES, "passed")


def broken(monkeypatch, change):
    """Every sparse site computes `change(call, real)` instead."""
    real = attention.run_sparse
    monkeypatch.setattr(attention, "run_sparse", lambda call, *rest: change(call, real))


@pytest.mark.parametrize("method", ["moba", "msa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_right_rewrites_pass(family, method):
    found = probe(rewritten(method, family, dense_last=1))
    assert statuses(found) == PASSED, found
    assert found[0].metrics["sparse_rows"] > 0 and found[1].metrics["sparse_rows"] > 0
    assert found[1].metrics["hidden_tokens"] > 0


def test_sixteen_bits_keep_their_bits_too(pair):
    assert statuses(probe(rewritten(dtype=torch.bfloat16))) == PASSED


def test_the_places_stand_around_the_borders_of_blocks_and_of_top_k(pair):
    found = probe(pair)[0].metrics
    assert {7, 9, 15, 17, 24, 35, 64, 511} == set(found["changed_after"]) - {1}


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize("topk", [1, 3])
def test_any_block_size(size, topk):
    assert statuses(probe(rewritten(block_size=size, topk=topk))) == PASSED


@pytest.mark.parametrize("sample", [[0], [5], [0, 0, 0], list(range(9)), [96] * 700])
def test_any_sample(pair, sample):
    assert statuses(probe(pair, torch.tensor([sample]))) == PASSED


def test_packed_runs_say_how_they_ran(pair, monkeypatch):
    check = probe(pair)[2]
    assert check.metrics["sites_run_sparse"] == 3 and "sparse at 3 of 3" in check.summary
    monkeypatch.setattr(attention, "_fallback", lambda *a: "of a test")
    check = probe(pair)[2]
    assert check.status == "passed" and "ran dense" in check.summary


def test_a_site_that_mixes_documents_fails(pair, monkeypatch):
    broken(monkeypatch, lambda call, real: real(dataclasses.replace(call, documents=None)))
    found = probe(pair)
    assert statuses(found) == {**PASSED, "documents": "failed"}
    assert "the other document move rows that must not see them" in found[2].summary


def next_value(call, real):
    future = call.v.roll(-1, 2).repeat_interleave(call.q.shape[1] // call.v.shape[1], 1)
    return real(call) + 1e-3 * future[:, :, -call.q.shape[2] :]


def chosen_by_the_next_query(call, real):
    with record_selection() as chosen:
        real(dataclasses.replace(call, q=call.q.roll(-1, 2)))
    with replay_selection(chosen):
        return real(call)


@pytest.mark.parametrize("leak", [next_value, chosen_by_the_next_query])
def test_a_site_that_sees_one_future_token_fails(pair, monkeypatch, leak):
    broken(monkeypatch, leak)
    check = probe(pair)[0]
    assert check.status == "failed" and "must not see them" in check.summary


@pytest.mark.parametrize("row", [0, 6, 8, 14, 16, 23, 34, 63, 510])
def test_a_leak_at_one_border_only_fails(monkeypatch, row):
    def there(call, real):
        out, leaking = real(call).clone(), next_value(call, real)
        out[:, :, row : row + 1] = leaking[:, :, row : row + 1]
        return out

    broken(monkeypatch, there)
    assert probe(rewritten())[0].status == "failed"


def test_a_site_that_ignores_padding_fails(pair, monkeypatch):
    broken(monkeypatch, lambda call, real: real(dataclasses.replace(call, key_mask=None)))
    found = probe(pair)
    assert statuses(found) == {**PASSED, "padding and batch": "failed"}
    assert "other padding move rows" in found[1].summary


def test_a_site_that_reads_only_the_holes_fails(pair, monkeypatch):
    def filled(call, real):
        if call.key_mask is None:
            return real(call)
        # Padding on the left and right stays hidden, holes inside do not.
        inside = (call.key_mask.cumsum(1) > 0) & (call.key_mask.flip(1).cumsum(1).flip(1) > 0)
        return real(dataclasses.replace(call, key_mask=inside))

    broken(monkeypatch, filled)
    assert probe(pair)[1].status == "failed"


@pytest.mark.parametrize("direction", [*itertools.permutations(range(3), 2)])
def test_a_site_that_mixes_sequences_fails(monkeypatch, direction):
    to, source = direction

    def mixed(call, real):
        out = real(call).clone()
        if len(out) == 3:
            out[to] += 1e-3 * out[source, :, -1:]
        return out

    broken(monkeypatch, mixed)
    found = probe(rewritten())
    assert statuses(found) == {**PASSED, "padding and batch": "failed"}
    assert "neighbours in the batch move rows that must not see them" in found[1].summary


def test_attention_that_sees_nothing_at_all_fails(pair, monkeypatch):
    broken(monkeypatch, lambda call, real: torch.zeros_like(real(call)))
    found = probe(pair)
    assert [check.status for check in found[:2]] == ["failed", "failed"]
    assert "do not move a row that sees them" in found[0].summary


def test_nothing_passes_when_the_sites_ran_dense(pair, monkeypatch):
    monkeypatch.setattr(attention, "_fallback", lambda *a: "of a test")
    found = probe(pair)
    assert [check.status for check in found[:2]] == ["failed", "failed"]
    assert "ran dense" in found[0].summary


def test_nothing_passes_when_no_row_was_sparse():
    found = probe(rewritten(block_size=512, topk=2))
    assert [check.status for check in found[:2]] == ["failed", "failed"]
    assert "no input was longer" in found[0].summary


def without_positions(monkeypatch, whom):
    """Models of which `whom` is true run without the positions they are given."""
    real = transformers.LlamaForCausalLM.forward

    @functools.wraps(real)
    def forward(self, *args, position_ids=None, **more):
        given = {} if whom(self) else {"position_ids": position_ids}
        return real(self, *args, **given, **more)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)


def test_a_rewritten_model_that_mixes_documents_fails(pair, monkeypatch):
    without_positions(monkeypatch, lambda model: plan_of(model) is not None)
    found = probe(pair)
    assert statuses(found) == {**PASSED, "documents": "failed"}
    assert "the other document move rows that must not see them" in found[2].summary


def test_where_the_original_mixes_documents_too_there_is_nothing_to_hold(pair, monkeypatch):
    without_positions(monkeypatch, lambda model: True)
    found = probe(pair)
    assert statuses(found) == {**PASSED, "documents": "skipped"}
    assert "original does not separate" in found[2].summary


def test_strict_mode_that_refuses_packed_documents_is_told(pair, monkeypatch):
    monkeypatch.setenv("SPARSIFY_STRICT", "1")
    assert statuses(probe(pair)) == PASSED
    real = attention._fallback
    monkeypatch.setattr(
        attention,
        "_fallback",
        lambda q, k, mask, *rest: (
            "of a test" if mask.documents is not None else real(q, k, mask, *rest)
        ),
    )
    found = probe(pair)
    assert statuses(found) == {**PASSED, "documents": "skipped"}
    assert "SPARSIFY_STRICT=1: model.layers.0.self_attn would run dense" in found[2].summary


def unsteady(monkeypatch, size, whom=lambda model: True):
    """Logits that move by `size`, as by rounding, from one run to the next."""
    real, turn = transformers.LlamaForCausalLM.forward, itertools.count()

    @functools.wraps(real)
    def forward(self, *args, **more):
        out = real(self, *args, **more)
        if whom(self):
            out.logits = out.logits * (1 + size * (next(turn) % 2))
        return out

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)


def test_rounding_of_the_original_is_allowed_to_the_rewritten_model(pair, monkeypatch):
    unsteady(monkeypatch, 1e-6)
    assert statuses(probe(pair)) == PASSED


def test_rounding_is_not_allowed_where_the_original_is_steady(pair, monkeypatch):
    unsteady(monkeypatch, 1e-6, lambda model: plan_of(model) is not None)
    assert set(statuses(probe(pair)).values()) == {"failed"}


def test_a_leak_is_no_rounding(pair, monkeypatch):
    unsteady(monkeypatch, 1e-6)
    broken(monkeypatch, next_value)
    check = probe(pair)[0]
    assert check.status == "failed" and "more than rounding" in check.summary


def test_an_original_that_leaks_itself_is_told(pair, monkeypatch):
    unsteady(monkeypatch, 1e-2)
    check = probe(pair)[0]
    assert check.status == "failed" and "of the original too" in check.summary
