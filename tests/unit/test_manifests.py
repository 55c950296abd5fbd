"""The manifest finds every damaged, shortened or missing file."""

import json

import pytest

from sparsify.errors import ArtefactError
from sparsify.files import MANIFEST, check_manifest, write_manifest


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


def test_files_of_the_user_are_allowed(folder):
    (folder / "notes.md").write_text("mine")
    check_manifest(folder)


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
