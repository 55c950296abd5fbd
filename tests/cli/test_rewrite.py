"""`sparsify rewrite`."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open

import sparsify
from sparsify.manifests import check_manifest
from sparsify.plans import Plan
from sparsify.policy import Policy, dump_policy
from sparsify.report import SparsifyReport
from tests._util.tiny_gguf import write_gguf
from tests.cli.conftest import MOBA

MSA = ("--method", "msa", *MOBA[2:])


WORDS = ("plan.json", "report.json", "manifest.json", "config.json", "model.safetensors")


def ids(length=40):
    return torch.arange(length).reshape(1, -1) % 200 + 3


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_is_complete_and_loads(rewritten):
    assert set(WORDS) <= set(names(rewritten)) and "tokenizer.json" in names(rewritten)
    assert check_manifest(rewritten)["schema"] == 1
    plan = Plan.load(rewritten / "plan.json")
    assert [layer.status for layer in plan] == ["rewritten", "rewritten", "kept_dense"]
    report = SparsifyReport.from_json(json.loads((rewritten / "report.json").read_text()))
    assert report.counts["rewritten"] == 2 and report.model == "tiny-llama"
    model = sparsify.load(rewritten)
    with torch.no_grad():
        assert model(ids()).logits.shape == (1, 40, 260)


def test_the_table_and_the_way_it_differs(cli, llama, tmp_path):
    code, out, err = cli("rewrite", llama, *MOBA, "--dense-last", "1", "-o", tmp_path / "out")
    assert code == 0
    assert "3 attention sites, 2 rewritten, 1 kept dense, 0 refused" in out
    assert "model.layers.{0..1}.self_attn" in out and "moba block 8 top-k 2" in out
    assert "dense by rule '-1:'" in out and "4,096" in out
    assert out.rstrip().endswith(f"written to {tmp_path / 'out'}")
    assert "writing the model" in err and names(tmp_path) == ["out"]
    dense = sparsify_free(llama)
    with torch.no_grad():
        a, b = sparsify.load(tmp_path / "out")(ids()).logits, dense(ids()).logits
    # Top-k blocks are dense; behind them the attention is another.
    assert torch.allclose(a[:, :16], b[:, :16], atol=1e-3) and not torch.allclose(a, b, atol=1e-3)


def sparsify_free(folder):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_json_is_the_report(cli, llama, tmp_path):
    code, out, _ = cli("rewrite", llama, *MOBA, "-o", tmp_path / "out", "--json")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "out" / "report.json").read_text())


@pytest.mark.parametrize("method", ["moba", "msa"])
def test_methods_and_their_options(cli, llama, tmp_path, method):
    words = ["--method", method, "--block-size", "8", "--topk", "1", "--decode", "dense"]
    if method == "msa":
        words += ["--indexer", "proxy"]
    assert cli("rewrite", llama, *words, "-o", tmp_path / "out")[0] == 0
    for layer in Plan.load(tmp_path / "out" / "plan.json"):
        assert (layer.method, layer.block_size, layer.topk) == (method, 8, 1)
        assert layer.decode == "dense"
        assert layer.indexer == ("proxy" if method == "msa" else None)


def test_a_learned_indexer_by_options_alone(cli, llama, tmp_path):
    words = (*MSA, "--indexer", "learned", "--index-dim", "12")
    code, out, _ = cli("rewrite", llama, *words, "-o", tmp_path / "out")
    assert code == 0 and "learned indexer of size 12" in " ".join(out.split())
    for layer in Plan.load(tmp_path / "out" / "plan.json"):
        assert (layer.method, layer.indexer, layer.index_dim) == ("msa", "learned", 12)


def test_a_policy_file_and_then_its_plan(cli, llama, tmp_path):
    policy = Policy.moba(block_size=4, topk=2, layers=[{"match": "0", "method": "dense"}])
    dump_policy(policy, tmp_path / "p.yaml")
    assert cli("rewrite", llama, "--policy", tmp_path / "p.yaml", "-o", tmp_path / "a")[0] == 0
    plan = tmp_path / "a" / "plan.json"
    assert cli("rewrite", llama, "--plan", plan, "-o", tmp_path / "b")[0] == 0
    assert plan.read_bytes() == (tmp_path / "b" / "plan.json").read_bytes()
    assert [layer.sparse for layer in Plan.load(plan)] == [False, True, True]


def test_gguf(cli, tmp_path):
    source = write_gguf(tmp_path / "m.gguf")
    assert cli("rewrite", source, *MOBA, "-o", tmp_path / "out")[0] == 0
    assert set(WORDS) <= set(names(tmp_path / "out"))
    sparsify.load(tmp_path / "out")


def test_dtype(cli, llama, tmp_path):
    code, _, _ = cli("rewrite", llama, *MOBA, "-o", tmp_path / "out", "--dtype", "bfloat16")
    model = sparsify.load(tmp_path / "out")
    assert code == 0 and next(model.parameters()).dtype == torch.bfloat16


def test_dry_run_writes_nothing(cli, llama, tmp_path):
    code, out, _ = cli("rewrite", llama, *MOBA, "--dry-run", "-o", tmp_path / "out")
    assert code == 0 and "3 rewritten" in out and "nothing was written" in out
    assert names(tmp_path) == []
    assert cli("rewrite", llama, *MOBA, "--dry-run")[0] == 0
    code, out, _ = cli("rewrite", llama, *MOBA, "--dry-run", "--json")
    assert code == 0 and json.loads(out)["counts"]["rewritten"] == 3


@pytest.mark.parametrize("words", [("--dry-run",), ("-o", "out")])
def test_a_dry_run_fails_as_the_rewrite_does(cli, llama, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sparsify.hosts.transformers.passes_keywords", lambda module: False)
    code, out, err = cli("rewrite", llama, *MSA, "--indexer", "learned", "--index-dim", "8", *words)
    assert code == 5 and out == "" and "does not pass on" in err and names(tmp_path) == []


def test_a_target_in_the_way(cli, llama, tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine").write_text("x")
    code, out, err = cli("rewrite", llama, *MOBA, "-o", target)
    assert code == 2 and out == "" and "is not empty" in err and "--force" in err
    assert "loading" not in err and names(target) == ["mine"]
    assert cli("rewrite", llama, *MOBA, "-o", target, "--force")[0] == 0
    assert "mine" not in names(target) and names(tmp_path) == ["out"]


def test_the_model_itself_is_never_the_target(cli, llama, tmp_path):
    source = tmp_path / "models" / "source"
    shutil.copytree(llama, source)
    for target in (source, source.parent, source / ".." / "source"):
        code, _, err = cli("rewrite", source, *MOBA, "-o", target, "--force")
        assert code == 2 and "holds the model that is read" in err
    assert cli("rewrite", source, *MOBA, "-o", source / "inside")[0] == 0


def test_nothing_rewritten(cli, llama, bert, factories, tmp_path):
    for words in (
        (llama, *MOBA, "--dense-last", "3"),
        (bert, *MOBA),
        (llama, *MOBA, "--dense-last", "9", "--dry-run"),
        ("cli_models:none", *MOBA),
    ):
        code, _, err = cli("rewrite", *words, "-o", tmp_path / "out")
        assert code == 3, err
        assert "othing" in err or "No attention" in err
        assert not (tmp_path / "out").exists()


def test_other_models_become_exported_programs(cli, factories, tmp_path):
    code, out, err = cli("rewrite", "cli_models:seeded", *MOBA, "-o", tmp_path / "out")
    assert code == 0 and "1 attention site, 1 rewritten" in out, err
    assert names(tmp_path / "out") == ["manifest.json", "model.pt2", "plan.json", "report.json"]
    code, out, err = cli("verify", tmp_path / "out", "--against", "cli_models:seeded")
    assert code == 0 and all(check in out for check in ("V1", "V2", "V3", "V5", "V7")), err
    code, out, _ = cli("verify", tmp_path / "out", "--against", "cli_models:attention")
    assert code == 4 and "weights changed" in out


def test_other_models_are_no_transformers_models_and_need_inputs(cli, factories, tmp_path):
    for words, said in (
        (("cli_models:seeded", "--host", "transformers"), (5, "is not a transformers model")),
        (("cli_models:without_inputs",), (2, "needs example inputs")),
    ):
        code, _, err = cli("rewrite", *words, *MOBA, "-o", tmp_path / "out")
        assert code == said[0] and said[1] in err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ((), ["What to do is missing"]),
        (("--policy", "kimi-1m", "--method", "moba"), ["--policy and --method exclude each other"]),
        (("--policy", "kimi-1m", "--plan", "p.json"), ["--policy and --plan exclude each other"]),
        (("--policy", "kimi-1m", "--topk", "3"), ["--topk belongs to --method"]),
        (("--policy", "kimi-1m", "--dense-last", "3"), ["--dense-last belongs to --method"]),
        (("--policy", "kimi-2m"), ["did you mean 'kimi-1m'?"]),
        (("--plan", "none.json"), ["Cannot read the plan none.json"]),
        (("--method", "moba"), ["needs --block-size and --topk"]),
        (("--method", "moba", "--topk", "3"), ["needs --block-size"]),
        (("--method", "mobo"), ["'mobo'", "'moba'"]),
        ((*MOBA, "--topk", "0"), ["method.topk is 0"]),
        ((*MOBA, "--topk", "1.5"), ["'1.5'"]),
        ((*MOBA, "--topk", "9999999"), ["at most 1000000"]),
        ((*MOBA, "--block-size", "0"), ["--block-size is '0'"]),
        ((*MOBA, "--block-size", "1g"), ["--block-size is '1g'"]),
        ((*MOBA, "--dense-last", "-1"), ["dense_last -1"]),
        ((*MOBA, "--indexer", "proxy"), ["--indexer belongs to --method msa"]),
        ((*MOBA, "--decode", "x"), ["'x'", "'sparse'"]),
        ((*MSA, "--indexer", "learned"), ["--indexer learned needs --index-dim"]),
        ((*MSA, "--index-dim", "8"), ["--index-dim belongs to --indexer learned"]),
        ((*MSA, "--indexer", "proxy", "--index-dim", "8"), ["belongs to --indexer learned"]),
        ((*MSA, "--indexer", "learned", "--index-dim", "0"), ["index_dim is 0"]),
        ((*MSA, "--indexer", "learned", "--index-dim", "x"), ["--index-dim", "'x'"]),
        ((*MOBA, "--dtype", "int8"), ["'int8'"]),
    ],
)
def test_wrong_options_are_told_before_any_work(cli, llama, tmp_path, monkeypatch, words, parts):
    monkeypatch.chdir(tmp_path)
    code, out, err = cli("rewrite", llama, *words, "-o", tmp_path / "out")
    assert code == 2 and out == "" and all(part in err for part in parts), err
    assert "loading" not in err and "Traceback" not in err and names(tmp_path) == []


def test_no_output_folder(cli, llama):
    code, _, err = cli("rewrite", llama, *MOBA)
    assert code == 2 and "-o DIR" in err


def test_auto_without_a_gpu_is_a_clear_error(cli, llama, tmp_path):
    (tmp_path / "auto.yaml").write_text("method: auto\n")
    code, _, err = cli("rewrite", llama, "--policy", tmp_path / "auto.yaml", "--dry-run")
    assert code == 2 and "--gpu h200 --context 128k" in err


def test_a_learned_indexer_is_written_as_needing_training(cli, llama, tmp_path):
    out_folder = tmp_path / "out"
    code, out, _ = cli("rewrite", llama, "--policy", "msa-m3", "-o", out_folder, "--json")
    assert code == 0
    sites = [s for s in json.loads(out)["sites"] if s["status"] == "rewritten"]
    assert sites and all("needs-training" in s["reason"] for s in sites)
    assert {s["index_dim"] for s in sites} == {128}
    with safe_open(out_folder / "model.safetensors", "pt") as weights:
        kept = [name for name in weights.keys() if ".indexer." in name]  # noqa: SIM118
    assert len(kept) == 2 * len(sites)
    assert sparsify.load(out_folder).state_dict().keys() >= set(kept)


def test_unproved_sites_as_an_error(cli, bert, tmp_path):
    text = "method: {name: moba, block_size: 8, topk: 2}\non_unproved: error\n"
    (tmp_path / "p.yaml").write_text(text)
    code, _, err = cli("rewrite", bert, "--policy", tmp_path / "p.yaml", "-o", tmp_path / "out")
    assert code == 5 and "2 of 2 attention sites are not proved" in err and "NOT_CAUSAL" in err


def test_a_plan_of_another_model(cli, llama, rewritten, tmp_path):
    plan = json.loads((rewritten / "plan.json").read_text())
    plan["layers"][0]["fqn"] = "model.layers.7.self_attn"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    words = ("--plan", tmp_path / "plan.json", "-o", tmp_path / "out")
    code, _, err = cli("rewrite", llama, *words)
    assert code == 2 and "model.layers.7.self_attn" in err
