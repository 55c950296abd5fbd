"""What the attention function needs beyond its arguments, handed to it through its module.

transformers gives the attention function neither the cache nor the hidden states. A forward
pre-hook of the attention module sees both: it adds keywords, which the module passes on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from sparsify.errors import CaptureError
from sparsify.hosts.caches import CacheUse, cache_use
from sparsify.hosts.index_keys import IndexKeys, IndexUse
from sparsify.hosts.indexers import NAME
from sparsify.hosts.native_sparse import NativeIndexer
from sparsify.indexers import MSAIndexer

__all__ = ["offer", "passes_keywords"]


def offer(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: the cache of the module as `sparsify_cache`, and what its learned indexer
    makes of the hidden states as `sparsify_index`."""
    cache, layer_idx = _cache_among(args, kwargs), getattr(module, "layer_idx", None)
    indexer = _indexer_in_use(module)
    use = None
    if cache is not None and isinstance(layer_idx, int):
        use = cache_use(cache, layer_idx, indexed=indexer is not None)
        kwargs = {**kwargs, "sparsify_cache": use}
    if indexer is not None:
        kwargs = {**kwargs, "sparsify_index": _indexed(module, indexer, args, kwargs, use)}
    return args, kwargs


def passes_keywords(module: torch.nn.Module) -> bool:
    """Whether the module's forward takes any keyword."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def _indexer_in_use(module: torch.nn.Module) -> MSAIndexer | None:
    """The module's indexer while its plan is in force; one of the model's own is called by it."""
    indexer = module._modules.get(NAME)
    if not isinstance(indexer, MSAIndexer) or isinstance(indexer, NativeIndexer):
        return None
    config = getattr(module, "config", None)
    return indexer if getattr(config, "_attn_implementation", "sparsify") == "sparsify" else None


def _indexed(
    module: torch.nn.Module,
    indexer: MSAIndexer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    use: CacheUse | None,
) -> IndexUse:
    hidden = _argument(module, "hidden_states", args, kwargs)
    if not isinstance(hidden, Tensor):
        raise CaptureError(f"{type(module).__name__} is not given hidden states.")
    tables = _argument(module, "position_embeddings", args, kwargs)
    with torch.no_grad():  # the choice of blocks has no gradient
        queries, keys = indexer(hidden, tables)
    if use is None:
        return IndexUse(queries, keys)
    if use.index_keys is not None:
        use.index_keys.offer(keys)
    return IndexUse(queries, keys, use.index_keys or IndexKeys())


def _argument(
    module: torch.nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if name in kwargs:
        return kwargs[name]
    place = _place(type(module).forward, name)
    return args[place] if 0 <= place < len(args) else None


@functools.cache
def _place(forward: Callable[..., Any], name: str) -> int:
    """Place of an argument among those of the forward, behind self; -1 where it has none."""
    names = list(inspect.signature(forward).parameters)
    return names.index(name) - 1 if name in names else -1


def _cache_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cache by the names it has in transformers, or by its type."""
    named = (kwargs.get(name) for name in ("cache", "past_key_values", "layer_past"))
    placed = (value for value in args if isinstance(value, Cache))
    return next((cache for cache in (*named, *placed) if cache is not None), None)
