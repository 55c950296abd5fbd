"""Weights of learned indexers in saved folders of transformers models.

transformers makes a model of the class that the config names, which has no indexers, and leaves
their weights in the files aside. They are read once the plan has put the indexers in.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import cached_file

from sparsify.errors import ArtefactError
from sparsify.hosts.indexers import NAME, indexers_of
from sparsify.hosts.native_sparse import NativeIndexer

__all__ = ["expected", "read"]

_HUB_OPTIONS = ("cache_dir", "revision", "local_files_only", "token", "subfolder")


@contextlib.contextmanager
def expected(cls: Any, folder: Any) -> Iterator[None]:
    """Within it transformers does not tell of a folder's indexer weights as unexpected ones."""
    config = Path(str(folder)) / "config.json"
    if not config.is_file() or b'"learned"' not in config.read_bytes():
        yield
        return
    own = "_keys_to_ignore_on_load_unexpected"
    before = getattr(cls, own, None)
    inherited = own not in cls.__dict__
    setattr(cls, own, [*(before or ()), rf"\.{NAME}\."])
    try:
        yield
    finally:
        if inherited:
            delattr(cls, own)
        else:
            setattr(cls, own, before)


@torch.no_grad()
def read(
    model: torch.nn.Module, folder: Any, saved_as: Mapping[str, str], options: Mapping[str, Any]
) -> None:
    """Fill the indexers of a freshly loaded model from its folder.

    Args:
        folder: what `from_pretrained` was given, a path or the name of a model.
        saved_as: paths of attention modules to those that they have in the folder.
        options: those of `from_pretrained`.

    Raises:
        ArtefactError: weights are missing or have another shape.
    """
    wanted = {
        f"{saved_as[fqn]}.{NAME}.{name}": parameter
        for fqn, indexer in indexers_of(model).items()
        if not isinstance(indexer, NativeIndexer)  # transformers has loaded those
        for name, parameter in indexer.named_parameters()
    }
    if not wanted:
        return
    for name, file in _files(folder, wanted, options).items():
        value = _tensor(file, name)
        if value.shape != wanted[name].shape:
            raise ArtefactError(
                f"{folder}: {name} has shape {list(value.shape)}; "
                f"the plan needs {list(wanted[name].shape)}."
            )
        wanted[name].copy_(value)


def _files(folder: Any, names: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, str]:
    """The file of every tensor."""
    variant = f".{options['variant']}" if options.get("variant") else ""
    single = _find(folder, f"model{variant}.safetensors", options)
    if single is not None:
        return dict.fromkeys(names, single)
    index = _find(folder, f"model.safetensors.index{variant}.json", options)
    known = {} if index is None else json.loads(Path(index).read_text("utf-8"))["weight_map"]
    found: dict[str, str] = {}
    for name in names:
        file = _find(folder, known[name], options) if name in known else None
        if file is None:
            raise _missing(folder, name)
        found[name] = file
    return found


def _find(folder: Any, name: str, options: Mapping[str, Any]) -> str | None:
    more = {key: options[key] for key in _HUB_OPTIONS if options.get(key) is not None}
    found: str | None = cached_file(
        str(folder), name, _raise_exceptions_for_missing_entries=False, **more
    )
    return found


def _tensor(file: str, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        if name not in opened.keys():  # noqa: SIM118
            raise _missing(file, name)
        tensor: Tensor = opened.get_tensor(name)
        return tensor


def _missing(where: Any, name: str) -> ArtefactError:
    return ArtefactError(
        f"{where} lacks the weights of a learned indexer: {name}.", "Save the model again."
    )
