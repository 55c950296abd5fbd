"""transformers' MiniMax-M3, whose layers are sparse by themselves, through our ops.

Its blocks are counted from slot 0 of the cache, so ours are too (block_origin 0). Its top-k takes
the own block first and breaks ties as torch.topk happens to; our lists are ascending and ties go to
the lower block. Choices are therefore compared as sets, on numbers without ties, and one test makes
ties to show the difference. With padding on the left it compares slots with positions, which hides
tokens from themselves, so it is no example there.
"""

import dataclasses

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from transformers import DynamicCache, StaticCache

import sparsify as sp
from sparsify.errors import CaptureError, UsageError
from sparsify.hosts import transformers as host
from sparsify.hosts.calls import observing
from sparsify.plans import LayerPlan, Plan
from sparsify.quality import select
from tests._util.planned import relative
from tests._util.tiny_models import CACHE, tokens

modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")

SIZE, TOPK, WIDTH = 8, 3, 12
SIZES = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=32,
    dense_intermediate_size=64,
    shared_intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rotary_dim=8,
    max_position_embeddings=512,
    num_local_experts=4,
    num_experts_per_tok=2,
    index_n_heads=2,
    index_head_dim=WIDTH,
    index_block_size=SIZE,
    index_topk_blocks=TOPK,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LAYERS = ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]
POLICY = {
    "method": {"name": "msa", "block_size": SIZE, "topk": TOPK},
    "layers": [{"match": "0", "method": {"name": "dense"}}],
}
POLICY["method"] |= {"indexer": "learned", "index_dim": WIDTH}


def build(attention="eager", **changes):
    more = dict(layer_types=LAYERS, mlp_layer_types=["dense", "sparse", "sparse"])
    config = tf.CONFIG_MAPPING["minimax_m3_vl_text"](
        **{**SIZES, "rope_parameters": dict(ROPE), **more, **changes}
    )
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = modeling.MiniMaxM3VLForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(6.0) if p.dim() > 1 else p.add_(0.2 * torch.randn_like(p))
            assert p.isfinite().all(), name
    return model


def plan_for(model, **fields):
    sizes = dict(block_size=SIZE, topk=TOPK, indexer="learned", index_dim=WIDTH)
    names = [n for n, _ in model.named_modules() if n.endswith(".self_attn")]
    dense = LayerPlan(names[0], 0, "dense", "kept_dense", "by rule")
    sparse = [LayerPlan(n, 0, "msa", "rewritten", "by rule", **sizes | fields) for n in names[1:]]
    return Plan((dense, *sparse))


def ours(model, **fields):
    made = host.copy_sharing_weights(model)
    host.apply(made, plan_for(model, **fields))
    return made


@torch.no_grad()
def logits(model, ids, **kwargs):
    return model(ids, **kwargs).logits


def check_ran(model, what="sparse"):
    counts = host.call_counts(model)
    assert all(set(counts[f"model.layers.{n}.self_attn"]) == {what} for n in (1, 2))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_prefill(attention):
    model, ids = build(attention), tokens(2, 101)
    made = ours(model)
    assert relative(logits(made, ids), logits(model, ids)) < 1e-4
    check_ran(made)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_prefill_in_chunks_and_decode_with_its_cache(kind):
    model, ids = build(), tokens(2, 61)
    wanted = logits(model, ids)
    for one in (model, made := ours(model)):
        cache = (
            DynamicCache(config=model.config)
            if kind == "dynamic"
            else StaticCache(config=model.config, max_cache_len=80)
        )
        parts = [
            logits(one, ids[:, a:b], use_cache=True, **{CACHE: cache})
            for a, b in ((0, 13), (13, 40), (40, 60), (60, 61))
        ]
        assert relative(torch.cat(parts, 1), wanted) < 1e-4
    check_ran(made)


def test_generate_gives_the_same_tokens():
    model, ids = build(), tokens(1, 40)
    settings = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(ours(model).generate(ids, **settings), model.generate(ids, **settings))


