"""From policy and facts to one decision per site, and the report of it."""

import json

import pytest

from sparsify.errors import CaptureError, NothingToDoError, UsageError
from sparsify.pair_counts import attended_pairs, dense_pairs
from sparsify.planner import (
    build_report,
    check_plan,
    execution_order,
    make_plan,
    planned_pairs,
)
from sparsify.plans import LayerPlan, Plan
from sparsify.policy import Policy
from sparsify.report import SparsifyReport
from tests._util.sites import make_refusal, make_site, make_sites

MOBA = {"block_size": 8, "topk": 2}


def keep_dense(match):
    return {"match": match, "method": "dense"}


def rewritten(plan):
    return [layer.fqn for layer in plan if layer.sparse]


def test_every_field_of_the_policy_arrives_in_the_layers():
    policy = Policy.msa(block_size=8, topk=3, decode="dense", local="union", min_context=100)
    (layer,) = make_plan(policy, make_sites(1), [], model="m")
    assert layer == LayerPlan(
        fqn="model.layers.0.self_attn",
        ordinal=0,
        method="msa",
        status="rewritten",
        reason="MSA by policy",
        block_size=8,
        topk=3,
        decode="dense",
        min_context=100,
        indexer="proxy",
        index_dim=None,
        local="union",
    )


def test_the_plan_survives_its_json_form():
    policy = Policy.moba(**MOBA, dense_last=1)
    plan = make_plan(policy, make_sites(2), [make_refusal("model.layers.2.self_attn")], model="m")
    data = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(data) == plan
    assert Policy.from_json(plan.policy) == policy


def test_learned_indexer_needs_training():
    policy = Policy.msa(block_size=8, topk=2, indexer="learned", index_dim=4)
    (layer,) = make_plan(policy, make_sites(1), [])
    assert (layer.indexer, layer.index_dim) == ("learned", 4)
    assert "needs-training" in layer.reason


def test_layers_are_in_natural_order_by_default():
    sites = make_sites(12)[::-1]
    plan = make_plan(Policy.moba(**MOBA), sites, [make_refusal("model.layers.12.self_attn")])
    assert [layer.fqn.split(".")[2] for layer in plan] == [str(i) for i in range(13)]


def test_a_given_order_wins_and_calls_of_one_module_follow_their_ordinal():
    sites = [make_site("b", 1), make_site("b", 0), make_site("a")]
    assert [s.fqn + str(s.ordinal) for s in execution_order(sites, [])] == ["a0", "b0", "b1"]
    found = execution_order(sites, [make_refusal("c")], ["c#0", "b#1", "a#0", "b#0"])
    assert [s.fqn + str(s.ordinal) for s in found] == ["c0", "b1", "a0", "b0"]


def test_lookalikes_are_no_attention():
    gate = make_refusal("gate", "NOT_ATTENTION")
    plan = make_plan(Policy.moba(**MOBA, dense_last=1), make_sites(2), [gate])
    assert len(plan) == 2 and rewritten(plan) == ["model.layers.0.self_attn"]
    with pytest.raises(NothingToDoError):
        make_plan(Policy.moba(**MOBA), [], [gate])


def test_a_site_found_twice_is_an_internal_error():
    with pytest.raises(ValueError, match="twice"):
        make_plan(Policy.moba(**MOBA), make_sites(1), [make_refusal("model.layers.0.self_attn")])


def test_index_ranges_count_refused_sites_too():
    refused = make_refusal("model.layers.3.self_attn")
    plan = make_plan(Policy.moba(**MOBA, dense_last=2), make_sites(3), [refused])
    assert rewritten(plan) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert plan.layers[3].status == "refused"
    assert plan.layers[3].reason == "SLIDING_WINDOW: a window of 8 tokens"


def test_first_matching_rule_wins():
    rules = [
        {"match": "model.layers.0.*", "method": {"name": "moba", "block_size": 4, "topk": 9}},
        keep_dense("model.layers.[01].*"),
    ]
    plan = make_plan(Policy.moba(**MOBA, layers=rules), make_sites(3), [])
    assert [(layer.method, layer.topk) for layer in plan] == [
        ("moba", 9),
        ("dense", None),
        ("moba", 2),
    ]
    assert plan.layers[0].reason == "MoBA by rule 'model.layers.0.*'"
    assert plan.layers[1].reason == "dense by rule 'model.layers.[01].*'"


def test_dense_by_default_with_sparse_exceptions():
    rule = {"match": "::2", "method": {"name": "moba", **MOBA}}
    plan = make_plan(Policy.dense(layers=[rule]), make_sites(3), [])
    assert [layer.status for layer in plan] == ["rewritten", "kept_dense", "rewritten"]


@pytest.mark.parametrize("match", ["model.layers.9.*", "9", "-9", "7:", "self_attn", "Model.*"])
def test_a_rule_that_matches_nothing_is_an_error(match):
    policy = Policy.moba(**MOBA, layers=[keep_dense(match)])
    with pytest.raises(UsageError, match=r"matches none of the 3 .*model\.layers\.0"):
        make_plan(policy, make_sites(3), [])


