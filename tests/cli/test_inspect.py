"""`sparsify inspect`."""

import json

from sparsify.cli import render
from sparsify.ir import MaskKind, MaskProof
from tests._util.tiny_gguf import write_gguf


def test_identical_layers_share_a_row(cli, llama):
    code, out, err = cli("inspect", llama)
    assert code == 0
    assert out.startswith("tiny-llama: 3 replaceable attention sites, 0 refused\n")
    assert "model.layers.{0..2}.self_attn" in out and "4/2" in out and "causal" in out
    assert out.count("self_attn") == 1
    assert "capturing the model" in err


def test_json_lists_all_and_is_alone_on_stdout(cli, llama):
    code, out, _ = cli("inspect", llama, "--json")
    data = json.loads(out)
    assert code == 0 and data["schema"] == 1 and data["refusals"] == []
    assert data["model"] == "tiny-llama" and data["expected"] == 3
    assert [site["fqn"] for site in data["sites"]] == [
        f"model.layers.{i}.self_attn" for i in range(3)
    ]
    site = data["sites"][0]
    assert (site["q_heads"], site["kv_heads"], site["head_dim"], site["ordinal"]) == (4, 2, 8, 0)
    assert site["mask"]["kind"] == "causal" and site["mask"]["padding"] == "attention_mask"
    assert site["phase"] == "prefill" and site["pattern"] and "modeling_llama" in site["source"]


def test_gguf(cli, tmp_path):
    code, out, _ = cli("inspect", write_gguf(tmp_path / "m.gguf"), "--json")
    assert code == 0 and len(json.loads(out)["sites"]) == 2


def test_refused_attention_is_not_an_error(cli, bert):
    code, out, _ = cli("inspect", bert)
    assert code == 0 and "0 replaceable attention sites, 2 refused" in out
    assert "NOT_CAUSAL" in out
    code, out, _ = cli("inspect", bert, "--json")
    data = json.loads(out)
    assert data["sites"] == [] and [r["code"] for r in data["refusals"]] == ["NOT_CAUSAL"] * 2
    assert set(data["refusals"][0]) == {
        "fqn", "ordinal", "code", "message", "evidence", "hint", "source",
    }  # fmt: skip


def test_explain_one_site(cli, llama):
    code, out, _ = cli("inspect", llama, "--explain", "model.layers.1.self_attn")
    assert code == 0 and "replaceable" in out and "mask.evidence" in out
    assert "modeling_llama.py" in out and "model.layers.0" not in out
    code, out, _ = cli("inspect", llama, "--explain", "model.layers.1.self_attn#0", "--json")
    assert json.loads(out)["site"]["fqn"] == "model.layers.1.self_attn"


def test_explain_an_unknown_site(cli, llama):
    code, out, err = cli("inspect", llama, "--explain", "model.layers.1.attn")
    assert code == 2 and out == ""
    assert "no attention site model.layers.1.attn" in err and "Did you mean model.layers" in err


def test_seq_is_the_length_of_the_example(cli, llama):
    assert cli("inspect", llama, "--seq", "33")[0] == 0
    for wrong in ("0", "x", "-4", "1.5k", ""):
        code, _, err = cli("inspect", llama, "--seq", wrong)
        assert code == 2 and "such as 512, 4k or 1m" in err


def test_other_models_with_example_inputs(cli, factories):
    code, out, err = cli("inspect", "cli_models:attention", "--json")
    data = json.loads(out)
    assert code == 0 and len(data["sites"]) == 1 and data["sites"][0]["fqn"] == ""
    assert "printed by the model" in err
    code, out, _ = cli("inspect", "cli_models:attention")
    assert code == 0 and "(root)" in out
    code, out, _ = cli("inspect", "cli_models:bidirectional")
    assert code == 0 and "NOT_CAUSAL" in out


def test_other_models_without_example_inputs(cli, factories):
    code, out, err = cli("inspect", "cli_models:without_inputs")
    assert code == 2 and out == "" and "needs example inputs" in err


def test_no_attention(cli, factories):
    code, out, err = cli("inspect", "cli_models:none")
    assert code == 3 and "No attention was found in cli_models:none" in err
    code, out, _ = cli("inspect", "cli_models:none", "--json")
    assert code == 3 and json.loads(out)["sites"] == []


def test_a_rewritten_folder_can_be_inspected(cli, rewritten):
    code, out, _ = cli("inspect", rewritten, "--json")
    assert code == 0 and len(json.loads(out)["sites"]) == 3


def test_the_table_says_what_keeps_documents_apart():
    proof = MaskProof(MaskKind.DOCUMENT, documents="segment_ids", padding="mask")
    assert render._mask(proof) == "document by segment_ids, padding by mask"
    assert render._mask(MaskProof(MaskKind.CAUSAL)) == "causal"