def choices(model, ids):
    """Blocks of every sparse layer as transformers chooses them, and as our op does."""
    theirs, calls = [], []
    made, hooks = ours(model), []
    for layer in model.model.layers[1:]:
        hook = layer.self_attn.indexer.register_forward_hook(lambda m, a, out: theirs.append(out))
        hooks.append(hook)
    logits(model, ids)
    for hook in hooks:
        hook.remove()
    with observing(calls.append):
        logits(made, ids)
    return theirs, [select(call) for call in calls]


def as_sets(lists):
    return lists.long().sort(-1).values


def test_the_same_blocks_are_chosen():
    theirs, found = choices(build(), tokens(1, 101))
    same = [as_sets(a) == as_sets(b) for a, b in zip(theirs, found, strict=True)]
    assert all(bool(x.all()) for x in same)
    own = torch.arange(101) // SIZE
    assert bool((theirs[0][..., 0] == own).all())  # the own block comes first
    assert bool((found[0].max(-1).values == own).all())  # ours is the last of a rising list


def test_equal_scores_go_to_the_lower_block_here_and_anywhere_there():
    model = build()
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.indexer.k_proj.weight.zero_()
    theirs, found = choices(model, tokens(1, 101))
    assert found[0][0, 0, 100].tolist() == [0, 1, 12]
    assert 12 in theirs[0][0, 0, 100].tolist()


def test_other_blocks_would_show():
    model, ids = build(), tokens(1, 101)
    made = ours(model)
    with torch.no_grad():
        made.model.layers[1].self_attn.indexer.q_proj.weight.neg_()
    wanted = logits(model, ids)  # the weights are shared
    assert relative(logits(made, ids), wanted) < 1e-4
    with torch.no_grad():
        made.model.layers[1].self_attn.indexer.q_proj.weight.neg_()
    assert relative(logits(made, ids), wanted) > 1e-2


def test_layers_that_are_not_planned_stay_sparse_by_themselves():
    model, ids = build(), tokens(1, 101)
    dense = host.copy_sharing_weights(model)
    layers = [LayerPlan(p.fqn, 0, "dense", "kept_dense", "by rule") for p in plan_for(model)]
    host.apply(dense, Plan(tuple(layers)))
    assert torch.equal(logits(dense, ids), logits(model, ids))
    check_ran(dense, "sparse by itself: by plan")
    with_all = build(index_topk_blocks=64)
    assert relative(logits(with_all, ids), logits(model, ids)) > 1e-2  # dense is something else


def test_calls_that_cannot_run_our_ops_stay_sparse_by_themselves():
    model, ids = build("sdpa"), tokens(1, 61)
    made = ours(model)
    mask = torch.ones(1, 1, 61, 61).tril().bool()
    assert relative(logits(made, ids, attention_mask=mask), logits(model, ids)) < 1e-4
    check_ran(made, "sparse by itself: fallback, a mask tensor from outside")
    short = ours(model, min_context=100)
    assert relative(logits(short, ids), logits(model, ids)) < 1e-4
    check_ran(short, "sparse by itself: shorter than min_context")


def test_switching_our_ops_off_leaves_it_sparse_by_itself(monkeypatch):
    model, ids = build(), tokens(1, 61)
    monkeypatch.setenv("SPARSIFY_DISABLE", "1")
    made = ours(model)
    assert relative(logits(made, ids), logits(model, ids)) < 1e-4
    check_ran(made, "sparse by itself: SPARSIFY_DISABLE")


@pytest.mark.parametrize(
    "fields", [dict(topk=2), dict(block_size=16), dict(index_dim=8), dict(local="union")]
)
def test_plans_of_other_sizes_are_refused(fields):
    model = build()
    with pytest.raises(CaptureError, match="sparse by itself"):
        ours(model, **fields)
    with pytest.raises(CaptureError, match="3 local blocks"):
        ours(build(index_local_blocks=3))


