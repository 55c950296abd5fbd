"""Recalls of many configurations at once are those that the check V6 takes, one by one."""

import functools

import pytest
import torch

import sparsify as sp
from sparsify import recalls
from sparsify.cost_model.configuration import Configuration
from sparsify.ir import site_key
from sparsify.quality import measure_recall
from tests._util.tiny_models import build, tokens

MOBA = Configuration("moba", 8, 3)
POLICIES = {
    MOBA: sp.Policy.moba(block_size=8, topk=3),
    Configuration("moba", 16, 2): sp.Policy.moba(block_size=16, topk=2),
    Configuration("msa", 16, 2, "proxy"): sp.Policy.msa(block_size=16, topk=2),
    Configuration("msa", 8, 2, "proxy", local="union"): sp.Policy.msa(
        block_size=8, topk=2, local="union"
    ),
}


@functools.cache
def model():
    return build("llama")


@functools.cache
def found():
    return sp.inspect(model())


def keys():
    return [site_key(site.fqn, site.ordinal) for site in found().sites]


def measured(configurations, *samples, say=lambda text: None, **changes):
    wanted = {key: list(configurations) for key in keys()} | changes
    return recalls.measure(model(), found().sites, wanted, samples, say)


def test_all_configurations_in_one_pass_equal_v6():
    ids = tokens(1, 300)
    got = measured(POLICIES, ids)
    for configuration, policy in POLICIES.items():
        rewritten = sp.sparsify(model(), policy, inspection=found()).model
        for layer in measure_recall(rewritten, ids):
            assert got.losses[layer.site][configuration] == pytest.approx(
                1 - layer.score_recall, abs=1e-6
            )
    assert got.unmeasured == () and (got.tokens, got.rows) == ((300,), 300)


def test_the_worst_sample_counts():
    samples = [tokens(1, 120, seed) for seed in range(3)]
    alone = [measured([MOBA], ids).losses for ids in samples]
    together = measured([MOBA], *samples).losses
    for key in keys():
        assert together[key][MOBA] == max(losses[key][MOBA] for losses in alone)


def test_samples_as_short_as_the_budget_measure_nothing():
    got = measured([MOBA], tokens(1, 24))
    assert got.unmeasured == (MOBA.label,) and not any(got.losses.values())
    assert measured([MOBA], tokens(1, 25)).unmeasured == ()


def test_of_long_samples_some_rows_are_judged(monkeypatch):
    monkeypatch.setattr(recalls, "MOST_ROWS", 64)
    monkeypatch.setattr(recalls, "ROWS_AT_ONCE", 16)
    ids = tokens(1, 400)
    some = measured([MOBA], ids)
    assert some.rows == 64
    monkeypatch.undo()
    every = measured([MOBA], ids)
    for key in keys():
        assert some.losses[key][MOBA] == pytest.approx(every.losses[key][MOBA], abs=0.1)
        assert some.losses[key][MOBA] != every.losses[key][MOBA]


def test_sites_that_nobody_asks_for_are_left_out_and_the_model_as_it_was():
    before = model()(tokens(1, 40)).logits
    got = measured([MOBA], tokens(1, 60), **{keys()[0]: []})
    assert got.losses[keys()[0]] == {} and all(got.losses[key] for key in keys()[1:])
    assert torch.equal(model()(tokens(1, 40)).logits, before)


def test_progress_is_said():
    said = []
    measured([MOBA], tokens(1, 60), tokens(1, 50), say=said.append)
    assert len(said) == 6
    assert said[0] == "recall on sample 1 of 2 (60 tokens): model.layers.0.self_attn"
    assert said[-1] == "recall on sample 2 of 2 (50 tokens): model.layers.2.self_attn"
