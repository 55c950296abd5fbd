"""KV caches: which layers give back every key exactly, and layers that keep block means besides, or
the index keys of a learned indexer.

A mean is taken once, when its block is complete, over the stored keys, so a decode step reads one
mean per block instead of every key and chooses exactly as the whole prefill does. transformers'
growing layer is replaced by one that keeps them; static layers are attended without. Both kinds are
replaced by one that keeps index keys where a learned indexer is in use. A layer that rounds its
keys, drops some of them or is not known is not attended sparsely at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache, StaticLayer

from sparsify.hosts.index_keys import IndexKeys, StaticIndexKeys
from sparsify.kernels.scores import mean_keys

__all__ = [
    "BlockMeans",
    "CacheUse",
    "SparseDynamicLayer",
    "SparseStaticLayer",
    "cache_use",
    "sparse_layer",
]


class BlockMeans:
    """Means of the complete blocks of a growing key cache.

    `origins` are the slots of each sequence's first real key, counted from which its blocks lie;
    None stands for slot 0 everywhere. Legend: B batch, G KV heads, S keys, D head size, N blocks.
    """

    def __init__(self) -> None:
        self.means_BGND: torch.Tensor | None = None
        self.block_size = 0
        self.origins: tuple[int, ...] | None = None
        self.last_BGD: torch.Tensor | None = None  # last key of the last known block

    def extend(
        self, keys_BGSD: torch.Tensor, block_size: int, origins: tuple[int, ...] | None
    ) -> torch.Tensor:
        """Means [B, G, ceil(S / block_size), D] of all blocks, computing only those not yet known.

        Entries of blocks that are not complete are meaningless: no query can choose them.
        """
        n_S = keys_BGSD.shape[2]
        if not self._fits(keys_BGSD, block_size, origins):
            self.means_BGND = None
        self.block_size, self.origins = block_size, origins
        # Blocks complete in every sequence are kept, those complete in some are taken each time.
        known = [] if self.means_BGND is None else [self.means_BGND]
        first = known[0].shape[2] if known else 0
        in_all = max(0, n_S - max(origins or (0,))) // block_size
        in_some = max(0, n_S - min(origins or (0,))) // block_size
        if not known or in_all > first:
            known.append(self._means(keys_BGSD, first, in_all))
        kept = self.means_BGND = torch.cat(known, 2)
        self.last_BGD = self._last_key(keys_BGSD).clone()
        parts = [kept, self._means(keys_BGSD, in_all, in_some)]
        missing = -(-n_S // block_size) - in_some
        if missing > 0:
            parts.append(kept.new_zeros(*kept.shape[:2], missing, kept.shape[3]))
        return torch.cat(parts, 2)

    def crop(self, n_S: int) -> None:
        """Forget blocks that reach beyond the first `n_S` keys."""
        if self.means_BGND is not None:
            kept = max(0, n_S - max(self.origins or (0,))) // self.block_size
            self.means_BGND = self.means_BGND[:, :, :kept]
            self.last_BGD = None

    def index(self, rows: torch.Tensor) -> None:
        """Keep, drop, repeat or reorder sequences of the batch."""
        if self.means_BGND is not None:
            rows = rows.to(self.means_BGND.device)
            self.means_BGND = self.means_BGND[rows]
            self.last_BGD = None if self.last_BGD is None else self.last_BGD[rows]
            if self.origins is not None:
                every = torch.tensor(self.origins)[rows.cpu()]
                self.origins = tuple(every.tolist())

    def reset(self) -> None:
        """Forget everything."""
        self.means_BGND = None

    def _fits(
        self, keys_BGSD: torch.Tensor, block_size: int, origins: tuple[int, ...] | None
    ) -> bool:
        """Whether the known means belong to these keys.

        A cache that was edited past the methods below shows in the last key of the last block.
        """
        means = self.means_BGND
        if means is None or (block_size, origins) != (self.block_size, self.origins):
            return False
        if means.shape[:2] != keys_BGSD.shape[:2] or means.dtype != keys_BGSD.dtype:
            return False
        if means.device != keys_BGSD.device or self._reach() > keys_BGSD.shape[2]:
            return False
        return self.last_BGD is None or torch.equal(self.last_BGD, self._last_key(keys_BGSD))

    def _reach(self) -> int:
        """Keys that the known blocks cover, in the sequence that begins last."""
        known = 0 if self.means_BGND is None else self.means_BGND.shape[2]
        return max(self.origins or (0,)) + known * self.block_size if known else 0

    def _last_key(self, keys_BGSD: torch.Tensor) -> torch.Tensor:
        return keys_BGSD[:, :, max(0, self._reach() - 1)]

    def _means(self, keys_BGSD: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Means of blocks first..last-1; where a sequence is too short for one, it is zero."""
        n_B, n_G, _n_S, n_D = keys_BGSD.shape
        means_BGND = keys_BGSD.new_zeros(n_B, n_G, max(0, last - first), n_D)
        for row, origin in enumerate(self.origins or (0,) * n_B):
            span = slice(origin + first * self.block_size, origin + last * self.block_size)
            found_GND = mean_keys(keys_BGSD[row, :, span], None, self.block_size)
            means_BGND[row, :, : found_GND.shape[1]] = found_GND
        return means_BGND


