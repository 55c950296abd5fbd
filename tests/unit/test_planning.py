"""Plans for a GPU and a context: what becomes sparse and why, and what cannot be met."""

import json
import re
from dataclasses import replace

import pytest

from sparsify.cost_model.configuration import Configuration
from sparsify.cost_model.model_config import read_config
from sparsify.cost_model.workload import Phase, Workload
from sparsify.errors import CaptureError, InfeasibleError, NothingToDoError, UsageError
from sparsify.ir import HeadLayout
from sparsify.planning import plan_for, sites_of_config, wanted_configurations
from sparsify.planning_target import Target
from sparsify.plans import Plan
from sparsify.policy import Policy
from tests._util.plan_gpus import make_gpu
from tests._util.sites import make_refusal, make_site

CONFIG = dict(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=4,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32000,
    torch_dtype="bfloat16",
)
MODEL = read_config(CONFIG)
SITES = sites_of_config(MODEL)
MOBA = Policy.moba(block_size=128, topk=16)


def target(context=131_072, phase="prefill", model=MODEL, **changes):
    gpu = make_gpu(**changes)
    return Target(gpu, Workload.of(Phase(phase), context), model=model)


def planned(policy=None, found=SITES, where=None, **options):
    return plan_for(policy or Policy.auto(), found, where or target(), name="m", **options)


def test_a_fixed_method_becomes_sparse_from_where_it_pays():
    found = planned(MOBA)
    threshold = found.plan.layers[0].min_context
    assert 1 < threshold < 131_072
    for layer in found.plan:
        assert layer.status == "rewritten" and (layer.block_size, layer.topk) == (128, 16)
        assert f"faster than dense from {threshold:,} tokens on Round-100" in layer.reason
    assert found.speedup > 1
    # at the threshold it is sparse, one token before it stays dense
    assert planned(MOBA, where=target(threshold)).plan.rewritten
    assert not planned(MOBA, where=target(threshold - 1)).plan.rewritten


def test_where_dense_is_faster_it_stays_with_the_figures():
    found = planned(Policy.moba(block_size=4096, topk=12), where=target(65_536))
    for layer in found.plan:
        assert (layer.method, layer.status) == ("dense", "kept_dense")
        assert re.search(
            r"MoBA 4096/12 by policy, but dense is faster below [\d,]+ tokens on Round-100 "
            r"\(at 65,536 tokens [\d.]+ ms a layer, sparse [\d.]+ ms\)",
            layer.reason,
        )
    assert found.speedup == pytest.approx(1)


def test_the_policys_own_min_context_holds_if_it_is_larger():
    policy = Policy.moba(block_size=128, topk=16, min_context=100_000)
    assert {layer.min_context for layer in planned(policy).plan} == {100_000}


def test_dense_decode_is_kept_as_the_policy_says():
    policy = Policy.moba(block_size=128, topk=16, decode="dense")
    found = planned(policy, where=target(phase="decode"))
    assert all(layer.sparse and layer.decode == "dense" for layer in found.plan)
    assert found.speedup == pytest.approx(1)


def test_auto_chooses_and_says_what_it_does_not_know():
    found = planned()
    assert len(found.plan.rewritten) == 4
    assert len({(x.method, x.block_size, x.topk) for x in found.plan}) == 1
    assert all(layer.block_size * layer.topk >= 2048 for layer in found.plan)
    assert all(layer.indexer != "learned" for layer in found.plan)
    text = " ".join(found.notes)
    assert "Quality was not measured, only put in order" in text
    assert "needs-training" in text and "never chosen" in text
    assert len(found.front) > 1 and len(found.sensitivity) == 3
    fixed = " ".join(planned(MOBA).notes)
    assert "Quality was not measured" not in fixed and "needs-training" not in fixed


def test_rules_hold_beside_auto():
    policy = Policy.auto(dense_last=1, layers=[{"match": "0", "method": MOBA.method}])
    layers = planned(policy).plan.layers
    assert (layers[0].block_size, layers[0].topk) == (128, 16)
    assert "chosen by policy" in layers[1].reason
    assert layers[3].reason == "dense by rule '-1:'"


def test_auto_at_a_short_context_stays_dense_and_says_from_where_not():
    found = planned(where=target(2048))
    assert not found.plan.rewritten
    assert (
        "nothing is faster at 2,048 tokens on Round-100; the first" in found.plan.layers[0].reason
    )


