"""Learned indexers in saved folders, and what the checks say of them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import sparsify as sp
from sparsify.errors import ArtefactError
from sparsify.hosts import transformers as host
from sparsify.hosts.indexers import indexers_of
from sparsify.sources import load_model
from tests._util.tiny_models import build, inspected, tokens

POLICY = sp.Policy.msa(block_size=8, topk=2, indexer="learned", index_dim=8)


def trained(name="llama"):
    """A rewritten model whose indexers are not those that it started with."""
    result = sp.sparsify(build(name), POLICY, inspection=inspected(name))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for indexer in indexers_of(result.model).values():
            for p in indexer.parameters():
                p.add_(torch.randn(p.shape, generator=generator))
    return result


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_a_folder_brings_the_trained_weights_back(name, tmp_path):
    result, ids = trained(name), tokens(1, 60)
    wanted = logits(result.model, ids)
    folder = sp.export(result, tmp_path / "out")
    assert torch.equal(logits(sp.load(folder), ids), wanted)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder), ids), wanted)
    untrained = sp.sparsify(build(name), POLICY, inspection=inspected(name)).model
    assert not torch.equal(logits(untrained, ids), wanted)


def test_a_base_model_finds_them_under_their_other_names(tmp_path):
    result, ids = trained(), tokens(1, 60)
    folder = sp.export(result, tmp_path / "out")
    base = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(base(ids)[0], result.model.model(ids)[0])
    assert len(indexers_of(base)) == 3


def test_sharded_folders_and_those_without_a_manifest(tmp_path):
    result, ids = trained(), tokens(1, 60)
    result.model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), logits(result.model, ids))


def test_what_save_pretrained_wrote_is_a_rewritten_model_everywhere(tmp_path):
    result, ids = trained(), tokens(1, 60)
    result.model.save_pretrained(tmp_path)
    assert torch.equal(logits(sp.load(tmp_path), ids), logits(result.model, ids))
    found = load_model(str(tmp_path))
    assert found.kind == "sparsified" and host.plan_of(found.model) == result.plan
    weights = load_file(tmp_path / "model.safetensors")
    lost = weights.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ArtefactError, match=r"lacks 1 weights, such as .*q_proj"):
        sp.load(tmp_path)
    assert lost is not None


def test_a_folder_without_a_plan_is_no_rewritten_model(tmp_path):
    build("llama").save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).kind == "hf"
    with pytest.raises(ArtefactError):
        sp.load(tmp_path)
    result = trained()
    result.model.save_pretrained(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps(result.plan.to_json()))
    with pytest.raises(ArtefactError, match=r"manifest\.json"):  # half of what an export writes
        sp.load(tmp_path)


def test_transformers_tells_of_no_unexpected_weights(tmp_path):
    trained().model.save_pretrained(tmp_path)
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["unexpected_keys"] and not told["missing_keys"]
    assert not getattr(type(build("llama")), "_keys_to_ignore_on_load_unexpected", None)


def test_another_attention_loads_the_dense_model_without_indexers(tmp_path):
    model, ids = build("llama"), tokens(1, 60)
    trained().model.save_pretrained(tmp_path)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert indexers_of(dense) == {} and torch.equal(logits(dense, ids), logits(model, ids))


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_weights_that_are_missing_or_of_another_shape_are_errors(change, tmp_path):
    trained().model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.self_attn.indexer.k_proj.weight"
    if change == "missing":
        del weights[name]
    else:
        weights[name] = weights[name][:4].clone()
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ArtefactError, match=name):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.slow
def test_the_checks_pass_and_name_what_was_added(tmp_path):
    result = trained()
    folder = sp.export(result, tmp_path / "out")
    report = sp.verify(build("llama"), result.model, [tokens(1, 200)], directory=folder)
    assert {check.status for check in report.checks} == {"passed"}
    structure = next(check for check in report.checks if check.check == "V1")
    assert structure.metrics["added_weights"] == 6
    assert "6 of learned indexers added" in structure.summary


@pytest.mark.parametrize("fault", ["other weight", "no indexer"])
def test_v1_still_sees_other_weights_and_missing_indexers(fault):
    result = trained()
    if fault == "other weight":
        added = torch.nn.Parameter(torch.ones(1))
        result.model.model.layers[0].self_attn.register_parameter("x", added)
    else:
        del result.model.model.layers[1].self_attn._modules["indexer"]
    report = sp.verify(build("llama"), result.model, checks=["V1"])
    (check,) = report.checks
    expected = "self_attn.x" if fault == "other weight" else "layers.1.self_attn#0 has no indexer"
    assert check.status == "failed" and expected in check.summary


def test_plans_say_that_training_is_needed(tmp_path):
    result = trained()
    assert all("needs-training" in layer.reason for layer in result.plan.rewritten)
    sp.export(result, tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert all("needs-training" in layer["reason"] for layer in saved["layers"])
    proxy = sp.plan(build("llama"), sp.Policy.msa(block_size=8, topk=2))
    assert not any("needs-training" in layer.reason for layer in proxy)
    assert host.plan_of(sp.load(tmp_path / "out")) == result.plan
