"""`sparsify doctor`."""

import json
import sys

from sparsify.cli import doctor


def test_json(cli, monkeypatch):
    monkeypatch.setenv("SPARSIFY_STRICT", "1")
    code, out, _ = cli("doctor", "--json")
    data = json.loads(out)
    assert code == 0 and data["schema"] == 1 and data["problems"] == []
    assert data["packages"]["torch"] and data["devices"][0]["device"] == "cpu"
    assert data["environment"]["SPARSIFY_STRICT"] == "1"
    assert data["extras"]["hf"] == {"missing": [], "install": None}


def test_table(cli):
    code, out, _ = cli("doctor")
    assert code == 0 and "torch" in out and "python" in out


def test_what_is_missing_comes_with_its_command(cli, monkeypatch):
    real = doctor.installed_version
    monkeypatch.setattr(
        doctor, "installed_version", lambda name: None if name in ("gguf", "onnx") else real(name)
    )
    code, out, _ = cli("doctor")
    assert code == 0 and 'extra hf: gguf missing; pip install "sparsify-attention[hf]"' in out
    assert "problem: onnx is not installed" in out


def test_wrong_settings_and_a_broken_torch_are_problems_not_errors(cli, monkeypatch):
    monkeypatch.setenv("SPARSIFY_IMPL", "cuda")
    monkeypatch.setenv("SPARSIFY_DISABLE", "perhaps")
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, _ = cli("doctor", "--json")
    problems = " ".join(json.loads(out)["problems"])
    assert code == 0
    assert all(part in problems for part in ("SPARSIFY_IMPL", "SPARSIFY_DISABLE", "torch cannot"))