class SparseDynamicLayer(DynamicLayer):  # type: ignore[misc]
    """transformers' growing cache layer that also keeps block means, and index keys if offered.

    The means of an offloaded layer stay where they are: they are small, and the next step wants
    them. Index keys go with the keys.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.block_means = BlockMeans()
        self.index_keys = IndexKeys()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.get_seq_length()
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.index_keys.grow(before, key_states.shape[2])
        return keys, values

    def offload(self) -> None:
        super().offload()
        self.index_keys.move("cpu")

    def prefetch(self) -> None:
        super().prefetch()
        if self.is_initialized:
            self.index_keys.move(self.device)

    def block_means_for(
        self, keys: torch.Tensor, block_size: int, origins: tuple[int, ...] | None
    ) -> torch.Tensor:
        """Block means [batch, kv_heads, blocks, head_dim] of the cached `keys`."""
        return self.block_means.extend(keys, block_size, origins)

    def reset(self) -> None:
        super().reset()
        self.block_means.reset()
        self.index_keys.reset(self.get_seq_length())

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.block_means.crop(self.get_seq_length())
        self.index_keys.crop(self.get_seq_length())

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._index(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = None if self.keys is None else torch.arange(self.keys.shape[0])
        super().batch_repeat_interleave(repeats)
        if rows is not None:
            self._index(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        rows = None if self.keys is None else torch.arange(self.keys.shape[0])
        super().batch_select_indices(indices)
        if rows is not None:
            self._index(rows[indices.cpu()])

    def _index(self, rows: torch.Tensor) -> None:
        self.block_means.index(rows)
        self.index_keys.index(rows)


class SparseStaticLayer(StaticLayer):  # type: ignore[misc]
    """transformers' static cache layer that also keeps index keys."""

    def __init__(self, max_cache_len: int, **kwargs: Any) -> None:
        super().__init__(max_cache_len, **kwargs)
        self.index_keys = StaticIndexKeys(max_cache_len, empty=True)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        count = key_states.shape[2]
        slots = torch.arange(count, device=keys.device) + (self.cumulative_length - count)
        self.index_keys.write(slots)
        return keys, values

    def offload(self) -> None:
        super().offload()
        self.index_keys.move("cpu")

    def prefetch(self) -> None:
        super().prefetch()
        if self.is_initialized:
            self.index_keys.move(self.device)

    def reset(self) -> None:
        super().reset()
        self.index_keys.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.index_keys.index(beam_idx)


@dataclass(frozen=True)
class CacheUse:
    """What one attention module may make of its cache.

    `unfit` says why the keys it gives back are not all keys as they were computed; None if they
    are. `layer` keeps block means; None where the cache layer keeps none. `index_keys` are those
    of a learned indexer; None where the cache layer keeps none.
    """

    unfit: str | None = None
    layer: SparseDynamicLayer | None = None
    index_keys: IndexKeys | None = None


