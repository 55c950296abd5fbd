"""`sparsify policy`."""

import json

from sparsify.policy import PRESETS, Policy, load_policy


def test_show_lists_and_prints(cli, tmp_path):
    assert cli("policy", "show") == (0, "kimi-1m\nmsa-m3\n", "")
    code, out, _ = cli("policy", "show", "kimi-1m")
    (tmp_path / "p.yaml").write_text(out)
    assert code == 0 and load_policy(tmp_path / "p.yaml") == PRESETS["kimi-1m"]
    code, out, _ = cli("policy", "show", "msa-m3", "--json")
    assert Policy.from_json(json.loads(out)) == PRESETS["msa-m3"]
    code, out, _ = cli("policy", "show", "--json")
    assert sorted(json.loads(out)) == ["kimi-1m", "msa-m3"]


def test_validate(cli, tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("method: {name: moba, block_size: 8, topk: 2}\ndense_last: 3\n")
    code, out, _ = cli("policy", "validate", path)
    assert code == 0 and out == f"{path} is a valid policy: moba, 1 layer rule\n"
    code, out, _ = cli("policy", "validate", path, "--json")
    assert code == 0 and json.loads(out)["valid"] is True
    path.write_text("method: {name: moba, block_size: 8, topk: 2}\ndense_lst: 3\n")
    code, out, err = cli("policy", "validate", path)
    assert code == 2 and out == "" and "did you mean 'dense_last'?" in err


def test_schema(cli):
    code, out, _ = cli("policy", "schema")
    assert code == 0 and "dense_last" in json.loads(out)["properties"]
