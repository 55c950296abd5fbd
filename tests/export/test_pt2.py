"""Folders of exported programs: written whole, read in a fresh process, damaged, newer."""

import json
import subprocess
import sys
import zipfile

import pytest
import torch

import sparsify as sp
from sparsify.errors import ArtefactError, UsageError
from sparsify.hosts.archive import ARCHIVES
from tests._util.commands import ROOT, environment
from tests._util.tiny_models import build, tokens

POLICY = sp.Policy.moba(block_size=8, topk=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model, its rewritten twin, and the folder that it was saved to."""
    folder = tmp_path_factory.mktemp("pt2") / "out"
    model = build("llama", tie_word_embeddings=True)
    result = sp.sparsify(model, POLICY, host="graph")
    sp.export(result, folder)
    return model, result, folder


def copied(folder, target):
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_the_folder_holds_programs_plan_report_and_manifest(saved):
    _, _, folder = saved
    names = {path.name for path in folder.iterdir()}
    assert names == {*ARCHIVES, "plan.json", "report.json", "manifest.json"}
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(listed) == names - {"manifest.json"}


def test_weights_stand_in_the_first_program_only(saved):
    model, _, folder = saved
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    sizes = [(folder / name).stat().st_size for name in ARCHIVES]
    held = []
    for name in ARCHIVES:
        with zipfile.ZipFile(folder / name) as archive:
            held.append(sum(i.file_size for i in archive.infolist() if "/weights/" in i.filename))
    assert held[0] >= weights and held[1] < weights / 10
    assert all(size > 0 for size in sizes)


def test_loading_gives_the_same_bits_and_ties(saved):
    model, result, folder = saved
    loaded, ids = sp.load(folder), tokens(2, 40)
    assert torch.equal(loaded(ids).logits, result.model(ids).logits)
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    step = loaded(ids[:, 30:], cache=loaded(ids[:, :30]).cache)
    assert step.cache.get_seq_length() == 40


def test_a_fresh_process_computes_the_same_without_the_original(saved, tmp_path):
    _, result, folder = saved
    ids = tokens(1, 33)
    torch.save({"args": (ids,), "kwargs": {}}, tmp_path / "in.pt")
    words = [str(folder), str(tmp_path / "in.pt"), str(tmp_path / "out.pt"), "cpu", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "sparsify.hosts.reload", *words],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.allclose(found[0], result.model(ids).logits, atol=1e-5)


def test_a_module_without_transformers_loads_without_transformers(tmp_path):
    program = f"""
import sys
import torch
import sparsify as sp
sys.modules["transformers"] = None
model = sp.load({str(tmp_path / "out")!r})
print(model(torch.ones(1, 9, 16)).shape)
"""
    from tests.hosts.test_graph import Attention

    model, x = Attention().eval(), torch.randn(2, 40, 16)
    sp.export(sp.sparsify(_Plain(model), POLICY, (x,)), tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 9, 16])" in done.stdout


class _Plain(torch.nn.Module):
    """The one result of a module that returns several."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)["y"]


def test_options_of_other_folders_are_refused(saved):
    with pytest.raises(UsageError, match="take no dtype"):
        sp.load(saved[2], dtype="bfloat16")


@pytest.mark.parametrize("name", ["plan.json", *ARCHIVES])
def test_a_damaged_or_missing_file_is_refused(saved, tmp_path, name):
    folder = copied(saved[2], tmp_path / "damaged")
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(ArtefactError, match=name):
        sp.load(folder)
    (folder / name).unlink()
    with pytest.raises(ArtefactError):
        sp.load(folder)


def test_a_newer_archive_is_refused_with_what_to_do(saved, tmp_path):
    from sparsify.files import write_manifest
    from sparsify.hosts import archive

    folder = copied(saved[2], tmp_path / "newer")
    data = (folder / ARCHIVES[0]).read_bytes()
    old = json.dumps({"schema": archive.CALL_SCHEMA})[1:-1].encode()
    assert old in data
    with zipfile.ZipFile(folder / ARCHIVES[0]) as source:
        entries = {info: source.read(info) for info in source.infolist()}
    with zipfile.ZipFile(folder / ARCHIVES[0], "w") as target:
        for info, content in entries.items():
            target.writestr(info, content.replace(old, b'"schema": 99'))
    write_manifest(folder, {"kind": "pt2"})
    with pytest.raises(ArtefactError, match=r"schema 99, this version reads up to 1.*Update"):
        sp.load(folder)


def test_formats_that_a_model_does_not_have_are_refused(saved, tmp_path):
    with pytest.raises(UsageError, match="as 'hf'"):
        sp.export(saved[1], tmp_path / "out", format="hf")
    assert not (tmp_path / "out").exists()
