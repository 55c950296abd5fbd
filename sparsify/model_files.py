"""MODEL arguments of estimates: what a config, a GGUF file or a cached id says of a model.

Only metadata is read: no weights, no torch, no transformers, and nothing is downloaded.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparsify.cost_model.model_config import read_config
from sparsify.cost_model.model_shape import ModelShape
from sparsify.errors import UsageError
from sparsify.gguf_files import read_gguf_head

__all__ = ["cached_config", "read_model"]

_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_FILES = (".gguf", ".json", ".onnx", ".pt2", ".safetensors", ".yaml", ".yml")

# What llama.cpp calls architectures, where transformers has another name.
_ARCHITECTURES = {
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
    "gptneox": "gpt_neox",
    "minimax-m2": "minimax_m2",
    "phi2": "phi",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
}
# Keys of the GGUF specification behind the architecture's name, and the same in a config.json.
_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.kv_lora_rank": "kv_lora_rank",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
}


def read_model(source: str | Path | Mapping[str, Any]) -> ModelShape:
    """The model that `source` describes.

    Args:
        source: a folder with a config.json, such a file, a .gguf file, the id of a model in the
            local Hugging Face cache, or the fields of a config.

    Raises:
        UsageError: there is no such thing, or it does not say enough.
    """
    if isinstance(source, Mapping):
        return read_config(source)
    path = Path(source)
    if path.is_dir():
        return _read_folder(path)
    if path.exists():
        return _read_file(path)
    text = str(source)
    if _ID.fullmatch(text) is None or text.lower().endswith(_FILES):
        raise UsageError(f"There is no file or folder {text}.")
    config = cached_config(text)
    if config is None:
        raise UsageError(
            f"There is no folder {text}, and no model of that id in the local cache.",
            f"To download its config, run: hf download {text} config.json",
        )
    return read_config(config, name=text)


def cached_config(model_id: str) -> Path | None:
    """The config.json of a model in the local Hugging Face cache, at its main revision."""
    folder = _cache() / f"models--{model_id.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    if re.fullmatch(r"[0-9a-zA-Z]+", revision) is None:
        return None
    file = folder / "snapshots" / revision / "config.json"
    return file if file.is_file() else None


def _cache() -> Path:
    """Where Hugging Face keeps models; the variables are its own, in its order."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return caches / "huggingface" / "hub"


def _read_folder(path: Path) -> ModelShape:
    if (path / "config.json").is_file():
        return read_config(path)
    gguf = sorted(path.glob("*.gguf"))
    hint = f"Give the file {gguf[0]}." if gguf else "Expected a Hugging Face model folder."
    raise UsageError(f"{path} has no config.json.", hint)


def _read_file(path: Path) -> ModelShape:
    suffix = path.suffix.lower()
    if suffix == ".json":
        return read_config(path)
    if suffix == ".gguf":
        return _read_gguf(path)
    raise UsageError(
        f"{path} does not describe a model.",
        "Expected a folder with a config.json, such a file, a .gguf file, or a cached id.",
    )


def _read_gguf(path: Path) -> ModelShape:
    told, shapes = read_gguf_head(path)
    kind = str(told["general.architecture"])
    if any(key.startswith((f"{kind}.ssm.", f"{kind}.wkv.")) for key in told):
        raise UsageError(
            f"{path}: recurrent layers are not read from GGUF files.", "Give a config."
        )
    model = read_config(_config_of(path, kind, told, shapes), name=path.stem)
    held = sum(math.prod(shape) for name, shape in shapes.items() if "rope_" not in name)
    said = [*model.assumptions, "Weights are counted with the bytes of the GGUF file."]
    if held != model.total_params:
        said.append(f"The file holds {held} parameters; its sizes make {model.total_params}.")
    size = path.stat().st_size / held
    return replace(model, weight_bytes_per_param=size, assumptions=tuple(said))


def _config_of(
    path: Path, kind: str, told: Mapping[str, Any], shapes: Mapping[str, list[int]]
) -> dict[str, Any]:
    """What a config.json would say."""
    config: dict[str, Any] = {"model_type": _ARCHITECTURES.get(kind, kind), "dtype": "bfloat16"}
    for key, name in _KEYS.items():
        full = f"{kind}.{key}"
        if full not in told:
            continue
        if told[full] is None:
            raise UsageError(f"{path}: {full} differs by layer, which is not read.")
        config[name] = told[full]
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise UsageError(f"{path} is damaged: it holds no embedding.")
    config["vocab_size"] = shapes["token_embd.weight"][1]
    config["tie_word_embeddings"] = "output.weight" not in shapes
    return config
