"""Folders of exported programs: written whole, read in a fresh process, damaged, newer."""

import contextlib
import io
import json
import pickle
import subprocess
import sys
import zipfile

import pytest
import torch

import sparsify as sp
from sparsify.errors import ArtefactError, UsageError
from sparsify.hosts.archive import ARCHIVES, CALL_SCHEMA
from sparsify.manifests import write_manifest
from tests._util.commands import ROOT, environment
from tests._util.tiny_models import CACHE, build, tokens

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


def rewritten_archive(folder, change, **more):
    """The first archive with other contents and more entries, under a manifest that names it."""
    with zipfile.ZipFile(folder / ARCHIVES[0]) as source:
        entries = {info.filename: source.read(info) for info in source.infolist()}
    with zipfile.ZipFile(folder / ARCHIVES[0], "w") as target:
        for name, content in entries.items():
            target.writestr(name, change(name, content))
        for name, content in more.items():
            target.writestr(f"archive/{name}", content)
    write_manifest(folder, {"kind": "pt2"})


def unchanged(name, content):
    return content


class Trap:
    """An object that writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def pickled(trap):
    data = io.BytesIO()
    torch.save(trap, data)
    return data.getvalue()


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
    step = loaded(ids[:, 30:], **{CACHE: loaded(ids[:, :30])[CACHE]})
    assert step[CACHE].get_seq_length() == 40


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
    folder = copied(saved[2], tmp_path / "newer")
    data = (folder / ARCHIVES[0]).read_bytes()
    old = json.dumps({"schema": 1})[1:-1].encode()  # without learned indexers
    assert old in data
    rewritten_archive(folder, lambda name, content: content.replace(old, b'"schema": 99'))
    with pytest.raises(ArtefactError, match=rf"schema 99, .* up to {CALL_SCHEMA}.*Update"):
        sp.load(folder)


def test_formats_that_a_model_does_not_have_are_refused(saved, tmp_path):
    with pytest.raises(UsageError, match="as 'hf'"):
        sp.export(saved[1], tmp_path / "out", format="hf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["example inputs", "a weight", "a constant", "a library"])
def test_an_archive_that_torch_would_unpickle_is_refused_unread(saved, tmp_path, place):
    folder, trap = copied(saved[2], tmp_path / "strange"), tmp_path / "sprung"
    data = pickled(Trap(trap))

    def change(name, content):
        if place == "example inputs" and "sample_inputs" in name:
            return data
        if place == "a weight" and name.endswith("weights_config.json"):
            return content.replace(b'"use_pickle": false', b'"use_pickle": true', 1)
        if place == "a weight" and name.endswith("weight_0"):
            return data
        return content

    more = {
        "a constant": {"data/constants/opaque_obj_0": pickle.dumps(Trap(trap))},
        "a library": {"data/aotinductor/model/wrapper.so": b"code"},
    }
    rewritten_archive(folder, change, **more.get(place, {}))
    with pytest.raises(ArtefactError, match="could run code"):
        sp.load(folder)
    assert not trap.exists()


def test_the_trap_springs_where_nobody_looks(saved, tmp_path):
    folder, trap = copied(saved[2], tmp_path / "strange"), tmp_path / "sprung"
    data = pickled(Trap(trap))
    rewritten_archive(folder, lambda name, content: data if "sample_inputs" in name else content)
    with contextlib.suppress(Exception):
        torch.export.load(folder / ARCHIVES[0])
    assert trap.exists()


def test_an_archive_written_anew_with_the_same_entries_is_loaded(saved, tmp_path):
    folder = copied(saved[2], tmp_path / "same")
    rewritten_archive(folder, unchanged)
    ids = tokens(1, 20)
    assert torch.equal(sp.load(folder)(ids).logits, saved[1].model(ids).logits)


def test_an_unknown_class_of_model_is_refused(saved, tmp_path):
    folder = copied(saved[2], tmp_path / "class")
    rewritten_archive(folder, lambda _, content: content.replace(b"LanguageGraphModel", b"Other"))
    with pytest.raises(ArtefactError, match="unknown class 'Other'"):
        sp.load(folder)


def other_call(folder, **changes):
    """The first archive called otherwise: its document changed, under a manifest that names it."""

    def change(name, content):
        if not name.endswith("/sparsify.json"):
            return content
        return json.dumps({**json.loads(content), **changes})

    rewritten_archive(folder, change)


@pytest.mark.parametrize(
    "changes",
    [
        {"tied": None},
        {"tied": [["no.such", "model.embed_tokens.weight"]]},
        {"guards": None},
        {"guards": ["import os"]},
        {"signature": [["input_ids"]]},
        {"signature": [["input_ids", "NO_KIND", []]]},
        {"schema": "1"},
    ],
)
def test_an_archive_with_a_damaged_call_is_refused_in_one_sentence(saved, tmp_path, changes):
    folder = copied(saved[2], tmp_path / "out")
    other_call(folder, **changes)
    with pytest.raises(ArtefactError, match=r"model.pt2 cannot be read"):
        sp.load(folder)


@pytest.mark.parametrize(
    "policy",
    [sp.Policy.moba(block_size=16, topk=2), sp.Policy.msa(block_size=8, topk=2)],
)
def test_programs_of_another_plan_are_refused(saved, tmp_path, policy):
    folder = copied(saved[2], tmp_path / "out")
    sp.load(folder)
    other = sp.sparsify(build("llama", tie_word_embeddings=True), policy, host="graph")
    (folder / "plan.json").write_text(json.dumps(other.plan.to_json()))
    write_manifest(folder, {"kind": "pt2"})
    with pytest.raises(ArtefactError, match="was not rewritten by this plan"):
        sp.load(folder)
