"""MODEL arguments: what loads, and one clear sentence for everything that does not."""

import json
import shutil
import sys

import pytest
import torch

from sparsify.errors import CaptureError, MissingExtraError, UsageError
from sparsify.sources import load_model
from tests._util.tiny_folders import save_bert, save_llama, tiny_llama
from tests._util.tiny_gguf import write_gguf


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("models") / "llama", layers=2)


@pytest.fixture
def copy(llama, tmp_path):
    return shutil.copytree(llama, tmp_path / "copy")


def test_a_folder(llama):
    loaded = load_model(str(llama))
    assert (loaded.name, loaded.kind) == ("llama", "hf")
    assert type(loaded.model).__name__ == "LlamaForCausalLM" and not loaded.model.training
    assert loaded.tokenizer("ab")["input_ids"] and loaded.args is None
    for key, value in tiny_llama(layers=2).state_dict().items():
        assert torch.equal(loaded.model.state_dict()[key], value)


def test_the_tokenizer_can_be_left_out_or_missing(llama, copy):
    assert load_model(str(llama), with_tokenizer=False).tokenizer is None
    for path in copy.glob("tokenizer*"):
        path.unlink()
    assert load_model(str(copy)).tokenizer is None


@pytest.mark.parametrize(("dtype", "kept"), [("auto", "bfloat16"), ("float32", "float32")])
def test_dtype(tmp_path, dtype, kept):
    folder = save_llama(tmp_path / "m", layers=1, dtype=torch.bfloat16)
    model = load_model(str(folder), dtype=dtype).model
    assert next(model.parameters()).dtype == getattr(torch, kept)
    with pytest.raises(UsageError, match="Unknown dtype"):
        load_model(str(folder), dtype="float8")


def test_the_class_that_the_config_names(tmp_path):
    folder = save_bert(tmp_path / "bert")
    assert type(load_model(str(folder)).model).__name__ == "BertForMaskedLM"