def _layer_classes(names: str) -> frozenset[type]:
    """Those of transformers' layer classes that this version has."""
    found = (getattr(cache_utils, name, None) for name in names.split())
    return frozenset(kind for kind in found if kind is not None)


# By identity: a subclass may store its keys in another way.
_EXACT = {SparseDynamicLayer, SparseStaticLayer} | _layer_classes(
    "DynamicLayer StaticLayer LinearAttentionAndFullAttentionLayer "
    "LinearAttentionAndStaticFullAttentionLayer"
)
_QUANTISED = tuple(_layer_classes("BaseQuantizedLayer QuantizedLayer"))


def cache_use(cache: Any, layer_idx: int, *, indexed: bool = False) -> CacheUse:
    """How layer `layer_idx` of `cache` may be used; its layer is replaced as by `sparse_layer`, and
    if it is to be `indexed`, a static one by one that keeps index keys."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, Cache) or type(cache).update is not Cache.update:
        return CacheUse(f"caches of kind {type(cache).__name__} are not known")
    layer = sparse_layer(cache, layer_idx)
    if layer is not None:
        return CacheUse(layer=layer, index_keys=layer.index_keys)
    if layer_idx >= len(cache.layers):
        return CacheUse("the cache has no layer for this module")
    static = type(cache.layers[layer_idx]) is StaticLayer
    # older versions count the tokens of a static layer elsewhere
    if indexed and static and hasattr(cache.layers[layer_idx], "cumulative_length"):
        cache.layers[layer_idx] = _indexed_static(cache.layers[layer_idx])
    index_keys = getattr(cache.layers[layer_idx], "index_keys", None)
    known = index_keys if isinstance(index_keys, IndexKeys) else None
    return CacheUse(_unfit(cache.layers[layer_idx]), index_keys=known)


def _indexed_static(layer: Any) -> SparseStaticLayer:
    """The static layer as one that keeps index keys. Whether it is empty is asked of the device,
    once."""
    replaced = SparseStaticLayer(layer.max_cache_len)
    replaced.__dict__.update(layer.__dict__)
    empty = not layer.is_initialized or int(layer.cumulative_length) == 0
    replaced.index_keys = StaticIndexKeys(layer.max_cache_len, empty=empty)
    return replaced


def _unfit(layer: Any) -> str | None:
    if type(layer) in _EXACT or type(layer) in _native_layers():
        return None
    if isinstance(layer, _QUANTISED):
        return "the cache rounds its keys (quantised)"
    if getattr(layer, "is_sliding", False):
        return "the cache keeps a window of the keys only"
    return f"cache layers of kind {type(layer).__name__} are not known"


def _native_layers() -> list[Any]:
    """MiniMax-M3's layers, which keep all keys and their indexer's. They are known once its code is
    imported."""
    names = ("DYNAMIC_LAYER_TYPE_MAPPING", "STATIC_LAYER_TYPE_MAPPING")
    mappings = (getattr(cache_utils, name, {}) for name in names)
    return [mapping.get("minimax_m3_sparse") for mapping in mappings]


def sparse_layer(cache: Any, layer_idx: int) -> SparseDynamicLayer | None:
    """The cache's layer as one that keeps block means, replacing it at first use.

    Only transformers' plain growing layer is replaced; for any other kind (static, sliding,
    quantised, or a subclass of the user's) the answer is None and means are taken from the keys.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, Cache):
        return None
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= layer_idx:  # as Cache.update would
            cache.layers.append(cache.layer_class_to_replicate())
    if layer_idx >= len(cache.layers):
        return None
    layer = cache.layers[layer_idx]
    if type(layer) is DynamicLayer:
        replaced = SparseDynamicLayer()
        replaced.__dict__.update(layer.__dict__)
        cache.layers[layer_idx] = layer = replaced
    return layer if isinstance(layer, SparseDynamicLayer) else None