def test_a_dense_layer_among_them_takes_no_learned_indexer():
    model, ids = build("sdpa"), tokens(1, 61)
    wanted = logits(model, ids)
    layers = [dataclasses.replace(p, method="msa", status="rewritten") for p in plan_for(model)]
    sizes = dict(block_size=SIZE, topk=TOPK)
    learned = dataclasses.replace(layers[0], **sizes, indexer="learned", index_dim=WIDTH)
    made = host.copy_sharing_weights(model)
    with pytest.raises(CaptureError, match=r"layers\.0\.self_attn has an attribute 'indexer'"):
        host.apply(made, Plan((learned, *layers[1:])))
    assert torch.equal(logits(made, ids), wanted) and host.plan_of(made) is None
    proxy = dataclasses.replace(layers[0], **sizes, indexer="proxy")
    host.apply(made, Plan((proxy, *layers[1:])))
    logits(made, ids)
    counts = host.call_counts(made)
    assert all(set(counts[f"model.layers.{n}.self_attn"]) == {"sparse"} for n in range(3))


def test_restoring_gives_the_own_indexers_back():
    model, ids = build(), tokens(1, 61)
    wanted, kinds = logits(model, ids), [type(m) for m in model.modules()]
    names = list(model.state_dict())
    handle = host.apply(model, plan_for(model))
    assert list(model.state_dict()) == names
    handle.restore()
    assert [type(m) for m in model.modules()] == kinds
    assert torch.equal(logits(model, ids), wanted)


def test_verbs_plan_verify_save_and_load(tmp_path):
    model, ids = build("sdpa"), tokens(1, 101)
    found = sp.inspect(model)
    assert {r.fqn: r.code for r in found.refusals} == {
        f"model.layers.{n}.self_attn": "NATIVELY_SPARSE" for n in (1, 2)
    }
    assert found.expected == 3 and [s.fqn for s in found.sites] == ["model.layers.0.self_attn"]
    result = sp.sparsify(model, sp.Policy.from_json(POLICY), inspection=found)
    assert [p.status for p in result.plan] == ["kept_dense", "rewritten", "rewritten"]
    assert not any("needs-training" in p.reason for p in result.plan)
    folder = sp.export(result, tmp_path / "out")
    assert torch.equal(logits(sp.load(folder), ids), logits(result.model, ids))
    assert load_file(folder / "model.safetensors").keys() == model.state_dict().keys()
    report = sp.verify(model, result.model, [ids], checks=["V1", "V2", "V3", "V5"])
    assert [check.status for check in report.checks] == ["passed"] * len(report.checks)


def test_other_methods_leave_its_sparse_layers_alone():
    model = build("sdpa")
    found = sp.inspect(model)
    plan = sp.plan(found, sp.Policy.moba(block_size=SIZE, topk=TOPK))
    assert [p.status for p in plan] == ["rewritten", "refused", "refused"]
    with pytest.raises(UsageError, match="NATIVELY_SPARSE"):
        sp.sparsify(model, plan=plan_for(model, topk=2), inspection=found)
    moba = {"name": "moba", "block_size": 8, "topk": 2}
    strict = {**POLICY, "on_unproved": "error"}
    with pytest.raises(CaptureError, match="NATIVELY_SPARSE"):
        sp.plan(found, sp.Policy.from_json({**strict, "method": moba}))
    assert sp.plan(found, sp.Policy.from_json(strict)).rewritten
    found = sp.inspect(model, host="graph")
    plan = sp.plan(found, sp.Policy.from_json(POLICY))
    assert not plan.rewritten and {r.code for r in found.refusals} == {"NATIVELY_SPARSE"}


def test_an_estimate_says_what_its_dense_is():
    estimate = sp.estimate(build("sdpa"), gpu="h200", context=4096)
    assert any("natively sparse" in text for text in estimate.to_json()["assumptions"])
