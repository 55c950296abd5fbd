"""`sparsify verify`: its options, tables and exit codes; the checks have tests of their own."""

import json
import shutil

import pytest

from sparsify.cli.verify import read_prompts
from sparsify.errors import UsageError
from tests._util.tiny_folders import save_llama

TEXT = "The quick brown fox jumps over the lazy dog; so does the slow one, in the end. " * 12


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text(TEXT)
    return path


def test_checks_and_quality_tables(cli, llama, rewritten, prompts, tmp_path):
    dump = tmp_path / "selection.npz"
    words = ("--prompts", prompts, "--checks", "V1,v6", "--seq", "64,128")
    code, out, err = cli("verify", rewritten, "--against", llama, *words, "--dump-selection", dump)
    assert code == 0, err
    assert "V1" in out and "passed" in out and "V3" not in out
    assert "quality per layer at 128 tokens" in out and "score recall" in out
    assert "model.layers.1.self_attn" in out and "losses and KL" in out
    assert dump.stat().st_size > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.txt", "selection.npz"]


def test_json(cli, llama, rewritten, prompts):
    words = ("--prompts", prompts, "--checks", "V1,V6", "--seq", "64", "--json")
    code, out, _ = cli("verify", rewritten, "--against", llama, *words)
    data = json.loads(out)
    assert code == 0 and data["ok"] is True and data["schema"] == 1
    assert [check["check"] for check in data["checks"]] == ["V1", "V6"]
    assert data["checks"][1]["metrics"]["runs"][0]["tokens"] == 64
    assert data["against"] == "tiny-llama"


@pytest.mark.slow
def test_all_checks_with_the_default_text(cli, llama, rewritten):
    code, out, err = cli("verify", rewritten, "--against", llama)
    assert code == 0, out + err
    assert all(name in out for name in ("V1", "V2", "V3", "V5", "V6", "V7"))


def test_another_model_fails(cli, rewritten, tmp_path):
    other = save_llama(tmp_path / "other", rms_norm_eps=1e-2)
    weights = save_llama(tmp_path / "weights", hidden_act="gelu", dtype=None)
    assert weights
    changed = tmp_path / "changed"
    shutil.copytree(other, changed)
    import torch
    from safetensors.torch import load_file, save_file

    state = load_file(changed / "model.safetensors")
    state["model.norm.weight"] += torch.ones(())
    save_file(state, changed / "model.safetensors", metadata={"format": "pt"})
    code, out, err = cli("verify", rewritten, "--against", changed, "--checks", "V1")
    assert code == 4 and "failed" in out and "failed verification: V1" in err
    code, out, _ = cli("verify", rewritten, "--against", changed, "--checks", "V1", "--json")
    assert code == 4 and json.loads(out)["ok"] is False


def test_a_damaged_folder(cli, llama, rewritten, tmp_path):
    folder = shutil.copytree(rewritten, tmp_path / "damaged")
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-3] ^= 255
    (folder / "model.safetensors").write_bytes(content)
    code, _, err = cli("verify", folder, "--against", llama)
    assert code == 2 and "model.safetensors was changed" in err
    (folder / "model.safetensors").unlink()
    code, _, err = cli("verify", folder, "--against", llama)
    assert code == 2 and "model.safetensors is missing" in err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--checks", "V9"), "Unknown check V9"),
        (("--seq", "1k,"), "expected a size"),
        (("--prompts", "none.txt"), "There is no prompts file"),
        (("--checks", "V1", "--dump-selection", "x.npz"), "needs the check V6"),
    ],
)
def test_wrong_options(cli, llama, rewritten, words, part):
    code, out, err = cli("verify", rewritten, "--against", llama, *words)
    assert code == 2 and out == "" and part in err


def test_wrong_folders(cli, llama, rewritten, tmp_path):
    code, _, err = cli("verify", llama, "--against", llama)
    assert code == 2 and "was not written by `sparsify rewrite`" in err
    code, _, err = cli("verify", tmp_path / "none", "--against", llama)
    assert code == 2 and "There is no folder" in err
    code, _, err = cli("verify", rewritten, "--against", tmp_path / "none")
    assert code == 2 and "There is no" in err
    code, _, err = cli("verify", rewritten)
    assert code == 2 and "--against" in err


def test_prompts_files(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b", "id": 3}\n')
    assert read_prompts(path) == ["a", "b"]
    (tmp_path / "p.txt").write_text("all\nof it")
    assert read_prompts(tmp_path / "p.txt") == ["all\nof it"]


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("p.txt", b"", "is empty"),
        ("p.jsonl", b"\n\n", "is empty"),
        ("p.jsonl", b'{"text": ""}\n', "is empty"),
        ("p.jsonl", b'{"text": "a"}\nb\n', "line 2 is not JSON"),
        ("p.jsonl", b'{"txt": "a"}\n', 'line 1 has no field "text"'),
        ("p.jsonl", b'["a"]\n', 'line 1 has no field "text"'),
        ("p.txt", b"\xff\xfe", "not UTF-8"),
    ],
)
def test_wrong_prompts_files(tmp_path, name, content, part):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=part):
        read_prompts(tmp_path / name)
