"""A rewritten transformers model as a folder: written whole, loaded in a fresh process."""

import json
import subprocess
import sys

import pytest
import torch
import transformers

import sparsify as sp
from sparsify.hosts import transformers as host
from sparsify.hosts.transformers import plan_of
from tests._util.tiny_models import FAMILIES, build, inspected, tokens

FRESH = """
import sys, torch, {module}
model = {loader}
ids = torch.load(sys.argv[2])
with torch.no_grad():
    torch.save(model(ids, use_cache=False).logits, sys.argv[3])
"""
LOADERS = {
    "sp.load": ("sparsify", "sparsify.load(sys.argv[1])"),
    "from_pretrained": (
        "transformers, sparsify.hosts.transformers",
        "transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])",
    ),
}

POLICY = sp.Policy.moba(block_size=8, topk=2, dense_last=1)


def saved(tmp_path, family="llama", method="moba"):
    policy = getattr(sp.Policy, method)(block_size=8, topk=2, dense_last=1)
    result = sp.sparsify(build(family), policy, inspection=inspected(family))
    return result, sp.export(result, tmp_path / "out")


@torch.no_grad()
def logits(model, ids):
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize("method", ["moba", "msa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_folder_computes_the_same_bits(tmp_path, family, method):
    result, folder = saved(tmp_path, family, method)
    again, ids = sp.load(folder), tokens(2, 40)
    assert torch.equal(logits(again, ids), logits(result.model, ids))
    assert plan_of(again) == result.plan


@pytest.mark.parametrize("loader", LOADERS)
def test_a_fresh_process_computes_the_same_bits(tmp_path, loader):
    result, folder = saved(tmp_path)
    ids = tokens(2, 40)
    torch.save(ids, tmp_path / "ids")
    module, call = LOADERS[loader]
    code = FRESH.format(module=module, loader=call)
    paths = [str(folder), str(tmp_path / "ids"), str(tmp_path / "logits")]
    subprocess.run([sys.executable, "-c", code, *paths], check=True, timeout=240)
    assert torch.equal(torch.load(tmp_path / "logits"), logits(result.model, ids))


def test_transformers_alone_refuses_the_folder_instead_of_loading_it_dense(tmp_path):
    _, folder = saved(tmp_path)
    code = (
        "import sys, transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode != 0
    assert "sparsify" in done.stderr.splitlines()[-1]


def test_the_folder_holds_plan_report_and_a_manifest_of_every_file(tmp_path):
    result, folder = saved(tmp_path)
    names = {p.name for p in folder.iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "plan.json",
        "report.json",
        "manifest.json",
    } <= names
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == names - {"manifest.json"}
    assert sp.Plan.load(folder / "plan.json") == result.plan
    report = json.loads((folder / "report.json").read_text())
    again = sp.SparsifyReport.from_json(report).to_json()
    assert json.loads(json.dumps(again)) == report


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "plan.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_folder_is_named_and_not_loaded(tmp_path, name, damage):
    _, folder = saved(tmp_path)
    path = folder / name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
    with pytest.raises(sp.ArtefactError, match=name):
        sp.load(folder)


def plain(folder, **options):
    return transformers.LlamaForCausalLM.from_pretrained(
        pretrained_model_name_or_path=folder, **options
    )


def test_a_folder_swapped_while_it_is_loaded_is_refused(tmp_path, monkeypatch):
    _, folder = saved(tmp_path)
    other = sp.export(sp.sparsify(build("llama", seed=1), POLICY), tmp_path / "other")
    real = host._attach_saved_plan

    def late(*args):
        folder.rename(tmp_path / "old")
        other.rename(folder)
        real(*args)

    monkeypatch.setattr(host, "_attach_saved_plan", late)
    with pytest.raises(sp.ArtefactError, match="changed while it was read"):
        sp.load(folder)


@pytest.mark.parametrize("load", [sp.load, plain])
def test_weights_put_beside_are_refused(tmp_path, load):
    _, folder = saved(tmp_path)
    load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(sp.ArtefactError, match=r"holds pytorch_model\.bin"):
        load(folder)


def test_a_lost_manifest_is_told_by_plain_loading_too(tmp_path):
    _, folder = saved(tmp_path)
    (folder / "manifest.json").unlink()
    with pytest.raises(sp.ArtefactError, match=r"manifest\.json is missing"):
        plain(folder)


def test_a_model_that_the_user_saved_again_needs_no_manifest(tmp_path):
    result, folder = saved(tmp_path)
    sp.load(folder).save_pretrained(tmp_path / "again")
    assert plan_of(plain(tmp_path / "again")) == result.plan


@pytest.mark.parametrize("content", ["{}", "[]", '{"name": "of another tool"}'])
def test_manifests_of_other_tools_are_not_ours(tmp_path, content):
    build("llama").save_pretrained(tmp_path)
    (tmp_path / "manifest.json").write_text(content)
    plain(tmp_path)


def test_plan_and_config_that_differ_are_refused(tmp_path):
    from sparsify.manifests import write_manifest

    _, folder = saved(tmp_path)
    text = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(text.replace('"topk": 2', '"topk": 3'))
    write_manifest(folder)
    for load in (sp.load, plain):
        with pytest.raises(sp.ArtefactError, match=r"plan\.json and the plan in config"):
            load(folder)


def test_a_target_in_the_way_is_refused_and_kept(tmp_path):
    result, folder = saved(tmp_path)
    before = (folder / "manifest.json").read_bytes()
    with pytest.raises(sp.UsageError, match="not empty"):
        sp.export(result, folder)
    assert (folder / "manifest.json").read_bytes() == before
    sp.export(result, folder, force=True)
    sp.load(folder)


@pytest.mark.parametrize("content", [None, "[]", "{", '{"model_type": "llama"}'])
def test_a_folder_that_is_not_ours_gets_a_clear_sentence(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(sp.ArtefactError):
        sp.load(tmp_path)
    with pytest.raises(sp.ArtefactError, match="no folder"):
        sp.load(tmp_path / "nowhere")


def test_the_base_model_of_a_folder_gets_the_plan_too(tmp_path):
    from transformers import AutoModel

    result, folder = saved(tmp_path)
    base, ids = AutoModel.from_pretrained(folder), tokens(1, 40)
    assert [layer.fqn for layer in plan_of(base)][:1] == ["layers.0.self_attn"]
    with torch.no_grad():
        hidden = result.model.model(ids, use_cache=False).last_hidden_state
        assert torch.equal(base(ids, use_cache=False).last_hidden_state, hidden)