def test_refused_sites_stay_refused_under_auto():
    sites = [make_site("a", q_heads=32, kv_heads=8), make_refusal("b")]
    found = planned(found=sites, where=target(model=None))
    assert [layer.status for layer in found.plan] == ["rewritten", "refused"]
    strict = Policy.auto(on_unproved="error")
    with pytest.raises(CaptureError):
        planned(strict, found=sites, where=target(model=None))


def test_without_a_model_only_attention_is_estimated():
    found = planned(found=[make_site("a", q_heads=32, kv_heads=8)], where=target(model=None))
    assert not found.whole and found.plan.estimate["of"] == "attention"
    assert "Only attention is estimated" in " ".join(found.notes)


def test_windows_of_a_config_are_refused_as_a_proof_would():
    windows = {**CONFIG, "model_type": "mistral", "sliding_window": 4096}
    model = read_config(windows)
    found = planned(found=sites_of_config(model), where=target(model=model))
    assert {layer.status for layer in found.plan} == {"refused"}
    assert "SLIDING_WINDOW: a window of 4096 tokens" in found.plan.layers[0].reason


def test_a_plan_survives_its_json_form_with_its_estimate():
    plan = planned().plan
    data = json.loads(json.dumps(plan.to_json()))
    assert data["schema"] == 2 and Plan.from_json(data) == plan
    estimate = plan.estimate
    assert (estimate["gpu"], estimate["context_tokens"]) == ("Round-100", 131_072)
    assert estimate["speedup"] > 1 and estimate["notes"]
    assert json.loads(json.dumps(planned().to_json()))["layers"][0]["planned_ms"]["source"]


def test_memory_that_does_not_hold_weights_and_cache():
    with pytest.raises(InfeasibleError) as caught:
        planned(where=target(memory_gb={"value": 2, "source": "made up"}))
    assert "memory of Round-100 (2.0 GB) does not hold the weights" in str(caught.value)
    assert "KV cache of 1 x 131,072 tokens (2.1 GB)" in str(caught.value)


def test_memory_that_holds_all_but_what_sparse_attention_adds():
    need = target().cost().memory
    just = (need.weights_bytes + need.kv_cache_bytes + 1e6) / 1e9
    tight = target(memory_gb={"value": just, "source": "made up"})
    with pytest.raises(InfeasibleError, match=r"The plan needs .* GB .*workspace"):
        planned(MOBA, where=tight)
    # Auto finds nothing that fits, and says so
    found = planned(where=tight)
    assert not found.plan.rewritten
    assert any("GB are free" in candidate.refused for candidate in found.refused)


def test_a_speedup_that_cannot_be_reached():
    share = planned().attention_share
    with pytest.raises(InfeasibleError) as caught:
        planned(min_speedup=1000)
    text = str(caught.value)
    assert "1000x end to end cannot be reached at 131,072 tokens on Round-100" in text
    assert f"more than {1 / (1 - share):.2f}x" in text
    best = float(re.search(r"at best ([\d.]+)x", text)[1])
    more = float(re.search(r"Up to ([\d.]+)x are expected of what reads fewer", text)[1])
    assert best < more < 1 / (1 - share)
    assert planned(min_speedup=best - 0.01).speedup >= best - 0.01
    with pytest.raises(InfeasibleError):
        planned(min_speedup=best + 0.01)


def test_a_speedup_of_a_fixed_policy():
    reached = planned(MOBA).speedup
    assert planned(MOBA, min_speedup=reached * 0.999).speedup == reached
    with pytest.raises(InfeasibleError, match=f"at best {reached:.2f}x") as caught:
        planned(MOBA, min_speedup=reached * 1.01)
    assert "reads fewer" not in str(caught.value)


BUDGET = {"min_score_recall": 0.9}


def losses(**by_size):
    """The same losses at every site, by "block/topk"."""
    found = {
        Configuration("moba", *map(int, name[1:].split("_"))): loss
        for name, loss in by_size.items()
    }
    return {f"{layer.fqn}#0": found for layer in SITES}


def test_a_quality_budget_needs_samples():
    with pytest.raises(UsageError, match=r"quality budget .* no samples"):
        planned(Policy.auto(quality=BUDGET))
    # other budgets are judged by the check V6
    assert planned(Policy.auto(quality={"max_kl_nats": 0.1})).plan.rewritten


