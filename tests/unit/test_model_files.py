"""Where estimates find models, without loading any."""

import json
import subprocess
import sys

import pytest

from sparsify.errors import UsageError
from sparsify.model_files import cached_config, read_model
from tests.cost_model.test_model_config import LLAMA

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A Hugging Face cache with one model, acme/tiny."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "models--acme--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(REVISION)
    snapshot = folder / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA))
    return folder


def test_a_cached_id_is_read(cache):
    model = read_model("acme/tiny")
    assert (model.name, len(model.layers)) == ("acme/tiny", 4)


def test_other_places_of_the_cache(cache, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HOME")
    assert cached_config("acme/tiny") is None
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert cached_config("acme/tiny") is not None
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cached_config("acme/tiny") is None


@pytest.mark.parametrize("damage", ["no refs", "odd refs", "no config"])
def test_a_cache_without_the_model(cache, damage):
    if damage == "no refs":
        (cache / "refs" / "main").unlink()
    elif damage == "odd refs":
        (cache / "refs" / "main").write_text("../../../etc")
    else:
        (cache / "snapshots" / REVISION / "config.json").unlink()
    with pytest.raises(UsageError, match="no model of that id in the local cache") as caught:
        read_model("acme/tiny")
    assert "hf download acme/tiny" in caught.value.hint


def test_folders_files_and_fields_are_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    by_folder, by_file = read_model(tmp_path), read_model(str(tmp_path / "config.json"))
    assert by_folder == by_file
    assert by_folder.layers == read_model(LLAMA).layers


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no/such/thing/at/all", "no file or folder"),
        ("missing.gguf", "no file or folder"),
        ("package.module:factory", "no file or folder"),
    ],
)
def test_what_is_not_there(name, said, cache):
    with pytest.raises(UsageError, match=said):
        read_model(name)


def test_files_and_folders_that_describe_nothing(tmp_path):
    (tmp_path / "weights.pt").write_bytes(b"x")
    with pytest.raises(UsageError, match="does not describe a model"):
        read_model(tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"has no config\.json"):
        read_model(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="damaged"):
        read_model(tmp_path / "a.gguf")
    with pytest.raises(UsageError, match=r"Give the file .*a\.gguf"):
        read_model(tmp_path)


def test_the_head_of_a_gguf_file_is_a_config(tmp_path):
    pytest.importorskip("gguf")
    from tests._util.tiny_gguf import HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, write_gguf

    path = write_gguf(tmp_path / "tiny.gguf")
    model = read_model(path)
    vocabulary = model.embedding_params // HIDDEN
    same = dict(
        model_type="llama",
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=vocabulary,
        max_position_embeddings=256,
        dtype="float32",
    )
    assert model.layers == read_model(same).layers
    assert model.total_params == read_model(same).total_params
    assert not any("parameters" in sentence for sentence in model.assumptions)
    # float32 weights, and the head with the vocabulary.
    assert model.weight_bytes() == path.stat().st_size
    assert 4 < model.weight_bytes_per_param < 6


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from sparsify.model_files import read_model; "
        "print([m for m in ('torch', 'transformers', 'triton', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
