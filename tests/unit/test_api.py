"""The verbs: what they accept, what they leave alone, and how they refuse."""

import json

import pytest
import torch
import torch.nn.functional as F

import sparsify as sp
from sparsify.hosts.transformers import plan_of
from tests._util.tiny_models import FAMILIES, build, tokens


class TinyAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (t.view(*x.shape[:2], 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@torch.no_grad()
def logits(model, ids):
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_proved_and_rewritten(family):
    model, ids = build(family), tokens(2, 40)
    found = sp.inspect(model)
    assert (len(found.sites), len(found.refusals), found.expected) == (3, 0, 3)
    for site in found.sites:
        assert site.mask.kind == "causal"
        assert site.mask.padding == "attention_mask"
    result = sp.sparsify(model, sp.Policy.moba(block_size=8, topk=2))
    assert [layer.status for layer in result.plan] == ["rewritten"] * 3
    assert not torch.equal(logits(result.model, ids), logits(model, ids))
    full = sp.sparsify(model, sp.Policy.msa(block_size=8, topk=1000))
    a, b = logits(full.model, ids), logits(model, ids)
    assert (a - b).abs().max() <= 1e-4 * b.abs().max()


def test_inspect_changes_nothing():
    model, ids = build("llama").train(), tokens(2, 40)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    before = logits(model, ids)
    sp.inspect(model)
    assert model.training
    assert torch.equal(logits(model, ids), before)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_the_inspection_is_a_json_document():
    data = json.loads(json.dumps(sp.inspect(build("llama")).to_json()))
    assert data["schema"] == 1
    assert data["sites"][0]["fqn"] == "model.layers.0.self_attn"
    assert data["sites"][0]["mask"]["padding"] == "attention_mask"
    assert data["refusals"] == []


def test_dense_last_keeps_the_last_layers_and_the_report_says_so():
    result = sp.sparsify(build("llama"), sp.Policy.moba(block_size=8, topk=2, dense_last=2))
    assert [layer.method for layer in result.plan] == ["moba", "dense", "dense"]
    assert result.report.counts == {
        "detected": 3,
        "rewritten": 1,
        "kept_dense": 2,
        "refused": 0,
    }
    pairs = result.report.pairs[0]
    assert 0 < pairs.attended < pairs.dense


def test_in_place_rewrites_the_model_itself_and_restore_undoes_it():
    model, ids = build("llama"), tokens(1, 40)
    before = logits(model, ids)
    result = sp.sparsify(model, sp.Policy.moba(block_size=8, topk=2), inplace=True)
    assert result.model is model
    assert not torch.equal(logits(model, ids), before)
    with pytest.raises(sp.UsageError, match="in place"):
        result.verify(ids)
    assert result.restore() is model
    assert torch.equal(logits(model, ids), before)


def test_a_plan_can_be_made_saved_and_used_later(tmp_path):
    model = build("llama")
    plan = sp.plan(model, sp.Policy.moba(block_size=8, topk=2, dense_last=1))
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    result = sp.sparsify(model, plan=sp.Plan.load(tmp_path / "plan.json"))
    assert plan_of(result.model) == plan == result.plan


def test_a_plan_that_rewrites_an_unproved_site_is_refused():
    plan = sp.plan(build("llama"), sp.Policy.moba(block_size=8, topk=2))
    windowed = build("mistral", sliding_window=16)
    with pytest.raises(sp.UsageError, match="SLIDING_WINDOW"):
        sp.sparsify(windowed, plan=plan)


def test_windowed_layers_stay_dense_with_the_reason():
    with pytest.raises(sp.NothingToDoError, match="3 sites were refused"):
        sp.sparsify(build("mistral", sliding_window=16), sp.Policy.moba(block_size=8, topk=2))


def test_policy_and_plan_together_or_none_at_all_are_refused():
    model = build("llama")
    with pytest.raises(sp.UsageError, match="either"):
        sp.sparsify(model)
    plan = sp.plan(model, sp.Policy.moba(block_size=8, topk=2))
    with pytest.raises(sp.UsageError, match="either"):
        sp.sparsify(model, sp.Policy.moba(block_size=8, topk=2), plan=plan)


def test_an_all_dense_policy_rewrites_nothing():
    with pytest.raises(sp.NothingToDoError, match="dense by policy"):
        sp.sparsify(build("llama"), sp.Policy.dense())


def test_other_models_are_rewritten_on_the_graph_host_only():
    model, x = TinyAttention().eval(), torch.randn(2, 24, 16)
    policy = sp.Policy.moba(block_size=8, topk=2)
    assert len(sp.inspect(model, (x,)).sites) == 1
    assert sp.sparsify(model, policy, (x,)).report.counts["rewritten"] == 1
    with pytest.raises(sp.CaptureError, match="graph host"):
        sp.sparsify(model, policy, (x,), host="transformers")
    with pytest.raises(sp.UsageError, match="example inputs"):
        sp.inspect(model)


def test_unknown_hosts_and_formats_are_refused(tmp_path):
    model = build("llama")
    policy = sp.Policy.moba(block_size=8, topk=2)
    with pytest.raises(sp.UsageError, match="Unknown host"):
        sp.sparsify(model, policy, host="jax")
    with pytest.raises(sp.UsageError, match="cannot be exported as 'onyx'"):
        sp.export(sp.sparsify(model, policy), tmp_path / "x", format="onyx")


def test_a_failed_rewrite_in_place_leaves_the_model_as_it_was(monkeypatch):
    model, ids = build("llama"), tokens(1, 40)
    before = logits(model, ids)
    monkeypatch.setattr("sparsify.hosts.attention.run_sparse", lambda *a: 1 / 0)
    with pytest.raises(sp.CaptureError, match="does not run"):
        sp.sparsify(model, sp.Policy.moba(block_size=8, topk=2), inplace=True)
    monkeypatch.undo()
    assert torch.equal(logits(model, ids), before)


def test_a_model_that_always_falls_back_is_refused_instead_of_running_dense(monkeypatch):
    monkeypatch.setattr("sparsify.hosts.attention._fallback", lambda *a: "of a test")
    with pytest.raises(sp.CaptureError, match="runs dense in this model: of a test"):
        sp.sparsify(build("llama"), sp.Policy.moba(block_size=8, topk=2))


POLICY = sp.Policy.moba(block_size=8, topk=2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: sp.sparsify(m, "kimi-1m"), "policy is a str.*load_policy"),
        (lambda m: sp.sparsify(m, {"method": "dense"}), "policy is a dict"),
        (lambda m: sp.sparsify(m, plan="plan.json"), "plan is a str"),
        (lambda m: sp.plan(m, "kimi-1m"), "policy is a str"),
        (lambda m: sp.inspect("m"), "model is a str"),
        (lambda m: sp.inspect(m, seq_len=0), "seq_len is 0"),
        (lambda m: sp.export(m, "somewhere"), "result is a LlamaForCausalLM"),
        (lambda m: sp.export(m, "somewhere"), "its own save_pretrained"),
        (lambda m: sp.load(None), "directory is a NoneType"),
        (lambda m: sp.verify(m, None), "rewritten is a NoneType"),
        (lambda m: sp.sparsify(m, POLICY).verify(3, checks=["V6"]), "not a int"),
    ],
)
def test_arguments_of_the_wrong_kind_get_one_sentence(call, words):
    with pytest.raises(sp.UsageError, match=words):
        call(build("llama"))


def test_restoring_an_earlier_rewrite_does_not_take_the_later_one_away():
    model, ids = build("llama"), tokens(1, 40)
    first = sp.sparsify(model, POLICY, inplace=True)
    second = sp.sparsify(model, sp.Policy.msa(block_size=8, topk=2), inplace=True)
    wanted = logits(model, ids)
    with pytest.raises(sp.UsageError, match="Another plan"):
        first.restore()
    assert torch.equal(logits(model, ids), wanted)
    second.restore()
    second.restore()
    assert plan_of(model) is None