def test_auto_keeps_a_quality_budget():
    measured = losses(_1024_4=0.2, _128_16=0.05)
    found = planned(Policy.auto(quality=BUDGET), losses=measured)
    assert {(x.block_size, x.topk) for x in found.plan.rewritten} >= {(128, 16)}
    assert "mean score recall" in " ".join(found.notes)
    with pytest.raises(InfeasibleError) as caught:
        planned(Policy.auto(quality=BUDGET), losses=losses(_1024_4=0.2, _128_16=0.15))
    assert "keeps a mean score recall of 0.9 on the samples: the best keeps 0.850" in str(
        caught.value
    )
    with pytest.raises(InfeasibleError, match="the samples are too short"):
        planned(Policy.auto(quality=BUDGET), losses=losses())


def test_with_samples_and_no_budget_the_least_loss_near_the_fastest_is_taken():
    close = losses(_64_32=0.3, _128_16=0.05)
    times = {
        size: planned(Policy.moba(block_size=size, topk=2048 // size)).planned.expected_ms
        for size in (64, 128)
    }
    assert times[128] < times[64]
    assert {x.block_size for x in planned(losses=close).plan.rewritten} == {128}
    found = planned(losses=close)
    assert "within 10% of the fastest the one that loses least" in " ".join(found.notes)


def test_a_fixed_policy_is_held_against_its_budget():
    policy = Policy.moba(block_size=128, topk=16, quality=BUDGET)
    assert planned(policy, losses=losses(_128_16=0.05)).plan.rewritten
    with pytest.raises(InfeasibleError, match=r"recall of 0.880 on the samples, less than .* 0.9"):
        planned(policy, losses=losses(_128_16=0.12))
    with pytest.raises(InfeasibleError, match="could not be measured: the samples are too short"):
        planned(policy, losses=losses())


def test_what_has_to_be_measured():
    sites = list(SITES)
    fixed = wanted_configurations(MOBA, sites, target())
    assert set(map(tuple, fixed.values())) == {(Configuration("moba", 128, 16),)}
    wanted = wanted_configurations(Policy.auto(dense_last=2), sites, target())
    assert len(wanted) == 2 and all(len(found) > 5 for found in wanted.values())


def test_unfirm_choices_are_told():
    threshold = planned(MOBA).plan.layers[0].min_context
    found = planned(MOBA, where=target(threshold + 100))
    assert any("0.5 times as efficient as expected it would be dense" in n for n in found.notes)
    firm = planned(MOBA, where=target(1 << 20, memory_gb={"value": 9000, "source": "made up"}))
    assert not any("not firm" in note for note in firm.notes)


def test_heads_are_split_over_gpus():
    two = planned(MOBA, where=replace(target(), tensor_parallel=2))
    assert two.rows[0].dense.expected_ms < planned(MOBA).rows[0].dense.expected_ms
    with pytest.raises(UsageError, match="cannot be split over a tensor-parallel degree of 3"):
        planned(MOBA, where=replace(target(), tensor_parallel=3))


def test_no_attention_is_nothing_to_do():
    with pytest.raises(NothingToDoError):
        planned(found=[])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_tokens": 0}, "context is 0"),
        ({"context_tokens": True}, "context is True"),
        ({"batch": 0}, "batch is 0"),
        ({"batch": 1 << 21}, "from 1 to 1,048,576"),
        ({"context_tokens": 1 << 31}, "from 1 to 1,073,741,824"),
        ({"tensor_parallel": -1}, "tensor_parallel is -1"),
        ({"phase": "prefil"}, "Unknown phase 'prefil'; use prefill, decode, training"),
    ],
)
def test_impossible_targets(change, message):
    given = {"gpu": "h200", "context_tokens": 1024, **change}
    with pytest.raises(UsageError, match=re.escape(message)):
        Target.of(given.pop("gpu"), given.pop("context_tokens"), **given)


def test_heads_that_kernels_do_not_take_stay_dense():
    site = replace(make_site("a"), heads=HeadLayout(8, 8, 512, 512))
    found = planned(found=[site], where=target(model=None))
    assert not found.plan.rewritten
    assert "head size 512 is outside 16..256" in found.plan.layers[0].reason
