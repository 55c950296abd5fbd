"""Policies and plans as an estimate reads them."""

import json
from pathlib import Path

import pytest

from sparsify.errors import UsageError
from sparsify.estimates import estimate
from sparsify.plans import LayerPlan, Plan
from sparsify.policy import Policy, load_policy
from tests._util.published_models import (
    LLAMA,
    PROXY,
    QWEN,
)


def test_rules_keep_layers_dense():
    policy = Policy.msa(block_size=128, topk=16, dense_last=3)
    some, full = (estimate(LLAMA, p, context=2**17).rows[0] for p in (policy, PROXY))
    assert some.layers["sparse"] == 29 and some.layers["dense"] == 3
    dense = full.dense.flops
    assert some.sparse.flops == full.sparse.flops * 29 // 32 + dense * 3 // 32
    assert 1 < some.speedup.expected < full.speedup.expected
    assert {stage.family for stage in some.sparse.stages} > {"dense_prefill"}


def test_globs_match_the_names_of_layers():
    policy = Policy.moba(
        block_size=128,
        topk=8,
        layers=[{"match": "model.layers.[0-4].*", "method": "dense"}],
    )
    assert estimate(LLAMA, policy, context=2**15).rows[0].layers["sparse"] == 27
    with pytest.raises(UsageError, match="matches none of the 32 attention sites"):
        wrong = Policy.dense(layers=[{"match": "transformer.*", "method": "dense"}])
        estimate(LLAMA, wrong, context=2**15)


def test_a_policy_that_is_dense_changes_nothing():
    found = estimate(LLAMA, Policy.dense(), context=2**15)
    (row,) = found.rows
    assert row.speedup.expected == row.speedup.bound == row.end_to_end.speedup == 1
    assert row.crossover_tokens is None
    assert "Nothing is sparse" in found.verdict


def test_below_min_context_a_policy_is_dense():
    policy = Policy.msa(block_size=128, topk=16, min_context=2**16)
    short, long = estimate(QWEN, policy, context=[2**15, 2**17]).rows
    assert short.layers["sparse"] == 0 and short.speedup.expected == 1
    assert long.layers["sparse"] == 64 and long.speedup.flops > 1
    assert short.crossover_tokens >= 2**16


def test_the_published_policies():
    kimi = estimate(LLAMA, load_policy("kimi-1m"), context=2**20).rows[0]
    assert (kimi.configuration.block_size, kimi.layers["dense"]) == (4096, 3)
    step = estimate(LLAMA, load_policy("kimi-1m"), context=2**20, phase="decode").rows[0]
    assert step.speedup.expected == 1


def test_auto_has_no_sizes():
    with pytest.raises(UsageError, match="auto"):
        estimate(LLAMA, Policy.auto(), context=2**15)


def plan(**changes):
    layer = dict(
        fqn="model.layers.3.self_attn",
        ordinal=0,
        method="moba",
        status="rewritten",
        reason="",
        block_size=128,
        topk=8,
    )
    return Plan((LayerPlan(**{**layer, **changes}),), {}, "x")


def test_a_plan_is_estimated_by_its_layers():
    row = estimate(LLAMA, plan(), context=2**17).rows[0]
    assert (row.layers["sparse"], row.layers["dense"]) == (1, 31)
    with pytest.raises(UsageError, match=r"rewrites h\.3\.attn, which llama.* does not have"):
        estimate(LLAMA, plan(fqn="h.3.attn"), context=2**17)


def test_index_rules_count_windows_but_no_recurrences():
    kinds = ["linear_attention", "sliding_attention", "full_attention", "full_attention"] * 8
    config = dict(json.loads(LLAMA.read_text()), layer_types=kinds, sliding_window=1024)
    policy = Policy.moba(block_size=128, topk=8, dense_last=3)
    assert estimate(config, policy, context=2**17).rows[0].layers["sparse"] == 14


@pytest.mark.parametrize("what", ["msa-m3", 7, [], [PROXY, "x"], Path("policy.yaml")])
def test_what_is_no_policy_is_refused(what):
    with pytest.raises(UsageError, match=r"^policy is a "):
        estimate(LLAMA, what, context=1024)


def test_layers_that_stay_dense_have_no_range_of_their_own():
    one = dict(json.loads(LLAMA.read_text()), num_hidden_layers=2)
    policy = Policy.msa(block_size=128, topk=16, dense_last=1)
    (row,) = estimate(one, policy, context=2**20).rows
    # Half the attention stays: no gain of the other half makes more than 2 of the whole.
    assert 0.5 < row.speedup.low < row.speedup.expected < row.speedup.high < 2
