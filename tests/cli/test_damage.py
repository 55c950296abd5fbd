"""Damaged, foreign and newer files, full disks, read-only places, names that are no text.

Each ends in one sentence that says what is wrong, the right exit code, and nothing half-written.
"""

import errno
import json
import os
import random
import resource
import shutil
from pathlib import Path

import pytest

from sparsify.errors import SparsifyError, UsageError
from sparsify.manifests import check_manifest, write_manifest
from sparsify.plans import Plan
from sparsify.sources import load_model
from tests._util.commands import fork_cli
from tests._util.tiny_folders import save_llama
from tests._util.tiny_gguf import write_gguf
from tests.cli.conftest import MOBA

OURS = ("model.safetensors", "config.json", "plan.json", "report.json", "manifest.json")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def told(err):
    """The one sentence at the end of stderr, behind the progress that was told."""
    last = err.splitlines()[-1]
    assert last.startswith("sparsify: ") and err.count("sparsify: ") == 1, err
    assert "internal error" not in err and "Traceback" not in err, err
    return last


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A Llama of one layer, which is quickly rewritten."""
    return save_llama(tmp_path_factory.mktemp("small") / "small", layers=1)


def empty(path):
    path.write_bytes(b"")


def halved(path):
    os.truncate(path, path.stat().st_size // 2)


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def removed(path):
    path.unlink()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# Damaged folders that sparsify wrote.


@pytest.mark.parametrize("name", [*OURS, *TOKENIZER])
@pytest.mark.parametrize("damage", [empty, halved, flipped, removed])
def test_damaged_rewritten_folders(cli, llama, rewritten, tmp_path, name, damage):
    folder = shutil.copytree(rewritten, tmp_path / "moba")
    damage(folder / name)
    for words in (
        ("inspect", folder),
        ("verify", folder, "--against", llama, "--checks", "V1"),
        ("rewrite", folder, *MOBA, "-o", tmp_path / "out"),
    ):
        code, out, err = cli(*words)
        assert (code, out) == (2, ""), err
        assert name in told(err) or name == "manifest.json"
    assert names(tmp_path) == ["moba"]


@pytest.mark.parametrize("name", ["plan.json", "config.json", "model.safetensors"])
def test_a_file_of_another_rewrite_in_its_place(cli, llama, rewritten, tmp_path, name):
    folder = shutil.copytree(rewritten, tmp_path / "moba")
    words = ("--method", "moba", "--block-size", "16", "--topk", "2", "-o", tmp_path / "other")
    assert cli("rewrite", save_llama(tmp_path / "m", layers=2), *words)[0] == 0
    shutil.copy(tmp_path / "other" / name, folder / name)
    code, _, err = cli("verify", folder, "--against", llama)
    assert code == 2 and name in told(err)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "\x00", '{"schema": 1}', '{"layers": 3}'])
def test_damaged_plan_files(cli, llama, tmp_path, content):
    (tmp_path / "p.json").write_text(content)
    words = ("--plan", tmp_path / "p.json", "-o", tmp_path / "out")
    code, out, err = cli("rewrite", llama, *words)
    assert (code, out) == (2, "") and "p.json" in told(err) and names(tmp_path) == ["p.json"]


# Newer versions.


def newer(path, *place):
    data = json.loads(path.read_text())
    inner = data
    for key in place:
        inner = inner[key]
    inner["schema"] = 99
    path.write_text(json.dumps(data))


def test_a_newer_plan_file(cli, llama, rewritten, tmp_path):
    shutil.copy(rewritten / "plan.json", tmp_path)
    newer(tmp_path / "plan.json")
    code, _, err = cli("rewrite", llama, "--plan", tmp_path / "plan.json", "-o", tmp_path / "out")
    assert code == 2 and "has schema 99" in told(err) and "Update sparsify-attention" in err


@pytest.mark.parametrize(
    ("name", "place"),
    [("plan.json", ()), ("config.json", ("sparsify",)), ("config.json", ("sparsify", "plan"))],
)
def test_a_newer_folder(cli, llama, rewritten, tmp_path, name, place):
    folder = shutil.copytree(rewritten, tmp_path / "moba")
    newer(folder / name, *place)
    write_manifest(folder)
    code, _, err = cli("verify", folder, "--against", llama)
    assert code == 2 and "schema 99" in told(err) and "Update sparsify-attention" in err


def test_a_newer_manifest(cli, llama, rewritten, tmp_path):
    folder = shutil.copytree(rewritten, tmp_path / "moba")
    newer(folder / "manifest.json")
    code, _, err = cli("verify", folder, "--against", llama)
    assert code == 2 and "has schema 99" in told(err) and "Update sparsify-attention" in err


def test_a_newer_policy(cli, llama, tmp_path):
    text = "schema: 2\nmethod: {name: moba, block_size: 8, topk: 2}\n"
    (tmp_path / "p.yaml").write_text(text)
    for words in (
        ("policy", "validate", tmp_path / "p.yaml"),
        ("rewrite", llama, "--policy", tmp_path / "p.yaml", "-o", tmp_path / "out"),
    ):
        code, out, err = cli(*words)
        assert (code, out) == (2, "") and "schema" in told(err)


# Damaged models of others.


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", [empty, halved, removed])
def test_damaged_models(cli, llama, tmp_path, name, damage):
    folder = shutil.copytree(llama, tmp_path / "model")
    damage(folder / name)
    code, _, err = cli("rewrite", folder, *MOBA, "-o", tmp_path / "out")
    if (name, damage) == ("tokenizer.json", removed):  # a model without a tokenizer
        assert code in (0, 2)
    else:
        assert code == 2
    if code:
        assert str(folder) in told(err)
        assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("change", [("intermediate_size", 64), ("num_hidden_layers", 2)])
def test_weights_that_do_not_fit_are_told_in_one_sentence(cli, small, tmp_path, caplog, change):
    folder = shutil.copytree(small, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, change[0]: change[1]}))
    code, _, err = cli("inspect", folder)
    assert code == 2 and str(folder) in told(err)
    # transformers' own table of the weights that it made up would be a second message.
    assert not [record for record in caplog.records if record.name.startswith("transformers")]


def loads(path):
    """Whether the model loads; if not, its error is one of ours and names it."""
    try:
        load_model(str(path))
    except SparsifyError as error:
        assert isinstance(error, UsageError) and str(path.parent) in str(error)
        return False
    return True


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_flipped_bits_of_models_are_no_internal_errors(small, tmp_path, name):
    rng, loaded = random.Random(name), []
    for number in range(80):
        folder = shutil.copytree(small, tmp_path / str(number) / "model")
        content = bytearray((folder / name).read_bytes())
        place = rng.randrange(8 * min(len(content), 1500))
        content[place // 8] ^= 1 << place % 8
        (folder / name).write_bytes(content)
        loaded.append(loads(folder))
    assert set(loaded) == {True, False}


def test_damaged_gguf_files(tmp_path):
    source, rng = write_gguf(tmp_path / "m.gguf").read_bytes(), random.Random(1)
    damaged = tmp_path / "d.gguf"
    for length in (0, 3, 4, 20, 100, 1000, len(source) // 2, len(source) - 1):
        damaged.write_bytes(source[:length])
        assert not loads(damaged), length
    loaded = []
    for _ in range(40):
        content, place = bytearray(source), rng.randrange(8 * 1200)
        content[place // 8] ^= 1 << place % 8
        damaged.write_bytes(content)
        loaded.append(loads(damaged))
    assert set(loaded) == {True, False}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("block_count", "does not tell its llama.block_count"),
        ("embedding_length", "does not tell its llama.embedding_length"),
        ("attention.head_count", "does not tell its llama.attention.head_count"),
    ],
)
def test_sizes_that_a_gguf_file_does_not_tell_are_not_made_up(tmp_path, name, part):
    path = write_gguf(tmp_path / "m.gguf")
    content = path.read_bytes()
    path.write_bytes(content.replace(f"llama.{name}".encode(), f"llama.{name[:-1]}_".encode(), 1))
    with pytest.raises(UsageError, match=part):
        load_model(str(path))


# Full disks.


def limited(n_bytes):
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))


@pytest.mark.parametrize(
    ("n_bytes", "over"), [(0, False), (100, True), (3000, False), (20_000, True), (50_000, False)]
)
def test_a_full_disk_while_a_folder_is_written(small, rewritten, tmp_path, n_bytes, over):
    target = tmp_path / "deep" / "out"
    if over:
        shutil.copytree(rewritten, target)
    words = ("rewrite", small, *MOBA, "-o", target, "--force")
    code, err = fork_cli(*words, before=limited(n_bytes))
    assert code == 2 and told(err) == f"sparsify: Cannot write {target}: File too large."
    if over:
        check_manifest(target)
        assert names(target.parent) == ["out"] and len(Plan.load(target / "plan.json")) == 3
    else:
        assert names(tmp_path) == []


def test_room_enough_is_no_fault(small, tmp_path):
    words = ("rewrite", small, *MOBA, "-o", tmp_path / "out")
    assert fork_cli(*words, before=limited(1 << 20))[0] == 0
    check_manifest(tmp_path / "out")


def test_a_full_disk_while_a_selection_is_written(llama, rewritten, tmp_path):
    dump = tmp_path / "chosen.npz"
    dump.write_text("old")
    words = ("verify", rewritten, "--against", llama, "--checks", "V6", "--seq", "64")
    code, err = fork_cli(*words, "--dump-selection", dump, before=limited(200))
    assert code == 2 and told(err) == f"sparsify: Cannot write {dump}: File too large."
    assert names(tmp_path) == ["chosen.npz"] and dump.read_text() == "old"


def test_a_full_disk_while_an_artefact_is_checked(llama, rewritten):
    words = ("verify", rewritten, "--against", llama, "--checks", "V7")
    code, err = fork_cli(*words, before=limited(200))
    assert code == 2 and "File too large" in told(err)


# Places that take no files.


@pytest.mark.parametrize("place", ["/proc", "/sys", "/proc/self/fd"])
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_read_only_places_are_refused_before_the_work(cli, llama, rewritten, place):
    code, out, err = cli("rewrite", llama, *MOBA, "-o", f"{place}/out")
    assert (code, out) == (2, "") and f"Cannot write {place}/out: " in told(err)
    assert "loading" not in err
    words = ("--checks", "V6", "--dump-selection", f"{place}/x.npz")
    code, out, err = cli("verify", rewritten, "--against", llama, *words)
    assert (code, out) == (2, "") and f"Cannot write {place}/x.npz: " in told(err)
    assert "loading" not in err


@pytest.mark.parametrize(
    ("number", "over"), [(errno.EROFS, True), (errno.EACCES, False), (errno.EDQUOT, True)]
)
@pytest.mark.parametrize("call", ["mkdir", "write_text", "rename"])
def test_disks_that_turn_read_only_or_full(
    cli, small, rewritten, tmp_path, monkeypatch, number, call, over
):
    target, real = tmp_path / "out", getattr(Path, call)
    if over:
        shutil.copytree(rewritten, target)

    def fails(self, *args, **more):
        if self.is_relative_to(tmp_path):
            raise OSError(number, os.strerror(number), str(self))
        return real(self, *args, **more)

    monkeypatch.setattr(Path, call, fails)
    code, _, err = cli("rewrite", small, *MOBA, "-o", target, "--force")
    assert code == 2 and told(err) == f"sparsify: Cannot write {target}: {os.strerror(number)}."
    monkeypatch.undo()
    assert names(tmp_path) == (["out"] if over else [])
    if over:
        check_manifest(target)
        assert len(Plan.load(target / "plan.json")) == 3


# Names that are no text.


def no_text(name):
    return os.fsdecode(b"\xff\xfe" + name.encode())


def test_models_and_targets_whose_names_are_no_text(llama, rewritten, tmp_path):
    shutil.copytree(llama, tmp_path / no_text("model"))
    before = names(tmp_path)
    for words in (
        ("inspect", tmp_path / no_text("model")),
        ("rewrite", tmp_path / no_text("model"), *MOBA, "-o", tmp_path / "out"),
        ("rewrite", llama, *MOBA, "-o", tmp_path / no_text("out")),
        ("rewrite", llama, *MOBA, "-o", tmp_path / no_text("deep") / "out"),
        ("verify", rewritten, "--against", tmp_path / no_text("model"), "--checks", "V1"),
    ):
        code, err = fork_cli(*words)
        assert code == 2 and "not valid UTF-8" in told(err) and "Rename it" in err
        assert words[0] != "rewrite" or "loading" not in err
    assert names(tmp_path) == before


def test_a_folder_around_whose_name_is_no_text(small, tmp_path, monkeypatch):
    shutil.copytree(small, tmp_path / no_text("x") / "model")
    monkeypatch.chdir(tmp_path / no_text("x"))
    assert fork_cli("rewrite", "model", *MOBA, "-o", tmp_path / "out")[0] == 0
    code, err = fork_cli("rewrite", "model", *MOBA, "-o", "out")
    assert code == 2 and "not valid UTF-8" in told(err) and names(Path.cwd()) == ["model"]


def test_other_files_may_have_any_name(small, tmp_path):
    source = write_gguf(tmp_path / no_text("m.gguf"))
    policy, prompts = tmp_path / no_text("p.yaml"), tmp_path / no_text("t.txt")
    policy.write_text("method: {name: moba, block_size: 8, topk: 2}\n")
    prompts.write_text("The quick brown fox jumps over the lazy dog. " * 9)
    out, dump = tmp_path / "out", tmp_path / no_text("s.npz")
    assert fork_cli("policy", "validate", policy)[0] == 0
    assert fork_cli("rewrite", source, "--policy", policy, "-o", out)[0] == 0
    assert Plan.load(out / "plan.json").model == "��m"
    assert fork_cli("rewrite", small, "--policy", policy, "-o", tmp_path / "two", "--json")[0] == 0
    words = ("--prompts", prompts, "--dump-selection", dump, "--checks", "V6", "--seq", "64")
    code, err = fork_cli("verify", tmp_path / "two", "--against", small, *words)
    assert code == 0 and dump.stat().st_size > 0, err


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "{}"),
        ("inspect", "{}:make"),
        ("policy", "show", "{}.yaml"),
        ("rewrite", "m", "--plan", "{}.json", "-o", "out"),
        ("rewrite", "m", "--policy", "{}.yaml", "-o", "out"),
        ("verify", "{}", "--against", "m"),
        ("verify", "m", "--against", "m", "--prompts", "{}"),
    ],
)
def test_missing_files_whose_names_are_no_text(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    code, err = fork_cli(*(word.replace("{}", no_text("x")) for word in words))
    assert code == 2 and "\\udcff\\udcfex" in told(err)