def test_a_rule_without_effect_is_warned_of(caplog):
    policy = Policy.moba(**MOBA, dense_last=3, layers=[keep_dense("*")])
    make_plan(policy, make_sites(3), [])
    assert "'*' has no effect" in caplog.text


def test_names_of_the_root_and_of_ordinals():
    sites = [make_site("", 0), make_site("", 1)]
    plan = make_plan(Policy.moba(**MOBA, layers=[keep_dense("(root)#1")]), sites, [])
    assert [layer.status for layer in plan] == ["rewritten", "kept_dense"]
    plan = make_plan(Policy.moba(**MOBA, layers=[keep_dense("(root)")]), sites, [])
    assert not plan.rewritten


def test_globs_do_not_run_over_brackets_or_case():
    sites = [make_site("0"), make_site("1")]
    plan = make_plan(Policy.moba(**MOBA, layers=[keep_dense("[1]")]), sites, [])
    assert rewritten(plan) == ["0"]


def test_auto_needs_a_gpu_and_a_context():
    with pytest.raises(UsageError, match="needs a GPU and a context"):
        make_plan(Policy.auto(), make_sites(1), [])
    rules = [{"match": "0", "method": "auto"}]
    with pytest.raises(UsageError, match="needs a GPU and a context"):
        make_plan(Policy.moba(**MOBA, layers=rules), make_sites(2), [])


def test_unproved_sites_can_be_an_error():
    refused = [make_refusal(f"model.layers.{i}.self_attn") for i in range(2, 10)]
    strict = Policy.moba(**MOBA, on_unproved="error")
    with pytest.raises(CaptureError) as caught:
        make_plan(strict, make_sites(2), refused)
    assert "8 of 10" in str(caught.value) and "SLIDING_WINDOW: a window" in str(caught.value)
    assert str(caught.value).count("self_attn") == 5
    exempt = Policy.moba(**MOBA, on_unproved="error", layers=[keep_dense("2:")])
    assert make_plan(exempt, make_sites(2), refused).rewritten


def layer(**changes):
    facts = {"method": "moba", "status": "rewritten", "block_size": 8, "topk": 2}
    return LayerPlan("a", 0, reason="", **{**facts, **changes})


def test_pairs_are_exact_and_count_heads():
    count = planned_pairs(layer(), 4, 100)
    assert count.dense == 4 * dense_pairs(100, 100)
    assert count.attended == 4 * attended_pairs(100, 100, 8, 2)
    assert 0 < count.share < 1


def test_pairs_of_dense_short_and_union_sites():
    dense = layer(method="dense", status="kept_dense", block_size=None, topk=None)
    assert planned_pairs(dense, 2, 100).share == 1.0
    assert planned_pairs(layer(min_context=101), 2, 100).share == 1.0
    assert planned_pairs(layer(min_context=100), 2, 100).share < 1.0
    union = planned_pairs(layer(method="msa", local="union"), 1, 100).attended
    assert union == attended_pairs(100, 100, 8, 3)


def test_the_report_says_what_each_site_is_and_sums_proved_sites():
    refused = make_refusal("model.layers.3.self_attn", hint="use full attention", source="m.py:9")
    sites = make_sites(3)
    plan = make_plan(Policy.moba(**MOBA, dense_last=2), sites, [refused], model="tiny")
    report = build_report(sites, [refused], plan, notes=["a note"], contexts=(64, 128))
    assert report.model == "tiny" and report.notes == ("a note",)
    assert report.counts == {"detected": 4, "rewritten": 2, "kept_dense": 1, "refused": 1}
    first, last = report.sites[0], report.sites[3]
    assert (first.q_heads, first.kv_heads, first.mask, first.phase) == (4, 2, "causal", "prefill")
    assert first.padding == "attention_mask" and first.source == "model.py:7"
    assert (last.code, last.hint, last.source, last.pairs) == (
        "SLIDING_WINDOW",
        "use full attention",
        "m.py:9",
        (),
    )
    assert [count.context for count in report.pairs] == [64, 128]
    dense = dense_pairs(64, 64)
    assert report.pairs[0].dense == 3 * 4 * dense
    assert report.pairs[0].attended == 4 * (2 * attended_pairs(64, 64, 8, 2) + dense)
    assert report.versions["sparsify-attention"]
    assert SparsifyReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_the_report_of_a_plan_without_facts():
    plan = make_plan(Policy.moba(**MOBA), make_sites(1), [])
    (site,) = build_report([], [], plan).sites
    assert site.q_heads is None and site.status == "rewritten"


def test_a_ready_plan_is_held_against_the_model():
    sites, refused = make_sites(2), [make_refusal("model.layers.2.self_attn")]
    plan = make_plan(Policy.moba(**MOBA), sites, refused)
    check_plan(plan, sites, refused)
    with pytest.raises(UsageError, match=r"names model\.layers\.2\.self_attn, where"):
        check_plan(plan, sites, [])
    with pytest.raises(UsageError, match=r"rewrites model\.layers\.1\.self_attn, .*SLIDING_WINDOW"):
        check_plan(plan, sites[:1], [make_refusal("model.layers.1.self_attn"), *refused])
    with pytest.raises(UsageError, match=r"says nothing of model\.layers\.2\.self_attn\."):
        check_plan(Plan(plan.layers[:2]), sites, refused)
