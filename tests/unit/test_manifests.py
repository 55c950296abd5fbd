"""The manifest finds every damaged, shortened or missing file."""

import json
import os
import shutil
from pathlib import Path

import pytest

from sparsify import manifests
from sparsify.errors import ArtefactError
from sparsify.manifests import MANIFEST, check_manifest, intact, write_manifest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.bin").write_bytes(b"abc" * 1000)
    (tmp_path / "sub" / "b.txt").write_text("ä")
    write_manifest(tmp_path, {"kind": "test", "schema": 99})
    return tmp_path


def edit(folder, **changes):
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_sound_folder(folder):
    data = check_manifest(folder)
    assert data["schema"] == 1 and data["kind"] == "test"
    assert sorted(data["files"]) == ["a.bin", "sub/b.txt"]
    assert {"sparsify-attention", "python", "torch", "transformers"} <= set(data["versions"])


@pytest.mark.parametrize(
    "name",
    ["notes.md", "LICENSE", "curve.png", "log.txt", "sub/README", ".git/config.json", ".x.py"],
)
def test_files_of_the_user_are_allowed(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("mine")
    check_manifest(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model-00002.safetensors",
        "pytorch_model.bin",
        "model.safetensors.index.json",
        "adapter_config.json",
        "modeling.PY",
        "sub/config.json",
        "new/deeper/model.gguf",
        "vocab.txt",
        "chat_template.jinja",
    ],
)
def test_files_that_a_loader_might_read_are_refused(folder, name):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("{}")
    with pytest.raises(ArtefactError, match=f"holds {name}, which `sparsify rewrite` did not wr"):
        check_manifest(folder)
    write_manifest(folder)
    check_manifest(folder)


def test_symbolic_links_stand_for_what_they_point_to(folder, tmp_path_factory):
    blobs = tmp_path_factory.mktemp("blobs")
    shutil.move(folder / "a.bin", blobs / "1")
    (folder / "a.bin").symlink_to(blobs / "1")
    check_manifest(folder)
    (blobs / "1").write_bytes(b"abd" * 1000)
    with pytest.raises(ArtefactError, match=r"a\.bin was changed"):
        check_manifest(folder)
    (blobs / "1").unlink()
    with pytest.raises(ArtefactError, match=r"a\.bin is missing"):
        check_manifest(folder)


def test_a_link_to_a_stranger_is_a_stranger(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "x"
    other.write_text("{}")
    (folder / "config.json").symlink_to(other)
    with pytest.raises(ArtefactError, match=r"holds config\.json"):
        check_manifest(folder)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_folder_or_a_pipe_in_place_of_a_file(folder, make):
    (folder / "a.bin").unlink()
    make(folder / "a.bin")
    with pytest.raises(ArtefactError, match=r"a\.bin is missing"):
        check_manifest(folder)


def test_a_file_that_cannot_be_read(folder, monkeypatch):
    def fails(path):
        raise OSError(5, os.strerror(5), str(path))

    monkeypatch.setattr(manifests, "_sha256", fails)
    with pytest.raises(ArtefactError, match=r"Cannot read .*a\.bin: Input/output error\."):
        check_manifest(folder)


@pytest.mark.parametrize("name", ["n" * 300, "\0", "\ud800", "a.bin/"])
def test_impossible_names_are_missing_files(folder, name):
    facts = json.loads((folder / MANIFEST).read_text())["files"]
    edit(folder, files={**facts, name: {"bytes": 3, "sha256": ""}})
    with pytest.raises(ArtefactError):
        check_manifest(folder)


def replaced(folder):
    new = shutil.copytree(folder, folder.with_name("new"))
    folder.rename(folder.with_name("old"))
    new.rename(folder)


def rewritten(folder):
    (folder / "a.bin").write_bytes(b"abcd")


def removed(folder):
    (folder / "sub" / "b.txt").unlink()


def rehashed(folder):
    edit(folder, versions={})


@pytest.mark.parametrize("change", [replaced, rewritten, removed, rehashed])
def test_files_that_change_while_they_are_read_are_told(folder, change):
    with pytest.raises(ArtefactError, match="was changed while it was read"), intact(folder):
        change(folder)


def test_files_that_do_not_change_are_hashed_once(folder, monkeypatch):
    real, hashed = manifests._sha256, []
    monkeypatch.setattr(manifests, "_sha256", lambda path: hashed.append(path) or real(path))
    with intact(folder), intact(str(folder / "sub" / "..")):
        (folder / "notes.md").write_text("mine")
    assert [path.name for path in hashed] == ["a.bin", "b.txt"]
    with intact(folder):
        pass
    assert len(hashed) == 4


def test_another_folder_inside_is_checked_too(folder, tmp_path_factory):
    with pytest.raises(ArtefactError, match="has no manifest"), intact(folder):  # noqa: SIM117
        with intact(tmp_path_factory.mktemp("other")):
            pass


def test_an_error_inside_stays_what_it_is(folder):
    with pytest.raises(ZeroDivisionError), intact(folder):
        rewritten(folder)
        raise ZeroDivisionError


def test_a_changed_byte(folder):
    content = bytearray((folder / "a.bin").read_bytes())
    content[1500] ^= 1
    (folder / "a.bin").write_bytes(content)
    with pytest.raises(ArtefactError, match=r"a\.bin was changed"):
        check_manifest(folder)


def test_a_shortened_file(folder):
    (folder / "a.bin").write_bytes(b"abc")
    with pytest.raises(ArtefactError, match=r"a\.bin has 3 bytes instead of 3000"):
        check_manifest(folder)


def test_a_missing_file(folder):
    (folder / "sub" / "b.txt").unlink()
    with pytest.raises(ArtefactError, match=r"sub/b\.txt is missing"):
        check_manifest(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "reads up to 1"),
        ({"schema": "1"}, "not a manifest"),
        ({"files": []}, "not a manifest"),
        ({"files": {"a.bin": 3}}, "not a manifest"),
        ({"files": {"../a": {"bytes": 1, "sha256": ""}}}, "not a manifest"),
        ({"files": {"/etc/passwd": {"bytes": 1, "sha256": ""}}}, "not a manifest"),
    ],
)
def test_a_wrong_manifest(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(ArtefactError, match=message):
        check_manifest(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_damaged_manifest(folder, content):
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(ArtefactError, match="damaged"):
        check_manifest(folder)


def test_no_manifest_and_no_folder(tmp_path):
    with pytest.raises(ArtefactError, match=r"has no manifest\.json"):
        check_manifest(tmp_path)
    with pytest.raises(ArtefactError, match="There is no folder"):
        check_manifest(tmp_path / "none")
