"""A rewritten transformers model as a folder: weights, config, tokenizer, plan and report."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from sparsify.errors import ArtefactError
from sparsify.exporters.folder import artefact, saved_again
from sparsify.files import check_utf8
from sparsify.hosts import transformers as host
from sparsify.manifests import intact

__all__ = ["FORMAT", "load", "save"]

FORMAT = "hf"


def save(model: Any, directory: Path, **contents: Any) -> Path:
    """Write the folder; `contents` are those of `sparsify.exporters.folder.artefact`.

    Raises:
        UsageError: the target exists, is not empty and `force` is not given.
    """
    with artefact(directory, "transformers", **contents) as folder:
        model.save_pretrained(folder)
    return directory


def load(directory: Path, **options: Any) -> torch.nn.Module:
    """Load a folder written by `save`, or by a rewritten model's `save_pretrained`, which leaves no
    manifest to hold the files against, and apply its plan.

    Args:
        options: passed to `from_pretrained`, e.g. `dtype`, `device_map`.

    Raises:
        ArtefactError: not such a folder, or a file is missing or damaged.
        UsageError: the path is not valid UTF-8.
    """
    if not directory.is_dir():
        raise ArtefactError(f"There is no folder {directory}.")
    check_utf8(directory)
    with contextlib.nullcontext() if saved_again(directory) else intact(directory):
        model: torch.nn.Module = _load(directory, options)
        return model


def _load(directory: Path, options: dict[str, Any]) -> Any:
    config = _read_config(directory)
    if "plan" not in (config.get("sparsify") or {}):
        raise ArtefactError(f"{directory} holds no plan in its config.json.")
    name = (config.get("architectures") or ["AutoModelForCausalLM"])[0]
    cls = getattr(transformers, name, None)
    if cls is None:
        raise ArtefactError(
            f"{directory} needs {name}, which transformers {transformers.__version__} lacks.",
            "Update transformers.",
        )
    fixed = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    model, told = cls.from_pretrained(directory, **{"dtype": "auto", **options, **fixed})
    missing = sorted(told["missing_keys"])
    if missing:
        raise ArtefactError(f"{directory} lacks {len(missing)} weights, such as {missing[0]}.")
    if host.plan_of(model) is None:
        raise ArtefactError(f"The plan of {directory} could not be applied.")
    return model


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except OSError:
        raise ArtefactError(f"{directory} has no config.json; it is not a model folder.") from None
    except ValueError:
        raise ArtefactError(f"{directory / 'config.json'} is damaged: not valid JSON.") from None
    if not isinstance(config, dict):
        raise ArtefactError(f"{directory / 'config.json'} is damaged: not a JSON object.")
    return config