def edit(folder, name, change):
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "parts"),
    [
        ("model.safetensors", lambda b: b[: len(b) // 2], ["model.safetensors is damaged"]),
        ("model.safetensors", lambda b: b"", ["model.safetensors is damaged"]),
        ("model.safetensors", lambda b: b"x" * 64, ["model.safetensors is damaged"]),
        ("config.json", lambda b: b[:-5], ["config.json is damaged", "JSON"]),
        ("config.json", lambda b: b"[]", ["config.json is damaged"]),
        ("config.json", lambda b: b"\xff", ["config.json is damaged"]),
        ("config.json", lambda b: b"{}", ["config", "model_type"]),
        ("config.json", lambda b: b.replace(b'"llama"', b'"lama"'), ["config", "lama"]),
        ("config.json", lambda b: b.replace(b'_layers": 2', b'_layers": 3'), ["lacks 9 weights"]),
        (
            "config.json",
            lambda b: b.replace(b'_size": 48', b'_size": 64'),
            ["its weight model.layers.0.mlp.", "asks for ["],
        ),
        ("tokenizer.json", lambda b: b[:100], ["tokenizer"]),
    ],
)
def test_damage_is_named(copy, name, change, parts):
    edit(copy, name, change)
    with pytest.raises(UsageError) as caught:
        load_model(str(copy))
    message = str(caught.value)
    assert all(part in message for part in (*parts, str(copy))), message
    assert "\n" not in message and len(message) < 500


def test_incomplete_folders(copy, tmp_path):
    (copy / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="holds no weights"):
        load_model(str(copy))
    (copy / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match="pickles"):
        load_model(str(copy))
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(UsageError, match=r"model-1\.safetensors is missing"):
        load_model(str(copy))
    index.write_text("{")
    with pytest.raises(UsageError, match=r"index\.json is damaged"):
        load_model(str(copy))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"has no config\.json"):
        load_model(str(tmp_path / "empty"))
    (tmp_path / "empty" / "m.gguf").touch()
    with pytest.raises(UsageError, match=r"Give the file .*m\.gguf"):
        load_model(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("m.txt", b"text", UsageError, "is not a model"),
        ("m", b"", UsageError, "is not a model"),
        ("m.pt2", b"", CaptureError, "cannot be read by this version yet"),
        ("m.onnx", b"", CaptureError, "cannot be read by this version yet"),
        ("m.pth", b"", UsageError, "is a pickle"),
        ("m.safetensors", b"", UsageError, "Give the folder"),
        ("config.json", b"{}", UsageError, "Give the folder"),
        ("m.gguf", b"text", UsageError, "does not begin as a GGUF"),
        ("m.gguf", b"GGUF" + b"\xff" * 200, UsageError, "is damaged"),
        ("m.gguf", b"GGUF", UsageError, "is damaged"),
    ],
)
def test_files_that_are_no_models(tmp_path, name, content, error, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(error, match=message) as caught:
        load_model(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["none.gguf", "./none", "/none/at/all", "a/b/c", "", "x y", "a:"])
def test_nothing_there(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"There is no|has no config"):
        load_model(spec)


def test_an_id_outside_the_cache_gets_the_command(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"run: hf download some-org/some-model$"):
        load_model("some-org/some-model")


def test_an_id_in_the_cache(llama, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--some-org--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("abc")
    shutil.copytree(llama, home / "snapshots" / "abc")
    loaded = load_model("some-org/tiny")
    assert (loaded.name, loaded.kind) == ("some-org/tiny", "hf") and loaded.tokenizer
    (home / "snapshots" / "abc" / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"holds no weights.*hf download some-org/tiny$"):
        load_model("some-org/tiny")


FACTORIES = """
import torch
class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
ready = Model()
def plain(): return Model()
def with_args(): return Model(), (torch.ones(1, 2),)
def with_both(): return Model(), [], {"input": torch.ones(1, 2)}
def case(): return {"model": Model(), "args": (torch.ones(1, 2),), "kwargs": {}, "note": 1}
def broken(): raise RuntimeError("first line\\nsecond line")
def leaves(): raise SystemExit(7)
def wrong(): return 3
def wrong_pair(): return Model(), 3
number = 3
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "some_factories.py").write_text(FACTORIES)
    (tmp_path / "broken_module.py").write_text("import not_there_at_all")
    (tmp_path / "raising_module.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("some_factories", "broken_module", "raising_module"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("plain", None, None),
        ("ready", None, None),
        ("Model", None, None),
        ("with_args", 1, []),
        ("with_both", 0, ["input"]),
        ("case", 1, []),
    ],
)
def test_factories(factories, name, args, kwargs):
    loaded = load_model(f"some_factories:{name}")
    assert loaded.kind == "python" and loaded.name == f"some_factories:{name}"
    assert type(loaded.model).__name__ == "Model" and not loaded.model.training
    assert args == (None if loaded.args is None else len(loaded.args))
    assert kwargs == (None if loaded.kwargs is None else list(loaded.kwargs))


def test_factories_obey_the_dtype(factories):
    model = load_model("some_factories:plain", dtype="bfloat16").model
    assert model.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("not_there_at_all:f", "There is no Python module not_there_at_all"),
        ("not_there_at_all.sub:f", "There is no Python module not_there_at_all"),
        ("broken_module:f", "Importing broken_module raised ModuleNotFoundError"),
        ("raising_module:f", "Importing raising_module raised ZeroDivisionError: division by zero"),
        ("some_factories:none", "The module some_factories has no none"),
        ("some_factories:number", "is a int; expected a function"),
        ("some_factories:broken", "raised RuntimeError: first line second line"),
        ("some_factories:leaves", "raised SystemExit: 7"),
        ("some_factories:wrong", "returned int; expected a torch.nn.Module"),
        ("some_factories:wrong_pair", "returned tuple; expected a torch.nn.Module"),
    ],
)
def test_factories_that_fail(factories, spec, message):
    with pytest.raises(UsageError) as caught:
        load_model(spec)
    assert message in str(caught.value)


@pytest.mark.parametrize("missing", ["transformers", "safetensors"])
def test_a_missing_extra_is_named(llama, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtraError, match=rf'{missing} is not .*"sparsify-attention\[hf\]"'):
        load_model(str(llama))


def test_a_missing_gguf_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match="gguf is not installed"):
        load_model(str(tmp_path / "m.gguf"))


def test_progress_is_told(llama):
    said = []
    load_model(str(llama), progress=said.append)
    assert said == ["loading llama"]


def test_gguf(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    loaded = load_model(str(path))
    assert (loaded.name, loaded.kind) == ("tiny", "gguf")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert loaded.tokenizer("ab")["input_ids"]
    loaded.model.save_pretrained(tmp_path / "saved")  # plain weights, nothing of GGUF is left
    assert load_model(str(tmp_path / "saved")).kind == "hf"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 4])
    with pytest.raises(UsageError, match=r"tiny\.gguf is damaged"):
        load_model(str(path))


def test_a_gguf_tokenizer_that_cannot_be_converted_is_warned_of(tmp_path, caplog):
    path = write_gguf(tmp_path / "tiny.gguf", tokenizer=False)
    assert load_model(str(path)).tokenizer is None
    assert "going on without it" in caplog.text
